"""Functions that all chunk kernels use: a chunk's scalars and decays, and loads and stores of rows.

Notation inside the kernels (per head, one chunk of L rows): G the running sum of log decays from the chunk's first row,
M[i, j] = exp(G_i - G_j) for i ≥ j the decay between two rows, prefix = exp(G_i) seen from the chunk's first state,
suffix = exp(G_L - G_j) towards its last one. For decays of at most one no exponent exceeds zero. G is kept in units of
log 2, whose exponential is one instruction.

Decays of any sign are run as their absolute values: with the running product's sign σ, σ_t S_t decays by |a_t|, writes
σ_t s_t v_t and is read with σ_t c_t; a chunk's last state is turned back by σ of its last row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from dsf.kernels.triton.structs import Config

LOG_TINY = tl.constexpr(-55.262042)
LOG2E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(1e-24)  # smallest decay: it still clears the state, and its gradient keeps its digits


@dataclass(frozen=True, repr=False)
class Chunked(Config):
    """Config fields of all chunk kernels of a call: N and P, L rows a chunk; BN: N padded to a power of two.

    DECAY 0: none, or with KEYWISE one for every key; 1: logarithms; 2: decays of any sign. DELTA: the delta rule.
    SCALED: written rows have a write strength s (2: a positive one, which goes into exponents). READ_SCALED: rows that
    are read have a read scale c. KIND and PRECISION: of matrix products (`arithmetic`). GROUP: rows that act at once,
    of a sum of corrections (`is_later`). UNDECAYED: rows erase before their decay; their b is divided by it, and the
    decay's gradient has no part from its own row's erasing. TOGETHER: rows of a token, a power of two, of which the
    first has the decay and each reads what all of them write (`seen_by`); 1: a row reads itself and those before.
    FRESH: reads of a row's own token take FRESH_SOURCE for its write strength, later ones and the state SOURCE.
    """

    N: int
    P: int
    BN: int
    L: int
    DECAY: int
    KEYWISE: bool
    DELTA: bool
    SCALED: int
    READ_SCALED: int
    KIND: Any
    PRECISION: str
    GROUP: int
    UNDECAYED: bool
    TOGETHER: int
    FRESH: bool

    @property
    def FINE(self) -> Any:
        """True where G is stored as two numbers: with strong decays one would be too inaccurate for float32."""
        return self.PRECISION != "tf32"


def arithmetic(dtype: torch.dtype, cancels: bool, exact: str) -> tuple[Any, str]:
    """(dtype of operands, precision) of matrix products for inputs of `dtype`.

    float16 inputs take tf32, which has as many digits and float32's range. cancels: results may nearly cancel, as with
    corrections and quotients; float16 inputs then take float32 (and bfloat16 operands two terms).

    exact: how float32 numbers are multiplied (the table's). tf32x3: a number is the sum of two of tf32's, and tensor
    cores make three of the four products. That errs as float32 does and is several times as fast as float32's own
    (ieee), which no tensor core has. More than 128 keys, and GPUs of less shared memory, have no room for the second
    numbers.
    """
    if dtype == torch.bfloat16:
        return tl.bfloat16, "tf32"
    if dtype == torch.float16 and not cancels:
        return tl.float32, "tf32"
    return tl.float32, exact


@triton.jit
def is_later(row, other, GROUP: tl.constexpr):
    """Where what `other` writes changes what `row` erases or reads by its correction: `row` comes after it.

    GROUP > 1: A of a token sums the corrections of that many rows, a power of two, and the first of them has its decay.
    None of these rows reads what another one of them writes.
    """
    if GROUP > 1:
        return row // GROUP > other // GROUP
    return row > other


@triton.jit
def seen_by(local, transposed: tl.constexpr, TOGETHER: tl.constexpr):
    """[L, L], which row i reads what row j writes: [i, j], or (transposed) [j, i]."""
    if TOGETHER > 1:
        token = local // TOGETHER
        seen = token[:, None] <= token[None, :] if transposed else token[:, None] >= token[None, :]
    else:
        seen = local[:, None] <= local[None, :] if transposed else local[:, None] >= local[None, :]
    return seen


@triton.jit
def of_one_token(local, TOGETHER: tl.constexpr):
    """[L, L], which rows belong to one token."""
    return local[:, None] // TOGETHER == local[None, :] // TOGETHER


@triton.jit
def load_rows(base, row_stride, rows, tokens, columns, width: tl.constexpr, padded: tl.constexpr, kind: tl.constexpr):
    """Rows `rows` < tokens of a matrix of `width` contiguous columns, a block of `padded` of them; zeros beyond.

    tokens None: all of these rows exist.
    """
    at = base + rows[:, None].to(tl.int64) * row_stride + columns[None, :]
    if tokens is None:
        if width % padded == 0:
            found = tl.load(at)
        else:
            found = tl.load(at, mask=columns[None, :] < width, other=0.0)
    elif width % padded == 0:
        found = tl.load(at, mask=rows[:, None] < tokens, other=0.0)
    else:
        found = tl.load(at, mask=(rows[:, None] < tokens) & (columns[None, :] < width), other=0.0)
    return found.to(kind)


@triton.jit
def store_rows(base, row_stride, rows, tokens, columns, width: tl.constexpr, padded: tl.constexpr, x):
    """Store x for load_rows."""
    at = base + rows[:, None].to(tl.int64) * row_stride + columns[None, :]
    x = x.to(base.dtype.element_ty)
    if tokens is None:
        if width % padded == 0:
            tl.store(at, x)
        else:
            tl.store(at, x, mask=columns[None, :] < width)
    elif width % padded == 0:
        tl.store(at, x, mask=rows[:, None] < tokens)
    else:
        tl.store(at, x, mask=(rows[:, None] < tokens) & (columns[None, :] < width))


@triton.jit
def split(x, TERMS: tl.constexpr, kind: tl.constexpr, ALONE: tl.constexpr = False):
    """float32 x in `kind`, and with TERMS 2 its rounding error.

    ALONE: the first term is also used alone and therefore rounded; otherwise it is truncated, which is faster.
    """
    if TERMS == 1:
        main = x.to(kind)
        rest = main
    elif ALONE:
        main = x.to(kind)
        rest = (x - main.to(tl.float32)).to(kind)
    else:
        kept = first_term(x, TERMS)
        main = kept.to(kind)
        rest = (x - kept).to(kind)
    return main, rest


@triton.jit
def first_term(x, TERMS: tl.constexpr):
    """The first of two bfloat16 terms of float32 x, by truncation, which needs no conversion."""
    if TERMS == 2:
        return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return x


@triton.jit
def whole(x, TERMS: tl.constexpr):
    """The sum of both terms, in float32."""
    out = x[0].to(tl.float32)
    if TERMS == 2:
        out += x[1].to(tl.float32)
    return out


@triton.jit
def product(a, b, A: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr, out=None):
    """out + a b, for operands in A and B terms (`split`), without the product of both second terms."""
    if out is None:
        out = tl.dot(a[0], b[0], input_precision=PRECISION)
    else:
        out = tl.dot(a[0], b[0], out, input_precision=PRECISION)
    if A == 2:
        out = tl.dot(a[1], b[0], out, input_precision=PRECISION)
    if B == 2:
        out = tl.dot(a[0], b[1], out, input_precision=PRECISION)
    return out


@triton.jit
def turn(x):
    """All terms, transposed."""
    return tl.trans(x[0]), tl.trans(x[1])


@triton.jit
def load_terms(
    base, row_stride, rows, tokens, columns, width: tl.constexpr, padded: tl.constexpr, kind: tl.constexpr,
    TERMS: tl.constexpr,
):  # fmt: skip
    """Rows in terms, the second `width` columns after the first."""
    main = load_rows(base, row_stride, rows, tokens, columns, width, padded, kind)
    rest = main
    if TERMS == 2:
        rest = load_rows(base + width, row_stride, rows, tokens, columns, width, padded, kind)
    return main, rest


@triton.jit
def store_terms(
    base, row_stride, rows, tokens, columns, width: tl.constexpr, padded: tl.constexpr, x, TERMS: tl.constexpr
):
    """Store x for load_terms."""
    store_rows(base, row_stride, rows, tokens, columns, width, padded, x[0])
    if TERMS == 2:
        store_rows(base + width, row_stride, rows, tokens, columns, width, padded, x[1])


@triton.jit
def running_sums(log, axis: tl.constexpr, FINE: tl.constexpr):
    """Running sums of log decays in units of log 2, and (FINE) their rounding errors.

    FINE: multiples of 1/1024 add up without rounding; the remainders are summed apart, below 1/64 for 32 rows.
    """
    if FINE:
        log *= LOG2E
        coarse = tl.floor(log * 1024.0 + 0.5) * 0.0009765625
        of_coarse, of_rest = tl.cumsum(coarse, axis=axis), tl.cumsum(log - coarse, axis=axis)
        running = of_coarse + of_rest
        return running, (of_coarse - running) + of_rest
    else:
        running = tl.cumsum(log, axis=axis) * LOG2E
        return running, running
