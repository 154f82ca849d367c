"""Rows kept in float16: three digits more than bfloat16, times powers of two so that their size is of no account.

The power of two by which a row must be multiplied is in an array of its own, which other dtypes do not have.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.states import power_of, power_of_two
from dsf.kernels.triton.chunk.tiles import load_rows, store_rows


@triton.jit
def store_half(base, row_stride, factors, rows, end, local, columns, width: tl.constexpr, padded: tl.constexpr, x):
    """Write rows of float32 x where load_half would read them."""
    if base.dtype.element_ty == tl.float16:
        powers = power_of(tl.max(tl.abs(x), axis=1))
        tl.store(factors + local, power_of_two(powers))
        x *= power_of_two(-powers)[:, None]
    store_rows(base, row_stride, rows, end, columns, width, padded, x)


@triton.jit
def load_half(base, row_stride, factors, rows, end, local, columns, width: tl.constexpr, padded: tl.constexpr):
    """Rows `rows` of a matrix as load_rows reads them, in float32; local: their numbers in factors."""
    found = load_rows(base, row_stride, rows, end, columns, width, padded, tl.float32)
    if base.dtype.element_ty == tl.float16:
        found *= tl.load(factors + local)[:, None]
    return found
