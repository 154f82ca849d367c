"""Heads of one channel, run as the channels of one head: the scan's lanes are channels, of which P = 1 would use one.

Every input with an own entry for each head gets a Value axis in place of its heads. What all heads share has none, so
that its gradient is summed in the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from dsf.call.bind import Bound, Sizes
from dsf.language.annotations import Input
from dsf.language.derived import derived, interned
from dsf.language.expr import REDUCTIONS, VALUE, Expr, const, rewritten
from dsf.language.frame import map_system
from dsf.language.spec import Spec


def takes(spec: Spec, sizes: Sizes) -> bool:
    """True for calls whose heads run as channels."""
    return sizes.p == 1 and sizes.heads > 1 and spec.rule is None


@derived
def as_channels(spec: Spec, shared: frozenset[str]) -> Spec:
    """The system of one head whose channels are the heads of `spec`, which has P = 1. shared: inputs of one head."""
    axis = frozenset({VALUE})
    inputs = tuple(
        Input(x.name, replace(x.kind, axes=x.kind.axes - axis if x.name in shared else x.kind.axes | axis))
        for x in spec.inputs
    )
    axes = {x.name: x.kind.axes for x in inputs}

    def of_node(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op == "input":
            return Expr("input", (), node.attrs, axes[node.attrs[0]])
        if node.op == "size" and node.attrs[0] == VALUE:
            return const(1)
        return args[0] if REDUCTIONS.get(node.op) == VALUE else None  # over the one channel

    def change(x: Expr) -> Expr:
        return rewritten(x, of_node)

    system = map_system(replace(spec.system, gauge=None, window=None), change)
    return interned(replace(spec, inputs=inputs, system=system))


def moved(
    spec: Spec, bound: Bound, timed: Mapping[str, Tensor], state: Tensor | None
) -> tuple[Spec, Bound, dict[str, Tensor], Tensor | None]:
    """The call of `as_channels` for a call that `takes` allows: its spec, inputs and initial states."""
    heads = bound.sizes.heads
    axis = {i.name: bound.tensors[i.name].dim() - len(i.kind.axes) - 1 for i in spec.inputs}
    shared = frozenset(name for name, at in axis.items() if bound.tensors[name].shape[at] == 1)

    def wide(name: str, x: Tensor) -> Tensor:
        """x with its heads in place of its channel, as the last axis."""
        at = axis[name]
        x = x.squeeze(-1) if VALUE in kinds[name].axes else x
        if name in shared:
            return x
        if x.shape[at] != heads:
            x = x.repeat_interleave(heads // x.shape[at], at)
        return x.movedim(at, -1).unsqueeze(at)

    kinds = {i.name: i.kind for i in spec.inputs}
    tensors = {name: wide(name, x) for name, x in bound.tensors.items()}
    found = {name: wide(name, x) for name, x in timed.items()}
    start = None if state is None else turned(state)
    sizes = replace(bound.sizes, heads=1, p=heads)
    return as_channels(spec, shared), replace(bound, tensors=tensors, sizes=sizes), found, start


def turned(state: Tensor) -> Tensor:
    """States [B, H, N, 1] as [B, 1, N, H], and the other way round."""
    return state.transpose(1, 3).contiguous()
