"""The forward walk: writes y, a delta rule's v_new, chunks' first states and last states (see
dsf.kernels.triton.chunk.walk)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.keywise import last_running
from dsf.kernels.triton.chunk.scalars import (
    ERASE,
    PREFIX_ERASE,
    READ,
    SOURCE,
    between,
    read_scale,
    strength_seen,
    total_of,
    written_scale,
)
from dsf.kernels.triton.chunk.states import place_of_state, store_state
from dsf.kernels.triton.chunk.tiles import first_term, load_rows, product, split, store_rows
from dsf.kernels.triton.chunk.transform import load_lower
from dsf.kernels.triton.chunk.walk import (
    Walk,
    first_state,
    load_pairs,
    load_scores,
    load_wide,
    of_lane,
    part_of,
    store_entries,
)
from dsf.kernels.triton.functions import rest_of
from dsf.kernels.triton.packed import place_of_segment
from dsf.kernels.triton.structs import derived, of_head

# An end before every row: rows of segments without chunks lie as far below 0 as their place in the table.
NOWHERE = tl.constexpr(-(1 << 31))


class Outputs(NamedTuple):
    """Outputs of the forward walk; None: not written. y [B, T, H, P], and more digits of y. For the walked chunks,
    entries (v_new) [B, H, limit - base, L, P] (KEYWISE: [B, T, H, P]) and first states [B, H, limit - base, N, P].
    Last states (with packed sequences one for each segment). passed: as in SUMMARY."""

    y: Any
    more: Any
    entries: Any
    states: Any
    final: Any
    passed: Any


class Normal(NamedTuple):
    """The normaliser, if any: its input [B, H, T] or None, its readout, its states between chunks."""

    ones: Any = None
    weights: Any = None
    states: Any = None


class Early(NamedTuple):
    """Values of a chunk that are loaded before its state is used."""

    found: Any
    weight: Any
    drive: Any


class Ahead(NamedTuple):
    """Values of a chunk that are loaded one chunk before."""

    write: Any
    scores: Any
    rest: Any


@dataclass(frozen=True, repr=False)
class ForwardWalk(Walk):
    """FINISH: the printed function that computes y from the readout and from what LOADS loads by pointers and strides.

    LATE: a chunk's y is stored when the next chunk begins, while the rows of that chunk are being loaded.
    """

    LOADS: Any
    FINISH: Any
    LATE: bool
    SCORE_TERMS: int
    READ_TERMS: int

    @derived
    def WRITE_TERMS(self) -> int:
        """Terms of rows as they are written into states."""
        return self.TERMS if self.DELTA or self.DECAY or self.SCALED else 1


@triton.jit(do_not_specialize=["segments", "per_segment", "base", "limit", "beside"])
def forward_walk(
    q, k, operands, v, start, to, normal, extra, table, sizes, segments, per_segment, base, limit, beside,
    C: tl.constexpr,
):  # fmt: skip
    """Walk from chunk `base` up to `limit`, in segments of per_segment chunks.

    SUMMARY (`passed` is wanted): also what a segment multiplies its first state by: [S, B, H, N], or (DELTA)
    [S, B, H, N, N]. extra: arguments of LOADS, which is called early, because loads that feed no product are not
    prefetched. START: `start` has that many states for each segment, which begins with the first of them; -1: there is
    one segment, which begins with zeros where `base` is 0. beside: programs along the grid's third axis that come
    before its segments.
    """
    piece, lane, segment = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) - beside
    SUMMARY: tl.constexpr = to.passed is not None
    first, stop, shift, end = place_of_segment(table, segment, per_segment, sizes.tokens, SUMMARY)
    first, stop = first + base, tl.minimum(stop + base, limit)
    filled = None if C.WHOLE else end
    carries = False
    if SUMMARY and C.DELTA:
        carries = piece >= tl.cdiv(C.P, C.BP)
        piece -= tl.where(carries, tl.cdiv(C.P, C.BP), 0)
        filled = tl.where(carries, 0, end)
    part = part_of(piece, lane, shift, end, sizes, False, C)
    x = of_lane(q, k, operands, part, sizes, False, C)
    v = of_head(v, lane // sizes.heads, lane % sizes.heads)
    kept = lane * (limit - base) - base  # chunks kept before the first one of all
    at_start = (segment * C.START * tl.num_programs(1) + lane) * C.N * C.P
    state = first_state(start, at_start, base > 0, part, C)
    decayed = tl.full([C.BN], 1.0, tl.float32)
    if SUMMARY and C.DELTA:
        state = tl.where((part.keys[:, None] == part.columns[None, :]) & carries, 1.0, 0.0)
    if C.AHEAD:
        next_rows = first * C.L + part.local + shift
        if table is not None:  # those of segments without chunks lie below 0
            next_rows = tl.maximum(next_rows, 0)
        ahead = _ahead(x, v, next_rows, next_rows, filled, part, sizes, C)
    if C.LATE:
        held = tl.zeros([C.L, C.BP], to.y.dtype.element_ty if to.more is None else tl.float32)
    for chunk in tl.range(first, stop, num_stages=C.STAGES):
        rows = chunk * C.L + part.local + shift
        if C.LATE:
            _store_y(to, rows - C.L, tl.where(chunk > first, end, NOWHERE), held, part, sizes, C)
        if to.states is not None:  # stored before the wait for loads
            at = place_of_state(to.states, kept + chunk, C.N * C.P)
            store_state(at, part.place, part.inside, piece, state, C.N * C.P)
        rows_of_k = chunk * C.L + part.local if C.KEYWISE else rows
        rows_k = load_wide(x.k, rows_of_k, part, sizes, C)
        if C.AHEAD:
            now, ahead = ahead, _ahead(x, v, rows + C.L, rows, filled, part, sizes, C)
            pairs = now.scores, now.rest if C.STAGES > 2 else ahead.rest
            write = now.write
        else:
            write = load_rows(v.at, v.token, rows, filled, part.columns, C.P, C.BP, C.KIND)
            pairs = write, write
        written, entry = (write, write), write
        if to.y is not None:
            early = _early(extra, normal, chunk, rows, part, sizes, C)
        seen = split(state, C.STATE_TERMS, C.KIND)
        if C.DELTA:
            entry, written = _entries(write, rows_k, rows_of_k, rows, seen, chunk, kept, x, to, part, sizes, C)
        if to.y is not None:
            out = _read(
                state, seen, written, rows_k, rows_of_k, rows, write, early, pairs, chunk, x, normal, part, sizes, C
            )  # fmt: skip
            if C.LATE:
                held = out.to(held.dtype)
            else:
                _store_y(to, rows, None if C.WHOLE else end, out, part, sizes, C)
        state, decayed = _onward(state, decayed, entry, written, rows_k, rows_of_k, rows, chunk, x, to, part, sizes, C)
    if C.LATE:
        rows = (stop - 1) * C.L + part.local + shift
        _store_y(to, rows, tl.where(stop > first, end, NOWHERE), held, part, sizes, C)
    _store_ends(state, decayed, carries, to, table, segment, segments, part, C)


@triton.jit
def _ahead(x, v, rows, here, filled, part, sizes, C: tl.constexpr):
    """Load what is used one chunk later; with two stages, rounding errors of scores are those of this chunk, `here`."""
    write = load_rows(v.at, v.token, rows, filled, part.columns, C.P, C.BP, C.KIND)
    scores, rest = write, write
    if C.KEY_TERMS == 2 and C.DELTA:
        if C.STAGES <= 2:
            rest = load_pairs(x.rest.at, here, part, sizes, C)
        scores = load_pairs(x.scores, rows, part, sizes, C)
        if C.STAGES > 2:
            rest = load_pairs(x.rest.at, rows, part, sizes, C)
    return Ahead(write, scores, rest)


@triton.jit
def _early(extra, normal, chunk, rows, part, sizes, C: tl.constexpr):
    """What y needs besides queries and states."""
    found, weight, drive = rows, rows, rows
    if C.FINISH is not None:
        at = (
            part.lane // sizes.heads, part.lane % sizes.heads, part.lane * 0 + chunk * C.L + part.shift,
            part.local[:, None], 0, part.columns[None, :], (rows < part.end)[:, None], True,
            (part.columns < C.P)[None, :], part.piece, 0, sizes.tokens, sizes.heads, C.P, C.N,
        )  # fmt: skip
        found = C.LOADS(extra, at)
    if normal.weights is not None:
        at_chunk = (part.lane * (sizes.length // C.L) + chunk) * C.N
        weight = tl.load(normal.states + at_chunk + part.keys, mask=part.keys < C.N, other=0.0)
        if normal.ones is not None:
            drive = tl.load(normal.ones + part.lane * sizes.tokens + rows, mask=rows < part.end, other=0.0)
    return Early(found, weight, drive)


@triton.jit
def _entries(write, rows_k, rows_of_k, rows, seen, chunk, kept, x, to, part, sizes, C: tl.constexpr):
    """The entries (v_new) of a chunk, in float32 and in terms; they are stored where states are."""
    read_k = rows_k
    if C.KEYWISE:
        read_k = load_wide(x.erased, rows_of_k, part, sizes, C)
    known = product((read_k, read_k), seen, 1, C.STATE_TERMS, C.PRECISION)
    erase = tl.load(x.scalars + (PREFIX_ERASE if C.DECAY else ERASE) * sizes.plane + rows)
    if C.SCALED:
        source = tl.load(x.scalars + SOURCE * sizes.plane + rows)[:, None]
        known = write.to(tl.float32) * source - known * erase[:, None]
    else:
        known = write.to(tl.float32) - known * erase[:, None]
    inverse = load_lower(x.solve + chunk * C.PITCH, part.local, C.L, C.KIND, C.STATE_TERMS)
    right = split(known, C.STATE_TERMS, C.KIND)
    entry = product(inverse, right, C.STATE_TERMS, C.STATE_TERMS, C.PRECISION, known)
    FINER: tl.constexpr = to.y is not None and C.READ_TERMS > C.ROW_TERMS
    ALONE: tl.constexpr = C.STATE_TERMS == 1 and (to.states is not None or not C.DECAY)
    written = split(entry, C.READ_TERMS if FINER else C.ROW_TERMS, C.KIND, ALONE)
    if to.states is not None:
        store_entries(to.entries, part.row, kept + chunk, written, rows, part, sizes, C.ROW_TERMS, C)
    return entry, written


@triton.jit
def _read(
    state, seen, written, rows_k, rows_of_k, rows, write, early, pairs, chunk, x, normal, part, sizes, C: tl.constexpr
):  # fmt: skip
    """y of a chunk [L, BP]: its queries' reads of the first state and of its rows. pairs: scores loaded before."""
    rows_q = load_wide(x.q, rows_of_k, part, sizes, C)
    if C.KEY_TERMS == 2 and C.DELTA:
        tl.static_assert(C.AHEAD and C.KEYWISE)
        weights, scores = pairs, pairs[0]
    elif C.SCORED:
        weights = load_scores(x, rows, chunk, part, sizes, C.SCORE_TERMS, C)
        scores = weights[0]
    else:
        scores = tl.dot(rows_q, tl.trans(rows_k), input_precision=C.PRECISION)
    out = product((rows_q, rows_q), seen, 1, C.STATE_TERMS, C.PRECISION)
    if C.KEY_TERMS == 2 and not C.DELTA:
        out += tl.dot(rows_q, (state - seen[0].to(tl.float32)).to(C.KIND), input_precision=C.PRECISION)
    den = out
    if normal.weights is not None:
        den = tl.sum(rows_q.to(tl.float32) * early.weight[None, :], axis=1)
        if C.DECAY:
            den *= read_scale(x.scalars, sizes.plane, rows, C.DECAY, C.READ_SCALED, C.DELTA)
    if C.DECAY:
        out *= read_scale(x.scalars, sizes.plane, rows, C.DECAY, C.READ_SCALED, C.DELTA)[:, None]
    if C.DECAY and not C.SCORED:
        scores *= between(x.scalars, sizes.plane, rows, part.causal, False, C.FINE, C.SCALED == 2)
        if C.READ_SCALED:
            scores *= tl.load(x.scalars + READ * sizes.plane + rows)[:, None]
    elif not C.SCORED:
        scores = tl.where(part.causal, scores, 0.0)
    if C.SCALED and not C.DELTA and C.SCALED != 2:
        scores *= strength_seen(x.scalars, sizes.plane, rows, part.local, False, C)
    if normal.weights is not None:
        den = _read_normal(den, scores, early, rows, x, normal, part, sizes, C)
    if not (C.SCORED and C.DELTA):
        weights = split(scores, C.SCORE_TERMS, C.KIND)
    out = product(weights, written, C.SCORE_TERMS, C.READ_TERMS, C.PRECISION, out)
    if C.READ_SCALED and not C.DECAY:
        out *= tl.load(x.scalars + READ * sizes.plane + rows)[:, None]
    if C.FINISH is not None:
        out = C.FINISH(early.found, out, den[:, None] if normal.weights is not None else out, write)
    return out


