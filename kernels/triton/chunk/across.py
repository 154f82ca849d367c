"""Chunks whose state is transposed, of decays that differ along the Value axis: their output and its gradients.

The other kernels run on Z = Sᵀ, in whose letters N counts the channels of the declaration, k are its values and v its
keys, so that its decays lie on the Key axis. They give o_t = Z_tᵀ Q_t; here is y_t = Z_t x_t, for readouts x [P]:

    y_i = exp(G_i) ∘ (Z_0 x_i) + Σ_{j ≤ i} (x_i·v_j) exp(G_i - G_j) ∘ k_j

The decay stands on the axis of the result. So the products x_i·v_j are free of it and found once for all keys, and it
scales the rows k_j before and the sums after the product with them. Where -G_i is at most NEAR, the scales are
exp(-G_j) and exp(G_i), shifted by a power of two so that numbers keep 2^48 of float32's range. No bit of y depends on
later rows. The other entries of y are computed by the blocks of keywise.py, in a second launch, whose programs look for
them in several chunks each. The product of a row with itself is left out of both and added unrounded.

Gradients of readouts and values, with Z the first state of a chunk, F the gradient of its last one, and the scores
D_ij = Σ_n dy_in k_jn exp(G_i - G_j) of earlier rows j < i and D_ii = dy_i·k_i:

    dx_i = Z'(exp(G_i) ∘ dy_i) + Σ_{j ≤ i} D_ij v_j        dv_j = F'(exp(G_L - G_j) ∘ k_j) + Σ_{i ≥ j} D_ij x_i

The gradients of keys and decays are those of o_t = Z_tᵀ Q_t for Q = dy with x as the gradient of o: key_gradient
computes them from x_i·v_j, which is stored here. Rows meet as there, in one product or by blocks. D and its transpose
are products of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.key_gradient import KeyGradient
from dsf.kernels.triton.chunk.keywise import (
    GROUP,
    REACH,
    Keyed,
    Running,
    factors,
    from_row,
    load_chunk,
    load_row,
    meeting,
    power,
    rounded,
    store_chunk,
)
from dsf.kernels.triton.chunk.scalars import SOURCE
from dsf.kernels.triton.chunk.tiles import (
    LOG_TINY,
    load_rows,
    product,
    running_sums,
    split,
    store_rows,
    turn,
)
from dsf.kernels.triton.packed import place_of_chunk, slot_to_read
from dsf.kernels.triton.structs import of_head

NEAR = tl.constexpr(110.0)  # a chunk of 64 rows whose gates are sigmoids of normal numbers reaches 75
SHIFT = tl.constexpr(30.0)
SHIFTED = tl.constexpr(2.0**-30)


@dataclass(frozen=True, repr=False)
class Across(Keyed):
    """BP of the axis of readouts at a time."""

    BP: int = 64

    @property
    def BETWEEN(self) -> Any:
        """The dtype of operands of products between rows."""
        return tl.float32 if self.TERMS == 2 else self.KIND


@triton.jit
def prepare_across(k, g, running, first_levels, writes, rest, table, sizes, C: tl.constexpr):
    """Log decays -> G; keys decayed to the end of their chunk, with TERMS 2 also what their rounding leaves.

    first_levels [B·H, chunks]: the highest level for chunks in whose gradients all rows meet in one product, else 0.
    """
    chunk, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = lane // sizes.heads, lane % sizes.heads
    k, g = of_head(k, batch, head), of_head(g, batch, head)
    BLOCKS: tl.constexpr = (C.N + C.BK - 1) // C.BK
    local, far = tl.arange(0, C.L), tl.zeros([C.L], tl.float32)
    begin, end = place_of_chunk(table, chunk, sizes.tokens, C.L)
    here = (lane * sizes.length + chunk * C.L) * C.N
    at = running_of(running, chunk, lane, sizes, C)
    for block in tl.range(0, BLOCKS, num_stages=1):
        keys = block * C.BK + tl.arange(0, C.BK)
        log = load_rows(g.at, g.token, begin + local, end, keys, C.N, C.BK, tl.float32)
        rows_k = load_rows(k.at, k.token, begin + local, end, keys, C.N, C.BK, tl.float32)
        own, more = running_sums(tl.maximum(log, LOG_TINY), 0, C.FINE)
        store_chunk(at.at, own, local, keys, C.N, C.BK)
        if C.FINE:
            store_chunk(at.rest, more, local, keys, C.N, C.BK)
        tl.debug_barrier()  # two rows are read again, by other threads
        last, middle = load_row(at.at, C.L - 1, keys, C.N), load_row(at.at, C.L // 2 - 1, keys, C.N)
        far = tl.maximum(far, tl.max(tl.abs(own - middle[None, :]), axis=1))
        left = last[None, :] - own
        if C.FINE:
            left += load_row(at.rest, C.L - 1, keys, C.N)[None, :] - more
        written = rows_k * tl.exp2(left)
        store_chunk(writes + here, written, local, keys, C.N, C.BK)
        if C.TERMS == 2:
            store_chunk(rest + here, written - written.to(C.KIND).to(tl.float32), local, keys, C.N, C.BK)
    once = tl.max(far, axis=0) <= REACH
    tl.store(first_levels + lane * (sizes.length // C.L) + chunk, tl.where(once, C.LEVELS - 1, 0))


@triton.jit
def read_across(x, k, v, scalars, running, states, y, table, sizes, C: tl.constexpr):
    """y [B, T, H, N] of one chunk, BK keys of it; entries with -G beyond NEAR are written by read_far_across."""
    BLOCKS: tl.constexpr = (C.N + C.BK - 1) // C.BK
    chunk, lane = tl.program_id(0) // BLOCKS, tl.program_id(1).to(tl.int64)
    local, keys = tl.arange(0, C.L), tl.program_id(0) % BLOCKS * C.BK + tl.arange(0, C.BK)
    begin, end = place_of_chunk(table, chunk, sizes.tokens, C.L)
    at = running_of(running, chunk, lane, sizes, C)
    read, pairs = _products(x, v, scalars, states, table, chunk, begin, end, lane, keys, sizes, C)
    own = load_chunk(at.at, local, keys, C.N, C.BK)
    more = load_chunk(at.rest, local, keys, C.N, C.BK) if C.FINE else own
    rows_k = _rows_of(k, begin, end, lane, local, keys, sizes, C)
    weights = rounded(tl.where(local[:, None] > local[None, :], pairs, 0.0), C.BETWEEN, C.PRECISION)
    source = rounded(rows_k * power(tl.minimum(-own, NEAR) - SHIFT, -more, C.FINE), C.BETWEEN, C.PRECISION)
    out = tl.dot(weights, source, read * SHIFTED, input_precision=C.PRECISION)
    out *= power(own + SHIFT, more, C.FINE)
    out += _diagonal(pairs, local)[:, None] * rows_k
    to = y + (lane // sizes.heads * sizes.tokens * sizes.heads + lane % sizes.heads) * C.N
    store_rows(to, sizes.heads * C.N, begin + local, end, keys, C.N, C.BK, out)


@triton.jit
def read_far_across(x, k, v, scalars, running, states, y, table, sizes, C: tl.constexpr):
    """The entries of y with -G beyond NEAR, in GROUP chunks."""
    BLOCKS: tl.constexpr = (C.N + C.BK - 1) // C.BK
    lane = tl.program_id(1).to(tl.int64)
    local, keys = tl.arange(0, C.L), tl.program_id(0) % BLOCKS * C.BK + tl.arange(0, C.BK)
    first, meet = tl.program_id(0) // BLOCKS * GROUP, meeting(local, 0)
    y += (lane // sizes.heads * sizes.tokens * sizes.heads + lane % sizes.heads) * C.N
    for chunk in tl.range(first, tl.minimum(first + GROUP, sizes.length // C.L), num_stages=1):
        at = running_of(running, chunk, lane, sizes, C)
        if tl.min(load_row(at.at, C.L - 1, keys, C.N), axis=0) < -NEAR:
            begin, end = place_of_chunk(table, chunk, sizes.tokens, C.L)
            out, pairs = _products(x, v, scalars, states, table, chunk, begin, end, lane, keys, sizes, C)
            own = load_chunk(at.at, local, keys, C.N, C.BK)
            out *= power(own, load_chunk(at.rest, local, keys, C.N, C.BK) if C.FINE else own, C.FINE)
            rows_k = _rows_of(k, begin, end, lane, local, keys, sizes, C)
            out += _diagonal(pairs, local)[:, None] * rows_k
            weights = rounded(tl.where(local[:, None] > local[None, :], pairs, 0.0), C.BETWEEN, C.PRECISION)
            for level in tl.range(0, C.LEVELS, num_stages=1):
                reader, writer = factors(at, local, keys, level, C.N, C.BK, C.FINE)
                source = rounded(rows_k * writer, C.BETWEEN, C.PRECISION)
                met = tl.where((meet >> level) == 1, weights, 0.0)
                out += tl.dot(met, source, input_precision=C.PRECISION) * reader
            rows = begin + local
            far = (rows[:, None] < end) & (keys[None, :] < C.N) & (own < -NEAR)
            place = rows[:, None].to(tl.int64) * (sizes.heads * C.N) + keys[None, :]
            tl.store(y + place, out.to(y.dtype.element_ty), mask=far)


@triton.jit
def running_of(running, chunk, lane, sizes, C: tl.constexpr):
    """G of a chunk."""
    running += (lane * sizes.length + chunk * C.L) * C.N
    return Running(running, running + (lane * 0 + sizes.plane) * C.N)


@triton.jit
def _rows_of(k, begin, end, lane, local, keys, sizes, C: tl.constexpr):
    """Rows of keys, in float32."""
    k = of_head(k, lane // sizes.heads, lane % sizes.heads)
    return load_rows(k.at, k.token, begin + local, end, keys, C.N, C.BK, tl.float32)


@triton.jit
def _products(x, v, scalars, states, table, chunk, begin, end, lane, keys, sizes, C: tl.constexpr):
    """x Z_0ᵀ [L, BK] of a chunk and x vᵀ [L, L], of whose rows v each has its write strength."""
    x = of_head(x, lane // sizes.heads, lane % sizes.heads)
    v = of_head(v, lane // sizes.heads, lane % sizes.heads)
    rows = begin + tl.arange(0, C.L)
    states += (lane * (sizes.length // C.L) + slot_to_read(table, chunk, begin, end, 0)) * C.N * C.P
    read, pairs = tl.zeros([C.L, C.BK], tl.float32), tl.zeros([C.L, C.L], tl.float32)
    for piece in tl.range(0, (C.P + C.BP - 1) // C.BP, num_stages=1):
        columns = piece * C.BP + tl.arange(0, C.BP)
        rows_x = load_rows(x.at, x.token, rows, end, columns, C.P, C.BP, C.KIND)
        rows_v = load_rows(v.at, v.token, rows, end, columns, C.P, C.BP, C.KIND)
        inside = (keys[:, None] < C.N) & (columns[None, :] < C.P)
        state = tl.load(states + keys[:, None] * C.P + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        state = turn(split(state, C.TERMS, C.KIND))
        pairs = tl.dot(rows_x, tl.trans(rows_v), pairs, input_precision=C.PRECISION)
        read = product((rows_x, rows_x), state, 1, C.TERMS, C.PRECISION, read)
    if C.SCALED:
        behind = lane * sizes.length + (chunk * C.L - begin)  # rows of slots less rows of tokens
        pairs *= tl.load(scalars + behind + SOURCE * sizes.plane + rows)[None, :]
    return read, pairs


@triton.jit
def _diagonal(pairs, local):
    """The products of rows with themselves [L]."""
    return tl.sum(tl.where(local[:, None] == local[None, :], pairs, 0.0), axis=1)


@dataclass(frozen=True, repr=False)
class AcrossGradient(KeyGradient):
    """PIECES: slices of P, of BP entries, in one of key_gradient's."""

    PIECES: int = 1


