"""The causal short convolution of [B, T, C] in place: channels on lanes, tokens in registers.

A program handles BC channels of a run of tokens and keeps the last K - 1 inputs in registers, so every number is read
once, except K - 1 rows a run. The output is split into several tensors, its *pieces* (q, k, v of one projection), some
of them normalised by head.

Memory: x [B, T, C] with any strides of B and T; weight [C, K]; bias [C]; state, final [S, C, K - 1] for S sequences;
bounds [S + 1], the boundaries of packed sequences. The tokens before a sequence's first one are in its state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton import functions as fn
from dsf.kernels.triton.early import begin, fetch


@triton.jit
def piece_of(ys, block, about: tl.constexpr, BC: tl.constexpr):
    """The piece of a block of channels: its tensor, strides of batch and time, width; the block's first channel in it;
    the piece's first channel among all; the scale of its heads; whether they are normalised.
    """
    zero = block * 0
    to, batch_stride, stride = ys[0], ys[1] + zero.to(tl.int64), ys[2] + zero.to(tl.int64)
    width, low, begin = zero + about[0][0], zero, zero
    scale, normed = zero.to(tl.float32) + about[2][0], zero + about[1][0] > 0
    for i in tl.static_range(1, len(about[0])):
        here = block >= about[6][i]
        to = tl.where(here, ys[3 * i], to)
        batch_stride = tl.where(here, ys[3 * i + 1], batch_stride)
        stride = tl.where(here, ys[3 * i + 2], stride)
        width = tl.where(here, about[0][i], width)
        low, begin = tl.where(here, about[6][i], low), tl.where(here, about[7][i], begin)
        scale, normed = tl.where(here, about[2][i], scale), tl.where(here, about[1][i] > 0, normed)
    return to, batch_stride, stride, width, (block - low) * BC, begin, scale, normed


@triton.jit
def sequence_of(bounds, t, T, count, steps):
    """(sequence of token t, its first token, the one after its last). Bounds are clamped to the row."""
    sequence, begin, end = t * 0, t * 0, t * 0 + T
    if bounds is not None:
        above = t * 0 + count
        for _ in range(steps):
            middle = (sequence + above) // 2
            later = tl.load(bounds + middle).to(tl.int32) > t
            above = tl.where(later, middle, above)
            sequence = tl.where(later, sequence, middle)
        begin = tl.minimum(tl.maximum(tl.load(bounds + sequence).to(tl.int32), 0), t)
        end = tl.maximum(tl.minimum(tl.load(bounds + sequence + 1).to(tl.int32), T), begin)
    return sequence, begin, end


@triton.jit
def span_of(bounds, sequence, T):
    """(first token of a sequence, the one after its last)."""
    begin, end = sequence * 0, sequence * 0 + T
    if bounds is not None:
        begin = tl.minimum(tl.maximum(tl.load(bounds + sequence).to(tl.int32), 0), T)
        end = tl.minimum(tl.maximum(tl.load(bounds + sequence + 1).to(tl.int32), begin), T)
    return begin, end


@triton.jit
def before(x, state, t, begin, stride, c, ok, K: tl.constexpr, end=None):
    """x_{t-1}, …, x_{t-K+1} in float32, those before `begin` from the state [C, K - 1]; zeros without one, and from
    `end` on, if any."""
    found = ()
    for j in tl.static_range(1, K):
        there = t - j >= begin
        if end is not None:
            there &= t - j < end
        value = tl.load(x + (t - j) * stride + c, mask=ok & there, other=0.0).to(tl.float32)
        if state is not None:
            column = t - j - begin + K - 1
            value += tl.load(state + c * (K - 1) + column, mask=ok & (column >= 0) & (column < K - 1), other=0.0).to(
                tl.float32
            )
        found = found + (value,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def start_of(state, sequence, SIZE: tl.constexpr):
    """A sequence's own part of the states, of SIZE numbers each."""
    start = state
    if state is not None:
        start = state + sequence.to(tl.int64) * SIZE
    return start


