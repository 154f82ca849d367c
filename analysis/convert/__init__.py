"""Conversion of existing models: afterwards their sequence mixers run as dsf recurrences.

`find` finds the mixers. `cores`, `forwards`, `softmax` and `fir` hold what replaces each kind of mixer. `patch` changes
a model and undoes the change. `layer` runs a converted mixer's recurrence. `conversion` joins these.
"""

from dsf.analysis.convert.conversion import Converted, convert, register
from dsf.analysis.convert.cores import CORES, Core
from dsf.analysis.convert.find import LeftAlone, find
from dsf.analysis.convert.fir import fir, fir_inputs
from dsf.analysis.convert.forwards import FORWARDS, Forward
from dsf.analysis.convert.layer import ConversionError, Layer, Run

__all__ = [
    "CORES", "FORWARDS", "ConversionError", "Converted", "Core", "Forward", "Layer", "LeftAlone", "Run", "convert",
    "find", "fir", "fir_inputs", "register",
]  # fmt: skip