@triton.jit
def prepare_reads(q, running, reads, rest, table, sizes, C: tl.constexpr):
    """Queries decayed from the start of their chunk, with TERMS 2 also what their rounding leaves."""
    BLOCKS: tl.constexpr = (C.N + C.BK - 1) // C.BK
    chunk, lane = tl.program_id(0) // BLOCKS, tl.program_id(1).to(tl.int64)
    local, keys = tl.arange(0, C.L), tl.program_id(0) % BLOCKS * C.BK + tl.arange(0, C.BK)
    q = of_head(q, lane // sizes.heads, lane % sizes.heads)
    begin, end = place_of_chunk(table, chunk, sizes.tokens, C.L)
    at, here = running_of(running, chunk, lane, sizes, C), (lane * sizes.length + chunk * C.L) * C.N
    own = load_chunk(at.at, local, keys, C.N, C.BK)
    more = load_chunk(at.rest, local, keys, C.N, C.BK) if C.FINE else own
    rows = load_rows(q.at, q.token, begin + local, end, keys, C.N, C.BK, tl.float32) * power(own, more, C.FINE)
    store_chunk(reads + here, rows, local, keys, C.N, C.BK)
    if C.TERMS == 2:
        store_chunk(rest + here, rows - rows.to(C.KIND).to(tl.float32), local, keys, C.N, C.BK)


@triton.jit(do_not_specialize=["base", "count"])
def across_gradient(x, k, v, dy, scalars, made, adjoints, dx, to, table, sizes, base, count, C: tl.constexpr):
    """dx and dv of a slice of P, in a program each, and with dx key_gradient's `pairs` and `alone`; of `count` chunks
    from `base` on.

    ONCE: of the chunks in which all rows meet in one product; otherwise of the others, in GROUP chunks.
    """
    reads, lane, piece = tl.program_id(0) % 2 == 0, tl.program_id(1).to(tl.int64), tl.program_id(2)
    first_levels = made.first_levels + lane * (sizes.length // C.L)
    if C.ONCE:
        chunk = tl.program_id(0) // 2 + base
        if tl.load(first_levels + chunk) == C.LEVELS - 1:
            _of_chunk(
                x, k, v, dy, scalars, made, adjoints, dx, to, reads, chunk, lane, piece, table, sizes, base, count, C
            )  # fmt: skip
    else:
        low = tl.program_id(0) // 2 * GROUP
        for chunk in tl.range(low + base, base + tl.minimum(low + GROUP, count), num_stages=1):
            if tl.load(first_levels + chunk) < C.LEVELS - 1:
                _of_chunk(
                    x, k, v, dy, scalars, made, adjoints, dx, to, reads, chunk, lane, piece, table, sizes, base, count,
                    C,
                )  # fmt: skip


@triton.jit
def _of_chunk(
    x, k, v, dy, scalars, made, adjoints, dx, to, reads, chunk, lane, piece, table, sizes, base, count, C: tl.constexpr
):  # fmt: skip
    """What across_gradient computes of one chunk."""
    heads: tl.constexpr = sizes.heads
    batch, head = lane // heads, lane % heads
    x, k = of_head(x, batch, head), of_head(k, batch, head)
    v, dy = of_head(v, batch, head), of_head(dy, batch, head)
    local, columns = tl.arange(0, C.L), piece * C.BP + tl.arange(0, C.BP)
    begin, end = place_of_chunk(table, chunk, sizes.tokens, C.L)
    rows, flat = begin + local, batch * sizes.tokens * heads + head
    slot = slot_to_read(table, chunk, begin, end, base)
    at = running_of(made.running, chunk, lane, sizes, C)
    first = tl.load(made.first_levels + lane * (sizes.length // C.L) + chunk)
    scale = tl.full([C.L], 1.0, tl.float32)
    if C.SCALED:
        behind = lane * sizes.length + (chunk * C.L - begin)  # rows of slots less rows of tokens
        scale = tl.load(scalars + behind + SOURCE * sizes.plane + rows)
    if reads:
        if piece % C.PIECES == 0:
            part = flat + piece // C.PIECES * tl.num_programs(1).to(tl.int64) * sizes.tokens
            _pairs(x, v, to.pairs + part * C.PITCH, to.alone + part, rows, end, columns, local, heads, C)
        states = made.states + (lane * (sizes.length // C.L) + slot) * C.N * C.P
        found = _summed(k, dy, v, states, at, first, scale, rows, end, columns, local, True, C)
        store_rows(dx + flat * C.P, heads * C.P, rows, end, columns, C.P, C.BP, found)
    else:
        states = adjoints + (lane * count + slot - base) * C.N * C.P
        found = _summed(k, dy, x, states, at, first, scale, rows, end, columns, local, False, C)
        store_rows(to.dv + flat * C.P, heads * C.P, rows, end, columns, C.P, C.BP, found)


@triton.jit
def _pairs(x, v, pairs, alone, rows, end, columns, local, heads: tl.constexpr, C: tl.constexpr):
    """Store x_i·v_j and x_i·v_i of a slice of key_gradient's, which begins with these columns."""
    found, same = tl.zeros([C.L, C.L], tl.float32), tl.zeros([C.L], tl.float32)
    for piece in tl.static_range(C.PIECES):
        here = columns + piece * C.BP
        rows_x = load_rows(x.at, x.token, rows, end, here, C.P, C.BP, C.KIND)
        rows_v = load_rows(v.at, v.token, rows, end, here, C.P, C.BP, C.KIND)
        same += tl.sum(rows_x.to(tl.float32) * rows_v.to(tl.float32), axis=1)
        found = tl.dot(rows_x, tl.trans(rows_v), found, input_precision=C.PRECISION)
    tl.store(alone + rows.to(tl.int64) * heads, same, mask=rows < end)
    found = rounded(tl.where(local[:, None] > local[None, :], found, 0.0), C.BETWEEN, C.PRECISION)
    store_rows(pairs, heads * C.PITCH, rows, end, local, C.L, C.L, found)


@triton.jit
def _summed(
    k, dy, other, states, at, first, scale, rows, end, columns, local, READS: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """dx (READS) or dv of a chunk [L, BP]: products with a state, and of D with the rows `other`."""
    BLOCKS: tl.constexpr = (C.N + C.BK - 1) // C.BK
    scores, same = tl.zeros([C.L, C.L], tl.float32), tl.zeros([C.L], tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=1):
        keys = block * C.BK + tl.arange(0, C.BK)
        given = load_rows(dy.at, dy.token, rows, end, keys, C.N, C.BK, tl.float32)
        rows_k = load_rows(k.at, k.token, rows, end, keys, C.N, C.BK, tl.float32)
        same += tl.sum(given * rows_k, axis=1)
        if C.ONCE:
            gap = from_row(at, C.L // 2 - 1, local, keys, C.N, C.BK, C.FINE)
            scores = _scores(given * tl.exp2(gap), rows_k * tl.exp2(-gap), scores, READS, C)
        else:
            meet = meeting(local, first)
            for level in tl.range(first, C.LEVELS, num_stages=1):
                reader, writer = factors(at, local, keys, level, C.N, C.BK, C.FINE)
                found = _scores(given * reader, rows_k * writer, None, READS, C)
                scores += tl.where((meet >> level) == 1, found, 0.0)
    if READS:
        scores = tl.where(local[:, None] > local[None, :], scores, 0.0) * scale[None, :]
        same *= scale
    else:
        scores = tl.where(local[:, None] < local[None, :], scores, 0.0)
    rows_o = load_rows(other.at, other.token, rows, end, columns, C.P, C.BP, C.BETWEEN)
    out = same[:, None] * rows_o.to(tl.float32)
    out = tl.dot(rounded(scores, C.BETWEEN, C.PRECISION), rows_o, out, input_precision=C.PRECISION)
    tl.debug_barrier()  # or loads move up, and registers run out
    for block in tl.range(0, BLOCKS, num_stages=1):
        keys = block * C.BK + tl.arange(0, C.BK)
        if READS:
            mine = load_rows(dy.at, dy.token, rows, end, keys, C.N, C.BK, tl.float32)
            own = load_chunk(at.at, local, keys, C.N, C.BK)
            mine *= power(own, load_chunk(at.rest, local, keys, C.N, C.BK) if C.FINE else own, C.FINE)
        else:
            mine = load_rows(k.at, k.token, rows, end, keys, C.N, C.BK, tl.float32)
            mine *= tl.exp2(-from_row(at, C.L - 1, local, keys, C.N, C.BK, C.FINE))
        mine = mine.to(C.KIND)
        inside = (keys[:, None] < C.N) & (columns[None, :] < C.P)
        state = tl.load(states + keys[:, None] * C.P + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        out = product((mine, mine), split(state, C.TERMS, C.KIND), 1, C.TERMS, C.PRECISION, out)
    return out if READS else out * scale[:, None]


@triton.jit
def _scores(reader, source, out, READS: tl.constexpr, C: tl.constexpr):
    """out + D (READS) or its transpose, from rows with their decays."""
    reader, source = rounded(reader, C.BETWEEN, C.PRECISION), rounded(source, C.BETWEEN, C.PRECISION)
    if READS:
        return tl.dot(reader, tl.trans(source), out, input_precision=C.PRECISION)
    else:
        return tl.dot(source, tl.trans(reader), out, input_precision=C.PRECISION)
