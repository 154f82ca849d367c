"""`ModelState`: the state of a model, one `MixerState` a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsf import Packing
from dsf.language.errors import InputError
from dsf.mixers._states import put
from dsf.mixers.models.padding import Unpadded


def mapped(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A mixer's state with `function` applied to each of its tensors."""
    return pytree.tree_map_only(Tensor, function, state)


def rows_of(state: Any) -> int | None:
    """The number of sequences in a mixer's state: the rows of its first tensor; None without tensors."""
    leaves = tensors_of(state)
    return leaves[0].shape[0] if leaves else None


@dataclass(frozen=True, eq=False)
class ModelState:
    """The states of all layers of a model. Calls return new ones; only steps with in_place=True overwrite its tensors.

    layers: the state of each block's mixer. names: of the mixers' recurrences, which tell states of equal shapes apart;
    None where unknown. It is no pytree, so that wrappers that cast a module's arguments (FSDP2's mixed precision) leave
    it in float32.
    """

    layers: tuple[Any, ...]
    names: tuple[str | None, ...] = ()

    def renewed(self, layers: Iterable[Any]) -> ModelState:
        """The state of the same model with these states of the layers."""
        return ModelState(tuple(layers), self.names)

    def select(self, rows: Tensor) -> ModelState:
        """The state of some sequences, in the order of rows, int64 [R], which may repeat a sequence (beams)."""
        return self.renewed(mapped(s, lambda x: x.index_select(0, rows.to(x.device))) for s in self.layers)

    def detach(self) -> ModelState:
        """The state without its autograd graph, for truncated backpropagation."""
        return self.renewed(mapped(s, Tensor.detach) for s in self.layers)

    def numel(self) -> int:
        """How many numbers the states of all sequences have."""
        leaves = pytree.tree_leaves([list(pytree.tree_leaves(s)) for s in self.layers])
        return sum(x.numel() for x in leaves if isinstance(x, Tensor) and x.is_floating_point())

    def __len__(self) -> int:
        return len(self.layers)


torch.serialization.add_safe_globals([ModelState])  # torch.load takes it by its defaults


def sequences_of(cu_seqlens: Tensor | Packing) -> int:
    """The number of sequences of these boundaries."""
    return len(cu_seqlens) if isinstance(cu_seqlens, Packing) else cu_seqlens.shape[0] - 1


def checkpointed(block: Any, x: Tensor, state: Any, *more: Any) -> tuple[Tensor, Any]:
    """A block's result for x and a mixer's state, by its checkpointing function, with gradients through both states."""
    again = block._gradient_checkpointing_func
    if not getattr(again, "keywords", {}).get("use_reentrant"):
        return again(block.__call__, x, state, *more)
    leaves, form = pytree.tree_flatten(state)  # this kind gives gradients to tensors that are arguments themselves
    forms: list[Any] = []

    def apart(x: Tensor, *leaves: Any) -> tuple[Any, ...]:
        y, after = block(x, pytree.tree_unflatten(leaves, form), *more)
        parts, made = pytree.tree_flatten(after)
        forms[:] = [made]
        return y, *parts

    y, *parts = again(apart, x, *leaves)
    return y, pytree.tree_unflatten(parts, forms[0])


class Kept:
    """A mixer's state, of any kind, between calls, and its number of tokens.

    static: later states take the memory of the first, where a captured graph reads them. Decode steps write there. What
    other calls return is copied there, unless it needs a gradient. Attention's keys and values move in the first step,
    and when their memory is full.
    """

    begun = False  # whether every sequence's last place had a token

    def __init__(self, static: bool = False) -> None:
        self.static = static
        self.state: Any = None
        self.seen = 0

    def store(self, state: Any, tokens: int, padding: Unpadded | None = None) -> None:
        """Keep the state after `tokens` more places, which hold tokens or padding."""
        self.seen += tokens
        if padding is not None and padding.empty:
            return
        self.begun = padding is None or padding.begun
        held = self.state
        over = self.static and held is not None and same_shapes(held, state)
        over = over and not any(x.requires_grad for x in tensors_of((held, state)))  # a backward pass reads the old one
        self.state = put(held, state) if over else state
        self.is_initialized = True

    def each(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to every tensor of the state."""
        self.state = mapped(self.state, function)


def tensors_of(state: Any) -> list[Tensor]:
    """The tensors of a mixer's state, in a fixed order."""
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]


def same_shapes(one: Any, other: Any) -> bool:
    """Whether two states have tensors of the same shapes, types and devices."""
    return [(x.shape, x.dtype, x.device) for x in tensors_of(one)] == [
        (x.shape, x.dtype, x.device) for x in tensors_of(other)
    ]


def recurrence_of(mixer: Any) -> str | None:
    """The name of a mixer's recurrence, None where it has none."""
    return getattr(getattr(mixer, "recurrence", None), "name", None)


def check_state(state: Any, mixers: Sequence[Any], sequences: int | None) -> None:
    """Raise InputError for a state of another model, or of another number of sequences; None: of any number."""
    layers = len(mixers)
    if not isinstance(state, ModelState):
        raise InputError(f"state is of type {type(state).__name__}, expected the .state of an earlier call")
    if len(state) != layers:
        raise InputError(f"the state is of a model of {len(state)} layers, this one has {layers}")
    for i, (name, mixer) in enumerate(zip(state.names, mixers, strict=False)):
        if None not in (name, recurrence_of(mixer)) and name != recurrence_of(mixer):
            own = f"of {name}, and this layer is {recurrence_of(mixer)}"
            raise InputError(f"the state of layer {i} is of another model: it is {own}")
    rows = rows_of(state.layers[0]) if layers else None
    if None not in (rows, sequences) and rows != sequences:
        raise InputError(f"the state holds {rows} sequences, the call has {sequences}")


def check_fit(state: Any, mixer: Any, index: int) -> None:
    """Raise InputError for a state of another layer, if the mixer can tell. Recurrences check their own part."""
    if not hasattr(mixer, "check_state"):
        raise InputError(
            f"layer {index}, {type(mixer).__name__}, keeps no state, so that nothing goes on from earlier tokens: run "
            "whole sequences, in transformers with use_cache=False"
        )
    try:
        mixer.check_state(state)
    except InputError as error:
        raise InputError(f"the state of layer {index} is of another model: {error}") from None
