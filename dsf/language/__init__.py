"""The language of declarations: annotations, expressions and operators, tracing, and the normal form."""
