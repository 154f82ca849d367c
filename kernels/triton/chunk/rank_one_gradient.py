"""Diagonal plus rank one, backwards: the gradients of one chunk from its first state and its last state's adjoint.

With S_0 and the adjoint dS_L of S_L (rank_one.py's walk in both directions), all chunks in parallel: first the rows

    u = W S_0 + T BK v,   f = Tᵀ â dS_L + (QA T)ᵀ dy,   dv = Mᵀ dy + K dS_L

(f: the gradient of BK v + b̃ S_0), then, for each key, the sums of the four vectors of a row. Reads q and b multiply
S_0, u and v by dy and f; writes a and k multiply dS_L, dy and f by u and v: one function computes all four.

Log decays: every product of rows decays by exp(G_i - G_j). So a decay's gradient adds the products whose reading row is
after it (or at it, for q) and subtracts those whose writing row is. Both use the same rounded factors, so that products
that occur in both cancel. Products that no decay touches (q with its own row, b with the row before) are left out of
both. Rows of a group (GROUP > 1) are all read before the decay of its first one, which alone has a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.halves import load_half, store_half
from dsf.kernels.triton.chunk.keywise import load_chunk, load_middle, rounded
from dsf.kernels.triton.chunk.rank_one import (
    RankOne,
    factor,
    load_earlier,
    meeting,
    place_of_rows,
    rows_of,
)
from dsf.kernels.triton.chunk.states import load_state, place_of_state
from dsf.kernels.triton.chunk.tiles import is_later, load_rows, product, split, store_rows, turn
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
    PIECES: tl.constexpr = (C.P + C.BP - 1) // C.BP
    tokens, length = sizes.tokens, sizes.length
    heads: tl.constexpr = sizes.heads
    chunk, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = lane // heads, lane % heads
    keys, local = tl.arange(0, C.BN), tl.arange(0, C.L)
    origin, end = place_of_chunk(table, chunk, tokens, C.L)
    rows = origin + local
    at = batch * tokens * heads + head
    mixed = kept.mixed + at * 4 * C.L
    row, wide = heads * C.P, heads * 4 * C.L
    block = (lane * length + chunk * C.L) * C.N
    slot = lane * (length // C.L) + slot_to_read(table, chunk, origin, end, 0)
    states, adjoints = place_of_state(kept.states, slot, C.N * C.P), place_of_state(between.adjoints, slot, C.N * C.P)
    factors = kept.factors + (lane * length + chunk * C.L)
    scales = between.scales + (lane * length + chunk * C.L)
    plane = tl.num_programs(1).to(tl.int64) * length
    v = of_head(v, batch, head)
    dy += at * C.P
    entries, adjoint_entries = between.entries + at * C.P, between.adjoint_entries + at * C.P
    for first in tl.range(0, C.P, C.BP, num_stages=1):
        columns = first + tl.arange(0, C.BP)
        values = load_rows(v.at, v.token, rows, end, columns, C.P, C.BP, C.KIND)
        state = load_whole(states, keys, first // C.BP, C.BP, C.N, C.P, C.KIND)
        out = tl.dot(
            load_rows(kept.inner + block, C.N, local, C.L, keys, C.N, C.BN, C.KIND), state, input_precision=C.PRECISION
        )
        known = load_half(mixed + C.L, wide, factors + plane, rows, end, local, local, C.L, C.L)
        out = product(split(known, C.KEY_TERMS, C.KIND), (values, values), C.KEY_TERMS, 1, C.PRECISION, out)
        of_piece = scales + (4 + first // C.BP) * plane
        store_half(entries, row, of_piece, rows, end, local, columns, C.P, C.BP, out)
        adjoint = load_whole(adjoints, keys, first // C.BP, C.BP, C.N, C.P, C.KIND)
        given = load_rows(dy, row, rows, end, columns, C.P, C.BP, C.KIND)
        out = tl.dot(
            load_rows(kept.outer + block, C.N, local, C.L, keys, C.N, C.BN, C.KIND),
            adjoint,
            input_precision=C.PRECISION,
        )
        inverse = load_half(mixed + 2 * C.L, wide, factors + 2 * plane, rows, end, local, local, C.L, C.L).to(C.KIND)
        out = tl.dot(tl.trans(inverse), out.to(C.KIND), out, input_precision=C.PRECISION)
        through = load_half(mixed + 3 * C.L, wide, factors + 3 * plane, rows, end, local, local, C.L, C.L)
        out = product(turn(split(through, C.KEY_TERMS, C.KIND)), (given, given), C.KEY_TERMS, 1, C.PRECISION, out)
        store_half(adjoint_entries, row, of_piece + PIECES * plane, rows, end, local, columns, C.P, C.BP, out)
        out = tl.dot(
            load_rows(kept.writes + block, C.N, local, C.L, keys, C.N, C.BN, C.KIND),
            adjoint,
            input_precision=C.PRECISION,
        )
        direct = load_half(mixed, wide, factors, rows, end, local, local, C.L, C.L)
        out = product(turn(split(direct, C.KEY_TERMS, C.KIND)), (given, given), C.KEY_TERMS, 1, C.PRECISION, out)
        store_rows(to.dv + at * C.P, row, rows, end, columns, C.P, C.BP, out)
    qa = tl.zeros([C.L, C.L], tl.float32)
    qk = tl.zeros([C.L, C.L], tl.float32)
    ba = tl.zeros([C.L, C.L], tl.float32)
    bk = tl.zeros([C.L, C.L], tl.float32)
    tl.debug_barrier()  # u and f are read again, by other threads
    for first in tl.range(0, C.P, C.BP, num_stages=2):
        columns = first + tl.arange(0, C.BP)
        given = load_rows(dy, row, rows, end, columns, C.P, C.BP, C.KIND)
        of_piece = scales + (4 + first // C.BP) * plane
        entry = load_half(entries, row, of_piece, rows, end, local, columns, C.P, C.BP)
        entry = turn(split(entry, C.KEY_TERMS, C.KIND, True))
        adjoint = load_half(adjoint_entries, row, of_piece + PIECES * plane, rows, end, local, columns, C.P, C.BP)
        adjoint = split(adjoint, C.KEY_TERMS, C.KIND, True)
        values = tl.trans(load_rows(v.at, v.token, rows, end, columns, C.P, C.BP, C.KIND))
        qa = product((given, given), entry, 1, C.KEY_TERMS, C.PRECISION, qa)
        qk = tl.dot(given, values, qk, input_precision=C.PRECISION)
        ba = tl.dot(adjoint[0], entry[0], ba, input_precision=C.PRECISION)
        bk = product(adjoint, (values, values), C.KEY_TERMS, 1, C.PRECISION, bk)
    down, across = local[:, None], local[None, :]
    if to.own is not None:
        tl.store(to.own + lane * tokens + rows, tl.sum(tl.where(down == across, qk, 0.0), axis=1), mask=rows < end)
    qa, qk = tl.where(down >= across, qa, 0.0), tl.where(down >= across, qk, 0.0)
    earlier = is_later(down, across, C.GROUP)
    ba, bk = tl.where(earlier, ba, 0.0), tl.where(earlier, bk, 0.0)
    weights = between.weights + at * 4 * C.L
    store_half(weights, wide, scales, rows, end, local, local, C.L, C.L, qa)
    store_half(weights + C.L, wide, scales + plane, rows, end, local, local, C.L, C.L, qk)
    store_half(weights + 2 * C.L, wide, scales + 2 * plane, rows, end, local, local, C.L, C.L, ba)
    store_half(weights + 3 * C.L, wide, scales + 3 * plane, rows, end, local, local, C.L, C.L, bk)


@triton.jit
def rank_one_gradient(q, b, a, k, v, dy, kept, between, to, extra, given, table, sizes, C: tl.constexpr):
    """Gradients of q, b, a, k and the log decays [B, T, H, N] for BK keys of one chunk.

    given, extra: pointers and strides for LEFT and PULL.
    """
    tokens, length = sizes.tokens, sizes.length
    heads: tl.constexpr = sizes.heads
    BLOCKS: tl.constexpr = (C.N + C.BK - 1) // C.BK
    chunk, lane = tl.program_id(0) // BLOCKS, tl.program_id(1).to(tl.int64)
    keys, local = tl.program_id(0) % BLOCKS * C.BK + tl.arange(0, C.BK), tl.arange(0, C.L)
    batch, head = lane // heads, lane % heads
    q, b, k, v = of_head(q, batch, head), of_head(b, batch, head), of_head(k, batch, head), of_head(v, batch, head)
    if C.LEFT is None:
        a = of_head(a, batch, head)
    of_left = given, batch, head, tokens, heads
    at = batch * tokens * heads + head
    plane = tl.num_programs(1).to(tl.int64) * length
    scales = between.scales + (lane * length + chunk * C.L)
    origin, end = place_of_chunk(table, chunk, tokens, C.L)
    slot = lane * (length // C.L) + slot_to_read(table, chunk, origin, end, 0)
    states, adjoints = place_of_state(kept.states, slot, C.N * C.P), place_of_state(between.adjoints, slot, C.N * C.P)
    running = kept.running + (lane * length + chunk * C.L) * C.N
    rows = origin + local
    around = Around(between.weights + at * 4 * C.L, scales, running, plane, rows, end, heads, keys, local, of_left)
    row, narrow = heads * C.P, heads * C.N
    PIECES: tl.constexpr = (C.P + C.PIECE - 1) // C.PIECE
    of_u, of_f = scales + 4 * plane, scales + (4 + PIECES) * plane
    last = tl.load(running + (C.L - 1) * C.N + keys, mask=keys < C.N, other=0.0)
    carried = tl.zeros([C.BK], tl.float32)
    for begin in tl.range(0, C.P, C.BP, num_stages=1):
        state = load_whole(states, keys, begin // C.BP, C.BP, C.N, C.P, tl.float32)
        carried += tl.sum(state * load_whole(adjoints, keys, begin // C.BP, C.BP, C.N, C.P, tl.float32), axis=1)
    carried *= tl.exp2(last)
    _, of_k, at_end = _of_a_vector(
        v.at, v.token, None, adjoints, k, None, q, None, b, to.dk + at * C.N, around, last, 1, False, C
    )  # fmt: skip
    carried += at_end
    log = -of_k
    tl.debug_barrier()  # keeps loads from moving up, which takes too many registers
    _, of_q, at_end = _of_a_vector(
        dy + at * C.P, row, None, states, q, None, a, C.LEFT, k, to.dq + at * C.N, around, last, 0, True, C
    )  # fmt: skip
    log += of_q
    tl.debug_barrier()
    dleft, of_a, at_end = _of_a_vector(
        between.entries + at * C.P, row, of_u, adjoints, a, C.LEFT, q, None, b,
        to.da + at * C.N if C.PULL is None else None, around, last, 0, False, C,
    )  # fmt: skip
    carried += at_end
    log -= of_a
    tl.debug_barrier()
    dright, of_b, at_end = _of_a_vector(
        between.adjoint_entries + at * C.P, row, of_f, states, b, None, a, C.LEFT, k,
        to.db + at * C.N if C.PULL is None else None, around, last, 1, True, C,
    )  # fmt: skip
    not_yet = of_b
    if C.GROUP > 1:
        sums = tl.sum(tl.reshape(of_b, [C.L // C.GROUP, C.GROUP, C.BK]), axis=1, keep_dims=True)
        not_yet = tl.reshape(tl.broadcast_to(sums, [C.L // C.GROUP, C.GROUP, C.BK]), [C.L, C.BK])
    log = tl.cumsum(log + of_b, axis=0, reverse=True) - not_yet + carried[None, :]
    if C.PULL is None:
        store_rows(to.dg + at * C.N, narrow, rows, end, keys, C.N, C.BK, log)
    else:
        at = place_of_rows(batch, head, lane * 0 + origin, local, rows < end, keys, tokens, heads, C.P, C.N)
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
    HALF: tl.constexpr = C.KEY_TERMS == 2 and scales_of_field is not None
    weights, scales, running, plane, rows, end, heads, keys, local, of_left = around
    grad = tl.zeros([C.L, C.BK], tl.float32)
    for begin in tl.range(0, C.P, C.BP):
        columns = begin + tl.arange(0, C.BP)
        if HALF:  # both u or f and the state are kept in float16
            place = keys[:, None] * C.P + columns[None, :]
            inside = (keys[:, None] < C.N) & (columns[None, :] < C.P)
            state, scale = load_state(state_of, place, inside, begin // C.BP, C.N, C.P, C.KIND)
            given = load_rows(field, field_t, rows, end, columns, C.P, C.BP, tl.float16)
            scale *= tl.load(scales_of_field + begin // C.PIECE * plane + local)[:, None]
            grad += tl.dot(given, tl.trans(state)) * scale
        else:
            given = load_rows(field, field_t, rows, end, columns, C.P, C.BP, C.KIND)
            state = load_whole(state_of, keys, begin // C.BP, C.BP, C.N, C.P, C.KIND)
            grad = tl.dot(given, tl.trans(state), grad, input_precision=C.PRECISION)
    wide = heads * 4 * C.L
    if READS:
        at_one, at_two, to_one, to_two = 2 * turn, 2 * turn + 1, turn, turn
    else:
        at_one, at_two, to_one, to_two = turn, 2 + turn, 0, 1
    with_one = load_half(weights + at_one * C.L, wide, scales + at_one * plane, rows, end, local, local, C.L, C.L)
    with_one = with_one.to(C.ROWS)  # float16 has tf32's digits
    with_two = load_half(weights + at_two * C.L, wide, scales + at_two * plane, rows, end, local, local, C.L, C.L)
    with_two = with_two.to(C.ROWS)
    if not READS:
        with_one, with_two = tl.trans(with_one), tl.trans(with_two)
    rows_x = rows_of(x, X, of_left, rows, end, keys, C.N, C.BK, C.KIND)
    rows_1 = rows_of(first, FIRST, of_left, rows, end, keys, C.N, C.BK, C.KIND)
    rows_2 = load_rows(second.at, second.token, rows, end, keys, C.N, C.BK, C.KIND)
    own = load_chunk(running, local, keys, C.N, C.BK)
    before = own if READS and turn == 0 else load_earlier(running, local, keys, C.N, C.GROUP)
    carried = tl.zeros([C.BK], tl.float32)
    nothing = 0.0 * own
    if C.AT_ONCE:
        source = tl.exp2(-own)
        if READS:
            mine, theirs, others = tl.exp2(before), source, source
        else:
            mine, theirs, others = source, tl.exp2(own), tl.exp2(before)
        to_log = rounded(rows_x.to(tl.float32) * mine, C.ROWS, C.PRECISION).to(tl.float32)
        if not READS:
            grad *= tl.exp2(last)[None, :]
            carried = tl.sum(grad * to_log, axis=0)
        grad = _meet(grad, nothing, with_one, with_two, rows_1, rows_2, theirs, others, C.PRECISION)
        of_rows = grad * to_log
        grad *= mine
    else:
        if READS:
            grad *= tl.exp2(before)
            of_rows = grad * rows_x.to(tl.float32)
        else:  # carried to the chunk's end: it belongs to the decays after its row, all less those up to it
            grad *= tl.exp2(last[None, :] - own)
            of_rows = tl.where((local < C.L - C.GROUP)[:, None], grad * rows_x.to(tl.float32), 0.0)
            carried = tl.sum(of_rows, axis=0)
        for level in tl.range(0, C.LEVELS, num_stages=1):
            middle = load_middle(running, local, keys, level, C.N, C.BK)
            source = factor(middle - own, False)
            if READS:
                here, there, beside = factor(before - middle, False), source, source
            else:
                here, there, beside = source, factor(own - middle, False), factor(before - middle, False)
            meet_one = meeting(local, level, to_one + 1, False, C.GROUP)
            meet_two = meeting(local, level, to_two + 1, False, C.GROUP)
            if not READS:
                meet_one, meet_two = tl.trans(meet_one), tl.trans(meet_two)
            met = _meet(
                nothing, nothing, tl.where(meet_one, with_one, 0.0), tl.where(meet_two, with_two, 0.0),
                rows_1, rows_2, there, beside, C.PRECISION,
            )  # fmt: skip
            grad += met * here
            of_rows += met * rounded(rows_x.to(tl.float32) * here, C.ROWS, C.PRECISION).to(tl.float32)
        # what no decay touches: the row's own (its group's), or the neighbour's that b reads
        if C.GROUP == 1:
            gap = local[:, None] - local[None, :] if READS else local[None, :] - local[:, None]
            near = tl.sum(tl.where(gap == to_one, with_one.to(tl.float32), 0.0), axis=1)
            beside = _neighbours(rows_1, first, FIRST, of_left, rows, end, keys, turn, READS, 0, C.N, C.BK)
            grad += near[:, None] * beside
            near = tl.sum(tl.where(gap == to_two, with_two.to(tl.float32), 0.0), axis=1)
            beside = _neighbours(rows_2, second, None, of_left, rows, end, keys, turn, READS, 1, C.N, C.BK)
            grad += near[:, None] * beside
        else:
            group = local // C.GROUP
            gap = group[:, None] - group[None, :] if READS else group[None, :] - group[:, None]
            grad += _meet(
                nothing, nothing, tl.where(gap == to_one, with_one, 0.0), tl.where(gap == to_two, with_two, 0.0),
                rows_1, rows_2, 1.0, 1.0, C.PRECISION,
            )  # fmt: skip
    if out is not None:
        store_rows(out, heads * C.N, rows, end, keys, C.N, C.BK, grad)
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
