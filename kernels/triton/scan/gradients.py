"""Gradients of the fused scan: buffers, launches of the adjoint, and sums over programs in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.triton.launch import launch as start
from dsf.kernels.triton.scan.adjoint import Room, gradients
from dsf.kernels.triton.scan.entries import entry_gradients
from dsf.kernels.triton.scan.launches import (
    HOLES,
    Hole,
    Launch,
    Operand,
    _arguments,
    _entering,
    between,
    launch,
    sizes_of,
)
from dsf.kernels.triton.scan.rows import Rows
from dsf.kernels.triton.scan.table import AHEAD, shared_states
from dsf.kernels.triton.scan.tiles import Cotangents
from dsf.kernels.triton.sizes import bases

SHARED = 64 << 20  # bytes of partial gradients beyond which the adjoint runs in several launches, stretches of time


def fused_scan_adjoint(
    dy: Tensor,
    dfinal: Tensor | None,
    operands: Sequence[Tensor],
    saved: Tensor,
    hole: str,
    needs: Sequence[bool],
    ends: Tensor | None,
    held: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Gradients of the operands that need one, in order, and of the first state [B, H, N, P] (empty for packed ones).

    dy: [B, T, H, P]; dfinal: gradient of the final state, or None; saved: the states that the forward pass stored;
    needs: which operands need a gradient; ends: of packed sequences, or None; held: the segments' cotangents from
    dsf::scan_shard, or None.
    """
    spec = HOLES[hole]
    sizes = sizes_of(spec, operands)
    go = launch(spec, sizes, True, dy.device)
    args = _arguments(spec, operands, sizes, go.by_entry)
    dfinal = None if dfinal is None else dfinal.contiguous()
    entering, arriving = (dfinal, None) if ends is None else (None, dfinal)
    given = Cotangents(dy.contiguous(), ends, arriving)
    if held and go.segments > 1:
        cotangents = between(go, held, entering, True)
    elif go.segments > 1:
        cotangents = _entering(go, spec, args, given, entering, dy)
    else:
        cotangents = go.states(dy, 1).zero_() if entering is None else entering.unsqueeze(2).clone()
    wanted = list(zip(spec.operands, operands, needs, strict=True))
    length = _stretch([(o, x) for o, x, need in wanted if need], go)
    partial = [_partial(o, x, go, length) if need else None for o, x, need in wanted]
    trios = [(o, x, g) for (o, x, _), g in zip(wanted, partial, strict=True) if g is not None]
    if length == go.chunks:
        totals = _totals(spec, go, dy) if go.by_entry else None
        rows = (go.segments * length * go.tile.chunk, length * go.tile.chunk) if go.padded else (sizes.tokens, go.span)
        _pull(go, spec, args, partial, given, saved, cotangents, totals, (0, length), rows)
        return [_whole(o, x, _by_token(o, g, go)) for o, x, g in trios], _initial(cotangents, ends)
    totals = _totals(spec, go, dy)
    each = length * go.tile.chunk
    gathered = {i: _gathered(g, go, _axis(o, go)) for i, (o, _, g) in enumerate(trios) if _is_shared(o)}
    for low in reversed(bases(0, go.chunks, length)):
        high = min(low + length, go.chunks)
        over = (low, high), (go.segments * each, each)
        _pull(go, spec, args, partial, given, saved, cotangents, totals, *over)
        count = (high - low) * go.tile.chunk
        for i, found in gathered.items():
            o, _, g = trios[i]
            axis = _axis(o, go)
            parts = g.unflatten(axis, (go.segments, each)).narrow(axis + 1, 0, count)
            torch.sum(parts, 0, out=found.narrow(axis, low * go.tile.chunk, count))
    for i, found in gathered.items():
        o, x, _ = trios[i]
        trios[i] = o, x, found.flatten(_axis(o, go) - 1, _axis(o, go))[None]
    return [_whole(o, x, _by_token(o, g, go)) for o, x, g in trios], _initial(cotangents, ends)


def _axis(o: Operand, go: Launch) -> int:
    """The axis of tokens in the partial sums of a shared gradient."""
    return 4 if go.by_entry and o.along else 2


def _by_token(o: Operand, g: Tensor, go: Launch) -> Tensor:
    """A gradient's parts [blocks, B, H, N, T] as [blocks, B, T, H, N]; others as they are."""
    return g.permute(0, 1, 4, 2, 3) if _axis(o, go) == 4 else g


def _totals(hole: Hole, go: Launch, like: Tensor) -> Tensor:
    """Zeros for the Params' sums of every program."""
    each = hole.sums + hole.keyed * (go.sizes.n - 1) if go.by_entry else max(hole.sums, 1) * go.tile.NB
    return like.new_zeros(go.grid[0] * max(each, 1) * go.tile.BP, dtype=torch.float32)


