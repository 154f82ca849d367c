"""Attention and its two gradient kernels: one by queries, one by keys.

q: [B, Q, H, N], k: [B, T, HK, N], v: [B, T, HV, P] in one dtype, heads side by side and tokens a constant apart, also
from one sequence to the next (v may be half of a projection); y contiguous, as q with P. Queries are the last Q tokens.
c: [B, H, 3, T] float32, running sums of log decays (dsf.kernels.triton.attention.sums); scores get the differences of
the first two parts, so that those of near tokens are exact. lse: [B, H, Q], the logarithm of the sum of a row's
weights. marks: [B, H, 2, Q], of a query delta (see attention_rows) and log2 of that sum, less the third part of c.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.attention.tiles import (
    between,
    difference,
    load_tile,
    load_vector,
    near_sums,
    since,
    store_tile,
    within,
)
from dsf.kernels.triton.functions import LOG2E

LEAST = tl.constexpr(-1e30)  # of a row's maximum, so that what is not seen has a weight of 0


@triton.jit
def _seen(rows, columns, T, WINDOW: tl.constexpr):
    """Whether a row sees a column, [rows, columns]."""
    age = rows[:, None] - columns[None]
    seen = (age >= 0) & (rows < T)[:, None]
    if WINDOW > 0:
        seen = seen & (age < WINDOW)
    return seen


@triton.jit
def _lag(T, Q, tile: tl.constexpr):
    """The number of tokens before the first query."""
    return T - Q if tile.LAST else 0


@triton.jit
def _place(blocks):
    """(sequence and head in one, which block of tokens of it) of this program. Those of a head run at a time, so that
    what they read is in the cache."""
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks


@triton.jit
def _queries(H, T, Q, tile: tl.constexpr):
    """(sequence and head in one, sequence, head, first row) of this program, the longest rows first, and the columns
    where it begins, from where on and up to where all its rows see all columns, and where it ends."""
    bh, block = _place(tl.cdiv(T, tile.R) - _lag(T, Q, tile) // tile.R)
    first = (tl.cdiv(T, tile.R) - 1 - block) * tile.R
    begin, whole, part = 0, 0, first // tile.C * tile.C
    if tile.WINDOW > 0:
        begin = tl.maximum(first - tile.WINDOW + 1, 0) // tile.C * tile.C
        whole = tl.minimum(tl.cdiv(tl.maximum(first + tile.R - tile.WINDOW, 0), tile.C) * tile.C, part)
    return bh, bh // H, bh % H, first, begin, whole, part, tl.minimum(first + tile.R, T)


@triton.jit
def _reads(x, b, h, first, T, Q, tile: tl.constexpr, PART: tl.constexpr):
    return load_tile(x.q, b, h, x.q_step, first - _lag(T, Q, tile), Q, tile.R, tile.N, tile.D, PART, tile.LAST)


@triton.jit
def _outputs(y, x, b, h, first, T, Q, tile: tl.constexpr, PART: tl.constexpr):
    return load_tile(y, b, h, x.H * tile.P, first - _lag(T, Q, tile), Q, tile.R, tile.P, tile.E, PART, tile.LAST)


@triton.jit
def _keys(x, b, h, first, T, tile: tl.constexpr, PART: tl.constexpr):
    return load_tile(x.k, b, h // (x.H // x.HK), x.k_step, first, T, tile.C, tile.N, tile.D, PART)


@triton.jit
def _values(x, b, h, first, T, tile: tl.constexpr, PART: tl.constexpr):
    return load_tile(x.v, b, h // (x.H // x.HV), x.v_step, first, T, tile.C, tile.P, tile.E, PART)


@triton.jit
def _exponents(x, a, keys, bh, first, start, T, tile: tl.constexpr, PART: tl.constexpr):
    """log2 of the weights of C keys from `start` on for R queries a from `first` on, minus infinity where none is seen,
    and a number that is to be taken from all of them.

    c of the keys is less c of the first query, not of each (`_own`): a product, then one operation an element. Weights
    of one query differ by a factor from what they are. So it is not if WIDE.
    """
    rows, columns, less = first + tl.arange(0, tile.R), start + tl.arange(0, tile.C), 0.0
    if tile.BIASED and not tile.WIDE:
        near, less = near_sums(x.c, bh, start, first, T, tile.C, PART)
        s = tl.dot(a, tl.trans(keys), input_precision="ieee") * (x.scale * LOG2E) - near[None]
    else:
        s = tl.dot(a, tl.trans(keys), input_precision="ieee") * (x.scale * LOG2E)
        if tile.BIASED:
            s += difference(x.c, bh, rows, columns, T) * LOG2E
    if PART:
        s = tl.where(_seen(rows, columns, T, tile.WINDOW), s, float("-inf"))
    return s, less


@triton.jit
def _own(x, bh, first, T, tile: tl.constexpr):
    """log2 of the factor by which R queries' weights differ from those of `_exponents`, [R]."""
    if tile.BIASED and not tile.WIDE:
        return since(x.c, bh, first + tl.arange(0, tile.R), first, T)
    return tl.zeros([tile.R], tl.float32)


