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


class Here(NamedTuple):
    """A program's part: a slice (piece) of the pairs of a head in a chunk (slot).

    lane: batch and head; rows [K]: the chunk's tokens; begin: the first of them; end: of their sequence, whose number
    and first chunk are `sequence` and `first`; there [K, 1]: which rows are before the end; pairs [W] and places [2 W]:
    the numbers of the slice's pairs and of their places; flat: the index in [B, T, H] of token 0.
    """

    piece: Any
    slot: Any
    lane: Any
    batch: Any
    head: Any
    rows: Any
    begin: Any
    end: Any
    sequence: Any
    first: Any
    there: Any
    pairs: Any
    places: Any
    flat: Any


@dataclass(frozen=True, repr=False)
class Turn(Config):
    """PAIRS of a vector, of which a program has W, in SLICES; K tokens a chunk.

    FINE: sums within a chunk are in float64, too. COUNT vectors, of which those in the bits of DELAYED are stored at
    the token after their own, and to those in the bits of BIASED a vector of each head is added first. DOT: the dot
    product of the first vector and the one with this number is stored, 0: none. STARTED: sequences begin with a state.
    ROWS of consecutive vectors lie side by side: theirs are [B, T, ROWS, H, 2 PAIRS].
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
    ROWS: int


@triton.jit
def _here(of, C: tl.constexpr):
    """The part of a program. Neighbours take slices and heads of the same tokens, which are neighbours in memory."""
    place = tl.program_id(0)
    piece, place = place % C.SLICES, place // C.SLICES
    head, place = (place % of.heads).to(tl.int64), place // of.heads
    slot, batch = place % of.slots, (place // of.slots).to(tl.int64)
    begin, end = place_of_chunk(of.table, slot, of.tokens, C.K)
    if of.table is None:
        sequence, first = batch, slot * 0
    else:
        sequence, first = sequence_of_chunk(of.table, slot)
        sequence = sequence.to(tl.int64)
    rows = begin + tl.arange(0, C.K)
    pairs, places = piece * C.W + tl.arange(0, C.W), 2 * (piece * C.W) + tl.arange(0, 2 * C.W)
    return Here(
        piece, slot, batch * of.heads + head, batch, head, rows, begin, end, sequence, first, (rows < end)[:, None],
        pairs, places, batch * of.tokens * of.heads + head,
    )  # fmt: skip


@triton.jit
def _factors(of, here, C: tl.constexpr):
    """The factors of a chunk's angles: [K, 1] or 1, and [K, W] or 1; one of them 0 where there are no angles."""
    scale, pair = 1.0, 1.0
    row = here.rows.to(tl.int64)[:, None]
    if of.scale is not None:
        at = of.scale + here.batch * of.scale_batch + here.head // of.scale_group * of.scale_head
        scale = tl.load(at + row * of.scale_token, mask=here.there, other=0.0)
    if of.at is not None:
        at = of.at + here.batch * of.batch + here.head // of.group * of.head + row * of.token + here.pairs[None, :]
        pair = tl.load(at, mask=here.there & (here.pairs < C.PAIRS)[None, :], other=0.0)
    return scale, pair


@triton.jit
def _angles(of, here, C: tl.constexpr):
    """The angles of a chunk [K, W], 0 where there are none."""
    scale, pair = _factors(of, here, C)
    return scale * pair + tl.zeros([C.K, C.W], tl.float32)


@triton.jit
def _load(x, i: tl.constexpr, here, rows, there, C: tl.constexpr):
    """The slice's places of rows of vector i of a flat tuple, in float32: [.., 2 W] for rows [.., 1], or of one row."""
    at = x[FIELDS * i] + here.batch * x[FIELDS * i + 1] + here.head // x[FIELDS * i + 4] * x[FIELDS * i + 3]
    at += rows.to(tl.int64) * x[FIELDS * i + 2] + here.places
    return tl.load(at, mask=there & (here.places < 2 * C.PAIRS), other=0.0).to(tl.float32)


@triton.jit
def _pairs(x, i: tl.constexpr, here, rows, there, C: tl.constexpr):
    """Rows of vector i: the first and the second places of the slice's pairs, [K, W] each."""
    return tl.split(tl.reshape(_load(x, i, here, rows[:, None], there, C), [C.K, C.W, 2]))


@triton.jit
def _pair(x, i: tl.constexpr, here, row, there, C: tl.constexpr):
    """One row as `_pairs` loads them, [W] each."""
    return tl.split(tl.reshape(_load(x, i, here, row, there, C), [C.W, 2]))


