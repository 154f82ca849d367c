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

from dsf.kernels.triton.packed import place_of_chunk
from dsf.kernels.triton.structs import Config, of_head

LOG_TINY = tl.constexpr(-55.262042)
LOG2E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(1e-24)  # smallest decay: it still clears the state, and its gradient keeps its digits

# Planes of `prepare`'s output, each [B·H, chunks · L].
RUNNING = tl.constexpr(0)
SIGN = tl.constexpr(1)
LOWERED = tl.constexpr(1)  # instead of SIGN, for decays and sources without signs: RUNNING - log2 of SOURCE
SOURCE = tl.constexpr(2)
ERASE = tl.constexpr(3)
READ = tl.constexpr(4)
PREFIX_ERASE = tl.constexpr(5)  # PREFIX times ERASE (READ), where there are decays
PREFIX_READ = tl.constexpr(6)
SUFFIX = tl.constexpr(7)
TOTAL = tl.constexpr(8)  # at each chunk's first row
WRITE = tl.constexpr(5)  # instead of PREFIX_ERASE, without delta rule: SUFFIX times SOURCE
REST = tl.constexpr(9)  # rounding errors of RUNNING, in float32 calls
PLANES = 10


@dataclass(frozen=True, repr=False)
class Chunked(Config):
    """Config fields of all chunk kernels of a call: N and P, L rows a chunk; BN: N padded to a power of two.

    DECAY 0: none, or with KEYWISE one for every key; 1: logarithms; 2: decays of any sign. DELTA: the delta rule.
    SCALED: written rows have a write strength s (2: a positive one, which goes into exponents). READ_SCALED: rows that
    are read have a read scale c. KIND and PRECISION: of matrix products (`arithmetic`). GROUP: rows that act at once,
    of a sum of corrections (`is_later`). UNDECAYED: rows erase before their decay; their b is divided by it, and the
    decay's gradient has no part from its own row's erasing.
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


@dataclass(frozen=True, repr=False)
class Prepare(Chunked):
    """A program prepares a chunk of LANES sequences and heads or, with SUMMED, of one, together with what that chunk
    adds to the state. BACK: also prepare what only gradients read."""

    SUMMED: int
    LANES: int
    BACK: bool


@triton.jit
def prepare(g, s, b, c, planes, table, vectors, drive, added, sizes, C: tl.constexpr):
    """Scalars [B, T, H] of any strides -> planes [B·H, length], contiguous in time and padded to whole chunks.

    DECAY 1: g holds log decays; 2: decays of any sign, whose running product's sign gets a plane of its own. SUMMED:
    also added [B·H, chunks, N]: 1, Σ of the chunk's vectors, times their scales, their decays to its end and `drive`
    [B, H, T] if given; 2, times their read scales and decays from its start instead.
    """
    chunk, lane, local = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, C.L)
    axis: tl.constexpr = 0 if C.SUMMED else 1
    if not C.SUMMED:
        lane, local = lane * C.LANES + tl.arange(0, C.LANES)[:, None], local[None, :]
    batch, head = lane // sizes.heads, lane % sizes.heads
    begin, end = place_of_chunk(table, chunk, sizes.tokens, C.L)
    rows = begin + local
    known = (lane < sizes.plane // sizes.length) & (local < C.L)
    inside = known & (rows < end)
    time = rows.to(tl.int64)
    to = planes + lane * sizes.length + chunk * C.L + local
    if C.SUMMED:
        keys = tl.arange(0, C.BN)
        taken = load_rows(of_head(vectors, batch, head).at, vectors.token, rows, end, keys, C.N, C.BN, tl.float32)
        scale = tl.full([C.L], 1.0, tl.float32)
        if drive is not None:
            scale = tl.load(drive + lane * sizes.tokens + rows, mask=inside, other=0.0)
    sign = tl.where(known, 1.0, 1.0)  # 1, in the shape of the others
    if C.DECAY == 1:
        log = tl.load(g.at + batch * g.batch + head * g.head + time * g.token, mask=inside, other=0.0).to(tl.float32)
        running, rest = running_sums(tl.maximum(log, LOG_TINY), axis, C.FINE)
    if C.DECAY == 2:
        given = tl.load(g.at + batch * g.batch + head * g.head + time * g.token, mask=inside, other=1.0).to(tl.float32)
        running, rest = running_sums(tl.log(tl.maximum(tl.abs(given), TINY)), axis, C.FINE)
        odd = tl.cumsum((given < 0).to(tl.int32), axis=axis) & 1
        sign = 1.0 - 2.0 * odd.to(tl.float32)
        tl.store(to + SIGN * sizes.plane, sign, mask=known)
    if C.DECAY:
        is_last = local == C.L - 1
        last = tl.sum(tl.where(is_last, running, 0.0), axis=axis, keep_dims=True)
        turn = tl.sum(tl.where(is_last, sign, 0.0), axis=axis, keep_dims=True)
        left = last - running
        if C.FINE:
            left += tl.sum(tl.where(is_last, rest, 0.0), axis=axis, keep_dims=True) - rest
        prefix, suffix = tl.exp2(running), tl.exp2(left) * turn
        tl.store(to, running, mask=known)
        if C.FINE:  # not before `prefix`: of float16 inputs, Triton 3.6 then makes code that it refuses itself
            tl.store(to + REST * sizes.plane, rest, mask=known)
        if C.BACK or C.SCALED != 2:
            tl.store(to + SUFFIX * sizes.plane, suffix, mask=known)
        tl.store(to + TOTAL * sizes.plane, tl.exp2(last) * turn + local * 0.0, mask=known & (local == 0))
        if C.SUMMED == 1:
            scale *= suffix
    if C.SCALED or C.DECAY == 2:
        if C.SCALED:
            sign_s = sign * tl.load(s.at + batch * s.batch + head * s.head + time * s.token, mask=inside, other=0.0).to(
                tl.float32
            )
        else:
            sign_s = sign
        if C.BACK or C.SCALED != 2:
            tl.store(to + SOURCE * sizes.plane, sign_s, mask=known)
        if C.DECAY and not C.DELTA:
            tl.store(to + WRITE * sizes.plane, sign_s * suffix, mask=known)
        if C.SCALED == 2:
            tl.store(to + LOWERED * sizes.plane, running - tl.log2(sign_s), mask=known)
        if C.SUMMED == 1:
            scale *= sign_s
    if C.DELTA:
        x = tl.load(b.at + batch * b.batch + head * b.head + time * b.token, mask=inside, other=0.0)
        tl.store(to + ERASE * sizes.plane, x.to(tl.float32), mask=known)
        if C.DECAY:
            tl.store(to + PREFIX_ERASE * sizes.plane, x.to(tl.float32) * prefix, mask=known)
    if C.READ_SCALED or C.DECAY == 2:
        if C.READ_SCALED:
            sign *= tl.load(c.at + batch * c.batch + head * c.head + time * c.token, mask=inside, other=0.0).to(
                tl.float32
            )
        tl.store(to + READ * sizes.plane, sign, mask=known)
        if C.SUMMED == 2:
            scale *= sign
    if C.DECAY:
        if C.DECAY == 2 or C.READ_SCALED or C.DELTA:
            tl.store(to + PREFIX_READ * sizes.plane, sign * prefix, mask=known)
        if C.SUMMED == 2:
            scale *= prefix
    if C.SUMMED:
        sums = added + (lane * (sizes.length // C.L) + chunk) * C.N + keys
        tl.store(sums, tl.sum(taken * scale[:, None], axis=0), mask=keys < C.N)


@triton.jit
def prefix_of(scalars, rows):
    """exp(G); [L]."""
    return tl.exp2(tl.load(scalars + rows))


@triton.jit
def read_scale(scalars, plane, rows, DECAY: tl.constexpr, READ_SCALED: tl.constexpr, DELTA: tl.constexpr = False):
    """The scale of rows that read a chunk's first state [L]."""
    if DECAY == 1 and not READ_SCALED and not DELTA:
        return prefix_of(scalars, rows)
    else:
        return tl.load(scalars + (PREFIX_READ if DECAY else READ) * plane + rows)


