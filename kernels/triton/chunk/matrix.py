"""Chunkwise matrix families on the GPU: no, scalar or key-diagonal decay, with or without delta rule.

S_t = a_t S_{t-1} + k_t e_tᵀ,  y_t = c_t q_tᵀ S_t,  e_t = s_t v_t - b_t (a_t S_{t-1})ᵀ k_t  (b absent: decay alone;
where decays differ by key, rows r_t may stand for the k_t in e_t)
q [B, T, Hq, N], k [B, T, Hk, N], v [B, T, Hv, P] in one dtype, their head counts divisors of H; a (or log a), s, b, c
float32 [B, T, H] or absent, log a also [B, T, Hg, N]; states [B, H, N, P] float32, of packed sequences (B = 1)
[sequences, H, N, P]. The backward pass walks forwards for the chunks' first states (they are kept where decays differ
by key), then backwards for the gradients of their last states, and then computes the gradients of all chunks in
parallel. Long calls do this for one segment of T at a time: where decays are one number a head, the segment is walked
forwards only then, from a kept state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.triton.chunk.cross import fill
from dsf.kernels.triton.chunk.forward_walk import Outputs
from dsf.kernels.triton.chunk.gradient_parts import NormalGradients
from dsf.kernels.triton.chunk.key_rows import KeyRows, key_gradients, key_scalars, prepared
from dsf.kernels.triton.chunk.normaliser import Normaliser, between_chunks, gradients_between_chunks
from dsf.kernels.triton.chunk.precision import decay_gradient, decay_kind, terms
from dsf.kernels.triton.chunk.reverse_walk import Values
from dsf.kernels.triton.chunk.row_gradients import Skip, in_turn, row_gradients, sum_pieces
from dsf.kernels.triton.chunk.states import sizes_of_state
from dsf.kernels.triton.chunk.table import Tiles, finer, limits, lower, segments, sharing, stretches, tiles
from dsf.kernels.triton.chunk.tiles import arithmetic
from dsf.kernels.triton.chunk.traits import Traits, Wanted
from dsf.kernels.triton.chunk.walks import Held, both, forward, forward_launch, prepared_scalars, reverse, transform
from dsf.kernels.triton.launch import constant
from dsf.kernels.triton.packed import Sequences, slots
from dsf.kernels.triton.structs import Rows, Sizes

# (printed function that loads, printed function that computes y, their pointers, memory for y's rounding errors).
Finish = tuple[Any, Any, tuple[Any, ...], Tensor | None]


class _Call:
    """What all launches of one call share: sizes, tiles, strides, options, and the prepared scalars."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, s: Tensor | None, b: Tensor | None, c: Tensor | None,
        heads: int, log: bool, normal: Normaliser | None = None, finish: Finish | None = None,
        kept: Sequence[Tensor] | None = None, packed: Sequences | None = None, traits: Traits = Traits(),  # noqa: B008
        back: bool = False, ahead: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        """kept: where decays differ by key, the forward pass's KeyRows, or an empty list to allocate those to keep.

        back: in the backward pass. ahead: what `ahead` gave of an earlier call of the same tensors and direction.
        """
        self.batch, self.tokens, _, n = q.shape
        self.delta = b is not None
        self.heads, self.n, self.p = heads, int(n), int(v.shape[-1])
        self.q, self.k, self.v, self.right = q, k, v, traits.right
        self.normal, self.finish, self.back = normal, finish, back
        self.kind = decay_kind(g)
        self.keywise = self.kind == "key"
        kind = self.n, self.p, q.dtype, self.kind, self.delta, q.device, normal is not None, traits.precise
        self.tiles: Tiles = tiles(*kind)
        self.terms = terms(self.tiles.precision, q.dtype, self.kind, self.delta, back)
        self.chunks = -(-self.tokens // self.tiles.chunk)
        self.lanes = self.batch * heads
        self.count, self.span, self.finer = _cut(
            self.tiles, self.lanes, self.chunks, self.p, self.delta, q.device,
            self.kind == "scalar" and packed is None,
        )  # fmt: skip
        self.sequences, self.ends = 1, self.batch  # sequences in a row, sequences with states
        self.chunk_table: Tensor | None = None
        self.segment_table: Tensor | None = None
        self.sequence_table: Tensor | None = None
        if packed is not None:
            self._pack(packed)
        self.length = self.chunks * self.tiles.chunk
        self.plane = self.lanes * self.length
        self.decay = 0 if g is None or self.keywise else (1 if log else 2)
        self.scaled, self.read = (int(x is not None or self.decay == 2) for x in (s, c))  # decay 2: they carry signs
        kind, precision = arithmetic(q.dtype, self.delta or normal is not None, self.tiles.exact)
        self.fine = precision != "tf32"
        exponents = self.decay == 1 and not (self.delta or self.fine)  # where exponents have enough digits
        self.together, self.fresh = traits.together, traits.fresh
        if traits.positive and s is not None and exponents and self.fresh is None:
            self.scaled = 2
        self.scored = self.delta and self.decay != 0  # the transform writes the scores beside the inverse
        triangles = self.terms.states + self.scored * self.terms.scores
        self.pitch = lower(self.tiles.chunk) * triangles  # entries of a chunk that the transform writes
        self.sizes = {
            "N": self.n, "P": self.p, "BN": self.tiles.keys, "L": self.tiles.chunk, "KIND": kind,
            "PRECISION": precision,
        }  # fmt: skip
        self.measures = Sizes(self.tokens, constant(heads), self.length, self.plane)
        self.common = self.sizes | {
            "DECAY": self.decay, "KEYWISE": self.keywise, "DELTA": self.delta, "SCALED": self.scaled,
            "READ_SCALED": self.read, "GROUP": traits.group, "UNDECAYED": traits.undecayed,
            "TOGETHER": self.together, "FRESH": self.fresh is not None,
        }  # fmt: skip
        self.key_block = self.tiles.gradient_keys
        if q.dtype != torch.bfloat16:  # narrower blocks of keys gave wrong results
            self.key_block = min(self.tiles.keys, self.key_block)
        self.levels = self.tiles.chunk.bit_length() - 1
        if ahead:
            self.scalars = ahead[0] if ahead[0].numel() else q
            if normal is not None:
                normal.added = ahead[1]
        else:
            self.scalars = prepared_scalars(self, None if self.keywise else g, s, b if self.delta else self.fresh, c)
        self.running = self.first_levels = self.scores = self.system = q
        self.reads, self.writes, self.erased = q, k, k  # rows that the walks multiply with states
        self.rest_of_reads = self.rest_of_writes = q  # their rounding errors, or those of scores
        self.held: Held | None = None
        self.made: KeyRows | None = None
        if self.keywise:
            assert g is not None
            self._prepare(g, kept, ahead[2:])

    def _prepare(self, g: Tensor, kept: Sequence[Tensor] | None, ahead: Sequence[Tensor]) -> None:
        """The rows of decays that differ by key: those of the forward pass, or prepared from log decays g."""
        if kept:
            self.made = KeyRows(*kept)
        else:
            self.made, left = (KeyRows(*ahead[:-1]), ahead[-1]) if ahead else prepared(self, g, kept is not None)
            self.system, self.rest_of_writes = left, self.made.rest if self.delta else left
        self.running, self.first_levels, self.scores = self.made.running, self.made.first_levels, self.made.scores
        self.reads, self.writes = (x.transpose(1, 2) for x in (self.made.reads, self.made.writes))
        self.erased, self.rest_of_reads = self.made.erased if self.delta else self.writes, self.made.rest

    def ahead(self) -> list[Tensor]:
        """The prepared scalars, what each chunk adds to a normaliser, and the rows of decays that differ by key.

        Empty tensors stand for what a call does not have, and for the matrices that the transform has inverted.
        """
        none = self.empty(0)
        made = [none if self.scalars is self.q else self.scalars, none]
        if self.normal is not None and self.normal.added is not None:
            made[1] = self.normal.added
        if self.made is not None and not self.back:
            made += [*self.made, none if self.delta else self.rest_of_writes]
        return made

    @property
    def marks(self) -> tuple[int, int] | None:
        """(number, chunks between them) of the states that the forward pass stores and the backward pass walks from.

        None for no such states. Without segments S_0 is not among them.
        """
        if self.chunk_table is not None or self.keywise or (self.delta and self.is_cut):
            return None
        if self.is_cut:
            return self.pieces, self.span // self.finer
        every = self.stretch(self.tiles.stretches)
        return (-(-self.chunks // every) - 1, every) if every < self.chunks else None

    @property
    def pieces(self) -> int:
        """The number of pieces of all segments, whose effects on a state are computed in parallel."""
        return self.count * self.finer

    @property
    def is_cut(self) -> bool:
        """True where sequences are walked in parallel segments."""
        return self.count > self.sequences

    def _pack(self, packed: Sequences) -> None:
        """Number chunks and segments so that every sequence begins with a new one."""
        self.sequences = self.ends = packed.count
        self.chunks = slots(self.tokens, packed.count, self.tiles.chunk)
        tables = packed.tables(self.tokens, self.tiles.chunk, self.span if self.count > 1 else None)
        self.chunk_table, self.segment_table, self.sequence_table = tables
        self.count = tables.segments.shape[0]

    def rows(self, x: Tensor) -> tuple[int, Any, int, int]:
        """Strides of batch, token (a constant) and head of x, and how many heads share one head of x."""
        return x.stride(0), constant(x.stride(1)), x.stride(2), self.heads // x.shape[2]

    def struct(self, x: Tensor | None) -> Rows:
        """x [B, T, H', ·] or None as kernels take it."""
        return Rows() if x is None else Rows(x, *self.rows(x))

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Uninitialised memory on the call's device."""
        return self.q.new_empty(shape, dtype=dtype or self.terms.stored)

    def states(self, chunks: int) -> Tensor:
        """Uninitialised states of chunks [B, H, chunks, N, P], in the dtype that is kept (`states.store_state`)."""
        size = sizes_of_state(self.n, self.p, self.terms.state_dtype)
        return self.empty(self.batch, self.heads, chunks, *size, dtype=self.terms.state_dtype)

    def entries(self, chunks: int, terms: int) -> Tensor:
        """Uninitialised memory for entries (v_new) of chunks or their gradients; by token where decays are by key."""
        if self.keywise:
            return self.empty(self.batch, chunks * self.tiles.chunk, self.heads, self.p * terms)
        return self.empty(self.batch, self.heads, chunks, self.tiles.chunk, self.p * terms)

    def segments(self, count: int | None = None) -> Tensor:
        """Uninitialised memory for states of segments [segments, B, H, N, P]."""
        return self.empty(count or self.count, self.batch, self.heads, self.n, self.p, dtype=torch.float32)

    def end(self, states: Tensor, last: bool) -> Tensor:
        """The states of every sequence's last (or first) segment, [B or sequences, H, N, P]."""
        if self.sequence_table is None:
            return states[-1 if last else 0]
        if self.is_cut:
            which = self.sequence_table[:, 3] - 1 if last else self.sequence_table[:, 2]
            states = states.index_select(0, which)
        return states.squeeze(1)

    @property
    def whole(self) -> bool:
        """True where walks need no masks for rows beyond the tokens; for delta rules only."""
        packed = self.chunk_table is not None
        return self.delta and not self.keywise and not packed and self.tokens % self.tiles.chunk == 0

    @property
    def beside(self) -> bool:
        """True where the backward pass runs both walks of a stretch of T in one launch, from stored states.

        For decays alone also where the forward pass walks in segments, if two walks have enough programs.
        """
        if self.delta:
            return not self.keywise and self.chunk_table is None and not self.is_cut
        programs = 2 * self.lanes * -(-self.p // self.tiles.piece) * self.finer
        enough = not self.is_cut or programs >= 0.7 * limits(self.q.device)[1]
        return self.marks is not None and enough and self.stretch(self.tiles.stretches) < self.chunks

    @property
    def walked(self) -> int:
        """Chunks of a stretch of T, which the backward pass completes before the next one."""
        if self.is_cut:
            return max(1, self.stretch(self.tiles.stretches) // self.span) * self.span if self.beside else self.chunks
        return self.stretch(self.tiles.stretches)

    def stretch(self, most: int) -> int:
        """Chunks of a stretch of T, for at most so many stretches."""
        return -(-self.chunks // stretches(self.chunks * self.lanes, most, self.delta))


def _cut(
    found: Tiles, lanes: int, chunks: int, p: int, delta: bool, device: torch.device, alone: bool
) -> tuple[int, int, int]:  # fmt: skip
    """(number of parallel segments of T, chunks a segment, pieces a segment).

    alone: scalar decays without packing, whose pieces need no walk.
    """
    count = segments(chunks, lanes * -(-p // found.piece), delta, limits(device)[1])
    span = -(-chunks // count)
    pieces = finer(span) if count > 1 and alone and not delta else 1
    span += -span % pieces
    return -(-chunks // span), span, pieces


def _chunk_matrix(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, source: Tensor | None, erase: Tensor | None,
    read: Tensor | None, state: Tensor | None, heads: int, log: bool, final: bool, wide: bool,
    normal: Normaliser | None = None, finish: Finish | None = None, kept: list[Tensor] | None = None,
    packed: Sequences | None = None, traits: Traits = Traits(), held: Sequence[Tensor] = (),  # noqa: B008
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y [B, T, H, P] (float32 when `wide`), S_T [B, H, N, P] (empty unless `final`), the inverses kept for backward.

    kept: filled with what else the backward pass can use, where decays differ by key. held: `local` and `passed` of
    `Held`, the inverses, and `_Call.ahead`, if they were found before; empty tensors for what a call does not have.
    """
    call = _Call(
        q, k, v, decay, source, erase, read, heads, log, normal, finish, kept, packed, traits, ahead=held[3:]
    )  # fmt: skip
    call.held = Held(*held[:2]) if held and call.is_cut else None
    if normal is not None:
        normal.read = call.empty(call.batch, heads, call.tokens, dtype=torch.float32).movedim(1, -1)
        assert normal.added is not None
        normal.states, normal.final = between_chunks(call, normal.added, normal.state, False)
    y = call.empty(call.batch, call.tokens, heads, call.p, dtype=torch.float32 if wide else q.dtype)
    solve = held[2] if held else transform(call) if erase is not None else call.empty(0)
    saved = None if kept is None or call.made is None else (call.made.entries, call.made.states)
    marks = kept if call.marks is not None else None
    last, passed = forward(call, solve, state, y, final, saved, marks)
    if kept is not None and call.made is not None:
        kept += call.made._replace(passed=passed if call.is_cut else call.made.passed)
    return y, (call.empty(0, dtype=torch.float32) if last is None else last), solve


def _chunk_matrix_backward(
    dy: Tensor, final_gradient: Tensor | None, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None,
    source: Tensor | None, erase: Tensor | None, read: Tensor | None, state: Tensor | None, solve: Tensor,
    heads: int, log: bool, normal: Normaliser | None = None, kept: Sequence[Tensor] = (),
    packed: Sequences | None = None, skip: Skip | None = None, traits: Traits = Traits(),  # noqa: B008
    held: Sequence[Tensor] = (), wanted: Wanted = Wanted(),  # noqa: B008
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k [B, T, H, N], v [B, T, H, P], the four scalars [B, T, H], r and the state; empty where absent.
    That of fresh write strengths stands in the place of that of b.

    kept: by the forward pass, if it did. held: `_Call.ahead` and, with segments, what `Held` has, if found before.
    """
    call = _Call(q, k, v, decay, source, erase, read, heads, log, normal, None, kept, packed, traits, True, held[:2])
    call.held = Held(*held[2:]) if held and call.is_cut else None
    t, lead = call.tiles, (call.batch, call.tokens, heads)
    dy = dy.contiguous()
    delta = erase is not None
    entries = states = passed = q
    at_once = call.made is None and call.beside and (len(kept) > 0 or call.walked == call.chunks)
    if call.made is not None:
        entries, states, passed = call.made.entries, call.made.states, call.made.passed
    elif not at_once:
        states = call.states(call.chunks)
        if kept:
            passed = kept[1]
            outputs = Outputs(None, None, None, states, None, None)
            forward_launch(call, solve, kept[0], outputs, (0, call.chunks), call.finer)
        elif delta:
            entries = call.entries(call.chunks, call.terms.kept)
    if not kept and not at_once:
        _, passed = forward(call, solve, state, None, False, (entries, states))
    start = None if final_gradient is None else final_gradient.contiguous()
    pieces = -(-call.p // t.gradient_piece)
    parts = (pieces, *lead)
    summed = wanted.summed and packed is None and not call.keywise and min(q.shape[2], k.shape[2]) < heads
    together = sharing(in_turn(call), call.chunks * call.lanes, t.gradient_heads) if summed else 1
    kinds = [torch.float32 if wide else q.dtype for wide in wanted.exact]
    dq, dk = (
        x.new_empty(x.shape, dtype=kind)
        if summed
        else call.empty(*parts, call.n, dtype=kind if pieces == 1 else torch.float32)
        for x, kind in zip((q, k), kinds[:2], strict=True)
    )
    dv = call.empty(*lead, call.p, dtype=kinds[2])
    dr = None
    if call.right is not None:
        dr = call.empty(*parts, call.n, dtype=kinds[3] if pieces == 1 else torch.float32)
    scalars = [
        call.empty(*(parts if x is not None else (1, 0)), dtype=torch.float32)
        for x in (decay, source, erase if delta else call.fresh, read if wanted.read else None)
    ]
    roles = t.gradient_roles if together == 1 else 2
    read_wanted = wanted.read and read is not None
    if skip is not None:
        skip.sums = call.empty(pieces * call.batch * call.chunks, heads, dtype=torch.float32)
    values = Values()
    if call.terms.kept > call.terms.kept_adjoints:  # the reverse walk has their gradients before they are rounded
        if source is not None:
            scalars[1] = call.empty(-(-call.p // t.piece), *lead, dtype=torch.float32)
        values = Values(dv, None if source is None else scalars[1])
    if call.decay:
        scalars[0] = call.empty(roles * pieces, *lead, dtype=torch.float32)
    if together > 1 and read_wanted:
        scalars[3] = call.empty(roles * pieces, *lead, dtype=torch.float32)
    if call.keywise:
        kind = decay_gradient(decay, heads) if pieces == 1 else torch.float32
        scalars = [call.empty(*parts, call.n, dtype=kind), *key_scalars(call, pieces, source, erase, read)]
    of_normal = NormalGradients() if normal is None else gradients_between_chunks(call, normal)
    if at_once:
        walked = both(call, dy, solve, state, start, kept, values)
    else:
        walked = reverse(call, dy, solve, start, passed, states, entries, state is not None, values)
    if wanted.border is not None:
        shape = (call.batch, heads, call.chunks, call.n // 2)
        wanted.border.slopes = call.empty(*shape, dtype=torch.float32)
    for found in walked:
        if wanted.border is not None:
            fill(call, found, wanted.border)
        if call.keywise:
            key_gradients(
                call, dy, found, entries, states, (dq, dk, dv, dr), scalars, source is not None, read_wanted
            )  # fmt: skip
        else:
            row_gradients(
                call, dy, found, (dq, dk, dv), scalars, decay, together, summed, of_normal,
                source is not None, read_wanted, skip,
            )  # fmt: skip
    if not summed:
        dq, dk = (sum_pieces(x, kind) for x, kind in zip((dq, dk), kinds[:2], strict=True))
    ends = [sum_pieces(x, decay_gradient(decay, heads) if x is scalars[0] else torch.float32) for x in scalars]
    ends.append(call.empty(0) if dr is None else sum_pieces(dr, kinds[3]))
    first = call.empty(0, dtype=torch.float32)
    if state is not None and found.last is not None:
        first = call.end(found.last, False)
    return dq, dk, dv, *ends, first
