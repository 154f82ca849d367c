"""Packed sequences: where the chunks of each lie in one row of tokens, found on the GPU from their boundaries.

Every sequence begins a chunk of its own, so there are at most ⌊T / L⌋ + S of them: slots, whose number is known without
looking at the boundaries. What belongs to a chunk is kept by slot; its tokens are found in tables, which kernels take
in place of None. Slots that are left are empty, and sequences may be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels.triton.launch import launch

CHUNK_FIELDS = tl.constexpr(4)
SEGMENT_FIELDS = tl.constexpr(5)
SEQUENCE_FIELDS = tl.constexpr(4)


class Tables(NamedTuple):
    """int32. chunks [slots, 4]: first token, end of its sequence, the sequence, that one's first slot.

    segments, the pieces of sequences that are walked at once [·, 5]: first slot, the one after the last, how far tokens
    lie behind rows of slots, end of the sequence, 1 where the piece is all of it. sequences [S, 4]: first slot, the one
    after the last; first segment, the one after the last.
    """

    chunks: Tensor
    segments: Tensor
    sequences: Tensor


def slots(tokens: int, count: int, chunk: int) -> int:
    """How many chunks `count` sequences of `tokens` in all may have."""
    return tokens // chunk + count


@dataclass(frozen=True)
class Sequences:
    """Sequences of `micro` rows a token, between the tokens bounds [S + 1], integers on the GPU."""

    bounds: Tensor
    micro: int = 1

    @property
    def count(self) -> int:
        """S."""
        return self.bounds.shape[0] - 1

    def tables(self, rows: int, chunk: int, span: int | None = None) -> Tables:
        """Places of chunks, of segments of `span` chunks (None: all of a sequence) and of sequences in `rows` rows."""
        room = slots(rows, self.count, chunk)
        parts = self.count if span is None else room // span + self.count
        sizes = ((room, 4), (parts, 5), (self.count, 4))
        tables = [self.bounds.new_empty(size, dtype=torch.int32) for size in sizes]
        launch(
            place_sequences, (self.count,),
            self.bounds, *tables, self.count, rows, room, parts, self.micro, room if span is None else span,
            L=chunk, BLOCK=256, num_warps=4,
        )  # fmt: skip
        return Tables(*tables)


@triton.jit
def _pair(at):
    """Two numbers that follow each other."""
    return tl.load(at), tl.load(at + 1)


@triton.jit
def place_of_chunk(table, chunk, tokens, L: tl.constexpr):
    """The first token of a chunk, and the end of its sequence."""
    if table is None:
        begin, end = chunk * L, tokens
    else:
        begin, end = _pair(table + chunk * CHUNK_FIELDS)
    return begin, end


@triton.jit
def slot_to_read(table, chunk, begin, end, instead):
    """The chunk of which a program reads what was kept: `instead`, a filled one, for slots that are left."""
    found = chunk
    if table is not None:
        found = tl.where(begin < end, chunk, instead)
    return found


@triton.jit
def sequence_of_chunk(table, chunk):
    """A chunk's sequence, and that one's first chunk."""
    if table is None:
        sequence, first = chunk * 0, chunk * 0
    else:
        sequence, first = _pair(table + chunk * CHUNK_FIELDS + 2)
    return sequence, first


@triton.jit
def place_of_segment(table, segment, per_segment, tokens, SUMMARY: tl.constexpr):
    """A segment's first chunk, the one after its last, how far tokens lie behind rows of chunks, its sequence's end.

    SUMMARY: no chunks where what the segment does to its first state is of no use to another.
    """
    if table is None:
        first, stop, shift, end = segment * per_segment, (segment + 1) * per_segment, 0, tokens
    else:
        first, stop = _pair(table + segment * SEGMENT_FIELDS)
        shift, end = _pair(table + segment * SEGMENT_FIELDS + 2)
        if SUMMARY:
            stop = tl.where(tl.load(table + segment * SEGMENT_FIELDS + 4) == 1, first, stop)
    return first, stop, shift, end


@triton.jit
def chunks_of(table, sequence, chunks):
    """The first chunk of a sequence, and the one after its last."""
    if table is None:
        first, stop = sequence * 0, chunks
    else:
        first, stop = _pair(table + sequence * SEQUENCE_FIELDS)
    return first, stop


@triton.jit
def segments_of(table, sequence, segments):
    """The first segment of a sequence, and the one after its last."""
    if table is None:
        first, stop = sequence * 0, segments
    else:
        first, stop = _pair(table + sequence * SEQUENCE_FIELDS + 2)
    return first, stop


@triton.jit
def _counts(bounds, sequence, there, tokens, micro, span, L: tl.constexpr):
    """First row, end, chunks and segments of sequences; none where not `there`. Bounds beyond the row are its ends."""
    begin = tl.load(bounds + sequence, mask=there, other=0).to(tl.int32) * micro
    end = tl.load(bounds + sequence + 1, mask=there, other=0).to(tl.int32) * micro
    begin = tl.minimum(tl.maximum(begin, 0), tokens)
    end = tl.minimum(tl.maximum(end, begin), tokens)
    chunks = tl.cdiv(end - begin, L)
    return begin, end, chunks, tl.where(there, tl.maximum(tl.cdiv(chunks, span), 1), 0)


@triton.jit(do_not_specialize=["count", "tokens", "room", "parts", "micro", "span"])
def place_sequences(
    bounds, chunks, segments, sequences, count, tokens, room, parts, micro, span, L: tl.constexpr, BLOCK: tl.constexpr
):
    """Fill the tables, one program a sequence; the last also the slots that are left. Nothing is written outside."""
    me = tl.program_id(0)
    first, part = me * 0, me * 0
    for low in range(0, me, BLOCK):
        sequence = low + tl.arange(0, BLOCK)
        _, _, more, pieces = _counts(bounds, sequence, sequence < me, tokens, micro, span, L)
        first += tl.sum(more, axis=0)
        part += tl.sum(pieces, axis=0)
    begin, end, own, pieces = _counts(bounds, me, me < count, tokens, micro, span, L)
    first, part = tl.minimum(first, room), tl.minimum(part, parts)
    stop, last = tl.minimum(first + own, room), tl.minimum(part + pieces, parts)
    sequences += me * SEQUENCE_FIELDS
    tl.store(sequences, first)
    tl.store(sequences + 1, stop)
    tl.store(sequences + 2, part)
    tl.store(sequences + 3, last)
    final = me == count - 1
    for low in range(first, tl.where(final, room, stop), BLOCK):
        slot = low + tl.arange(0, BLOCK)
        mine = slot < stop
        at, there = chunks + slot * CHUNK_FIELDS, mine | (final & (slot < room))
        tl.store(at, tl.where(mine, begin + (slot - first) * L, 0), mask=there)
        tl.store(at + 1, tl.where(mine, end, 0), mask=there)
        tl.store(at + 2, tl.where(mine, me, 0), mask=there)
        tl.store(at + 3, tl.where(mine, first, slot), mask=there)
    for low in range(part, tl.where(final, parts, last), BLOCK):
        piece = low + tl.arange(0, BLOCK)
        mine = piece < last
        at, there = segments + piece * SEGMENT_FIELDS, mine | (final & (piece < parts))
        here = first + (piece - part) * span
        tl.store(at, tl.where(mine, here, 0), mask=there)
        tl.store(at + 1, tl.where(mine, tl.minimum(here + span, stop), 0), mask=there)
        tl.store(at + 2, begin - first * L + piece * 0, mask=there)
        tl.store(at + 3, tl.where(mine, end, 0), mask=there)
        tl.store(at + 4, tl.where(pieces == 1, 1, 0) + piece * 0, mask=there)
