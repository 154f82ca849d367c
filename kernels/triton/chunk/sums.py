"""What pieces of T add to a state of zero, all pieces at once; then the first state of every piece.

sum_piece is for decays that are one number a head, without corrections. What a piece adds is then one long product of
its rows, each scaled by the decays from it to the piece's end (for adjoint states from the piece's start), and nothing
waits for a state. Rows whose decays have become 0 in float32 are left out, even if they are infinite or NaN.
combine_segments and combine_moves go through the pieces in order, by decays or (delta rules) by transitions.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.scalars import TOTAL, read_scale, written_scale
from dsf.kernels.triton.chunk.tiles import Chunked, first_term, load_rows
from dsf.kernels.triton.packed import place_of_segment, segments_of
from dsf.kernels.triton.structs import of_head


@triton.jit
def _times(a, b):
    """A product of products."""
    return a * b


@dataclass(frozen=True, repr=False)
class Sum(Chunked):
    """BP channels a program; a segment has EVERY pieces and at most MOST chunks, a power of two. TERMS: bfloat16 terms
    of scaled rows."""

    BP: int
    MOST: int
    EVERY: int
    TERMS: int
    STAGES: int


@triton.jit(do_not_specialize=["per_piece", "chunks", "skipped"])
def sum_piece(a, b, scalars, sums, passed, table, sizes, per_piece, chunks, skipped, C: tl.constexpr):
    """sums [pieces, B, H, N, P]: Σ a_t b_tᵀ of a piece's rows, keys and values, or (REVERSE) queries and dy.

    passed [pieces, B, H, N]: the product of the piece's decays; None in REVERSE. The grid's third axis begins with
    piece `skipped`. Only the sum over a segment's pieces is used: rows that have decayed to 0 at the segment's end
    (REVERSE: start) are left out of their piece.
    """
    REVERSE: tl.constexpr = passed is None
    SCALED: tl.constexpr = C.READ_SCALED if REVERSE else C.SCALED  # b has scales of its own, of reads or of sources
    slice_of_p, lane, piece = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) + skipped
    batch, head = lane // sizes.heads, lane % sizes.heads
    a, b = of_head(a, batch, head), of_head(b, batch, head)
    first, stop, shift, end = place_of_segment(table, piece, per_piece, sizes.tokens, True)
    count = tl.maximum(tl.minimum(stop, chunks) - first, 0)
    last = first + count - 1
    scalars += lane * sizes.length - shift
    keys, columns, local = tl.arange(0, C.BN), slice_of_p * C.BP + tl.arange(0, C.BP), tl.arange(0, C.L)
    at = piece * tl.num_programs(1) + lane
    if C.DECAY:
        each = tl.arange(0, C.MOST)  # chunks from where the sum is wanted
        behind = (piece % C.EVERY if REVERSE else C.EVERY - 1 - piece % C.EVERY) * per_piece
        if REVERSE:
            in_turn, there = first - behind + each, first - behind + each < chunks
        else:
            end_of_all = tl.minimum(stop + behind, chunks)
            behind = end_of_all - tl.minimum(stop, chunks)
            in_turn, there = end_of_all - 1 - each, end_of_all - 1 - each >= 0
        totals = tl.load(scalars + TOTAL * sizes.plane + in_turn * C.L + shift, mask=there, other=1.0)
        if not REVERSE:
            own = tl.where((each >= behind) & (each < behind + count), totals, 1.0)
            whole = tl.reduce(own, 0, _times)
            tl.store(passed + at * C.N + keys, whole + keys * 0.0, mask=(keys < C.N) & (slice_of_p == 0))
        alive = 1 + tl.sum((tl.cumprod(totals, axis=0) != 0).to(tl.int32), axis=0)
        count = tl.maximum(tl.minimum(alive - behind, count), 0)
        count = tl.sum(tl.where(tl.arange(0, 32) == 0, count, 0), axis=0)  # so that the loop is known not to diverge
    elif not REVERSE:
        tl.store(passed + at * C.N + keys, keys * 0.0 + 1.0, mask=(keys < C.N) & (slice_of_p == 0))
    state = tl.zeros([C.BN, C.BP], tl.float32)
    between = 1.0
    for step in tl.range(0, count, num_stages=C.STAGES):
        chunk = first + step if REVERSE else last - step
        rows = chunk * C.L + local + shift
        rows_a = tl.trans(load_rows(a.at, a.token, rows, end, keys, C.N, C.BN, C.KIND))
        given = load_rows(b.at, b.token, rows, end, columns, C.P, C.BP, C.KIND)
        if C.DECAY or SCALED:
            if REVERSE:
                scale = read_scale(scalars, sizes.plane, rows, C.DECAY, SCALED)
            else:
                scale = written_scale(scalars, sizes.plane, rows, C.DECAY, SCALED)
            if C.DECAY:
                scale *= between
                between *= tl.load(scalars + TOTAL * sizes.plane + chunk * C.L + shift)
            exact = given.to(tl.float32) * scale[:, None]
            kept = first_term(exact, C.TERMS)
            state = tl.dot(rows_a, kept.to(C.KIND), state, input_precision=C.PRECISION)
            if C.TERMS == 2:
                state = tl.dot(rows_a, (exact - kept).to(C.KIND), state, input_precision=C.PRECISION)
        else:
            state = tl.dot(rows_a, given, state, input_precision=C.PRECISION)
    place = keys[:, None].to(tl.int64) * C.P + columns[None, :]
    tl.store(sums + at * C.N * C.P + place, state, mask=(keys[:, None] < C.N) & (columns[None, :] < C.P))


@triton.jit
def combine_segments(
    local, passed, start, starts, table, segments, size, P,
    N: tl.constexpr, BLOCK: tl.constexpr, START: tl.constexpr, REVERSE: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """First state of every piece, from what each adds and passes on: S_{s+1} = passed_s S_s + local_s; REVERSE: from
    the last piece to the first.

    EVERY: in this order, only the first state of each EVERY-th piece is stored.
    """
    lane, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2)
    low, stop = segments_of(table, sequence, segments)
    lanes = tl.num_programs(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    if START:
        state = tl.load(start + (sequence * lanes + lane) * size + at, mask=inside, other=0.0)
    else:
        state = tl.zeros([BLOCK], tl.float32)
    passed += at // P
    local += at
    starts += at
    onward = -1 if REVERSE else 1
    # what comes after the last first state that is stored is neither needed nor, in all calls, computed
    first = (low + EVERY) // EVERY * EVERY if REVERSE else low
    last = stop if REVERSE else (stop - 1) // EVERY * EVERY
    for step in range(0, stop - low, 4):  # what four pieces do is asked for at once
        piece = stop - 1 - step if REVERSE else low + step
        a = _of_piece(local, passed, piece, first, last, size, inside, N)
        b = _of_piece(local, passed, piece + onward, first, last, size, inside, N)
        c = _of_piece(local, passed, piece + 2 * onward, first, last, size, inside, N)
        d = _of_piece(local, passed, piece + 3 * onward, first, last, size, inside, N)
        state = _after_piece(state, a, starts, piece, low, stop, size, inside, EVERY, REVERSE)
        state = _after_piece(state, b, starts, piece + onward, low, stop, size, inside, EVERY, REVERSE)
        state = _after_piece(state, c, starts, piece + 2 * onward, low, stop, size, inside, EVERY, REVERSE)
        state = _after_piece(state, d, starts, piece + 3 * onward, low, stop, size, inside, EVERY, REVERSE)


@triton.jit
def _of_piece(local, passed, piece, first, last, size, inside, N: tl.constexpr):
    """What a piece multiplies a state by, and what it adds; 1 and 0 but for those from `first` to before `last`."""
    there = inside & (piece >= first) & (piece < last)
    at = piece * tl.num_programs(1) + tl.program_id(1).to(tl.int64)
    return tl.load(passed + at * N, mask=there, other=1.0), tl.load(local + at * size, mask=there, other=0.0)


@triton.jit
def _after_piece(
    state, of_piece, starts, piece, low, stop, size, inside, EVERY: tl.constexpr, REVERSE: tl.constexpr
):  # fmt: skip
    """The state after a piece; stores the state before it, if that is wanted."""
    wanted = ((piece + 1 if REVERSE else piece) % EVERY == 0) & (piece >= low) & (piece < stop)
    at = piece // EVERY * tl.num_programs(1) + tl.program_id(1).to(tl.int64)
    tl.store(starts + at * size, state, mask=inside & wanted)
    return state * of_piece[0] + of_piece[1]


@triton.jit
def combine_moves(
    local, moves, start, starts, table, segments,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
    START: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """combine_segments for transitions [N, N] (transposed in REVERSE), BK rows of the state at a time."""
    lane, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2)
    low, stop = segments_of(table, sequence, segments)
    lanes = tl.num_programs(1)
    keys, columns = tl.arange(0, BN), tl.program_id(0) * BP + tl.arange(0, BP)
    place = keys[:, None] * P + columns[None, :]
    inside = (keys[:, None] < N) & (columns[None, :] < P)
    if START:
        state = tl.load(start + (sequence * lanes + lane) * N * P + place, mask=inside, other=0.0)
    else:
        state = tl.zeros([BN, BP], tl.float32)
    for step in range(stop - low):
        segment = (stop - 1 - step if REVERSE else low + step) * lanes + lane
        first = starts + segment * N * P
        tl.store(first + place, state, mask=inside)
        tl.debug_barrier()  # it is read again, by other threads
        more = step + 1 < stop - low  # no state is stored behind the last segment, nor is it computed
        state = tl.load(local + segment * N * P + place, mask=inside & more, other=0.0)
        for block in tl.range(0, BN, BK, num_stages=2):
            inner = block + tl.arange(0, BK)
            if REVERSE:
                at = inner[None, :] * N + keys[:, None]
            else:
                at = keys[:, None] * N + inner[None, :]
            there = (keys[:, None] < N) & (inner[None, :] < N) & more
            move = tl.load(moves + segment * N * N + at, mask=there, other=0.0)
            rows = (inner[:, None] < N) & (columns[None, :] < P)
            part = tl.load(first + inner[:, None] * P + columns[None, :], mask=rows, other=0.0)
            state = tl.dot(move, part, state, input_precision=PRECISION)
