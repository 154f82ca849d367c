"""A sequence plus a reversed one, and the gradients: rows of one token and group of channels, these on lanes."""

from __future__ import annotations

import triton
import triton.language as tl


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