@triton.jit
def _attend(x, a, top, total, out, b, h, bh, first, begin, end, T, tile: tl.constexpr, PART: tl.constexpr):
    """The maximum of exponents, the sum of weights and of weighted values, with those of columns begin to end."""
    for start in range(begin, end, tile.C):
        s, less = _exponents(x, a, _keys(x, b, h, start, T, tile, PART), bh, first, start, T, tile, PART)
        new = tl.maximum(top, tl.max(s, 1) - less)
        w, gain = tl.exp2(s - (new + less)[:, None]), tl.exp2(top - new)
        total, top = total * gain + tl.sum(w, 1), new
        values = _values(x, b, h, start, T, tile, PART)
        out = out * gain[:, None] + tl.dot(w.to(values.dtype), values, input_precision="ieee")
    return top, total, out


@triton.jit(do_not_specialize=["T", "Q"])
def attention_forward(x, y, lse, T, Q, tile: tl.constexpr):
    """y and lse of R queries."""
    if not tile.LAST:
        Q = T
    bh, b, h, first, begin, whole, part, end = _queries(x.H, T, Q, tile)
    a = _reads(x, b, h, first, T, Q, tile, True)
    top = tl.full([tile.R], LEAST, tl.float32)
    total, out = tl.zeros([tile.R], tl.float32), tl.zeros([tile.R, tile.E], tl.float32)
    top, total, out = _attend(x, a, top, total, out, b, h, bh, first, whole, part, T, tile, tile.WIDE)
    if tile.WINDOW > 0:
        top, total, out = _attend(x, a, top, total, out, b, h, bh, first, begin, whole, T, tile, True)
    top, total, out = _attend(x, a, top, total, out, b, h, bh, first, part, end, T, tile, True)
    top, total = top + _own(x, bh, first, T, tile), tl.where(total > 0, total, 1.0)
    first -= _lag(T, Q, tile)
    store_tile(y, out / total[:, None], b, h, x.H * tile.P, first, Q, tile.R, tile.P, tile.E, tile.LAST)
    rows = first + tl.arange(0, tile.R)
    tl.store(lse + bh.to(tl.int64) * Q + rows, (top + tl.log2(total)) / LOG2E, mask=within(rows, Q, tile.LAST))


@triton.jit
def _scores_gradient(x, a, up, level, shift, b, h, bh, first, start, T, tile: tl.constexpr, PART: tl.constexpr):
    """C keys from `start` on, their weights for R queries and ds. level: log2 of the sum of a row's weights."""
    keys, values = _keys(x, b, h, start, T, tile, PART), _values(x, b, h, start, T, tile, PART)
    s, less = _exponents(x, a, keys, bh, first, start, T, tile, PART)
    w = tl.exp2(s - (level + less)[:, None])
    return keys, w, w * (tl.dot(up, tl.trans(values), input_precision="ieee") - shift[:, None])


@triton.jit
def _totals(ds, tile: tl.constexpr):
    """The sums of the rows of ds. What c's gradient takes from rows and from columns cancels, and rounding adds up."""
    if tile.WIDE:
        ds = ds.to(tl.float64)
    return tl.sum(ds, 1)


@triton.jit
def _add_columns_to_rows(
    x, a, up, level, shift, found, bh, first, begin, end, T, tile: tl.constexpr, PART: tl.constexpr, MADE: tl.constexpr
):  # fmt: skip
    """found: the sums of the rows of ds, of ds times keys and of weights times keys, with those of columns begin to
    end; only the first unless MADE, the last unless TWICE."""
    b, h = bh // x.H, bh % x.H
    total, da, mean = found
    for start in range(begin, end, tile.C):
        keys, w, ds = _scores_gradient(x, a, up, level, shift, b, h, bh, first, start, T, tile, PART)
        total += _totals(ds, tile)
        if MADE:
            da += tl.dot(ds.to(keys.dtype), keys, input_precision="ieee")
            if not tile.TWICE:
                mean += tl.dot(w.to(keys.dtype), keys, input_precision="ieee")
    return total, da, mean


