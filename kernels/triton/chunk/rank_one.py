"""Diagonal plus rank one: S_t = (diag(w_t) + a_t b_tᵀ) S_{t-1} + k_t v_tᵀ, y_t = q_tᵀ S_t, forward.

What a row reads before its decay, u_t = b_tᵀ S_{t-1}, is written again at a_t. With G the running sum of log decays
from a chunk's first row, q̃_i = q_i exp(G_i), b̃_i = b_i exp(G_{i-1}), â_j = a_j exp(G_L - G_j), k̂ likewise, and the
products QA_ij = q_i·(exp(G_i - G_j) a_j), j ≤ i, BA_ij = b_i·(exp(G_{i-1} - G_j) a_j), j < i, QK and BK likewise,

    u = T (BK v + b̃ S_0), T = (I - BA)^-1,   y = q̃ S_0 + QA u + QK v,   S_L = exp(G_L) S_0 + âᵀ u + k̂ᵀ v

(the generalised WY form). Folding T into the rows of a chunk leaves walks of two products in a row:

    W = T b̃, Q = q̃ + QA W, M = QK + QA T BK, K = k̂ + (T BK)ᵀ â
    y = Q S_0 + M v,   S_L = exp(G_L) S_0 + âᵀ W S_0 + Kᵀ v

What y has of a row's own value beside that (own) is added to M's diagonal.

Gradients of a and b pass through a dozen products in a row, each of which would round an operand to bfloat16. So T is
kept less the identity, which products of it start from in float32; and with KEY_TERMS 2 the four products between rows
are in tf32, and matrices between rows are kept in float16 (halves.py) and multiplied in two bfloat16 terms.

No exponent is above zero: rows meet in the binary blocks of keywise.py. Only where the decays of a whole chunk are
known never to fall below what float32 holds do its rows meet AT_ONCE, as they are at the chunk's start (not at a later
row: what is read must not depend on later decays, not even by its rounding).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.halves import load_half, store_half
from dsf.kernels.triton.chunk.keywise import REACH, last_running, load_chunk, rounded, store_chunk
from dsf.kernels.triton.chunk.states import place_of_state, store_state
from dsf.kernels.triton.chunk.tiles import LOG2E, LOG_TINY, load_rows, product, split, store_rows
from dsf.kernels.triton.chunk.transform import unit_lower_inverse
from dsf.kernels.triton.packed import place_of_chunk, place_of_segment


@triton.jit
def rows_of(
    base, stride, MAKE: tl.constexpr, inputs, rows, end, keys, N: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr
):
    """Rows of a vector [L, BK], zeros beyond the last: from memory, or as a printed function makes them.

    inputs: its pointers and strides, batch, head, tokens, heads.
    """
    if MAKE is None:
        return load_rows(base, stride, rows, end, keys, N, BK, KIND)
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
    """Write float32 x [L, BK] as rows of a chunk, its digits split between two places if one has no room for them."""
    main = x.to(high.dtype.element_ty)
    store_chunk(high, main, local, keys, N, BK)
    if high.dtype.element_ty != tl.float32:
        store_chunk(low, x - main.to(tl.float32), local, keys, N, BK)


@triton.jit
def load_parted(high, low, local, keys, N: tl.constexpr, BK: tl.constexpr):
    """What store_parted wrote."""
    x = load_chunk(high, local, keys, N, BK)
    if high.dtype.element_ty != tl.float32:
        x += load_chunk(low, local, keys, N, BK)
    return x


@triton.jit
def load_earlier(running, local, keys, N: tl.constexpr, BK: tl.constexpr):
    """G_{i - 1} of every row of a chunk [L, BK], zero in front of the first."""
    at = running + (local[:, None] - 1) * N + keys[None, :]
    return tl.load(at, mask=(local[:, None] >= 1) & (keys[None, :] < N), other=0.0)


@triton.jit
def middle_of(running, local, keys, level, N: tl.constexpr, BK: tl.constexpr):
    """G of the last row in the lower half of every row's block of 2^(level+1) rows [L, BK]."""
    return load_chunk(running, ((local >> (level + 1)) << (level + 1)) + (1 << level) - 1, keys, N, BK)


@triton.jit
def factor(gap, AT_ONCE: tl.constexpr):
    """exp(gap): the decay between rows and the middle of their block.

    AT_ONCE: the middle is the chunk's start, and writes grow towards it; else rows of a block's upper half meet those
    of its lower half, and what is above one is not used (but where states grow).
    """
    return tl.exp2(gap) if AT_ONCE else tl.exp2(tl.minimum(gap, REACH))


