"""Products of a matrix with the rows of a few tokens, behind a norm, a gate or a sum: what a decoded token consists of.

As operators of one launch, without gradients. The matrix is read once for all rows, by programs that each own some of
its rows in whole: all its numbers are asked for before the kernel that makes x has ended (early.py). Every program
makes the norm of x again, which costs less than a launch that would make it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels.triton.early import begin, early
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.layer import table
from dsf.kernels.triton.layer.norm import gate_of
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.sizes import power


@triton.jit
def _row(
    of_x, of_gate, scales, more, normal, r, eps, at, inside, about: tl.constexpr, act: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """What row r is before the product, in float32, of its numbers `at` that are `inside`, times `scales` if SCALED.
    The first program stores its sum, and itself if `normal`."""
    SIZE: tl.constexpr = about[0] * about[1]
    x, x_stride = of_x
    gate, g_stride = of_gate
    y = tl.load(x + r * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if more is not None:
        other, o_stride, total = more
        y += tl.load(other + r * o_stride + at, mask=inside, other=0.0).to(tl.float32)
        summed = y.to(total.dtype.element_ty)
        tl.store(total + r * SIZE + at, summed, mask=inside & (tl.program_id(0) == 0))
        y = summed.to(tl.float32)  # the norm is that of what is kept
    value = 1.0
    if gate is not None:
        value, _ = gate_of(tl.load(gate + r * g_stride + at, mask=inside, other=0.0).to(tl.float32), act[2])
        if act[1]:
            y *= value
    if act[0]:
        y *= tl.rsqrt(tl.sum(y * y, axis=1) / about[1] + eps)[:, None]
    if SCALED:
        y *= scales
    if gate is not None and not act[1]:
        y *= value
    if normal is not None:
        kept = y.to(normal.dtype.element_ty)
        tl.store(normal + r * SIZE + at, kept, mask=inside & (tl.program_id(0) == 0))
    return y


@triton.jit
def product(
    of_x, of_gate, weight, matrix, bias, out, more, normal, N, eps, about: tl.constexpr, act: tl.constexpr,
    ROWS: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [ROWS, N] = rows · matrixᵀ + bias, for matrix [N, groups · size], bias [N] or None, and rows that
    `norm_forward` would make of x.

    of_x, of_gate: (tensor, stride of a row). more: None, or (a tensor that is added to x first, its stride of a row,
    the sum [ROWS, ·]). normal: None, or where the rows are kept, [ROWS, ·]. about: (groups, their size, ways: how many
    consecutive groups have weights of their own). act: (norm, gate before the norm, which activation, the first output
    that passes a sigmoid, the one after the last). AHEAD: weight, matrix and bias are older than the launch before.
    Grid (N / BN).
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    g = tl.arange(0, G)[:, None]
    c = tl.arange(0, W)[None, :]
    at, inside = g * about[1] + c, (g < about[0]) & (c < about[1])
    if not AHEAD:
        begin(EARLY)
    here = (n < N)[:, None, None] & inside[None, :, :]
    rows = tl.load(matrix + (n * (about[0] * about[1]))[:, None, None] + at[None, :, :], mask=here, other=0.0)
    scales, added = 0.0, 0.0
    if weight is not None:  # heads share the weights of their groups
        scales = tl.load(weight + g % about[2] * about[1] + c, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        added = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if AHEAD:
        begin(EARLY)
    for r in tl.static_range(ROWS):
        y = _row(of_x, of_gate, scales, more, normal, r, eps, at, inside, about, act, weight is not None)
        y = y.to(matrix.dtype.element_ty).to(tl.float32)  # as it would be stored
        found = tl.sum(tl.sum(rows.to(tl.float32) * y[None, :, :], axis=2), axis=1) + added
        if act[4] > act[3]:
            stored = found.to(out.dtype.element_ty).to(tl.float32)
            found = tl.where((n >= act[3]) & (n < act[4]), tl.sigmoid(stored), found)
        tl.store(out + r * N + n, found.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def block_product(
    xs, weights, out, C, MAPS: tl.constexpr, SIZE: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """out [B, MAPS, C]: rows of each of xs, a (tensor, stride of a row), times a matrix of blocks, outputs first.

    Grid (C / BC, B).
    """
    row = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    begin(EARLY)
    for j in tl.static_range(MAPS):
        x, stride = xs[j]
        total = tl.zeros((BC,), tl.float32)
        for i in tl.static_range(SIZE):
            seen = tl.load(x + row * stride + c // SIZE * SIZE + i, mask=c < C, other=0.0).to(tl.float32)
            total += seen * tl.load(weights[j] + c * SIZE + i, mask=c < C, other=0.0).to(tl.float32)
        tl.store(out + (row * MAPS + j) * C + c, total.to(out.dtype.element_ty), mask=c < C)


BLOCK = 128  # channels of a program


def _rows(x: Tensor, width: int) -> tuple[Tensor, Any]:
    """(x as [rows, width] with contiguous rows, the stride of a row)."""
    x = x.reshape(-1, width)
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, x.stride(0)


def _launch(
    x: Tensor, matrix: Tensor, bias: Tensor | None, gate: Tensor | None, weight: Tensor | None, other: Tensor | None,
    total: Tensor | None, normal: Tensor | None, group: int, norm: bool, first: bool, activation: int, eps: float,
    ahead: bool, low: int = 0, high: int = 0,
) -> Tensor:  # fmt: skip
    outputs, width = matrix.shape
    inner = width // group
    ways = 1 if weight is None else weight.numel() // group
    of_x, nothing = _rows(x, width), (None, 0)
    count = of_x[0].shape[0]
    out = x.new_empty(count, outputs, dtype=matrix.dtype)
    held = max(power(group), table.LANES // power(inner))
    block, warps = table.product(outputs, power(inner) * held)
    launch(
        product, (-(-outputs // block),), of_x, nothing if gate is None else _rows(gate, width),
        None if weight is None else weight.contiguous(), matrix, bias, out,
        None if other is None else (*_rows(other, width), total), normal, outputs, eps, about=(inner, group, ways),
        act=(norm, first, activation, low, high), ROWS=count, BN=block, G=power(inner), W=held, AHEAD=ahead,
        num_warps=warps, **early(x.device),
    )  # fmt: skip
    return out


def _product(
    x: Tensor, matrix: Tensor, bias: Tensor | None, gate: Tensor | None, weight: Tensor | None, *options: Any
) -> Tensor:
    return _launch(x, matrix, bias, gate, weight, None, None, None, *options)


def _added(
    x: Tensor, other: Tensor, matrix: Tensor, bias: Tensor | None, weight: Tensor | None, eps: float, ahead: bool,
    keep: bool = False, low: int = 0, high: int = 0,
) -> list[Tensor]:  # fmt: skip
    """The sum, the product, and the norm between them if it is to be kept."""
    total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, other.dtype))
    normal = x.new_empty(x.shape, dtype=matrix.dtype) if keep else None
    made = _launch(
        x, matrix, bias, None, weight, other, total, normal, matrix.shape[1], True, False, 0, eps, ahead, low, high
    )
    return [total, made] if normal is None else [total, made, normal]


def _by_blocks(xs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    channels, size = xs[0].shape[-1], weights[0].shape[-1]
    of_xs = tuple(_rows(x, channels) for x in xs)
    rows, maps = of_xs[0][0].shape[0], len(xs)
    out = xs[0].new_empty(rows, maps * channels)
    programs = -(-channels // BLOCK)
    launch(
        block_product, (programs, rows), of_xs, tuple(w.contiguous() for w in weights), out, channels, MAPS=maps,
        SIZE=size, BC=BLOCK, num_warps=BLOCK // 32, **early(xs[0].device, programs * rows),
    )  # fmt: skip
    return out


block_products = operator("block_products(Tensor[] xs, Tensor[] weights) -> Tensor", _by_blocks)
row_product = operator(
    "row_product(Tensor x, Tensor matrix, Tensor? bias, Tensor? gate, Tensor? weight, int group, bool norm, "
    "bool gate_first, int activation, float eps, bool ahead, int low=0, int high=0) -> Tensor",
    _product,
)
added_row_product = operator(
    "added_row_product(Tensor x, Tensor other, Tensor matrix, Tensor? bias, Tensor? weight, float eps, bool ahead, "
    "bool keep=False, int low=0, int high=0) -> Tensor[]",
    _added,
)
