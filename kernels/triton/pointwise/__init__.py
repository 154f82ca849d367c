"""Kernels that run printed functions for every token and head: prologues, readouts, decode steps."""