@triton.jit
def _read_normal(den, scores, early, rows, x, normal, part, sizes, C: tl.constexpr):
    """The normaliser's readout of a chunk [L], with the same rounded weights as the values; stores it."""
    if C.SCORE_TERMS == 1:
        scores = scores.to(C.KIND).to(tl.float32)
    if normal.ones is not None:
        scores *= early.drive[None, :]
    den += tl.sum(scores, axis=1)
    if C.READ_SCALED and not C.DECAY:
        den *= tl.load(x.scalars + READ * sizes.plane + rows)
    inside = (rows < part.end) & (part.piece == 0)
    tl.store(normal.weights + part.lane * sizes.tokens + rows, den, mask=inside)
    return den


@triton.jit
def _onward(state, decayed, entry, written, rows_k, rows_of_k, rows, chunk, x, to, part, sizes, C: tl.constexpr):
    """The state after a chunk and, where wanted, the product of decays by key."""
    if C.DELTA:
        if C.DECAY:
            scale = written_scale(x.scalars, sizes.plane, rows, C.DECAY, False)
            written = split(entry * scale[:, None], C.WRITE_TERMS, C.KIND)
    elif C.DECAY or C.SCALED:
        scale = written_scale(x.scalars, sizes.plane, rows, C.DECAY, C.SCALED)
        exact = entry.to(tl.float32) * scale[:, None]
        first = first_term(exact, C.WRITE_TERMS)
        entry = first.to(C.KIND)
    if C.DECAY:
        state *= total_of(x.scalars, sizes.plane, chunk * C.L + part.shift)
    if C.KEYWISE:
        total = tl.exp2(last_running(x.running, part.lane, sizes.length, chunk, part.keys, C.N, C.L))
        state *= total[:, None]
        if to.passed is not None:
            decayed *= total
    rows_k = tl.trans(rows_k)
    if C.DELTA:
        state = product((rows_k, rows_k), written, 1, C.WRITE_TERMS, C.PRECISION, state)
    else:
        state += tl.dot(rows_k, entry, input_precision=C.PRECISION)
        if C.KEY_TERMS == 2:
            rest = tl.trans(load_wide(x.rest, rows_of_k, part, sizes, C))
            state += tl.dot(rest, entry, input_precision=C.PRECISION)
        if C.WRITE_TERMS == 2:
            state += tl.dot(rows_k, (exact - first).to(C.KIND), input_precision=C.PRECISION)
    return state, decayed


