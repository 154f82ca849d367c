"""Gradients of queries and keys that heads share: made a stretch of T at a time, and summed over the heads at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Stretch(NamedTuple):
    """Chunks from `first` on, whose gradients go to dq and dk [slices, B, rows, H, N] of tokens from `shift` on."""

    first: int
    chunks: int
    shift: int
    rows: int
    dq: Tensor
    dk: Tensor


def stretches_of(
    first: int, count: int, span: int, chunk: int, tokens: int, parts: tuple[int, ...], sums: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> Iterator[Stretch]:  # fmt: skip
    """`span` chunks at a time of `count`; what is written to each is summed, in float32, into sums [B, T, heads, N].

    parts: slices, B, H, N of what the kernel writes, in `dtype`.
    """
    slices, batch, heads, n = parts
    for begin in range(first, first + count, span):
        here = min(span, first + count - begin)
        shift = begin * chunk
        rows = min(here * chunk, tokens - shift)
        apart = [torch.empty(slices, batch, rows, heads, n, dtype=dtype, device=sums[0].device) for _ in range(2)]
        yield Stretch(begin, here, shift, rows, *apart)
        for x, total in zip(apart, sums, strict=True):
            grouped = x.unflatten(3, (total.shape[2], -1))
            total[:, shift : shift + rows] = grouped.sum((0, 4), dtype=torch.float32)
