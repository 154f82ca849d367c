"""Modules over ranks: layers that share a sequence."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from dsf.call.recurrence import Recurrence
from dsf.language.errors import InputError
from dsf.parallel.world import World


def attach(model: nn.Module, world: World | None) -> nn.Module:
    """Every mixer of the model shares its sequence with these ranks from now on (None: with nobody any more).

    As if each of its calls had parallel=world. Positions, losses and everything else outside of the mixers are the
    model's: `world.shard` cuts its inputs, `world.positions` says which tokens they are. Returns the model.

    Raises InputError for a model without mixers.
    """
    found = list(mixers_of(model))
    if not found:
        raise InputError(f"{type(model).__name__} has no dsf mixer that a sequence could be shared by")
    if world is not None and not isinstance(world, World):
        raise InputError(f"attach takes a dsf.parallel.Sequence, got {type(world).__name__}")
    for mixer in found:
        mixer.parallel = world  # type: ignore[assignment]
    return model


def mixers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that run a recurrence over tokens."""
    for module in model.modules():
        if isinstance(getattr(module, "recurrence", None), Recurrence) and hasattr(module, "parallel"):
            yield module
