"""Products of a matrix with few rows, behind a norm, a gate or a sum, as operators: one launch, without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.triton.early import early
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.layer import table
from dsf.kernels.triton.layer.product import block_product, product
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.sizes import power

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
