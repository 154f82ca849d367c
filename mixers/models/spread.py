"""What models do, and refuse, where ranks share their sequences (dsf.parallel.attach)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dsf import Packing
from dsf.language.errors import InputError
from dsf.mixers.models.parts import next_labels


def targets_of(
    model: Any, labels: Tensor | None, moved: Tensor | None, cu_seqlens: Tensor | Packing | None
) -> Tensor | None:
    """The targets of the tokens; None without labels. labels: as of `CausalLM.forward`. moved: its shift_labels. Raises
    InputError if both are given, and for labels of a sequence that ranks share."""
    if labels is not None and moved is not None:
        raise InputError("labels and shift_labels are both given; shift_labels are labels that were moved on already")
    if labels is None:
        return None if moved is None else moved.long()
    world = world_of(model)
    if world is not None and world.ranks > 1:
        raise InputError(
            f"labels: the mixers share the sequence over {world.ranks} ranks (dsf.parallel.attach), and a rank's "
            "last token predicts a token of another rank; move whole labels on by one place, cut them, and give "
            "shift_labels=cp.shard(dsf.models.next_labels(labels))"
        )
    return next_labels(labels, cu_seqlens)


def world_of(model: Any) -> Any:
    """The ranks in other processes that share the sequences of a model's mixers, or None."""
    for block in model._blocks():  # not `next` with a default, at which torch.compile of torch 2.8 fails
        world = getattr(block.mixer, "parallel", None)
        if hasattr(world, "shard"):
            return world
    return None


def refuse_decoding(name: str, model: Any) -> None:
    """Raise InputError for decoding while ranks share the sequences: every rank would take the new token for one of its
    own, behind or in front of the other ranks' tokens."""
    world = world_of(model)
    if world is not None and world.ranks > 1:
        raise InputError(
            f"{name}: the mixers share the sequence over {world.ranks} ranks (dsf.parallel.attach), and a new token is "
            "of all of them; call dsf.parallel.attach(model, None) first: states are whole on every rank"
        )


def padding_of(model: Any, x: Tensor, bounds: Tensor | None, find: Callable[[], Any]) -> Any:
    """The padding that `find` finds of a call, or None. x: the tokens [B, T, ...]; bounds: cu_seqlens.

    Raises InputError, on every rank, if ranks share the sequences and this rank's mask or positions say where some
    begin or end, since no rank knows the whole row then.
    """
    world = world_of(model)
    if world is None or world.ranks == 1:
        return find()
    from dsf.parallel.agree import agree_layer

    def look() -> None:
        if find() is not None:
            raise InputError(
                f"{type(model).__name__}: attention_mask has padding or position_ids begin again, and the mixers share "
                f"the sequence over {world.ranks} ranks (dsf.parallel.attach); leave padding out of the whole "
                "sequences, and give cu_seqlens of all of them"
            )

    agree_layer(world, model, x, None, bounds, look)
    look()
    return None
