"""Conversion, recording, spectra, memory, reports and the command line."""
