"""Reversed copies, and sums of a sequence and a reversed one, as operators: one launch each, backward too.

Rows are of one token and group of channels, these on lanes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels.operators import refuse_second_order
from dsf.kernels.triton.launch import launch, strided
from dsf.kernels.triton.layer import table
from dsf.kernels.triton.operators import operator


@triton.jit
def _rows(r, T, inner: tl.constexpr):
    """(sequence, token, group of channels) of rows r."""
    token = r // inner
    return (token // T).to(tl.int64), token % T, r % inner


@triton.jit
def _at(of_x, i_b, t, group, c, GROUP: tl.constexpr):
    """The addresses of the channels c of tokens t. of_x: (tensor, strides of batch and time)."""
    x, batch_stride, stride = of_x
    return x + (i_b * batch_stride + t.to(tl.int64) * stride + group * GROUP)[:, None] + c


@triton.jit(do_not_specialize=["T", "rows"])
def join_forward(
    of_ahead, of_back, of_x, of_gain, out, T, rows,
    inner: tl.constexpr, GROUP: tl.constexpr, LATE: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """out [B, T, inner · GROUP], contiguous: ahead LATE tokens before, back of reversed tokens, gain · x.

    of_ahead, of_back, of_x: (tensor [B, T, inner · GROUP], strides of batch and time), of_gain the same of
    [B, T, inner]; ahead, x and gain may be None. Grid (rows / R), rows = B · T · inner.
    """
    r = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.arange(0, W)[None, :]
    ok = (r < rows)[:, None] & (c < GROUP)
    i_b, t, group = _rows(r, T, inner)
    before = T - 1 - t - LATE
    there = ok & (before >= 0)[:, None]
    y = tl.load(_at(of_back, i_b, before, group, c, GROUP), mask=there, other=0.0).to(tl.float32)
    if of_ahead[0] is not None:
        there = ok & (t >= LATE)[:, None]
        y += tl.load(_at(of_ahead, i_b, t - LATE, group, c, GROUP), mask=there, other=0.0).to(tl.float32)
    if of_x[0] is not None:
        gain, g_batch, g_stride = of_gain
        g = tl.load(gain + i_b * g_batch + t.to(tl.int64) * g_stride + group, mask=r < rows, other=0.0)
        y += tl.load(_at(of_x, i_b, t, group, c, GROUP), mask=ok, other=0.0).to(tl.float32) * g.to(tl.float32)[:, None]
    own = (r.to(tl.int64) * GROUP)[:, None] + c
    tl.store(out + own, y.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["T", "rows"])
def join_backward(
    of_dy, of_x, of_gain, outs, T, rows,
    inner: tl.constexpr, GROUP: tl.constexpr, LATE: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """outs: dahead or None, dback, dx or None [B, T, inner · GROUP], dgain [B, T, inner] or None, contiguous.

    A row writes its gradient where the forward pass read; rows that read nothing write the zeros of tokens that
    nobody read. The other arguments as in join_forward.
    """
    dahead, dback, dx, dgain = outs
    r = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.arange(0, W)[None, :]
    ok = (r < rows)[:, None] & (c < GROUP)
    i_b, t, group = _rows(r, T, inner)
    d = tl.load(_at(of_dy, i_b, t, group, c, GROUP), mask=ok, other=0.0).to(tl.float32)
    row = i_b * 0 + inner * GROUP  # 64 bits
    whole = row * T
    before = T - 1 - t - LATE
    kept = tl.where((before >= 0)[:, None], d, 0.0).to(dback.dtype.element_ty)
    at = _at((dback, whole, row), i_b, tl.where(before >= 0, before, before + T), group, c, GROUP)
    tl.store(at, kept, mask=ok)
    if dahead is not None:
        before = t - LATE
        kept = tl.where((before >= 0)[:, None], d, 0.0).to(dahead.dtype.element_ty)
        at = _at((dahead, whole, row), i_b, tl.where(before >= 0, before, before + T), group, c, GROUP)
        tl.store(at, kept, mask=ok)
    if dx is not None:
        gain, g_batch, g_stride = of_gain
        g = tl.load(gain + i_b * g_batch + t.to(tl.int64) * g_stride + group, mask=r < rows, other=0.0)
        x = tl.load(_at(of_x, i_b, t, group, c, GROUP), mask=ok, other=0.0).to(tl.float32)
        own = (r.to(tl.int64) * GROUP)[:, None] + c
        tl.store(dx + own, (d * g.to(tl.float32)[:, None]).to(dx.dtype.element_ty), mask=ok)
        tl.store(dgain + r, tl.sum(d * x, axis=1).to(dgain.dtype.element_ty), mask=r < rows)


WAY_OUT = "the fused sum of both directions; ask for backend='torch', which has them"
NONE = (None, 0, 0)


def _of(x: Tensor | None) -> tuple[Any, ...]:
    """(x [B, T, ·] with a contiguous last axis, strides of batch and time)."""
    return NONE if x is None else strided(x.flatten(2))


def _settings(like: Tensor, grouped: bool, late: int) -> tuple[int, int, dict[str, Any]]:
    """(programs, rows, the compile-time constants). grouped: a row is a head, else as many channels as fit."""
    width = math.prod(like.shape[2:])
    group = like.shape[-1] if grouped else table.part(width)
    rows = like.shape[0] * like.shape[1] * (width // group)
    padded, held, warps = table.reversal(group, rows)
    settings = {"inner": width // group, "GROUP": group, "LATE": late, "W": padded, "R": held, "num_warps": warps}
    return -(-rows // held), rows, settings


def _reverse(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    programs, rows, settings = _settings(x, False, 0)
    launch(join_forward, (programs,), NONE, _of(x), NONE, NONE, out, x.shape[1], rows, **settings)
    return out


def _join(ahead: Tensor, back: Tensor, x: Tensor | None, gain: Tensor | None, late: int) -> Tensor:
    out = ahead.new_empty(ahead.shape)
    programs, rows, settings = _settings(ahead, x is not None, late)
    given = (_of(ahead), _of(back), _of(x), _of(gain))
    launch(join_forward, (programs,), *given, out, ahead.shape[1], rows, **settings)
    return out


def _pulled(dy: Tensor, x: Tensor | None, gain: Tensor | None, late: int) -> list[Tensor]:
    """The gradients of back, of ahead where it was late, and of x and gain where there are any."""
    dback, dahead = dy.new_empty(dy.shape), dy.new_empty(dy.shape) if late else None
    dx, dgain = (None if y is None else y.new_empty(y.shape) for y in (x, gain))
    programs, rows, settings = _settings(dy, x is not None, late)
    launch(
        join_backward, (programs,), _of(dy), _of(x), _of(gain), (dahead, dback, dx, dgain), dy.shape[1], rows,
        **settings,
    )  # fmt: skip
    return [y for y in (dback, dahead, dx, dgain) if y is not None]


class _Reversed(torch.autograd.Function):
    """The reversed copy, whose gradient is one, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            found: Tensor = reverse(x)
        return found

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return reverse(dy)


class _Joined(torch.autograd.Function):
    """The operator with its gradient."""

    @staticmethod
    def forward(ctx: Any, ahead: Tensor, back: Tensor, x: Tensor | None, gain: Tensor | None, late: int) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            found: Tensor = join(ahead, back, x, gain, late)
        ctx.save_for_backward(x, gain)
        ctx.late = late
        return found

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        refuse_second_order(WAY_OUT)
        x, gain = ctx.saved_tensors
        dback, *found = join_gradients(dy, x, gain, ctx.late)
        rest = iter(found)
        return next(rest) if ctx.late else dy, dback, *(None if y is None else next(rest) for y in (x, gain)), None


_GIVEN = "Tensor? x, Tensor? gain, int late"
reverse = operator("reverse_tokens(Tensor x) -> Tensor", _reverse, _Reversed.apply)
join = operator(f"join(Tensor ahead, Tensor back, {_GIVEN}) -> Tensor", _join, _Joined.apply)
join_gradients = operator(f"join_backward(Tensor dy, {_GIVEN}) -> Tensor[]", _pulled)
