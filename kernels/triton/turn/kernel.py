"""Vectors turned into the gauge where a recurrence's transitions do not turn (dsf.language.frame).

With Θ_t the sum of the angles of a sequence up to token t, pairs (a, b) of a vector become (a cos Θ + b sin Θ,
b cos Θ - a sin Θ). Sums run over chunks of K tokens: `sum_angles` adds up each chunk's angles, `carry_angles` those of
the chunks before, in float64 and modulo whole turns, and `turn_rows` adds the chunk's own.

The gradient of an angle is a sum over all later tokens of small differences, most of which cancel. `turn_rows_back`
adds up those of one chunk; the rest is the gradient of turning the state between two chunks
(dsf.kernels.triton.chunk.cross), so rounding errors do not add up over a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton.packed import chunks_of, place_of_chunk, sequence_of_chunk
from dsf.kernels.triton.structs import Config

FIELDS = tl.constexpr(5)  # of a tensor [B, T, H', ·] in a flat tuple, as those of Angles
TURN = tl.constexpr(6.283185307179586)
BLOCK = tl.constexpr(16)  # chunks that `carry_angles` adds up at once


class Angles(NamedTuple):
    """Angles scale · pair in float32, one of them None for 1: scale [B, T, H'], pair [B, T, H', PAIRS], each with its
    address, the strides of B, T and H', and how many heads share one of H'."""

    scale: Any
    scale_batch: Any
    scale_token: Any
    scale_head: Any
    scale_group: Any
    at: Any
    batch: Any
    token: Any
    head: Any
    group: Any


class Places(NamedTuple):
    """T; the chunks of a row; heads, a constant; B times as many; the table of packed sequences' chunks or None."""

    tokens: Any
    slots: Any
    heads: Any
    lanes: Any
    table: Any


@dataclass(frozen=True, repr=False)
class Turn(Config):
    """PAIRS of a vector, of which a program has W, in SLICES; K tokens a chunk.

    FINE: sums within a chunk are in float64, too. COUNT vectors, of which those in the bits of DELAYED are stored at
    the token after their own, and to those in the bits of BIASED a vector of each head is added first. DOT: the dot
    product of the first vector and the one with this number is stored, 0: none. STARTED: sequences begin with a state.
    """

    PAIRS: int
    W: int
    SLICES: int
    K: int
    FINE: bool
    COUNT: int
    DELAYED: int
    BIASED: int
    DOT: int
    STARTED: bool


@triton.jit
def _factors(of, batch, head, rows, j, there, C: tl.constexpr):
    """The factors of a chunk's angles: [K, 1] or 1, and [K, W] or 1; one of them 0 where there are no angles."""
    scale, pair = 1.0, 1.0
    ok = there & (j < C.PAIRS)[None, :]
    at = rows.to(tl.int64)[:, None]
    if of.scale is not None:
        at_scale = of.scale + batch * of.scale_batch + head // of.scale_group * of.scale_head + at * of.scale_token
        scale = tl.load(at_scale, mask=there, other=0.0)
    if of.at is not None:
        at_pair = of.at + batch * of.batch + head // of.group * of.head + at * of.token + j[None, :]
        pair = tl.load(at_pair, mask=ok, other=0.0)
    return scale, pair


@triton.jit
def _angles(of, batch, head, rows, j, there, C: tl.constexpr):
    """The angles of a chunk [K, W], 0 where there are none."""
    scale, pair = _factors(of, batch, head, rows, j, there, C)
    return scale * pair + tl.zeros([C.K, C.W], tl.float32)


@triton.jit
def _pairs(x, i: tl.constexpr, bias, batch, head, rows, first, there, BIASED: tl.constexpr, C: tl.constexpr):
    """Rows of vector i of a flat tuple, from pair `first` on: the first and the second places of pairs, [K, W] each, in
    float32. bias: of the vectors in the bits of BIASED, [H, ·]."""
    at = x[FIELDS * i] + batch * x[FIELDS * i + 1] + head // x[FIELDS * i + 4] * x[FIELDS * i + 3]
    j = 2 * first + tl.arange(0, 2 * C.W)
    at += rows.to(tl.int64)[:, None] * x[FIELDS * i + 2] + j[None, :]
    found = tl.load(at, mask=there & (j < 2 * C.PAIRS)[None, :], other=0.0).to(tl.float32)
    if (BIASED >> i) & 1:
        found += tl.load(bias[i] + head * (2 * C.PAIRS) + j, mask=j < 2 * C.PAIRS, other=0.0).to(tl.float32)[None, :]
    return tl.split(tl.reshape(found, [C.K, C.W, 2]))