@triton.jit
def _over_columns(x, a, up, level, shift, T, Q, tile: tl.constexpr, MADE: tl.constexpr):
    """What all columns that R queries see add up to."""
    bh, _, _, first, begin, whole, part, end = _queries(x.H, T, Q, tile)
    total = tl.zeros([tile.R], tl.float64 if tile.WIDE else tl.float32)
    found = total, tl.zeros([tile.R, tile.D], tl.float32), tl.zeros([tile.R, tile.D], tl.float32)
    found = _add_columns_to_rows(x, a, up, level, shift, found, bh, first, whole, part, T, tile, tile.WIDE, MADE)
    if tile.WINDOW > 0:
        found = _add_columns_to_rows(x, a, up, level, shift, found, bh, first, begin, whole, T, tile, True, MADE)
    return _add_columns_to_rows(x, a, up, level, shift, found, bh, first, part, end, T, tile, True, MADE)


@triton.jit(do_not_specialize=["T", "Q"])
def attention_rows(x, dy, y, lse, dlse, marks, dq, dc, T, Q, tile: tl.constexpr):
    """The gradients of R queries, the rows' part of the gradient of c, and marks for attention_columns.

    delta is what a row's ds = w (⟨dy, v⟩ - delta) add up to dlse with. ⟨dy, y⟩ - dlse is inexact because y was rounded;
    where one weight is nearly 1 its error exceeds all of ds. With consistent ds the contributions of rows and keys to
    the gradient of an angle or decay cancel as they should. The error is known once all ds are summed. It is then taken
    from the gradient times the mean of the keys, or, if TWICE, from ds before the gradient is made.
    """
    if not tile.LAST:
        Q = T
    bh, b, h, first, _, _, _, _ = _queries(x.H, T, Q, tile)
    rows = first + tl.arange(0, tile.R)
    at = rows - _lag(T, Q, tile)
    there = within(at, Q, tile.LAST)
    a, up = _reads(x, b, h, first, T, Q, tile, True), _outputs(dy, x, b, h, first, T, Q, tile, True)
    own_y, late = _outputs(y, x, b, h, first, T, Q, tile, True), load_vector(dlse, bh, at, Q, LAST=tile.LAST)
    level = load_vector(lse, bh, at, Q, float("inf"), tile.LAST) * LOG2E
    own, shift = level - _own(x, bh, first, T, tile), tl.sum(up.to(tl.float32) * own_y, 1) - late
    if tile.TWICE:
        total, _, _ = _over_columns(x, a, up, own, shift, T, Q, tile, False)
        shift += (total - late).to(tl.float32)
        late, da, _ = _over_columns(x, a, up, own, shift, T, Q, tile, True)
    else:
        total, da, mean = _over_columns(x, a, up, own, shift, T, Q, tile, True)
        shift += total - late
        da -= (total - late)[:, None] * mean
    first -= _lag(T, Q, tile)
    store_tile(dq, da * x.scale, b, h, x.H * tile.N, first, Q, tile.R, tile.N, tile.D, tile.LAST)
    marks += 2 * bh.to(tl.int64) * Q + at
    tl.store(marks, shift, mask=there)
    if tile.BIASED:
        tl.store(dc + bh.to(tl.int64) * T + rows, late, mask=there)
        level -= load_vector(x.c, 3 * bh + 2, rows, T)
    tl.store(marks + Q, level, mask=there)


