"""Readouts by a solve as an operator, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from dsf.kernels.operators import reduce_to, refuse_second_order
from dsf.kernels.triton.chunk.operator import matrix_mixer, matrix_mixer_backward
from dsf.kernels.triton.chunk.table import ROOMY, limits
from dsf.kernels.triton.launch import constant, launch
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.packed import Sequences, slots
from dsf.kernels.triton.sizes import padded, power
from dsf.kernels.triton.solve.kernel import (
    Factors,
    Places,
    Solve,
    read_rows,
    right_sides,
    solve_rows,
    walk_states,
)
from dsf.kernels.triton.structs import Rows

WIDEST = 128  # keys, and channels that are read at a time
ROWS = 64  # of keys in a chunk
FEWEST = 16  # tokens of a chunk
COLUMNS = 32  # of a state that a program walks
ENOUGH = {True: 2.0**-40, False: 2.0**-46}  # for bfloat16 terms, for float32


def is_roomy(device: torch.device) -> bool:
    """Whether a program's shared memory holds 64 rows of 128 keys, or 32 of float32 ones."""
    return limits(device)[0] >= ROOMY


def has_room(n: int, narrow: bool, device: torch.device) -> bool:
    """Whether a program's shared memory holds what solves with n keys need."""
    return n <= WIDEST // 2 or narrow or is_roomy(device)


class How(NamedTuple):
    """narrow: keys and values are multiplied as bfloat16 terms, else as float32; log: decays are logarithms; before:
    x_t is of the states before token t; steps: of conjugate gradients, at most."""

    narrow: bool
    log: bool
    before: bool
    steps: int


