"""Decays that differ along the Key axis: products between the rows of a chunk without an exponent above zero.

Rows i > j of a chunk meet in a block of 2m rows, i in its upper half and j in its lower one, where m is the highest bit
of i xor j. With the middle G' = G of the lower half's last row, exp(G_i - G_j) = exp(G_i - G') exp(G' - G_j), both at
most one. So each of the log2 L sizes m is one matrix product over all blocks at once (the binary form of GLA's
secondary chunking, arXiv 2312.06635 §4.3, where no pair of rows is left to elementwise work).

Where float32 holds exp(-G) of all rows, no blocks are needed: exp(G_i) exp(-G_j) is one product for all rows, and its
pairs with exponents above zero are not used. Scores use this product for the rows i whose own G lies from -SPAN to
RISE, so that no bit of a row depends on later rows; both factors are moved by LIFT, to the middle of float32's
range. Gradients use it, relative to the middle row, for whole blocks in which
every G is within REACH of the middle; the preparation finds the largest such blocks of each chunk. With slow decays one
product a chunk is left, in a kernel of few registers; a second launch handles the other chunks.

G is kept in units of log 2, chunk by chunk without gaps: [B·H, chunks · L, N] float32. So are the rows that the walks
multiply with states: queries and erased keys decayed from the chunk's start, written keys decayed to its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.tiles import LOG_TINY, Chunked, is_later, load_rows, running_sums, store_rows
from dsf.kernels.triton.packed import place_of_chunk
from dsf.kernels.triton.structs import of_head

SPAN = tl.constexpr(160.0)  # a chunk of 64 rows of a KDA layer reaches 148 at initialisation
RISE = tl.constexpr(64.0)
LIFT, DROP = tl.constexpr(2.0**55), tl.constexpr(2.0**-55)
GROUP = tl.constexpr(8)  # chunks that a program checks for those whose rows do not all meet in one product
REACH = tl.constexpr(80.0)  # at least the largest log decay, -LOG_TINY * LOG2E


class KeyRows(NamedTuple):
    """What a call computes from its rows; tensors that are not needed are empty.

    running: G [B·H, chunks · L, N], in float32 calls as two numbers [2, ·]; first_levels [B·H, chunks]; scores
    [B, T, H, L]; reads, writes, erased [B, H, T', N]; rest: the rounding errors of scores (delta rules) or of reads.
    The forward walk fills: entries (v_new) [B, T, H, P · terms], states [B, H, chunks, N, P], and passed, what each of
    several segments multiplies its first state by [segments, B·H, ·]. All are contiguous: what saves tensors for
    gradients elsewhere (torch.autograd.graph.save_on_cpu) may bring them back without the strides that they had.
    """

    running: Any
    first_levels: Any
    scores: Any
    reads: Any
    writes: Any
    erased: Any
    rest: Any
    entries: Any
    states: Any
    passed: Any


class Running(NamedTuple):
    """G of a chunk's rows and, where FINE, the part of G that one float32 number loses."""

    at: Any
    rest: Any


@dataclass(frozen=True, repr=False)
class Keyed(Chunked):
    """BK keys at a time, 2 ^ LEVELS rows a chunk. TERMS: bfloat16 terms of the products between its rows.

    KEEP: store all of G; otherwise, for most chunks, only two rows of it.
    """

    BK: int
    LEVELS: int
    TERMS: int
    KEEP: bool = True


@triton.jit
def prepare_keys(q, k, r, g, made, left, table, sizes, C: tl.constexpr):
    """Log decays -> G, the rows for the walks, and scores[i, j] = Σ_n q_i k_j exp(G_i - G_j), i ≥ j [B, T, H, L].

    DELTA: also the erased keys, and in `left` [B, T, H, L] the scores of k_i with k_j for i > j; where r is given, its
    rows stand for k_i in both. first_levels: the highest level for chunks in which all rows meet in one product, else
    0, and prepare_far_keys computes their missing scores. TERMS 2: also rounding errors: with DELTA of the scores (in
    `rest`), else of written keys (in `left`) and, with KEEP, of the queries' rows (in `rest`). Products between rows
    are in tf32, which has three more bits than bfloat16.
    """
    heads: tl.constexpr = sizes.heads
    chunk, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = lane // heads, lane % heads
    q, k, g = of_head(q, batch, head), of_head(k, batch, head), of_head(g, batch, head)
    if r.at is not None:
        r = of_head(r, batch, head)
    BLOCKS: tl.constexpr = (C.N + C.BK - 1) // C.BK
    local = tl.arange(0, C.L)
    begin, end = place_of_chunk(table, chunk, sizes.tokens, C.L)
    rows = begin + local
    here = (lane * sizes.length + chunk * C.L) * C.N
    row = (batch * sizes.tokens * heads + head) * C.L
    scores, rest, system = made.scores + row, made.rest + row if C.DELTA else made.rest, left + row
    running = Running(made.running + here, made.running + here + (lane * 0 + sizes.plane) * C.N)
    between_rows, between_keys = tl.zeros([C.L, C.L], tl.float32), tl.zeros([C.L, C.L], tl.float32)
    far = tl.full([C.L], -1.0, tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=1):
        keys = block * C.BK + tl.arange(0, C.BK)
        log = load_rows(g.at, g.token, rows, end, keys, C.N, C.BK, tl.float32)
        rows_q = load_rows(q.at, q.token, rows, end, keys, C.N, C.BK, C.KIND)
        rows_k = load_rows(k.at, k.token, rows, end, keys, C.N, C.BK, C.KIND)
        own, more = running_sums(tl.maximum(log, LOG_TINY), 0, C.FINE)
        kept = tl.full([C.L], True, tl.int1) if C.KEEP else (local == C.L - 1) | (local == C.L // 2 - 1)
        kept = kept[:, None] & (keys < C.N)[None, :]
        tl.store(running.at + local[:, None] * C.N + keys[None, :], own, mask=kept)
        if C.FINE:
            tl.store(running.rest + local[:, None] * C.N + keys[None, :], more, mask=kept)
        tl.debug_barrier()  # two rows are read again, by other threads
        last, middle = load_row(running.at, C.L - 1, keys, C.N), load_row(running.at, C.L // 2 - 1, keys, C.N)
        beyond = tl.maximum(tl.abs(own - middle[None, :]) - REACH, _outside(own))
        far = tl.maximum(far, tl.max(beyond, axis=1))
        written = last[None, :] - own
        if C.FINE:
            written += load_row(running.rest, C.L - 1, keys, C.N)[None, :] - more
        written = rows_k.to(tl.float32) * tl.exp2(written)
        store_chunk(made.writes + here, written, local, keys, C.N, C.BK)
        if C.TERMS == 2 and not C.DELTA:
            store_chunk(left + here, written - written.to(C.KIND).to(tl.float32), local, keys, C.N, C.BK)
        half = tl.exp2(tl.minimum(-own, SPAN) * 0.5)  # roots of the factors, whose products are in range
        weighed = half * DROP * half
        half = tl.exp2(own * 0.5)
        from_start, lifted = half * half, half * LIFT * half
        if C.FINE:
            weighed *= tl.exp2(-more)
            from_start *= tl.exp2(more)
            lifted *= tl.exp2(more)
        weighed = operand(rows_k.to(tl.float32) * weighed, C.PRECISION)
        readers = rows_q.to(tl.float32) * from_start
        store_chunk(made.reads + here, readers, local, keys, C.N, C.BK)
        if C.TERMS == 2 and C.KEEP and not C.DELTA:
            store_chunk(made.rest + here, readers - readers.to(C.KIND).to(tl.float32), local, keys, C.N, C.BK)
        readers = tl.trans(operand(rows_q.to(tl.float32) * lifted, C.PRECISION))
        between_rows += tl.dot(weighed, readers, input_precision=C.PRECISION)  # sources down, readers across
        if C.DELTA:
            rows_r = rows_k
            if r.at is not None:
                rows_r = load_rows(r.at, r.token, rows, end, keys, C.N, C.BK, C.KIND)
            readers = rows_r.to(tl.float32) * from_start
            store_chunk(made.erased + here, readers, local, keys, C.N, C.BK)
            readers = tl.trans(operand(rows_r.to(tl.float32) * lifted, C.PRECISION))
            between_keys += tl.dot(weighed, readers, input_precision=C.PRECISION)
    once = tl.max(far, axis=0) <= 0
    between_rows, between_keys = tl.trans(between_rows), tl.trans(between_keys)
    tl.store(made.first_levels + lane * (sizes.length // C.L) + chunk, tl.where(once, C.LEVELS - 1, 0))
    _store_scores(scores, rest, system, between_rows, between_keys, rows, end, heads, local, C)


@triton.jit
def prepare_far_keys(q, k, r, g, made, left, table, sizes, C: tl.constexpr):
    """The scores of rows whose G is outside of SPAN and RISE, by blocks, and the first level, of every GROUP chunks
    that need it."""
    heads: tl.constexpr = sizes.heads
    tokens, length = sizes.tokens, sizes.length
    lane = tl.program_id(1).to(tl.int64)
    batch, head = lane // heads, lane % heads
    q, k, g = of_head(q, batch, head), of_head(k, batch, head), of_head(g, batch, head)
    if r.at is not None:
        r = of_head(r, batch, head)
    row = (batch * tokens * heads + head) * C.L
    scores, rest, system = made.scores + row, made.rest + row if C.DELTA else made.rest, left + row
    running = made.running + lane * length * C.N
    first_levels = made.first_levels + lane * (length // C.L)
    BLOCKS: tl.constexpr = (C.N + C.BK - 1) // C.BK
    local = tl.arange(0, C.L)
    first = tl.program_id(0) * GROUP
    for chunk in tl.range(first, tl.minimum(first + GROUP, length // C.L), num_stages=1):
        if tl.load(first_levels + chunk) < C.LEVELS - 1:
            begin, end = place_of_chunk(table, chunk, tokens, C.L)
            rows, here = begin + local, running + chunk * C.L * C.N
            here = Running(here, here + (lane * 0 + sizes.plane) * C.N)
            outside, far = tl.full([C.L], -1.0, tl.float32), tl.zeros([C.L], tl.float32)
            for block in tl.range(0, BLOCKS, num_stages=1):
                keys = block * C.BK + tl.arange(0, C.BK)
                if C.KEEP:
                    own = load_chunk(here.at, local, keys, C.N, C.BK)
                else:
                    log = load_rows(g.at, g.token, rows, end, keys, C.N, C.BK, tl.float32)
                    own, more = running_sums(tl.maximum(log, LOG_TINY), 0, C.FINE)
                    store_chunk(here.at, own, local, keys, C.N, C.BK)
                    if C.FINE:
                        store_chunk(here.rest, more, local, keys, C.N, C.BK)
                    tl.debug_barrier()  # it is read again, by other threads
                outside = tl.maximum(outside, tl.max(_outside(own), axis=1))
                gap = own - load_row(here.at, C.L // 2 - 1, keys, C.N)[None, :]
                far = tl.maximum(far, tl.max(tl.abs(gap), axis=1))
            tl.store(first_levels + chunk, first_level(tl.max(far, axis=0), here.at, local, C.N, C.BK, C.LEVELS))
            meet = meeting(local, 0)
            between_rows, between_keys = tl.zeros([C.L, C.L], tl.float32), tl.zeros([C.L, C.L], tl.float32)
            for step in tl.range(0, C.LEVELS * BLOCKS, num_stages=1):
                level, keys = step // BLOCKS, step % BLOCKS * C.BK + tl.arange(0, C.BK)
                reader, writer = factors(here, local, keys, level, C.N, C.BK, C.FINE)
                met = (meet >> level) == 1
                rows_k = load_rows(k.at, k.token, rows, end, keys, C.N, C.BK, tl.float32)
                weighed = tl.trans(operand(rows_k * writer, C.PRECISION))
                readers = operand(
                    load_rows(q.at, q.token, rows, end, keys, C.N, C.BK, tl.float32) * reader, C.PRECISION
                )
                between_rows += tl.where(met, tl.dot(readers, weighed, input_precision=C.PRECISION), 0.0)
                if C.DELTA:
                    rows_r = rows_k
                    if r.at is not None:
                        rows_r = load_rows(r.at, r.token, rows, end, keys, C.N, C.BK, tl.float32)
                    readers = operand(rows_r * reader, C.PRECISION)
                    product = tl.dot(readers, weighed, input_precision=C.PRECISION)
                    between_keys += tl.where(met, product, 0.0)
            rows = tl.where(outside <= 0, end, rows)  # these rows already have their scores
            _store_scores(scores, rest, system, between_rows, between_keys, rows, end, heads, local, C)


@triton.jit
def _outside(own):
    """How far G lies outside of what one product for all rows takes; negative inside of it."""
    return tl.maximum(-own - SPAN, own - RISE)


@triton.jit
def _store_scores(scores, rest, system, between_rows, between_keys, rows, end, heads, local, C: tl.constexpr):
    """Write the products of rows that read rows before them, queries also their own."""
    between_rows = tl.where(local[:, None] >= local[None, :], between_rows, 0.0)
    store_rows(scores, heads * C.L, rows, end, local, C.L, C.L, between_rows)
    if C.TERMS == 2 and C.DELTA:
        left = between_rows - between_rows.to(scores.dtype.element_ty).to(tl.float32)
        store_rows(rest, heads * C.L, rows, end, local, C.L, C.L, left)
    if C.DELTA:
        between_keys = tl.where(is_later(local[:, None], local[None, :], C.GROUP), between_keys, 0.0)
        store_rows(system, heads * C.L, rows, end, local, C.L, C.L, between_keys)


@triton.jit
def store_chunk(base, x, local, keys, N: tl.constexpr, BN: tl.constexpr):
    """Store x [L, BN] as the rows of one chunk, without gaps."""
    at = base + local[:, None] * N + keys[None, :]
    if N % BN == 0:
        tl.store(at, x.to(base.dtype.element_ty))
    else:
        tl.store(at, x.to(base.dtype.element_ty), mask=keys[None, :] < N)


@triton.jit
def load_chunk(base, local, keys, N: tl.constexpr, BN: tl.constexpr):
    """Rows `local` of a chunk [L, BN], in float32."""
    at = base + local[:, None] * N + keys[None, :]
    if N % BN == 0:
        return tl.load(at).to(tl.float32)
    return tl.load(at, mask=keys[None, :] < N, other=0.0).to(tl.float32)


@triton.jit
def load_row(base, row, keys, N: tl.constexpr):
    """One row of a chunk [BN]."""
    return tl.load(base + row * N + keys, mask=keys < N, other=0.0)


@triton.jit
def last_running(running, lane, length, chunk, keys, N: tl.constexpr, L: tl.constexpr):
    """G of a chunk's last row [BN]."""
    return load_row(running + (lane * length + chunk * L) * N, L - 1, keys, N)


@triton.jit
def load_middle(running, local, keys, level, N: tl.constexpr, BN: tl.constexpr):
    """G' of every row's block of 2^(level+1) rows [L, BN]; running: where the chunk's G begins."""
    return load_chunk(running, ((local >> (level + 1)) << (level + 1)) + (1 << level) - 1, keys, N, BN)


@triton.jit
def power(main, rest, FINE: tl.constexpr):
    """2^(main + rest) if FINE, else 2^main."""
    return tl.exp2(main) * tl.exp2(rest) if FINE else tl.exp2(main)


@triton.jit
def from_row(running, row, local, keys, N: tl.constexpr, BN: tl.constexpr, FINE: tl.constexpr):
    """G minus G of one row of the chunk [L, BN]."""
    gap = load_chunk(running.at, local, keys, N, BN) - load_row(running.at, row, keys, N)[None, :]
    if FINE:
        gap += load_chunk(running.rest, local, keys, N, BN) - load_row(running.rest, row, keys, N)[None, :]
    return gap


@triton.jit
def factors(running, local, keys, level, N: tl.constexpr, BN: tl.constexpr, FINE: tl.constexpr):
    """exp(G - G') for rows that read and exp(G' - G) for rows that write [L, BN]; finite also where unused."""
    gap = load_chunk(running.at, local, keys, N, BN) - load_middle(running.at, local, keys, level, N, BN)
    if FINE:
        gap += load_chunk(running.rest, local, keys, N, BN) - load_middle(running.rest, local, keys, level, N, BN)
    return tl.exp2(tl.minimum(gap, REACH)), tl.exp2(tl.minimum(-gap, REACH))


@triton.jit
def first_level(far, running, local, N: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr):
    """The highest level whose blocks all lie within REACH of their middles; 0 always does. far: a whole chunk's G."""
    level = tl.program_id(0) * 0 + LEVELS - 1
    while (level > 0) & (far > REACH):
        level -= 1
        far = tl.zeros([], tl.float32)
        for block in tl.range(0, (N + BK - 1) // BK, num_stages=1):
            keys = block * BK + tl.arange(0, BK)
            gap = load_chunk(running, local, keys, N, BK) - load_middle(running, local, keys, level, N, BK)
            far = tl.maximum(far, tl.max(tl.max(tl.abs(gap), axis=1), axis=0))
    return level


@triton.jit
def meeting(local, first):
    """[L, L]: its highest bit is the level at which rows i and j meet, at least `first`."""
    return tl.maximum(local[:, None] ^ local[None, :], 1 << first)


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """float32 x for a product; with tf32 rounded to nearest, since tensor cores truncate."""
    if PRECISION == "tf32":
        x = (x.to(tl.int32, bitcast=True) + 4096).to(tl.float32, bitcast=True)
    return x


@triton.jit
def rounded(x, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """float32 x as an operand of products: rounded to KIND, or to the 10 bits of tf32."""
    if KIND == tl.float32 and PRECISION == "tf32":
        out = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    else:
        out = x.to(KIND)
    return out
