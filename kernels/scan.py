"""The parallel-scan form: an associative combine of (A, B) in O(log T) steps, for every structure.

(A2, B2) ∘ (A1, B1) = (A2 A1, A2 B1 + B2). Elementwise transitions are carried as they are; transitions with
rank-one corrections are first summed up in short blocks (dsf.kernels.chunk) and scanned as dense [N, N] matrices.
The tree is work-efficient (odd-even reduction): 2 log2 T steps, fewer than 2T combines (Blelloch, 1990).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import reduce_to
from dsf.kernels.problem import Problem, read, states_before

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


def scan_backward_(a: Tensor, b: Tensor) -> None:
    """b_t ← a_t b_{t+1} + b_t along axis 1, in place: the same tree, seen from the other end."""
    length = b.shape[1]
    if length == 1:
        return
    early, late = slice(length % 2, length - 1, 2), slice(length % 2 + 1, length, 2)
    b[:, early].addcmul_(a[:, early], b[:, late])
    if length > 3:
        scan_backward_(a[:, early] * a[:, late], b[:, early])
    rest = slice((length + 1) % 2, length - 2, 2)
    b[:, rest].addcmul_(a[:, rest], b[:, (length + 1) % 2 + 1 : length - 1 : 2])


class AffineScan(torch.autograd.Function):
    """h_t = a_t h_{t-1} + b_t along axis 1 as a tree, with its adjoint: the same scan backwards in time."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, initial: Tensor) -> Tensor:
        """a, b: [B, T, ...] (a may have size-one axes after T), initial: [B, ...]. Returns h [B, T, ...]."""
        states = b.clone(memory_format=torch.contiguous_format)
        states[:, 0].addcmul_(a[:, 0], initial)
        scan_forward_(a, states)
        ctx.save_for_backward(a, states, initial)
        return states

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """G_t = dy_t + a_{t+1} G_{t+1};  db = G,  da_t = ⟨G_t, h_{t-1}⟩,  dh_0 = a_1 G_1."""
        a, states, initial = ctx.saved_tensors
        adjoint = cotangents[0].clone(memory_format=torch.contiguous_format)
        scan_backward_(a.roll(-1, 1), adjoint)  # the last entry, a_1, multiplies nothing
        da = torch.empty_like(adjoint)
        torch.mul(adjoint[:, 1:], states[:, :-1], out=da[:, 1:])
        torch.mul(adjoint[:, 0], initial, out=da[:, 0])
        return reduce_to(da, a.shape), adjoint, a[:, 0] * adjoint[:, 0]


def affine_scan(a: Tensor, b: Tensor, initial: Tensor) -> Tensor:
    """All states of h_t = a_t h_{t-1} + b_t: a [B, T, ...] broadcastable to b [B, T, ...], initial [B, ...]."""
    a = a.expand(*b.shape[:2], *a.shape[2:])
    return AffineScan.apply(a, b, initial)


def scan_elementwise(problem: Problem, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scan form of every transition without corrections. Returns y [B, T, H, P] and the final state."""
    initial = problem.zero_state() if state is None else state
    states = affine_scan(problem.transition().decay, problem.injection(), initial)
    final = states[:, -1]
    if problem.micro > 1:
        states = states[:, problem.micro - 1 :: problem.micro]
    if problem.before:
        states = states_before(states, initial)
    return problem.add_skip(read(problem.readout, states)), final
