"""A chunk's scalars, prepared for all chunks at once, and how kernels read them (notation: tiles.py)."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.tiles import LOG_TINY, TINY, Chunked, load_rows, of_one_token, running_sums
from dsf.kernels.triton.packed import place_of_chunk
from dsf.kernels.triton.structs import of_head

# Planes of `prepare`'s output, each [B·H, chunks · L].
RUNNING = tl.constexpr(0)
SIGN = tl.constexpr(1)
LOWERED = tl.constexpr(1)  # instead of SIGN, for decays and sources without signs: RUNNING - log2 of SOURCE
SOURCE = tl.constexpr(2)
ERASE = tl.constexpr(3)
FRESH_SOURCE = tl.constexpr(3)  # instead of ERASE, without delta rule
READ = tl.constexpr(4)
PREFIX_ERASE = tl.constexpr(5)  # PREFIX times ERASE (READ), where there are decays
PREFIX_READ = tl.constexpr(6)
SUFFIX = tl.constexpr(7)
TOTAL = tl.constexpr(8)  # at each chunk's first row
WRITE = tl.constexpr(5)  # instead of PREFIX_ERASE, without delta rule: SUFFIX times SOURCE
REST = tl.constexpr(9)  # rounding errors of RUNNING, in float32 calls
PLANES = 10


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
    if C.DELTA or C.FRESH:
        x = tl.load(b.at + batch * b.batch + head * b.head + time * b.token, mask=inside, other=0.0)
        tl.store(to + ERASE * sizes.plane, x.to(tl.float32), mask=known)
        if C.DECAY and C.DELTA:
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
def strength_seen(scalars, plane, rows, local, transposed: tl.constexpr, C: tl.constexpr):
    """The write strength of row j as row i reads it: [i, j] or (transposed) [j, i], for FRESH [L, L]."""
    source = tl.load(scalars + SOURCE * plane + rows)
    source = source[:, None] if transposed else source[None, :]
    if C.FRESH:
        fresh = tl.load(scalars + FRESH_SOURCE * plane + rows)
        source = tl.where(of_one_token(local, C.TOGETHER), fresh[:, None] if transposed else fresh[None, :], source)
    return source


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
