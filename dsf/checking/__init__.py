"""`dsf.check`: the laws of a recurrence, the examples they are tried on, and the report."""
