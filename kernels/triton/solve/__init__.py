"""Readouts that are solves with sums of outer products (MesaNet): one launch for the sums, one for all solutions."""
