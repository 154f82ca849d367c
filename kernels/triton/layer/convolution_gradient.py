"""Gradients of the short convolution: one kernel for those of x, weight, bias and state, one that sums the weights'.

The first recomputes the forward pass. Token t adds to the gradients of x_t, …, x_{t-K+1}; incomplete ones stay in
registers, so dx is written once, K - 1 tokens late.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton import functions as fn
from dsf.kernels.triton.layer.convolution import (
    before,
    convolved,
    first_before,
    length_of,
    piece_of,
    pushed,
    rows_of,
    sequence_of,
    span_of,
    start_of,
    sum_heads,
    taps_of,
)


@triton.jit
def slope_of(g, z, scale, normed, SILU: tl.constexpr, HEAD: tl.constexpr):
    """The gradient of z from that of silu(z), normalised where `normed`."""
    s = fn.sigmoid(z)
    if HEAD > 0:
        u = z
        if SILU:
            u = z * s
        length = length_of(u, scale, normed, HEAD)
        along = sum_heads(g * u, HEAD) * length * length * tl.where(normed, length / (scale * scale), 0.0)
        g = g * length - u * along
    if SILU:
        g *= s * (1.0 + z * (1.0 - s))
    return g


@triton.jit
def spread(dz, waiting, taps, t, begin, PACKED: tl.constexpr):
    """Add token t's contribution: (gradients of x_t, …, x_{t-K+2}, the complete one of x_{t-K+1}).

    Tokens before `begin` are of other sequences and get nothing.
    """
    K: tl.constexpr = len(taps)
    done = tl.zeros(dz.shape, tl.float32)
    found = (taps[K - 1] * dz,)
    for j in tl.static_range(1, K):
        more = taps[K - 1 - j] * dz
        if PACKED:
            more = tl.where(t - j >= begin, more, 0.0)
        if j < K - 1:
            found = found + (waiting[j - 1] + more,)  # type: ignore[assignment]  # noqa: RUF005
        else:
            done = waiting[j - 1] + more
    return found, done


@triton.jit
def added_to(sums, dz, now, past):
    """Sums of dz_t x_{t-j}, j = 0, …, K - 1, and of dz_t."""
    found = (sums[0] + dz * now,)
    for j in tl.static_range(1, len(sums) - 1):
        found = found + (sums[j] + dz * past[j - 1],)  # type: ignore[assignment]  # noqa: RUF005
    return found + (sums[len(sums) - 1] + dz,)  # noqa: RUF005


@triton.jit
def zeros_of(c, COUNT: tl.constexpr):
    """COUNT tiles of zeros."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (tl.zeros(c.shape, tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _walk(
    of_x, given, bounds, piece, run, runs, dfinal, outs, T, count, steps, about: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, L: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx of one run of tokens, and its part of the weights' gradients."""
    x, batch_stride, stride = of_x
    weight, bias, state = given
    dx, _, sums = outs
    dy, g_batch, g_stride, width, c0, low, scale, normed = piece
    C: tl.constexpr = about[5]
    lane = tl.arange(0, BC)
    ok = c0 + lane < width
    c = low + c0 + lane
    i_b = (run // runs).to(tl.int64)
    x += i_b * batch_stride
    dx += i_b * T * C
    dy += i_b * g_batch + c0
    row = i_b * 0 + stride  # 64 bits
    first = run % runs * (ROWS - K + 1)
    AHEAD: tl.constexpr = about[8]
    rows, ends = T, None
    if AHEAD > 0:
        rows, ends = T + AHEAD, T
        dy -= AHEAD * g_stride
    last = tl.minimum(first + ROWS - K + 1, rows)
    sequence, begin, end = sequence_of(bounds, first, T, count, steps)
    past = before(x, start_of(state, i_b + sequence, C * (K - 1)), first, begin, row, c, ok, K, ends)
    taps, added = taps_of(weight, bias, c, ok, K)
    waiting = zeros_of(c, K - 1)
    total = zeros_of(c, K + 1)
    for t0 in range(first, tl.minimum(first + ROWS, rows + K - 1), L):
        loaded = rows_of(x, t0, T, row, c, ok, L)
        slopes = rows_of(dy, t0, rows, g_stride, lane, ok, L, AHEAD)
        for i in tl.static_range(L):
            t = t0 + i
            if bounds is not None:  # noqa: SIM102
                if (t >= end) & (t < T):
                    sequence, begin, end = sequence_of(bounds, t, T, count, steps)
                    past = first_before(start_of(state, sequence, C * (K - 1)), c, ok, K)
            now = loaded[i].to(tl.float32)
            z = convolved(now, past, taps, added)
            dz = slope_of(slopes[i].to(tl.float32), z, scale, normed, about[3], about[4])
            total = added_to(total, tl.where(t < last, dz, 0.0), now, past)
            waiting, done = spread(dz, waiting, taps, t, begin, bounds is not None)
            if dfinal is not None:
                column = t - end + K - 1
                at = dfinal + ((i_b + sequence) * C + c) * (K - 1) + column
                there = ok & (column >= 0) & (t < end)
                waiting = with_first(waiting, tl.load(at, mask=there, other=0.0).to(tl.float32))
            at = dx + (i_b * 0 + t - K + 1) * C + c
            there = ok & (t - K + 1 >= first) & (t - K + 1 < last)
            if AHEAD > 0:
                there &= t - K + 1 < T
            tl.store(at, done.to(dx.dtype.element_ty), mask=there)
            past = pushed(now, past)
    to = sums + run.to(tl.int64) * (K + 1) * C + c
    for j in tl.static_range(K + 1):
        tl.store(to + j * C, total[j], mask=ok)


@triton.jit
def _enter(
    of_x, given, bounds, piece, sequence, dfinal, dstate, T, about: tl.constexpr, K: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """The gradient of one sequence's state, from its first tokens."""
    x, batch_stride, stride = of_x
    weight, bias, state = given
    dy, g_batch, g_stride, width, c0, low, scale, normed = piece
    lane = tl.arange(0, BC)
    ok = c0 + lane < width
    c = low + c0 + lane
    begin, end = span_of(bounds, sequence, T)
    i_b = sequence.to(tl.int64)
    SIZE: tl.constexpr = about[5] * (K - 1)
    row = i_b * 0 + stride
    if bounds is None:
        x += i_b * batch_stride
        dy += i_b * g_batch
    dy += c0
    past = first_before(state + i_b * SIZE, c, ok, K)
    taps, added = taps_of(weight, bias, c, ok, K)
    waiting = zeros_of(c, K - 1)
    loaded = rows_of(x, begin, end, row, c, ok, K - 1)
    slopes = rows_of(dy, begin, end, g_stride, lane, ok, K - 1)
    for i in tl.static_range(K - 1):
        now = loaded[i].to(tl.float32)
        z = convolved(now, past, taps, added)
        dz = slope_of(slopes[i].to(tl.float32), z, scale, normed, about[3], about[4])
        waiting, done = spread(dz, waiting, taps, begin, begin, False)
        if dfinal is not None:  # the final state of a short sequence contains some of its initial state
            column = i - (end - begin)
            at = dfinal + i_b * SIZE + c * (K - 1) + column
            done += tl.load(at, mask=ok & (column >= 0), other=0.0).to(tl.float32)
        at = dstate + i_b * SIZE + c * (K - 1) + i
        tl.store(at, done.to(dstate.dtype.element_ty), mask=ok)
        past = pushed(now, past)


@triton.jit(do_not_specialize=["T", "runs", "count", "steps"])
def pull(
    x, batch_stride, stride, weight, bias, state, bounds, dys, dfinal, outs, T, runs, count, steps,
    about: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, L: tl.constexpr, BC: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """dx, dstate, and rows of sums for the weights: grid (BLOCKS · (runs · B + S)), without + S where no dstate.

    outs: dx [B, T, C], dstate [S, C, K - 1] or None, sums [B · runs, K + 1, C]: of dz_t x_{t-j}, then of dz_t. A run is
    ROWS - K + 1 tokens long; its program also reads K - 1 tokens of the next run. The other arguments as in `convolve`.
    """
    run = tl.program_id(0) // BLOCKS
    piece = piece_of(dys, tl.program_id(0) % BLOCKS, about, BC)
    of_x, given = (x, batch_stride, stride), (weight, bias, state)
    if outs[1] is None:
        _walk(of_x, given, bounds, piece, run, runs, dfinal, outs, T, count, steps, about, K, ROWS, L, BC)
    else:
        whole = tl.num_programs(0) // BLOCKS - count
        if run < whole:
            _walk(of_x, given, bounds, piece, run, runs, dfinal, outs, T, count, steps, about, K, ROWS, L, BC)
        else:
            _enter(of_x, given, bounds, piece, run - whole, dfinal, outs[1], T, about, K, BC)


@triton.jit
def with_first(tiles, more):
    """The tuple with `more` added to its first tile."""
    found = (tiles[0] + more,)
    for j in tl.static_range(1, len(tiles)):
        found = found + (tiles[j],)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit(do_not_specialize=["rows"])
def sum_rows(sums, weight, bias, rows, C: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Sums over rows of [rows, K + 1, C], in their order: the gradients of weight [C, K] and bias [C].

    Grid (C / BC, K + 1), or (C / BC, K) without a bias. sums[:, j] belongs to the input j tokens ago.
    """
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    j = tl.program_id(1)
    ok = c < C
    total = tl.zeros((BR, BC), tl.float32)
    for r0 in range(0, rows, BR):
        r = r0 + tl.arange(0, BR)
        at = sums + (r[:, None].to(tl.int64) * (K + 1) + j) * C + c[None, :]
        total += tl.load(at, mask=(r[:, None] < rows) & ok[None, :], other=0.0)
    found = tl.sum(total, axis=0)
    if j < K:
        tl.store(weight + c * K + (K - 1 - j), found.to(weight.dtype.element_ty), mask=ok)
    elif bias is not None:
        tl.store(bias + c, found.to(bias.dtype.element_ty), mask=ok)
