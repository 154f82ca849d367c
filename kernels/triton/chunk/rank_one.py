"""Diagonal plus rank one: S_t = (diag(w_t) + a_t b_tᵀ) S_{t-1} + k_t v_tᵀ, y_t = q_tᵀ S_t, forward.

What a row reads before its decay, u_t = b_tᵀ S_{t-1}, is written again along a_t. With G the running sum of log decays
from a chunk's first row, q̃_i = q_i exp(G_i), b̃_i = b_i exp(G_{i-1}), â_j = a_j exp(G_L - G_j), k̂ likewise, and the
products QA_ij = q_i·(exp(G_i - G_j) a_j), j ≤ i, BA_ij = b_i·(exp(G_{i-1} - G_j) a_j), j < i, QK and BK likewise,

    u = T (BK v + b̃ S_0), T = (I - BA)^-1,   y = q̃ S_0 + QA u + QK v,   S_L = exp(G_L) S_0 + âᵀ u + k̂ᵀ v

(the generalised WY form). Folding T into the rows of a chunk leaves walks of two products in a row:

    W = T b̃, Q = q̃ + QA W, M = QK + QA T BK, K = k̂ + (T BK)ᵀ â
    y = Q S_0 + M v,   S_L = exp(G_L) S_0 + âᵀ W S_0 + Kᵀ v

The bonus, the weight in y of a row's own value (`own`), is added to M's diagonal.

Gradients of a and b pass through a dozen products in a row, each of which would round an operand to bfloat16. So T is
kept less the identity, and products with T start in float32 from the identity's part. With KEY_TERMS 2 the four
products between rows are in tf32, and matrices between rows are kept in float16 (halves.py) and multiplied in two
bfloat16 terms.

Where A sums several corrections, w_t + Σ a bᵀ, a token's GROUP rows, a power of two, each have one of them, and the
first has the decay: b of all rows reads S_{t-1}, that is before G of the group's first row, and no row of its group, so
that BA_ij and BK_ij are of the rows j of earlier groups.

No exponent is above zero: rows meet in the binary blocks of keywise.py. Rows meet AT_ONCE only where the decays of a
whole chunk are known never to fall below what float32 holds. They are then scaled relative to the chunk's start, and
not to a later row, because a row's readout must not depend on later decays, not even by its rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.halves import load_half, store_half
from dsf.kernels.triton.chunk.keywise import REACH, last_running, load_chunk, load_middle, rounded, store_chunk
from dsf.kernels.triton.chunk.states import place_of_state, store_state
from dsf.kernels.triton.chunk.tiles import LOG2E, LOG_TINY, load_rows, product, split, store_rows
from dsf.kernels.triton.chunk.transform import unit_lower_inverse
from dsf.kernels.triton.packed import place_of_chunk, place_of_segment
from dsf.kernels.triton.structs import Config, of_head


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass: G, the results of rank_one_chunk for each chunk, and the
    chunks' first states.

    running, reads, inner, writes, outer [B·H, chunks · L, N]: G, Q, W, K, â. mixed [B, T, H, PARTS · L]: M | T BK | T -
    I | QA T. factors [PARTS, B·H, chunks · L]: by what the rows of mixed must be multiplied (halves.py).
    """

    running: Any
    mixed: Any
    factors: Any
    reads: Any
    inner: Any
    writes: Any
    outer: Any
    states: Any


@dataclass(frozen=True, repr=False)
class RankOne(Config):
    """Fields of all kernels' Configs: N and P, L rows a chunk. KEY_TERMS: terms of products between a chunk's rows.

    KIND and PRECISION: of products (`arithmetic`). AT_ONCE: one product for all rows of a chunk, else one a level of
    LEVELS. GROUP: rows that act at once, of a sum of corrections.
    """

    N: int
    P: int
    L: int
    LEVELS: int
    AT_ONCE: bool
    KEY_TERMS: int
    KIND: Any
    PRECISION: str
    GROUP: int

    @property
    def ROWS(self) -> Any:
        """The dtype of operands of products between rows."""
        return tl.float32 if self.KEY_TERMS == 2 else self.KIND


