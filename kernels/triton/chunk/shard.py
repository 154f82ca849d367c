"""What one rank's shard of a sequence does to states, by the chunk kernels without outputs (dsf.parallel).

dsf::matrix_shard gives F and M of S_out = M S_in + F, dsf::matrix_shard_adjoint the gradient of S_in. Both also return
what they computed that does not depend on S_in or on the gradient of S_out: what the prologue made, running sums of
decays, rows relative to them, a delta rule's inverses and, where T is walked in segments, what each segment does;
backward the gradients of reads. dsf::matrix_mixer and dsf::matrix_mixer_backward take this as `held`, when the entering
state or gradient is known, and do not compute it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.affine import exact_product
from dsf.kernels.triton.chunk import matrix, rank_one_ops
from dsf.kernels.triton.chunk.call import ChunkCall
from dsf.kernels.triton.chunk.normaliser import Normaliser, between_chunks
from dsf.kernels.triton.chunk.operator import resumed, starting
from dsf.kernels.triton.chunk.reads import by_row, first_reads, held_reads, read_gradient
from dsf.kernels.triton.chunk.reverse_walk import AdjointOutputs
from dsf.kernels.triton.chunk.walks import (
    adjoints_summed,
    forward,
    reverse_launch,
    segment_starts,
    summed,
    transform,
)
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.pointwise.programs import PROGRAMS


def _run(
    operands: Sequence[Tensor], state: Tensor | None, program: str, moves: bool, keep: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The state after T tokens [B, H, N, columns], M, and what dsf::matrix_mixer can use of this (`held`).

    state: S_in, None for one in which nothing was written. M, if `moves`, else empty: with corrections [B, H, N, N], of
    decays by head or by key [B, H, N, 1], with a running maximum its logarithm [B, H, 1, 1]. keep: whether
    dsf::matrix_mixer will be asked to `keep` what its backward pass needs, some of which is made here.
    """
    known = PROGRAMS[program]
    call = ChunkCall(known, operands)
    start, first, _ = starting(call, state)
    last = drifts = None
    if known.stabilised:
        level, last, drifts = call.level(first, moves)
        call.keep_level(level)
    made = call.make()
    arguments = call.chunk_arguments(start)
    if known.floor is not None:
        final, move, kept = rank_one_ops.shard(**arguments, moves=moves, keep=keep)
        none = call.empty(0)
        return final[..., : call.p + known.ones].contiguous(), move, [none, none, *kept, *made]
    normal: Normaliser | None = arguments["normal"]
    ends, move, held = _written(arguments, moves and drifts is None, keep and not known.stabilised)
    if normal is not None:
        assert normal.final is not None
        ends = torch.cat([ends, normal.final.unsqueeze(-1)], dim=-1)
    if known.column:
        ends = ends[..., : call.p + 1]
    if last is not None:
        ends = torch.cat([ends, last[..., None, None].expand(*ends.shape[:-1], 1)], dim=-1)
    if drifts is not None:
        move = drifts.sum(1).view(call.batch, call.heads, 1, 1)
    if known.stabilised:  # rows are written relative to the maximum, so that what they add depends on S_in
        return ends.contiguous(), move, []
    return ends.contiguous(), move, [*held, *made]


def _call(arguments: dict[str, Any], kept: Sequence[Tensor] | None, back: bool) -> tuple[Any, Normaliser | None]:
    """What all launches of one direction share, and the normaliser."""
    a = arguments
    call = matrix._Call(
        a["q"], a["k"], a["v"], a["decay"], a["source"], a["erase"], a["read"], a["heads"], a["log"], a["normal"],
        kept=kept, traits=a["traits"], back=back,
    )  # fmt: skip
    return call, a["normal"]


