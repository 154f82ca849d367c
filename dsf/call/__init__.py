"""One call: its tensors bound to the declaration, the plan, packed sequences, and what runs."""