@triton.jit
def _store_y(to, rows, end, y, part, sizes, C: tl.constexpr):
    """Store rows of y and, where wanted, their rounding errors."""
    at = part.row * C.P
    store_rows(to.y + at, sizes.heads * C.P, rows, end, part.columns, C.P, C.BP, y)
    if to.more is not None:
        rest = rest_of(y, to.y.dtype.element_ty)
        store_rows(to.more + at, sizes.heads * C.P, rows, end, part.columns, C.P, C.BP, rest)


@triton.jit
def _store_ends(state, decayed, carries, to, table, segment, segments, part, C: tl.constexpr):
    """Store a segment's last state, and what it multiplies its first state by."""
    at = segment * tl.num_programs(1) + part.lane
    if to.passed is not None:
        if C.DELTA:
            if carries:
                square = (part.keys[:, None] < C.N) & (part.columns[None, :] < C.N)
                place = part.keys[:, None] * C.N + part.columns[None, :]
                tl.store(to.passed + at * C.N * C.N + place, state, mask=square)
            else:
                tl.store(to.final + at * C.N * C.P + part.place, state, mask=part.inside)
        else:
            tl.store(to.final + at * C.N * C.P + part.place, state, mask=part.inside)
            if part.piece == 0:
                tl.store(to.passed + at * C.N + part.keys, decayed, mask=part.keys < C.N)
    elif to.final is not None:
        inside = part.inside
        if table is None:  # there is only one sequence
            inside &= segment == segments - 1
            at = part.lane
        tl.store(to.final + at * C.N * C.P + part.place, state, mask=inside)
