"""The fused scan as custom operators, dsf::fused_scan and dsf::fused_scan_adjoint, and of a shard dsf::scan_shard.

They take the registered name of a spec's holes, so that torch.compile, autocast, checkpointing and graph capture see
plain operators on tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import refuse_second_order
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.scan.gradients import fused_scan_adjoint
from dsf.kernels.triton.scan.launches import HOLES, _arguments, _timed, combined, fused_scan, launch, sizes_of, summed
from dsf.kernels.triton.scan.tiles import Cotangents


class _Differentiable(torch.autograd.Function):
    """The operator with its gradient; faster on the host than the wrapper of torch.library."""

    @staticmethod
    def forward(
        ctx: Any, hole: str, wide: bool, ends: Tensor | None, sequences: int, state: Tensor | None, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            y, final, saved = scan(list(operands), state, hole, True, wide, ends, sequences)
        ctx.save_for_backward(ends, saved, *operands)
        ctx.hole, ctx.has_state = hole, state is not None
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)
        return y, final, saved

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None, _: Any) -> tuple[Any, ...]:
        refuse_second_order()
        ends, saved, *operands = ctx.saved_tensors
        if dy is None:
            s = sizes_of(HOLES[ctx.hole], operands)
            dy = saved.new_zeros(s.batch, s.tokens, s.heads, s.p)
        needs = list(ctx.needs_input_grad[5:])
        found, initial = scan_adjoint(dy, dfinal, operands, saved, ctx.hole, needs, ends)
        given = iter(found)
        grads = [next(given) if need else None for need in needs]
        return None, None, None, None, initial if ctx.has_state else None, *grads


def _differentiable(
    operands: Sequence[Tensor], state: Tensor | None, hole: str, keep: bool, wide: bool, ends: Tensor | None, count: int
) -> Any:
    return _Differentiable.apply(hole, wide, ends, count, state, *operands)


def _shard(
    operands: Sequence[Tensor], dy: Tensor | None, state: Tensor | None, hole: str, moves: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The effect of a shard of a sequence on states, from the summaries of its segments, which are computed once:
    (the state after T tokens [B, H, N, P], or with dy the gradient of the state before them; M; held).

    state: the one before the tokens (with dy the gradient of the one after them), or None for zeros. M: if `moves`, the
    product of the tokens' decays [B, H, N, P]. held: for the scan (or its adjoint) of the same operands.
    """
    spec = HOLES[hole]
    sizes = sizes_of(spec, operands)
    like = _timed(spec, operands)
    go = launch(spec, sizes, dy is not None, like.device)
    args = _arguments(spec, operands, sizes, spec.by_entry(sizes))
    given = Cotangents(None if dy is None else dy.contiguous(), None, None)
    sums, local, product = summed(go, spec, args, given, like, whole=True)
    first = None if state is None else state.contiguous()
    every = combined(sums, local, product, first, dy is not None, keep=True)
    end = every[:, :, 0 if dy is not None else -1].contiguous()
    move = product[:, :, :-1].prod(2) if moves else end.new_empty(0)
    return end, move, [local, product]


def _behind(
    made: Any, operands: Sequence[Tensor], state: Tensor | None, hole: str, keep: bool, wide: bool,
    ends: Tensor | None, *_: Any,
) -> tuple[Any, ...] | None:  # fmt: skip
    """The likeliest call of gradients: of a dy like y, and of the last state where the first has one. None where none
    are wanted."""
    if not keep:
        return None
    y, final, saved = made
    dfinal = final if state is not None and state.requires_grad else None
    return scan_adjoint, y, dfinal, operands, saved, hole, [x.requires_grad for x in operands], ends


scan = operator(
    "fused_scan(Tensor[] operands, Tensor? state, str hole, bool keep, bool wide, Tensor? ends, SymInt sequences, "
    "Tensor[]? held=None) -> (Tensor, Tensor, Tensor)",
    fused_scan, _differentiable, _behind,
)  # fmt: skip
scan_adjoint = operator(
    "fused_scan_adjoint(Tensor dy, Tensor? dfinal, Tensor[] operands, Tensor saved, str hole, bool[] needs, "
    "Tensor? ends, Tensor[]? held=None) -> (Tensor[], Tensor)",
    fused_scan_adjoint,
)
scan_shard = operator(
    "scan_shard(Tensor[] operands, Tensor? dy, Tensor? state, str hole, bool moves) -> (Tensor, Tensor, Tensor[])",
    _shard,
)
