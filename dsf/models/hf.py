"""`dsf.models.hf`: another name of dsf.mixers.models.hf, the same module, so that its classes are registered once."""

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsf.mixers.models.hf import *  # noqa: F403

sys.modules[__name__] = importlib.import_module("dsf.mixers.models.hf")
