"""The language: what a recurrence is written in, traced, and brought to its normal form."""
