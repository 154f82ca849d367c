"""Running sums of log decays as the attention kernels take them, and back.

In float64, since the sums go into exponents as differences, of which float32 would keep too few digits after many
tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.functions import LOG2E

SIZE = tl.constexpr(1024)  # tokens of a program, and at a time
NEAR = tl.constexpr(128)  # tokens whose sums are also kept less that of the first one; tiles of attention divide it


@triton.jit
def _up_to(x, step, begin, at, T):
    """The sum of the tokens before `begin` (or, of a negative step, behind it) in float64. Every program makes its own;
    this costs less than a launch that makes all."""
    total = tl.zeros([SIZE], tl.float64)
    for start in range(0, begin, SIZE):
        total += tl.load(x + (start + at).to(tl.int64) * step, mask=start + at < T, other=0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["T", "batch", "head", "token"])
def attention_sums(log, c, T, H, batch, head, token):
    """c [B, H, 3, T] of log [B, H, T]: the sums up to every token in two float32 parts, and less that of the first of
    NEAR tokens, in the units of exponents of 2. batch, head, token: strides of log."""
    bh, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE
    log += bh // H * batch + bh % H * head
    c += 3 * bh * T
    at = tl.arange(0, SIZE)
    before = _up_to(log, token, start, at, T)
    at += start
    x = tl.load(log + at.to(tl.int64) * token, mask=at < T, other=0.0).to(tl.float64)
    sums = before + tl.cumsum(x, 0)
    first = sums.to(tl.float32)
    tl.store(c + at, first, mask=at < T)
    tl.store(c + T + at, (sums - first.to(tl.float64)).to(tl.float32), mask=at < T)
    near = tl.reshape(sums, [SIZE // NEAR, NEAR])
    near -= tl.sum(tl.where(tl.arange(0, NEAR)[None] == 0, near, 0.0), 1)[:, None]
    tl.store(c + 2 * T + at, (tl.reshape(near, [SIZE]) * LOG2E).to(tl.float32), mask=at < T)


@triton.jit(do_not_specialize=["T"])
def attention_sums_gradient(dc, dlog, T):
    """dlog [B, H, T]: the sums of dc [B, H, T] from every token on."""
    bh, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE
    dc += bh * T + T - 1
    dlog += bh * T + T - 1
    at = tl.arange(0, SIZE)
    behind = _up_to(dc, -1, start, at, T)
    at += start
    x = tl.load(dc - at, mask=at < T, other=0.0).to(tl.float64)
    tl.store(dlog - at, (behind + tl.cumsum(x, 0)).to(dlog.dtype.element_ty), mask=at < T)
