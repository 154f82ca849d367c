"""The causal depthwise convolution of many taps, [B, T, C] as it lies: each output is a sum of K products, no FFT.

An FFT costs several passes over numbers of 32 bits whatever K is; K products of numbers that are in a multiprocessor's
cache cost less until K is above a hundred. taps: [K, C], that of the newest input last. As an operator it is one
launch, and one more for the taps' gradient; its gradients are such convolutions and sums again, so it has derivatives
of any order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels.triton.launch import launch, strided
from dsf.kernels.triton.layer import table
from dsf.kernels.triton.layer.convolution import pushed
from dsf.kernels.triton.layer.convolution_gradient import zeros_of
from dsf.kernels.triton.operators import operator


@triton.jit
def _place(program, blocks, B, SIZE: tl.constexpr, BC: tl.constexpr):
    """A program's channels, sequence and first token, of programs with tiles of SIZE tokens, channels fastest."""
    c = program % blocks * BC + tl.arange(0, BC)
    b = program // blocks % B
    return c, b.to(tl.int64), (program // blocks // B).to(tl.int64) * SIZE


@triton.jit
def _rows(x, stride, t, c, T, C: tl.constexpr):
    """x of tokens t and channels c in float32, zeros outside."""
    inside = ((t >= 0) & (t < T))[:, None] & (c < C)[None, :]
    return tl.load(x + t[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _add(sums, one, held):
    """sums with the products of one tile and each of those held."""
    found = ()
    for j in tl.static_range(len(held)):
        found = found + (sums[j] + one * held[j],)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit(do_not_specialize=["T", "B"])
def depthwise(
    of_x, taps, y, T, B,
    C: tl.constexpr, K: tl.constexpr, BACK: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """y_t = Σ_j taps_{K-1-j} x_{t-j}, or BACK x_{t+j}. Grid (blocks of channels · B · tiles of BG runs of R tokens).

    of_x: (x, its stride of B, that of T). A number is loaded once for the R outputs of a run, each of which multiplies
    it with the tap next to its neighbour's.
    """
    blocks: tl.constexpr = (C + BC - 1) // BC
    c, b, t0 = _place(tl.program_id(0), blocks, B, BG * R, BC)
    t = t0 + R * tl.arange(0, BG)
    x = of_x[0] + b * of_x[1]
    sums, held = zeros_of(t[:, None] + c[None, :], R), zeros_of(c[None, :], R)
    for first in range(0, K + R - 1, R):
        for i in tl.static_range(R):
            s = first + i
            tap = tl.load(taps + (K - 1 - s) * C + c, mask=(c < C) & (s < K), other=0.0).to(tl.float32)
            held = pushed(tap[None, :], held)
            sums = _add(sums, _rows(x, of_x[2], t + s if BACK else t + (R - 1) - s, c, T, C), held)
    for r in tl.static_range(R):
        own = t + r if BACK else t + (R - 1) - r
        to = y + b * T * C + own[:, None] * C + c[None, :]
        tl.store(to, sums[r].to(y.dtype.element_ty), mask=(own < T)[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=["T", "B"])
def depthwise_gradient(
    of_dy, of_x, out, T, B,
    C: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """out [tiles, B, K, C]: of tap K - 1 - j, Σ dy_t x_{t-j} of a tile's tokens, BG runs of L, a multiple of J.

    of_dy, of_x: as in `depthwise`. Grid (taps / J · blocks of channels · B · tiles). The J numbers x_{t-j} of a token
    are held for the next one.
    """
    groups: tl.constexpr = (K + J - 1) // J
    blocks: tl.constexpr = (C + BC - 1) // BC
    c, b, begin = _place(tl.program_id(0) // groups, blocks, B, BG * L, BC)
    lag = tl.program_id(0) % groups * J
    t = begin + L * tl.arange(0, BG)
    x, dy = of_x[0] + b * of_x[1], of_dy[0] + b * of_dy[1]
    tile = t[:, None] + c[None, :]
    sums, held = zeros_of(tile, J), zeros_of(tile, J)
    for j in tl.static_range(J):
        held = pushed(_rows(x, of_x[2], t - lag - (J - j), c, T, C), held)
    for first in range(0, L, J):
        for i in tl.static_range(J):
            now = t + (first + i)
            held = pushed(_rows(x, of_x[2], now - lag, c, T, C), held)
            sums = _add(sums, _rows(dy, of_dy[2], now, c, T, C), held)
    row = tl.program_id(0) // groups // blocks  # of tiles and sequences
    for j in tl.static_range(J):
        to = out + (row.to(tl.int64) * K + (K - 1 - lag - j)) * C + c
        tl.store(to, tl.sum(sums[j], axis=0), mask=(c < C) & (lag + j < K))


def _forward(x: Tensor, taps: Tensor, back: bool) -> Tensor:
    (batch, tokens, channels), tile = x.shape, table.depthwise(x.shape[-1], x.element_size())
    y = x.new_empty(x.shape)
    grid = (-(-channels // tile.channels) * batch * -(-tokens // tile.rows),)
    launch(
        depthwise, grid, strided(x), taps.contiguous(), y, tokens, batch, C=channels, K=taps.shape[0], BACK=back,
        BG=tile.rows // tile.block, BC=tile.channels, R=tile.block, num_warps=tile.warps,
    )  # fmt: skip
    return y


def _sums(dy: Tensor, x: Tensor, taps: int) -> Tensor:
    (batch, tokens, channels), tile = x.shape, table.depthwise_gradient(x.shape, x.element_size(), taps)
    runs = -(-tokens // tile.rows)
    out = x.new_empty(runs * batch, taps, channels, dtype=torch.float32)
    grid = (-(-taps // table.TAPS) * -(-channels // tile.channels) * batch * runs,)
    launch(
        depthwise_gradient, grid, strided(dy), strided(x), out, tokens, batch, C=channels, K=taps, L=tile.block,
        BG=tile.rows // tile.block, BC=tile.channels, J=table.TAPS, num_warps=tile.warps,
    )  # fmt: skip
    return out.sum(0)


class _Convolved(torch.autograd.Function):
    """The convolution with its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(x, taps)
        ctx.back = back
        with torch._C._AutoDispatchBelowAutograd():
            found: Tensor = depthwise_convolution(x, taps, back)
        return found

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, taps), (dy,) = ctx.saved_tensors, given
        dx = depthwise_convolution(dy, taps, not ctx.back) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None
        late, early = (x, dy) if ctx.back else (dy, x)
        return dx, depthwise_sums(late, early, taps.shape[0]).to(taps.dtype), None


class _Summed(torch.autograd.Function):
    """The sums with their gradients."""

    @staticmethod
    def forward(ctx: Any, dy: Tensor, x: Tensor, taps: int) -> Tensor:
        ctx.save_for_backward(dy, x)
        with torch._C._AutoDispatchBelowAutograd():
            found: Tensor = depthwise_sums(dy, x, taps)
        return found

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor, None]:
        dy, x = ctx.saved_tensors
        return depthwise_convolution(x, given[0], False), depthwise_convolution(dy, given[0], True), None


depthwise_convolution = operator(
    "depthwise_convolution(Tensor x, Tensor taps, bool back) -> Tensor", _forward, _Convolved.apply
)
depthwise_sums = operator("depthwise_sums(Tensor dy, Tensor x, int taps) -> Tensor", _sums, _Summed.apply)