@dataclass(frozen=True, repr=False)
class Chunk(RankOne):
    """BK keys at a time. PARTS: the number of matrices in `mixed`, 4 where gradients will be computed. EXACT: products
    with the inverse of the triangle between rows are as those between rows.

    LEFT, DECAY, OWN: printed functions that compute a, g and the summands of own (the bonus) in the kernel, or None.
    """

    BK: int
    PARTS: int
    EXACT: bool
    LEFT: Any
    DECAY: Any
    OWN: Any

    @property
    def SOLVED(self) -> Any:
        """The dtype of operands of products with the triangle's inverse."""
        return self.ROWS if self.EXACT else self.KIND


@dataclass(frozen=True, repr=False)
class Walk(RankOne):
    """BN: N padded to a power of two; BP channels a program; REVERSE: from the last chunk to the first."""

    BN: int
    BP: int
    PARTS: int
    REVERSE: bool
    STAGES: int


@triton.jit
def rows_of(x, MAKE: tl.constexpr, inputs, rows, end, keys, N: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr):
    """Rows of a vector [L, BK], zeros beyond the last: loaded, or computed by the printed function MAKE.

    inputs: its pointers and strides, batch, head, tokens, heads.
    """
    if MAKE is None:
        return load_rows(x.at, x.token, rows, end, keys, N, BK, KIND)
    else:
        args, batch, head, tokens, heads = inputs
        at = place_of_rows(batch, head, 0, rows.to(tl.int64), rows < end, keys, tokens, heads, 1, N)
        return tl.where((rows < end)[:, None] & (keys < N)[None, :], MAKE(args, at), 0.0).to(KIND)


@triton.jit
def place_of_rows(batch, head, t0, t, there, keys, tokens, heads, P, N: tl.constexpr):
    """`at` of printed functions (dsf.kernels.triton.scan.tiles) for a tile [L, BK] of rows t0 + t and of keys."""
    known = (keys < N)[None, :]
    return batch, head, t0, t[:, None], keys[None, :], 0, there[:, None], known, True, 0, 0, tokens, heads, P, N


@triton.jit
def store_parted(high, low, x, local, keys, N: tl.constexpr, BK: tl.constexpr):
    """Store float32 x [L, BK] as rows of a chunk; in 16 bits its rounding error is stored in `low`."""
    main = x.to(high.dtype.element_ty)
    store_chunk(high, main, local, keys, N, BK)
    if high.dtype.element_ty != tl.float32:
        store_chunk(low, x - main.to(tl.float32), local, keys, N, BK)


@triton.jit
def load_parted(high, low, local, keys, N: tl.constexpr, BK: tl.constexpr):
    """Load what store_parted stored, as float32."""
    x = load_chunk(high, local, keys, N, BK)
    if high.dtype.element_ty != tl.float32:
        x += load_chunk(low, local, keys, N, BK)
    return x


@triton.jit
def load_earlier(running, local, keys, N: tl.constexpr, GROUP: tl.constexpr):
    """G_{i - 1} of the first row of every row's group, in a chunk [L, BK], zero in front of the first."""
    if GROUP > 1:
        local = local // GROUP * GROUP
    at = running + (local[:, None] - 1) * N + keys[None, :]
    return tl.load(at, mask=(local[:, None] >= 1) & (keys[None, :] < N), other=0.0)


@triton.jit
def factor(gap, AT_ONCE: tl.constexpr):
    """exp(gap): the decay between rows and the middle of their block.

    AT_ONCE: the middle is the chunk's start, and factors of writes are above one. Else factors above one are not used,
    except where decays are above one.
    """
    return tl.exp2(gap) if AT_ONCE else tl.exp2(tl.minimum(gap, REACH))


@triton.jit
def meeting(local, level, distance, AT_ONCE: tl.constexpr, GROUP: tl.constexpr = 1):
    """Where row i (down) reads row j ≤ i - distance in a block of 2^(level+1) rows [L, L]; distance: in groups."""
    apart = local[:, None] ^ local[None, :]
    if GROUP > 1:
        local = local // GROUP
    seen = local[:, None] - local[None, :] >= distance
    if AT_ONCE:
        return ((apart >> (level + 1)) == 0) & seen
    return ((apart >> level) == 1) & seen


