"""The zoo: one file a mixer."""
