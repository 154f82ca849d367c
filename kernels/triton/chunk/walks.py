"""Launches of a delta rule's transform and of the walks: forward with outputs or with the states of all chunks, and
reverse with adjoint states.

Segments of T are walked in parallel where whole sequences would not fill the GPU. The backward pass processes one
stretch of T after the other where that saves memory. A *piece* is a part of a segment whose effect on a state is
computed on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dsf.kernels.triton.chunk.forward_walk import ForwardWalk, Normal, Outputs, forward_walk
from dsf.kernels.triton.chunk.normaliser import by_lane
from dsf.kernels.triton.chunk.reverse_walk import AdjointOutputs, ReverseWalk, Values, both_walks, reverse_walk
from dsf.kernels.triton.chunk.scalars import PLANES, Prepare, prepare
from dsf.kernels.triton.chunk.sums import Sum, combine_moves, combine_segments, sum_piece
from dsf.kernels.triton.chunk.table import limits, lower
from dsf.kernels.triton.chunk.transform import Transform, delta_transform
from dsf.kernels.triton.chunk.walk import Operands
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.sizes import bases, power
from dsf.kernels.triton.structs import Numbers, Rows

if TYPE_CHECKING:
    from dsf.kernels.triton.chunk.matrix import _Call


REGISTERS = 255  # of a thread, the most; without this ptxas gave both walks of a delta rule in float32 only 32


NONE = Values()


class Held(NamedTuple):
    """What an earlier pass computed of all segments of T (dsf.kernels.triton.chunk.shard): the result of `summed`
    and, for the backward pass, of `adjoints_summed`."""

    local: Tensor
    passed: Tensor
    adjoints: Tensor | None = None


class Adjoints(NamedTuple):
    """The reverse walk's results for `chunks` chunks from `base` on; last: the gradient of their first state.

    entries: gradients of v_new; states: gradients of the chunks' last states. known: (first states of chunks, the first
    of these chunks, how many chunks they have memory for); written: v_new of these chunks.
    """

    base: int
    chunks: int
    entries: Tensor
    states: Tensor
    last: Tensor | None
    known: tuple[Tensor, int, int]
    written: Tensor


def prepared_scalars(call: _Call, *given: Tensor | None) -> Tensor:
    """Scalars [B, T, H] as planes contiguous in time, decays as running sums over each chunk (`tiles.prepare`).

    With a normaliser also what each chunk adds to it or, where the gradient of its readout is known, to its gradient.
    """
    normal, none = call.normal, all(x is None for x in given)
    if none and normal is None:
        return call.q
    planes = call.q if none else call.empty(PLANES, call.plane, dtype=torch.float32)
    summed, vectors, drive, added, lanes = 0, call.q, None, None, 4
    if normal is not None:
        summed, vectors, drive = (1, call.k, normal.ones) if normal.slope is None else (2, call.q, normal.slope)
        added = normal.added = call.empty(call.lanes, call.chunks, call.n, dtype=torch.float32)
        lanes = 1
    config = call.common | {
        "P": 0, "SCALED": 0 if given[1] is None else call.scaled, "READ_SCALED": int(given[3] is not None),
        "SUMMED": summed, "LANES": lanes,
        "BACK": call.back or call.scaled != 2,  # for other calls both directions share one kernel
    }  # fmt: skip
    launch(
        prepare, (call.chunks, -(-call.lanes // lanes)),
        *(Numbers() if x is None else Numbers(x, *x.stride()[:3]) for x in given), planes, call.chunk_table,
        call.struct(vectors), by_lane(drive), added, call.measures,
        C=Prepare(**config), num_warps=4 if summed else 1,
    )  # fmt: skip
    return planes


def transform(call: _Call) -> Tensor:
    """The delta rule's triangular inverses [B, H, chunks, ·], each followed by the scores with scalar decays."""
    t = call.tiles
    solve = call.empty(call.batch, call.heads, call.chunks, call.pitch)
    config = Transform(
        **call.common | {"P": 0}, LEVELS=call.levels, SCORES=call.scored,
        ROW_TERMS=call.terms.scores, STATE_TERMS=call.terms.states, PITCH=call.pitch,
    )  # fmt: skip
    launch(
        delta_transform, (call.chunks, call.lanes),
        call.struct(call.q), call.struct(call.k), call.scalars, call.system, solve, scores_of(call, solve),
        call.chunk_table, call.measures,
        C=config, num_warps=t.transform_warps, maxnreg=t.transform_registers,
    )  # fmt: skip
    return solve


