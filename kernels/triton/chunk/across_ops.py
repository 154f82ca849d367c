"""Systems with decays along the Value axis as custom operators on the state Z = Sᵀ, whose decays are by key.

The program is that of the transposed system, whose output is o_t = Z_tᵀ Q_t; Q is its last operand. dsf::across_mixer
gives y_t = Z_t x_t for readouts x (across.py) and never reads Q. Since Σ dy · y = Σ x · o for Q = dy, the gradient of x
is the output o with Q = dy, and the gradients of all other operands are those of o with x as its gradient
(across_gradient.py). The forward pass keeps G and the first states of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import refuse_second_order
from dsf.kernels.triton.chunk.across_calls import gradients, output
from dsf.kernels.triton.chunk.call import ChunkCall
from dsf.kernels.triton.chunk.operator import pulled_back
from dsf.kernels.triton.chunk.reads import by_row, first_reads
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.pointwise.programs import PROGRAMS


def _forward(
    operands: Sequence[Tensor], x: Tensor, state: Tensor | None, program: str, keep: bool, bounds: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """y [B, T, H, N] and the last state [B or sequences, H, N, P] of the transposed system, from x [B, T, H, P].

    keep: also what the backward pass needs.
    """
    known = PROGRAMS[program]
    n = next(int(y.shape[-1 - a.value]) for a, y in zip(known.inputs, operands, strict=False) if a.key)
    call = ChunkCall(known, [*operands, x.new_empty(*x.shape[:3], n)], bounds)
    made = call.make()
    d_first, rows, _, _ = by_row(call, x, None, None)
    start = None if state is None else state.contiguous()
    y, final, kept = output(call, rows, start)
    if known.micro > 1:
        y = y[:, known.micro - 1 :: known.micro]
    if known.before:
        first = y.new_zeros(call.ends, call.heads, n)
        if start is not None:
            first = (start * d_first.float().unsqueeze(-2)).sum(-1).to(y.dtype)
        y = call.later(y, first)
    return y.contiguous(), final.contiguous(), [*made, *kept] if keep else []


def _backward(
    dy: Tensor, dfinal: Tensor | None, operands: Sequence[Tensor], x: Tensor, state: Tensor | None,
    saved: Sequence[Tensor], program: str, needs: Sequence[bool], bounds: Tensor | None = None,
) -> tuple[Tensor, list[Tensor], Tensor]:  # fmt: skip
    """Gradients of x, of the operands that need one, in order, and of the state (empty without one)."""
    known = PROGRAMS[program]
    call = ChunkCall(known, [*operands, dy], bounds)
    call.keep(saved[: len(known.made)])
    d_first, rows, _, _ = by_row(call, x, None, None)
    dx, found, first = gradients(call, rows, dfinal, state is not None, saved[len(known.made) :])
    if known.micro > 1:
        dx = dx[:, known.micro - 1 :: known.micro]
        found = {name: y.unflatten(1, (call.tokens, known.micro)) for name, y in found.items()}
    if known.before:
        of_first = dx.new_zeros(call.ends, call.heads, x.shape[-1])
        if state is not None:
            of_first = (state * call.first(dy).float().unsqueeze(-1)).sum(-2).to(dx.dtype)
            first = first + first_reads(call, d_first)
        dx = call.later(dx, of_first)
    wanted = {a.role: y for a, y, need in zip(known.inputs, operands, needs, strict=False) if need}
    return dx.contiguous(), pulled_back(call, wanted, found), first.contiguous()


class _Differentiable(torch.autograd.Function):
    """The operator with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, program: str, bounds: Tensor | None, state: Tensor | None, x: Tensor, *operands: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            y, final, saved = across_mixer(list(operands), x, state, program, True, bounds)
        ctx.save_for_backward(bounds, state, x, *operands, *saved)
        ctx.program, ctx.count, ctx.like = program, len(operands), (y.shape, y.dtype)
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        refuse_second_order()
        bounds, state, x, *rest = ctx.saved_tensors
        operands, saved = rest[: ctx.count], rest[ctx.count :]
        if dy is None:
            dy = x.new_zeros(ctx.like[0], dtype=ctx.like[1])
        needs = list(ctx.needs_input_grad[4:])
        dx, found, first = across_mixer_backward(dy, dfinal, operands, x, state, saved, ctx.program, needs, bounds)
        given = iter(found)
        return None, None, None if state is None else first, dx, *(next(given) if need else None for need in needs)


def _differentiable(
    operands: Sequence[Tensor], x: Tensor, state: Tensor | None, program: str, keep: bool, bounds: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    return *_Differentiable.apply(program, bounds, state, x, *operands), []


across_mixer = operator(
    "across_mixer(Tensor[] operands, Tensor x, Tensor? state, str program, bool keep, Tensor? bounds=None) -> "
    "(Tensor, Tensor, Tensor[])",
    _forward, _differentiable,
)  # fmt: skip
across_mixer_backward = operator(
    "across_mixer_backward(Tensor dy, Tensor? dfinal, Tensor[] operands, Tensor x, Tensor? state, Tensor[] saved, "
    "str program, bool[] needs, Tensor? bounds=None) -> (Tensor, Tensor[], Tensor)",
    _backward,
)
