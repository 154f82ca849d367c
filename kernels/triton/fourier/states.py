"""The state after the last token of a time-invariant system: one launch, by sums as in impulse.py's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels.triton.impulse import ACROSS, LOWEST, gathered, pushed, tiles, turns
from dsf.kernels.triton.launch import launch


@triton.jit
def _sums(source, last, j, down, rate, turn, inside, TURNED: tl.constexpr):
    """Σ_l z^l source[last - l] over l of one tile, real and imaginary, float64."""
    at = down.to(tl.int32) + j[None, :]
    given = tl.load(source + (last - at), mask=inside & (at <= last), other=0.0)
    inner = gathered(given, j, rate, turn, TURNED)
    return pushed((inner[0], inner[1]), down, rate, turn, TURNED)


@triton.jit(do_not_specialize=["length", "coarse", "points", "heads"])
def impulse_state(
    u, args, state, out, heads, P, length, fine, coarse, points,
    read: tl.constexpr, K: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, TURNED: tl.constexpr,
    KEYED: tl.constexpr,
):  # fmt: skip
    """The state after the last token: Σ_l A^l b u[length - 1 - l] + A^length state, [B, H, N, P].

    u: [B, H, P (KEYED: N), points]. Grid (B · H · P, blocks of K; KEYED: K).
    """
    row = tl.program_id(0).to(tl.int64)
    channel, lane = row % P, row // P
    own = tl.program_id(1)
    k = (own // BK if KEYED else own) * BK + tl.arange(0, BK)
    inside = k == own if KEYED else k < K
    found = read(args, lane % heads, channel, k, inside)
    rate, turn = tl.maximum(found[0], LOWEST), found[1]
    first, second = tl.zeros([BK], tl.float64), tl.zeros([BK], tl.float64)
    for entry in tl.static_range(2 if KEYED and TURNED else 1):
        line = row
        if KEYED:
            line = lane * (2 * K) + 2 * own + entry if TURNED else lane * K + own
        b0, b1 = found[4 + 2 * entry], found[5 + 2 * entry]
        for top in range(0, coarse, BI):
            down = ((top + tl.arange(0, BI)) * fine).to(tl.float64)[:, None]
            for left in range(0, fine, BJ):
                j = left + tl.arange(0, BJ)
                real, imaginary = _sums(u + line * points, length - 1, j, down, rate, turn, (j < fine)[None, :], TURNED)
                first += b0 * real - b1 * imaginary if TURNED else b0 * real
                second += b0 * imaginary + b1 * real
    at = (lane * (2 * K if TURNED else K) + (2 * k if TURNED else k)) * P + channel
    if state is not None:
        s0, s1 = tl.load(state + at, mask=inside, other=0.0).to(tl.float64), 0.0
        if TURNED:
            s1 = tl.load(state + at + P, mask=inside, other=0.0).to(tl.float64)
        cosine, sine = turns(length.to(tl.float64), rate, turn, TURNED)
        first += s0 * cosine - s1 * sine if TURNED else s0 * cosine
        second += s0 * sine + s1 * cosine
    tl.store(out + at, first, mask=inside)
    if TURNED:
        tl.store(out + at + P, second, mask=inside)


def run_state(
    u: Tensor, args: Any, state: Tensor | None, out: Tensor, sizes: tuple[int, int, int, int], read: Callable[..., Any],
    **named: Any,
) -> None:  # fmt: skip
    """Launch impulse_state for u [R, points] and out [B, H, N, P]. sizes: tokens, `fine`, K, H."""
    length, fine, k, heads = sizes
    batch, _, _, p = out.shape
    constants = tiles(length, fine, k, ACROSS // 2)
    grid = batch * heads * p, k if named["KEYED"] else -(-k // constants["BK"])
    launch(
        impulse_state, grid, u, args, state, out, heads, p, length, fine, -(-length // fine), u.shape[-1], read=read,
        **named, **constants,
    )  # fmt: skip
