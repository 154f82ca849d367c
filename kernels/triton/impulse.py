"""The impulse response of a time-invariant system with diagonal transitions, and its gradient: one launch each.

h_l = Σ_k e^{l log_k} ((c0 b0 + c1 b1) cos lθ_k + (c1 b0 - c0 b1) sin lθ_k) over pairs of entries that turn by θ, or
Σ_n c_n b_n e^{l log_n} without turns: cᵀ A^l b. With l = i m + j it is a product of two tables, (Aᵀ)^{i m} c and A^j b,
each of about √T rows, which a program makes where it needs them (kernels/invariant.py, whose torch form has them in
memory). Powers and angles are float64, products float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.sizes import power

ROWS, PAIRS = 64, 16  # of a tile of h, each way; of entries, or pairs of them, at a time
LOWEST = tl.constexpr(-1e4)  # as in kernels/invariant.py


@triton.jit
def _entries(x, lane, channel, strides, k, inside, TURNED: tl.constexpr):
    """The entries k of one channel's vector [H, N, P], or the two of each pair."""
    at = x + lane * strides[0] + channel * strides[2]
    if TURNED:
        first = tl.load(at + 2 * k * strides[1], mask=inside, other=0.0)
        return first, tl.load(at + (2 * k + 1) * strides[1], mask=inside, other=0.0)
    else:
        first = tl.load(at + k * strides[1], mask=inside, other=0.0)
        return first, first


@triton.jit
def _rates(log, angle, lane, channel, k, inside, TURNED: tl.constexpr):
    """log and θ of entries or pairs."""
    rate = tl.load(log[0] + lane * log[1] + k * log[2] + channel * log[3], mask=inside, other=0.0)
    turn = rate
    if TURNED:
        turn = tl.load(angle[0] + lane * angle[1] + k * angle[2] + channel * angle[3], mask=inside, other=0.0)
    return tl.maximum(rate, LOWEST), turn


@triton.jit
def _turns(count, rate, turn, TURNED: tl.constexpr):
    """e^{count rate} (cos count θ, sin count θ), float64; without turns the first alone."""
    scale = tl.exp(count * rate)
    if TURNED:
        return scale * tl.cos(count * turn), scale * tl.sin(count * turn)
    else:
        return scale, scale


