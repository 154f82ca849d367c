"""Gradients of a chunk whose state is transposed (across.py): of readouts and values, and what key_gradient needs.

With the letters of across.py, Z the first state of a chunk and F the gradient of its last one, and with the scores
D_ij = Σ_n dy_in k_jn exp(G_i - G_j) of earlier rows j < i and D_ii = dy_i·k_i:

    dx_i = Z'(exp(G_i) ∘ dy_i) + Σ_{j ≤ i} D_ij v_j        dv_j = F'(exp(G_L - G_j) ∘ k_j) + Σ_{i ≥ j} D_ij x_i

The gradients of keys and decays are those of o_t = Z_tᵀ Q_t for Q = dy with x as the gradient of o: key_gradient
computes them from x_i·v_j, which is stored here. Rows meet as there, in one product or by blocks. D and its transpose
are products of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.across import running_of
from dsf.kernels.triton.chunk.key_gradient import KeyGradient
from dsf.kernels.triton.chunk.keywise import (
    GROUP,
    factors,
    from_row,
    load_chunk,
    meeting,
    power,
    rounded,
    store_chunk,
)
from dsf.kernels.triton.chunk.scalars import SOURCE
from dsf.kernels.triton.chunk.tiles import load_rows, product, split, store_rows
from dsf.kernels.triton.packed import place_of_chunk, slot_to_read
from dsf.kernels.triton.structs import of_head


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
            scores = _products(given * tl.exp2(gap), rows_k * tl.exp2(-gap), scores, READS, C)
        else:
            meet = meeting(local, first)
            for level in tl.range(first, C.LEVELS, num_stages=1):
                reader, writer = factors(at, local, keys, level, C.N, C.BK, C.FINE)
                found = _products(given * reader, rows_k * writer, None, READS, C)
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
def _products(reader, source, out, READS: tl.constexpr, C: tl.constexpr):
    """out + D (READS) or its transpose, from rows with their decays."""
    reader, source = rounded(reader, C.BETWEEN, C.PRECISION), rounded(source, C.BETWEEN, C.PRECISION)
    if READS:
        return tl.dot(reader, tl.trans(source), out, input_precision=C.PRECISION)
    else:
        return tl.dot(source, tl.trans(reader), out, input_precision=C.PRECISION)
