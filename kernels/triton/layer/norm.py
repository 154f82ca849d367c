"""RMS norm of groups of contiguous numbers, of a sum of two tensors, with a gate before or after it; its gradients.

Groups are rows of a tile, their numbers on lanes. A token has `inner` groups for each of `ways` weights: heads that
share a weight are groups of one way; parts of a channel axis with separate weights are ways. The backward pass needs
only the inputs: it computes the sum of squares again, along with another sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton import functions as fn
from dsf.kernels.triton.early import begin


@triton.jit
def _where(batch_stride, stride, r, c, way, T, inner: tl.constexpr, ways: tl.constexpr, GROUP: tl.constexpr):
    """The offsets of the numbers c of groups r. A head's groups lie side by side, one of each way."""
    token = r // inner
    at = (token // T).to(tl.int64) * batch_stride + (token % T).to(tl.int64) * stride
    return (at + (r % inner * ways + way) * GROUP)[:, None] + c


@triton.jit
def gate_of(g, ACT: tl.constexpr):
    """The gate's activation and its derivative. ACT: 0 silu, 1 sigmoid, 2 gelu (1 + tanh z = 2 sigmoid(2 z))."""
    if ACT == 2:
        s = fn.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
        value, slope = g * s, s * (1.0 + g * (1.0 - s) * (1.5957691216057308 + 0.21406444881780076 * g * g))
    else:
        s = fn.sigmoid(g)
        if ACT == 1:
            value, slope = s, s * (1.0 - s)
        else:
            value, slope = g * s, s * (1.0 + g * (1.0 - s))
    return value, slope


@triton.jit(do_not_specialize=["T", "rows"])
def norm_forward(
    of_x, of_gate, weight, out, more, T, rows, eps,
    inner: tl.constexpr, ways: tl.constexpr, GROUP: tl.constexpr, NORM: tl.constexpr, FIRST: tl.constexpr,
    ACT: tl.constexpr, W: tl.constexpr, R: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [B, T, ways · inner · GROUP], contiguous: grid (ways · rows / R), rows = B · T · inner.

    of_x, of_gate: (tensor, strides of batch and time). FIRST: the gate comes before the norm. weight [ways · GROUP]; it
    and the gate's tensor may be None. more: None, or (a tensor that is added to x first, its strides of batch and time,
    the sum, which lies as out does).
    """
    x, x_batch, x_stride = of_x
    gate, g_batch, g_stride = of_gate
    begin(EARLY)
    way = tl.program_id(0) % ways
    r = tl.program_id(0) // ways * R + tl.arange(0, R)
    c = tl.arange(0, W)[None, :]
    ok = (r < rows)[:, None] & (c < GROUP)
    at = x + _where(x_batch, x_stride, r, c, way, T, inner, ways, GROUP)
    y = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    if more is not None:
        other, o_batch, o_stride, total = more
        at = other + _where(o_batch, o_stride, r, c, way, T, inner, ways, GROUP)
        y += tl.load(at, mask=ok, other=0.0).to(tl.float32)
        summed = y.to(total.dtype.element_ty)
        at = total + _where(T * (ways * inner * GROUP), ways * inner * GROUP, r, c, way, T, inner, ways, GROUP)
        tl.store(at, summed, mask=ok)
        y = summed.to(tl.float32)  # the norm is that of what is kept
    value = tl.full((R, W), 1.0, tl.float32)
    if gate is not None:
        at = gate + _where(g_batch, g_stride, r, c, way, T, inner, ways, GROUP)
        value, _ = gate_of(tl.load(at, mask=ok, other=0.0).to(tl.float32), ACT)
        if FIRST:
            y *= value
    if NORM:
        y *= tl.rsqrt(tl.sum(y * y, axis=1) / GROUP + eps)[:, None]
    if weight is not None:
        y *= tl.load(weight + way * GROUP + c, mask=c < GROUP, other=0.0).to(tl.float32)
    if gate is not None and not FIRST:
        y *= value
    at = out + _where(T * (ways * inner * GROUP), ways * inner * GROUP, r, c, way, T, inner, ways, GROUP)
    tl.store(at, y.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["T", "rows", "tiles"])
def norm_backward(
    dy, d_batch, d_stride, of_x, of_gate, weight, outs, more, T, rows, tiles, eps,
    inner: tl.constexpr, ways: tl.constexpr, GROUP: tl.constexpr, NORM: tl.constexpr, FIRST: tl.constexpr,
    ACT: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """dx, dgate, contiguous, and a row of sums for the weight from each program of `tiles` tiles.

    of_x, of_gate: (tensor, strides of batch and time). outs: dx, dgate or None, sums [programs / ways, ways · GROUP] or
    None, room for norm_forward's result or None. more: None, or as of_x a gradient of x that is known already. Grid
    (ways · rows / R / tiles).
    """
    x, x_batch, x_stride = of_x
    gate, g_batch, g_stride = of_gate
    dx, dgate, sums, again = outs
    way = tl.program_id(0) % ways
    part = tl.program_id(0) // ways
    c = tl.arange(0, W)[None, :]
    w = tl.full((1, W), 1.0, tl.float32)
    if weight is not None:
        w = tl.load(weight + way * GROUP + c, mask=c < GROUP, other=0.0).to(tl.float32)
    total = tl.zeros((R, W), tl.float32)
    for tile in range(part * tiles, part * tiles + tiles):
        r = tile * R + tl.arange(0, R)
        ok = (r < rows)[:, None] & (c < GROUP)
        at = dy + _where(d_batch, d_stride, r, c, way, T, inner, ways, GROUP)
        d = tl.load(at, mask=ok, other=0.0).to(tl.float32)
        at = x + _where(x_batch, x_stride, r, c, way, T, inner, ways, GROUP)
        y = tl.load(at, mask=ok, other=0.0).to(tl.float32)
        own = _where(T * (ways * inner * GROUP), ways * inner * GROUP, r, c, way, T, inner, ways, GROUP)
        value, slope, u = d, d, y
        if gate is not None:
            at = gate + _where(g_batch, g_stride, r, c, way, T, inner, ways, GROUP)
            value, slope = gate_of(tl.load(at, mask=ok, other=0.0).to(tl.float32), ACT)
            if FIRST:
                u = y * value
        root = tl.full((R, 1), 1.0, tl.float32)
        if NORM:
            root = tl.rsqrt(tl.sum(u * u, axis=1) / GROUP + eps)[:, None]
        normal = u * root  # before weight and gate
        if again is not None:
            made = normal * w
            if gate is not None and not FIRST:
                made *= value
            tl.store(again + own, made.to(again.dtype.element_ty), mask=ok)
        if gate is not None and not FIRST:
            tl.store(dgate + own, (d * normal * w * slope).to(dgate.dtype.element_ty), mask=ok)
            d *= value
        total += d * normal
        d *= w
        if NORM:
            d = root * (d - normal * (tl.sum(d * normal, axis=1) / GROUP)[:, None])
        if gate is not None and FIRST:
            tl.store(dgate + own, (d * y * slope).to(dgate.dtype.element_ty), mask=ok)
            d *= value
        if more is not None:
            other, o_batch, o_stride = more
            at = other + _where(o_batch, o_stride, r, c, way, T, inner, ways, GROUP)
            d += tl.load(at, mask=ok, other=0.0).to(tl.float32)
        tl.store(dx + own, d.to(dx.dtype.element_ty), mask=ok)
    if sums is not None:
        to = sums + part.to(tl.int64) * (ways * GROUP) + way * GROUP + tl.arange(0, W)
        tl.store(to, tl.sum(total, axis=0), mask=tl.arange(0, W) < GROUP)


@triton.jit(do_not_specialize=["rows"])
def sum_weight(sums, weight, rows, SIZE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Sums over rows of [rows, SIZE], in their order. Grid (SIZE / BC)."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    total = tl.zeros((BR, BC), tl.float32)
    for r0 in range(0, rows, BR):
        r = r0 + tl.arange(0, BR)
        at = sums + r[:, None].to(tl.int64) * SIZE + c[None, :]
        total += tl.load(at, mask=(r[:, None] < rows) & (c < SIZE)[None, :], other=0.0)
    tl.store(weight + c, tl.sum(total, axis=0).to(weight.dtype.element_ty), mask=c < SIZE)