@triton.jit(do_not_specialize=["length"])
def impulse_forward(
    c, b, log, angle, h, P, length, fine,
    K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """h [H, P, length]. c, b, log, angle: (address, strides of H, N or K, P). Grid (H · P, tiles down, across)."""
    both = tl.program_id(0).to(tl.int64)
    lane, channel = both // P, both % P
    i, j = tl.program_id(1) * BR + tl.arange(0, BR), tl.program_id(2) * BR + tl.arange(0, BR)
    down, across = (i * fine).to(tl.float64)[:, None], j.to(tl.float64)[None, :]
    out = tl.zeros([BR, BR], tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        rate, turn = _rates(log, angle, lane, channel, k, k < K, TURNED)
        c0, c1 = _entries(c[0], lane, channel, c[1:], k, k < K, TURNED)
        b0, b1 = _entries(b[0], lane, channel, b[1:], k, k < K, TURNED)
        cosine, sine = _turns(down, rate[None, :], turn[None, :], TURNED)
        ahead, beside = _turns(across, rate[:, None], turn[:, None], TURNED)
        if TURNED:
            rows = (c0[None, :] * cosine + c1[None, :] * sine).to(tl.float32)
            columns = (b0[:, None] * ahead - b1[:, None] * beside).to(tl.float32)
            out = tl.dot(rows, columns, out, input_precision="ieee")
            rows = (c1[None, :] * cosine - c0[None, :] * sine).to(tl.float32)
            columns = (b0[:, None] * beside + b1[:, None] * ahead).to(tl.float32)
        else:
            rows, columns = (c0[None, :] * cosine).to(tl.float32), (b0[:, None] * ahead).to(tl.float32)
        out = tl.dot(rows, columns, out, input_precision="ieee")
    at = i[:, None] * fine + j[None, :]
    tl.store(h + both * length + at, out, mask=(at < length) & (j < fine)[None, :])


@triton.jit
def _gathered(dh, j, rate, turn, TURNED: tl.constexpr):
    """Σ_j dh[i, j] z^j and Σ_j j dh[i, j] z^j, each as (real, imaginary) [rows, K], for z = e^{rate + iθ}."""
    count = j.to(tl.float64)[:, None]
    cosine, sine = _turns(count, rate[None, :], turn[None, :], TURNED)
    real, later = cosine.to(tl.float32), (count * cosine).to(tl.float32)
    of_real, of_later = tl.dot(dh, real, input_precision="ieee"), tl.dot(dh, later, input_precision="ieee")
    if TURNED:
        imaginary, behind = sine.to(tl.float32), (count * sine).to(tl.float32)
        of_imaginary = tl.dot(dh, imaginary, input_precision="ieee")
        return of_real, of_imaginary, of_later, tl.dot(dh, behind, input_precision="ieee")
    else:
        return of_real, of_real, of_later, of_later


@triton.jit
def _pushed(parts, down, rate, turn, TURNED: tl.constexpr):
    """Sums over rows i of z^{down} times (real, imaginary) parts."""
    cosine, sine = _turns(down, rate[None, :], turn[None, :], TURNED)
    if TURNED:
        return tl.sum(cosine * parts[0] - sine * parts[1], 0), tl.sum(sine * parts[0] + cosine * parts[1], 0)
    else:
        real = tl.sum(cosine * parts[0], 0)
        return real, real


@triton.jit(do_not_specialize=["length", "coarse"])
def impulse_backward(
    dh, c, b, log, angle, dc, db, dlog, dangle, P, length, fine, coarse,
    K: tl.constexpr, N: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """The gradients of c, b [H, N, P], log and angle [H, K, P], float64. Grid (H · P, blocks of K)."""
    both = tl.program_id(0).to(tl.int64)
    lane, channel = both // P, both % P
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    rate, turn = _rates(log, angle, lane, channel, k, k < K, TURNED)
    # sums over l of dh_l z^l and of l dh_l z^l: real and imaginary parts
    real = tl.zeros([BK], tl.float64)
    imaginary, real_later, imaginary_later = real, real, real
    for top in range(0, coarse, BR):
        i = top + tl.arange(0, BR)
        down = (i * fine).to(tl.float64)[:, None]
        for left in range(0, fine, BR):
            j = left + tl.arange(0, BR)
            at = i[:, None] * fine + j[None, :]
            given = tl.load(dh + both * length + at, mask=(at < length) & (j < fine)[None, :], other=0.0)
            found = _gathered(given, j, rate, turn, TURNED)
            a, x = _pushed((found[0], found[1]), down, rate, turn, TURNED)
            later = found[2] + down * found[0], found[3] + down * found[1]
            a_later, x_later = _pushed(later, down, rate, turn, TURNED)
            real, imaginary = real + a, imaginary + x
            real_later, imaginary_later = real_later + a_later, imaginary_later + x_later
    c0, c1 = _entries(c[0], lane, channel, c[1:], k, k < K, TURNED)
    b0, b1 = _entries(b[0], lane, channel, b[1:], k, k < K, TURNED)
    to, whole = lane * N * P + channel, (lane * K + k) * P + channel
    if TURNED:
        tl.store(dc + to + 2 * k * P, b0 * real - b1 * imaginary, mask=k < K)
        tl.store(dc + to + (2 * k + 1) * P, b1 * real + b0 * imaginary, mask=k < K)
        tl.store(db + to + 2 * k * P, c0 * real + c1 * imaginary, mask=k < K)
        tl.store(db + to + (2 * k + 1) * P, c1 * real - c0 * imaginary, mask=k < K)
        same, cross = c0 * b0 + c1 * b1, c1 * b0 - c0 * b1
        tl.store(dlog + whole, same * real_later + cross * imaginary_later, mask=k < K)
        tl.store(dangle + whole, cross * real_later - same * imaginary_later, mask=k < K)
    else:
        tl.store(dc + to + k * P, b0 * real, mask=k < K)
        tl.store(db + to + k * P, c0 * real, mask=k < K)
        tl.store(dlog + whole, c0 * b0 * real_later, mask=k < K)


def _given(*tensors: Tensor | None) -> list[Any]:
    return [(x, *(() if x is None else x.stride())) for x in tensors]


def _tiles(fine: int, k: int) -> dict[str, int]:
    return {"BR": min(ROWS, max(16, power(fine))), "BK": PAIRS, "K": k, "num_warps": 4}


def _forward(c: Tensor, b: Tensor, log: Tensor, angle: Tensor | None, length: int, fine: int) -> Tensor:
    heads, k, p = log.shape
    h, tiles = c.new_empty(heads, p, length, dtype=torch.float32), _tiles(fine, k)
    grid = heads * p, -(-length // (fine * tiles["BR"])), -(-fine // tiles["BR"])
    launch(impulse_forward, grid, *_given(c, b, log, angle), h, p, length, fine, TURNED=angle is not None, **tiles)
    return h


def _backward(
    dh: Tensor, c: Tensor, b: Tensor, log: Tensor, angle: Tensor | None, length: int, fine: int
) -> list[Tensor]:
    (heads, k, p), n = log.shape, c.shape[1]
    dc, db = (c.new_empty(heads, n, p) for _ in range(2))
    made = [c.new_empty(heads, k, p) for _ in range(1 if angle is None else 2)]
    dangle = None if angle is None else made[1]
    tiles = _tiles(fine, k)
    launch(
        impulse_backward, (heads * p, -(-k // tiles["BK"])), dh.contiguous(), *_given(c, b, log, angle), dc, db,
        made[0], dangle, p, length, fine, -(-length // fine), N=n, TURNED=angle is not None, **tiles,
    )  # fmt: skip
    return [dc, db, *made]


_GIVEN = "Tensor c, Tensor b, Tensor log, Tensor? angle, int length, int fine"
impulse_response = operator(f"impulse_response({_GIVEN}) -> Tensor", _forward)
impulse_response_backward = operator(f"impulse_response_backward(Tensor dh, {_GIVEN}) -> Tensor[]", _backward)
