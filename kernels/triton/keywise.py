"""Decays that differ along the Key axis: products between the rows of a chunk without an exponent above zero.

Rows i > j of a chunk meet in a block of 2m rows, i in its upper half and j in its lower one, where m is the highest bit
of i xor j. With the middle G' = G of the lower half's last row, exp(G_i - G_j) = exp(G_i - G') exp(G' - G_j), both at
most one. So each of the log2 L sizes m is one matrix product over all blocks at once (the binary form of GLA's
secondary chunking, arXiv 2312.06635 §4.3, where no pair of rows is left to elementwise work).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.tiles import LOG_TINY, load_rows, store_rows


@triton.jit
def prepare_keys(
    g, running, tokens, heads, g_b, g_t, g_h, g_group,
    N: tl.constexpr, BN: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Log decays [B, T, Hg, N] -> running sums over each chunk [B, T, H, N], float32."""
    chunk, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = lane // heads, lane % heads
    keys, rows = tl.arange(0, BN), chunk * L + tl.arange(0, L)
    log = load_rows(g + batch * g_b + head // g_group * g_h, g_t, rows, tokens, keys, N, BN, tl.float32)
    sums = tl.cumsum(tl.maximum(log, LOG_TINY), axis=0)
    store_rows(running + (batch * tokens * heads + head) * N, heads * N, rows, tokens, keys, N, BN, sums)


@triton.jit
def last_running(running, stride, chunk, tokens, keys, N: tl.constexpr, L: tl.constexpr):
    """G of a chunk's last row [BN]."""
    last = tl.minimum(chunk * L + L - 1, tokens - 1).to(tl.int64)
    return tl.load(running + last * stride + keys, mask=keys < N, other=0.0)


@triton.jit
def _halves(running, stride, start, tokens, local, keys, level, N: tl.constexpr, BN: tl.constexpr):
    """exp(-|G - G'|) [L, BN] at a block size of 2^(level+1), zero exponent beyond the sequence."""
    middle = start + ((local >> (level + 1)) << (level + 1)) + (1 << level) - 1
    anchor = load_rows(running, stride, tl.minimum(middle, tokens - 1), tokens, keys, N, BN, tl.float32)
    own = load_rows(running, stride, start + local, tokens, keys, N, BN, tl.float32)
    return tl.exp(-tl.abs(own - anchor))


@triton.jit
def read_products(
    weights, x, running, stride, start, tokens, local, keys,
    LEVELS: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[i] Σ_{j < i} weights[i, j] exp(G_i - G_j) x_j, [L, BN]."""
    out = tl.zeros([x.shape[0], BN], tl.float32)
    apart = local[:, None] ^ local[None, :]
    for level in tl.range(0, LEVELS, num_stages=1):
        factor = _halves(running, stride, start, tokens, local, keys, level, N, BN)
        upper = ((local >> level) & 1)[:, None] == 1
        sources = tl.where(upper, 0.0, x.to(tl.float32) * factor).to(KIND)
        mine = tl.where((apart >> level) == 1, weights, 0.0).to(KIND)
        out += tl.where(upper, tl.dot(mine, sources, input_precision=PRECISION) * factor, 0.0)
    return out


@triton.jit
def source_products(
    weights, x, running, stride, start, tokens, local, keys,
    LEVELS: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[j] Σ_{i > j} weights[j, i] exp(G_i - G_j) x_i, [L, BN]."""
    out = tl.zeros([x.shape[0], BN], tl.float32)
    apart = local[:, None] ^ local[None, :]
    for level in tl.range(0, LEVELS, num_stages=1):
        factor = _halves(running, stride, start, tokens, local, keys, level, N, BN)
        upper = ((local >> level) & 1)[:, None] == 1
        readers = tl.where(upper, x.to(tl.float32) * factor, 0.0).to(KIND)
        mine = tl.where((apart >> level) == 1, weights, 0.0).to(KIND)
        out += tl.where(upper, 0.0, tl.dot(mine, readers, input_precision=PRECISION) * factor)
    return out


@triton.jit
def key_scores(
    q, k, running, scores, system,
    tokens, heads, q_b, q_t, q_h, q_group, k_b, k_t, k_h, k_group,
    N: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr, DELTA: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scores[i, j] = Σ_n q_i k_j exp(G_i - G_j), i ≥ j, and (DELTA) system, the same of k_i, i > j: [B, T, H, L]."""
    chunk, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = lane // heads, lane % heads
    keys, local = tl.arange(0, BN), tl.arange(0, L)
    start = chunk * L
    rows = start + local
    flat = batch * tokens * heads + head
    running += flat * N
    rows_q = load_rows(q + batch * q_b + head // q_group * q_h, q_t, rows, tokens, keys, N, BN, KIND).to(tl.float32)
    rows_k = load_rows(k + batch * k_b + head // k_group * k_h, k_t, rows, tokens, keys, N, BN, KIND).to(tl.float32)
    apart = local[:, None] ^ local[None, :]
    out = tl.where(apart == 0, tl.sum(rows_q * rows_k, axis=1)[:, None], 0.0)
    erased = tl.zeros([L, L], tl.float32)
    for level in tl.range(0, LEVELS, num_stages=1):
        factor = _halves(running, heads * N, start, tokens, local, keys, level, N, BN)
        upper = ((local >> level) & 1)[:, None] == 1
        meet = ((apart >> level) == 1) & (local[:, None] > local[None, :])
        sources = tl.where(upper, 0.0, rows_k * factor).to(KIND)
        readers = tl.where(upper, rows_q * factor, 0.0).to(KIND)
        out += tl.where(meet, tl.dot(readers, tl.trans(sources), input_precision=PRECISION), 0.0)
        if DELTA:
            readers = tl.where(upper, rows_k * factor, 0.0).to(KIND)
            erased += tl.where(meet, tl.dot(readers, tl.trans(sources), input_precision=PRECISION), 0.0)
    at = flat * L + rows[:, None].to(tl.int64) * heads * L + local[None, :]
    tl.store(scores + at, out.to(scores.dtype.element_ty), mask=rows[:, None] < tokens)
    if DELTA:
        tl.store(system + at, erased, mask=rows[:, None] < tokens)