def forward(
    call: _Call, solve: Tensor, start: Tensor | None, y: Tensor | None, final: bool,
    saved: tuple[Tensor, Tensor] | None, marks: list[Tensor] | None = None,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Run the forward walk, with parallel segments where needed. saved: (entries, states) to fill.

    marks: a list to fill with the first states of all stretches but the first or, with segments, with [the first states
    of pieces, `passed`]. Returns S_T when `final`, and `passed` (see `summed`): of all segments but the last, or with
    `saved` of all.
    """
    passed, every = call.q, call.finer if marks is None else 1
    if call.is_cut:
        whole = saved or marks is not None or call.segment_table is not None
        if call.held is not None:
            local, passed = call.held.local, call.held.passed
        else:
            local, passed = summed(call, solve, every, bool(whole))
        start = segment_starts(call, local, passed, start, False, every)
        if marks is not None:
            marks += [start, passed]
    last = call.segments(1 if call.segment_table is None else None) if final else None
    walked, firsts, held = call.chunks, None, call.finer // every
    if marks is not None and call.marks is not None and not call.is_cut:
        walked, firsts = call.marks[1], call.segments(call.marks[0])
        marks.append(firsts)
        if start is None:
            start, held = firsts[0], -1
    for base in bases(0, call.chunks, walked):
        limit, to = min(base + walked, call.chunks), last
        if firsts is not None and limit < call.chunks:
            to = firsts[base // walked]
        entries, states = saved or (None, None)
        outputs = Outputs(y, None, entries, states, to, None)
        forward_launch(call, solve, start, outputs, (base, limit), held)
        start = to
    return None if last is None else call.end(last, True), passed


def summed(call: _Call, solve: Tensor, every: int, whole: bool) -> tuple[Tensor, Tensor]:
    """What each piece of T adds to a state, [pieces, B, H, N, P], and what it multiplies its first state by (`passed`,
    [pieces, B·H, N] or with the delta rule [pieces, B·H, N, N]).

    every: pieces of which only the sum is needed; whole: also the last segment.
    """
    local = call.segments(call.pieces)
    passed = call.empty(call.pieces, call.lanes, *(call.n,) * (2 if call.delta else 1), dtype=torch.float32)
    if call.delta or call.keywise:
        stop = call.chunks if whole else (call.count - 1) * call.span
        forward_launch(call, solve, None, Outputs(None, None, None, None, local, passed), (0, stop))
    else:
        pieces = (0, call.pieces if whole else call.pieces - call.finer)
        _sum_pieces(call, call.k, call.v, local, passed, pieces, every)
    return local, passed


def forward_launch(
    call: _Call, solve: Tensor, start: Tensor | None, to: Outputs, chunks: tuple[int, int], held: int = 1
) -> None:
    """Launch the forward walk over a range of chunks. held: START of the walk."""
    t, finish, reads = call.tiles, call.finish, to.y is not None
    pieces = -(-call.p // t.piece)
    if to.passed is not None and call.delta:
        pieces += -(-call.n // t.piece)
    late = t.late and reads
    if late and t.walk_stages > 2:
        late = pieces * call.lanes * call.count > limits(call.q.device)[1]
    stages = 2 if late else t.walk_stages if to.states is None else min(t.walk_stages, t.saved_stages)
    normal = Normal()
    if reads and call.normal is not None:
        normal = Normal(by_lane(call.normal.ones), by_lane(call.normal.read), call.normal.states)
    config = _forward_config(call, stages)
    if reads and finish is not None:
        config |= {"LOADS": finish[0], "FINISH": finish[1]}
        to = to._replace(more=finish[3])
    launch(
        forward_walk, (pieces, call.lanes, call.count),
        *_operands(call, solve, call.rest_of_writes), call.struct(call.v), start, to, normal,
        finish[2] if reads and finish is not None else None, call.segment_table, call.measures,
        call.count, call.span, *chunks, 0,
        C=ForwardWalk(**config | {"START": held, "LATE": late}), num_warps=t.walk_warps, num_stages=stages,
    )  # fmt: skip


def _walk_config(call: _Call, stages: int) -> dict[str, Any]:
    """What both walks are compiled for, apart from what they start from."""
    terms = call.terms
    return call.common | {
        "BP": call.tiles.piece, "SCORED": call.scored or call.keywise, "PITCH": call.pitch, "TERMS": terms.written,
        "ROW_TERMS": terms.kept, "STATE_TERMS": terms.states, "KEY_TERMS": terms.keys, "STAGES": stages,
        "WHOLE": call.whole, "START": 1,
    }  # fmt: skip


def _forward_config(call: _Call, stages: int) -> dict[str, Any]:
    return _walk_config(call, stages) | {
        "AHEAD": call.tiles.ahead, "LOADS": None, "FINISH": None, "LATE": False,
        "SCORE_TERMS": call.terms.scores, "READ_TERMS": call.terms.read,
    }  # fmt: skip


def _reverse_config(call: _Call, stages: int) -> dict[str, Any]:
    return _walk_config(call, stages) | {
        "AHEAD": call.tiles.ahead and call.delta, "ADJOINT_TERMS": call.terms.adjoints,
        "KEPT_TERMS": call.terms.kept_adjoints,
    }  # fmt: skip


def _operands(call: _Call, solve: Tensor, rest: Tensor) -> tuple[Rows, Rows, Operands]:
    """The operands of both walks. rest: rounding errors of scores, or of the rows that a walk writes into states."""
    reads, writes = call.struct(call.reads), call.struct(call.writes)
    return reads, writes, Operands(call.erased, call.scalars, call.running, scores_of(call, solve), rest, solve)


def reverse(
    call: _Call, dy: Tensor, solve: Tensor, start: Tensor | None, passed: Tensor, states: Tensor, written: Tensor,
    first: bool, values: Values,
) -> Iterator[Adjoints]:  # fmt: skip
    """Run the reverse walk, and yield after each stretch of chunks, whose adjoints must be used before the next.

    states: first states of all chunks; written: their v_new. first: the gradient of S_0 is wanted. values: to fill.
    """
    if call.is_cut:
        start = _adjoint_starts(call, dy, solve, start, passed, call.finer)
    stretch = call.walked
    entries = call.q
    if call.delta:
        entries = call.entries(stretch, call.terms.kept_adjoints)
    adjoints = call.states(stretch)
    last = call.segments() if first or stretch < call.chunks else None  # of each stretch in turn, in the same memory
    for base in reversed(bases(0, call.chunks, stretch)):
        limit, to = min(base + stretch, call.chunks), last if first or base > 0 else None
        reverse_launch(call, dy, solve, start, AdjointOutputs(entries, adjoints, to), (base, limit), values)
        yield Adjoints(base, limit - base, entries, adjoints, to, (states, 0, call.chunks), written)
        start = to


def both(
    call: _Call, dy: Tensor, solve: Tensor, state: Tensor | None, start: Tensor | None, marks: Sequence[Tensor],
    values: Values,
) -> Iterator[Adjoints]:  # fmt: skip
    """The reverse walk of each stretch of T, together with its chunks' first states from stored ones or from S_0.

    In pieces, if the forward pass walked in segments. marks: filled by `forward`; values: dv and ds to fill.
    """
    t, unused, stretch = call.tiles, call.q, call.walked
    adjoints, states = call.states(stretch), call.states(stretch)
    counts = call.terms.kept_adjoints, call.terms.kept
    entries, written = (call.entries(stretch, count) if call.delta else unused for count in counts)
    span = stretch
    if call.is_cut:
        start, span = _adjoint_starts(call, dy, unused, start, marks[1], 1), call.span // call.finer
    last, ended = call.segments(-(-stretch // span)), start is not None
    stages = min(t.walk_stages, t.saved_stages)
    ahead = _forward_config(call, stages), _reverse_config(call, t.reverse_stages)
    for base in reversed(bases(0, call.chunks, stretch)):
        limit, at = min(base + stretch, call.chunks), base // span
        pieces = -(-(limit - base) // span)
        known = marks[0][at] if call.is_cut else state if base == 0 else marks[0][at - 1]
        known = last if known is None else known
        behind = last if start is None else start[at:] if call.is_cut else start
        launch(
            both_walks, (-(-call.p // t.piece), call.lanes, 2 * pieces),
            *_operands(call, solve, unused), call.struct(call.v), known,
            Outputs(None, None, written, states, None, None), dy, behind, AdjointOutputs(entries, adjoints, last),
            values, call.measures, pieces, span, base, limit,
            FORWARD=ForwardWalk(**ahead[0] | {"START": 1 if call.is_cut or state is not None else -1}),
            REVERSE=ReverseWalk(**ahead[1] | {"START": 1 if ended else -1}), num_warps=t.walk_warps,
            num_stages=max(stages, t.reverse_stages), maxnreg=REGISTERS if call.delta else t.walk_registers,
        )  # fmt: skip
        yield Adjoints(base, limit - base, entries, adjoints, last, (states, base, limit - base), written)
        start = start if call.is_cut else last


def _adjoint_starts(
    call: _Call, dy: Tensor, solve: Tensor, start: Tensor | None, passed: Tensor, every: int
) -> Tensor:  # fmt: skip
    """The gradient of the last state of each piece, or of every group of `every` pieces, from that of S_T (start)."""
    if call.held is not None and call.held.adjoints is not None:
        local = call.held.adjoints
    else:
        local = adjoints_summed(call, dy, solve, every, call.segment_table is not None)
    return segment_starts(call, local, passed, start, True, every)


def adjoints_summed(call: _Call, dy: Tensor, solve: Tensor, every: int, whole: bool) -> Tensor:
    """What each piece of T adds to an adjoint state, as in `summed`; whole: also the first segment."""
    local, low = call.segments(call.pieces), 0 if whole else 1
    if call.delta or call.keywise:
        outputs = AdjointOutputs(None, None, local[low:])
        reverse_launch(call, dy, solve, None, outputs, (low * call.span, call.chunks))
    else:
        _sum_pieces(call, call.q, dy, local, None, (low * every, call.pieces), every)
    return local


def _sum_pieces(
    call: _Call, a: Tensor, b: Tensor, sums: Tensor, passed: Tensor | None, pieces: tuple[int, int], every: int
) -> None:  # fmt: skip
    """Fill what a range of pieces adds to states (and `passed`) or, where passed is None, to adjoint states.

    every: pieces of which only the sum is needed.
    """
    t, span = call.tiles, call.span // call.finer
    config = Sum(
        **call.common, BP=t.piece, MOST=power(span * every), EVERY=every, TERMS=call.terms.written,
        STAGES=t.sum_stages,
    )  # fmt: skip
    launch(
        sum_piece, (-(-call.p // t.piece), call.lanes, pieces[1] - pieces[0]),
        call.struct(a), call.struct(b), call.scalars, sums, passed, call.segment_table, call.measures,
        span, call.chunks, pieces[0],
        C=config, num_warps=t.walk_warps, num_stages=t.sum_stages, maxnreg=t.walk_registers,
    )  # fmt: skip


def reverse_launch(
    call: _Call, dy: Tensor, solve: Tensor, start: Tensor | None, to: AdjointOutputs, chunks: tuple[int, int],
    values: Values = NONE,
) -> None:  # fmt: skip
    """Launch the reverse walk over a range of chunks."""
    t = call.tiles
    count = call.count if call.segment_table is not None else -(-(chunks[1] - chunks[0]) // call.span)
    launch(
        reverse_walk, (-(-call.p // t.piece), call.lanes, count),
        *_operands(call, solve, call.rest_of_reads), dy, start, to, call.struct(call.v), values, call.segment_table,
        call.measures,
        call.count, call.span, *chunks,
        C=ReverseWalk(**_reverse_config(call, t.reverse_stages)), num_warps=t.walk_warps, num_stages=t.reverse_stages,
    )  # fmt: skip


def segment_starts(
    call: _Call, local: Tensor, passed: Tensor, start: Tensor | None, reverse: bool, every: int
) -> Tensor:  # fmt: skip
    """The first state of every piece [pieces, B, H, N, P] from what each adds (local) and S_0 (start).

    passed: what a piece multiplies its first state by. reverse: of the reverse walk, where a piece starts from those
    after it. every: only for the first of so many pieces.
    """
    starts, size = call.segments(call.pieces // every), call.n * call.p
    given, how = local if start is None else start, {"START": start is not None, "REVERSE": reverse}
    if call.delta:
        launch(
            combine_moves, (-(-call.p // 32), call.lanes, call.sequences),
            local, passed, given, starts, call.sequence_table, call.count,
            N=call.n, P=call.p, BN=call.tiles.keys, BP=32, BK=min(32, call.tiles.keys),
            PRECISION=call.sizes["PRECISION"], num_warps=4, num_stages=2, **how,
        )  # fmt: skip
    else:
        launch(
            combine_segments, (-(-size // 512), call.lanes, call.sequences),
            local, passed, given, starts, call.sequence_table, call.pieces, size, call.p,
            N=call.n, BLOCK=512, EVERY=every, num_warps=4, **how,
        )  # fmt: skip
    return starts


def scores_of(call: _Call, solve: Tensor) -> Tensor:
    """Where the walks find the products between a chunk's rows, if they were made before."""
    return solve[..., lower(call.tiles.chunk) * call.terms.states :] if call.scored else call.scores
