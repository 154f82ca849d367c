"""Mixtures of two tensors by shares a channel as an operator: one launch; backward one, and one that sums the shares'.

A program reads R tokens of BC channels once and writes all mixtures of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels.operators import refuse_second_order
from dsf.kernels.triton.launch import launch, strided
from dsf.kernels.triton.layer import table
from dsf.kernels.triton.layer.norm import sum_weight
from dsf.kernels.triton.operators import operator


@triton.jit
def _at(batch_stride, stride, r, c, T):
    """The offsets of channels c of tokens r, counted through all sequences."""
    return ((r // T).to(tl.int64) * batch_stride + (r % T).to(tl.int64) * stride)[:, None] + c


@triton.jit
def _share(shares, of_more, i: tl.constexpr, r, c, ok, T, C: tl.constexpr):
    """The share i of tokens r: [1, BC], or with what the tokens add [R, BC]."""
    share = tl.load(shares[i] + c, mask=c < C, other=0.0).to(tl.float32)
    if of_more is not None:
        more, apart, m_batch, m_stride = of_more
        at = more + tl.full((), i, tl.int64) * apart + _at(m_batch, m_stride, r, c, T)
        share += tl.load(at, mask=ok, other=0.0).to(tl.float32)
    return share


@triton.jit(do_not_specialize=["T", "rows"])
def mix_forward(
    of_x, of_other, shares, of_more, outs, T, rows, C: tl.constexpr, COUNT: tl.constexpr, R: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """outs: x + (other - x) · share for each share [C], [B, T, C], contiguous. Grid (rows / R, C / BC), rows = B · T.

    of_x, of_other: (tensor, strides of batch and time). of_more: None, or (a tensor of what tokens add to the shares,
    strides of shares, batch and time).
    """
    x, x_batch, x_stride = of_x
    other, o_batch, o_stride = of_other
    r = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    ok = (r < rows)[:, None] & (c < C)
    a = tl.load(x + _at(x_batch, x_stride, r, c, T), mask=ok, other=0.0).to(tl.float32)
    change = tl.load(other + _at(o_batch, o_stride, r, c, T), mask=ok, other=0.0).to(tl.float32) - a
    own = (r.to(tl.int64) * C)[:, None] + c
    for i in tl.static_range(COUNT):
        share = _share(shares, of_more, i, r, c, ok, T, C)
        tl.store(outs[i] + own, (a + change * share).to(outs[i].dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["T", "rows"])
def mix_backward(
    dys, of_x, of_other, shares, of_more, outs, T, rows, C: tl.constexpr, COUNT: tl.constexpr, R: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """outs: dx, dother [B, T, C], dmore [COUNT, B, T, C] or None, contiguous, and each program's sums for the shares,
    [rows / R, COUNT, C].

    dys: of the results, contiguous. Grid and the rest as for mix_forward.
    """
    x, x_batch, x_stride = of_x
    other, o_batch, o_stride = of_other
    dx, dother, dmore, sums = outs
    part = tl.program_id(0)
    r = part * R + tl.arange(0, R)
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    ok = (r < rows)[:, None] & (c < C)
    a = tl.load(x + _at(x_batch, x_stride, r, c, T), mask=ok, other=0.0).to(tl.float32)
    change = tl.load(other + _at(o_batch, o_stride, r, c, T), mask=ok, other=0.0).to(tl.float32) - a
    own = (r.to(tl.int64) * C)[:, None] + c
    all_of, moved = tl.zeros((R, BC), tl.float32), tl.zeros((R, BC), tl.float32)
    to = sums + part.to(tl.int64) * (COUNT * C) + tl.program_id(1) * BC + tl.arange(0, BC)
    for i in tl.static_range(COUNT):
        d = tl.load(dys[i] + own, mask=ok, other=0.0).to(tl.float32)
        all_of += d
        moved += d * _share(shares, of_more, i, r, c, ok, T, C)
        d *= change
        if dmore is not None:
            at = dmore + tl.full((), i, tl.int64) * (rows.to(tl.int64) * C) + own
            tl.store(at, d.to(dmore.dtype.element_ty), mask=ok)
        there = tl.program_id(1) * BC + tl.arange(0, BC) < C
        tl.store(to + i * C, tl.sum(d, axis=0), mask=there)
    tl.store(dx + own, (all_of - moved).to(dx.dtype.element_ty), mask=ok)
    tl.store(dother + own, moved.to(dother.dtype.element_ty), mask=ok)


WAY_OUT = "the fused mixtures of tokens; ask for backend='torch', which has them"


def _settings(x: Tensor, count: int, backward: bool) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid and the compile-time constants."""
    rows, channels = x.shape[0] * x.shape[1], x.shape[2]
    held, block, warps = table.mixture(rows, channels, backward)
    grid = -(-rows // held), -(-channels // block)
    return grid, {"C": channels, "COUNT": count, "R": held, "BC": block, "num_warps": warps}


def _forward(x: Tensor, other: Tensor, shares: Sequence[Tensor], more: Tensor | None) -> list[Tensor]:
    dtype = torch.promote_types(x.dtype, shares[0].dtype)
    outs = [x.new_empty(x.shape, dtype=dtype) for _ in shares]
    grid, settings = _settings(x, len(outs), False)
    given, added = tuple(s.contiguous() for s in shares), None if more is None else strided(more)
    launch(
        mix_forward, grid, strided(x), strided(other), given, added, tuple(outs), x.shape[1],
        x.shape[0] * x.shape[1], **settings,
    )  # fmt: skip
    return outs


def _backward(
    dys: Sequence[Tensor], x: Tensor, other: Tensor, shares: Sequence[Tensor], more: Tensor | None
) -> list[Tensor]:
    """The gradients of x and other, of the shares [shares, C], and of `more` where there is one."""
    count, channels = len(shares), x.shape[2]
    dx, dother = x.new_empty(x.shape), other.new_empty(other.shape)
    dshares, dmore = shares[0].new_empty(count, channels), None if more is None else more.new_empty(more.shape)
    grid, settings = _settings(x, count, True)
    sums = x.new_empty(grid[0], count * channels, dtype=torch.float32)
    given, added = tuple(s.contiguous() for s in shares), None if more is None else strided(more)
    launch(
        mix_backward, grid, tuple(dy.contiguous() for dy in dys), strided(x), strided(other), given, added,
        (dx, dother, dmore, sums), x.shape[1], x.shape[0] * x.shape[1], **settings,
    )  # fmt: skip
    block = 32 if sums.shape[1] >= 2048 else 8
    launch(
        sum_weight, (-(-sums.shape[1] // block),), sums, dshares, grid[0], SIZE=sums.shape[1], BR=128, BC=block,
        num_warps=4,
    )  # fmt: skip
    return [dx, dother, dshares] if dmore is None else [dx, dother, dshares, dmore]


class _Differentiable(torch.autograd.Function):
    """The operator with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, more: Tensor | None, *shares: Tensor) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            found = mix_tokens(x, other, list(shares), more)
        ctx.save_for_backward(x, other, more, *shares)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        refuse_second_order(WAY_OUT)
        x, other, more, *shares = ctx.saved_tensors
        dx, dother, dshares, *dmore = mix_tokens_backward(list(dys), x, other, shares, more)
        return dx, dother, *(dmore or [None]), *dshares.unbind()


def _differentiable(x: Tensor, other: Tensor, shares: Sequence[Tensor], more: Tensor | None) -> Any:
    return list(_Differentiable.apply(x, other, more, *shares))


def _behind(made: Any, x: Tensor, *rest: Any) -> tuple[Any, ...] | None:
    return (mix_tokens_backward, made, x, *rest) if x.requires_grad else None


_GIVEN = "Tensor x, Tensor other, Tensor[] shares, Tensor? more"
mix_tokens = operator(f"mix_tokens({_GIVEN}) -> Tensor[]", _forward, _differentiable, _behind)
mix_tokens_backward = operator(f"mix_tokens_backward(Tensor[] dys, {_GIVEN}) -> Tensor[]", _backward)
