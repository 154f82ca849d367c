"""The triangular inverse of the delta rule, one chunk a program (WY / UT transform, arXiv 2406.06484 §3).

(I + X)^-1 with X = b ⊙ strict(K Kᵀ ⊙ M) by block doubling: with D the inverse of the diagonal blocks of size m,
D - D X_m D, X_m the blocks of X just below them, is the inverse of the blocks of size 2m. Unlike a product of powers of
X it stays as well conditioned as forward substitution when keys repeat.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.tiles import ERASE, READ, between, load_rows, product, split, store_lower
from dsf.kernels.triton.packed import place_of_chunk


@triton.jit
def delta_transform(
    q, k, scalars, system_of, solve, scores_of, table,
    tokens, heads: tl.constexpr, length, plane,
    q_b, q_t: tl.constexpr, q_h, q_group, k_b, k_t: tl.constexpr, k_h, k_group,
    N: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr,
    DECAY: tl.constexpr, READ_SCALED: tl.constexpr, SCORES: tl.constexpr, KEYWISE: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, TERMS: tl.constexpr, ROW_TERMS: tl.constexpr,
    STATE_TERMS: tl.constexpr, PITCH: tl.constexpr,
):  # fmt: skip
    """Write the inverse less the identity, in STATE_TERMS; rows beyond the sequence are zero.

    SCORES: also, in ROW_TERMS, c_i q_i·k_j M_ij of j ≤ i, for both walks and every slice of P. Triangles of a chunk lie
    PITCH entries behind those of the one before.
    """
    chunk, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = lane // heads, lane % heads
    k += batch * k_b + head // k_group * k_h
    begin, end = place_of_chunk(table, chunk, tokens, L)
    scalars += lane * length + chunk * L - begin
    at = (lane * (length // L) + chunk) * PITCH
    keys, local = tl.arange(0, BN), tl.arange(0, L)
    rows = begin + local
    if KEYWISE:
        system_of += (batch * tokens * heads + head) * L
        system = load_rows(system_of, heads * L, rows, end, local, L, L, tl.float32)
    else:
        strict = local[:, None] > local[None, :]
        rows_k = load_rows(k, k_t, rows, end, keys, N, BN, KIND)
        system = tl.dot(rows_k, tl.trans(rows_k), input_precision=PRECISION)
        if DECAY:
            weights = between(scalars, rows, local[:, None] >= local[None, :], False)
            if SCORES:
                q += batch * q_b + head // q_group * q_h
                rows_q = load_rows(q, q_t, rows, end, keys, N, BN, KIND)
                scores = tl.dot(rows_q, tl.trans(rows_k), input_precision=PRECISION) * weights
                if READ_SCALED:
                    scores *= tl.load(scalars + READ * plane + rows)[:, None]
                store_lower(scores_of + at, local, split(scores, ROW_TERMS, KIND), L, ROW_TERMS)
            system = tl.where(strict, system * weights, 0.0)
        else:
            system = tl.where(strict, system, 0.0)
    system *= tl.load(scalars + ERASE * plane + rows)[:, None]
    inverse = unit_lower_inverse(system, local, LEVELS, KIND, PRECISION, TERMS)
    if STATE_TERMS == 2:
        inverse = refined(system, inverse, KIND, PRECISION)
    store_lower(solve + at, local, split(inverse, STATE_TERMS, KIND, True), L, STATE_TERMS)


@triton.jit
def unit_lower_inverse(
    system, local, LEVELS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, TERMS: tl.constexpr
):
    """(I + system)^-1 - I of a strictly lower triangular matrix [L, L], by block doubling.

    Less the identity all along, so that what products start from is never rounded, and operands are but corrections.
    """
    # blocks of size one have inverse 1, so the first doubling needs no product
    inverse = tl.where((local[:, None] ^ local[None, :]) == 1, -system, 0.0)
    for level in tl.static_range(1, LEVELS):
        block = local >> level
        below = tl.where((block[:, None] ^ block[None, :]) == 1, system, 0.0)
        step = _product(inverse, below, below, KIND, PRECISION, TERMS)
        inverse -= _product(step, inverse, step, KIND, PRECISION, TERMS)
    return inverse


@triton.jit
def refined(system, inverse, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """One step of Newton's method on (I + system)^-1 - I that was made of rounded operands: twice their digits."""
    main = split(inverse, 2, KIND)
    left = product(split(system, 2, KIND), main, 2, 2, PRECISION, inverse + system)  # (I + system) inverse - I
    return inverse - tl.dot(main[0], left.to(KIND), left, input_precision=PRECISION)


@triton.jit
def _product(a, b, out, KIND: tl.constexpr, PRECISION: tl.constexpr, TERMS: tl.constexpr):
    """out + a b of float32 matrices; bfloat16 operands are split into a leading part and (TERMS 3) what it leaves."""
    if KIND == tl.float32:
        return tl.dot(a, b, out, input_precision=PRECISION)
    a_main, b_main = a.to(KIND), b.to(KIND)
    out = tl.dot(a_main, b_main, out)
    if TERMS == 3:
        out += tl.dot(a_main, (b - b_main.to(tl.float32)).to(KIND))
        out += tl.dot((a - a_main.to(tl.float32)).to(KIND), b_main)
    return out