@triton.jit
def _keys_gradient(
    x, marks, keys, values, own, a, up, bh, first, start, T, Q, tile: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """The weights of C keys from `first` on for R queries from `start` on and ds, both [C, R].

    Made transposed, because what is to be multiplied again must not be a product that was transposed. c of both is less
    c of the last key. own: that of the keys.
    """
    rows, columns = start + tl.arange(0, tile.R), first + tl.arange(0, tile.C)
    at = rows - _lag(T, Q, tile)
    if PART:
        shift = load_vector(marks, 2 * bh, at, Q, LAST=tile.LAST)
        level = load_vector(marks, 2 * bh + 1, at, Q, float("inf"), tile.LAST)
    else:
        marks += 2 * bh.to(tl.int64) * Q + at
        shift, level = tl.load(marks), tl.load(marks + Q)
    if tile.BIASED:
        level -= between(x.c + (3 * bh).to(tl.int64) * T, start, tl.minimum(first + tile.C, T) - 1, T)
    s = tl.dot(keys, tl.trans(a), input_precision="ieee") * (x.scale * LOG2E)
    if tile.BIASED:
        s -= own[:, None]
    s -= level[None]
    if PART:
        age = rows[None] - columns[:, None]
        seen = (age >= 0) & (columns < T)[:, None]
        if tile.WINDOW > 0:
            seen = seen & (age < tile.WINDOW)
        s = tl.where(seen, s, float("-inf"))
    w = tl.exp2(s)
    return w, w * (tl.dot(values, tl.trans(up), input_precision="ieee") - shift[None])


@triton.jit
def _add_rows_to_columns(
    x, dy, lse, marks, keys, values, own, found, bh, first, begin, end, T, Q, tile: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """found: the gradients of keys, of values and of their c, with what rows begin to end add."""
    b, h = bh // x.H, bh % x.H
    da, db, early = found
    for start in range(begin, end, tile.R):
        a, up = _reads(x, b, h, start, T, Q, tile, PART), _outputs(dy, x, b, h, start, T, Q, tile, PART)
        if tile.WIDE:
            at = start - _lag(T, Q, tile) + tl.arange(0, tile.R)
            level = load_vector(lse, bh, at, Q, float("inf"), tile.LAST) * LOG2E
            shift = load_vector(marks, 2 * bh, at, Q, LAST=tile.LAST)
            _, w, ds = _scores_gradient(x, a, up, level, shift, b, h, bh, start, first, T, tile, True)
            w, ds = tl.trans(w), tl.trans(ds)
        else:
            w, ds = _keys_gradient(x, marks, keys, values, own, a, up, bh, first, start, T, Q, tile, PART)
        db += tl.dot(w.to(up.dtype), up, input_precision="ieee")
        early += _totals(ds, tile)
        da += tl.dot(ds.to(a.dtype), a, input_precision="ieee")
    return da, db, early


@triton.jit(do_not_specialize=["T", "Q"])
def attention_columns(x, dy, lse, marks, dk, dv, dc, T, Q, tile: tl.constexpr):
    """The gradients of C keys and values for each head of q, and the columns' part of the gradient of c.

    Scores of half precision are made transposed; those of float32 as attention_rows makes them, so that both sum the
    same bits into the gradient of c.
    """
    if not tile.LAST:
        Q = T
    bh, block = _place(tl.cdiv(T, tile.C))
    first, lag = block * tile.C, _lag(T, Q, tile)
    b, h = bh // x.H, bh % x.H
    columns = first + tl.arange(0, tile.C)
    keys, values = _keys(x, b, h, first, T, tile, True), _values(x, b, h, first, T, tile, True)
    early = tl.zeros([tile.C], tl.float64 if tile.WIDE else tl.float32)
    found = tl.zeros([tile.C, tile.D], tl.float32), tl.zeros([tile.C, tile.E], tl.float32), early
    own = tl.zeros([tile.C], tl.float32)
    if tile.BIASED and not tile.WIDE:
        own = since(x.c, bh, columns, tl.minimum(first + tile.C, T) - 1, T)
    begin, end, whole = first // tile.R * tile.R, T, T // tile.R * tile.R
    if tile.WINDOW > 0:
        end = tl.minimum(T, first + tile.C + tile.WINDOW - 1)
        whole = tl.minimum(whole, (first + tile.WINDOW) // tile.R * tile.R)
    part = tl.cdiv(first + tile.C, tile.R) * tile.R
    if tile.LAST:
        begin, part = tl.maximum(begin, lag // tile.R * tile.R), tl.maximum(part, tl.cdiv(lag, tile.R) * tile.R)
    part = tl.minimum(part, end)
    whole = tl.maximum(whole, part)
    found = _add_rows_to_columns(x, dy, lse, marks, keys, values, own, found, bh, first, begin, part, T, Q, tile, True)
    found = _add_rows_to_columns(x, dy, lse, marks, keys, values, own, found, bh, first, part, whole, T, Q, tile, False)
    da, db, early = _add_rows_to_columns(
        x, dy, lse, marks, keys, values, own, found, bh, first, whole, end, T, Q, tile, True
    )
    store_tile(dk, da * x.scale, b, h, x.H * tile.N, first, T, tile.C, tile.N, tile.D)
    store_tile(dv, db, b, h, x.H * tile.P, first, T, tile.C, tile.P, tile.E)
    if tile.BIASED:
        place = dc + bh.to(tl.int64) * T + columns
        late = tl.load(place, mask=(columns >= lag) & (columns < T), other=0.0)
        tl.store(place, late - early, mask=columns < T)
