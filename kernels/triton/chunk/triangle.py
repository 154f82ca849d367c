"""Lower triangles [L, L] between a chunk's rows (inverses, scores), stored without most of their zeros."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place_lower(base, local, L: tl.constexpr):
    """The addresses of a lower triangle [L, L], which of them are stored, and the distance to another triangle.

    Rows come in blocks of 16 (or L / 2, if that is less), of which the columns up to the last row's are stored. Memory
    has L / 2 rows: the last block of rows and, to the right of it, the first one, then the last but one and the second
    one, and so on. Two such blocks have L + 16 columns. A thread's rows are whole blocks apart: it needs one address.
    """
    BLOCK: tl.constexpr = 16 if L > 16 else L // 2
    LAST: tl.constexpr = L // BLOCK - 1
    block = local // BLOCK
    late = block > LAST // 2
    row = tl.where(late, LAST - block, block) * BLOCK + local % BLOCK
    start = 8 * (row * ((L + BLOCK) // 8) + tl.where(late, 0, L // 8 - block * (BLOCK // 8)))
    return base + start[:, None] + local[None, :], local[None, :] < ((block + 1) * BLOCK)[:, None], L // 2 * (L + BLOCK)


@triton.jit
def load_lower(base, local, L: tl.constexpr, kind: tl.constexpr, TERMS: tl.constexpr):
    """A lower triangle [L, L], zeros above it, in TERMS terms, each stored as a triangle of its own."""
    at, there, behind = _place_lower(base, local, L)
    main = tl.load(at, mask=there, other=0.0).to(kind)
    rest = main
    if TERMS == 2:
        rest = tl.load(at + behind, mask=there, other=0.0).to(kind)
    return main, rest


@triton.jit
def store_lower(base, local, x, L: tl.constexpr, TERMS: tl.constexpr):
    """Store x, one or two terms, as load_lower reads it."""
    at, there, behind = _place_lower(base, local, L)
    tl.store(at, x[0].to(base.dtype.element_ty), mask=there)
    if TERMS == 2:
        tl.store(at + behind, x[1].to(base.dtype.element_ty), mask=there)
