"""The parallel-scan form: an associative combine of (A, B) in O(log T) steps, for every structure.

(A2, B2) ∘ (A1, B1) = (A2 A1, A2 B1 + B2). Elementwise transitions are carried as they are; transitions with
rank-one corrections are first summed up in short blocks (dsf.kernels.chunk) and scanned as dense [N, N] matrices.
The tree is work-efficient (odd-even reduction): 2 log2 T steps, fewer than 2T combines (Blelloch, 1990).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
LEAF = 4  # entries that are combined one after another: below, a tree's levels cost more than they save


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
    if b.shape[1] <= LEAF:
        decays, rows = a.unbind(1), b.unbind(1)
        for t in range(1, len(rows)):
            rows[t].addcmul_(decays[t], rows[t - 1])
        return
    even, odd = slice(0, b.shape[1] // 2 * 2, 2), slice(1, None, 2)
    late, ends = a[:, odd], b[:, odd]
    ends.addcmul_(late, b[:, even])
    scan_forward_(late * a[:, even], ends)
    b[:, 2::2].addcmul_(a[:, 2::2], b[:, 1:-1:2])


def scan_backward_(links: Tensor, b: Tensor) -> None:
    """b_t ← links_t b_{t+1} + b_t along axis 1, in place: the same tree, seen from the other end.

    links has one entry fewer than b.
    """
    length = b.shape[1]
    if length <= LEAF:
        decays, rows = links.unbind(1), b.unbind(1)
        for t in range(length - 2, -1, -1):
            rows[t].addcmul_(decays[t], rows[t + 1])
        return
    first = length % 2
    early, late = slice(first, length - 1, 2), slice(first + 1, length, 2)
    near, starts = links[:, early], b[:, early]
    starts.addcmul_(near, b[:, late])
    scan_backward_(near[:, :-1] * links[:, first + 1 : length - 1 : 2], starts)
    rest = slice(1 - first, length - 2, 2)
    b[:, rest].addcmul_(links[:, rest], b[:, 2 - first : length - 1 : 2])
