"""The numbers of an impulse response from Params, and the Params' gradients: one launch each, float64.

Printed functions (dsf.triton.print_impulse) work on tiles [entries or pairs, channels] of one head:

    numbers(args, at) -> its numbers, a tuple of tiles
    pull_numbers(args, grads, at, slopes): stores the gradients of Params, summed over the axes that they lack

at: (head, entries, channels, K, P, H, row). Sums over channels are those of a program: each stores a row.

read_*, pull_*: what the impulse response's kernels (impulse.py) read and store where printed expressions made its
numbers.
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


@triton.jit
def _made(args, lane, channel, k):
    """The addresses of the first number, and how far the next one lies. args: address, numbers, H, K, P."""
    made, _, heads, K, P = args
    return made + (lane * K + k) * P + channel, heads * K * P


@triton.jit
def read_made_pairs(args, lane, channel, k, inside):
    """The numbers of pairs from [6 or 8, H, K, P]. args: as those of _made."""
    at, plane = _made(args, lane, channel, k)
    rate, turn = tl.load(at, mask=inside, other=0.0), tl.load(at + plane, mask=inside, other=0.0)
    c0, c1 = tl.load(at + 2 * plane, mask=inside, other=0.0), tl.load(at + 3 * plane, mask=inside, other=0.0)
    b0, b1 = tl.load(at + 4 * plane, mask=inside, other=0.0), tl.load(at + 5 * plane, mask=inside, other=0.0)
    more = inside & (args[1] > 6)
    b2, b3 = tl.load(at + 6 * plane, mask=more, other=0.0), tl.load(at + 7 * plane, mask=more, other=0.0)
    return rate, turn, c0, c1, b0, b1, b2, b3


@triton.jit
def read_made_entries(args, lane, channel, k, inside):
    """The numbers of entries from [3, H, K, P]. args: as those of _made."""
    at, plane = _made(args, lane, channel, k)
    rate, c0 = tl.load(at, mask=inside, other=0.0), tl.load(at + plane, mask=inside, other=0.0)
    b0 = tl.load(at + 2 * plane, mask=inside, other=0.0)
    return rate, rate, c0, c0, b0, b0, b0, b0


@triton.jit
def read_state_pairs(args, lane, channel, k, inside):
    """As read_made_pairs, with states [B, H, 2 K, P] in place of B. args: those, and the address; lane: of B · H."""
    made, count, heads, K, P, state = args
    found = read_made_pairs((made, count, heads, K, P), lane % heads, channel, k, inside)
    at = state + (lane * 2 * K + 2 * k) * P + channel
    s0, s1 = tl.load(at, mask=inside, other=0.0), tl.load(at + P, mask=inside, other=0.0)
    return found[0], found[1], found[2], found[3], s0, s1, s0, s1


@triton.jit
def read_state_entries(args, lane, channel, k, inside):
    """As read_made_entries, with states [B, H, K, P] in place of B. args, lane: as those of read_state_pairs."""
    made, count, heads, K, P, state = args
    found = read_made_entries((made, count, heads, K, P), lane % heads, channel, k, inside)
    s0 = tl.load(state + (lane * K + k) * P + channel, mask=inside, other=0.0)
    return found[0], found[1], found[2], found[3], s0, s0, s0, s0


@triton.jit
def pull_made_pairs(grads, at, slopes):
    """The gradients [1 or 2, 6 or 8, H, K, P] of what read_made_pairs reads; a row for each input of a pair."""
    lane, channel, k, inside, half, heads, P, K = at
    made, count = grads
    plane = heads * K * P
    to = made + half * count * plane + (lane * K + k) * P + channel
    for i in tl.static_range(6):
        tl.store(to + i * plane, slopes[i], mask=inside)
    for i in tl.static_range(6, 8):
        tl.store(to + i * plane, slopes[i], mask=inside & (count > 6))


@triton.jit
def pull_made_entries(grads, at, slopes):
    """The gradients [1, 3, H, K, P] of what read_made_entries reads."""
    lane, channel, k, inside, _, heads, P, K = at
    made, _ = grads
    plane = heads * K * P
    to = made + (lane * K + k) * P + channel
    for i in tl.static_range(3):
        tl.store(to + i * plane, slopes[2 * i], mask=inside)