class _Call:
    """What the launches of one call share."""

    def __init__(self, keys: Tensor, values: Tensor, weights: Tensor, decay: Tensor | None, bounds: Tensor | None,
                 tokens: int, how: How) -> None:  # fmt: skip
        """keys [B, R T, H, N], values [B, R T, H, P] and weights [B, R T, H], of R rows a token, 1, 2 or 4; decay
        [B, T, H] or None."""
        self.like, self.tokens, self.how = keys, tokens, how
        self.batch, rows, self.heads, n = keys.shape
        self.n, self.p = int(n), int(values.shape[-1])
        self.narrow, self.lanes = how.narrow, self.batch * self.heads
        each, block = power(rows // tokens), padded(self.n)
        roomy = is_roomy(keys.device)
        self.wide = block == WIDEST and not how.narrow
        slim = self.wide or (block == WIDEST and not roomy)
        chunk = max(FEWEST, (ROWS // 2 if slim else ROWS) // each)
        self.piece = min(64, padded(self.p))
        self.chunks, self.sequences, self.ends = -(-tokens // chunk), 1, self.batch
        self.packed = bounds is not None
        table = of_sequences = None
        if bounds is not None:
            packed = Sequences(bounds.contiguous())
            self.chunks, self.sequences, self.ends = slots(tokens, packed.count, chunk), packed.count, packed.count
            table, _, of_sequences = packed.tables(tokens, chunk)
        self.places = Places(tokens, constant(self.heads), self.lanes, table, of_sequences)
        none = None, 0, 0, 0
        self.of = Factors(weights, *weights.stride(), *(none if decay is None else (decay, *decay.stride())))
        self.keys, self.values = _rows(keys), _rows(values)
        self.terms = 2 if how.narrow else 1
        self.config = Solve(
            N=self.n, BN=block, P=self.p, BP=self.piece, BW=COLUMNS, L=chunk, EACH=each, LOG=how.log,
            BEFORE=how.before, KIND=tl.bfloat16 if how.narrow else tl.float32,
            PRECISION="tf32" if how.narrow else "tf32x3" if roomy else "ieee", TERMS=self.terms,
            KEY_TERMS=self._terms_of(keys), VALUE_TERMS=self._terms_of(values), ENOUGH=ENOUGH[how.narrow],
        )  # fmt: skip

    def _terms_of(self, x: Tensor) -> int:
        return 2 if self.narrow and x.dtype != torch.bfloat16 else 1

    def walk(self, values: Rows, width: int, start: Tensor | None) -> tuple[Tensor, Tensor]:
        """The states with so many columns before each chunk, and the last one [B or sequences, H, N, width]."""
        stored = torch.bfloat16 if self.narrow else torch.float32
        states = self.like.new_empty(self.chunks, self.lanes, self.n, self.terms * width, dtype=stored)
        final = self.like.new_empty(self.ends, self.heads, self.n, width, dtype=torch.float32)
        launch(
            walk_states, (-(-width // COLUMNS), self.heads if self.packed else self.lanes, self.sequences),
            self.keys, values, self.of, None if start is None else start.contiguous(), states, final, self.places,
            self.chunks, W=width, C=self.config, num_warps=4,
        )  # fmt: skip
        return states, final

    def grid(self, parts: int = 1) -> tuple[int, int, int]:
        """A program for each chunk, sequence and head, and part."""
        return self.chunks, self.lanes, parts

    def solved(self, right: Tensor, ridge: Tensor, h: Tensor) -> Tensor:
        """The solutions for the right sides [B, T, H, N]; h: the states of H."""
        x = self.room(self.n)
        launch(
            solve_rows, self.grid(), _rows(right), _ridge(ridge), self.keys, self.of, h, _rows(x), self.places,
            self.how.steps, C=self.config, num_warps=8 if self.wide else 4,
        )  # fmt: skip
        return x

    def room(self, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for rows [B, T, H, width]."""
        return self.like.new_empty(self.batch, self.tokens, self.heads, width, dtype=dtype)


def _rows(x: Tensor) -> Rows:
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, token, head, _ = x.stride()
    return Rows(x, batch, token, head, 1)


def _ridge(x: Tensor) -> Rows:
    """Without a stride of tokens where all tokens have the same."""
    same = x.stride(0) == x.stride(1) == 0 and x.stride(-1) == 1
    return Rows(x, 0, None, x.stride(2), 1) if same else _rows(x)


def _solved(
    query: Tensor | None, dy: Tensor | None, ridge: Tensor, keys: Tensor, values: Tensor, weights: Tensor,
    decay: Tensor | None, g: Tensor | None, h: Tensor | None, bounds: Tensor | None, *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x [B, T, H, N] in float32 with (H_t + Λ_t) x_t = query_t, y [B, T, H, P] = Gᵀ x in the query's dtype, the last G
    and the last H; or where dy is given, those with (H_t + Λ_t) x_t = G_t dy_t, and an empty y.

    query, dy, ridge: [B, T, H, ·]; g, h: the first states. Others: as `_Call` takes them.
    """
    call = _Call(keys, values, weights, decay, bounds, ridge.shape[1], How(*options))
    g_states, last_g = call.walk(call.values, call.p, g)
    h_states, last_h = call.walk(call.keys, call.n, h)
    if query is None:
        assert dy is not None
        right, y = call.room(call.n), dy.new_empty(0)
        launch(
            right_sides, call.grid(), _rows(dy), call.keys, call.values, call.of, g_states, _rows(right), call.places,
            C=call.config, num_warps=4,
        )  # fmt: skip
        return call.solved(right, ridge, h_states), y, last_g, last_h
    x, y = call.solved(query, ridge, h_states), call.room(call.p, query.dtype)
    launch(
        read_rows, call.grid(-(-call.p // call.piece)), _rows(x), call.keys, call.values, call.of, g_states, _rows(y),
        call.places, C=call.config, num_warps=4,
    )  # fmt: skip
    return x, y, last_g, last_h


solve_mixer: Any = operator(
    "solve_mixer(Tensor? query, Tensor? dy, Tensor ridge, Tensor keys, Tensor values, Tensor weights, Tensor? decay, "
    "Tensor? g, Tensor? h, Tensor? bounds, bool narrow, bool log, bool before, int steps) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _solved,
)  # fmt: skip


class Solved(torch.autograd.Function):
    """y, the last G and the last H, with gradients.

    Arguments of apply: how, program (of what x reads of such a sum; its operands are a key, a weight and a value for
    each square, the query, and the decay), bounds, query, ridge, decay, g, h, *keys, *values, *weights. ridge may
    be of size 1 along B and T.

    With λ_t = (H_t + Λ_t)⁻¹ G_t dy_t, the gradient of the query, all others are those of ⟨Gᵀ x, dy⟩ - ⟨H x, λ⟩ for an x
    without gradient, which are gradients of two plain systems. Of x as G reads it the backward pass needs more digits
    than bfloat16 has: (H + Λ)⁻¹ has made large what G makes small. A third one therefore reads what rounding left of x.
    """

    @staticmethod
    def forward(
        ctx: Any, how: How, program: str, bounds: Tensor | None, query: Tensor, ridge: Tensor, decay: Tensor | None,
        g: Tensor | None, h: Tensor | None, *rows: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Kept for the backward pass: the rows, and x in float32."""
        x, y, last_g, last_h = _call(query, None, ridge, decay, g, h, rows, bounds, how)
        ctx.save_for_backward(bounds, ridge, decay, g, h, x, *rows)
        ctx.how, ctx.program, ctx.dtype = how, program, query.dtype
        ctx.set_materialize_grads(False)
        return y, last_g, last_h

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
        """Gradients of all tensors but bounds."""
        refuse_second_order()
        bounds, ridge, decay, g, h, x, *rows = ctx.saved_tensors
        how, (dy, d_g, d_h) = ctx.how, given
        keys, values, weights = _thirds(rows)
        if dy is None:
            dy = values[0].new_zeros(*x.shape[:3], values[0].shape[-1])
        adjoint, _, _, _ = _call(None, dy, ridge, decay, g, h, rows, bounds, how)
        kind = torch.bfloat16 if how.narrow else torch.float32
        given_to, first = (ctx.program, keys, weights, decay, bounds), x.to(kind)
        total = _pulled(*given_to, values, first, dy, d_g, g)
        if how.narrow:
            rest = _pulled(*given_to, values, (x - first.float()).to(kind), dy, None, g)
            for mine, others in zip(total, rest, strict=True):
                _add(mine, others)
        of_h = _pulled(*given_to, keys, first, -adjoint, d_h, h)
        for others in (of_h.keys, of_h.values):
            _add(total.keys, others)
        _add(total.weights, of_h.weights)
        _add(total.decay, of_h.decay)
        every = (*total.keys, *total.values, *total.weights)
        found = [d.to(row.dtype) for d, row in zip(every, rows, strict=True)]
        d_decay = total.decay[0] if total.decay else None
        d_ridge = reduce_to(-(adjoint * x), ridge.shape)
        d_first = None if g is None else total.state[0], None if h is None else of_h.state[0]
        return None, None, None, adjoint.to(ctx.dtype), d_ridge, d_decay, *d_first, *found


def _add(total: Sequence[Tensor], more: Sequence[Tensor]) -> None:
    """Add to the first ones in place, where memory is short."""
    for x, y in zip(total, more, strict=True):
        x += y


class _Gradients(NamedTuple):
    """Those of the keys, values and weights of all squares, of the decay, if there is one, and of the first state."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    weights: Sequence[Tensor]
    decay: Sequence[Tensor]
    state: Sequence[Tensor]


def _pulled(
    program: str, keys: Sequence[Tensor], weights: Sequence[Tensor], decay: Tensor | None, bounds: Tensor | None,
    values: Sequence[Tensor], read: Tensor, slope: Tensor, last: Tensor | None, state: Tensor | None,
) -> _Gradients:  # fmt: skip
    """Gradients of the plain system that x reads (`read`), whose output has the gradient `slope`, and whose last state
    `last`. Rows have x's dtype, and gradients are float32."""
    given = [t for k, v, w in zip(keys, values, weights, strict=True) for t in (k.to(read.dtype), w, v.to(read.dtype))]
    count = len(given)
    given += [read] if decay is None else [read, decay]
    _, _, saved = matrix_mixer(given, state, program, True, bounds)
    fine = [i for i in range(count) if i % 3 != 1]
    needs = [i != count for i in range(len(given))]
    found, first = matrix_mixer_backward(
        slope.to(read.dtype), last, given, state, saved, program, needs, bounds, [], False, fine
    )
    rows = found[:count]
    return _Gradients(rows[::3], rows[2::3], rows[1::3], found[count:], [first])


def _thirds(rows: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Keys, values and weights, as many of each."""
    count = len(rows) // 3
    return [rows[i * count : (i + 1) * count] for i in range(3)]


def _call(
    query: Tensor | None, dy: Tensor | None, ridge: Tensor, decay: Tensor | None, g: Tensor | None, h: Tensor | None,
    rows: Sequence[Tensor], bounds: Tensor | None, how: How,
) -> Any:  # fmt: skip
    """The operator on rows one behind the other: R of a token, padded with zeros to a power of two."""
    like, parts = query if query is not None else dy, [list(part) for part in _thirds(rows)]
    assert like is not None
    for part in parts:
        part += [torch.zeros_like(part[0])] * (power(len(part)) - len(part))
    keys, values, weights = (x[0] if len(x) == 1 else torch.stack(x, 2).flatten(1, 2) for x in parts)
    ridge = ridge.expand(*like.shape[:3], -1)
    return solve_mixer(query, dy, ridge, keys, values, weights, decay, g, h, bounds, *how)
