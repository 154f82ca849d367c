"""The fold of fragments' maps, gathered from all ranks, to their initial states, and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.affine import Frame, entered, left
from dsf.parallel.layout import Layout


def in_order(layout: Layout, x: Tensor, begin: int, end: int) -> Sequence[Tensor]:
    """Fragments begin ... end of [ranks, slots, ...], in the sequence's order."""
    if layout.slots == 1:
        return x[begin:end, 0].unbind(0)
    return [x[layout.owner(n)] for n in range(begin, end)]


def by_owner(layout: Layout, xs: Sequence[Tensor]) -> Tensor:
    """The inverse: [ranks, slots, ...]."""
    rows = [xs[layout.number(r, s)] for r in range(layout.ranks) for s in range(layout.slots)]
    return torch.stack(rows).unflatten(0, (layout.ranks, layout.slots))


class Fold:
    """The fold over all fragments' maps, and its backward; for all heads or for a share of them.

    numbers: the fragments whose states and gradients are wanted, from the first of these to the last. ends: whether
    the first fragment's initial state and the gradient of the last one's final state, which are zeros, are among them.
    """

    def __init__(
        self, frame: Frame, layout: Layout, fresh: Sequence[bool], numbers: Sequence[int], ends: bool = True
    ) -> None:
        self.frame, self.layout, self.fresh, self.ends = frame, layout, fresh, ends
        self.low, self.high, self.last = min(numbers), max(numbers), layout.fragments - 1

    def forward(self, rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """rows [ranks, slots, B, H, numbers] -> fragments' initial states from the first one's on, and the tensors for
        `backward`."""
        frame, low = self.frame, self.low
        f, m = frame.unpack(rows)
        count = self.last if frame.gain else self.high  # of all states the gain is kept
        written = in_order(self.layout, f, 0, count)
        moves: Sequence[Any] = [None] * count if m is None else in_order(self.layout, m, 0, self.last)
        begins = (self.ends and low == 0) or frame.gain or not self.fresh[0]  # else nothing depends on the first state
        first = frame.empty(rows, *rows.shape[2:4]) if begins else f
        states = entered(frame, written, moves[:count], self.fresh[:count], first)
        kept = []
        if frame.move_numbers and low + 1 < self.last:
            kept.append(torch.stack(list(moves[low + 1 :])))  # a copy, which does not keep the gathered tensor alive
        if frame.gain:
            kept.append(torch.stack([frame.gain_of(s) for s in states]))
        return states, kept

    def backward(self, own: Tensor, kept: Sequence[Tensor]) -> list[Tensor]:
        """C [ranks, slots, B, H, N, plain] -> G of every fragment from the first of `numbers` on."""
        frame, begin, last = self.frame, self.low + 1, self.last
        cs, rest = in_order(self.layout, own, begin, last + 1), list(kept)
        moves: list[Tensor | None] = [None] * len(cs)
        if frame.move_numbers and begin < last:
            moves[:-1] = list(rest.pop(0))
        gains = [*rest.pop(0)[begin:], own] if frame.gain else [own] * (len(cs) + 1)  # the last is never read
        fresh = [*self.fresh[begin:last], True]  # the C of the last fragment contains the gradient of its final state
        end = own.new_zeros(own.shape[2:]) if self.ends and self.high == last else own  # read by nobody else
        return left(frame, cs, moves, fresh[: len(cs)], gains, end)