@triton.jit
def _pair(x, i: tl.constexpr, batch, head, row, first, there, C: tl.constexpr):
    """One row as `_pairs` loads them, [W] each."""
    at = x[FIELDS * i] + batch * x[FIELDS * i + 1] + head // x[FIELDS * i + 4] * x[FIELDS * i + 3]
    j = 2 * first + tl.arange(0, 2 * C.W)
    at += row.to(tl.int64) * x[FIELDS * i + 2] + j
    found = tl.load(at, mask=there & (j < 2 * C.PAIRS), other=0.0).to(tl.float32)
    return tl.split(tl.reshape(found, [C.W, 2]))


@triton.jit
def _store(to, heads, flat, rows, first, there, low, high, C: tl.constexpr):
    """Store pairs as rows of a contiguous tensor [B, T, H, 2 PAIRS]; flat: index in [B, T, H] of its row 0."""
    j = 2 * first + tl.arange(0, 2 * C.W)
    at = to + (flat + rows.to(tl.int64) * heads)[:, None] * (2 * C.PAIRS) + j[None, :]
    tl.store(at, tl.interleave(low, high).to(to.dtype.element_ty), mask=there & (j < 2 * C.PAIRS)[None, :])


@triton.jit
def _chunk(places, C: tl.constexpr):
    """A program's (slice of pairs, chunk, lane, batch, head, rows [K], first token, end of its sequence).

    Neighbours have the slices and heads of the same tokens, whose numbers are neighbours in memory.
    """
    place = tl.program_id(0)
    piece, place = place % C.SLICES, place // C.SLICES
    head, place = (place % places.heads).to(tl.int64), place // places.heads
    slot, batch = place % places.slots, (place // places.slots).to(tl.int64)
    begin, end = place_of_chunk(places.table, slot, places.tokens, C.K)
    return piece, slot, batch * places.heads + head, batch, head, begin + tl.arange(0, C.K), begin, end


@triton.jit
def _sequence(table, slot, batch):
    """The number of a chunk's sequence, and the first chunk of that."""
    if table is None:
        sequence, first = batch, slot * 0
    else:
        sequence, first = sequence_of_chunk(table, slot)
        sequence = sequence.to(tl.int64)
    return sequence, first


@triton.jit
def sum_angles(angles, to, places, C: tl.constexpr):
    """The sum of each chunk's angles in float64, [B · H, chunks, PAIRS]."""
    piece, slot, lane, batch, head, rows, begin, end = _chunk(places, C)
    j = piece * C.W + tl.arange(0, C.W)
    total = tl.sum(_angles(angles, batch, head, rows, j, (rows < end)[:, None], C).to(tl.float64), axis=0)
    tl.store(to + (lane * places.slots + slot) * C.PAIRS + j, total, mask=j < C.PAIRS)


@triton.jit
def carry_angles(sums, to, final, table, slots, C: tl.constexpr):
    """The sum of the angles before each chunk, in place of sums' [B · H, chunks, PAIRS], and of each sequence, both
    modulo whole turns and in float32. final: [B or sequences, H, PAIRS], by lane and sequence."""
    lane, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, stop = chunks_of(table, sequence, slots)
    i, j = tl.arange(0, BLOCK)[:, None], (tl.program_id(2) * C.W + tl.arange(0, C.W))[None, :]
    total = tl.zeros([1, C.W], tl.float64)
    for slot in range(first, stop, BLOCK):
        at = (lane * slots + slot + i) * C.PAIRS + j
        there = (slot + i < stop) & (j < C.PAIRS)
        own = tl.load(sums + at, mask=there, other=0.0)
        before = total + tl.cumsum(own, axis=0) - own
        tl.store(to + at, (before - TURN * tl.floor(before / TURN)).to(tl.float32), mask=there)
        total += tl.sum(own, axis=0, keep_dims=True)
        total -= TURN * tl.floor(total / TURN)
    at = final + (sequence * tl.num_programs(0) + lane) * C.PAIRS + j
    tl.store(at, total.to(tl.float32), mask=j < C.PAIRS)


@triton.jit
def _cos_and_sin(x):
    """cos and sin of float32 angles of up to some thousand turns, together at a third of the cost of tl.cos and tl.sin.

    x = k π/2 + r with |r| ≤ π/4, for which Taylor's polynomials err by less than rounding does; π/2 in three parts, of
    which the first has so few digits that its products are exact.
    """
    k = tl.floor(x * 0.6366197723675814 + 0.5)
    r = ((x - k * 1.5703125) - k * 4.837512969970703e-4) - k * 7.549789954891782e-8
    y = r * r
    sin = r + r * y * (-1.6666667e-1 + y * (8.333333e-3 + y * (-1.9841270e-4 + y * 2.7557319e-6)))
    cos = 1.0 + y * (-0.5 + y * (4.1666668e-2 + y * (-1.3888889e-3 + y * (2.4801587e-5 - y * 2.7557319e-7))))
    quarter = k.to(tl.int32)
    first, second = tl.where(quarter & 1 == 1, sin, cos), tl.where(quarter & 1 == 1, cos, sin)
    return tl.where((quarter + 1) & 2 == 2, -first, first), tl.where(quarter & 2 == 2, -second, second)


@triton.jit
def _ways(own, carry, lane, slot, begin, end, j, places, C: tl.constexpr):
    """cos and sin of the sums of angles up to each of a chunk's tokens, whose own are [K, W]."""
    there = (j < C.PAIRS) & (begin < end)  # nobody wrote those of empty chunks
    before = tl.load(carry + (lane * places.slots + slot) * C.PAIRS + j, mask=there, other=0.0)
    if C.FINE:
        total = before[None, :] + tl.cumsum(own.to(tl.float64), axis=0)
        total = (total - TURN * tl.floor(total / TURN)).to(tl.float32)
    else:
        total = before[None, :] + tl.cumsum(own, axis=0)
    return _cos_and_sin(total)


@triton.jit
def turn_rows(angles, carry, xs, biases, firsts, outs, dots, places, C: tl.constexpr):
    """Store the turned vectors, contiguous [B, T, H, 2 PAIRS], and their dot products [slices of pairs, B, H, T].

    xs: the vectors. firsts: what those that are stored a token later have at first tokens, [B or sequences, H, ·].
    """
    piece, slot, lane, batch, head, rows, begin, end = _chunk(places, C)
    sequence, first_slot = _sequence(places.table, slot, batch)
    there, first = (rows < end)[:, None], piece * C.W
    j, both = first + tl.arange(0, C.W), 2 * first + tl.arange(0, 2 * C.W)
    own = _angles(angles, batch, head, rows, j, there, C)
    cos, sin = _ways(own, carry, lane, slot, begin, end, j, places, C)
    flat = batch * places.tokens * places.heads + head
    kept_a, kept_b = cos, sin
    for i in tl.static_range(C.COUNT):
        a, b = _pairs(xs, i, biases, batch, head, rows, first, there, C.BIASED, C)
        if C.DOT:
            if i == 0:
                kept_a, kept_b = a, b
            if i == C.DOT:
                at = dots + (piece * places.lanes + lane) * places.tokens + rows
                tl.store(at, tl.sum(kept_a * a + kept_b * b, axis=1), mask=rows < end)
        low, high = a * cos + b * sin, b * cos - a * sin
        if (C.DELAYED >> i) & 1:
            _store(outs[i], places.heads, flat, rows + 1, first, (rows + 1 < end)[:, None], low, high, C)
            begins = (slot == first_slot) & (begin < end) & (both < 2 * C.PAIRS)
            start = tl.zeros([2 * C.W], tl.float32)
            if C.STARTED:
                start = tl.load(firsts[i] + (sequence * places.heads + head) * (2 * C.PAIRS) + both, mask=begins)
            at = outs[i] + (flat + begin.to(tl.int64) * places.heads) * (2 * C.PAIRS) + both
            tl.store(at, start.to(outs[i].dtype.element_ty), mask=begins)
        else:
            _store(outs[i], places.heads, flat, rows, first, there, low, high, C)


@triton.jit
def _first_back(given, to, i: tl.constexpr, batch, head, sequence, both, is_first, begin, end, places, C: tl.constexpr):
    """Store the gradient of vector i's `firsts` in a sequence's first chunk."""
    ok = is_first & (begin < end) & (both < 2 * C.PAIRS)
    at = given[FIELDS * i] + batch * given[FIELDS * i + 1] + head // given[FIELDS * i + 4] * given[FIELDS * i + 3]
    start = tl.load(at + begin.to(tl.int64) * given[FIELDS * i + 2] + both, mask=ok, other=0.0)
    tl.store(to[i] + (sequence * places.heads + head) * (2 * C.PAIRS) + both, start.to(tl.float32), mask=ok)


@triton.jit
def turn_rows_back(
    angles, carry, xs, biases, outs, given, border, d_final, d_dots, dxs, d_biases, d_firsts, d_scale, d_pair, places,
    C: tl.constexpr,
):  # fmt: skip
    """Gradients of the vectors, contiguous [B, T, H, 2 PAIRS], of `firsts`, and of the factors of angles: of scales
    [slices of pairs, B, H, T] and of pairs [B, T, H, PAIRS]. d_biases: [chunks, B · H, 2 PAIRS], to be summed.

    outs: the turned vectors; given: their gradients; border: of turning the state behind each chunk but a sequence's
    last, [B · H, chunks, PAIRS]; d_final: of the sums over sequences, [B or sequences, H, PAIRS], or None; d_dots:
    [B, H, T].

    A chunk's slopes and the border behind it add up to the border before it, but for rounding errors. What is missing
    is spread over the chunk evenly, which leaves a third of the variance of these errors.
    """
    piece, slot, lane, batch, head, rows, begin, end = _chunk(places, C)
    sequence, first_slot = _sequence(places.table, slot, batch)
    there, first = (rows < end)[:, None], piece * C.W
    j, both = first + tl.arange(0, C.W), 2 * first + tl.arange(0, 2 * C.W)
    own = _angles(angles, batch, head, rows, j, there, C)
    cos, sin = _ways(own, carry, lane, slot, begin, end, j, places, C)
    flat = batch * places.tokens * places.heads + head
    turning, entering = tl.zeros([C.K, C.W], tl.float32), tl.zeros([C.W], tl.float32)
    for i in tl.static_range(C.COUNT):
        at, here, within = rows, there, there
        if (C.DELAYED >> i) & 1:
            at = rows + 1
            here = (at < end)[:, None]
            within = here & (at < begin + C.K)[:, None]  # later ones are the border's
            x, y = _pair(outs, i, batch, head, begin, first, begin < end, C)
            d_x, d_y = _pair(given, i, batch, head, begin, first, begin < end, C)
            entering += d_x * y - d_y * x
        low, high = _pairs(outs, i, biases, batch, head, at, first, here, 0, C)
        d_low, d_high = _pairs(given, i, biases, batch, head, at, first, here, 0, C)
        turning += tl.where(within, d_low * high - d_high * low, 0.0)
        a, b = d_low * cos - d_high * sin, d_low * sin + d_high * cos
        if C.DOT and (i == 0 or i == C.DOT):
            slope = tl.load(d_dots + lane * places.tokens + rows, mask=rows < end, other=0.0)[:, None]
            other_a, other_b = _pairs(xs, C.DOT - i, biases, batch, head, rows, first, there, C.BIASED, C)
            a += slope * tl.where(there, other_a, 0.0)
            b += slope * tl.where(there, other_b, 0.0)
        _store(dxs[i], places.heads, flat, rows, first, there, a, b, C)
        if (C.BIASED >> i) & 1:
            a, b = tl.where(there, a, 0.0), tl.where(there, b, 0.0)
            total = tl.interleave(tl.sum(a, axis=0), tl.sum(b, axis=0))
            into = d_biases[i] + (slot * places.lanes + lane) * (2 * C.PAIRS) + both
            tl.store(into, total, mask=both < 2 * C.PAIRS)
        if C.STARTED and (C.DELAYED >> i) & 1:
            _first_back(given, d_firsts, i, batch, head, sequence, both, slot == first_slot, begin, end, places, C)
    last = begin + C.K >= end
    inside = tl.sum(turning, axis=0)
    after = tl.load(border + (lane * places.slots + slot) * C.PAIRS + j, mask=(j < C.PAIRS) & ~last, other=0.0)
    if d_final is not None:
        of_end = d_final + (sequence * places.heads + head) * C.PAIRS + j
        after += tl.load(of_end, mask=(j < C.PAIRS) & last & (begin < end), other=0.0)
    if C.STARTED:
        known = slot > first_slot
    else:  # turning a state of zeros changes nothing
        known = slot >= first_slot
    of_before = border + (lane * places.slots + slot - 1) * C.PAIRS + j
    before = tl.load(of_before, mask=(j < C.PAIRS) & (slot > first_slot), other=0.0)
    error = tl.where(known, before - after - entering - inside, 0.0)
    count = tl.minimum(tl.maximum(end - begin, 1), C.K)
    later = (count - tl.arange(0, C.K)).to(tl.float32) / count
    total = (after + inside)[None, :] - tl.cumsum(turning, axis=0) + turning + error[None, :] * later[:, None]
    scale, pair = _factors(angles, batch, head, rows, j, there, C)
    if d_scale is not None:
        to = d_scale + (piece * places.lanes + lane) * places.tokens + rows
        tl.store(to, tl.sum(tl.where(j[None, :] < C.PAIRS, total * pair, 0.0), axis=1), mask=rows < end)
    if d_pair is not None:
        to = d_pair + (flat + rows.to(tl.int64) * places.heads)[:, None] * C.PAIRS + j[None, :]
        tl.store(to, total * scale, mask=there & (j < C.PAIRS)[None, :])
