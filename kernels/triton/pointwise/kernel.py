"""The pointwise kernels: run a spec's printed expressions for every token and head, and the running maximum.

A program handles one head and `span` tokens, K tokens at a time. A tile is [K, N, P], of size one along axes that an
expression lacks, so that a program has whole Key and Value vectors and their sums. The expressions are printed
functions (dsf.triton.print_chunk) that load, compute and store:

    body(args, sums, at) -> sums, after storing a tile      zeros(NB, BP) -> sums before the first tile
    finish(args, sums, at, row): stores the sums over this program's tokens as row `row`

args: pointers and strides; at: the position of the tile, as in the fused scan (scan/tiles.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.early import begin, fetch
from dsf.kernels.triton.packed import place_of_chunk, sequence_of_chunk

LINE = tl.constexpr(32)  # numbers of a state that caches hold together


@triton.jit
def no_sums(NB: tl.constexpr, BP: tl.constexpr):
    """`zeros` where nothing is summed over tokens."""
    return (tl.zeros((1, 1, 1), tl.float32),)


@triton.jit
def no_finish(args, sums, at, row):
    """`finish` where nothing is summed over tokens."""
    pass


@triton.jit
def place_of(i_b, i_h, t0, T, H, P, N: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, BP: tl.constexpr):
    """The position of the tile at token t0."""
    t = tl.arange(0, K)[:, None, None]
    n = tl.arange(0, NB)[None, :, None]
    p = tl.arange(0, BP)[None, None, :]
    return i_b, i_h, t0, t, n, p, t0 + t < T, n < N, p < P, 0, 0, T, H, P, N


@triton.jit(do_not_specialize=["T", "span", "segments"])
def pointwise(
    args, T, span, segments,
    body: tl.constexpr, zeros: tl.constexpr, finish: tl.constexpr,
    H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """All tokens of B sequences and H heads. Grid (H · segments · B), heads fastest."""
    program = tl.program_id(0)
    i_h = (program % H).to(tl.int64)
    segment = (program // H) % segments
    i_b = (program // H // segments).to(tl.int64)
    begin = segment * span
    sums = zeros(NB, BP)
    for t0 in range(begin, tl.minimum(begin + span, T), K):
        sums = body(args, sums, place_of(i_b, i_h, i_b * 0 + t0, T, H, P, N, K, NB, BP))
    finish(args, sums, place_of(i_b, i_h, i_b * 0 + begin, T, H, P, N, K, NB, BP), i_b * segments + segment)


@triton.jit
def _later(drift, level, drift_next, level_next):
    """Composition of two maps m → max(m + drift, level)."""
    return drift + drift_next, tl.maximum(level + drift_next, level_next)


@triton.jit
def _maps(args, i_b, i_h, t0, T, H, body: tl.constexpr, K: tl.constexpr):
    """For every row of a block, the running maximum's map over all rows up to it: (drift, level) [K]."""
    log, gain = body(args, place_of(i_b, i_h, t0, T, H, 1, 1, K, 1, 1))
    inside = t0 + tl.arange(0, K) < T
    log = tl.where(inside, tl.reshape(tl.broadcast_to(log, (K, 1, 1)), (K,)), 0.0)
    gain = tl.where(inside, tl.reshape(tl.broadcast_to(gain, (K, 1, 1)), (K,)), -1e30)
    return tl.associative_scan((log, gain), 0, _later)


