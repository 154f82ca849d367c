"""Calls with reverse=True: every sequence from its last token to its first.

Done here once for all forms and kernels: per-token inputs are flipped along time, the boundaries and states of packed
sequences are put in reverse order, the usual call runs, and its outputs are flipped back. This costs one copy of every
per-token input and of y, and as many of their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast, overload

from torch import Tensor

from dsf.call.bind import Sizes
from dsf.call.cost import io_bytes
from dsf.call.packing import Packing
from dsf.call.plan import Plan
from dsf.kernels.attention import KVCache
from dsf.kernels.reversal import reversed_tokens
from dsf.language.errors import InputError
from dsf.language.spec import Spec

Rows = TypeVar("Rows", bound="Tensor | KVCache | None")


def flipped(spec: Spec, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs by name, per-token ones flipped along time."""
    timed = {i.name for i in spec.inputs if i.kind.time}
    return {name: reversed_tokens(x) if name in timed else x for name, x in tensors.items()}


@overload
def flipped_bounds(bounds: list[int]) -> list[int]: ...
@overload
def flipped_bounds(bounds: Tensor) -> Tensor: ...
def flipped_bounds(bounds: list[int] | Tensor) -> list[int] | Tensor:
    """Boundaries [S + 1] of packed sequences in the flipped row, where the last sequence comes first."""
    if isinstance(bounds, Tensor):
        return (bounds[-1] - bounds).flip(0)
    return [bounds[-1] - place for place in reversed(bounds)]


def flipped_packing(cu_seqlens: Tensor | Packing) -> Tensor | Packing:
    """`flipped_bounds`, also of a Packing."""
    return cu_seqlens.backwards if isinstance(cu_seqlens, Packing) else flipped_bounds(cu_seqlens)


def flipped_rows(state: Rows, packed: bool) -> Rows:
    """States [S, ...] in reverse order for packed sequences; unchanged for other calls."""
    if packed and isinstance(state, KVCache):
        other = state.map(lambda x: x.flip(0))
        return cast(Rows, other._replace(lengths=state.lengths.flip(0)))
    return cast(Rows, state.flip(0)) if packed and isinstance(state, Tensor) else state


def planned(spec: Spec, plan: Plan, sizes: Sizes, dtype: Any) -> Plan:
    """The plan of a call with reverse=True: flipping reads and writes per-token inputs and y once more."""
    timed = replace(spec, inputs=tuple(i for i in spec.inputs if i.kind.time))
    return replace(
        plan,
        bytes=plan.bytes + 2 * io_bytes(timed, sizes, dtype),
        reason=plan.reason + "; backwards: per-token inputs are flipped before it, and y after",
    )


def refuse(name: str, what: str, instead: str) -> None:
    """Raise the InputError of a call that cannot run backwards."""
    raise InputError(f"{name}: {what} has no reverse=True: {instead}")
