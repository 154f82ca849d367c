"""`dsf.models`: the names of dsf.mixers.models, where the code is; `import dsf.models.hf` needs transformers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsf.mixers.models import *  # noqa: F403

_models = importlib.import_module("dsf.mixers.models")  # by name: this room is below the mixers
__all__ = list(_models.__all__)


if not TYPE_CHECKING:  # or every name would be Any

    def __getattr__(name: str) -> Any:
        if name == "hf":
            return importlib.import_module("dsf.models.hf")
        if name.startswith("_"):
            raise AttributeError(f"module 'dsf.models' has no attribute {name!r}")
        return getattr(_models, name)


def __dir__() -> list[str]:
    return __all__
