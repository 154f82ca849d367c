"""Lower triangles of a chunk's rows [L, L] in memory: inverses and scores, without what is zero."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place_lower(base, local, L: tl.constexpr):
    """Where a lower triangle [L, L] lies, what of it, and how far behind lies another.

    Of 16 rows the columns up to the last one's: first the last rows, beside them the first ones; then the last but
    these, and those after the first. A thread's rows lie whole blocks apart, so that it needs one address.
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
    """A lower triangle [L, L] in its terms, one behind the other; zeros above it."""
    at, there, behind = _place_lower(base, local, L)
    main = tl.load(at, mask=there, other=0.0).to(kind)
    rest = main
    if TERMS == 2:
        rest = tl.load(at + behind, mask=there, other=0.0).to(kind)
    return main, rest


@triton.jit
def store_lower(base, local, x, L: tl.constexpr, TERMS: tl.constexpr):
    """Write x where load_lower would read it."""
    at, there, behind = _place_lower(base, local, L)
    tl.store(at, x[0].to(base.dtype.element_ty), mask=there)
    if TERMS == 2:
        tl.store(at + behind, x[1].to(base.dtype.element_ty), mask=there)
