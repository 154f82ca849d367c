"""`dsf.check`: the laws of a recurrence, the examples on which they are tested, and the report."""
