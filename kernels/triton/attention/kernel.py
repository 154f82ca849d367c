"""Attention of queries with the keys that they see, and its two gradients: by queries, and by keys.

q: [B, T, H, N], k: [B, T, HK, N], v: [B, T, HV, P], y as q with P. c: [B, H, 2, T] float32, two parts of the sums of
log decays, whose differences are added to scores part by part, so that those of near tokens are exact. lse: [B, H, T],
the logarithm of the sum of a row's weights. R: tile of rows (queries), C: of columns (keys), D, E: N and P padded.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


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


@triton.jit(do_not_specialize=["T"])
def attention_forward(
    q, k, v, c, y, lse, scale, T, H, HK, HV, N, P,
    WINDOW: tl.constexpr, BIASED: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """y and lse of R queries."""
    first, bh = (tl.num_programs(1) - 1 - tl.program_id(1)) * R, tl.program_id(0)
    b, h = bh // H, bh % H
    rows = first + tl.arange(0, R)
    a = _tile(q, b, h, H, rows, T, N, D)
    top = tl.full([R], float("-inf"), tl.float32)
    total, out = tl.zeros([R], tl.float32), tl.zeros([R, E], tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // C * C
    for start in range(begin, tl.minimum(first + R, T), C):
        columns = start + tl.arange(0, C)
        keys = _tile(k, b, h // (H // HK), HK, columns, T, N, D)
        s = tl.dot(a, tl.trans(keys), input_precision="ieee") * scale
        if BIASED:
            s += _difference(c, bh, rows, columns, T)
        s = tl.where(_seen(rows, columns, T, WINDOW), s * LOG2E, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        w, gain = tl.exp2(s - base[:, None]), tl.exp2(top - base)
        total, top = total * gain + tl.sum(w, 1), new
        values = _tile(v, b, h // (H // HV), HV, columns, T, P, E)
        out = out * gain[:, None] + tl.dot(w.to(values.dtype), values, input_precision="ieee")
    total = tl.where(total > 0, total, 1.0)
    _store(y, out / total[:, None], b, h, H, rows, T, P, E)
    tl.store(lse + bh.to(tl.int64) * T + rows, (top + tl.log2(total)) / LOG2E, mask=rows < T)


@triton.jit(do_not_specialize=["T"])
def attention_rows(
    q, k, v, c, dy, lse, delta, dq, dc, scale, T, H, HK, HV, N, P,
    WINDOW: tl.constexpr, BIASED: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The gradients of R queries and of c as their rows have it. delta: [B, H, T], ⟨dy, y⟩ less the gradient of lse."""
    first, bh = (tl.num_programs(1) - 1 - tl.program_id(1)) * R, tl.program_id(0)
    b, h = bh // H, bh % H
    rows = first + tl.arange(0, R)
    a, up = _tile(q, b, h, H, rows, T, N, D), _tile(dy, b, h, H, rows, T, P, E)
    level, shift = _vector(lse, bh, rows, T) * LOG2E, _vector(delta, bh, rows, T)
    da, dlate = tl.zeros([R, D], tl.float32), tl.zeros([R], tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // C * C
    for start in range(begin, tl.minimum(first + R, T), C):
        columns = start + tl.arange(0, C)
        keys = _tile(k, b, h // (H // HK), HK, columns, T, N, D)
        s = tl.dot(a, tl.trans(keys), input_precision="ieee") * scale
        if BIASED:
            s += _difference(c, bh, rows, columns, T)
        w = tl.exp2(tl.where(_seen(rows, columns, T, WINDOW), s * LOG2E - level[:, None], float("-inf")))
        values = _tile(v, b, h // (H // HV), HV, columns, T, P, E)
        ds = w * (tl.dot(up, tl.trans(values), input_precision="ieee") - shift[:, None])
        dlate += tl.sum(ds, 1)
        da += tl.dot(ds.to(keys.dtype), keys, input_precision="ieee")
    _store(dq, da * scale, b, h, H, rows, T, N, D)
    if BIASED:
        tl.store(dc + bh.to(tl.int64) * T + rows, dlate, mask=rows < T)


@triton.jit(do_not_specialize=["T"])
def attention_columns(
    q, k, v, c, dy, lse, delta, dk, dv, dc, scale, T, H, HK, HV, N, P,
    WINDOW: tl.constexpr, BIASED: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The gradients of C keys and values, one for each head of q, and what they take from c (added to its rows').

    Scores are made transposed, because what is to be multiplied again must not be a product that was transposed.
    """
    first, bh = tl.program_id(1) * C, tl.program_id(0)
    b, h = bh // H, bh % H
    columns = first + tl.arange(0, C)
    keys = _tile(k, b, h // (H // HK), HK, columns, T, N, D)
    values = _tile(v, b, h // (H // HV), HV, columns, T, P, E)
    da, db, dearly = tl.zeros([C, D], tl.float32), tl.zeros([C, E], tl.float32), tl.zeros([C], tl.float32)
    end = T
    if WINDOW > 0:
        end = tl.minimum(T, first + C + WINDOW - 1)
    for start in range(first // R * R, end, R):
        rows = start + tl.arange(0, R)
        a, up = _tile(q, b, h, H, rows, T, N, D), _tile(dy, b, h, H, rows, T, P, E)
        level, shift = _vector(lse, bh, rows, T) * LOG2E, _vector(delta, bh, rows, T)
        s = tl.dot(keys, tl.trans(a), input_precision="ieee") * scale
        if BIASED:
            s -= _difference(c, bh, columns, rows, T)
        age = rows[None] - columns[:, None]
        seen = (age >= 0) & (rows < T)[None] & (columns < T)[:, None]
        if WINDOW > 0:
            seen = seen & (age < WINDOW)
        w = tl.exp2(tl.where(seen, s * LOG2E - level[None], float("-inf")))
        db += tl.dot(w.to(up.dtype), up, input_precision="ieee")
        ds = w * (tl.dot(values, tl.trans(up), input_precision="ieee") - shift[None])
        dearly += tl.sum(ds, 1)
        da += tl.dot(ds.to(a.dtype), a, input_precision="ieee")
    _store(dk, da * scale, b, h, H, columns, T, N, D)
    _store(dv, db, b, h, H, columns, T, P, E)
    if BIASED:
        place = dc + bh.to(tl.int64) * T + columns
        late = tl.load(place, mask=columns < T, other=0.0)
        tl.store(place, late - dearly, mask=columns < T)
