"""Rotary positions of queries and keys as an operator: one launch, whose gradient is the same with opposite angles.

A program turns HEADS heads of R tokens by the same angles, which stay in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels.triton.early import begin, early
from dsf.kernels.triton.launch import launch, strided
from dsf.kernels.triton.layer import table
from dsf.kernels.triton.operators import operator


@triton.jit(do_not_specialize=["T", "rows"])
def turn_heads(
    of_q, of_k, of_angles, outs, T, rows, scale, q_heads: tl.constexpr, k_heads: tl.constexpr, HALF: tl.constexpr,
    BACK: tl.constexpr, W: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """outs: q [B, T, q_heads, 2 HALF] and k, contiguous; k times `scale`. Grid (rows / R, blocks of q's and k's heads).

    of_q, of_k: (tensor, strides of batch, time, head). of_angles: (cos, sin [B, T, HALF], their strides of batch and
    time). rows = B · T. BACK: by the opposite angles, which is also the gradient.
    """
    begin(EARLY)
    q, q_batch, q_stride, q_head = of_q
    k, k_batch, k_stride, k_head = of_k
    cos, c_batch, c_stride, sin, s_batch, s_stride = of_angles
    r = tl.program_id(0) * R + tl.arange(0, R)
    batch, token = (r // T).to(tl.int64), (r % T).to(tl.int64)
    j = tl.arange(0, W)[None, :]
    ok = (r < rows)[:, None] & (j < HALF)
    c = tl.load(cos + (batch * c_batch + token * c_stride)[:, None] + j, mask=ok, other=0.0).to(tl.float32)
    s = tl.load(sin + (batch * s_batch + token * s_stride)[:, None] + j, mask=ok, other=0.0).to(tl.float32)
    if BACK:
        s = -s
    first = tl.program_id(1) * HEADS
    of_keys = first >= (q_heads + HEADS - 1) // HEADS * HEADS
    x, to = tl.where(of_keys, k, q), tl.where(of_keys, outs[1], outs[0])
    x_batch = tl.where(of_keys, k_batch, q_batch).to(tl.int64)
    x_stride = tl.where(of_keys, k_stride, q_stride).to(tl.int64)
    x_head = tl.where(of_keys, k_head, q_head).to(tl.int64)
    heads = tl.where(of_keys, k_heads, q_heads)
    first = tl.where(of_keys, first - (q_heads + HEADS - 1) // HEADS * HEADS, first)
    times = tl.where(of_keys, scale, 1.0)
    c, s = c * times, s * times
    from_ = x + (batch * x_batch + token * x_stride)[:, None] + j
    into = to + (r.to(tl.int64) * heads * (2 * HALF))[:, None] + j
    for i in tl.static_range(HEADS):
        head = first + i
        there = ok & (head < heads)
        a = tl.load(from_ + head * x_head, mask=there, other=0.0).to(tl.float32)
        b = tl.load(from_ + head * x_head + HALF, mask=there, other=0.0).to(tl.float32)
        tl.store(into + head * (2 * HALF), (a * c - b * s).to(to.dtype.element_ty), mask=there)
        tl.store(into + head * (2 * HALF) + HALF, (a * s + b * c).to(to.dtype.element_ty), mask=there)


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


def _behind(
    made: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, scale: float, back: bool
) -> tuple[Any, ...] | None:  # fmt: skip
    return (turn_pairs, *made, cos, sin, scale, not back) if q.requires_grad else None


turn_pairs = operator(
    "turn_pairs(Tensor q, Tensor k, Tensor cos, Tensor sin, float scale, bool back) -> (Tensor, Tensor)",
    _turned,
    _Differentiable.apply,
    _behind,
)
