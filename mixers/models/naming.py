"""Mixers as text, so that a configuration can be written down and read again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dsf import Recurrence
from dsf.language.errors import InputError
from dsf.mixers import ZOO, Mixer, get
from dsf.mixers.models._shim import find_mixer, layer_for

Named = (str, Recurrence, type)  # what may stand for one mixer


def mixer_name(mixer: Any) -> str:
    """The text that stands for a mixer: a name of the zoo or `file.py:function`, from that, a Recurrence or a class.

    Raises InputError for what cannot be found again by such a text.
    """
    if isinstance(mixer, str):
        return mixer
    for entry in ZOO:
        if mixer is entry.recurrence or (entry.module is not None and mixer is entry.module):
            return entry.name
    if isinstance(mixer, Recurrence) or (isinstance(mixer, type) and issubclass(mixer, Mixer)):
        return _in_file(mixer)
    raise InputError(
        f"a mixer is a name of the zoo, file.py:function, a Recurrence or a class of layers, got {type(mixer).__name__}"
    )


def _in_file(mixer: Any) -> str:
    """`file.py:name`, where the file is one that is imported and has the mixer under that name."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and getattr(module, mixer.__name__, None) is mixer and Path(file).is_file():
            return f"{Path(file).resolve()}:{mixer.__name__}"
    raise InputError(
        f"{mixer.__name__} is not defined in a file under that name, so that a saved model could not find it again; "
        "write it into a file and give file.py:function"
    )


def resolve(mixer: str) -> Any:
    """What a text stands for, as `layer_for` takes it. Raises InputError, with near names."""
    return find_mixer(mixer)


__all__ = ["Named", "get", "layer_for", "mixer_name", "resolve"]
