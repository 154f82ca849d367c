"""The reverse walk, of adjoint states, and both walks in one launch (dsf.kernels.triton.chunk.walk)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.forward_walk import forward_walk
from dsf.kernels.triton.chunk.keywise import last_running
from dsf.kernels.triton.chunk.scalars import (
    ERASE,
    PREFIX_ERASE,
    READ,
    SOURCE,
    read_scale,
    suffix_of,
    total_of,
    turned,
)
from dsf.kernels.triton.chunk.states import place_of_state, store_state
from dsf.kernels.triton.chunk.tiles import first_term, load_rows, product, split, store_rows, turn
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
from dsf.kernels.triton.packed import place_of_segment
from dsf.kernels.triton.structs import derived, of_head


class AdjointOutputs(NamedTuple):
    """Outputs of the reverse walk; None: not written. Of the walked chunks, the gradients of entries (v_new)
    [B, H, limit - base, L, P] (KEYWISE: [B, (limit - base) L, H, P]) and of last states [B, H, limit - base, N, P];
    also the gradient of the first state."""

    entries: Any
    states: Any
    final: Any


class Values(NamedTuple):
    """What a delta rule's walk may compute from the gradients of v_new before they are rounded: dv [B, T, H, P], and
    ds [slices, B, T, H] or None."""

    dv: Any = None
    ds: Any = None


@dataclass(frozen=True, repr=False)
class ReverseWalk(Walk):
    """ADJOINT_TERMS, KEPT_TERMS: bfloat16 terms of the gradient of v_new as it is written into adjoint states, and
    as it is kept."""

    ADJOINT_TERMS: int
    KEPT_TERMS: int

    @derived
    def GIVEN_TERMS(self) -> int:
        """Terms of dy as it is written into adjoint states."""
        return self.TERMS if self.READ_SCALED or self.DECAY else 1


@triton.jit(do_not_specialize=["segments", "per_segment", "base", "limit"])
def reverse_walk(
    q, k, operands, dy, start, to, v, values, table, sizes, segments, per_segment, base, limit, C: tl.constexpr
):  # fmt: skip
    """Walk from chunk `limit` down to `base`: gradients of last states and, with the delta rule, of entries (v_new).

    START -1: there is one segment, which begins with zeros where `limit` is the end. start and final may be the same.
    """
    piece, lane, segment = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, stop, shift, end = place_of_segment(table, segment, per_segment, sizes.tokens, to.states is None)
    if table is None:
        first, stop = first + base, tl.minimum(stop + base, limit)
    else:
        first, stop = tl.maximum(first, base), tl.minimum(stop, limit)
    part = part_of(piece, lane, shift, end, sizes, True, C)
    x = of_lane(q, k, operands, part, sizes, True, C)
    dy += part.row * C.P
    kept = lane * (limit - base) - base  # stored chunks before chunk 0
    ends = (segment * tl.num_programs(1) + lane) * C.N * C.P
    state = first_state(start, ends, limit < sizes.length // C.L, part, C)
    within = None if C.WHOLE else end
    if C.AHEAD:
        next_rows = tl.maximum((stop - 1) * C.L + part.local + shift, 0)
        next_given = load_rows(dy, sizes.heads * C.P, next_rows, within, part.columns, C.P, C.BP, C.KIND)
        next_scores = load_pairs(x.scores, next_rows, part, sizes, C)
    for step in tl.range(0, stop - first, num_stages=C.STAGES):
        chunk = stop - 1 - step
        rows = chunk * C.L + part.local + shift
        if to.states is not None:  # stored before the wait for loads
            at = place_of_state(to.states, kept + chunk, C.N * C.P)
            store_state(at, part.place, part.inside, piece, state, C.N * C.P)
        rows_of_k = chunk * C.L + part.local if C.KEYWISE else rows
        rows_q = load_wide(x.q, rows_of_k, part, sizes, C)
        if C.AHEAD:
            given, scores = next_given, next_scores
            next_rows = tl.maximum(rows - C.L, 0)
            next_given = load_rows(dy, sizes.heads * C.P, next_rows, within, part.columns, C.P, C.BP, C.KIND)
            next_scores = load_pairs(x.scores, next_rows, part, sizes, C)
        else:
            given = load_rows(dy, sizes.heads * C.P, rows, within, part.columns, C.P, C.BP, C.KIND)
            scores = given
        rows_k, adjoint = rows_q, given
        if C.DELTA:
            rows_k = load_wide(x.k, rows_of_k, part, sizes, C)
            adjoint = _adjoint(state, given, scores, rows_q, rows_k, rows, chunk, x, part, sizes, C)
            if values.dv is not None:
                _store_values(v, values, adjoint, rows, x, part, sizes, C)
            if to.states is not None:
                _keep(to, adjoint, rows, chunk, kept, base, limit, part, sizes, C)
            adjoint *= -tl.load(x.scalars + (PREFIX_ERASE if C.DECAY else ERASE) * sizes.plane + rows)[:, None]
        state = _onward(state, given, adjoint, rows_q, rows_k, rows_of_k, rows, chunk, x, part, sizes, C)
    if to.final is not None:
        tl.store(to.final + ends + part.place, state, mask=part.inside)


@triton.jit
def _adjoint(state, given, scores, rows_q, rows_k, rows, chunk, x, part, sizes, C: tl.constexpr):
    """The gradient of a chunk's entries [L, BP]. scores: loaded one chunk before."""
    if C.AHEAD:
        weights = turn((scores, load_pairs(x.rest.at, rows, part, sizes, C)))
        scores = weights[0]
    elif C.SCORED:
        weights = turn(load_scores(x, rows, chunk, part, sizes, C.ROW_TERMS, C))
        scores = weights[0]
    else:
        scores = tl.dot(rows_k, tl.trans(rows_q), input_precision=C.PRECISION)
    carried = product((rows_k, rows_k), split(state, C.STATE_TERMS, C.KIND), 1, C.STATE_TERMS, C.PRECISION)
    if C.DECAY:
        carried *= suffix_of(x.scalars, sizes.plane, rows)[:, None]
    if not C.SCORED:
        scores = tl.where(part.causal, scores, 0.0)
    if C.READ_SCALED and not C.DECAY:
        if C.AHEAD:
            scores = scores.to(tl.float32) + weights[1].to(tl.float32)
        scores *= tl.load(x.scalars + READ * sizes.plane + rows)[None, :]
    if not (C.SCORED and C.DECAY) and (C.READ_SCALED or not C.AHEAD):
        weights = split(scores, C.ROW_TERMS, C.KIND)
    carried = product(weights, (given, given), C.ROW_TERMS, 1, C.PRECISION, carried)
    inverse = turn(load_lower(x.solve + chunk * C.PITCH, part.local, C.L, C.KIND, C.STATE_TERMS))
    right = split(carried, C.STATE_TERMS, C.KIND)
    return product(inverse, right, C.STATE_TERMS, C.STATE_TERMS, C.PRECISION, carried)


