"""Attention and its two gradient kernels: one by queries, one by keys.

q: [B, T, H, N], k: [B, T, HK, N], v: [B, T, HV, P] in one dtype, y as q with P.
c: [B, H, 2, T] float32, running sums of log decays as two float32 parts; scores get the differences of both parts, so
that those of near tokens are exact. lse: [B, H, T], the logarithm of the sum of a row's weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton.structs import Config

LOG2E = tl.constexpr(1.4426950408889634)


class Attended(NamedTuple):
    """q, k, v, c and the scale of scores; the numbers of heads and the widths of q, k and v."""

    q: Any
    k: Any
    v: Any
    c: Any
    scale: Any
    H: Any
    HK: Any
    HV: Any
    N: Any
    P: Any


@dataclass(frozen=True, repr=False)
class Tiles(Config):
    """WINDOW: how many tokens a row sees, 0 for all. BIASED: there is c. R rows (queries) and C columns (keys) a tile.

    WIDE: float32 inputs, where the gradient of c is summed in float64. D, E: N and P, filled up to a power of two.
    """

    WINDOW: int
    BIASED: bool
    WIDE: bool
    R: int
    C: int
    D: int
    E: int


@triton.jit
def _tile(x, b, h, H, at, T, WIDTH, D: tl.constexpr):
    """Rows `at` of one head of x [B, T, H, WIDTH], zeros elsewhere."""
    d = tl.arange(0, D)
    row = (b.to(tl.int64) * T + at) * H + h
    return tl.load(x + row[:, None] * WIDTH + d, mask=(at < T)[:, None] & (d < WIDTH), other=0.0)


@triton.jit
def _store(x, value, b, h, H, at, T, WIDTH, D: tl.constexpr):
    d = tl.arange(0, D)
    row = (b.to(tl.int64) * T + at) * H + h
    mask = (at < T)[:, None] & (d < WIDTH)
    tl.store(x + row[:, None] * WIDTH + d, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _vector(x, bh, at, T):
    """Numbers `at` of one head of x [B, H, T]."""
    return tl.load(x + bh.to(tl.int64) * T + at, mask=at < T, other=0.0)


@triton.jit
def _difference(c, bh, rows, columns, T):
    """c of rows minus c of columns, [rows, columns]."""
    high = _vector(c, 2 * bh, rows, T)[:, None] - _vector(c, 2 * bh, columns, T)[None]
    return high + (_vector(c, 2 * bh + 1, rows, T)[:, None] - _vector(c, 2 * bh + 1, columns, T)[None])


@triton.jit
def _seen(rows, columns, T, WINDOW: tl.constexpr):
    """Whether a row sees a column, [rows, columns]."""
    age = rows[:, None] - columns[None]
    seen = (age >= 0) & (rows < T)[:, None]
    if WINDOW > 0:
        seen = seen & (age < WINDOW)
    return seen


@triton.jit
def _queries(H, tile: tl.constexpr):
    """(sequence and head in one, sequence, head, rows, first column) of this program; the longest rows come first."""
    first, bh = (tl.num_programs(1) - 1 - tl.program_id(1)) * tile.R, tl.program_id(0)
    begin = 0
    if tile.WINDOW > 0:
        begin = tl.maximum(first - tile.WINDOW + 1, 0) // tile.C * tile.C
    return bh, bh // H, bh % H, first, begin


@triton.jit
def _reads(x, b, h, rows, T, tile: tl.constexpr):
    return _tile(x.q, b, h, x.H, rows, T, x.N, tile.D)


@triton.jit
def _keys(x, b, h, columns, T, tile: tl.constexpr):
    return _tile(x.k, b, h // (x.H // x.HK), x.HK, columns, T, x.N, tile.D)


@triton.jit
def _values(x, b, h, columns, T, tile: tl.constexpr):
    return _tile(x.v, b, h // (x.H // x.HV), x.HV, columns, T, x.P, tile.E)


@triton.jit
def _exponents(x, a, level, bh, rows, columns, T, tile: tl.constexpr):
    """The keys `columns`, and log2 of their weights for the queries a (`rows`), minus `level` where given."""
    keys = _keys(x, bh // x.H, bh % x.H, columns, T, tile)
    s = tl.dot(a, tl.trans(keys), input_precision="ieee") * x.scale
    if tile.BIASED:
        s += _difference(x.c, bh, rows, columns, T)
    seen = _seen(rows, columns, T, tile.WINDOW)
    s *= LOG2E
    if level is not None:
        s -= level[:, None]
    return keys, tl.where(seen, s, float("-inf"))


@triton.jit(do_not_specialize=["T"])
def attention_forward(x, y, lse, T, tile: tl.constexpr):
    """y and lse of R queries."""
    bh, b, h, first, begin = _queries(x.H, tile)
    rows = first + tl.arange(0, tile.R)
    a = _reads(x, b, h, rows, T, tile)
    top = tl.full([tile.R], float("-inf"), tl.float32)
    total, out = tl.zeros([tile.R], tl.float32), tl.zeros([tile.R, tile.E], tl.float32)
    for start in range(begin, tl.minimum(first + tile.R, T), tile.C):
        columns = start + tl.arange(0, tile.C)
        _, s = _exponents(x, a, None, bh, rows, columns, T, tile)
        new = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        w, gain = tl.exp2(s - base[:, None]), tl.exp2(top - base)
        total, top = total * gain + tl.sum(w, 1), new
        values = _values(x, b, h, columns, T, tile)
        out = out * gain[:, None] + tl.dot(w.to(values.dtype), values, input_precision="ieee")
    total = tl.where(total > 0, total, 1.0)
    _store(y, out / total[:, None], b, h, x.H, rows, T, x.P, tile.E)
    tl.store(lse + bh.to(tl.int64) * T + rows, (top + tl.log2(total)) / LOG2E, mask=rows < T)


@triton.jit
def _scores_gradient(x, a, up, level, shift, b, h, bh, rows, start, T, tile: tl.constexpr):
    """C keys from `start` on, their weights for R queries and ds."""
    columns = start + tl.arange(0, tile.C)
    keys, s = _exponents(x, a, level, bh, rows, columns, T, tile)
    values = _values(x, b, h, columns, T, tile)
    w = tl.exp2(s)
    return keys, w, w * (tl.dot(up, tl.trans(values), input_precision="ieee") - shift[:, None])


@triton.jit
def _totals(ds, tile: tl.constexpr):
    """The sums of the rows of ds. What c's gradient takes from rows and from columns cancels, and rounding adds up."""
    if tile.WIDE:
        ds = ds.to(tl.float64)
    return tl.sum(ds, 1)