def _initial(cotangents: Tensor, ends: Tensor | None) -> Tensor:
    """The gradient of the first state; empty for packed sequences, whose initial states are an operand."""
    return cotangents[:, :, 0].contiguous() if ends is None else cotangents.new_empty(0)


def _pull(
    go: Launch, hole: Hole, args: Any, partial: Sequence[Tensor | None], given: Cotangents, saved: Tensor,
    cotangents: Tensor, totals: Tensor | None, chunks: tuple[int, int], rows: tuple[int, int],
) -> None:  # fmt: skip
    """One launch of the adjoint, for a range of chunks of every segment."""
    t = go.tile
    if go.by_entry:
        options, states = _rows(go, hole, saved.device)
    else:
        options = go.options(hole, M=t.M, U=t.U, G=t.G, STAGES=t.stages)
        states = t.M // (t.U * t.K) * t.NB
    scratch = saved.new_empty(go.grid[0] * states * t.BP, dtype=torch.float32)
    room = Room(saved, cotangents, totals, scratch)
    grads = (go.sizes.batch, *partial)
    kernel = entry_gradients if go.by_entry else gradients
    start(kernel, go.grid, args, grads, given, room, *go.scalars, *chunks, *rows, **options)


def _rows(go: Launch, hole: Hole, device: torch.device) -> tuple[dict[str, Any], int]:
    """The compile-time options of entry_gradients, and how many numbers a channel a program has in scratch memory."""
    t, n, runs = go.tile, go.sizes.n, go.tile.M // go.tile.K
    keys = sum(o.along for o in hole.operands)
    found = shared_states(t, n, hole.keyed, keys, device)
    slots, shared = found or runs, found > 0 and device.type != "cpu"
    left = (-(-runs // slots) - 1) * slots
    some = 1 if n % AHEAD else AHEAD
    rows = 0 if shared else (n + some) * (1 + 2 * hole.keyed + slots)
    options = go.options(
        hole, Rows, M=t.M, U=some, KEYED=hole.keyed, KEYS=keys, LOOSE=hole.sums - hole.keyed, S=slots, SHARED=shared,
        MASKED=go.sizes.tokens % t.K > 0,
    )  # fmt: skip
    return options, rows + left * n


def _is_shared(o: Operand) -> bool:
    """True for per-token inputs without a Value axis: all programs of a head add to their gradients."""
    return o.time and not o.value


def _stretch(wanted: Sequence[tuple[Operand, Tensor]], go: Launch) -> int:
    """How many chunks of every segment one launch of the adjoint handles, so that partial gradients fit in SHARED."""
    s = go.sizes
    width = sum(s.n if o.key else 1 for o, _ in wanted if _is_shared(o))
    stretches = min(-(-4 * go.blocks * s.rows * s.tokens * width // SHARED), go.chunks)
    return -(-go.chunks // max(stretches, 1))


def _partial(o: Operand, x: Tensor, go: Launch, length: int) -> Tensor:
    """Memory for one operand's gradient: all heads, and a partial sum for every block of channels that adds to it."""
    if o.start:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    s = go.sizes
    whole = length == go.chunks
    tokens = s.tokens if o.value or (whole and not go.padded) else go.segments * length * go.tile.chunk
    if go.by_entry and o.along:
        return x.new_empty(go.blocks, s.batch, s.heads, s.n, tokens, dtype=torch.float32)
    lead: tuple[int, ...] = (s.batch, tokens, s.heads) if o.time else (s.batch, go.segments, s.heads)
    if not o.value:
        lead = (go.blocks, *lead)
    shape = (*lead, *((s.n,) if o.key else ()), *((s.p,) if o.value else ()))
    alone = o.time and o.heads(x) == s.heads and (o.value or (go.blocks == 1 and whole))
    return x.new_empty(shape, dtype=x.dtype if alone else torch.float32)


def _gathered(g: Tensor, go: Launch, axis: int) -> Tensor:
    """Memory for a shared gradient with its partial sums added: [..., segments, tokens of a segment, ...]."""
    return g.new_empty(*g.shape[1:axis], go.segments, go.chunks * go.tile.chunk, *g.shape[axis + 1 :])


def _whole(o: Operand, x: Tensor, g: Tensor) -> Tensor:
    """The gradient in the operand's shape and dtype: parts summed in a fixed order."""
    if o.start:
        return g
    if o.time:  # without padding after the last token, which is not written
        g = g[:, : x.shape[1]] if o.value else g[:, :, : x.shape[1]]
    if not o.value:
        g = g.sum(0) if g.shape[0] > 1 else g[0]
    if not o.time:
        g = g.flatten(0, 1).sum(0)
    heads = 2 if o.time else 0
    if g.shape[heads] != x.shape[heads]:
        g = g.unflatten(heads, (x.shape[heads], -1)).sum(heads + 1)
    return g.to(x.dtype).contiguous()
