"""Diagonal plus rank one, backwards: the gradients of one chunk from its first state and its last state's adjoint.

With S_0 and the adjoint dS_L of S_L (rank_one.py's walk in both directions), all chunks in parallel: first the rows

    u = W S_0 + T BK v,   f = Tᵀ â dS_L + (QA T)ᵀ dy,   dv = Mᵀ dy + K dS_L

(f: the gradient of BK v + b̃ S_0), then, for each key, the sums of the four vectors of a row. Reads q and b multiply
S_0, u and v by dy and f; writes a and k multiply dS_L, dy and f by u and v: one function computes all four.

Log decays: every product of rows decays by exp(G_i - G_j). So a decay's gradient adds the products whose reading row is
after it (or at it, for q) and subtracts those whose writing row is. Both use the same rounded factors, so that products
that occur in both cancel. Products that no decay touches (q with its own row, b with the row before) are left out of
both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.halves import load_half, store_half
from dsf.kernels.triton.chunk.keywise import load_chunk, rounded
from dsf.kernels.triton.chunk.rank_one import (
    RankOne,
    factor,
    load_earlier,
    meeting,
    middle_of,
    place_of_rows,
    rows_of,
)
from dsf.kernels.triton.chunk.states import load_state, place_of_state
from dsf.kernels.triton.chunk.tiles import load_rows, product, split, store_rows, turn
from dsf.kernels.triton.packed import place_of_chunk, slot_to_read
from dsf.kernels.triton.structs import of_head


class Between(NamedTuple):
    """Intermediate results of the backward pass for each chunk: adjoints of the last states, u and f [B, T, H, P].

    weights: the gradients of QA | QK | BA | BK [B, T, H, 4L]. scales: by what rows in float16 must be multiplied, first
    those of the weights, then pieces of u and of f (halves.py).
    """

    adjoints: Any
    entries: Any
    adjoint_entries: Any
    weights: Any
    scales: Any


class Gradients(NamedTuple):
    """Where gradients are stored, or None: of the four vectors, log decays and v [B, T, H, ·], of own [B, H, T]."""

    dq: Any
    db: Any
    da: Any
    dk: Any
    dg: Any
    dv: Any
    own: Any


class Around(NamedTuple):
    """One chunk and block of keys: its `Between`, G and rows."""

    weights: Any
    scales: Any
    running: Any
    plane: Any
    rows: Any
    end: Any
    heads: Any
    keys: Any
    local: Any
    of_left: Any


@dataclass(frozen=True, repr=False)
class Entries(RankOne):
    """BN: N padded to a power of two; BP channels at a time."""

    BN: int
    BP: int


@dataclass(frozen=True, repr=False)
class Gradient(RankOne):
    """BK keys a program, BP channels at a time; PIECE channels of u and of f share a scale.

    LEFT: the printed function that computes a. PULL: the printed function that turns the gradients of a, b and the
    decays, which are then not stored, into those of their inputs, and stores these.
    """

    BK: int
    BP: int
    PIECE: int
    LEFT: Any
    PULL: Any


@triton.jit
def rank_one_entries(kept, between, v, dy, to, table, sizes, C: tl.constexpr):
    """u, f and dv [B, T, H, P] of one chunk, and the gradients of QA | QK | BA | BK."""
    N: tl.constexpr = C.N
    P: tl.constexpr = C.P
    BN: tl.constexpr = C.BN
    BP: tl.constexpr = C.BP
    L: tl.constexpr = C.L
    KEY_TERMS: tl.constexpr = C.KEY_TERMS
    KIND: tl.constexpr = C.KIND
    PRECISION: tl.constexpr = C.PRECISION
    PIECES: tl.constexpr = (P + BP - 1) // BP
    tokens, length = sizes.tokens, sizes.length
    heads: tl.constexpr = sizes.heads
    chunk, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = lane // heads, lane % heads
    keys, local = tl.arange(0, BN), tl.arange(0, L)
    origin, end = place_of_chunk(table, chunk, tokens, L)
    rows = origin + local
    at = batch * tokens * heads + head
    mixed = kept.mixed + at * 4 * L
    row, wide = heads * P, heads * 4 * L
    block = (lane * length + chunk * L) * N
    slot = lane * (length // L) + slot_to_read(table, chunk, origin, end, 0)
    states, adjoints = place_of_state(kept.states, slot, N * P), place_of_state(between.adjoints, slot, N * P)
    factors = kept.factors + (lane * length + chunk * L)
    scales = between.scales + (lane * length + chunk * L)
    plane = tl.num_programs(1).to(tl.int64) * length
    v = of_head(v, batch, head)
    dy += at * P
    entries, adjoint_entries = between.entries + at * P, between.adjoint_entries + at * P
    for first in tl.range(0, P, BP, num_stages=1):
        columns = first + tl.arange(0, BP)
        values = load_rows(v.at, v.token, rows, end, columns, P, BP, KIND)
        state = load_whole(states, keys, first // BP, BP, N, P, KIND)
        out = tl.dot(load_rows(kept.inner + block, N, local, L, keys, N, BN, KIND), state, input_precision=PRECISION)
        known = load_half(mixed + L, wide, factors + plane, rows, end, local, local, L, L)
        out = product(split(known, KEY_TERMS, KIND), (values, values), KEY_TERMS, 1, PRECISION, out)
        of_piece = scales + (4 + first // BP) * plane
        store_half(entries, row, of_piece, rows, end, local, columns, P, BP, out)
        adjoint = load_whole(adjoints, keys, first // BP, BP, N, P, KIND)
        given = load_rows(dy, row, rows, end, columns, P, BP, KIND)
        out = tl.dot(load_rows(kept.outer + block, N, local, L, keys, N, BN, KIND), adjoint, input_precision=PRECISION)
        inverse = load_half(mixed + 2 * L, wide, factors + 2 * plane, rows, end, local, local, L, L).to(KIND)
        out = tl.dot(tl.trans(inverse), out.to(KIND), out, input_precision=PRECISION)
        through = load_half(mixed + 3 * L, wide, factors + 3 * plane, rows, end, local, local, L, L)
        out = product(turn(split(through, KEY_TERMS, KIND)), (given, given), KEY_TERMS, 1, PRECISION, out)
        store_half(adjoint_entries, row, of_piece + PIECES * plane, rows, end, local, columns, P, BP, out)
        out = tl.dot(load_rows(kept.writes + block, N, local, L, keys, N, BN, KIND), adjoint, input_precision=PRECISION)
        direct = load_half(mixed, wide, factors, rows, end, local, local, L, L)
        out = product(turn(split(direct, KEY_TERMS, KIND)), (given, given), KEY_TERMS, 1, PRECISION, out)
        store_rows(to.dv + at * P, row, rows, end, columns, P, BP, out)
    qa = tl.zeros([L, L], tl.float32)
    qk = tl.zeros([L, L], tl.float32)
    ba = tl.zeros([L, L], tl.float32)
    bk = tl.zeros([L, L], tl.float32)
    tl.debug_barrier()  # u and f are read again, by other threads
    for first in tl.range(0, P, BP, num_stages=2):
        columns = first + tl.arange(0, BP)
        given = load_rows(dy, row, rows, end, columns, P, BP, KIND)
        of_piece = scales + (4 + first // BP) * plane
        entry = load_half(entries, row, of_piece, rows, end, local, columns, P, BP)
        entry = turn(split(entry, KEY_TERMS, KIND, True))
        adjoint = load_half(adjoint_entries, row, of_piece + PIECES * plane, rows, end, local, columns, P, BP)
        adjoint = split(adjoint, KEY_TERMS, KIND, True)
        values = tl.trans(load_rows(v.at, v.token, rows, end, columns, P, BP, KIND))
        qa = product((given, given), entry, 1, KEY_TERMS, PRECISION, qa)
        qk = tl.dot(given, values, qk, input_precision=PRECISION)
        ba = tl.dot(adjoint[0], entry[0], ba, input_precision=PRECISION)
        bk = product(adjoint, (values, values), KEY_TERMS, 1, PRECISION, bk)
    down, across = local[:, None], local[None, :]
    if to.own is not None:
        tl.store(to.own + lane * tokens + rows, tl.sum(tl.where(down == across, qk, 0.0), axis=1), mask=rows < end)
    qa, qk = tl.where(down >= across, qa, 0.0), tl.where(down >= across, qk, 0.0)
    ba, bk = tl.where(down > across, ba, 0.0), tl.where(down > across, bk, 0.0)
    weights = between.weights + at * 4 * L
    store_half(weights, wide, scales, rows, end, local, local, L, L, qa)
    store_half(weights + L, wide, scales + plane, rows, end, local, local, L, L, qk)
    store_half(weights + 2 * L, wide, scales + 2 * plane, rows, end, local, local, L, L, ba)
    store_half(weights + 3 * L, wide, scales + 3 * plane, rows, end, local, local, L, L, bk)


@triton.jit
def rank_one_gradient(q, b, a, k, v, dy, kept, between, to, extra, given, table, sizes, C: tl.constexpr):
    """Gradients of q, b, a, k and the log decays [B, T, H, N] for BK keys of one chunk.

    given, extra: pointers and strides for LEFT and PULL.
    """
    N: tl.constexpr = C.N
    P: tl.constexpr = C.P
    BK: tl.constexpr = C.BK
    BP: tl.constexpr = C.BP
    L: tl.constexpr = C.L
    tokens, length = sizes.tokens, sizes.length
    heads: tl.constexpr = sizes.heads
    BLOCKS: tl.constexpr = (N + BK - 1) // BK
    chunk, lane = tl.program_id(0) // BLOCKS, tl.program_id(1).to(tl.int64)
    keys, local = tl.program_id(0) % BLOCKS * BK + tl.arange(0, BK), tl.arange(0, L)
    batch, head = lane // heads, lane % heads
    q, b, k, v = of_head(q, batch, head), of_head(b, batch, head), of_head(k, batch, head), of_head(v, batch, head)
    if C.LEFT is None:
        a = of_head(a, batch, head)
    of_left = given, batch, head, tokens, heads
    at = batch * tokens * heads + head
    plane = tl.num_programs(1).to(tl.int64) * length
    scales = between.scales + (lane * length + chunk * L)
    origin, end = place_of_chunk(table, chunk, tokens, L)
    slot = lane * (length // L) + slot_to_read(table, chunk, origin, end, 0)
    states, adjoints = place_of_state(kept.states, slot, N * P), place_of_state(between.adjoints, slot, N * P)
    running = kept.running + (lane * length + chunk * L) * N
    rows = origin + local
    around = Around(between.weights + at * 4 * L, scales, running, plane, rows, end, heads, keys, local, of_left)
    row, narrow = heads * P, heads * N
    PIECES: tl.constexpr = (P + C.PIECE - 1) // C.PIECE
    of_u, of_f = scales + 4 * plane, scales + (4 + PIECES) * plane
    last = tl.load(running + (L - 1) * N + keys, mask=keys < N, other=0.0)
    carried = tl.zeros([BK], tl.float32)
    for begin in tl.range(0, P, BP, num_stages=1):
        state = load_whole(states, keys, begin // BP, BP, N, P, tl.float32)
        carried += tl.sum(state * load_whole(adjoints, keys, begin // BP, BP, N, P, tl.float32), axis=1)
    carried *= tl.exp2(last)
    _, of_k, at_end = _of_a_vector(
        v.at, v.token, None, adjoints, k, None, q, None, b, to.dk + at * N, around, last, 1, False, C
    )  # fmt: skip
    carried += at_end
    log = -of_k
    tl.debug_barrier()  # keeps loads from moving up, which takes too many registers
    _, of_q, at_end = _of_a_vector(
        dy + at * P, row, None, states, q, None, a, C.LEFT, k, to.dq + at * N, around, last, 0, True, C
    )  # fmt: skip
    log += of_q
    tl.debug_barrier()
    dleft, of_a, at_end = _of_a_vector(
        between.entries + at * P, row, of_u, adjoints, a, C.LEFT, q, None, b,
        to.da + at * N if C.PULL is None else None, around, last, 0, False, C,
    )  # fmt: skip
    carried += at_end
    log -= of_a
    tl.debug_barrier()
    dright, of_b, at_end = _of_a_vector(
        between.adjoint_entries + at * P, row, of_f, states, b, None, a, C.LEFT, k,
        to.db + at * N if C.PULL is None else None, around, last, 1, True, C,
    )  # fmt: skip
    log = tl.cumsum(log + of_b, axis=0, reverse=True) - of_b + carried[None, :]
    if C.PULL is None:
        store_rows(to.dg + at * N, narrow, rows, end, keys, N, BK, log)
    else:
        at = place_of_rows(batch, head, lane * 0 + origin, local, rows < end, keys, tokens, heads, P, N)
        C.PULL(extra, at, dleft, dright, log)


@triton.jit
def _of_a_vector(
    field, field_t, scales_of_field, state_of, x, X: tl.constexpr, first, FIRST: tl.constexpr, second, out, around,
    last, turn: tl.constexpr, READS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradient of the vector x (q, b, a or k) of every row.

    It is the product of `field` with the state plus products of the weights with the vectors first and second of other
    rows. READS: x reads first and second, else they read x. turn: 1 for b and k, 0 for q and a; b reads the rows before
    its own. AT_ONCE: products without decay cancel in the gradient of log decays. scales_of_field: where it is u or f.
    X, FIRST: the functions that compute x and first, or None. KEY_TERMS 2: products between rows are in tf32.

    Returns the gradient, and its part in the gradients of the decays up to each row [L, BK] and of all decays [BK].
    """
    N: tl.constexpr = C.N
    P: tl.constexpr = C.P
    BK: tl.constexpr = C.BK
    BP: tl.constexpr = C.BP
    L: tl.constexpr = C.L
    KIND: tl.constexpr = C.KIND
    PRECISION: tl.constexpr = C.PRECISION
    ROWS: tl.constexpr = C.ROWS
    HALF: tl.constexpr = C.KEY_TERMS == 2 and scales_of_field is not None
    weights, scales, running, plane, rows, end, heads, keys, local, of_left = around
    grad = tl.zeros([L, BK], tl.float32)
    for begin in tl.range(0, P, BP):
        columns = begin + tl.arange(0, BP)
        if HALF:  # both the field (u or f) and the state are float16
            place = keys[:, None] * P + columns[None, :]
            inside = (keys[:, None] < N) & (columns[None, :] < P)
            state, scale = load_state(state_of, place, inside, begin // BP, N, P, KIND)
            given = load_rows(field, field_t, rows, end, columns, P, BP, tl.float16)
            scale *= tl.load(scales_of_field + begin // C.PIECE * plane + local)[:, None]
            grad += tl.dot(given, tl.trans(state)) * scale
        else:
            given = load_rows(field, field_t, rows, end, columns, P, BP, KIND)
            state = load_whole(state_of, keys, begin // BP, BP, N, P, KIND)
            grad = tl.dot(given, tl.trans(state), grad, input_precision=PRECISION)
    wide = heads * 4 * L
    if READS:
        at_one, at_two, to_one, to_two = 2 * turn, 2 * turn + 1, turn, turn
    else:
        at_one, at_two, to_one, to_two = turn, 2 + turn, 0, 1
    with_one = load_half(weights + at_one * L, wide, scales + at_one * plane, rows, end, local, local, L, L)
    with_one = with_one.to(ROWS)  # float16 has as many digits as tf32
    with_two = load_half(weights + at_two * L, wide, scales + at_two * plane, rows, end, local, local, L, L)
    with_two = with_two.to(ROWS)
    if not READS:
        with_one, with_two = tl.trans(with_one), tl.trans(with_two)
    rows_x = rows_of(x, X, of_left, rows, end, keys, N, BK, KIND)
    rows_1 = rows_of(first, FIRST, of_left, rows, end, keys, N, BK, KIND)
    rows_2 = load_rows(second.at, second.token, rows, end, keys, N, BK, KIND)
    own = load_chunk(running, local, keys, N, BK)
    before = own if READS and turn == 0 else load_earlier(running, local, keys, N, BK)
    carried = tl.zeros([BK], tl.float32)
    nothing = 0.0 * own
    if C.AT_ONCE:
        source = tl.exp2(-own)
        if READS:
            mine, theirs, others = tl.exp2(before), source, source
        else:
            mine, theirs, others = source, tl.exp2(own), tl.exp2(before)
        to_log = rounded(rows_x.to(tl.float32) * mine, ROWS, PRECISION).to(tl.float32)
        if not READS:
            grad *= tl.exp2(last)[None, :]
            carried = tl.sum(grad * to_log, axis=0)
        grad = _meet(grad, nothing, with_one, with_two, rows_1, rows_2, theirs, others, PRECISION)
        of_rows = grad * to_log
        grad *= mine
    else:
        if READS:
            grad *= tl.exp2(before)
            of_rows = grad * rows_x.to(tl.float32)
        else:  # carried to the chunk's end: it belongs to the decays after its row, all less those up to it
            grad *= tl.exp2(last[None, :] - own)
            of_rows = tl.where((local < L - 1)[:, None], grad * rows_x.to(tl.float32), 0.0)
            carried = tl.sum(of_rows, axis=0)
        for level in tl.range(0, C.LEVELS, num_stages=1):
            middle = middle_of(running, local, keys, level, N, BK)
            source = factor(middle - own, False)
            if READS:
                here, there, beside = factor(before - middle, False), source, source
            else:
                here, there, beside = source, factor(own - middle, False), factor(before - middle, False)
            meet_one, meet_two = meeting(local, level, to_one + 1, False), meeting(local, level, to_two + 1, False)
            if not READS:
                meet_one, meet_two = tl.trans(meet_one), tl.trans(meet_two)
            met = _meet(
                nothing, nothing, tl.where(meet_one, with_one, 0.0), tl.where(meet_two, with_two, 0.0),
                rows_1, rows_2, there, beside, PRECISION,
            )  # fmt: skip
            grad += met * here
            of_rows += met * rounded(rows_x.to(tl.float32) * here, ROWS, PRECISION).to(tl.float32)
        # products without decay: the row with itself, or with the neighbour that b reads
        gap = local[:, None] - local[None, :] if READS else local[None, :] - local[:, None]
        near = tl.sum(tl.where(gap == to_one, with_one.to(tl.float32), 0.0), axis=1)
        beside = _neighbours(rows_1, first, FIRST, of_left, rows, end, keys, turn, READS, 0, N, BK)
        grad += near[:, None] * beside
        near = tl.sum(tl.where(gap == to_two, with_two.to(tl.float32), 0.0), axis=1)
        beside = _neighbours(rows_2, second, None, of_left, rows, end, keys, turn, READS, 1, N, BK)
        grad += near[:, None] * beside
    if out is not None:
        store_rows(out, heads * N, rows, end, keys, N, BK, grad)
    return grad, of_rows, carried


@triton.jit
def _meet(start, nothing, with_one, with_two, rows_1, rows_2, theirs, others, PRECISION: tl.constexpr):
    """start plus the products of the weights with first and second rows [L, BK], rounded as the weights are.

    nothing: zeros that the compiler cannot recognise. Otherwise it would chain the two products, with another layout of
    warps.
    """
    scaled = rounded(rows_1.to(tl.float32) * theirs, with_one.dtype, PRECISION)
    out = tl.dot(with_one, scaled, start, input_precision=PRECISION)
    scaled = rounded(rows_2.to(tl.float32) * others, with_two.dtype, PRECISION)
    return out + tl.dot(with_two, scaled, nothing, input_precision=PRECISION)


@triton.jit
def _neighbours(
    own_rows, x, MAKE: tl.constexpr, of_left, rows, end, keys, turn: tl.constexpr, READS: tl.constexpr,
    SECOND: tl.constexpr, N: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The rows that meet without decay: the same row; for b the row before, for rows that b reads the row after."""
    if READS:
        return rows_of(x, MAKE, of_left, tl.maximum(rows - turn, 0), end, keys, N, BK, tl.float32)
    if SECOND:
        return load_rows(x.at, x.token, rows + 1, end, keys, N, BK, tl.float32)
    return own_rows.to(tl.float32)


@triton.jit
def load_whole(base, keys, piece, BP: tl.constexpr, N: tl.constexpr, P: tl.constexpr, KIND: tl.constexpr):
    """A piece of a stored state [N, P] in KIND."""
    columns = piece * BP + tl.arange(0, BP)
    inside = (keys[:, None] < N) & (columns[None, :] < P)
    found, scale = load_state(base, keys[:, None] * P + columns[None, :], inside, piece, N, P, KIND)
    return (found.to(tl.float32) * scale).to(KIND)
