"""Rotary positions of queries and keys as an operator: one launch, whose gradient is the same with opposite angles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsf.kernels.triton.early import early
from dsf.kernels.triton.launch import launch, strided
from dsf.kernels.triton.layer import table
from dsf.kernels.triton.layer.rotary import turn_heads
from dsf.kernels.triton.operators import operator


def _angles(x: Tensor, batch: int) -> tuple[Any, ...]:
    x, apart, step = strided(x)
    return x, apart if x.shape[0] == batch else 0, step


def _turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, scale: float, back: bool) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, width = q.shape
    outs = q.new_empty(q.shape), k.new_empty(k.shape)
    tile = table.rotary(width // 2, batch * tokens)
    blocks = sum(-(-x.shape[2] // tile.heads) for x in (q, k))
    runs = -(-batch * tokens // tile.rows)
    launch(
        turn_heads, (runs, blocks), strided(q), strided(k),
        (*_angles(cos, batch), *_angles(sin, batch)), outs, tokens, batch * tokens, scale,
        q_heads=heads, k_heads=k.shape[2], HALF=width // 2, BACK=back, W=tile.width, R=tile.rows, HEADS=tile.heads,
        num_warps=tile.warps, **early(q.device, runs * blocks),
    )  # fmt: skip
    return outs


class _Differentiable(torch.autograd.Function):
    """The operator with its gradient, which has one itself."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, scale: float, back: bool
    ) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            found = turn_pairs(q, k, cos, sin, scale, back)
        ctx.save_for_backward(cos, sin)
        ctx.options = scale, not back
        return found

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
        return *turn_pairs(dq, dk, *ctx.saved_tensors, *ctx.options), None, None, None, None


turn_pairs = operator(
    "turn_pairs(Tensor q, Tensor k, Tensor cos, Tensor sin, float scale, bool back) -> (Tensor, Tensor)",
    _turned,
    _Differentiable.apply,
)