@triton.jit
def rank_one_chunk(q, b, a, k, g, own, given, kept, table, sizes, C: tl.constexpr):
    """Log decays -> G, and Q, W, K, â, all chunk by chunk without gaps, and M | T BK; with PARTS 4 T - I | QA T.

    given: pointers and strides for LEFT, DECAY and OWN.
    """
    chunk, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = lane // sizes.heads, lane % sizes.heads
    q, b, k = of_head(q, batch, head), of_head(b, batch, head), of_head(k, batch, head)
    if C.LEFT is None:
        a = of_head(a, batch, head)
    if C.DECAY is None:
        g = of_head(g, batch, head)
    tokens, length = sizes.tokens, sizes.length
    heads: tl.constexpr = sizes.heads
    of_left = given[0], batch, head, tokens, heads
    of_decay = given[1], batch, head, tokens, heads
    of_own = given[2], batch, head, tokens, heads
    local = tl.arange(0, C.L)
    begin, end = place_of_chunk(table, chunk, tokens, C.L)
    rows = begin + local
    block = (lane * length + chunk * C.L) * C.N
    running, outer, writes = kept.running + block, kept.outer + block, kept.writes + block
    ba, bk = _scores(b, a, k, g, of_left, of_decay, outer, writes, running, rows, end, local, 1, C)
    wide = heads * C.PARTS * C.L
    mixed = kept.mixed + (batch * tokens * heads + head) * C.PARTS * C.L
    factors = kept.factors + (lane * length + chunk * C.L)
    plane = tl.num_programs(1).to(tl.int64) * length
    inverse = unit_lower_inverse(-ba, local, C.LEVELS, C.SOLVED, C.PRECISION).to(C.SOLVED)
    known = tl.dot(inverse, bk.to(C.SOLVED), bk, input_precision=C.PRECISION)
    store_half(mixed + C.L, wide, factors + plane, rows, end, local, local, C.L, C.L, known)
    bk = bk.to(C.SOLVED)
    tl.debug_barrier()  # G is read again, by other threads
    qa, qk = _scores(q, a, k, g, of_left, of_decay, outer, writes, running, rows, end, local, 0, C)
    if own.at is not None or C.OWN is not None:
        if C.OWN is None:
            at = own.at + batch * own.batch + rows.to(tl.int64) * own.token + head * own.head
            beside = tl.load(at, mask=rows < end, other=0.0).to(tl.float32)
        else:
            beside = tl.zeros([C.L], tl.float32)
            for first in tl.range(0, C.N, C.BK, num_stages=1):
                keys = first + tl.arange(0, C.BK)
                beside += tl.sum(rows_of(q, C.OWN, of_own, rows, end, keys, C.N, C.BK, tl.float32), axis=1)
        qk += tl.where(local[:, None] == local[None, :], beside[:, None], 0.0)
    through = tl.dot(qa.to(C.SOLVED), inverse, qa, input_precision=C.PRECISION)
    if C.PARTS == 4:
        store_half(
            mixed + 2 * C.L, wide, factors + 2 * plane, rows, end, local, local, C.L, C.L, inverse.to(tl.float32)
        )
        store_half(mixed + 3 * C.L, wide, factors + 3 * plane, rows, end, local, local, C.L, C.L, through)
    through = through.to(C.SOLVED)
    direct = tl.dot(through, bk, qk, input_precision=C.PRECISION)
    store_half(mixed, wide, factors, rows, end, local, local, C.L, C.L, direct)
    tl.debug_barrier()  # a product's result must not be transposed in registers: it is read again
    solved_k = tl.trans(load_half(mixed + C.L, wide, factors + plane, rows, end, local, local, C.L, C.L).to(C.KIND))
    for first in tl.range(0, C.N, C.BK, num_stages=1):
        keys = first + tl.arange(0, C.BK)
        total = load_chunk(running, local, keys, C.N, C.BK)
        before = load_earlier(running, local, keys, C.N, C.GROUP)
        last = tl.load(running + (C.L - 1) * C.N + keys, mask=keys < C.N, other=0.0)
        erases = load_rows(b.at, b.token, rows, end, keys, C.N, C.BK, tl.float32) * tl.exp2(before)
        out = tl.dot(inverse, erases.to(C.SOLVED), erases, input_precision=C.PRECISION)
        store_chunk(kept.inner + block, out, local, keys, C.N, C.BK)
        erases = erases.to(C.SOLVED)
        out = load_rows(q.at, q.token, rows, end, keys, C.N, C.BK, tl.float32) * tl.exp2(total)
        out = tl.dot(through, erases, out, input_precision=C.PRECISION)
        store_chunk(kept.reads + block, out, local, keys, C.N, C.BK)
        to_end = tl.exp2(last[None, :] - total)
        if C.LEFT is None:
            ends = load_rows(a.at, a.token, rows, end, keys, C.N, C.BK, tl.float32)
        else:
            ends = load_parted(outer, writes, local, keys, C.N, C.BK)
            tl.debug_barrier()  # â and K are written there, by other threads
        ends = (ends * to_end).to(C.KIND)
        store_chunk(outer, ends, local, keys, C.N, C.BK)
        out = load_rows(k.at, k.token, rows, end, keys, C.N, C.BK, tl.float32) * to_end
        out = tl.dot(solved_k, ends, out, input_precision=C.PRECISION)
        store_chunk(writes, out, local, keys, C.N, C.BK)


