"""Calls of the fused scan: sizes, tiles, buffers and launches.

HOLES has the printed functions of every spec by name; calls take the name (dsf.kernels.triton.scan.operator).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.triton.launch import constant, row_strides
from dsf.kernels.triton.launch import launch as start
from dsf.kernels.triton.registry import Registry
from dsf.kernels.triton.scan.forward import Entries, outputs_by_entry, summaries_by_entry
from dsf.kernels.triton.scan.summaries import combine, summaries
from dsf.kernels.triton.scan.table import (
    ADJOINT,
    BLOCK,
    ENOUGH,
    FORGOTTEN,
    FORWARD,
    SUMMARIES,
    Tile,
    backward,
    by_entry,
    finer,
    mixing,
    segments,
    shares,
    tile,
    vector,
)
from dsf.kernels.triton.scan.tiles import NAMES, Cotangents, Holes, Shape
from dsf.kernels.triton.scan.walk import Outputs, outputs
from dsf.kernels.triton.sizes import power

ALL_TOKENS = 1 << 20  # distance of stored states that stores none between
COMBINE = 1024  # numbers of a state in one program of `combine`
ALIGNED = 16  # rows of Key inputs along time are padded to a multiple of it
NOTHING = Cotangents(None, None, None)


@dataclass(frozen=True)
class Operand:
    """An operand's layout: [B, T, H, (N), (P)] per token; [H, (N), (P)] for a Param; or (start) the initial states
    [sequences, H, N, P] of packed sequences."""

    time: bool
    key: bool
    value: bool
    start: bool = False

    @property
    def along(self) -> bool:
        """True for per-token operands with a Key axis and no Value axis."""
        return self.time and self.key and not self.value

    def heads(self, x: Tensor) -> int:
        """The number of heads of x, a tensor of this layout."""
        return x.shape[2 if self.time else 0]


@dataclass(frozen=True)
class Hole:
    """A registered spec: its printed functions, its operands in order, and what the launches need to know.

    before: y reads the state before the update. light: a step computes next to nothing. fades: summaries may treat a
    state as zero once it has decayed to FORGOTTEN (table.py). sums, separable, special, keyed: as in
    dsf.triton.source.Source.
    """

    functions: ModuleType
    operands: tuple[Operand, ...]
    before: bool
    light: bool
    sums: int
    separable: bool
    special: int
    keyed: int = 0
    fades: bool = False

    @functools.cached_property
    def holes(self) -> Any:
        """The functions as kernels take them."""
        return Holes(*(getattr(self.functions, name, None) for name in NAMES))

    @property
    def mixes(self) -> bool:
        """True where tokens mix the entries of a channel (mixing.py)."""
        return hasattr(self.functions, "angle") or hasattr(self.functions, "low")

    @property
    def packed(self) -> bool:
        """True where sequences begin at tokens."""
        return hasattr(self.functions, "fresh")

    def by_entry(self, s: Sizes) -> bool:
        """True where kernels by entry can run: independent entries, and inputs within 32-bit offsets."""
        return self.separable and s.n > 1 and bool(s.n * (s.tokens + ALIGNED) < 1 << 31)  # no symbol, which == refuses


HOLES: Registry[Hole] = Registry("hole")


@dataclass(frozen=True)
class Sizes:
    """B, T, H, N, P of one call. dense: the channels of every token are contiguous in memory."""

    batch: int
    tokens: int
    heads: int
    n: int
    p: int
    dense: bool = True

    @property
    def rows(self) -> int:
        """The number of states, B H."""
        return self.batch * self.heads

    @property
    def fixed(self) -> bool:
        """True where H, P and strides are compile-time constants; for vector states that was slower."""
        return self.n > 1


def sizes_of(hole: Hole, operands: Sequence[Tensor]) -> Sizes:
    """The sizes of a call, from its operands."""
    pairs = [(o, x) for o, x in zip(hole.operands, operands, strict=True) if not o.start]
    batch, tokens = next((x.shape[0], x.shape[1]) for o, x in pairs if o.time)
    heads = max(o.heads(x) for o, x in pairs)
    n = next((x.shape[-1 - o.value] for o, x in pairs if o.key), 1)
    p = next((x.shape[-1] for o, x in pairs if o.value), 1)
    dense = all(x.stride(-1) == 1 for o, x in pairs if o.time and o.value)
    return Sizes(batch, tokens, int(heads), int(n), int(p), dense)


def _arguments(hole: Hole, operands: Sequence[Tensor], s: Sizes, rows: bool = False) -> tuple[Any, ...]:
    """Pointers and strides, in the order in which the holes read them; rows: Key inputs are copied by `_in_rows`."""
    found: list[Any] = []
    for o, x in zip(hole.operands, operands, strict=True):
        if o.start:
            found.append(x.contiguous())
            continue
        if o.key and not o.value:
            # every lane reads these, so converting them once is faster
            x = _in_rows(x) if rows and o.time else x.float()
        lead, at = (row_strides(x) if s.fixed else x.stride()[:2], 2) if o.time else ((), 0)
        found += [x, *lead, x.stride(at), s.heads // o.heads(x), *x.stride()[at + 1 :]]
    return tuple(found)


def _in_rows(x: Tensor) -> Tensor:
    """x [B, T, H, N] as float32 with an entry's tokens contiguous, in rows padded with zeros to whole tiles."""
    batch, tokens, heads, n = x.shape
    padded = -(-tokens // ALIGNED) * ALIGNED
    room = x.new_empty(batch, heads, n, padded, dtype=torch.float32)
    if padded > tokens:
        room[..., tokens:].zero_()
    return room[..., :tokens].permute(0, 3, 1, 2).copy_(x)


@dataclass(frozen=True)
class Launch:
    """Grid and tile of one direction of one call."""

    sizes: Sizes
    tile: Tile
    segments: int
    span: int
    blocks: int

    @property
    def grid(self) -> tuple[int]:
        """One program for each block of channels, segment and state."""
        return (self.blocks * self.segments * self.sizes.rows,)

    @property
    def by_entry(self) -> bool:
        """True where a program processes one state entry after the other."""
        return self.tile.NB == 1 and self.sizes.n > 1

    @property
    def padded(self) -> bool:
        """True where tiles reach past the end, so that buffers of shared gradients need padding."""
        return self.by_entry and bool(self.sizes.tokens % self.tile.K > 0)

    @property
    def chunks(self) -> int:
        """The number of chunks (tokens between two stored states) of a segment."""
        return -(-self.span // self.tile.chunk)

    @property
    def scalars(self) -> tuple[Any, ...]:
        """T, H, P, segments, span."""
        s = self.sizes
        width = (constant(s.heads), constant(s.p)) if s.fixed else (s.heads, s.p)
        return s.tokens, *width, self.segments, self.span

    def options(self, hole: Hole, kind: type[Shape] = Shape, **more: Any) -> dict[str, Any]:
        """Compile-time options of a kernel; more: further fields of its Shape."""
        t, n, p = self.tile, self.sizes.n, self.sizes.p
        shape = kind(n, t.K, t.NB, t.BP, t.V, p % t.BP == 0, hole.before, **more)
        found = {"holes": hole.holes, "shape": shape, "num_warps": t.warps}
        return found | ({"maxnreg": t.registers} if t.registers else {})

    @property
    def near(self) -> bool:
        """True where the L1 can hold what such a kernel loads next."""
        return self.sizes.n <= BLOCK

    def states(self, like: Tensor, count: int) -> Tensor:
        """Uninitialised memory for states [B, H, count, N, P], float32."""
        s = self.sizes
        return like.new_empty(s.batch, s.heads, count, s.n, s.p, dtype=torch.float32)


def tile_of(hole: Hole, s: Sizes, adjoint: bool, device: torch.device) -> Tile:
    """The tile of one direction. Forward segments begin where states are stored for the adjoint.

    Tiles of `vector` need contiguous channels, which are copied to shared memory.
    """
    if hole.mixes:
        t = mixing(adjoint, s.n, s.p, hasattr(hole.functions, "angle"))
    elif s.n == 1 and s.dense:
        t = vector(adjoint, s.p, s.rows, hole.light, device)
    elif not adjoint and _outputs_by_entry(hole, s, device):
        t = by_entry(s.p)
    else:
        t = tile(ADJOINT if adjoint else FORWARD, s.n, s.p)
        t = backward(t, s.n <= BLOCK and hole.special > 1) if adjoint and hole.by_entry(s) else t
    return t if adjoint else replace(t, M=max(t.M, tile_of(hole, s, True, device).M))


def _outputs_by_entry(hole: Hole, s: Sizes, device: torch.device) -> bool:
    """True where the output pass by entry is faster.

    With up to BLOCK entries: where an entry needs no special function, whose latency the few warps would not hide. With
    many entries: where the GPU is full without segments.
    """
    if not hole.by_entry(s) or s.n <= BLOCK:
        return hole.by_entry(s) and hole.special == 0
    t = by_entry(s.p)
    return s.n > 2 * BLOCK and segments(s.tokens, -(-s.p // t.BP) * s.rows, t, device)[0] == 1


def launch(hole: Hole, sizes: Sizes, adjoint: bool, device: torch.device) -> Launch:
    """The Launch of one direction: its tile and segments."""
    t = tile_of(hole, sizes, adjoint, device)
    blocks = -(-sizes.p // t.BP)
    count, span = (1, sizes.tokens) if hole.mixes else segments(sizes.tokens, blocks * sizes.rows, t, device)
    return Launch(sizes, t, count, span, blocks)


def _entering(go: Launch, hole: Hole, args: Any, given: Cotangents, first: Tensor | None, like: Tensor) -> Tensor:
    """The entering state of every segment or, with dy, the cotangent at its end.

    Computed from summaries of pieces, enough of them to fill the GPU, of all segments but the last (first).
    """
    sums, local, product = summed(go, hole, args, given, like)
    fine = (local.shape[2] - 1) // (go.segments - 1)
    every = combined(sums, local, product, first, given.dy is not None, hole.packed)
    return every[:, :, ::fine].contiguous()


def summed(
    go: Launch, hole: Hole, args: Any, given: Cotangents, like: Tensor, whole: bool = False
) -> tuple[Launch, Tensor, Tensor]:
    """The summaries of pieces of segments: (added, factor) [B, H, pieces + 1, N, P], and their Launch.

    whole: also of the last (first) segment. args: with `rows` where the hole runs by entry.
    """
    if hole.by_entry(go.sizes):
        return _summed_by_entry(go, hole, args, given, like, whole)
    if go.tile.G * go.tile.stages > 1:  # wide tiles without runs, which would need one more scan
        t = tile(FORWARD if given.dy is None else ADJOINT, go.sizes.n, go.sizes.p)
        go = replace(go, tile=t, blocks=-(-go.sizes.p // t.BP))
    count, span, origin = _places(go, SUMMARIES, given, whole, like.device)
    local, product = go.states(like, count), go.states(like, count)
    start(
        summaries, (go.grid[0] // go.segments * (count - 1),),
        args, given, local, product, *go.scalars[:3], count, span, origin, **go.options(hole, AHEAD=go.tile.skim),
    )  # fmt: skip
    return go, local, product


def _places(go: Launch, warps: int, given: Cotangents, whole: bool, device: torch.device) -> tuple[int, int, int]:
    """(pieces + 1, tokens a piece, origin) of `summaries` with `warps` warps a processor."""
    segments = go.segments + int(whole)  # a number: before torch 2.13 its symbols cannot add a truth
    fine = finer(segments, go.span, go.blocks * go.sizes.rows, go.tile, warps, device)
    span = go.span // fine
    origin = 0 if given.dy is None else (0 if whole else go.span) - span
    return (segments - 1) * fine + 1, span, origin


def _summed_by_entry(
    go: Launch, hole: Hole, args: Any, given: Cotangents, like: Tensor, whole: bool
) -> tuple[Launch, Tensor, Tensor]:
    """`summed` by entry."""
    t = by_entry(go.sizes.p)
    go = replace(go, tile=t, blocks=-(-go.sizes.p // t.BP))
    count, span, origin = _places(go, ENOUGH, given, whole, like.device)
    local, products = go.states(like, count).zero_(), go.states(like, count).fill_(1.0)
    programs = go.blocks * go.sizes.rows * (count - 1)
    parts = shares(go.sizes.n, programs, like.device)
    low = FORGOTTEN if hole.fades else 0.0
    options = go.options(hole, Entries, NEAR=go.near, LOW=low, PARTS=parts, LAST=whole)
    scalars = *go.scalars[:3], count, span, origin
    start(summaries_by_entry, (programs, parts), args, given, local, products, *scalars, **options)
    return go, local, products


def combined(
    go: Launch, local: Tensor, product: Tensor, first: Tensor | None, reverse: bool, packed: bool = False,
    keep: bool = False,
) -> Tensor:  # fmt: skip
    """The entering state (cotangent) of every piece [B, H, pieces, N, P]; overwrites `local` unless that is kept.

    packed: sequences may begin in a piece, whose product is zero then.
    """
    out = local.new_empty(local.shape) if keep else local
    size = go.sizes.n * go.sizes.p
    block = min(COMBINE, power(size))
    grid = (-(-size // block) * go.sizes.rows,)
    start(
        combine, grid, local, product, first, out, size, local.shape[2], BLOCK=block, K=8, REVERSE=reverse,
        PACKED=packed,
    )  # fmt: skip
    return out


def between(go: Launch, held: Sequence[Tensor], first: Tensor | None, reverse: bool) -> Tensor:
    """The entering state (cotangent) of every segment, from `held`, the result of `summed` with `whole`."""
    local, product = held
    fine = (local.shape[2] - 1) // go.segments
    every = combined(go, local, product, first, reverse, keep=True)
    return (every[:, :, fine::fine] if reverse else every[:, :, :-1:fine]).contiguous()


def fused_scan(
    operands: Sequence[Tensor],
    state: Tensor | None,
    hole: str,
    keep: bool,
    wide: bool,
    ends: Tensor | None,
    sequences: int,
    held: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, T, H, P], the final state [B, H, N, P] and, if `keep`, the stored states for the adjoint.

    y has the operands' dtype, or float32 if `wide`. ends: None, or the last tokens of `sequences` packed sequences
    (dsf.kernels.triton.scan.tiles.packed_ends), each of which has a final state; B is then 1 and `state` None. held:
    the summaries from dsf::scan_shard, or None.
    """
    spec = HOLES[hole]
    sizes = sizes_of(spec, operands)
    first = _timed(spec, operands)
    go = launch(spec, sizes, False, first.device)
    args = _arguments(spec, operands, sizes, go.by_entry)
    starts = None if state is None else state.contiguous()
    if held and go.segments > 1:
        starts = between(go, held, starts, False)
    elif go.segments > 1:
        rows = args if go.by_entry == spec.by_entry(sizes) else _arguments(spec, operands, sizes, True)
        starts = _entering(go, spec, rows, NOTHING, starts, first)
    y = first.new_empty(sizes.batch, sizes.tokens, sizes.heads, sizes.p, dtype=torch.float32 if wide else None)
    final = go.states(first, 1).squeeze(2) if ends is None else _states(sizes, first, sequences)
    step = tile_of(spec, sizes, True, first.device).M if keep else ALL_TOKENS
    saved = go.states(first, -(-sizes.tokens // step) if keep else 0)
    out = Outputs(y, final, saved if keep else None, ends)
    if go.by_entry:
        if starts is None:
            states = go.states(first, 1).zero_()
        else:
            states = starts if go.segments > 1 else starts.unsqueeze(2).clone()
        options = go.options(spec, Entries, M=step, U=2 - sizes.n % 2, NEAR=go.near)
        start(outputs_by_entry, go.grid, args, out, states, *go.scalars, **options)
        return y, states[:, :, -1].contiguous() if ends is None else final, saved
    options = go.options(spec, M=step, G=go.tile.G, STAGES=go.tile.stages)
    start(outputs, go.grid, args, out, starts, *go.scalars, **options)
    return y, final, saved


def _states(sizes: Sizes, like: Tensor, sequences: int) -> Tensor:
    """Uninitialised memory for the sequences' states [sequences, H, N, P], float32."""
    return like.new_empty(sequences, sizes.heads, sizes.n, sizes.p, dtype=torch.float32)


def _timed(hole: Hole, operands: Sequence[Tensor]) -> Tensor:
    """A per-token input in the call's dtype: one with a Value axis, since a kernel before the scan makes none."""
    found = [(o, x) for o, x in zip(hole.operands, operands, strict=True) if o.time and not o.start]
    wide = [x for o, x in found if o.value]
    return wide[0] if wide else next(x for _, x in found if x.dtype != torch.int32)
