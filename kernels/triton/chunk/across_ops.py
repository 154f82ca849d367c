"""Systems with decays along the Value axis as custom operators on the state Z = Sᵀ, whose decays are by key.

The program is that of the transposed system, whose output is o_t = Z_tᵀ Q_t; Q is its last operand. dsf::across_mixer
gives y_t = Z_t x_t for readouts x and never reads Q. Since Σ dy · y = Σ x · o for Q = dy, the gradient of x is the
output o with Q = dy, and the gradients of all other operands are those of o with x as its gradient. Their launches
(across.py) stand around the walks of decays by key. The forward pass keeps G and the first states of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import refuse_second_order
from dsf.kernels.triton.chunk import matrix
from dsf.kernels.triton.chunk.across import (
    Across,
    AcrossGradient,
    across_gradient,
    prepare_across,
    prepare_reads,
    read_across,
    read_far_across,
)
from dsf.kernels.triton.chunk.call import ChunkCall
from dsf.kernels.triton.chunk.key_gradient import Gradients, key_gradient
from dsf.kernels.triton.chunk.key_rows import key_scalars
from dsf.kernels.triton.chunk.keywise import GROUP, KeyRows
from dsf.kernels.triton.chunk.operator import pulled_back
from dsf.kernels.triton.chunk.precision import decay_gradient
from dsf.kernels.triton.chunk.reads import by_row, first_reads
from dsf.kernels.triton.chunk.row_gradients import sum_pieces
from dsf.kernels.triton.chunk.walks import NONE, Adjoints, forward, reverse
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.pointwise.programs import PROGRAMS
from dsf.kernels.triton.structs import Rows

WIDTH = 64  # entries of P that a program of dx and dv handles: two accumulators of 64 rows fit its registers


class _Call(matrix._Call):
    """What all launches share. In the forward pass its q is k, for no row is read along the usual axis."""

    def _prepare(self, g: Tensor, kept: Sequence[Tensor] | None, ahead: Sequence[Tensor]) -> None:
        """G and the rows that the walk writes into states; or, from what was kept, those that the reverse walk does."""
        length, fine, none = self.chunks * self.tiles.chunk, 2 if self.fine else 1, self.empty(0)
        self.config = Across(**self.common, BK=self.key_block, LEVELS=self.levels, TERMS=self.terms.keys)
        blocks, rows = self.blocks, [
            self.empty(self.batch, self.heads, length, self.n) for _ in range(self.terms.keys)
        ]  # fmt: skip
        of, C, warps = (rows[0], rows[-1], self.chunk_table, self.measures), self.config, self.tiles.prepare_warps
        if kept:
            running, first_levels, states, passed = kept
            launch(prepare_reads, (self.chunks * blocks, self.lanes), self.struct(self.q), running, *of,
                   C=C, num_warps=warps)  # fmt: skip
        else:
            running = self.empty(fine * self.lanes, length, self.n, dtype=torch.float32)
            first_levels = self.empty(self.lanes, self.chunks, dtype=torch.int32)
            states, passed = self.states(self.chunks), none
            launch(prepare_across, (self.chunks, self.lanes), self.struct(self.k), self.struct(g), running,
                   first_levels, *of, C=C, num_warps=warps)  # fmt: skip
        self.made = KeyRows(running, first_levels, none, rows[0], rows[0], none, rows[-1], none, states, passed)
        self.running, self.first_levels = running, first_levels
        self.reads = self.writes = rows[0].transpose(1, 2)
        self.rest_of_reads = self.rest_of_writes = rows[-1]

    @property
    def blocks(self) -> int:
        """Blocks of keys."""
        return -(-self.n // self.key_block)

    def gradient(self, x: Tensor, dx: Tensor, found: Adjoints, to: Gradients, wanted: bool) -> None:
        """Fill dx and `to` for the chunks in `found`. wanted: the gradients of write strengths."""
        assert self.made is not None
        t, pieces = self.tiles, to.pairs.shape[0]
        width = min(WIDTH, t.gradient_piece)
        keyed = AcrossGradient(
            **self.common, BK=self.key_block, LEVELS=self.levels, TERMS=self.terms.keys, BP=width,
            SOURCE_WANTED=wanted, PIECES=t.gradient_piece // width,
        )  # fmt: skip
        rest = to, self.chunk_table, self.measures, found.base, found.chunks
        q, k, v = (self.struct(rows) for rows in (self.q, self.k, self.v))
        for once in (True, False):
            programs = found.chunks if once else -(-found.chunks // GROUP.value)
            launch(
                across_gradient, (2 * programs, self.lanes, -(-self.p // width)),
                self.struct(x), k, v, q, self.scalars, self.made, found.states, dx, *rest,
                C=replace(keyed, ONCE=once), num_warps=4, num_stages=2,
            )  # fmt: skip
        whole = replace(keyed, BP=t.gradient_piece, PIECES=1)
        for once in (True, False):
            programs = found.chunks if once else -(-found.chunks // GROUP.value)
            launch(
                key_gradient, (programs * self.blocks, self.lanes, pieces),
                q, k, Rows(), v, x, self.scalars, self.made, found.entries, found.states, *rest,
                C=replace(whole, ONCE=once), num_warps=t.gradient_warps, num_stages=2,
            )  # fmt: skip


def _call(call: ChunkCall, q: Tensor | None, kept: Sequence[Tensor] | None) -> tuple[_Call, Tensor | None]:
    """What all launches share, and the write strengths. q: dy, in the backward pass."""
    k, v, decay, source = (call.operand(name) for name in ("key", "value", "decay", "source"))
    assert k is not None and v is not None
    return _Call(
        k if q is None else q, k, v, decay, source, None, None, call.heads, call.program.log, kept=kept,
        packed=call.packed, back=q is not None,
    ), source  # fmt: skip


def output(call: ChunkCall, x: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """y [B, T, H, N] of rows, the last state, and what `gradients` takes. x: readouts [B, T, H, P]."""
    chunks, _ = _call(call, None, None)
    made = chunks.made
    assert made is not None
    final, passed = forward(chunks, chunks.k, start, None, True, (chunks.k, made.states))
    assert final is not None
    y = chunks.empty(chunks.batch, chunks.tokens, chunks.heads, chunks.n, dtype=x.dtype)
    x = x if x.stride(-1) == 1 else x.contiguous()
    for kernel, programs in ((read_across, chunks.chunks), (read_far_across, -(-chunks.chunks // GROUP.value))):
        launch(
            kernel, (programs * chunks.blocks, chunks.lanes),
            chunks.struct(x), chunks.struct(chunks.k), chunks.struct(chunks.v), chunks.scalars, made.running,
            made.states, y, chunks.chunk_table, chunks.measures,
            C=chunks.config, num_warps=chunks.tiles.prepare_warps, num_stages=2,
        )  # fmt: skip
    return y, final, [made.running, made.first_levels, made.states, passed if chunks.is_cut else made.passed]


def gradients(
    call: ChunkCall, x: Tensor, dfinal: Tensor | None, first: bool, kept: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """dx [B, T, H, P], the gradients of the operands by rows, and if `first` that of the first state.

    The call's query is dy. x: readouts of rows; kept: by `output`.
    """
    dy = call.reading("query")
    assert dy is not None
    chunks, source = _call(call, dy, kept)
    x, lead = x.contiguous(), (chunks.batch, chunks.tokens, chunks.heads)
    pieces = -(-chunks.p // chunks.tiles.gradient_piece)
    direct = {*call.program.direct.values()}
    kinds = {name: torch.float32 if name not in direct else x.dtype for name in ("key", "value")}
    kinds["decay"] = decay_gradient(call.operand("decay"), chunks.heads)

    def summed(name: str) -> Tensor:
        return chunks.empty(pieces, *lead, chunks.n, dtype=kinds[name] if pieces == 1 else torch.float32)

    between = torch.float32 if chunks.terms.keys == 2 else None
    alone = chunks.empty(pieces, *lead, dtype=torch.float32)
    to = Gradients(
        chunks.empty(pieces, *lead, chunks.tiles.chunk, dtype=between), alone, None, summed("key"),
        chunks.empty(*lead, chunks.p, dtype=kinds["value"]), None, summed("decay"),
        *key_scalars(chunks, pieces, source, None, None),
    )  # fmt: skip
    dx = chunks.empty(*lead, chunks.p, dtype=x.dtype)
    last = None if dfinal is None else dfinal.contiguous()
    assert chunks.made is not None
    for found in reverse(chunks, x, chunks.k, last, kept[3], chunks.made.states, chunks.k, first, NONE):
        chunks.gradient(x, dx, found, to, source is not None)
    by_name = {
        "key": sum_pieces(to.dk, kinds["key"]), "value": to.dv, "decay": sum_pieces(to.dg, kinds["decay"]),
        "source": sum_pieces(to.ds, torch.float32),
    }  # fmt: skip
    of_state = chunks.end(found.last, False) if first and found.last is not None else chunks.empty(0)
    return dx, {name: y for name, y in by_name.items() if name in call.varying}, of_state


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