@triton.jit
def first_before(state, c, ok, K: tl.constexpr):
    """The inputs before a sequence's first token: its state, or zeros."""
    found = ()
    for j in tl.static_range(1, K):
        value = tl.zeros(c.shape, tl.float32)
        if state is not None:
            value = tl.load(state + c * (K - 1) + K - 1 - j, mask=ok, other=0.0).to(tl.float32)
        found = found + (value,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def rows_of(x, t0, end, stride, c, ok, L: tl.constexpr, LOW: tl.constexpr = 0):
    """L tokens from t0 on, zeros before LOW and from `end` on; all loads are issued together."""
    found = ()
    for i in tl.static_range(L):
        at = x + (t0 + i) * stride + c
        there = ok & (t0 + i < end)
        if LOW > 0:
            there &= t0 + i >= LOW
        found = found + (tl.load(at, mask=there, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def taps_of(weight, bias, c, ok, K: tl.constexpr):
    """w_0 (of the oldest input), …, w_{K-1} and the bias, in float32. All taps of a channel are loaded at once."""
    ALL: tl.constexpr = 2 if K == 2 else (4 if K <= 4 else 8)
    k = tl.arange(0, ALL)[None, :]
    whole = tl.load(weight + c[:, None] * K + k, mask=ok[:, None] & (k < K), other=0.0).to(tl.float32)
    found = ()
    for j in tl.static_range(K):
        found = found + (tl.sum(tl.where(k == j, whole, 0.0), axis=1),)  # type: ignore[assignment]  # noqa: RUF005
    added = tl.zeros(c.shape, tl.float32)
    if bias is not None:
        added = tl.load(bias + c, mask=ok, other=0.0).to(tl.float32)
    return found, added


@triton.jit
def pushed(now, past):
    """(now, *past) without the last."""
    found = (now,)
    for j in tl.static_range(len(past) - 1):
        found = found + (past[j],)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def convolved(now, past, taps, added):
    """Σ_j w_{K-1-j} x_{t-j} + bias."""
    K: tl.constexpr = len(taps)
    z = added + taps[K - 1] * now
    for j in tl.static_range(1, K):
        z += taps[K - 1 - j] * past[j - 1]
    return z


@triton.jit
def sum_heads(x, HEAD: tl.constexpr):
    """Sums over heads of HEAD contiguous channels, repeated for all channels of the head. x: [BC]."""
    apart = tl.reshape(x, (x.shape[0] // HEAD, HEAD))
    sums = tl.broadcast_to(tl.sum(apart, axis=1)[:, None], apart.shape)
    return tl.reshape(sums, x.shape)


@triton.jit
def length_of(u, scale, normed, HEAD: tl.constexpr):
    """The factor that makes every head a vector of length `scale`; 1 in pieces that are not normalised."""
    return tl.where(normed, scale * tl.rsqrt(sum_heads(u * u, HEAD) + 1e-6), 1.0)


@triton.jit
def activated(z, SILU: tl.constexpr):
    """silu(z), or z."""
    u = z
    if SILU:
        u = z * fn.sigmoid(z)
    return u


@triton.jit
def _walk(
    of_x, given, bounds, piece, run, runs, T, count, steps, about: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr,
    L: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y of one run of tokens."""
    x, batch_stride, stride = of_x
    weight, bias, state = given
    to, y_batch, y_stride, width, c0, low, scale, normed = piece
    HEAD: tl.constexpr = about[4]
    C: tl.constexpr = about[5]
    lane = tl.arange(0, BC)
    ok = c0 + lane < width
    c = low + c0 + lane
    i_b = (run // runs).to(tl.int64)
    x += i_b * batch_stride
    to += i_b * y_batch + c0
    row = i_b * 0 + stride  # 64 bits
    first = run % runs * SPAN
    AHEAD: tl.constexpr = about[8]
    last = tl.minimum(first + SPAN, T)
    there, ends = last, None
    if AHEAD > 0:  # t counts inputs, zeros after the last; y lies AHEAD rows before
        last = tl.minimum(first + SPAN, T + AHEAD)
        to -= AHEAD * y_stride
        ends = T
    sequence, begin, end = sequence_of(bounds, first, T, count, steps)
    past = before(x, start_of(state, i_b + sequence, C * (K - 1)), first, begin, row, c, ok, K, ends)
    taps, added = taps_of(weight, bias, c, ok, K)
    for t0 in range(first, last, L):
        loaded = rows_of(x, t0, there, row, c, ok, L)
        for i in tl.static_range(L):
            t = t0 + i
            if bounds is not None:  # noqa: SIM102
                if t >= end:
                    sequence, begin, end = sequence_of(bounds, tl.minimum(t, T - 1), T, count, steps)
                    past = first_before(start_of(state, sequence, C * (K - 1)), c, ok, K)
            now = loaded[i].to(tl.float32)
            u = activated(convolved(now, past, taps, added), about[3])
            if HEAD > 0:
                u *= length_of(u, scale, normed, HEAD)
            kept = ok & (t < last)
            if AHEAD > 0:
                kept &= t >= AHEAD
            tl.store(to + t * y_stride + lane, u.to(to.dtype.element_ty), mask=kept)
            past = pushed(now, past)


@triton.jit
def _leave(
    of_x, given, bounds, piece, sequence, final, T, about: tl.constexpr, K: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """The state after one sequence."""
    x, batch_stride, stride = of_x
    _, _, _, width, c0, low, _, _ = piece
    lane = tl.arange(0, BC)
    ok = c0 + lane < width
    c = low + c0 + lane
    begin, end = span_of(bounds, sequence, T)
    i_b = sequence.to(tl.int64)
    row = i_b * 0 + stride
    if bounds is None:
        x += i_b * batch_stride
    SIZE: tl.constexpr = about[5] * (K - 1)
    past = before(x, start_of(given[2], sequence, SIZE), end, begin, row, c, ok, K)
    for j in tl.static_range(1, K):
        at = final + i_b * SIZE + c * (K - 1) + (K - 1 - j)
        tl.store(at, past[j - 1].to(final.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["T", "runs", "count", "steps"])
def convolve(
    x, batch_stride, stride, weight, bias, state, bounds, ys, final, T, runs, count, steps,
    about: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr, L: tl.constexpr, BC: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """y and the final state. Grid (BLOCKS · (runs · B + S)), blocks of channels fastest; the last S fill `final`.

    ys: (tensor, stride of batch, stride of time) of every piece, in order. about: (widths, heads, scales of
    the pieces, SiLU, the largest head, C, the pieces' first blocks, their first channels, how many later tokens an
    output reads). Where it reads any, S is 0 and runs are of T and so many tokens. steps: bits of S.
    """
    run = tl.program_id(0) // BLOCKS
    whole = tl.num_programs(0) // BLOCKS - count
    piece = piece_of(ys, tl.program_id(0) % BLOCKS, about, BC)
    of_x, given = (x, batch_stride, stride), (weight, bias, state)
    if run < whole:
        _walk(of_x, given, bounds, piece, run, runs, T, count, steps, about, K, SPAN, L, BC)
    else:
        _leave(of_x, given, bounds, piece, run - whole, final, T, about, K, BC)


@triton.jit
def convolve_step(
    x, batch_stride, weight, bias, state, ys, new, about: tl.constexpr, K: tl.constexpr, BC: tl.constexpr,
    BLOCKS: tl.constexpr, EARLY: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    """One token of every sequence: grid (BLOCKS · B). new may be the state, which is read before it is written."""
    block = tl.program_id(0) % BLOCKS
    i_b = (tl.program_id(0) // BLOCKS).to(tl.int64)
    C: tl.constexpr = about[5]
    HEAD: tl.constexpr = about[4]
    to, y_batch, _, width, c0, low, scale, normed = piece_of(ys, block, about, BC)
    lane = tl.arange(0, BC)
    ok = c0 + lane < width
    c = low + c0 + lane
    own = i_b * C * (K - 1)
    if FETCH:
        fetch(weight + c * K, ok)
        if state is not None:
            fetch(state + own + c * (K - 1), ok)
    begin(EARLY)
    past = first_before(start_of(state, i_b, C * (K - 1)), c, ok, K)
    taps, added = taps_of(weight, bias, c, ok, K)
    now = tl.load(x + i_b * batch_stride + c, mask=ok, other=0.0).to(tl.float32)
    u = activated(convolved(now, past, taps, added), about[3])
    if HEAD > 0:
        u *= length_of(u, scale, normed, HEAD)
    tl.store(to + i_b * y_batch + c0 + lane, u.to(to.dtype.element_ty), mask=ok)
    tl.debug_barrier()  # another thread may have read the state's numbers
    past = pushed(now, past)
    for j in tl.static_range(1, K):
        tl.store(new + own + c * (K - 1) + (K - 1 - j), past[j - 1].to(new.dtype.element_ty), mask=ok)
