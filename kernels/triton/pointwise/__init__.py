"""Printed functions run a token and head at a time: prologues, readouts, decode steps."""
