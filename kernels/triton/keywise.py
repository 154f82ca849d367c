"""Decays that differ along the Key axis: products between the rows of a chunk without an exponent above zero.

Rows i > j of a chunk meet in a block of 2m rows, i in its upper half and j in its lower one, where m is the highest bit
of i xor j. With the middle G' = G of the lower half's last row, exp(G_i - G_j) = exp(G_i - G') exp(G' - G_j), both at
most one. So each of the log2 L sizes m is one matrix product over all blocks at once (the binary form of GLA's
secondary chunking, arXiv 2312.06635 §4.3, where no pair of rows is left to elementwise work).

G is kept in units of log 2, chunk by chunk without gaps: [B·H, chunks · L, N] float32. So are the rows that the walks
multiply with states: queries and erased keys decayed from the chunk's start, written keys decayed to its end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.tiles import LOG2E, LOG_TINY, load_rows


@triton.jit
def prepare_keys(
    q, k, g, running, reads, erased, writes, scores, system,
    tokens, heads, length,
    q_b, q_t, q_h, q_group, k_b, k_t, k_h, k_group, g_b, g_t, g_h, g_group,
    N: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr, DELTA: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Log decays -> G, the rows for the walks, and scores[i, j] = Σ_n q_i k_j exp(G_i - G_j), i ≥ j [B, T, H, L].

    DELTA: also the erased keys, and system, the scores of k_i with k_j for i > j.
    """
    chunk, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = lane // heads, lane % heads
    keys, local = tl.arange(0, BN), tl.arange(0, L)
    rows = chunk * L + local
    log = load_rows(g + batch * g_b + head // g_group * g_h, g_t, rows, tokens, keys, N, BN, tl.float32)
    own = tl.cumsum(tl.maximum(log, LOG_TINY), axis=0) * LOG2E
    block = (lane * length + chunk * L) * N
    running += block
    store_chunk(running, own, local, keys, N, BN)
    last = tl.sum(tl.where((local == L - 1)[:, None], own, 0.0), axis=0)
    rows_q = load_rows(q + batch * q_b + head // q_group * q_h, q_t, rows, tokens, keys, N, BN, KIND)
    rows_k = load_rows(k + batch * k_b + head // k_group * k_h, k_t, rows, tokens, keys, N, BN, KIND)
    from_start = tl.exp2(own)
    store_chunk(reads + block, rows_q.to(tl.float32) * from_start, local, keys, N, BN)
    store_chunk(writes + block, rows_k.to(tl.float32) * tl.exp2(last[None, :] - own), local, keys, N, BN)
    if DELTA:
        store_chunk(erased + block, rows_k.to(tl.float32) * from_start, local, keys, N, BN)
    apart = local[:, None] ^ local[None, :]
    products = tl.sum(rows_q.to(tl.float32) * rows_k.to(tl.float32), axis=1)
    out = tl.where(apart == 0, products[:, None], 0.0)
    between_keys = tl.zeros([L, L], tl.float32)
    tl.debug_barrier()  # G is read again, by other threads
    for level in tl.range(0, LEVELS, num_stages=1):
        factor = halves(running, own, local, keys, level, N, BN)
        meet = ((apart >> level) == 1) & (local[:, None] > local[None, :])
        weighed = (rows_k.to(tl.float32) * factor).to(KIND)  # rows of the wrong half meet no other
        readers = (rows_q.to(tl.float32) * factor).to(KIND)
        out += tl.where(meet, tl.dot(readers, tl.trans(weighed), input_precision=PRECISION), 0.0)
        if DELTA:
            between_keys += tl.where(meet, tl.dot(weighed, tl.trans(weighed), input_precision=PRECISION), 0.0)
    at = (batch * tokens * heads + head) * L + rows[:, None].to(tl.int64) * heads * L + local[None, :]
    tl.store(scores + at, out.to(scores.dtype.element_ty), mask=rows[:, None] < tokens)
    if DELTA:
        tl.store(system + at, between_keys, mask=rows[:, None] < tokens)


@triton.jit
def store_chunk(base, x, local, keys, N: tl.constexpr, BN: tl.constexpr):
    """Write x [L, BN] as the rows of one chunk, without gaps."""
    at = base + local[:, None] * N + keys[None, :]
    if N == BN:
        tl.store(at, x.to(base.dtype.element_ty))
    else:
        tl.store(at, x.to(base.dtype.element_ty), mask=keys[None, :] < N)


@triton.jit
def load_chunk(base, local, keys, N: tl.constexpr, BN: tl.constexpr):
    """Rows `local` of a chunk [L, BN], in float32."""
    at = base + local[:, None] * N + keys[None, :]
    if N == BN:
        return tl.load(at).to(tl.float32)
    return tl.load(at, mask=keys[None, :] < N, other=0.0).to(tl.float32)


@triton.jit
def last_running(running, lane, length, chunk, keys, N: tl.constexpr, L: tl.constexpr):
    """G of a chunk's last row [BN]."""
    return tl.load(running + (lane * length + chunk * L + L - 1) * N + keys, mask=keys < N, other=0.0)


@triton.jit
def halves(running, own, local, keys, level, N: tl.constexpr, BN: tl.constexpr):
    """exp(-|G - G'|) [L, BN] at a block size of 2^(level+1); running: where the chunk's G begins, own: its rows."""
    middle = ((local >> (level + 1)) << (level + 1)) + (1 << level) - 1
    return tl.exp2(-tl.abs(own - load_chunk(running, middle, keys, N, BN)))


@triton.jit
def pair_products(
    out, log, weights, x, mine, running, own, local, keys,
    READS: tl.constexpr, LEVELS: tl.constexpr, N: tl.constexpr, BN: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out + Σ_j weights[i, j] exp(-|G_i - G_j|) x_j of rows j < i (READS) or j > i; log + mine ⊙ that sum.

    In log what a row reads of another and what that one writes to it cancel, so both are products of the same rounded
    factors: rows without their scales would leave, summed over a chunk, as much as what remains of strong decays.
    """
    meet = _meeting(local, READS)
    for level in tl.range(0, LEVELS, num_stages=1):
        factor = halves(running, own, local, keys, level, N, BN)
        there = rounded(x.to(tl.float32) * factor, KIND, PRECISION)
        weigh = tl.where((meet >> level) == 1, weights, 0.0).to(KIND)
        products = tl.dot(weigh, there, input_precision=PRECISION)
        out += products * factor
        log += products * rounded(mine.to(tl.float32) * factor, KIND, PRECISION).to(tl.float32)
    return out, log


@triton.jit
def rounded(x, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """float32 x as products take it: rounded to KIND, or to tf32's 10 bits."""
    if KIND == tl.float32 and PRECISION == "tf32":
        out = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    else:
        out = x.to(KIND)
    return out


@triton.jit
def _meeting(local, reads: tl.constexpr):
    """i xor j where row i reads row j < i (or is read by row j > i), else 0: its highest bit is where they meet."""
    apart = local[:, None] ^ local[None, :]
    if reads:
        return tl.where(local[:, None] > local[None, :], apart, 0)
    return tl.where(local[:, None] < local[None, :], apart, 0)
