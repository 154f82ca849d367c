"""Rows stored in float16, which has three more binary digits than bfloat16, with a power of two for each row.

The factors of the rows are in a separate array, which other dtypes do not have.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.states import power_of, power_of_two
from dsf.kernels.triton.chunk.tiles import load_rows, store_rows


@triton.jit
def store_half(base, row_stride, factors, rows, end, local, columns, width: tl.constexpr, padded: tl.constexpr, x):
    """Store rows of float32 x for load_half."""
    if base.dtype.element_ty == tl.float16:
        powers = power_of(tl.max(tl.abs(x), axis=1))
        tl.store(factors + local, power_of_two(powers))
        x *= power_of_two(-powers)[:, None]
    store_rows(base, row_stride, rows, end, columns, width, padded, x)


@triton.jit
def load_half(base, row_stride, factors, rows, end, local, columns, width: tl.constexpr, padded: tl.constexpr):
    """Rows `rows` of a matrix as float32, as load_rows; local: their positions in factors."""
    found = load_rows(base, row_stride, rows, end, columns, width, padded, tl.float32)
    if base.dtype.element_ty == tl.float16:
        found *= tl.load(factors + local)[:, None]
    return found
