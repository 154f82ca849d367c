"""Conversion and recording of models, measures of what they remember, reports, and the command line."""

from dsf.analysis import convert, measures
from dsf.analysis.record import record

__all__ = ["convert", "measures", "record"]
