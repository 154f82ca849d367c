"""The parallel-scan form: an associative combine of (A, B) in O(log T) steps, for every structure.

(A2, B2) ∘ (A1, B1) = (A2 A1, A2 B1 + B2). Elementwise transitions are carried as they are; transitions with
rank-one corrections are first summed up in short blocks (dsf.kernels.chunk) and scanned as dense [N, N] matrices.
The tree is work-efficient (odd-even reduction): 2 log2 T steps, fewer than 2T combines (Blelloch, 1990).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import reduce_to, refuse_second_order
from dsf.kernels.problem import Problem, read

Pair = tuple[Tensor, Tensor]


def associative_scan(combine: Callable[[Pair, Pair], Pair], first: Tensor, second: Tensor) -> Pair:
    """Inclusive scan over axis 1 of the pairs (first, second). combine(earlier, later) -> pair."""
    length = first.shape[1]
    if length == 1:
        return first, second
    even = (first[:, 0 : length - 1 : 2], second[:, 0 : length - 1 : 2])
    odd = (first[:, 1::2], second[:, 1::2])
    odd = associative_scan(combine, *combine(even, odd))  # prefixes ending at 1, 3, 5, …
    rest = (first[:, 2::2], second[:, 2::2])
    count = rest[0].shape[1]
    if count:
        rest = combine((odd[0][:, :count], odd[1][:, :count]), rest)
    return tuple(  # type: ignore[return-value]
        _interleave(torch.cat([x[:, :1], r], dim=1) if count else x[:, :1], o)
        for x, r, o in zip((first, second), rest, odd, strict=True)
    )


def _interleave(even: Tensor, odd: Tensor) -> Tensor:
    """e0, o0, e1, o1, …; even has as many entries as odd, or one more."""
    paired = torch.stack([even[:, : odd.shape[1]], odd], dim=2).flatten(1, 2)
    return paired if even.shape[1] == odd.shape[1] else torch.cat([paired, even[:, -1:]], dim=1)


def combine_dense(earlier: Pair, later: Pair) -> Pair:
    """(A2 A1, A2 B1 + B2) with matrices A [..., N, N]."""
    return later[0] @ earlier[0], later[0] @ earlier[1] + later[1]


def scan_forward_(a: Tensor, b: Tensor) -> None:
    """b_t ← a_t b_{t-1} + b_t along axis 1, in place, as a tree. a may have size-one axes after axis 1."""
    pairs, odd = b.shape[1] // 2, b[:, 1::2]
    if not pairs:
        return
    even = slice(0, 2 * pairs, 2)
    odd.addcmul_(a[:, 1::2], b[:, even])
    if pairs > 1:
        scan_forward_(a[:, 1::2] * a[:, even], odd)
    b[:, 2::2].addcmul_(a[:, 2::2], b[:, 1:-1:2])


def scan_backward_(links: Tensor, b: Tensor) -> None:
    """b_t ← links_t b_{t+1} + b_t along axis 1, in place: the same tree, seen from the other end.

    links has one entry fewer than b.
    """
    length = b.shape[1]
    if length == 1:
        return
    first = length % 2
    early, late = slice(first, length - 1, 2), slice(first + 1, length, 2)
    b[:, early].addcmul_(links[:, early], b[:, late])
    if length > 3:
        scan_backward_(links[:, early][:, :-1] * links[:, first + 1 : length - 1 : 2], b[:, early])
    rest = slice(1 - first, length - 2, 2)
    b[:, rest].addcmul_(links[:, rest], b[:, 2 - first : length - 1 : 2])


@dataclass(frozen=True)
class Reads:
    """Which rows are read: after the last, or before the first, of every token's `micro` rows."""

    before: bool
    micro: int

    @property
    def every_row(self) -> bool:
        """True when token t reads row t."""
        return not self.before and self.micro == 1

    @property
    def first(self) -> int:
        """First token that reads one of the rows (a first read before any row sees the initial state)."""
        return int(self.before)

    @property
    def rows(self) -> slice:
        """The rows read by the tokens from `first` on."""
        return slice(self.micro - 1, -self.micro if self.before else None, self.micro)