def _written(arguments: dict[str, Any], moves: bool, keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """S_T without a normaliser's column, M, and what `matrix._chunk_matrix` takes as `held`, by the walks.

    The first two of `held` are empty where T is not cut into segments.
    """
    call, normal = _call(arguments, [] if keep else None, False)
    state, none = arguments["state"], call.empty(0, dtype=torch.float32)
    if normal is not None:
        assert normal.added is not None
        normal.states, normal.final = between_chunks(call, normal.added, normal.state, False)
    solve = transform(call) if call.delta else none
    if call.delta and not call.is_cut and not moves:
        last, _ = forward(call, solve, state, None, True, None)
        assert last is not None
        return last, none, [none, none, solve, *call.ahead()]
    local, passed = summed(call, solve, 1, True)
    starts = segment_starts(call, local, passed, state, False, 1) if call.pieces > 1 or state is not None else None
    last = local[-1]
    if starts is not None:
        last = _moved(passed[-1], starts[-1], call.delta) + last
    move = none
    if moves and call.delta:
        move = _product(call, passed)
    elif moves:
        move = passed.prod(0).view(call.batch, call.heads, call.n, 1)
    return last, move, [*((local, passed) if call.is_cut else (none, none)), solve, *call.ahead()]


def _moved(passed: Tensor, state: Tensor, dense: bool) -> Tensor:
    """passed S: the part of a piece's last state that comes from its first state S [B, H, N, P]."""
    if dense:
        return exact_product(passed.view(*state.shape[:2], *passed.shape[1:]), state)
    return passed.view(*state.shape[:2], -1, 1) * state


def _product(call: Any, passed: Tensor) -> Tensor:
    """The product [B, H, N, N] of the pieces' transitions [pieces, B · H, N, N], in order."""
    found = passed[0]
    for later in passed[1:]:
        found = exact_product(later, found)
    return found.view(call.batch, call.heads, call.n, call.n)


def _pull(
    dy: Tensor, dfinal: Tensor | None, operands: Sequence[Tensor], state: Tensor | None, saved: Sequence[Tensor],
    program: str, held: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The gradient of S_in [B, H, N, ·] without the column of the running maximum, and `held` of
    dsf::matrix_mixer_backward.

    dfinal: the gradient of S_out, or None. saved: what dsf::matrix_mixer kept, and y behind it, as
    dsf::matrix_mixer_backward takes them; held: the first two tensors that dsf::matrix_shard returned to be held, or
    nothing. What is returned as held begins with the gradients of reads.
    """
    known = PROGRAMS[program]
    call = ChunkCall(known, operands)
    start, scale, kept = resumed(call, state, saved)
    d_first, dy, slope, dfinal = by_row(call, *read_gradient(call, dy), dfinal)
    arguments, found = call.chunk_arguments(start), list[Tensor]()
    if known.floor is not None:
        first = rank_one_ops.shard_adjoint(dy, dfinal, kept, **arguments)
    else:
        normal: Normaliser | None = arguments["normal"]
        if normal is not None:
            normal.slope, normal.states = slope, kept[1]
            dfinal, normal.final_gradient = call.split(dfinal)
        first, found = _adjoint(arguments, dy, dfinal, kept[0], kept[1 if normal is None else 2 :], held)
        if normal is not None:
            assert normal.first is not None
            first = torch.cat([first, normal.first.unsqueeze(-1)], dim=-1)
    if known.before:
        first = first + first_reads(call, d_first)
    first = first[..., : call.p + known.ones]
    return (first if scale is None else first * scale).contiguous(), [*held_reads(call), *found]


def _adjoint(
    arguments: dict[str, Any], dy: Tensor, dfinal: Tensor | None, solve: Tensor, kept: Sequence[Tensor],
    held: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The gradient of S_0 by the walks, and what `matrix._chunk_matrix_backward` takes as `held`."""
    call, normal = _call(arguments, kept, True)
    if normal is not None:
        assert normal.added is not None
        normal.adjoints, normal.first = between_chunks(call, normal.added, normal.final_gradient, True)
    dy, last = dy.contiguous(), None if dfinal is None else dfinal.contiguous()
    if not call.is_cut:
        found = call.segments()
        reverse_launch(call, dy, solve, last, AdjointOutputs(None, None, found), (0, call.chunks))
        return call.end(found, False), call.ahead()
    passed = held[1] if held else (call.made.passed if call.made is not None else kept[1])
    adjoints = adjoints_summed(call, dy, solve, 1, True)
    starts = segment_starts(call, adjoints, passed, last, True, 1)
    back = passed[0].transpose(-1, -2) if call.delta else passed[0]
    first = _moved(back, starts[0], call.delta) + adjoints[0]
    return first, [*call.ahead(), *(held or (passed, passed)), adjoints]


matrix_shard = operator(
    "matrix_shard(Tensor[] operands, Tensor? state, str program, bool moves, bool keep) -> (Tensor, Tensor, Tensor[])",
    _run,
)
matrix_shard_adjoint = operator(
    "matrix_shard_adjoint(Tensor dy, Tensor? dfinal, Tensor[] operands, Tensor? state, Tensor[] saved, str program, "
    "Tensor[] held) -> (Tensor, Tensor[])",
    _pull,
)