@triton.jit
def _biased(x, i: tl.constexpr, biases, here, C: tl.constexpr):
    """The chunk's rows of vector i as `_pairs` loads them, plus the head's bias if it has one. biases: [H, 2 PAIRS]."""
    found = _load(x, i, here, here.rows[:, None], here.there, C)
    if (C.BIASED >> i) & 1:
        at = biases[i] + here.head * (2 * C.PAIRS) + here.places
        found += tl.load(at, mask=here.places < 2 * C.PAIRS, other=0.0).to(tl.float32)[None, :]
    return tl.split(tl.reshape(found, [C.K, C.W, 2]))


@triton.jit
def _store(to, heads, here, rows, there, low, high, ROWS: tl.constexpr, C: tl.constexpr):
    """Store pairs as rows of a contiguous tensor [B, T, H, 2 PAIRS], or as one of ROWS of [B, T, ROWS, H, 2 PAIRS]."""
    flat = here.flat + rows.to(tl.int64) * heads
    if ROWS > 1:
        flat = (flat - here.head) * ROWS + here.head
    at = to + flat[:, None] * (2 * C.PAIRS) + here.places[None, :]
    ok = there & (here.places < 2 * C.PAIRS)[None, :]
    tl.store(at, tl.interleave(low, high).to(to.dtype.element_ty), mask=ok)


@triton.jit
def sum_angles(angles, to, places, C: tl.constexpr):
    """The sum of each chunk's angles in float64, [B · H, chunks, PAIRS]."""
    here = _here(places, C)
    total = tl.sum(_angles(angles, here, C).to(tl.float64), axis=0)
    at = to + (here.lane * places.slots + here.slot) * C.PAIRS + here.pairs
    tl.store(at, total, mask=here.pairs < C.PAIRS)


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
    """cos and sin of float32 angles of up to some thousand turns, by one reduction and two polynomials.

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
def _ways(angles, carry, here, slots, C: tl.constexpr):
    """cos and sin of the sums of angles up to each of a chunk's tokens, [K, W]."""
    own = _angles(angles, here, C)
    there = (here.pairs < C.PAIRS) & (here.begin < here.end)  # nobody wrote the sums before empty chunks
    at = carry + (here.lane * slots + here.slot) * C.PAIRS + here.pairs
    before = tl.load(at, mask=there, other=0.0)[None, :]
    if C.FINE:
        total = before + tl.cumsum(own.to(tl.float64), axis=0)
        total = (total - TURN * tl.floor(total / TURN)).to(tl.float32)
    else:
        total = before + tl.cumsum(own, axis=0)
    return _cos_and_sin(total)


@triton.jit
def _place_of_first(heads, here, C: tl.constexpr):
    """Where `firsts` [B or sequences, H, 2 PAIRS] have what the sequence begins with, and whether it begins here."""
    begins = (here.slot == here.first) & (here.begin < here.end) & (here.places < 2 * C.PAIRS)
    return (here.sequence * heads + here.head) * (2 * C.PAIRS) + here.places, begins


