"""Mixtures of two tensors by shares a channel: a program reads R tokens of BC channels once and writes all of them."""

from __future__ import annotations

import triton
import triton.language as tl


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
