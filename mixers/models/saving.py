"""Saving over an earlier save, so that a full disk or a signal leaves one of the two whole."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsf.language.errors import InputError
from dsf.mixers._whole import whole_files

Weights = dict[str, Any] | None


def save_over(
    save: Callable[..., None], model: Any, weights_of: Callable[[Weights], Weights], *args: Any, **kwargs: Any
) -> None:
    """Call save_pretrained of a model; files in its folder are replaced once all of the new ones are written.

    weights_of: what is saved for the state dict that was given, or None.

    Weights of the earlier save that would be read before the new ones, or with them, are removed. Where ranks write
    one folder together, and on the way to the hub, files are overwritten as transformers does it, one by one.

    Raises InputError, before anything is written, for weights of which each rank has a part.
    """
    given = inspect.signature(save).bind(*args, **kwargs)
    options = given.arguments
    if not options.get("distributed_checkpoint"):  # which ranks write together
        _check_whole(dict(model.named_parameters()) if options.get("state_dict") is None else options["state_dict"])
    options["state_dict"] = weights_of(options.get("state_dict"))
    folder = Path(options["save_directory"])
    shared = options.get("push_to_hub") or options.get("distributed_checkpoint")
    if shared or not folder.is_dir() or not any(folder.iterdir()):
        save(*given.args, **given.kwargs)
        return
    names = whole_files(folder, lambda other: save(other, *given.args[1:], **given.kwargs))
    variant = f".{options['variant']}" if options.get("variant") else ""
    weights = re.compile(rf"model{re.escape(variant)}(-\d{{5}}-of-\d{{5}})?\.safetensors")
    if any(weights.fullmatch(name) for name in names):
        for file in folder.iterdir():
            if weights.fullmatch(file.name) and file.name not in names:
                file.unlink()


def _check_whole(weights: dict[str, Any]) -> None:
    name = next((name for name, x in weights.items() if hasattr(x, "device_mesh")), None)
    if name is not None:
        raise InputError(
            f"save_pretrained: `{name}` is a DTensor, and files hold whole weights; on every rank gather them, "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)), and give them on the first one as state_dict="
        )
