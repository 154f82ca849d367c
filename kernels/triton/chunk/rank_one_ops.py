"""Host code of the diagonal-plus-rank-one kernels: a forward pass, a backward pass, and a shard of a sequence.

S_t = (diag(w_t) + a_t b_tᵀ) S_{t-1} + k_t v_tᵀ,  y_t = q_tᵀ S_t + own_t v_t

q, k, left a, right b [B, T, H', N] and v [B, T, H', P] have one dtype (left may be float32, where its digits are
needed) and numbers of heads H' that divide H. decay: log w [B, T, H', N]; own [B, T, H] or None; states [B, H, N, P]
float32. `made` has printed functions that compute left, decay or own in the kernels, with the pointers and strides that
they read; those tensors are then not given. floor: the least that a log decay can be. group: rows of one micro-step,
several for a sum of corrections. The forward pass keeps the
chunks' first states and what it computed of their rows for the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.triton.chunk import matrix
from dsf.kernels.triton.chunk.precision import terms
from dsf.kernels.triton.chunk.rank_one import Chunk, Kept, Walk, rank_one_chunk, rank_one_walk
from dsf.kernels.triton.chunk.rank_one_gradient import (
    Between,
    Entries,
    Gradient,
    Gradients,
    rank_one_entries,
    rank_one_gradient,
)
from dsf.kernels.triton.chunk.states import sizes_of_state
from dsf.kernels.triton.chunk.table import Tiles
from dsf.kernels.triton.chunk.tiles import arithmetic
from dsf.kernels.triton.launch import constant, launch
from dsf.kernels.triton.packed import Sequences, slots
from dsf.kernels.triton.structs import Numbers, Rows, Sizes

Function = tuple[Any, tuple[Any, ...]]  # a printed one, with its pointers and strides
SPAN = 60.0  # most that log decays of a chunk may sum to if its rows are to meet at once, by factors up to e^60


class _Call:
    """Sizes, tiles and strides of one call."""

    def __init__(self, q: Tensor, v: Tensor, heads: int, floor: float, group: int, packed: Sequences | None) -> None:
        self.q, self.v, self.heads = q, v, heads
        self.batch, self.tokens, _, n = q.shape
        self.n, self.p = int(n), int(v.shape[-1])
        self.tiles: Tiles = matrix.tiles(self.n, self.p, q.dtype, "rank_one", True, q.device)
        self.chunk = self.tiles.chunk
        self.chunks = -(-self.tokens // self.chunk)
        self.sequences, self.ends = 1, self.batch  # that follow each other in a row, and those that have states
        self.chunk_table: Tensor | None = None
        self.segment_table: Tensor | None = None
        if packed is not None:
            self.sequences = self.ends = packed.count
            self.chunks = slots(self.tokens, packed.count, self.chunk)
            self.chunk_table, self.segment_table, _ = packed.tables(self.tokens, self.chunk)
        self.lanes, self.length = self.batch * heads, self.chunks * self.chunk
        self.terms = terms(self.tiles.precision, q.dtype, "rank_one", True, False)
        self.finer = self.terms.state_dtype  # of what halves.py keeps, too
        self.levels = self.chunk.bit_length() - 1
        self.at_once = -floor * self.chunk <= SPAN * group  # one row of a group has a decay
        self.exact = floor == 0.0  # no decays: where keys repeat, the roundings of a whole chunk add up
        kind, precision = arithmetic(q.dtype, True, self.tiles.exact)
        self.sizes = Sizes(self.tokens, constant(heads), self.length, None)
        self.common = self.n, self.p, self.chunk, self.levels, self.at_once, self.terms.keys, kind, precision, group
        self.block = self.tiles.gradient_keys  # as many where there are fewer: narrower ones were seen wrong

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Uninitialised memory on the call's device."""
        return self.q.new_empty(shape, dtype=dtype or self.terms.stored)

    def states(self, chunks: int) -> Tensor:
        """Uninitialised states of chunks [B, H, chunks, N, P], in the dtype that is kept (`states.store_state`)."""
        size = sizes_of_state(self.n, self.p, self.finer)
        return self.empty(self.batch, self.heads, chunks, *size, dtype=self.finer)

    def end(self) -> Tensor:
        """Uninitialised first or last states [B or sequences, H, N, P]."""
        return self.empty(self.ends, self.heads, self.n, self.p, dtype=torch.float32)

    def struct(self, x: Tensor | None) -> Rows | None:
        """x [B, T, H', ·] as kernels take it."""
        if x is None:
            return None
        return Rows(x, x.stride(0), constant(x.stride(1)), x.stride(2), self.heads // x.shape[2])

    def printed(self, made: Mapping[str, Function | None], *names: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The functions that make these operands, None for those that are tensors; and what the functions are given."""
        found = [made[name] or (None, (self.q,)) for name in names]
        return tuple(x[0] for x in found), tuple(x[1] for x in found)

    def kept(self, states: bool) -> Kept:
        """Uninitialised memory for what the forward pass keeps; states: also what only the backward pass reads."""
        block = (self.lanes, self.length, self.n)
        parts = 4 if states else 2
        mixed = self.empty(self.batch, self.tokens, self.heads, parts * self.chunk, dtype=self.finer)
        reads, inner, writes, outer = (self.empty(*block) for _ in range(4))
        starts = self.states(self.chunks if states else 0)
        running, factors = self.empty(*block, dtype=torch.float32), self.factors(parts)
        return Kept(running, mixed, factors, reads, inner, writes, outer, starts)

    def factors(self, planes: int) -> Tensor:
        """Uninitialised memory for the factors of rows in float16 (halves.py); empty where rows are kept otherwise."""
        return self.empty(planes, self.lanes, self.length if self.finer == torch.float16 else 0, dtype=torch.float32)

    def parts(self, kept: Kept) -> int:
        """How many matrices [L, L] `mixed` holds of a chunk."""
        return kept.mixed.shape[-1] // self.chunk

    def walk(
        self, kept: Kept, x: Tensor, start: Tensor | None, y: Tensor | None, states: Tensor | None,
        final: Tensor | None, reverse: bool,
    ) -> None:  # fmt: skip
        """Walk from chunk to chunk; reverse: adjoint states, whose step is the same with operands exchanged."""
        t = self.tiles
        if reverse:
            kept = Kept(
                kept.running, kept.mixed, kept.factors, kept.writes, kept.outer, kept.reads, kept.inner, kept.states
            )  # fmt: skip
        launch(
            rank_one_walk, (-(-self.p // t.piece), self.lanes, self.sequences),
            kept, self.struct(x), y, states, start, final, self.segment_table, self.sizes,
            C=Walk(*self.common, t.keys, t.piece, self.parts(kept), reverse, t.walk_stages),
            num_warps=t.walk_warps, num_stages=t.walk_stages,
        )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, left: Tensor | None, right: Tensor, own: Tensor | None,
    made: Mapping[str, Function | None], state: Tensor | None, heads: int, floor: float, group: int, wide: bool,
    keep: bool, packed: Sequences | None = None, held: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """y [B, T, H, P] (float32 when `wide`), S_T [B, H, N, P], and what the backward pass takes (`keep`).

    held: what `shard` made of the chunks' rows, or nothing.
    """
    call = _Call(q, v, heads, floor, group, packed)
    y = call.empty(call.batch, call.tokens, heads, call.p, dtype=torch.float32 if wide else q.dtype)
    final, kept = call.end(), Kept(*held) if held else call.kept(keep)
    if not held:
        _make_chunks(call, kept, (q, right, left, k, decay), own, made)
    call.walk(kept, v, state, y, kept.states if keep else None, final, False)
    return y, final, list(kept) if keep else []


def _make_chunks(
    call: _Call, kept: Kept, vectors: tuple[Tensor | None, ...], own: Tensor | None,
    made: Mapping[str, Function | None],
) -> None:  # fmt: skip
    """Fill `kept` but its states. vectors: q, right, left, k, decay."""
    t = call.tiles
    functions, given = call.printed(made, "left", "decay", "own")
    beside = Numbers() if own is None else Numbers(own, *own.stride())
    chunk = Chunk(*call.common, call.block, call.parts(kept), call.exact, *functions)
    launch(
        rank_one_chunk, (call.chunks, call.lanes),
        *map(call.struct, vectors), beside, given, kept, call.chunk_table, call.sizes,
        C=chunk, num_warps=t.transform_warps, num_stages=2, maxnreg=t.transform_registers,
    )  # fmt: skip


def shard(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, left: Tensor | None, right: Tensor, own: Tensor | None,
    made: Mapping[str, Function | None], state: Tensor | None, heads: int, floor: float, group: int, moves: bool,
    keep: bool, packed: Sequences | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """S_T [B, H, N, P]; with `moves` the transition of all T tokens [B, H, N, N], else an empty tensor; and the chunks'
    rows, if `keep` as the backward pass needs them.

    The transition is what the walk makes of I where no values are written. packed: None.
    """
    call = _Call(q, v, heads, floor, group, packed)
    final, kept = call.end(), call.kept(keep)
    _make_chunks(call, kept, (q, right, left, k, decay), own, made)
    call.walk(kept, v, state, None, None, final, False)
    if not moves:
        return final, call.empty(0, dtype=torch.float32), list(kept)
    nothing = v.new_zeros(call.n).expand(call.batch, call.tokens, heads, call.n)
    square = _Call(q, nothing, heads, floor, group, packed)
    eye = v.new_zeros(call.batch, heads, call.n, call.n, dtype=torch.float32)
    eye.diagonal(dim1=2, dim2=3).fill_(1.0)
    move = square.end()
    square.walk(kept, nothing, eye, None, None, move, False)
    return final, move, list(kept)


def shard_adjoint(
    dy: Tensor, final_gradient: Tensor | None, saved: Sequence[Tensor], *, q: Tensor, v: Tensor, heads: int,
    floor: float, group: int, packed: Sequences | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """The gradient of S_0, and of nothing else. saved: what `forward` kept."""
    call, kept = _Call(q, v, heads, floor, group, packed), Kept(*saved)
    first, start = call.end(), None if final_gradient is None else final_gradient.contiguous()
    call.walk(kept, dy.contiguous(), start, None, None, first, True)
    return first


def backward(
    dy: Tensor, final_gradient: Tensor | None, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None,
    left: Tensor | None, right: Tensor, own: Tensor | None, made: Mapping[str, Function | None], state: Tensor | None,
    heads: int, floor: float, group: int, saved: list[Tensor], packed: Sequences | None = None,
    pull: Function | None = None,
) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    """Gradients by operand [B, T, H, ·], not summed over shared heads, that of the decay in float32; and that of S_0.

    pull: a printed function, with its pointers and strides. It takes the gradients of left, right and decay, which are
    then not returned, and stores what they give to the inputs behind them.
    """
    call, kept, dy = _Call(q, v, heads, floor, group, packed), Kept(*saved), dy.contiguous()
    lead = (call.batch, call.tokens, heads)
    found = {name: call.empty(*lead, call.n, dtype=q.dtype) for name in ("query", "key")}
    if pull is None:  # rounded once they meet
        found |= {x: call.empty(*lead, call.n, dtype=torch.float32) for x in ("right", "left", "decay")}
    found["value"] = call.empty(*lead, call.p, dtype=q.dtype)
    if own is not None or made["own"] is not None:
        found["own"] = call.empty(call.batch, heads, call.tokens, dtype=torch.float32).movedim(1, -1)
    first = call.end() if state is not None else call.empty(0, dtype=torch.float32)
    adjoints = call.states(call.chunks)
    start = None if final_gradient is None else final_gradient.contiguous()
    call.walk(kept, dy, start, None, adjoints, first if state is not None else None, True)
    _gradients(call, kept, dy, (q, right, left, k), v, made, adjoints, found, pull)
    return found, first


def _gradients(
    call: _Call, kept: Kept, dy: Tensor, vectors: tuple[Tensor | None, ...], v: Tensor,
    made: Mapping[str, Function | None], adjoints: Tensor, found: dict[str, Tensor], pull: Function | None,
) -> None:  # fmt: skip
    """Fill `found`, in parallel over chunks."""
    t = call.tiles
    lead = (call.batch, call.tokens, call.heads)
    piece = t.entry_piece or t.piece
    entries, adjoint_entries = (call.empty(*lead, call.p, dtype=call.finer) for _ in range(2))
    weights = call.empty(*lead, 4 * call.chunk, dtype=call.finer)
    scales = call.factors(4 + 2 * -(-call.p // piece))
    names = ("query", "right", "left", "key", "decay", "value", "own")
    between, to = Between(adjoints, entries, adjoint_entries, weights, scales), Gradients(*map(found.get, names))
    launch(
        rank_one_entries, (call.chunks, call.lanes),
        kept, between, call.struct(v), dy, to, call.chunk_table, call.sizes,
        C=Entries(*call.common, t.keys, piece), num_warps=t.entry_warps, num_stages=2,
    )  # fmt: skip
    (left,), given = call.printed(made, "left")
    function, extra = (None, (call.q,)) if pull is None else pull
    launch(
        rank_one_gradient, (call.chunks * -(-call.n // call.block), call.lanes),
        *map(call.struct, (*vectors, v)), dy, kept, between, to, extra, *given, call.chunk_table, call.sizes,
        C=Gradient(*call.common, call.block, t.gradient_piece, piece, left, function),
        num_warps=t.gradient_warps, num_stages=2,
    )  # fmt: skip
