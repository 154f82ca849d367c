"""The numbers of an impulse response from Params, and the Params' gradients: one launch each, float64.

Printed functions (dsf.triton.print_impulse) work on tiles [entries or pairs, channels] of one head:

    numbers(args, at) -> its numbers, a tuple of tiles
    pull_numbers(args, grads, at, slopes): stores the gradients of Params, summed over the axes that they lack

at: (head, entries, channels, K, P, H, row). Sums over channels are those of a program: each stores a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.sizes import power

TILE = 512  # entries of a tile, which may be more for a long state


@triton.jit
def make_numbers(args, out, H, P, body: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr):
    """out [numbers, H, K, P]. Grid (H, blocks of channels)."""
    lane = tl.program_id(0).to(tl.int64)
    k, channel = tl.arange(0, BK)[:, None], tl.program_id(1) * BP + tl.arange(0, BP)[None, :]
    found = body(args, (lane, k, channel, K, P, H, 0))
    to, plane = out + (lane * K + k) * P + channel, (lane * 0 + H) * (K * P)
    for i in tl.static_range(len(found)):
        tl.store(to + i * plane, found[i], mask=(k < K) & (channel < P))


@triton.jit
def pull_numbers(
    args, given, grads, H, P,
    body: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """From given [ROWS, numbers, H, K, P], whose rows are added. Grid (H, blocks of channels)."""
    lane = tl.program_id(0).to(tl.int64)
    k, channel = tl.arange(0, BK)[:, None], tl.program_id(1) * BP + tl.arange(0, BP)[None, :]
    at, plane = given + (lane * K + k) * P + channel, (lane * 0 + H) * (K * P)
    inside, slopes = (k < K) & (channel < P), ()
    for i in tl.static_range(COUNT):
        slope = tl.load(at + i * plane, mask=inside, other=0.0)
        if ROWS == 2:
            slope += tl.load(at + (COUNT + i) * plane, mask=inside, other=0.0)
        slopes = slopes + (slope,)  # type: ignore[assignment]  # noqa: RUF005
    body(args, grads, (lane, k, channel, K, P, H, tl.program_id(1)), slopes)


def tile(k: int, p: int) -> dict[str, int]:
    """The constants of both launches."""
    entries = power(k)
    channels = min(power(p), max(1, TILE // entries))
    return {"K": k, "BK": entries, "BP": channels, "num_warps": 4 if entries * channels >= 128 else 1}


def rows(k: int, p: int) -> int:
    """How many rows of sums over channels there are."""
    return -(-p // tile(k, p)["BP"])


def make(args: Any, body: Any, sizes: tuple[int, int, int, int], like: Tensor) -> Tensor:
    """The numbers [count, H, K, P]; sizes: these four."""
    count, heads, k, p = sizes
    out = like.new_empty(count, heads, k, p, dtype=torch.float64)
    launch(make_numbers, (heads, rows(k, p)), args, out, heads, p, body=body, **tile(k, p))
    return out


def pull(args: Any, given: Tensor, grads: Any, body: Any) -> None:
    """Store Params' gradients from those of numbers, given [1 or 2, count, H, K, P]."""
    more, count, heads, k, p = given.shape
    launch(
        pull_numbers, (heads, rows(k, p)), args, given, grads, heads, p, body=body, COUNT=count, ROWS=more,
        **tile(k, p),
    )  # fmt: skip
