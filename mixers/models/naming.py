"""Mixers as text, so that a configuration can be written down and read again."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsf import Recurrence
from dsf.language.errors import InputError
from dsf.mixers import LAYERS, ZOO, BothWays, Mixer, canonical, constructor_of, layer_for
from dsf.mixers._files import is_file

Named = (str, Recurrence, type)  # what may stand for one mixer


def mixer_name(mixer: Any) -> str:
    """The text that stands for a mixer in a configuration: a name of the zoo or `file.py:function`.

    mixer: such a text, a Recurrence or a class of layers. Other names ("attention") become the zoo's own, by which
    models know which mixer gets rotary positions. Raises InputError for a mixer that no such text would find again.
    """
    if isinstance(mixer, str):
        return mixer if is_file(mixer) else canonical(mixer)
    for entry in ZOO:
        if mixer is entry.recurrence or (entry.module is not None and mixer is entry.module):
            return entry.name
    for name, layer in LAYERS.items():
        if mixer is layer:
            return name
    if isinstance(mixer, Recurrence):
        return _in_file(mixer)
    if isinstance(mixer, type) and issubclass(mixer, Mixer):
        raise InputError(
            f"{mixer.__name__} is a class outside the zoo, which a configuration cannot name; give its recurrence, in "
            "a file, as file.py:function"
        )
    given = f"the class {mixer.__name__}" if isinstance(mixer, type) else type(mixer).__name__
    raise InputError(f"a mixer is a name of the zoo, file.py:function, a Recurrence or a class of layers, got {given}")


def check_causal(mixer: Any) -> None:
    """Raise InputError for layers that read in both directions."""
    make = constructor_of(mixer)
    if isinstance(make, type) and issubclass(make, BothWays):
        raise InputError(
            f"{getattr(mixer, '__name__', mixer)} reads its sequences in both directions, so that tokens would see "
            "those they are to predict; a causal language model cannot be made of it"
        )


def layer_in_model(mixer: Any, d_model: int, **options: Any) -> Mixer:
    """`layer_for`. Raises InputError also for a layer whose calls need more tensors than a model gives."""
    layer = layer_for(mixer, d_model, **options)
    needs = getattr(layer, "needs", "")
    if needs:
        raise InputError(
            f"{type(layer).__name__} of these options takes {needs}= in every call, and a model gives its layers no "
            f"such tensor: {', '.join(f'{name}={value!r}' for name, value in options.items())}"
        )
    return layer


def _in_file(mixer: Recurrence) -> str:
    """`file.py:name`, where the file is one that is imported and has the recurrence under its name."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and vars(module).get(mixer.__name__) is mixer and Path(file).is_file():
            return f"{Path(file).resolve()}:{mixer.__name__}"
    raise InputError(
        f"{mixer.__name__} is not defined in a file under that name, so that a saved model could not find it again; "
        "write it into a file and give file.py:function"
    )


def beside(fields: dict[str, Any], folder: Any) -> dict[str, Any]:
    """A configuration's fields, in which mixers in files are read from the files of these names in the model's folder,
    if it has them.

    Those files are what was trained. Files at the old places may have been edited since, or be others.
    """

    def found(mixer: str) -> str:
        path, colon, name = mixer.rpartition(":")
        copy = Path(str(folder)) / Path(path).name
        return f"{copy.resolve()}:{name}" if colon and copy.is_file() else mixer

    if folder is None or not all(isinstance(m, str) for m in fields.get("mixers", ())):
        return fields
    moved = {"mixers": [found(m) for m in fields.get("mixers", ())]}
    moved["mixer_options"] = {found(m): o for m, o in fields.get("mixer_options", {}).items()}  # type: ignore[assignment]
    return {**fields, **{k: v for k, v in moved.items() if k in fields}}


def takes(make: Callable[..., Any], option: str) -> bool:
    """Whether a constructor (or a partial of one) names this argument."""
    return option in inspect.signature(make).parameters


__all__ = ["Named", "check_causal", "constructor_of", "layer_in_model", "mixer_name", "takes"]