@triton.jit
def _store_values(v, values, adjoint, rows, x, part, sizes, C: tl.constexpr):
    """Store dv, and ds if it is wanted."""
    within = None if C.WHOLE else part.end
    batch, head = part.lane // sizes.heads, part.lane % sizes.heads
    grad_v = adjoint
    if values.ds is not None:
        v = of_head(v, batch, head)
        of_v = load_rows(v.at, v.token, rows, within, part.columns, C.P, C.BP, tl.float32)
        of_source = turned(tl.sum(adjoint * of_v, axis=1), x.scalars, sizes.plane, rows, C.DECAY)
        slice_of_p = part.piece.to(tl.int64) * (tl.num_programs(1) // sizes.heads) + batch
        ds = values.ds + slice_of_p * sizes.tokens * sizes.heads + head
        tl.store(ds + rows.to(tl.int64) * sizes.heads, of_source, mask=rows < part.end)
    if C.SCALED:
        grad_v = adjoint * tl.load(x.scalars + SOURCE * sizes.plane + rows)[:, None]
    store_rows(values.dv + part.row * C.P, sizes.heads * C.P, rows, within, part.columns, C.P, C.BP, grad_v)


@triton.jit
def _keep(to, adjoint, rows, chunk, kept, base, limit, part, sizes, C: tl.constexpr):
    """Keep the gradient of a chunk's entries."""
    entries = split(adjoint, C.KEPT_TERMS, C.KIND, C.STATE_TERMS == 1)
    batch, head = part.lane // sizes.heads, part.lane % sizes.heads
    row = ((batch * (limit - base) - base) * C.L - part.shift) * sizes.heads + head
    store_entries(to.entries, row, kept + chunk, entries, rows, part, sizes, C.KEPT_TERMS, C)


@triton.jit
def _onward(state, given, adjoint, rows_q, rows_k, rows_of_k, rows, chunk, x, part, sizes, C: tl.constexpr):
    """The gradient of a chunk's first state from that of its last state."""
    read = given, given
    if C.READ_SCALED or C.DECAY:
        scale = read_scale(x.scalars, sizes.plane, rows, C.DECAY, C.READ_SCALED, C.DELTA)
        exact = given.to(tl.float32) * scale[:, None]
        if C.DELTA:
            read = split(exact, C.GIVEN_TERMS, C.KIND)
        else:
            main = first_term(exact, C.GIVEN_TERMS)
            given = main.to(C.KIND)
    if C.DECAY:
        state *= total_of(x.scalars, sizes.plane, chunk * C.L + part.shift)
    if C.KEYWISE:
        if C.DELTA:
            rows_k = load_wide(x.erased, rows_of_k, part, sizes, C)
        state *= tl.exp2(last_running(x.running, part.lane, sizes.length, chunk, part.keys, C.N, C.L))[:, None]
    rows_q = tl.trans(rows_q)
    if C.DELTA:
        state = product((rows_q, rows_q), read, 1, C.GIVEN_TERMS, C.PRECISION, state)
        rows_k = tl.trans(rows_k)
        erasing = split(adjoint, C.ADJOINT_TERMS, C.KIND)
        state = product((rows_k, rows_k), erasing, 1, C.ADJOINT_TERMS, C.PRECISION, state)
    else:
        state += tl.dot(rows_q, given, input_precision=C.PRECISION)
        if C.KEY_TERMS == 2:
            rest = tl.trans(load_wide(x.rest, rows_of_k, part, sizes, C))
            state += tl.dot(rest, given, input_precision=C.PRECISION)
        if C.GIVEN_TERMS == 2:
            state += tl.dot(rows_q, (exact - main).to(C.KIND), input_precision=C.PRECISION)
    return state


@triton.jit(do_not_specialize=["pieces", "per_piece", "base", "limit"])
def both_walks(
    q, k, operands, v, start, to, dy, behind, adjoints, values, sizes, pieces, per_piece, base, limit,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """For scalar decays or none: adjoint states of chunks base to limit and, in other programs, their first states from
    known ones; with the delta rule also e and its adjoint.

    In pieces of per_piece chunks. start, to: of the forward walk; behind, adjoints: of the reverse walk.
    """
    if tl.program_id(2) < pieces:
        reverse_walk(
            q, k, operands, dy, behind, adjoints, v, values, None, sizes, pieces, per_piece, base, limit, REVERSE
        )  # fmt: skip
    else:
        forward_walk(
            q, k, operands, v, start, to, None, None, None, sizes, pieces, per_piece, base, limit, pieces, FORWARD
        )  # fmt: skip