@triton.jit
def _scores(
    x, a, k, g, of_left, of_decay, high, low, running, rows, end, local, DISTANCE: tl.constexpr, C: tl.constexpr
):
    """x_i·(exp(G_{i - DISTANCE} - G_j) a_j), j ≤ i - DISTANCE, and the same with k [L, L]. DISTANCE 1 also makes G, and
    a where a printed function does, which it leaves in high and low.
    """
    GROUP: tl.constexpr = C.GROUP if DISTANCE == 1 else 1  # a row's query reads all rows of its group up to it
    with_a = tl.zeros([C.L, C.L], tl.float32)
    with_k = tl.zeros([C.L, C.L], tl.float32)
    for first in tl.range(0, C.N, C.BK, num_stages=1):
        keys = first + tl.arange(0, C.BK)
        if DISTANCE == 0:
            own = load_chunk(running, local, keys, C.N, C.BK)
            at = own
        else:
            log = rows_of(g, C.DECAY, of_decay, rows, end, keys, C.N, C.BK, tl.float32)
            log = tl.maximum(log, LOG_TINY) * LOG2E
            own = tl.cumsum(log, axis=0)
            store_chunk(running, own, local, keys, C.N, C.BK)
            if C.AT_ONCE and C.DECAY is None and C.GROUP == 1:
                at = own - log
            else:
                tl.debug_barrier()  # G is read again, by other threads
                at = load_earlier(running, local, keys, C.N, C.GROUP)
            if C.DECAY is not None:  # or it would be made twice, where another layout is wanted
                own = load_chunk(running, local, keys, C.N, C.BK)
        rows_x = load_rows(x.at, x.token, rows, end, keys, C.N, C.BK, C.KIND)
        if C.LEFT is None:
            rows_a = load_rows(a.at, a.token, rows, end, keys, C.N, C.BK, C.ROWS)
        elif DISTANCE == 0:
            rows_a = load_parted(high, low, local, keys, C.N, C.BK).to(C.ROWS)
        else:
            whole = rows_of(a, C.LEFT, of_left, rows, end, keys, C.N, C.BK, tl.float32)
            store_parted(high, low, whole, local, keys, C.N, C.BK)
            rows_a = whole.to(C.ROWS)
        rows_k = load_rows(k.at, k.token, rows, end, keys, C.N, C.BK, C.KIND)
        if C.AT_ONCE:
            read, source = factor(at, True), factor(-own, True)
            with_a, with_k = _products(with_a, with_k, rows_x, read, rows_a, rows_k, source, C.ROWS, C.PRECISION)
        else:
            if DISTANCE == 0:  # a row with itself, without decay
                same, wide = local[:, None] == local[None, :], rows_x.to(tl.float32)
                with_a += tl.where(same, tl.sum(wide * rows_a.to(tl.float32), axis=1)[:, None], 0.0)
                with_k += tl.where(same, tl.sum(wide * rows_k.to(tl.float32), axis=1)[:, None], 0.0)
            for level in tl.range(0, C.LEVELS, num_stages=1):
                middle = load_middle(running, local, keys, level, C.N, C.BK)
                read, source = factor(at - middle, False), factor(middle - own, False)
                none = tl.zeros([C.L, C.L], tl.float32)
                meet = meeting(local, level, 1, False, GROUP)
                of_a, of_k = _products(none, none, rows_x, read, rows_a, rows_k, source, C.ROWS, C.PRECISION)
                with_a += tl.where(meet, of_a, 0.0)
                with_k += tl.where(meet, of_k, 0.0)
    if C.AT_ONCE:
        seen = meeting(local, C.LEVELS - 1, DISTANCE, True, GROUP)
        with_a, with_k = tl.where(seen, with_a, 0.0), tl.where(seen, with_k, 0.0)
    return with_a, with_k