@triton.jit(do_not_specialize=["T"])
def attention_deltas(x, dy, lse, given, dlse, delta, T, tile: tl.constexpr):
    """delta [B, H, T], with which the ds of each row add up to its dlse, from `given` = ⟨dy, y⟩ - dlse.

    `given` itself is inexact because y was rounded; where one weight is nearly 1 its error exceeds all of ds. With
    consistent ds the contributions of rows and keys to the gradient of an angle or decay cancel as they should.
    """
    bh, b, h, first, begin = _queries(x.H, tile)
    rows = first + tl.arange(0, tile.R)
    a, up = _reads(x, b, h, rows, T, tile), _tile(dy, b, h, x.H, rows, T, x.P, tile.E)
    level, shift = _vector(lse, bh, rows, T) * LOG2E, _vector(given, bh, rows, T)
    off = -_vector(dlse, bh, rows, T)
    for start in range(begin, tl.minimum(first + tile.R, T), tile.C):
        _, _, ds = _scores_gradient(x, a, up, level, shift, b, h, bh, rows, start, T, tile)
        off += tl.sum(ds, 1)
    tl.store(delta + bh.to(tl.int64) * T + rows, shift + off, mask=rows < T)


@triton.jit(do_not_specialize=["T"])
def attention_rows(x, dy, lse, delta, dq, dc, T, tile: tl.constexpr):
    """The gradients of R queries, and the rows' part of the gradient of c. delta: [B, H, T]."""
    bh, b, h, first, begin = _queries(x.H, tile)
    rows = first + tl.arange(0, tile.R)
    a, up = _reads(x, b, h, rows, T, tile), _tile(dy, b, h, x.H, rows, T, x.P, tile.E)
    level, shift = _vector(lse, bh, rows, T) * LOG2E, _vector(delta, bh, rows, T)
    da = tl.zeros([tile.R, tile.D], tl.float32)
    dlate = tl.zeros([tile.R], tl.float64 if tile.WIDE else tl.float32)
    for start in range(begin, tl.minimum(first + tile.R, T), tile.C):
        keys, _, ds = _scores_gradient(x, a, up, level, shift, b, h, bh, rows, start, T, tile)
        dlate += _totals(ds, tile)
        da += tl.dot(ds.to(keys.dtype), keys, input_precision="ieee")
    _store(dq, da * x.scale, b, h, x.H, rows, T, x.N, tile.D)
    if tile.BIASED:
        tl.store(dc + bh.to(tl.int64) * T + rows, dlate, mask=rows < T)


