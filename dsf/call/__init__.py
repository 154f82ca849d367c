"""One call: input checks, plan, packed sequences, and the run itself."""
