"""The causal depthwise convolution of many taps as an operator: one launch, and one more for the taps' gradient.

Its gradients are such convolutions and sums again, so it has derivatives of any order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsf.kernels.triton.launch import launch, strided
from dsf.kernels.triton.layer import table
from dsf.kernels.triton.layer.depthwise import depthwise, depthwise_gradient
from dsf.kernels.triton.operators import operator


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