@triton.jit(do_not_specialize=["T"])
def attention_columns(x, dy, lse, delta, dk, dv, dc, T, tile: tl.constexpr):
    """The gradients of C keys and values for each head of q, and the columns' part of the gradient of c.

    Scores of half precision are made transposed, because what is to be multiplied again must not be a product that was
    transposed; those of float32 as attention_rows makes them, so that both sum the same bits into the gradient of c.
    """
    first, bh = tl.program_id(1) * tile.C, tl.program_id(0)
    b, h = bh // x.H, bh % x.H
    columns = first + tl.arange(0, tile.C)
    keys, values = _keys(x, b, h, columns, T, tile), _values(x, b, h, columns, T, tile)
    da, db = tl.zeros([tile.C, tile.D], tl.float32), tl.zeros([tile.C, tile.E], tl.float32)
    dearly = tl.zeros([tile.C], tl.float64 if tile.WIDE else tl.float32)
    end = T
    if tile.WINDOW > 0:
        end = tl.minimum(T, first + tile.C + tile.WINDOW - 1)
    for start in range(first // tile.R * tile.R, end, tile.R):
        rows = start + tl.arange(0, tile.R)
        a, up = _reads(x, b, h, rows, T, tile), _tile(dy, b, h, x.H, rows, T, x.P, tile.E)
        level, shift = _vector(lse, bh, rows, T) * LOG2E, _vector(delta, bh, rows, T)
        if tile.WIDE:
            _, w, ds = _scores_gradient(x, a, up, level, shift, b, h, bh, rows, first, T, tile)
            w, ds = tl.trans(w), tl.trans(ds)
        else:
            s = tl.dot(keys, tl.trans(a), input_precision="ieee") * x.scale
            if tile.BIASED:
                s -= _difference(x.c, bh, columns, rows, T)
            age = rows[None] - columns[:, None]
            seen = (age >= 0) & (rows < T)[None] & (columns < T)[:, None]
            if tile.WINDOW > 0:
                seen = seen & (age < tile.WINDOW)
            w = tl.exp2(tl.where(seen, s * LOG2E - level[None], float("-inf")))
            ds = w * (tl.dot(values, tl.trans(up), input_precision="ieee") - shift[None])
        db += tl.dot(w.to(up.dtype), up, input_precision="ieee")
        dearly += _totals(ds, tile)
        da += tl.dot(ds.to(a.dtype), a, input_precision="ieee")
    _store(dk, da * x.scale, b, h, x.H, columns, T, x.N, tile.D)
    _store(dv, db, b, h, x.H, columns, T, x.P, tile.E)
    if tile.BIASED:
        place = dc + bh.to(tl.int64) * T + columns
        late = tl.load(place, mask=columns < T, other=0.0)
        tl.store(place, late - dearly, mask=columns < T)