@triton.jit
def total_of(scalars, plane, begin):
    """The product of all decays of the chunk whose first row is `begin`."""
    return tl.load(scalars + TOTAL * plane + begin)


@triton.jit
def suffix_of(scalars, plane, rows):
    """exp(G_L - G), times the sign of the last row; [L]."""
    return tl.load(scalars + SUFFIX * plane + rows)


@triton.jit
def written_scale(scalars, plane, rows, DECAY: tl.constexpr, SCALED: tl.constexpr):
    """The scale of rows as they are written into the state, without delta rule [L]."""
    if DECAY and SCALED:
        return tl.load(scalars + WRITE * plane + rows)
    elif DECAY:
        return suffix_of(scalars, plane, rows)
    else:
        return tl.load(scalars + SOURCE * plane + rows)


@triton.jit
def between(scalars, plane, rows, seen, transposed: tl.constexpr, FINE: tl.constexpr, LOWER: tl.constexpr = False):
    """M [L, L], the decay between row i and source j, where `seen`, else 0; or Mᵀ. LOWER: times the sources' scales."""
    running = tl.load(scalars + rows)
    source = running
    if LOWER:
        source = tl.load(scalars + LOWERED * plane + rows)
    gap = running[None, :] - source[:, None] if transposed else running[:, None] - source[None, :]
    if FINE:
        rest = tl.load(scalars + REST * plane + rows)
        gap += rest[None, :] - rest[:, None] if transposed else rest[:, None] - rest[None, :]
    return tl.where(seen, tl.exp2(gap), 0.0)


@triton.jit
def turned(x, scalars, plane, rows, DECAY: tl.constexpr):
    """The gradient of a scale from that of the scale times the sign of decays."""
    if DECAY == 2:
        x *= tl.load(scalars + SIGN * plane + rows)
    return x
