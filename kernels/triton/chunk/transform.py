"""The triangular inverse of the delta rule, one chunk a program (WY / UT transform, arXiv 2406.06484 §3).

(I + X)^-1 with X = b ⊙ strict(K Kᵀ ⊙ M) by block doubling: with D the inverse of the diagonal blocks of size m,
D - D X_m D, X_m the blocks of X just below them, is the inverse of the blocks of size 2m. Unlike a product of powers of
X it stays as well conditioned as forward substitution when keys repeat.

Lower triangles [L, L] between a chunk's rows (inverses, scores) are stored without most of their zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.scalars import ERASE, READ, between
from dsf.kernels.triton.chunk.tiles import Chunked, is_later, load_rows, product, split
from dsf.kernels.triton.packed import place_of_chunk
from dsf.kernels.triton.structs import of_head


@dataclass(frozen=True, repr=False)
class Transform(Chunked):
    """STATE_TERMS: bfloat16 terms of the stored inverse. ROW_TERMS: terms of the stored scores.

    PITCH: numbers stored for each chunk. A chunk has 2 ^ LEVELS rows.
    """

    LEVELS: int
    SCORES: bool
    ROW_TERMS: int
    STATE_TERMS: int
    PITCH: int


@triton.jit
def delta_transform(q, k, scalars, system_of, solve, scores_of, table, sizes, C: tl.constexpr):
    """Store the inverse less the identity, in STATE_TERMS; rows beyond the sequence are zero.

    SCORES: also store c_i q_i·k_j M_ij for j ≤ i, in ROW_TERMS, for both walks and all slices of P.
    """
    chunk, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = lane // sizes.heads, lane % sizes.heads
    k = of_head(k, batch, head)
    begin, end = place_of_chunk(table, chunk, sizes.tokens, C.L)
    scalars += lane * sizes.length + chunk * C.L - begin
    at = (lane * (sizes.length // C.L) + chunk) * C.PITCH
    keys, local = tl.arange(0, C.BN), tl.arange(0, C.L)
    rows = begin + local
    if C.KEYWISE:
        system_of += (batch * sizes.tokens * sizes.heads + head) * C.L
        system = load_rows(system_of, sizes.heads * C.L, rows, end, local, C.L, C.L, tl.float32)
    else:
        strict = is_later(local[:, None], local[None, :], C.GROUP)
        rows_k = load_rows(k.at, k.token, rows, end, keys, C.N, C.BN, C.KIND)
        system = tl.dot(rows_k, tl.trans(rows_k), input_precision=C.PRECISION)
        if C.DECAY:
            weights = between(scalars, sizes.plane, rows, local[:, None] >= local[None, :], False, C.FINE)
            if C.SCORES:
                q = of_head(q, batch, head)
                rows_q = load_rows(q.at, q.token, rows, end, keys, C.N, C.BN, C.KIND)
                scores = tl.dot(rows_q, tl.trans(rows_k), input_precision=C.PRECISION) * weights
                if C.READ_SCALED:
                    scores *= tl.load(scalars + READ * sizes.plane + rows)[:, None]
                store_lower(scores_of + at, local, split(scores, C.ROW_TERMS, C.KIND), C.L, C.ROW_TERMS)
            system = tl.where(strict, system * weights, 0.0)
        else:
            system = tl.where(strict, system, 0.0)
    system *= tl.load(scalars + ERASE * sizes.plane + rows)[:, None]
    inverse = unit_lower_inverse(system, local, C.LEVELS, C.KIND, C.PRECISION)
    if C.STATE_TERMS == 2:
        inverse = refined(system, inverse, C.KIND, C.PRECISION)
    store_lower(solve + at, local, split(inverse, C.STATE_TERMS, C.KIND, True), C.L, C.STATE_TERMS)


@triton.jit
def unit_lower_inverse(system, local, LEVELS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """(I + system)^-1 - I of a strictly lower triangular matrix [L, L], by block doubling.

    The identity is never added, so that products start from unrounded numbers and only corrections are rounded.
    """
    # blocks of size one are their own inverse, so the first doubling needs no product
    inverse = tl.where((local[:, None] ^ local[None, :]) == 1, -system, 0.0)
    for level in tl.static_range(1, LEVELS):
        block = local >> level
        below = tl.where((block[:, None] ^ block[None, :]) == 1, system, 0.0)
        step = tl.dot(inverse.to(KIND), below.to(KIND), below, input_precision=PRECISION)
        inverse -= tl.dot(step.to(KIND), inverse.to(KIND), step, input_precision=PRECISION)
    return inverse


@triton.jit
def refined(system, inverse, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """One Newton step for (I + system)^-1 - I, which doubles the digits of an inverse made from rounded operands."""
    main = split(inverse, 2, KIND)
    left = product(split(system, 2, KIND), main, 2, 2, PRECISION, inverse + system)  # (I + system) inverse - I
    return inverse - tl.dot(main[0], left.to(KIND), left, input_precision=PRECISION)


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
