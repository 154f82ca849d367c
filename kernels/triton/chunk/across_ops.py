"""Systems with decays along the Value axis as custom operators on the state Z = Sᵀ, whose decays are by key.

The program is that of the transposed system, whose output is o_t = Z_tᵀ Q_t; Q, its last operand, stands for no input.
dsf::across_mixer gives y_t = Z_t x_t for readouts x (across.py). Since Σ dy · y = Σ x · o for Q = dy, the gradient of
x is the output o with Q = dy, and the gradients of all other operands are those of o with x as its gradient: the
backward pass is both passes of the chunk kernels, with one prologue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import refuse_second_order
from dsf.kernels.triton.chunk import matrix, operator
from dsf.kernels.triton.chunk.across import Across, prepare_across, read_across, read_far_across
from dsf.kernels.triton.chunk.call import ChunkCall
from dsf.kernels.triton.chunk.keywise import GROUP
from dsf.kernels.triton.chunk.walks import forward
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.operators import operator as custom
from dsf.kernels.triton.pointwise.programs import PROGRAMS


class _Call(matrix._Call):
    """What all launches share; its q is k, for no row is read along the usual axis."""

    def _prepare(self, g: Tensor, kept: Sequence[Tensor] | None) -> None:
        """G, and the rows that the walk writes into states."""
        length, fine = self.chunks * self.tiles.chunk, 2 if self.fine else 1
        self.running = self.empty(fine * self.lanes, length, self.n, dtype=torch.float32)
        rows = [self.empty(self.batch, self.heads, length, self.n) for _ in range(self.terms.keys)]
        self.writes, self.rest_of_writes = rows[0].transpose(1, 2), rows[-1].transpose(1, 2)
        self.config = Across(**self.common, BK=self.key_block, LEVELS=self.levels, TERMS=self.terms.keys)
        self.blocks = -(-self.n // self.key_block)
        launch(
            prepare_across, (self.chunks * self.blocks, self.lanes),
            self.struct(self.k), self.struct(g), self.running, rows[0], rows[-1], self.chunk_table, self.measures,
            C=self.config, num_warps=self.tiles.prepare_warps,
        )  # fmt: skip

    def output(self, x: Tensor, states: Tensor) -> Tensor:
        """y [B, T, H, N] from readouts x [B, T, H', P] and the first states of chunks."""
        y = self.empty(self.batch, self.tokens, self.heads, self.n, dtype=x.dtype)
        for kernel, programs in ((read_across, self.chunks), (read_far_across, -(-self.chunks // GROUP.value))):
            launch(
                kernel, (programs * self.blocks, self.lanes),
                self.struct(x), self.struct(self.k), self.struct(self.v), self.scalars, self.running, states, y,
                self.chunk_table, self.measures,
                C=self.config, num_warps=self.tiles.prepare_warps, num_stages=2,
            )  # fmt: skip
        return y


def _forward(
    operands: Sequence[Tensor], x: Tensor, state: Tensor | None, program: str, bounds: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, N] and the last state [B or sequences, H, N, P] of the transposed system; x [B, T, H, P]."""
    known = PROGRAMS[program]
    n = next(int(y.shape[-1 - a.value]) for a, y in zip(known.inputs, operands, strict=False) if a.key)
    call = ChunkCall(known, [*operands, x.new_empty(*x.shape[:3], n)], bounds)
    call.make()
    k, v, decay, source = (call.operand(name) for name in ("key", "value", "decay", "source"))
    assert k is not None and v is not None
    d_first, rows, _, _ = operator.by_row(call, x, None, None)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    start = None if state is None else state.contiguous()
    chunks = _Call(k, k, v, decay, source, None, None, call.heads, call.program.log, packed=call.packed)
    states = chunks.states(chunks.chunks)
    final, _ = forward(chunks, k, start, None, True, (k, states))
    assert final is not None
    y = chunks.output(rows, states)
    if known.micro > 1:
        y = y[:, known.micro - 1 :: known.micro]
    if known.before:
        first = y.new_zeros(call.ends, call.heads, n)
        if start is not None:
            first = (start * d_first.float().unsqueeze(-2)).sum(-1).to(y.dtype)
        y = call.later(y, first)
    return y.contiguous(), final.contiguous()


def _backward(
    dy: Tensor, dfinal: Tensor | None, operands: Sequence[Tensor], x: Tensor, state: Tensor | None, program: str,
    needs: Sequence[bool], bounds: Tensor | None = None,
) -> tuple[Tensor, list[Tensor], Tensor]:  # fmt: skip
    """Gradients of x, of the operands that need one, in order, and of the state (empty without one)."""
    every = [*operands, dy]
    dx, _, saved = operator._forward(every, state, program, True, bounds)
    found, first = operator._backward(x, dfinal, every, state, saved, program, [*needs, False], bounds)
    return dx, found, first


class _Differentiable(torch.autograd.Function):
    """The operator with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, program: str, bounds: Tensor | None, state: Tensor | None, x: Tensor, *operands: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            y, final = across_mixer(list(operands), x, state, program, bounds)
        ctx.save_for_backward(bounds, state, x, *operands)
        ctx.program, ctx.like = program, (y.shape, y.dtype)
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        refuse_second_order()
        bounds, state, x, *operands = ctx.saved_tensors
        if dy is None:
            dy = x.new_zeros(ctx.like[0], dtype=ctx.like[1])
        needs = list(ctx.needs_input_grad[4:])
        dx, found, first = across_mixer_backward(dy, dfinal, operands, x, state, ctx.program, needs, bounds)
        given = iter(found)
        return None, None, None if state is None else first, dx, *(next(given) if need else None for need in needs)


def _differentiable(
    operands: Sequence[Tensor], x: Tensor, state: Tensor | None, program: str, bounds: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _Differentiable.apply(program, bounds, state, x, *operands)
    return found


across_mixer = custom(
    "across_mixer(Tensor[] operands, Tensor x, Tensor? state, str program, Tensor? bounds=None) -> (Tensor, Tensor)",
    _forward, _differentiable,
)  # fmt: skip
across_mixer_backward = custom(
    "across_mixer_backward(Tensor dy, Tensor? dfinal, Tensor[] operands, Tensor x, Tensor? state, str program, "
    "bool[] needs, Tensor? bounds=None) -> (Tensor, Tensor[], Tensor)",
    _backward,
)
