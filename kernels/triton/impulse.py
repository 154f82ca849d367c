"""The impulse response of a time-invariant system with diagonal transitions, and its gradient: one launch each.

h_l = Σ_k e^{l log_k} ((c0 b0 + c1 b1) cos lθ_k + (c1 b0 - c0 b1) sin lθ_k) over pairs of entries that turn by θ, or
Σ_n c_n b_n e^{l log_n} without turns: cᵀ A^l b. With l = i m + j it is a product of two tables, (Aᵀ)^{i m} c and A^j b,
each of about √T rows, which a program makes where it needs them (kernels/invariant.py, whose torch form has them in
memory). Exponents and angles are float64 until whole powers of two and whole turns are taken from them, the rest is
float32.

Both kernels call holes for the numbers of the entries (or pairs) k [BK] of one head, `lane`, and channel:

    read(args, lane, channel, k, inside) -> log, θ, c0, c1, b0, b1, b2, b3: float64 [BK], 0 where not `inside`
    pull(grads, at, slopes): stores the gradients of these eight

They are fixed: of tensors c, b, log and θ, or of numbers that printed expressions of Params made (fourier/holes.py).
ENTRIES is 1, or N where every entry of the state has an input of its own: input 2k writes (b0, b1) to pair k, input
2k + 1 (b2, b3); without turns input k writes b0 to entry k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels.triton.functions import LOG2E, PER_TURN, circle
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.sizes import padded

DOWN, ACROSS, PAIRS = 32, 64, 16  # a tile of h; entries, or pairs of them, for four warps
LOWEST = tl.constexpr(-1e4)  # as in kernels/invariant.py


@triton.jit
def _entry_of(args, first, lane, channel, n, inside):
    """Entries n of a vector [H, N, P], whose address and strides are args[first:first + 4]."""
    at = args[first] + lane * args[first + 1] + n * args[first + 2] + channel * args[first + 3]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def read_pairs(args, lane, channel, k, inside):
    """The numbers of pairs from tensors c, b [H, N, P], log and θ [H, N / 2, P], float64."""
    c0, c1 = _entry_of(args, 0, lane, channel, 2 * k, inside), _entry_of(args, 0, lane, channel, 2 * k + 1, inside)
    b0, b1 = _entry_of(args, 4, lane, channel, 2 * k, inside), _entry_of(args, 4, lane, channel, 2 * k + 1, inside)
    rate, turn = _entry_of(args, 8, lane, channel, k, inside), _entry_of(args, 12, lane, channel, k, inside)
    return rate, turn, c0, c1, b0, b1, b0, b1


@triton.jit
def read_entries(args, lane, channel, k, inside):
    """The numbers of entries from tensors c, b and log [H, N, P], float64."""
    c0, b0 = _entry_of(args, 0, lane, channel, k, inside), _entry_of(args, 4, lane, channel, k, inside)
    rate = _entry_of(args, 8, lane, channel, k, inside)
    return rate, rate, c0, c0, b0, b0, b0, b0


@triton.jit
def pull_pairs(grads, at, slopes):
    """The gradients of c, b, log and θ, contiguous."""
    lane, channel, k, inside, _, _, P, K = at
    dc, db, dlog, dangle = grads
    vectors, whole = (lane * 2 * K + 2 * k) * P + channel, (lane * K + k) * P + channel
    tl.store(dc + vectors, slopes[2], mask=inside)
    tl.store(dc + vectors + P, slopes[3], mask=inside)
    tl.store(db + vectors, slopes[4], mask=inside)
    tl.store(db + vectors + P, slopes[5], mask=inside)
    tl.store(dlog + whole, slopes[0], mask=inside)
    tl.store(dangle + whole, slopes[1], mask=inside)


@triton.jit
def pull_entries(grads, at, slopes):
    """The gradients of c, b and log, contiguous."""
    lane, channel, k, inside, _, _, P, K = at
    dc, db, dlog = grads
    whole = (lane * K + k) * P + channel
    tl.store(dc + whole, slopes[2], mask=inside)
    tl.store(db + whole, slopes[4], mask=inside)
    tl.store(dlog + whole, slopes[0], mask=inside)


@triton.jit
def turns(count, rate, turn, TURNED: tl.constexpr):
    """e^{count rate} (cos count θ, sin count θ), float32; without turns the first alone."""
    exponent = count * (rate * LOG2E)
    whole = tl.floor(exponent + 0.5)
    scale = tl.exp2((exponent - whole).to(tl.float32)) * tl.exp2(whole.to(tl.float32))
    if TURNED:
        cosine, sine = circle(count * (turn * PER_TURN))
        return scale * cosine, scale * sine
    else:
        return scale, scale


@triton.jit
def _place_of(row, P, ENTRIES: tl.constexpr):
    """(head, input, channel) of a row of h [H, ENTRIES, P, ·]."""
    return row // P // ENTRIES, row // P % ENTRIES, row % P


@triton.jit
def _first_of(entry, BK: tl.constexpr, TURNED: tl.constexpr, ENTRIES: tl.constexpr):
    """The first of the entries, or pairs, that an input writes to: a multiple of BK."""
    if ENTRIES == 1:
        return entry * 0
    else:
        return (entry // 2 if TURNED else entry) // BK * BK


@triton.jit
def _written(found, k, entry, TURNED: tl.constexpr, ENTRIES: tl.constexpr):
    """What an input writes to entries or pairs k."""
    if ENTRIES == 1:
        return found[4], found[5]
    else:
        if TURNED:
            mine, odd = k == entry // 2, entry % 2 == 1
            first, second = tl.where(odd, found[6], found[4]), tl.where(odd, found[7], found[5])
            return tl.where(mine, first, 0.0), tl.where(mine, second, 0.0)
        else:
            return tl.where(k == entry, found[4], 0.0), found[5]


@triton.jit(do_not_specialize=["length", "points"])
def impulse_forward(
    args, h, P, length, fine, points,
    read: tl.constexpr, K: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, TURNED: tl.constexpr,
    ENTRIES: tl.constexpr, SHIFT: tl.constexpr, SCALED: tl.constexpr, FIRST: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """h [H, ENTRIES, P, points], 0 from `length` on. Grid (H · ENTRIES · P, tiles down, across).

    SHIFT: 1 where the state is read before the update, so that h_0 is 0, else 0. SCALED: divided by points / 2, as a
    complex FFT of so many there and back wants it. FIRST: the power of A in h_0. ADDED: to what h holds, which stays as
    it is from `length`.
    """
    row = tl.program_id(0).to(tl.int64)
    lane, entry, channel = _place_of(row, P, ENTRIES)
    begin = _first_of(entry, BK, TURNED, ENTRIES)
    top = tl.program_id(1) * BI
    i, j = top + tl.arange(0, BI), tl.program_id(2) * BJ + tl.arange(0, BJ)
    down, across = (i * fine + FIRST).to(tl.float64)[:, None], j.to(tl.float64)[None, :]
    out = tl.zeros([BI, BJ], tl.float32)
    for first in range(0, tl.where(top * fine < length, K if ENTRIES == 1 else 1, 0), BK):
        k = begin + first + tl.arange(0, BK)
        found = read(args, lane, channel, k, k < K)
        rate, turn = tl.maximum(found[0], LOWEST), found[1]
        c0, c1 = found[2].to(tl.float32)[None, :], found[3].to(tl.float32)[None, :]
        wide0, wide1 = _written(found, k, entry, TURNED, ENTRIES)
        b0, b1 = wide0.to(tl.float32)[:, None], wide1.to(tl.float32)[:, None]
        cosine, sine = turns(down, rate[None, :], turn[None, :], TURNED)
        ahead, beside = turns(across, rate[:, None], turn[:, None], TURNED)
        if TURNED:
            out = tl.dot(c0 * cosine + c1 * sine, b0 * ahead - b1 * beside, out, input_precision="ieee")
            out = tl.dot(c1 * cosine - c0 * sine, b0 * beside + b1 * ahead, out, input_precision="ieee")
        else:
            out = tl.dot(c0 * cosine, b0 * ahead, out, input_precision="ieee")
    at = i[:, None] * fine + j[None, :] + SHIFT
    if SCALED:
        out = out * (2.0 / points.to(tl.float32))
    to, inside = h + row * points + at, (j < fine)[None, :]
    if ADDED:
        inside = inside & (at < length)
        tl.store(to, tl.load(to, mask=inside, other=0.0) + out, mask=inside)
    else:
        tl.store(to, tl.where(at < length, out, 0.0), mask=inside & (at < points))
    if SHIFT:
        tl.store(h + row * points, 0.0, mask=(top == 0) & (tl.program_id(2) == 0))


@triton.jit
def gathered(dh, j, rate, turn, TURNED: tl.constexpr):
    """Σ_j dh[i, j] z^j and Σ_j j dh[i, j] z^j, each as (real, imaginary) [rows, K], for z = e^{rate + iθ}."""
    count = j.to(tl.float64)[:, None]
    real, imaginary = turns(count, rate[None, :], turn[None, :], TURNED)
    steps = j.to(tl.float32)[:, None]
    of_real = tl.dot(dh, real, input_precision="ieee")
    of_later = tl.dot(dh, steps * real, input_precision="ieee")
    if TURNED:
        of_imaginary = tl.dot(dh, imaginary, input_precision="ieee")
        return of_real, of_imaginary, of_later, tl.dot(dh, steps * imaginary, input_precision="ieee")
    else:
        return of_real, of_real, of_later, of_later


@triton.jit
def pushed(parts, down, rate, turn, TURNED: tl.constexpr):
    """Sums over rows i of z^{down} times (real, imaginary) parts, float64."""
    cosine, sine = turns(down, rate[None, :], turn[None, :], TURNED)
    cosine = cosine.to(tl.float64)
    if TURNED:
        sine = sine.to(tl.float64)
        return tl.sum(cosine * parts[0] - sine * parts[1], 0), tl.sum(sine * parts[0] + cosine * parts[1], 0)
    else:
        real = tl.sum(cosine * parts[0], 0)
        return real, real


@triton.jit
def _slopes(found, b0, b1, sums, entry, TURNED: tl.constexpr, ENTRIES: tl.constexpr):
    """The gradients of log, θ, c0, c1, b0, b1, b2, b3 from Σ dh_l z^l and Σ l dh_l z^l, real and imaginary."""
    real, imaginary, later, late = sums
    c0, c1 = found[2], found[3]
    if TURNED:
        same, cross = c0 * b0 + c1 * b1, c1 * b0 - c0 * b1
        dlog, dangle = same * later + cross * late, cross * later - same * late
        db0, db1 = c0 * real + c1 * imaginary, c1 * real - c0 * imaginary
        even = entry % 2 == 0 if ENTRIES > 1 else entry >= 0
        first, second = tl.where(even, db0, 0.0), tl.where(even, db1, 0.0)
        dc0, dc1 = b0 * real - b1 * imaginary, b1 * real + b0 * imaginary
        return dlog, dangle, dc0, dc1, first, second, db0 - first, db1 - second
    else:
        none = real * 0.0
        return c0 * b0 * later, none, b0 * real, none, c0 * real, none, none, none


@triton.jit(do_not_specialize=["length", "coarse", "points", "heads"])
def impulse_backward(
    dh, args, grads, heads, P, length, fine, coarse, points,
    read: tl.constexpr, pull: tl.constexpr, K: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr,
    TURNED: tl.constexpr, ENTRIES: tl.constexpr, SHIFT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """From dh [H, ENTRIES, P, points] to what `pull` stores. Grid (H · ENTRIES · P, blocks of the K of an input).

    at: (head, channel, k, inside, which of the two inputs of a pair, H, P, K).
    """
    place = tl.program_id(0).to(tl.int64)
    lane, entry, channel = _place_of(place, P, ENTRIES)
    k = _first_of(entry, BK, TURNED, ENTRIES) + tl.program_id(1) * BK + tl.arange(0, BK)
    found = read(args, lane, channel, k, k < K)
    rate, turn = tl.maximum(found[0], LOWEST), found[1]
    # sums over l of dh_l z^l and of l dh_l z^l: real and imaginary parts
    real = tl.zeros([BK], tl.float64)
    imaginary, later, late = real, real, real
    for top in range(0, coarse, BI):
        i = top + tl.arange(0, BI)
        down = (i * fine).to(tl.float64)[:, None]
        for left in range(0, fine, BJ):
            j = left + tl.arange(0, BJ)
            at = i[:, None] * fine + j[None, :] + SHIFT
            given = tl.load(dh + place * points + at, mask=(at < length) & (j < fine)[None, :], other=0.0)
            inner = gathered(given, j, rate, turn, TURNED)
            a, x = pushed((inner[0], inner[1]), down, rate, turn, TURNED)
            outer = inner[2] + down * inner[0], inner[3] + down * inner[1]
            a_later, x_later = pushed(outer, down, rate, turn, TURNED)
            real, imaginary = real + a, imaginary + x
            later, late = later + a_later, late + x_later
    if SCALED:
        share = 2.0 / points.to(tl.float64)
        real, imaginary, later, late = real * share, imaginary * share, later * share, late * share
    b0, b1 = _written(found, k, entry, TURNED, ENTRIES)
    slopes = _slopes(found, b0, b1, (real, imaginary, later, late), entry, TURNED, ENTRIES)
    if ENTRIES == 1:
        inside = k < K
    else:
        inside = k == (entry // 2 if TURNED else entry)
    pull(grads, (lane, channel, k, inside, entry % 2 if TURNED and ENTRIES > 1 else entry * 0, heads, P, K), slopes)


def tiles(length: int, fine: int, k: int, across: int) -> dict[str, int]:
    """The constants of a launch that depend on sizes. Larger tiles do not fit the registers."""
    down, pairs = padded(min(DOWN, -(-length // fine))), PAIRS if k <= PAIRS else 2 * PAIRS
    return {"BI": down, "BJ": padded(min(across, fine)), "BK": pairs, "K": k, "num_warps": 4 * pairs // PAIRS}


def respond(args: Any, h: Tensor, length: int, fine: int, k: int, read: Callable[..., Any], **named: Any) -> None:
    """Launch impulse_forward for h [H, ENTRIES, P, points]."""
    heads, entries, p, points = h.shape
    constants, named = tiles(length, fine, k, ACROSS), {"FIRST": 0, "ADDED": False, **named}
    whole = length if named["ADDED"] else points
    grid = heads * entries * p, -(-whole // (fine * constants["BI"])), -(-fine // constants["BJ"])
    launch(impulse_forward, grid, args, h, p, length, fine, points, read=read, ENTRIES=entries, **named, **constants)


def pull_back(
    dh: Tensor, args: Any, grads: Any, length: int, fine: int, k: int, holes: tuple[Callable[..., Any], ...],
    **named: Any,
) -> None:  # fmt: skip
    """Launch impulse_backward from dh [H, ENTRIES, P, points]. holes: read and pull."""
    heads, entries, p, points = dh.shape
    constants = tiles(length, fine, k, ACROSS // 2)
    grid = heads * entries * p, 1 if entries > 1 else -(-k // constants["BK"])
    launch(
        impulse_backward, grid, dh, args, grads, heads, p, length, fine, -(-length // fine), points, read=holes[0],
        pull=holes[1], ENTRIES=entries, **named, **constants,
    )  # fmt: skip


def _given(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(y for x in tensors if x is not None for y in (x, *x.stride()))


def _forward(c: Tensor, b: Tensor, log: Tensor, angle: Tensor | None, length: int, fine: int) -> Tensor:
    heads, k, p = log.shape
    h = c.new_empty(heads, 1, p, length, dtype=torch.float32)
    read = read_entries if angle is None else read_pairs
    turned = angle is not None
    respond(_given(c, b, log, angle), h, length, fine, k, read, TURNED=turned, SHIFT=0, SCALED=False)
    return h.view(heads, p, length)


def _backward(
    dh: Tensor, c: Tensor, b: Tensor, log: Tensor, angle: Tensor | None, length: int, fine: int
) -> list[Tensor]:
    (heads, k, p), n, turned = log.shape, c.shape[1], angle is not None
    dc, db = (c.new_empty(heads, n, p) for _ in range(2))
    made = [c.new_empty(heads, k, p) for _ in range(2 if turned else 1)]
    holes = (read_pairs, pull_pairs) if turned else (read_entries, pull_entries)
    given = dh.contiguous().view(heads, 1, p, length)
    args = _given(c, b, log, angle)
    pull_back(given, args, (dc, db, *made), length, fine, k, holes, TURNED=turned, SHIFT=0, SCALED=False)
    return [dc, db, *made]


_GIVEN = "Tensor c, Tensor b, Tensor log, Tensor? angle, int length, int fine"
impulse_response = operator(f"impulse_response({_GIVEN}) -> Tensor", _forward)
impulse_response_backward = operator(f"impulse_response_backward(Tensor dh, {_GIVEN}) -> Tensor[]", _backward)