@triton.jit(do_not_specialize=["T", "blocks"])
def level_blocks(args, maps, table, T, H, blocks, body: tl.constexpr, K: tl.constexpr):
    """The running maximum's map of each block of K tokens: maps [B·H, blocks, 2] of (drift, level)."""
    block, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin, end = place_of_chunk(table, block, T, K)
    drift, level = _maps(args, lane // H, lane % H, lane * 0 + begin, end, H, body, K)
    last = tl.arange(0, K) == K - 1
    to = maps + (lane * blocks + block) * 2
    tl.store(to, tl.sum(tl.where(last, drift, 0.0), 0))
    tl.store(to + 1, tl.sum(tl.where(last, level, 0.0), 0))


@triton.jit(do_not_specialize=["T", "blocks"])
def levels(args, maps, first, out, last, table, T, H, blocks, body: tl.constexpr, K: tl.constexpr):
    """m_r = max(m_{r-1} + log decay_r, gain_r): out [2, B·H, T] before and after every row, and the last m.

    first: m_0 [B·H], or None; for packed sequences first and last are [S, H].
    """
    block, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin, end = place_of_chunk(table, block, T, K)
    sequence, low = sequence_of_chunk(table, block)
    lanes = tl.num_programs(1)
    level = tl.full((), -1e30, tl.float32)
    if first is not None:
        level = tl.load(first + sequence * lanes + lane)
    for before in range(low, block):
        at = maps + (lane * blocks + before) * 2
        level = tl.maximum(level + tl.load(at), tl.load(at + 1))
    drift, own = _maps(args, lane // H, lane % H, lane * 0 + begin, end, H, body, K)
    local = tl.arange(0, K)
    rows = begin + local
    to, after = out + lane * T + rows, tl.maximum(level + drift, own)
    # before the first write there is nothing to decay, and adding to -1e30 would lose all digits
    level = tl.where(level > -1e29, level, tl.sum(tl.where(local == 0, after, 0.0), 0))
    tl.store(to, tl.zeros([K], tl.float32) + level, mask=(local == 0) & (rows < end))
    tl.store(to + 1, after, mask=(local < K - 1) & (rows + 1 < end))
    tl.store(to + lanes * T, after, mask=rows < end)
    tl.store(last + sequence * lanes + lane + local * 0, after, mask=rows == end - 1)


@triton.jit
def step(
    args, state, H, P, body: tl.constexpr, shared: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr,
    NB: tl.constexpr, BP: tl.constexpr, BLOCKS: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr,
    FETCH: tl.constexpr,
):  # fmt: skip
    """One token of every sequence. A program handles BLOCKS · BP channels of HEADS heads, which lie along a tile's axis
    of tokens. Grid (P / BLOCKS / BP · H / HEADS · B).

    state: [B, H, N, COLUMNS], which `body` reads and may overwrite. shared: printed function for what all channels
    share, which overwrites the state's columns that belong to none; None where there are no such columns.
    """
    program = tl.program_id(0)
    parts = tl.cdiv(P, BP * BLOCKS)
    part = program % parts
    runs = tl.cdiv(H, HEADS)
    first = program // parts % runs * HEADS
    i_b = (program // parts // runs).to(tl.int64)
    n = tl.arange(0, NB)[None, :, None].to(tl.int64)  # its constant multiples become offsets inside instructions
    p = tl.arange(0, BP)[None, None, :]
    if HEADS > 1:
        heads = first + tl.arange(0, HEADS)[:, None, None]
        t, t_ok = heads * 0, heads < H
        i_h = tl.minimum(heads, H - 1).to(tl.int64)
        n_ok = (n < N) & t_ok
    else:
        t = tl.arange(0, 1)[:, None, None]
        t_ok, i_h, n_ok = t < 1, first.to(tl.int64), n < N
        if FETCH:
            for block in range(BLOCKS):
                lines = (part * BLOCKS + block) * BP + tl.arange(0, (BP + LINE - 1) // LINE)[None, None, :] * LINE
                fetch(state + ((i_b * H + i_h) * N + n) * COLUMNS + lines, n_ok & (lines < P))
    held = (t,)
    begin(EARLY)
    if shared is not None:
        held = shared(args, (i_b, i_h, i_b * 0, t, n, p, t_ok, n_ok, p < P, part, part, 1, H, P, N, COLUMNS))
    for block in range(BLOCKS):
        place = part * BLOCKS + block
        channel = place * BP + p
        p_ok = channel < P
        if HEADS > 1:
            p_ok = p_ok & t_ok
        at = (i_b, i_h, i_b * 0, t, n, channel, t_ok, n_ok, p_ok, place, place * BP, 1, H, P, N, COLUMNS)
        body(args, at, held)
