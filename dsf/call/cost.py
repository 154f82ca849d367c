"""What one forward call costs: operations, and bytes in and out."""

from __future__ import annotations

import math

import torch

from dsf.call.bind import Sizes, cached_heads, key_width
from dsf.language.expr import KEY, VALUE
from dsf.language.spec import Spec

CONVOLUTION = "convolution"  # the form that only time-invariant systems have


def cache_shape(spec: Spec, sizes: Sizes) -> tuple[int, ...]:
    """[B, tokens in the cache, numbers a token] of attention's cache; a bias is one number."""
    (k_heads, v_heads), (b_heads, _) = cached_heads(spec, sizes)
    kept = sizes.tokens if spec.system.window is None else min(sizes.tokens, spec.system.window)
    return sizes.batch, kept, k_heads * key_width(spec, sizes) + v_heads * sizes.p + b_heads


def flops(spec: Spec, sizes: Sizes, form: str, chunk: int) -> int:
    """Multiplications and additions of one forward call, without gates and feature maps.

    recurrent and scan: for every row NP for the decay, 2NP each to write and read, 4NP a correction (a scan combines
    each row twice). chunk: 2(N + P) for every pair of rows inside a chunk, 4NP a token to write and read states.
    """
    b, t, h, n, p = sizes.batch, sizes.tokens, sizes.heads, sizes.n, sizes.p
    rows = t * spec.micro
    if spec.is_attention:
        window = t if spec.system.window is None else min(t, spec.system.window)
        return b * h * window * (2 * t + 1 - window) * (key_width(spec, sizes) + p)
    step = (3 + 4 * spec.rank) * n * p
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
