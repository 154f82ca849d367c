"""The two walks over the chunks of a sequence: forwards with states and outputs, backwards with adjoint states.

A program has one slice of P of one sequence and head, in one segment of T. It keeps its state [N, slice] in registers
and walks those chunks of L rows of its segment that lie from `base` up to `limit`. A chunk's rows write Σ k_j e_jᵀ into
the state. In decay systems the entry e_j is s_j v_j. With the delta rule the entries of a chunk solve

    (I + b ⊙ strict(K Kᵀ ⊙ M)) e = s ⊙ v - b ⊙ prefix ⊙ K S_0.

The transform made the inverse of this matrix, I + `solve`. Because the identity is left out of the product, a row's
own right side goes into e unrounded.

SCORED: the scores q_i·k_j M_ij of a chunk (times the read scale, with scalar decays) were computed before.
KEYWISE: q, k and `erased` are queries and erased keys decayed from their chunk's start, and written keys decayed to its
end. `rest` has the second terms of scores (DELTA) or of the rows that are written into states.
AHEAD: a chunk's values are loaded into registers one chunk early. So are the forward walk's scores, whose second terms
leave shared memory no room for three stages, and the reverse walk's scores and given gradients.
NORMAL: also what queries read of a normaliser, of its state before the chunk (normaliser.py) and of the chunk's rows.
SUMMARY: what a segment does to states, so that all segments can be walked at once: what it adds to a state of zero, and
the product of its decays for each key or, with DELTA, its transition [N, N]: programs beyond P's slices walk with the
identity as their first state.
WHOLE: no chunk ends behind the last token, so that rows need no masks.
Rows that heads share are not copied: a head's index is divided by how many share one.

Numbers of bfloat16 terms (precision.py). TERMS: of scaled rows as they are written into states. ROW_TERMS: of a delta
rule's entries, and of scores in the reverse walk. STATE_TERMS: of a delta rule's states, right sides and inverse.
SCORE_TERMS, READ_TERMS: of scores and of entries where y reads them. KEY_TERMS: where KEYWISE, of scores (DELTA), or of
the rows that are written into states and of the states that y reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.tiles import Chunked, load_rows, load_terms, seen_by, store_terms
from dsf.kernels.triton.chunk.transform import load_lower
from dsf.kernels.triton.structs import alike, of_head


class Operands(NamedTuple):
    """What both walks take in addition to the rows q and k: erased rows (with k's strides), prepared scalars, G,
    scores, the rounding errors of scores or rows, and the inverses."""

    erased: Any
    scalars: Any
    running: Any
    scores: Any
    rest: Any
    solve: Any


class Lane(NamedTuple):
    """Rows and Operands of one head."""

    q: Any
    k: Any
    erased: Any
    rest: Any
    scalars: Any
    running: Any
    scores: Any
    solve: Any


class Part(NamedTuple):
    """A program's part of the work: its slice of P, and its index among all slices of all heads; the number of its
    first row in [B, T, H], how far its rows lie behind rows of chunks, and their end; the keys, channels and rows of
    a chunk; which rows (down, or backwards across) read which; the places of entries in a state, and which of them
    exist."""

    piece: Any
    lane: Any
    row: Any
    shift: Any
    end: Any
    keys: Any
    columns: Any
    local: Any
    causal: Any
    place: Any
    inside: Any


@dataclass(frozen=True, repr=False)
class Walk(Chunked):
    """What both walks are compiled for, with BP channels a program; the head of this file explains the words."""

    BP: int
    SCORED: bool
    PITCH: int
    START: int
    TERMS: int
    ROW_TERMS: int
    STATE_TERMS: int
    KEY_TERMS: int
    STAGES: int
    AHEAD: bool
    WHOLE: bool


@triton.jit
def part_of(piece, lane, shift, end, sizes, REVERSE: tl.constexpr, C: tl.constexpr):
    """The Part of a program."""
    row = lane // sizes.heads * sizes.tokens * sizes.heads + lane % sizes.heads
    keys, columns, local = tl.arange(0, C.BN), piece * C.BP + tl.arange(0, C.BP), tl.arange(0, C.L)
    causal = seen_by(local, REVERSE, C.TOGETHER)
    place = keys[:, None].to(tl.int64) * C.P + columns[None, :]
    inside = (keys[:, None] < C.N) & (columns[None, :] < C.P)
    return Part(piece, lane, row, shift, end, keys, columns, local, causal, place, inside)


@triton.jit
def of_lane(q, k, x, part, sizes, REVERSE: tl.constexpr, C: tl.constexpr):
    """The operands of a program's head; scalars are found by rows of tokens."""
    lane, chunks = part.lane, sizes.length // C.L
    batch, head = lane // sizes.heads, lane % sizes.heads
    rest = of_head(alike(x.rest, q if REVERSE else k), batch, head)
    return Lane(
        of_head(q, batch, head),
        of_head(k, batch, head),
        of_head(alike(x.erased, k), batch, head),
        alike(x.rest + part.row * C.L, rest) if C.DELTA else rest,
        x.scalars + lane * sizes.length - part.shift,
        x.running,
        x.scores + (part.row * C.L if C.KEYWISE else lane * chunks * C.PITCH),
        x.solve + lane * chunks * C.PITCH,
    )


@triton.jit
def load_wide(x, rows, part, sizes, C: tl.constexpr):
    """Rows of N keys that meet states, where those of KEYWISE ones lie by chunk."""
    if C.KEYWISE:
        return load_rows(x.at, x.token, rows, sizes.length, part.keys, C.N, C.BN, C.KIND)
    elif C.WHOLE:
        return load_rows(x.at, x.token, rows, None, part.keys, C.N, C.BN, C.KIND)
    else:
        return load_rows(x.at, x.token, rows, part.end, part.keys, C.N, C.BN, C.KIND)


@triton.jit
def load_pairs(x, rows, part, sizes, C: tl.constexpr):
    """Of KEYWISE ones the scores of a chunk's rows [L, L], or what rounding left of them."""
    return load_rows(x, sizes.heads * C.L, rows, part.end, part.local, C.L, C.L, C.KIND)


@triton.jit
def load_scores(x, rows, chunk, part, sizes, TERMS: tl.constexpr, C: tl.constexpr):
    """The scores of a chunk's rows [L, L] in TERMS terms, where SCORED."""
    if C.KEYWISE:
        return load_terms(x.scores, sizes.heads * C.L, rows, part.end, part.local, C.L, C.L, C.KIND, TERMS)
    else:
        return load_lower(x.scores + chunk * C.PITCH, part.local, C.L, C.KIND, TERMS)


@triton.jit
def store_entries(to, by_token, by_chunk, entries, rows, part, sizes, TERMS: tl.constexpr, C: tl.constexpr):
    """Store a chunk's entries, or their gradients, in TERMS terms: where KEYWISE in rows of T, the first of them
    number by_token, else in chunks, of which this is number by_chunk."""
    wide = C.P * TERMS
    if C.KEYWISE:
        at = to + by_token * wide
        store_terms(at, sizes.heads * wide, rows, part.end, part.columns, C.P, C.BP, entries, TERMS)
    else:
        at = to + by_chunk * C.L * wide
        store_terms(at, wide, part.local, None, part.columns, C.P, C.BP, entries, TERMS)


@triton.jit
def first_state(start, at, within, part, C: tl.constexpr):
    """A walk's first state [BN, BP]: that of `start` at `at`, or zeros; START -1: zeros unless `within`."""
    if start is None:
        return tl.zeros([C.BN, C.BP], tl.float32)
    elif C.START < 0:
        return tl.load(start + at + part.place, mask=part.inside & within, other=0.0)
    else:
        return tl.load(start + at + part.place, mask=part.inside, other=0.0)