@triton.jit
def turn_rows(angles, carry, xs, biases, firsts, outs, dots, places, C: tl.constexpr):
    """Store the turned vectors, contiguous [B, T, H, 2 PAIRS], and their dot products [slices of pairs, B, H, T].

    xs: the vectors. firsts: what those that are stored a token later have at first tokens, [B or sequences, H, ·].
    """
    here, heads = _here(places, C), places.heads
    cos, sin = _ways(angles, carry, here, places.slots, C)
    kept_a, kept_b = cos, sin
    for i in tl.static_range(C.COUNT):
        a, b = _biased(xs, i, biases, here, C)
        if C.DOT:
            if i == 0:
                kept_a, kept_b = a, b
            if i == C.DOT:
                at = dots + (here.piece * places.lanes + here.lane) * places.tokens + here.rows
                tl.store(at, tl.sum(kept_a * a + kept_b * b, axis=1), mask=here.rows < here.end)
        low, high = a * cos + b * sin, b * cos - a * sin
        if (C.DELAYED >> i) & 1:
            later = here.rows + 1
            _store(outs[i], heads, here, later, (later < here.end)[:, None], low, high, 1, C)
            at, begins = _place_of_first(heads, here, C)
            start = tl.zeros([2 * C.W], tl.float32)
            if C.STARTED:
                start = tl.load(firsts[i] + at, mask=begins)
            to = outs[i] + (here.flat + here.begin.to(tl.int64) * heads) * (2 * C.PAIRS) + here.places
            tl.store(to, start.to(outs[i].dtype.element_ty), mask=begins)
        else:
            _store(outs[i], heads, here, here.rows, here.there, low, high, C.ROWS, C)


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
    """
    here, heads = _here(places, C), places.heads
    cos, sin = _ways(angles, carry, here, places.slots, C)
    turning, entering = tl.zeros([C.K, C.W], tl.float32), tl.zeros([C.W], tl.float32)
    for i in tl.static_range(C.COUNT):
        rows, there, within = here.rows, here.there, here.there
        if (C.DELAYED >> i) & 1:
            rows = here.rows + 1
            there = (rows < here.end)[:, None]
            within = there & (rows < here.begin + C.K)[:, None]  # later ones are the border's
            x, y = _pair(outs, i, here, here.begin, here.begin < here.end, C)
            d_x, d_y = _pair(given, i, here, here.begin, here.begin < here.end, C)
            entering += d_x * y - d_y * x
        low, high = _pairs(outs, i, here, rows, there, C)
        d_low, d_high = _pairs(given, i, here, rows, there, C)
        turning += tl.where(within, d_low * high - d_high * low, 0.0)
        a, b = d_low * cos - d_high * sin, d_low * sin + d_high * cos
        if C.DOT and (i == 0 or i == C.DOT):
            at = d_dots + here.lane * places.tokens + here.rows
            slope = tl.load(at, mask=here.rows < here.end, other=0.0)[:, None]
            other_a, other_b = _biased(xs, C.DOT - i, biases, here, C)
            a += slope * tl.where(here.there, other_a, 0.0)
            b += slope * tl.where(here.there, other_b, 0.0)
        _store(dxs[i], heads, here, here.rows, here.there, a, b, 1, C)
        if (C.BIASED >> i) & 1:
            a, b = tl.where(here.there, a, 0.0), tl.where(here.there, b, 0.0)
            total = tl.interleave(tl.sum(a, axis=0), tl.sum(b, axis=0))
            into = d_biases[i] + (here.slot * places.lanes + here.lane) * (2 * C.PAIRS) + here.places
            tl.store(into, total, mask=here.places < 2 * C.PAIRS)
        if C.STARTED and (C.DELAYED >> i) & 1:
            at, begins = _place_of_first(heads, here, C)
            tl.store(d_firsts[i] + at, _load(given, i, here, here.begin, begins, C), mask=begins)
    slopes = _slopes_of_angles(turning, entering, border, d_final, here, places, C)
    scale, pair = _factors(angles, here, C)
    if d_scale is not None:
        to = d_scale + (here.piece * places.lanes + here.lane) * places.tokens + here.rows
        own = tl.where(here.pairs[None, :] < C.PAIRS, slopes * pair, 0.0)
        tl.store(to, tl.sum(own, axis=1), mask=here.rows < here.end)
    if d_pair is not None:
        to = d_pair + (here.flat + here.rows.to(tl.int64) * heads)[:, None] * C.PAIRS + here.pairs[None, :]
        tl.store(to, slopes * scale, mask=here.there & (here.pairs < C.PAIRS)[None, :])


@triton.jit
def _slopes_of_angles(turning, entering, border, d_final, here, places, C: tl.constexpr):
    """The gradients of a chunk's angles [K, W] from those of turning each token's vectors (turning).

    They are sums over all later tokens: those of the chunk, and the border behind it. With what the first row has of
    the token before (entering) these add up to the border before the chunk, but for rounding errors. What is missing is
    spread over the chunk evenly, which leaves a third of the variance of these errors.
    """
    inside, last = tl.sum(turning, axis=0), here.begin + C.K >= here.end
    at = border + (here.lane * places.slots + here.slot) * C.PAIRS + here.pairs
    after = tl.load(at, mask=(here.pairs < C.PAIRS) & ~last, other=0.0)
    if d_final is not None:
        of_end = d_final + (here.sequence * places.heads + here.head) * C.PAIRS + here.pairs
        after += tl.load(of_end, mask=(here.pairs < C.PAIRS) & last & (here.begin < here.end), other=0.0)
    if C.STARTED:
        known = here.slot > here.first
    else:  # turning a state of zeros changes nothing
        known = here.slot >= here.first
    before = tl.load(at - C.PAIRS, mask=(here.pairs < C.PAIRS) & (here.slot > here.first), other=0.0)
    error = tl.where(known, before - after - entering - inside, 0.0)
    count = tl.minimum(tl.maximum(here.end - here.begin, 1), C.K)
    later = (count - tl.arange(0, C.K)).to(tl.float32) / count
    return (after + inside)[None, :] - tl.cumsum(turning, axis=0) + turning + error[None, :] * later[:, None]
