"""What one forward call costs: operations, and bytes in and out."""

from __future__ import annotations

import math

import torch

from dsf.call.bind import Sizes, angle_width, cached_heads, key_width
from dsf.language.expr import KEY, VALUE
from dsf.language.spec import Spec

CONVOLUTION = "convolution"  # the form that only time-invariant systems have


def cache_shape(spec: Spec, sizes: Sizes) -> tuple[int, ...]:
    """[B, tokens in the cache, numbers a token] of attention's cache; a bias is one number."""
    (k_heads, v_heads), (b_heads, _) = cached_heads(spec, sizes)
    kept = sizes.tokens if spec.system.window is None else min(sizes.tokens, spec.system.window)
    return sizes.batch, kept, k_heads * key_width(spec, sizes) + v_heads * sizes.p + b_heads


def cache_bytes(spec: Spec, sizes: Sizes, dtype: torch.dtype) -> int:
    """Bytes of attention's cache, without lengths: keys and values in `dtype`, biases and angles in the state's."""
    batch, kept, numbers = cache_shape(spec, sizes)
    biases = cached_heads(spec, sizes)[1][0]
    wide = state_bytes((kept * biases + cache_angles(spec, sizes),), dtype)
    return batch * (kept * (numbers - biases) * dtype.itemsize + wide)


def cache_angles(spec: Spec, sizes: Sizes) -> int:
    """Angles in attention's cache of one sequence, 0 without turns."""
    heads = cached_heads(spec, sizes)[1][1]
    return heads * angle_width(spec, sizes) if heads else 0


def state_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a state of this shape: float64 of float64 inputs, else float32."""
    return math.prod(shape) * (8 if dtype == torch.float64 else 4)


def by_channel(spec: Spec) -> bool:
    """True where corrections on the Key axis stand beside what differs by channel: torch runs one system a channel."""
    if not spec.rank or spec.acts_on_values:
        return False
    seen = [spec.gated_read[1], *(r.normal.decay for r in spec.rows)]
    seen += [x for r in spec.rows for c in r.normal.corrections for x in (c.scale, c.left, c.right)]
    return any(VALUE in x.axes for x in seen)


def flops(spec: Spec, sizes: Sizes, form: str, chunk: int) -> int:
    """Multiplications and additions of one forward call, without gates and feature maps.

    recurrent and scan: decay NP, write 2NP, read 2NP, 4NP a correction for every row (a scan combines each row twice).
    chunk: scores and outputs 2(N + P) for every pair inside a chunk, 4NP a token to write and read states; with
    corrections beside what differs by channel, P times that of one channel.
    """
    b, t, h, n, p = sizes.batch, sizes.tokens, sizes.heads, sizes.n, sizes.p
    rows = t * spec.micro
    if spec.is_attention:
        window = t if spec.system.window is None else min(t, spec.system.window)
        return b * h * window * (2 * t + 1 - window) * (key_width(spec, sizes) + p)
    step = (3 + 4 * spec.rank) * n * p
    if form in ("chunk", "scan") and by_channel(spec):
        h, p = h * p, 1
    if form in ("chunk", "scan") and not spec.is_elementwise and not (form == "scan" and not spec.rank):
        pairs = rows * chunk * spec.micro * (1 + spec.rank)
        return b * h * (pairs * (n + p) + 4 * rows * n * p * (1 + spec.rank))
    if form == CONVOLUTION:  # the impulse response, and three FFTs of 2T points
        points = 2 * t
        return h * p * (2 * t * n + b * 3 * int(2.5 * points * math.log2(max(points, 2))))
    if form == "kernel":
        return b * h * (t * rows * (step // p + 2 * n + 2 * p))
    if form in ("scan", "chunk"):
        return b * h * (2 * 3 * rows * n * p + 2 * t * n * p)
    if form == "naive":
        return b * h * p * (2 * rows * n * n + 2 * t * n)
    return b * h * (rows * step + 2 * t * n * p)


def io_bytes(spec: Spec, sizes: Sizes, dtype: torch.dtype) -> int:
    """Bytes of all inputs read once and y written once."""
    width = torch.empty((), dtype=dtype).element_size()
    total = sizes.batch * sizes.tokens * sizes.heads * sizes.p
    for entry in spec.inputs:
        numbers = sizes.groups.get(entry.name, sizes.heads) * (entry.kind.steps or 1)
        sides = {KEY: sizes.keys // 2 if entry.kind.pair else sizes.keys, VALUE: sizes.p}
        for axis in entry.kind.axes:
            numbers *= sides[axis]
        total += numbers * (sizes.batch * sizes.tokens if entry.kind.time else 1)
    return total * width
