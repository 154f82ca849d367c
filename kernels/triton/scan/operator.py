"""The fused scan as custom operators, dsf::fused_scan and dsf::fused_scan_adjoint.

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
from dsf.kernels.triton.scan.launches import HOLES, fused_scan, sizes_of


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


scan = operator(
    "fused_scan(Tensor[] operands, Tensor? state, str hole, bool keep, bool wide, Tensor? ends, SymInt sequences, "
    "Tensor[]? held=None) -> (Tensor, Tensor, Tensor)",
    fused_scan, _differentiable,
)  # fmt: skip
scan_adjoint = operator(
    "fused_scan_adjoint(Tensor dy, Tensor? dfinal, Tensor[] operands, Tensor saved, str hole, bool[] needs, "
    "Tensor? ends, Tensor[]? held=None) -> (Tensor[], Tensor)",
    fused_scan_adjoint,
)
