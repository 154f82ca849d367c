"""The scan of elementwise transitions together with the readout: states are written once, read in place, not returned.

A sequence may be cut into segments. Then A and B exist for one segment at a time, and unless states are kept, the
backward pass computes them again from the segment's first state (the recomputation of Mamba, arXiv 2312.00752 §3.3.2).
A decay given as two factors of its logarithm is also multiplied out segment by segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.decays import LOG2_E
from dsf.kernels.operators import reduce_to, refuse_second_order
from dsf.kernels.problem import Problem, read
from dsf.kernels.scan import scan_backward_, scan_forward_

BLOCK = 1 << 19  # state numbers in one piece of the decays' gradients (2 MiB a tensor)


@dataclass(frozen=True)
class Cuts:
    """The rows that are read (after the last or before the first of every token's `micro` rows), and the segments.

    span: tokens of a segment. keep: store states for the backward pass instead of computing them again.
    """

    tokens: int
    span: int
    before: bool
    micro: int
    keep: bool

    @property
    def first(self) -> int:
        """The first token of a segment that reads one of its rows; an earlier one reads the segment's first state."""
        return int(self.before)

    @property
    def read_rows(self) -> slice:
        """The rows of a segment that its tokens from `first` on read."""
        return slice(self.micro - 1, -self.micro if self.before else None, self.micro)

    @property
    def every_row(self) -> bool:
        """True when token t reads row t."""
        return not self.before and self.micro == 1

    def segments(self) -> Iterator[tuple[slice, slice]]:
        """Tokens and rows of every segment."""
        for start in range(0, self.tokens, self.span):
            end = min(start + self.span, self.tokens)
            yield slice(start, end), slice(start * self.micro, end * self.micro)


@dataclass(frozen=True)
class Given:
    """The scan's inputs for all tokens or for one segment.

    decay [B|1, R|1, H|1, n, p], its logarithm when `log`; factor: None, or a factor of the logarithm for every row,
    [B|1, R, H|1, n, p] with at most one axis, where `decay` is equal for all rows; key [B, R, H, n, 1],
    value [B, R, H, 1|n, P]; c [B, T, H, n, p].
    """

    decay: Tensor
    factor: Tensor | None
    key: Tensor
    value: Tensor
    c: Tensor
    log: bool

    def cut(self, tokens: slice, rows: slice) -> Given:
        """The inputs of one segment."""
        factor = None if self.factor is None else _cut(self.factor, rows)
        return Given(
            _cut(self.decay, rows), factor, self.key[:, rows], self.value[:, rows], self.c[:, tokens], self.log
        )

    def decays(self, memory: Tensor | None) -> Tensor:
        """The decays [B|1, R, H|1, n, p]; a product is written to `memory`."""
        a = self.decay
        if self.factor is not None:
            assert memory is not None
            shape = torch.Size(map(max, a.shape, self.factor.shape))  # broadcast_shapes takes 0.1 ms
            a = _product(a * LOG2_E, self.factor, _view(memory, shape)).exp2_()
        elif self.log:
            a = a.exp()
        return a.expand(-1, self.key.shape[1], -1, -1, -1)

    def scan(self, a: Tensor, initial: Tensor, memory: Tensor) -> Tensor:
        """The states [B, R, H, N, P] after every row, in `memory`."""
        shape = torch.Size(map(max, self.key.shape, self.value.shape))
        states = _product(self.key, self.value, _view(memory, shape))
        states[:, 0].addcmul_(a[:, 0], initial)
        scan_forward_(a, states)
        return states


def _cut(x: Tensor, rows: slice) -> Tensor:
    """One segment of x, or x itself where it is equal for all rows."""
    return x if x.shape[1] == 1 else x[:, rows]


def _view(memory: Tensor, shape: torch.Size) -> Tensor:
    return memory[: shape.numel()].view(shape)


def _product(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """x · y, written to `out`; in a traced graph by a copy.

    There `out=` would take the strides of x and y (of a transposed Param, for example), and views of it would be lost.
    """
    return torch.mul(x, y, out=out) if type(out) is Tensor else out.copy_(x * y)


def _memory(like: Tensor, cuts: Cuts) -> Tensor:
    """Memory for one segment's states."""
    return like.new_empty(like.numel() * min(cuts.span, cuts.tokens) * cuts.micro)


class ReadScan(torch.autograd.Function):
    """y_t = Σ_n C h, h_r = a_r h_{r-1} + key_r value_rᵀ, by a tree scan; the adjoint is this scan in reversed time."""

    @staticmethod
    def forward(
        ctx: Any, decay: Tensor, factor: Tensor | None, key: Tensor, value: Tensor, c: Tensor, initial: Tensor,
        log: bool, cuts: Cuts,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Inputs as Given has them, initial [B, H, N, P]. Returns y [B, T, H, P] and the last state [B, H, N, P]."""
        given = Given(decay, factor, key, value, c, log)
        y = initial.new_empty(*c.shape[:2], *initial.shape[1::2])
        starts, kept = [initial], []
        products = None if factor is None else _memory(initial, cuts)
        memory = None
        for tokens, rows in cuts.segments():
            piece = given.cut(tokens, rows)
            memory = _memory(initial, cuts) if memory is None or cuts.keep else memory
            a = piece.decays(products)
            states = piece.scan(a, starts[-1], memory)
            _read(piece.c, states, starts[-1], y[:, tokens], cuts)
            starts.append(states[:, -1].clone())
            kept += [states] if cuts.keep else []
        ctx.save_for_backward(decay, factor, key, value, c, *starts[:-1], *kept)
        ctx.log, ctx.cuts = log, cuts
        return y, starts[-1]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """Segment by segment from the last: the gradient of its first state is that of the previous one's last."""
        refuse_second_order()  # the backward pass works in place
        decay, factor, key, value, c, *rest = ctx.saved_tensors
        given, cuts = Given(decay, factor, key, value, c, ctx.log), ctx.cuts
        pieces = list(cuts.segments())
        starts, kept = rest[: len(pieces)], rest[len(pieces) :]
        dy, dstate = cotangents[0].unsqueeze(-2), cotangents[1]
        memory = None if cuts.keep else _memory(dstate, cuts)
        products, spare = (None if factor is None else _memory(dstate, cuts) for _ in range(2))
        found = []
        for index, (tokens, rows) in reversed(list(enumerate(pieces))):
            piece = given.cut(tokens, rows)
            a = piece.decays(products)
            states = kept[index] if memory is None else piece.scan(a, starts[index], memory)
            adjoint, dstate = _adjoint(piece.c, a, states, dy[:, tokens], dstate, cuts, spare)
            found.append(_gradients(ctx, piece, a, states, starts[index], dy[:, tokens], adjoint, cuts))
        inputs = (decay, factor, key, value, c)
        whole = (_join(parts, x) for x, *parts in zip(inputs, *found[::-1], strict=True))
        return *whole, dstate, None, None


def _join(parts: Sequence[Tensor | None], whole: Tensor) -> Tensor | None:
    """Gradients of all segments concatenated, or summed for an input that all segments share."""
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    present = [x for x in parts if x is not None]
    return torch.stack(present).sum(0) if whole.shape[1] == 1 else torch.cat(present, dim=1)


def _read(c: Tensor, states: Tensor, initial: Tensor, y: Tensor, cuts: Cuts) -> None:
    """Compute y of one segment."""
    if cuts.before:
        y[:, 0] = read(c[:, 0], initial)
    y[:, cuts.first :] = read(c[:, cuts.first :], states[:, cuts.read_rows])


def _adjoint(
    c: Tensor, a: Tensor, states: Tensor, dy: Tensor, dlast: Tensor, cuts: Cuts, spare: Tensor | None
) -> tuple[Tensor, Tensor]:
    """G_r = C dyᵀ + a_{r+1} G_{r+1} for one segment, and the gradient of its first state."""
    adjoint = torch.empty_like(states) if spare is None else _view(spare, states.shape)
    if cuts.every_row:
        _product(c.expand_as(states), dy, adjoint)
    else:
        adjoint.zero_()[:, cuts.read_rows] = c[:, cuts.first :] * dy[:, cuts.first :]
    adjoint[:, -1] += dlast
    scan_backward_(a[:, 1:], adjoint)
    first = a[:, 0] * adjoint[:, 0]
    return adjoint, first + c[:, 0] * dy[:, 0] if cuts.before else first


def _gradients(
    ctx: Any, piece: Given, a: Tensor, states: Tensor, initial: Tensor, dy: Tensor, adjoint: Tensor, cuts: Cuts
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """One segment's dkey = G value, dvalue = keyᵀ G, dC = h dy, da_r = ⟨G_r, h_{r-1}⟩ and its factors'."""
    key, value, c = piece.key, piece.value, piece.c
    dc = c.new_empty(c.shape)
    dc[:, cuts.first :] = _contract(states[:, cuts.read_rows], dy[:, cuts.first :], c.shape)
    if cuts.before:
        dc[:, 0] = _contract(initial, dy[:, 0], c.shape[:1] + c.shape[2:])
    dkey = _contract(adjoint, value, key.shape) if ctx.needs_input_grad[2] else None
    written = key.transpose(-1, -2) @ adjoint if value.shape[-2] == 1 else adjoint * key
    return *_decay_gradients(piece, a, states, initial, adjoint), dkey, reduce_to(written, value.shape), dc


def _decay_gradients(
    piece: Given, a: Tensor, states: Tensor, initial: Tensor, adjoint: Tensor
) -> tuple[Tensor, Tensor | None]:
    """da_r = ⟨G_r, h_{r-1}⟩ and from it the gradients of the decay and its factor; they overwrite G."""
    adjoint[:, 0].mul_(initial)
    if piece.factor is None:
        adjoint[:, 1:].mul_(states[:, :-1])
        return reduce_to(adjoint.mul_(a) if piece.log else adjoint, piece.decay.shape), None
    rows = max(1, BLOCK * adjoint.shape[1] // adjoint.numel())
    ddecay, dfactor = torch.zeros_like(piece.decay), torch.empty_like(piece.factor)
    spare = torch.empty_like(adjoint[:, :rows])
    for start in range(0, adjoint.shape[1], rows):
        block, end = slice(start, start + rows), min(start + rows, adjoint.shape[1])
        x, factor, seen = adjoint[:, block], piece.factor[:, block], max(start, 1)
        adjoint[:, seen:end].mul_(states[:, seen - 1 : end - 1])
        x.mul_(a[:, block])
        weighed = _product(x, piece.decay, spare[:, : x.shape[1]])
        dfactor[:, block] = reduce_to(weighed, factor.shape)
        ddecay += reduce_to(_product(x, factor, weighed), ddecay.shape)
    return ddecay, dfactor


def _contract(states: Tensor, row: Tensor, shape: torch.Size) -> Tensor:
    """states ⊙ row summed to [..., n, p] = shape: states [..., N, P], row [..., 1|N, P]."""
    if shape[-1] == 1 and row.shape[-2] == 1 and shape[-2] == states.shape[-2]:
        return reduce_to(states @ row.transpose(-1, -2), shape)
    return reduce_to(states * row, shape)


def scan_elementwise(
    problem: Problem, state: Tensor | None, span: int | None = None, keep: bool = True
) -> tuple[Tensor, Tensor]:
    """The scan form of all transitions without corrections: y [B, T, H, P] and the final state.

    span: tokens of a segment, by default all; keep: store states for the backward pass instead of computing them again.
    """
    initial = problem.zero_state() if state is None else state
    if problem.dense is None and problem.key is not None and problem.key.shape[3] == 1:
        assert problem.value is not None
        key, value = problem.key.transpose(-1, -2), problem.value
    else:  # several terms, or an injection that does not factor: as a dense B
        value = problem.injection()
        key = value.new_ones(()).expand(*value.shape[:-1], 1)
    cuts = Cuts(problem.tokens, span or problem.tokens, problem.before, problem.micro, keep)
    y, final = ReadScan.apply(problem.decay, problem.factor, key, value, problem.readout, initial, problem.log, cuts)
    return problem.add_skip(y), final