@triton.jit
def _products(
    with_a, with_k, reads, read_factor, rows_a, rows_k, write_factor, ROWS: tl.constexpr, PRECISION: tl.constexpr
):
    """with_a, with_k [L, L] plus the products of some reads with both kinds of writes."""
    reads = rounded(reads.to(tl.float32) * read_factor, ROWS, PRECISION)
    writes = tl.trans(rounded(rows_a.to(tl.float32) * write_factor, ROWS, PRECISION))
    with_a = tl.dot(reads, writes, with_a, input_precision=PRECISION)
    writes = tl.trans(rounded(rows_k.to(tl.float32) * write_factor, ROWS, PRECISION))
    return with_a, tl.dot(reads, writes, with_k, input_precision=PRECISION)


@triton.jit
def rank_one_walk(kept, x, y, states, start, final, table, sizes, C: tl.constexpr):
    """S ← exp(G_L) S + outerᵀ (inner S) + writesᵀ x, from chunk to chunk, in either direction.

    Forward, x is v; the adjoint of S is walked in reverse with outer and inner exchanged, Q for K and dy for v. Stores
    each chunk's first S to `states`, the last one to `final`, and reads S + M x to y, where these are not None.
    """
    tokens, length = sizes.tokens, sizes.length
    heads: tl.constexpr = sizes.heads
    piece, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = lane // heads, lane % heads
    x = of_head(x, batch, head)
    at = batch * tokens * heads + head
    chunks = length // C.L
    low, stop, shift, end = place_of_segment(table, tl.program_id(2), chunks, tokens, False)
    ends = (tl.program_id(2) * tl.num_programs(1) + lane) * C.N * C.P
    keys, columns, local = tl.arange(0, C.BN), piece * C.BP + tl.arange(0, C.BP), tl.arange(0, C.L)
    place = keys[:, None].to(tl.int64) * C.P + columns[None, :]
    inside = (keys[:, None] < C.N) & (columns[None, :] < C.P)
    if start is not None:
        state = tl.load(start + ends + place, mask=inside, other=0.0)
    else:
        state = tl.zeros([C.BN, C.BP], tl.float32)
    for step in tl.range(0, stop - low, num_stages=C.STAGES):
        chunk = stop - 1 - step if C.REVERSE else low + step
        rows = chunk * C.L + local + shift
        block = (lane * length + chunk * C.L) * C.N
        if states is not None:
            store_state(
                place_of_state(states, lane * chunks + chunk, C.N * C.P), place, inside, piece, state, C.N * C.P
            )
        seen = state.to(C.KIND)
        entry = tl.dot(
            load_rows(kept.inner + block, C.N, local, C.L, keys, C.N, C.BN, C.KIND), seen, input_precision=C.PRECISION
        ).to(C.KIND)  # fmt: skip
        given = load_rows(x.at, x.token, rows, end, columns, C.P, C.BP, C.KIND)
        if y is not None:
            reads = load_rows(kept.reads + block, C.N, local, C.L, keys, C.N, C.BN, C.KIND)
            out = tl.dot(reads, seen, input_precision=C.PRECISION)
            factor = kept.factors + lane * length + chunk * C.L
            direct = load_half(
                kept.mixed + at * C.PARTS * C.L, heads * C.PARTS * C.L, factor, rows, end, local, local, C.L, C.L
            )
            direct = split(direct, C.KEY_TERMS, C.KIND)
            out = product(direct, (given, given), C.KEY_TERMS, 1, C.PRECISION, out)
            store_rows(y + at * C.P, heads * C.P, rows, end, columns, C.P, C.BP, out)
        state *= tl.exp2(last_running(kept.running, lane, length, chunk, keys, C.N, C.L))[:, None]
        rows_w = load_rows(kept.writes + block, C.N, local, C.L, keys, C.N, C.BN, C.KIND)
        state = tl.dot(tl.trans(rows_w), given, state, input_precision=C.PRECISION)
        rows_o = load_rows(kept.outer + block, C.N, local, C.L, keys, C.N, C.BN, C.KIND)
        state = tl.dot(tl.trans(rows_o), entry, state, input_precision=C.PRECISION)
    if final is not None:
        tl.store(final + ends + place, state, mask=inside)
