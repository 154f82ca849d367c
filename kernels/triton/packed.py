"""Packed sequences: tables of their chunks, computed on the GPU from their boundaries.

Every sequence begins with a new chunk, so there are at most ⌊T / L⌋ + S chunks. That many *slots* exist, a number that
the host knows without reading the boundaries; unused slots are empty, as sequences may be. Data of chunks are stored by
slot. Tables give the tokens of each slot; kernels take None for them without packing.
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
    """int32 tables. chunks [slots, 4]: first token; end of its sequence; number of the sequence; its first slot.

    segments, which are walked in parallel [·, 5]: first slot; the slot after the last; row number in slots minus row
    number in tokens; end of the sequence; 1 where the segment is the whole sequence. sequences [S, 4]: first slot; the
    slot after the last; first segment; the segment after the last.
    """

    chunks: Tensor
    segments: Tensor
    sequences: Tensor


def slots(tokens: int, count: int, chunk: int) -> int:
    """The most chunks that `count` sequences with `tokens` tokens in all can have."""
    return tokens // chunk + count


@dataclass(frozen=True)
class Sequences:
    """Packed sequences with boundaries bounds [S + 1], integers on the GPU, and `micro` rows a token."""

    bounds: Tensor
    micro: int = 1

    @property
    def count(self) -> int:
        """S, the number of sequences."""
        return self.bounds.shape[0] - 1

    def tables(self, rows: int, chunk: int, span: int | None = None) -> Tables:
        """The Tables for `rows` rows, chunks of `chunk` rows and segments of `span` chunks (None: whole sequences)."""
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
    """Two consecutive numbers at an address."""
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
    """The chunk whose stored data a program reads: `chunk`, or `instead` for empty slots."""
    found = chunk
    if table is not None:
        found = tl.where(begin < end, chunk, instead)
    return found


@triton.jit
def sequence_of_chunk(table, chunk):
    """(number of the chunk's sequence, first chunk of that)."""
    if table is None:
        sequence, first = chunk * 0, chunk * 0
    else:
        sequence, first = _pair(table + chunk * CHUNK_FIELDS + 2)
    return sequence, first


@triton.jit
def place_of_segment(table, segment, per_segment, tokens, SUMMARY: tl.constexpr):
    """(first chunk of a segment, the one after its last, row number in chunks minus row number in tokens, end of its
    sequence).

    SUMMARY: no chunks for segments whose effect on the state no other segment needs.
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
    """(first row, end, chunks, segments) of sequences, 0 where not `there`. Bounds are clamped to the row."""
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
    """Fill the tables, one program a sequence; the last one also fills the unused slots."""
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
