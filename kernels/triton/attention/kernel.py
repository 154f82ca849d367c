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
LEAST = tl.constexpr(-1e30)  # of a row's maximum, so that what is not seen has a weight of 0


class Attended(NamedTuple):
    """q, k, v, c and the scale of scores; the numbers of heads of q, k and v."""

    q: Any
    k: Any
    v: Any
    c: Any
    scale: Any
    H: Any
    HK: Any
    HV: Any


@dataclass(frozen=True, repr=False)
class Tiles(Config):
    """WINDOW: how many tokens a row sees, 0 for all. BIASED: there is c. R rows (queries) and C columns (keys) a tile.

    WIDE: float32 inputs, where the gradient of c is summed in float64 and every tile is made like a part. N, P: the
    widths of keys and values; D, E: the same, filled up to a power of two.
    """

    WINDOW: int
    BIASED: bool
    WIDE: bool
    R: int
    C: int
    N: int
    P: int
    D: int
    E: int


@triton.jit
def _tile(x, b, h, H, first, T, SIZE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, PART: tl.constexpr):
    """SIZE rows of one head of x [B, T, H, WIDTH] from `first` on, zeros beyond its width and, of a PART, beyond T."""
    at, d = tl.arange(0, SIZE), tl.arange(0, D)
    place = x + ((b.to(tl.int64) * T + first) * H + h) * WIDTH + at[:, None] * (H * WIDTH) + d[None]
    if PART:
        return tl.load(place, mask=(first + at < T)[:, None] & (d < WIDTH)[None], other=0.0)
    if WIDTH < D:
        return tl.load(place, mask=(at >= 0)[:, None] & (d < WIDTH)[None], other=0.0)
    return tl.load(place)


