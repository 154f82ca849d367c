"""What the attention kernels read and write: their arguments, tiles of tokens, and differences of running sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton.attention.sums import NEAR
from dsf.kernels.triton.functions import LOG2E
from dsf.kernels.triton.structs import Config


class Attended(NamedTuple):
    """q, k, v, c and the scale of scores; of q, k and v the numbers of heads and the strides of tokens."""

    q: Any
    k: Any
    v: Any
    c: Any
    scale: Any
    H: Any
    HK: Any
    HV: Any
    q_step: Any
    k_step: Any
    v_step: Any


@dataclass(frozen=True, repr=False)
class Tiles(Config):
    """WINDOW: how many tokens a row sees, 0 for all. BIASED: there is c. R rows (queries) and C columns (keys) a tile.

    WIDE: float32 inputs, where the gradient of c is summed in float64 and every tile is made like a part. TWICE: rows
    and columns need the same bits of ds, so rows sum them before they make them again. LAST: Q is less than T; else
    kernels take T for it, and keep one number less. N, P: the widths of keys and values; D, E: the same, filled up to a
    power of two.
    """

    WINDOW: int
    BIASED: bool
    WIDE: bool
    TWICE: bool
    LAST: bool
    R: int
    C: int
    N: int
    P: int
    D: int
    E: int


@triton.jit
def within(at, T, LAST: tl.constexpr):
    """Which of T tokens there are. Only of the LAST ones some come before the first."""
    return (at >= 0) & (at < T) if LAST else at < T


@triton.jit
def load_tile(
    x, b, h, STEP, first, T, SIZE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
    LAST: tl.constexpr = False,
):  # fmt: skip
    """SIZE rows of head h of x [B, T, ·, WIDTH] from `first` on, zeros beyond its width and, of a PART, beyond T. STEP:
    the stride of tokens."""
    at, d = tl.arange(0, SIZE), tl.arange(0, D)
    place = x + (b.to(tl.int64) * T + first) * STEP + h * WIDTH + at[:, None] * STEP + d[None]
    if PART:
        return tl.load(place, mask=within(first + at, T, LAST)[:, None] & (d < WIDTH)[None], other=0.0)
    if WIDTH < D:
        return tl.load(place, mask=(at >= 0)[:, None] & (d < WIDTH)[None], other=0.0)
    return tl.load(place)


@triton.jit
def store_tile(
    x, value, b, h, STEP, first, T, SIZE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    LAST: tl.constexpr = False,
):  # fmt: skip
    """Write what `load_tile` reads."""
    at, d = tl.arange(0, SIZE), tl.arange(0, D)
    place = x + (b.to(tl.int64) * T + first) * STEP + h * WIDTH + at[:, None] * STEP + d[None]
    tl.store(place, value.to(x.dtype.element_ty), mask=within(first + at, T, LAST)[:, None] & (d < WIDTH)[None])


@triton.jit
def load_vector(x, bh, at, T, other=0.0, LAST: tl.constexpr = False):
    """Numbers `at` of one head of x [B, H, T]."""
    return tl.load(x + bh.to(tl.int64) * T + at, mask=within(at, T, LAST), other=other)


@triton.jit
def since(c, bh, at, row, T):
    """c of the tokens `at` minus c of one token, in the units of exponents of 2."""
    high = load_vector(c, 3 * bh, at, T) - tl.load(c + (3 * bh).to(tl.int64) * T + row)
    return (high + (load_vector(c, 3 * bh + 1, at, T) - tl.load(c + (3 * bh + 1).to(tl.int64) * T + row))) * LOG2E


@triton.jit
def between(c, first, row, T):
    """c of the token where the NEAR tokens of `first` begin minus c of one token, in the units of exponents of 2. c: of
    one head."""
    begin = first // NEAR * NEAR
    return (tl.load(c + begin) - tl.load(c + row) + (tl.load(c + T + begin) - tl.load(c + T + row))) * LOG2E


@triton.jit
def near_sums(c, bh, first, row, T, SIZE: tl.constexpr, PART: tl.constexpr):
    """(c of SIZE tokens from `first` on minus c of the token where their NEAR tokens begin, the latter minus c of one
    token), in the units of exponents of 2."""
    c, at = c + (3 * bh).to(tl.int64) * T, first + tl.arange(0, SIZE)
    less = between(c, first, row, T)
    if PART:
        return tl.load(c + 2 * T + at, mask=at < T, other=0.0), less
    return tl.load(c + 2 * T + at), less


@triton.jit
def difference(c, bh, rows, columns, T):
    """c of rows minus c of columns, [rows, columns]."""
    high = load_vector(c, 3 * bh, rows, T)[:, None] - load_vector(c, 3 * bh, columns, T)[None]
    return high + (load_vector(c, 3 * bh + 1, rows, T)[:, None] - load_vector(c, 3 * bh + 1, columns, T)[None])