class ReadScan(torch.autograd.Function):
    """y_t = Σ_n C h with h_r = a_r h_{r-1} + key_r value_rᵀ as a tree; its adjoint is the same tree backwards in time.

    Injection, scan and readout are one step, so that states are written once and read in place.
    """

    @staticmethod
    def forward(
        ctx: Any, decay: Tensor, log: bool, key: Tensor, value: Tensor, c: Tensor, initial: Tensor, reads: Reads
    ) -> tuple[Tensor, Tensor]:
        """decay [B|1, R|1, H|1, n, p] (its logarithm when `log`), key [B, R, H, n, 1], value [B, R, H, 1|n, P].

        c: [B, T, H, n, p]; initial: [B, H, N, P]. Returns y [B, T, H, P] and the last state [B, H, N, P].
        """
        a = decay.exp() if log else decay
        states = key * value
        states[:, 0].addcmul_(a[:, 0], initial)
        scan_forward_(a.expand(-1, states.shape[1], -1, -1, -1), states)
        ctx.save_for_backward(a, key, value, c, initial, states)
        ctx.shape, ctx.log, ctx.reads = decay.shape, log, reads
        y = states.new_empty(*c.shape[:3], states.shape[-1])
        if reads.before:
            y[:, 0] = read(c[:, 0], initial)
        y[:, reads.first :] = read(c[:, reads.first :], states[:, reads.rows])
        return y, states[:, -1].clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """G_r = C dyᵀ + a_{r+1} G_{r+1};  da_r = ⟨G_r, h_{r-1}⟩, dkey = G value, dvalue = keyᵀ G, dC = h dy."""
        refuse_second_order()  # it works in place
        a, key, value, c, initial, states = ctx.saved_tensors
        dy, dfinal = cotangents[0].unsqueeze(-2), cotangents[1]
        reads: Reads = ctx.reads
        if reads.every_row:
            adjoint = (c * dy).expand_as(states).contiguous()
        else:
            adjoint = torch.zeros_like(states)
            adjoint[:, reads.rows] = c[:, reads.first :] * dy[:, reads.first :]
        adjoint[:, -1] += dfinal
        full = a.expand(-1, states.shape[1], -1, -1, -1)
        scan_backward_(full[:, 1:], adjoint)
        dinitial = full[:, 0] * adjoint[:, 0]
        dc = c.new_empty(c.shape)
        dc[:, reads.first :] = _contract(states[:, reads.rows], dy[:, reads.first :], c.shape)
        if reads.before:
            dinitial = dinitial + c[:, 0] * dy[:, 0]
            dc[:, 0] = _contract(initial, dy[:, 0], c.shape[:1] + c.shape[2:])
        dkey = _contract(adjoint, value, key.shape) if ctx.needs_input_grad[2] else None
        dvalue = key.transpose(-1, -2) @ adjoint if value.shape[-2] == 1 else reduce_to(adjoint * key, value.shape)
        return _decay_gradient(a, adjoint, states, initial, ctx), None, dkey, dvalue, dc, dinitial, None


def _contract(states: Tensor, row: Tensor, shape: torch.Size) -> Tensor:
    """states ⊙ row summed to [..., n, p] = shape: states [..., N, P], row [..., 1|N, P]."""
    if shape[-1] == 1 and row.shape[-2] == 1 and shape[-2] == states.shape[-2]:
        return states @ row.transpose(-1, -2)
    return reduce_to(states * row, torch.Size((*states.shape[:-2], *shape[-2:])))


def _decay_gradient(a: Tensor, adjoint: Tensor, states: Tensor, initial: Tensor, ctx: Any) -> Tensor:
    """⟨G_r, h_{r-1}⟩, times a where the decay came as its logarithm."""
    da = torch.empty_like(adjoint)
    torch.mul(adjoint[:, 1:], states[:, :-1], out=da[:, 1:])
    torch.mul(adjoint[:, 0], initial, out=da[:, 0])
    return reduce_to(da.mul_(a) if ctx.log else da, ctx.shape)


def scan_elementwise(problem: Problem, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scan form of every transition without corrections. Returns y [B, T, H, P] and the final state."""
    initial = problem.zero_state() if state is None else state
    if problem.dense is None and problem.key is not None and problem.key.shape[3] == 1:
        assert problem.value is not None
        key, value = problem.key.transpose(-1, -2), problem.value
    else:  # several terms, or an injection that does not factor: written out
        value = problem.injection()
        key = value.new_ones(()).expand(*value.shape[:-1], 1)
    reads = Reads(problem.before, problem.micro)
    y, final = ReadScan.apply(problem.decay, problem.log, key, value, problem.readout, initial, reads)
    return problem.add_skip(y), final