@triton.jit
def _store(x, value, b, h, H, first, T, SIZE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    at, d = tl.arange(0, SIZE), tl.arange(0, D)
    place = x + ((b.to(tl.int64) * T + first) * H + h) * WIDTH + at[:, None] * (H * WIDTH) + d[None]
    tl.store(place, value.to(x.dtype.element_ty), mask=(first + at < T)[:, None] & (d < WIDTH)[None])


@triton.jit
def _vector(x, bh, at, T, other=0.0):
    """Numbers `at` of one head of x [B, H, T]."""
    return tl.load(x + bh.to(tl.int64) * T + at, mask=at < T, other=other)


@triton.jit
def _since(c, bh, at, row, T):
    """c of the tokens `at` minus c of one token, in the units of exponents of 2."""
    high = _vector(c, 2 * bh, at, T) - tl.load(c + (2 * bh).to(tl.int64) * T + row)
    return (high + (_vector(c, 2 * bh + 1, at, T) - tl.load(c + (2 * bh + 1).to(tl.int64) * T + row))) * LOG2E


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
def _queries(H, T, tile: tl.constexpr):
    """(sequence and head in one, sequence, head, first row) of this program, the longest rows first, and the columns
    where it begins, from where on and up to where all its rows see all columns, and where it ends."""
    first, bh = (tl.num_programs(1) - 1 - tl.program_id(1)) * tile.R, tl.program_id(0)
    begin, whole, part = 0, 0, first // tile.C * tile.C
    if tile.WINDOW > 0:
        begin = tl.maximum(first - tile.WINDOW + 1, 0) // tile.C * tile.C
        whole = tl.minimum(tl.cdiv(tl.maximum(first + tile.R - tile.WINDOW, 0), tile.C) * tile.C, part)
    return bh, bh // H, bh % H, first, begin, whole, part, tl.minimum(first + tile.R, T)


@triton.jit
def _reads(x, b, h, first, T, tile: tl.constexpr, PART: tl.constexpr):
    return _tile(x.q, b, h, x.H, first, T, tile.R, tile.N, tile.D, PART)


@triton.jit
def _keys(x, b, h, first, T, tile: tl.constexpr, PART: tl.constexpr):
    return _tile(x.k, b, h // (x.H // x.HK), x.HK, first, T, tile.C, tile.N, tile.D, PART)


@triton.jit
def _values(x, b, h, first, T, tile: tl.constexpr, PART: tl.constexpr):
    return _tile(x.v, b, h // (x.H // x.HV), x.HV, first, T, tile.C, tile.P, tile.E, PART)


@triton.jit
def _exponents(x, a, keys, bh, first, start, T, tile: tl.constexpr, PART: tl.constexpr):
    """log2 of the weights of C keys from `start` on for R queries a from `first` on, minus infinity where none is seen.

    Where all are seen (no PART), c of the keys is less c of the first query, not of each: a product, then one operation
    an element. Weights of one query differ by a factor from what they are.
    """
    s = tl.dot(a, tl.trans(keys), input_precision="ieee") * (x.scale * LOG2E)
    if PART:
        rows, columns = first + tl.arange(0, tile.R), start + tl.arange(0, tile.C)
        if tile.BIASED:
            s += _difference(x.c, bh, rows, columns, T) * LOG2E
        return tl.where(_seen(rows, columns, T, tile.WINDOW), s, float("-inf"))
    if tile.BIASED:
        s -= _since(x.c, bh, start + tl.arange(0, tile.C), first, T)[None]
    return s


@triton.jit
def _own(x, bh, first, T, tile: tl.constexpr):
    """log2 of the factor by which weights of whole tiles differ from those of parts, [R]."""
    if tile.BIASED and not tile.WIDE:
        return _since(x.c, bh, first + tl.arange(0, tile.R), first, T)
    return tl.zeros([tile.R], tl.float32)


@triton.jit
def _attend(x, a, top, total, out, b, h, bh, first, begin, end, T, tile: tl.constexpr, PART: tl.constexpr):
    """The maximum of exponents, the sum of weights and of weighted values, with those of columns begin to end."""
    for start in range(begin, end, tile.C):
        s = _exponents(x, a, _keys(x, b, h, start, T, tile, PART), bh, first, start, T, tile, PART)
        new = tl.maximum(top, tl.max(s, 1))
        w, gain = tl.exp2(s - new[:, None]), tl.exp2(top - new)
        total, top = total * gain + tl.sum(w, 1), new
        values = _values(x, b, h, start, T, tile, PART)
        out = out * gain[:, None] + tl.dot(w.to(values.dtype), values, input_precision="ieee")
    return top, total, out


@triton.jit(do_not_specialize=["T"])
def attention_forward(x, y, lse, T, tile: tl.constexpr):
    """y and lse of R queries."""
    bh, b, h, first, begin, whole, part, end = _queries(x.H, T, tile)
    a = _reads(x, b, h, first, T, tile, True)
    top = tl.full([tile.R], LEAST, tl.float32)
    total, out = tl.zeros([tile.R], tl.float32), tl.zeros([tile.R, tile.E], tl.float32)
    top, total, out = _attend(x, a, top, total, out, b, h, bh, first, whole, part, T, tile, tile.WIDE)
    top = tl.maximum(top + _own(x, bh, first, T, tile), LEAST)
    if tile.WINDOW > 0:
        top, total, out = _attend(x, a, top, total, out, b, h, bh, first, begin, whole, T, tile, True)
    top, total, out = _attend(x, a, top, total, out, b, h, bh, first, part, end, T, tile, True)
    total = tl.where(total > 0, total, 1.0)
    _store(y, out / total[:, None], b, h, x.H, first, T, tile.R, tile.P, tile.E)
    rows = first + tl.arange(0, tile.R)
    tl.store(lse + bh.to(tl.int64) * T + rows, (top + tl.log2(total)) / LOG2E, mask=rows < T)


@triton.jit
def _scores_gradient(x, a, up, level, shift, b, h, bh, first, start, T, tile: tl.constexpr, PART: tl.constexpr):
    """C keys from `start` on, their weights for R queries and ds. level: log2 of the sum of a row's weights."""
    keys, values = _keys(x, b, h, start, T, tile, PART), _values(x, b, h, start, T, tile, PART)
    w = tl.exp2(_exponents(x, a, keys, bh, first, start, T, tile, PART) - level[:, None])
    return keys, w, w * (tl.dot(up, tl.trans(values), input_precision="ieee") - shift[:, None])


@triton.jit
def _totals(ds, tile: tl.constexpr):
    """The sums of the rows of ds. What c's gradient takes from rows and from columns cancels, and rounding adds up."""
    if tile.WIDE:
        ds = ds.to(tl.float64)
    return tl.sum(ds, 1)


@triton.jit
def _add_deltas(x, a, up, level, shift, off, b, h, bh, first, begin, end, T, tile: tl.constexpr, PART: tl.constexpr):
    """off with the sums of ds over columns begin to end."""
    for start in range(begin, end, tile.C):
        _, _, ds = _scores_gradient(x, a, up, level, shift, b, h, bh, first, start, T, tile, PART)
        off += tl.sum(ds, 1)
    return off


@triton.jit(do_not_specialize=["T"])
def attention_deltas(x, dy, y, lse, dlse, delta, T, tile: tl.constexpr):
    """delta [B, H, T], with which the ds of each row add up to its dlse.

    ⟨dy, y⟩ - dlse is inexact because y was rounded; where one weight is nearly 1 its error exceeds all of ds. With
    consistent ds the contributions of rows and keys to the gradient of an angle or decay cancel as they should.
    """
    bh, b, h, first, begin, whole, part, end = _queries(x.H, T, tile)
    rows = first + tl.arange(0, tile.R)
    a, up = _reads(x, b, h, first, T, tile, True), _tile(dy, b, h, x.H, first, T, tile.R, tile.P, tile.E, True)
    own_y = _tile(y, b, h, x.H, first, T, tile.R, tile.P, tile.E, True)
    off = -_vector(dlse, bh, rows, T)
    level, shift = _vector(lse, bh, rows, T, float("inf")) * LOG2E, tl.sum(up.to(tl.float32) * own_y, 1) + off
    own = level - _own(x, bh, first, T, tile)
    off = _add_deltas(x, a, up, own, shift, off, b, h, bh, first, whole, part, T, tile, tile.WIDE)
    if tile.WINDOW > 0:
        off = _add_deltas(x, a, up, level, shift, off, b, h, bh, first, begin, whole, T, tile, True)
    off = _add_deltas(x, a, up, level, shift, off, b, h, bh, first, part, end, T, tile, True)
    tl.store(delta + bh.to(tl.int64) * T + rows, shift + off, mask=rows < T)


@triton.jit
def _add_rows(
    x, a, up, level, shift, da, late, b, h, bh, first, begin, end, T, tile: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """da and late with what columns begin to end add."""
    for start in range(begin, end, tile.C):
        keys, _, ds = _scores_gradient(x, a, up, level, shift, b, h, bh, first, start, T, tile, PART)
        late += _totals(ds, tile)
        da += tl.dot(ds.to(keys.dtype), keys, input_precision="ieee")
    return da, late


@triton.jit(do_not_specialize=["T"])
def attention_rows(x, dy, lse, delta, dq, dc, T, tile: tl.constexpr):
    """The gradients of R queries, and the rows' part of the gradient of c. delta: [B, H, T]."""
    bh, b, h, first, begin, whole, part, end = _queries(x.H, T, tile)
    rows = first + tl.arange(0, tile.R)
    a, up = _reads(x, b, h, first, T, tile, True), _tile(dy, b, h, x.H, first, T, tile.R, tile.P, tile.E, True)
    level, shift = _vector(lse, bh, rows, T, float("inf")) * LOG2E, _vector(delta, bh, rows, T)
    da, own = tl.zeros([tile.R, tile.D], tl.float32), level - _own(x, bh, first, T, tile)
    late = tl.zeros([tile.R], tl.float64 if tile.WIDE else tl.float32)
    da, late = _add_rows(x, a, up, own, shift, da, late, b, h, bh, first, whole, part, T, tile, tile.WIDE)
    if tile.WINDOW > 0:
        da, late = _add_rows(x, a, up, level, shift, da, late, b, h, bh, first, begin, whole, T, tile, True)
    da, late = _add_rows(x, a, up, level, shift, da, late, b, h, bh, first, part, end, T, tile, True)
    _store(dq, da * x.scale, b, h, x.H, first, T, tile.R, tile.N, tile.D)
    if tile.BIASED:
        tl.store(dc + bh.to(tl.int64) * T + rows, late, mask=rows < T)


@triton.jit
def _keys_gradient(x, keys, values, a, up, level, shift, bh, first, start, T, tile: tl.constexpr, PART: tl.constexpr):
    """The weights of C keys from `first` on for R queries from `start` on and ds, both [C, R].

    Made transposed, because what is to be multiplied again must not be a product that was transposed. Where all queries
    see all keys, c of both is less c of the last key.
    """
    rows, columns = start + tl.arange(0, tile.R), first + tl.arange(0, tile.C)
    s = tl.dot(keys, tl.trans(a), input_precision="ieee") * (x.scale * LOG2E)
    if PART:
        if tile.BIASED:
            s -= _difference(x.c, bh, columns, rows, T) * LOG2E
        age = rows[None] - columns[:, None]
        seen = (age >= 0) & (rows < T)[None] & (columns < T)[:, None]
        if tile.WINDOW > 0:
            seen = seen & (age < tile.WINDOW)
        s = tl.where(seen, s - level[None], float("-inf"))
    else:
        if tile.BIASED:
            last = tl.minimum(first + tile.C, T) - 1
            s -= _since(x.c, bh, columns, last, T)[:, None]
            level -= _since(x.c, bh, rows, last, T)
        s -= level[None]
    w = tl.exp2(s)
    return w, w * (tl.dot(values, tl.trans(up), input_precision="ieee") - shift[None])


@triton.jit
def _add_columns(
    x, dy, lse, delta, keys, values, da, db, early, first, begin, end, T, tile: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """da, db and early with what rows begin to end add."""
    bh = tl.program_id(0)
    b, h = bh // x.H, bh % x.H
    for start in range(begin, end, tile.R):
        rows = start + tl.arange(0, tile.R)
        a = _reads(x, b, h, start, T, tile, PART)
        up = _tile(dy, b, h, x.H, start, T, tile.R, tile.P, tile.E, PART)
        level, shift = _vector(lse, bh, rows, T, float("inf")) * LOG2E, _vector(delta, bh, rows, T)
        if tile.WIDE:
            _, w, ds = _scores_gradient(x, a, up, level, shift, b, h, bh, start, first, T, tile, True)
            w, ds = tl.trans(w), tl.trans(ds)
        else:
            w, ds = _keys_gradient(x, keys, values, a, up, level, shift, bh, first, start, T, tile, PART)
        db += tl.dot(w.to(up.dtype), up, input_precision="ieee")
        early += _totals(ds, tile)
        da += tl.dot(ds.to(a.dtype), a, input_precision="ieee")
    return da, db, early


@triton.jit(do_not_specialize=["T"])
def attention_columns(x, dy, lse, delta, dk, dv, dc, T, tile: tl.constexpr):
    """The gradients of C keys and values for each head of q, and the columns' part of the gradient of c.

    Scores of half precision are made transposed; those of float32 as attention_rows makes them, so that both sum the
    same bits into the gradient of c.
    """
    first, bh = tl.program_id(1) * tile.C, tl.program_id(0)
    b, h = bh // x.H, bh % x.H
    columns = first + tl.arange(0, tile.C)
    keys, values = _keys(x, b, h, first, T, tile, True), _values(x, b, h, first, T, tile, True)
    da, db = tl.zeros([tile.C, tile.D], tl.float32), tl.zeros([tile.C, tile.E], tl.float32)
    early = tl.zeros([tile.C], tl.float64 if tile.WIDE else tl.float32)
    begin, end, whole = first // tile.R * tile.R, T, T // tile.R * tile.R
    if tile.WINDOW > 0:
        end = tl.minimum(T, first + tile.C + tile.WINDOW - 1)
        whole = tl.minimum(whole, (first + tile.WINDOW) // tile.R * tile.R)
    part = tl.minimum(tl.cdiv(first + tile.C, tile.R) * tile.R, end)
    whole = tl.maximum(whole, part)
    da, db, early = _add_columns(x, dy, lse, delta, keys, values, da, db, early, first, begin, part, T, tile, True)
    da, db, early = _add_columns(x, dy, lse, delta, keys, values, da, db, early, first, part, whole, T, tile, False)
    da, db, early = _add_columns(x, dy, lse, delta, keys, values, da, db, early, first, whole, end, T, tile, True)
    _store(dk, da * x.scale, b, h, x.H, first, T, tile.C, tile.N, tile.D)
    _store(dv, db, b, h, x.H, first, T, tile.C, tile.P, tile.E)
    if tile.BIASED:
        place = dc + bh.to(tl.int64) * T + columns
        late = tl.load(place, mask=columns < T, other=0.0)
        tl.store(place, late - early, mask=columns < T)