@triton.jit
def meeting(local, level, distance, AT_ONCE: tl.constexpr):
    """Where row i (down) reads row j ≤ i - distance in a block of 2^(level+1) rows [L, L]."""
    apart = local[:, None] ^ local[None, :]
    seen = local[:, None] - local[None, :] >= distance
    if AT_ONCE:
        return ((apart >> (level + 1)) == 0) & seen
    return ((apart >> level) == 1) & seen


@triton.jit
def rank_one_chunk(
    q, b, a, k, g, own, given, running, mixed, factors, reads, inner, writes, outer, table,
    tokens, heads: tl.constexpr, length,
    q_b, q_t: tl.constexpr, q_h, q_group, b_b, b_t: tl.constexpr, b_h, b_group, a_b, a_t: tl.constexpr, a_h,
    a_group, k_b, k_t: tl.constexpr, k_h, k_group,
    g_b, g_t: tl.constexpr, g_h, g_group, own_b, own_t, own_h,
    N: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr, AT_ONCE: tl.constexpr,
    KEEP: tl.constexpr, PARTS: tl.constexpr, TERMS: tl.constexpr, KEY_TERMS: tl.constexpr, KIND: tl.constexpr,
    PRECISION: tl.constexpr, LEFT: tl.constexpr, DECAY: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Log decays -> G, and Q, W, K, â, all chunk by chunk without gaps, and M | T BK [B, T, H, PARTS · L].

    KEEP: T - I | QA T beside them, for the gradients. LEFT, DECAY, OWN: printed functions that make a, g and what own
    is the sum of, of given, instead of these; or None.
    """
    chunk, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = lane // heads, lane % heads
    q += batch * q_b + head // q_group * q_h
    b += batch * b_b + head // b_group * b_h
    k += batch * k_b + head // k_group * k_h
    if LEFT is None:
        a += batch * a_b + head // a_group * a_h
    if DECAY is None:
        g += batch * g_b + head // g_group * g_h
    of_left = given[0], batch, head, tokens, heads
    of_decay = given[1], batch, head, tokens, heads
    of_own = given[2], batch, head, tokens, heads
    local = tl.arange(0, L)
    begin, end = place_of_chunk(table, chunk, tokens, L)
    rows = begin + local
    block = (lane * length + chunk * L) * N
    running += block
    ROWS: tl.constexpr = tl.float32 if KEY_TERMS == 2 else KIND
    ba, bk = _scores(
        b, b_t, a, a_t, k, k_t, g, g_t, of_left, of_decay, outer + block, writes + block, running, rows, end, local, 1,
        N, BK, L, LEVELS, AT_ONCE, ROWS, KIND, PRECISION, LEFT, DECAY,
    )  # fmt: skip
    wide = heads * PARTS * L
    mixed += (batch * tokens * heads + head) * PARTS * L
    factors += lane * length + chunk * L
    plane = tl.num_programs(1).to(tl.int64) * length
    inverse = unit_lower_inverse(-ba, local, LEVELS, KIND, PRECISION, TERMS).to(KIND)
    known = tl.dot(inverse, bk.to(KIND), bk, input_precision=PRECISION)
    store_half(mixed + L, wide, factors + plane, rows, end, local, local, L, L, known)
    bk = bk.to(KIND)
    tl.debug_barrier()  # G is read again, by other threads
    qa, qk = _scores(
        q, q_t, a, a_t, k, k_t, g, g_t, of_left, of_decay, outer + block, writes + block, running, rows, end, local, 0,
        N, BK, L, LEVELS, AT_ONCE, ROWS, KIND, PRECISION, LEFT, DECAY,
    )  # fmt: skip
    if own is not None or OWN is not None:
        if OWN is None:
            at = own + batch * own_b + rows.to(tl.int64) * own_t + head * own_h
            beside = tl.load(at, mask=rows < end, other=0.0).to(tl.float32)
        else:
            beside = tl.zeros([L], tl.float32)
            for first in tl.range(0, N, BK, num_stages=1):
                keys = first + tl.arange(0, BK)
                beside += tl.sum(rows_of(q, q_t, OWN, of_own, rows, end, keys, N, BK, tl.float32), axis=1)
        qk += tl.where(local[:, None] == local[None, :], beside[:, None], 0.0)
    through = tl.dot(qa.to(KIND), inverse, qa, input_precision=PRECISION)
    if KEEP:
        store_half(mixed + 2 * L, wide, factors + 2 * plane, rows, end, local, local, L, L, inverse.to(tl.float32))
        store_half(mixed + 3 * L, wide, factors + 3 * plane, rows, end, local, local, L, L, through)
    through = through.to(KIND)
    direct = tl.dot(through, bk, qk, input_precision=PRECISION)
    store_half(mixed, wide, factors, rows, end, local, local, L, L, direct)
    tl.debug_barrier()  # a product's result must not be transposed in registers: it is read again
    solved_k = tl.trans(load_half(mixed + L, wide, factors + plane, rows, end, local, local, L, L).to(KIND))
    for first in tl.range(0, N, BK, num_stages=1):
        keys = first + tl.arange(0, BK)
        total = load_chunk(running, local, keys, N, BK)
        before = load_earlier(running, local, keys, N, BK)
        last = tl.load(running + (L - 1) * N + keys, mask=keys < N, other=0.0)
        erases = load_rows(b, b_t, rows, end, keys, N, BK, tl.float32) * tl.exp2(before)
        out = tl.dot(inverse, erases.to(KIND), erases, input_precision=PRECISION)
        store_chunk(inner + block, out, local, keys, N, BK)
        erases = erases.to(KIND)
        out = load_rows(q, q_t, rows, end, keys, N, BK, tl.float32) * tl.exp2(total)
        out = tl.dot(through, erases, out, input_precision=PRECISION)
        store_chunk(reads + block, out, local, keys, N, BK)
        to_end = tl.exp2(last[None, :] - total)
        if LEFT is None:
            ends = load_rows(a, a_t, rows, end, keys, N, BK, tl.float32)
        else:
            ends = load_parted(outer + block, writes + block, local, keys, N, BK)
            tl.debug_barrier()  # â and K are written there, by other threads
        ends = (ends * to_end).to(KIND)
        store_chunk(outer + block, ends, local, keys, N, BK)
        out = load_rows(k, k_t, rows, end, keys, N, BK, tl.float32) * to_end
        out = tl.dot(solved_k, ends, out, input_precision=PRECISION)
        store_chunk(writes + block, out, local, keys, N, BK)


@triton.jit
def _scores(
    x, x_t, a, a_t, k, k_t, g, g_t, of_left, of_decay, high, low, running, rows, end, local, DISTANCE: tl.constexpr,
    N: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr, AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, LEFT: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """x_i·(exp(G_{i - DISTANCE} - G_j) a_j), j ≤ i - DISTANCE, and the same with k [L, L]. DISTANCE 1 also makes G, and
    a where a printed function does, which it leaves in high and low.

    ROWS: what the products are made of.
    """
    with_a = tl.zeros([L, L], tl.float32)
    with_k = tl.zeros([L, L], tl.float32)
    for first in tl.range(0, N, BK, num_stages=1):
        keys = first + tl.arange(0, BK)
        if DISTANCE == 0:
            own = load_chunk(running, local, keys, N, BK)
            at = own
        else:
            log = rows_of(g, g_t, DECAY, of_decay, rows, end, keys, N, BK, tl.float32)
            log = tl.maximum(log, LOG_TINY) * LOG2E
            own = tl.cumsum(log, axis=0)
            store_chunk(running, own, local, keys, N, BK)
            if AT_ONCE and DECAY is None:
                at = own - log
            else:
                tl.debug_barrier()  # G is read again, by other threads
                at = load_earlier(running, local, keys, N, BK)
            if DECAY is not None:  # or it would be made twice, where another layout is wanted
                own = load_chunk(running, local, keys, N, BK)
        rows_x = load_rows(x, x_t, rows, end, keys, N, BK, KIND)
        if LEFT is None:
            rows_a = load_rows(a, a_t, rows, end, keys, N, BK, ROWS)
        elif DISTANCE == 0:
            rows_a = load_parted(high, low, local, keys, N, BK).to(ROWS)
        else:
            whole = rows_of(a, a_t, LEFT, of_left, rows, end, keys, N, BK, tl.float32)
            store_parted(high, low, whole, local, keys, N, BK)
            rows_a = whole.to(ROWS)
        rows_k = load_rows(k, k_t, rows, end, keys, N, BK, KIND)
        if AT_ONCE:
            read, source = factor(at, True), factor(-own, True)
            with_a, with_k = _products(with_a, with_k, rows_x, read, rows_a, rows_k, source, ROWS, PRECISION)
        else:
            if DISTANCE == 0:  # the row's own, which no decay touches
                same, wide = local[:, None] == local[None, :], rows_x.to(tl.float32)
                with_a += tl.where(same, tl.sum(wide * rows_a.to(tl.float32), axis=1)[:, None], 0.0)
                with_k += tl.where(same, tl.sum(wide * rows_k.to(tl.float32), axis=1)[:, None], 0.0)
            for level in tl.range(0, LEVELS, num_stages=1):
                middle = middle_of(running, local, keys, level, N, BK)
                read, source = factor(at - middle, False), factor(middle - own, False)
                none = tl.zeros([L, L], tl.float32)
                meet = meeting(local, level, 1, False)
                of_a, of_k = _products(none, none, rows_x, read, rows_a, rows_k, source, ROWS, PRECISION)
                with_a += tl.where(meet, of_a, 0.0)
                with_k += tl.where(meet, of_k, 0.0)
    if AT_ONCE:
        seen = meeting(local, LEVELS - 1, DISTANCE, True)
        with_a, with_k = tl.where(seen, with_a, 0.0), tl.where(seen, with_k, 0.0)
    return with_a, with_k


@triton.jit
def _products(
    with_a, with_k, reads, read_factor, rows_a, rows_k, write_factor, ROWS: tl.constexpr, PRECISION: tl.constexpr
):
    """with_a, with_k [L, L] plus the products of one kind of reads with both kinds of writes."""
    reads = rounded(reads.to(tl.float32) * read_factor, ROWS, PRECISION)
    writes = tl.trans(rounded(rows_a.to(tl.float32) * write_factor, ROWS, PRECISION))
    with_a = tl.dot(reads, writes, with_a, input_precision=PRECISION)
    writes = tl.trans(rounded(rows_k.to(tl.float32) * write_factor, ROWS, PRECISION))
    return with_a, tl.dot(reads, writes, with_k, input_precision=PRECISION)


@triton.jit
def rank_one_walk(
    outer, inner, writes, reads, mixed, factors, x, running, y, states, start, final, table,
    tokens, heads: tl.constexpr, length, x_b, x_t: tl.constexpr, x_h, x_group,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, L: tl.constexpr,
    REVERSE: tl.constexpr, START: tl.constexpr, OUTPUT: tl.constexpr, STATES: tl.constexpr, FINAL: tl.constexpr,
    PARTS: tl.constexpr, KEY_TERMS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """S ← exp(G_L) S + outerᵀ (inner S) + writesᵀ x, from chunk to chunk, in either direction.

    Forwards x is v; the adjoint of S walks backwards with outer and inner exchanged, Q for K and dy for v. Every S
    before its step (STATES), the last one (FINAL), and y = reads S + M x (OUTPUT).
    """
    piece, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = lane // heads, lane % heads
    x += batch * x_b + head // x_group * x_h
    at = batch * tokens * heads + head
    chunks = length // L
    low, stop, shift, end = place_of_segment(table, tl.program_id(2), chunks, tokens, False)
    ends = (tl.program_id(2) * tl.num_programs(1) + lane) * N * P
    keys, columns, local = tl.arange(0, BN), piece * BP + tl.arange(0, BP), tl.arange(0, L)
    place = keys[:, None].to(tl.int64) * P + columns[None, :]
    inside = (keys[:, None] < N) & (columns[None, :] < P)
    if START:
        state = tl.load(start + ends + place, mask=inside, other=0.0)
    else:
        state = tl.zeros([BN, BP], tl.float32)
    for step in tl.range(0, stop - low, num_stages=STAGES):
        chunk = stop - 1 - step if REVERSE else low + step
        rows = chunk * L + local + shift
        block = (lane * length + chunk * L) * N
        if STATES:
            store_state(place_of_state(states, lane * chunks + chunk, N * P), place, inside, piece, state, N * P)
        seen = state.to(KIND)
        entry = tl.dot(
            load_rows(inner + block, N, local, L, keys, N, BN, KIND), seen, input_precision=PRECISION
        ).to(KIND)  # fmt: skip
        given = load_rows(x, x_t, rows, end, columns, P, BP, KIND)
        if OUTPUT:
            out = tl.dot(load_rows(reads + block, N, local, L, keys, N, BN, KIND), seen, input_precision=PRECISION)
            factor = factors + lane * length + chunk * L
            direct = load_half(mixed + at * PARTS * L, heads * PARTS * L, factor, rows, end, local, local, L, L)
            direct = split(direct, KEY_TERMS, KIND)
            out = product(direct, (given, given), KEY_TERMS, 1, PRECISION, out)
            store_rows(y + at * P, heads * P, rows, end, columns, P, BP, out)
        state *= tl.exp2(last_running(running, lane, length, chunk, keys, N, L))[:, None]
        rows_w = load_rows(writes + block, N, local, L, keys, N, BN, KIND)
        state = tl.dot(tl.trans(rows_w), given, state, input_precision=PRECISION)
        rows_o = load_rows(outer + block, N, local, L, keys, N, BN, KIND)
        state = tl.dot(tl.trans(rows_o), entry, state, input_precision=PRECISION)
    if FINAL:
        tl.store(final + ends + place, state, mask=inside)
