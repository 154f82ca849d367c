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
    kernels: whether one launch may fold all maps, on the GPU kernels' ranks.
    """

    def __init__(
        self, frame: Frame, layout: Layout, fresh: Sequence[bool], numbers: Sequence[int], ends: bool = True,
        kernels: bool = False,
    ) -> None:  # fmt: skip
        self.frame, self.layout, self.fresh, self.ends = frame, layout, fresh, ends
        self.kernels = kernels and not any(fresh[1:])
        self.low, self.high, self.last = min(numbers), max(numbers), layout.fragments - 1

    def forward(self, rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """rows [ranks, slots, B, H, numbers] -> fragments' initial states from the first one's on, and the tensors for
        `backward`."""
        frame, low = self.frame, self.low
        count = self.last if frame.gain else self.high  # of all states the gain is kept
        if count > 1 and self._in_one(rows):
            return self._launched(rows, 0 if frame.gain else low, count)
        f, m = frame.unpack(rows)
        written = in_order(self.layout, f, 0, count)
        moves: Sequence[Any] = [None] * count if m is None else in_order(self.layout, m, 0, self.last)
        begins = (self.ends and low == 0) or frame.gain or not self.fresh[0]  # else nothing depends on the first state
        first = frame.empty(rows, *rows.shape[2:4]) if begins else f
        states = entered(frame, written, moves[:count], self.fresh[:count], first)
        if count == 1 < self.last:  # F itself, with which all gathered maps would live
            states[1] = states[1].clone()
        kept = []
        if frame.move_numbers and low + 1 < self.last:
            kept.append(torch.stack(list(moves[low + 1 :])))  # a copy, which does not keep the gathered tensor alive
        if frame.gain:
            kept.append(torch.stack([frame.gain_of(s) for s in states]))
        return states, kept

    def _in_one(self, x: Tensor) -> bool:
        """Whether the kernel folds these numbers."""
        if not self.kernels or x.dtype != torch.float32:
            return False
        from dsf.kernels.triton.fold import folds

        return folds(self.frame)

    def _launched(self, rows: Tensor, low: int, count: int) -> tuple[list[Tensor], list[Tensor]]:
        """`forward` in one launch. States before `low`, which nobody reads, are the first one."""
        from dsf.kernels.triton.fold import fold_states, shape_of

        frame, kept = self.frame, list[Tensor]()
        found = fold_states(rows, shape_of(frame), low, count)
        if frame.move_numbers and self.low + 1 < self.last:
            _, moves = frame.unpack(rows)
            assert moves is not None
            later = moves[self.low + 1 : self.last, 0].clone() if self.layout.slots == 1 else None
            if later is None:
                later = torch.stack(list(in_order(self.layout, moves, self.low + 1, self.last)))
            kept.append(later)  # a copy, which does not keep the gathered tensor alive
        if frame.gain:
            kept.append(frame.gain_of(found).clone())
            if self.high - self.low < self.last:  # the others would live as long as those that are saved
                low, found = self.low, found[self.low : self.high + 2].clone()
        states = found.unbind(0)
        return [*states[:1] * low, *states], kept

    def backward(self, own: Tensor, kept: Sequence[Tensor]) -> list[Tensor]:
        """C [ranks, slots, B, H, N, plain] -> G of every fragment from the first of `numbers` on."""
        frame, begin, last = self.frame, self.low + 1, self.last
        end = own.new_zeros(own.shape[2:]) if self.ends and self.high == last else own  # read by nobody else
        if begin < last and self._in_one(own):
            from dsf.kernels.triton.fold import fold_gradients, shape_of

            of_moves, of_gains = (kept[0] if frame.move_numbers else None), (kept[-1] if frame.gain else None)
            return [*fold_gradients(own, of_moves, of_gains, shape_of(frame), self.low).unbind(0), end]
        cs, rest = in_order(self.layout, own, begin, last + 1), list(kept)
        moves: list[Tensor | None] = [None] * len(cs)
        if frame.move_numbers and begin < last:
            moves[:-1] = list(rest.pop(0))
        gains = [*rest.pop(0)[begin:], own] if frame.gain else [own] * (len(cs) + 1)  # the last is never read
        fresh = [*self.fresh[begin:last], True]  # the C of the last fragment contains the gradient of its final state
        return left(frame, cs, moves, fresh[: len(cs)], gains, end)
