"""Gradients of one chunk whose decays differ along the Key axis; all chunks in parallel.

The sums of gradient.py with decays inside the Key axis. Products with the chunk's first state or last adjoint are one
product each; products between rows of the chunk go through the blocks of keywise.py. The gradient of log decays follows
from the gradients of the rows: G_i grows with what row i reads and falls with what it writes, so dG = q ⊙ dq - k ⊙ dk
inside the chunk. Writes into the last state, and the part of S that passes through the chunk, depend on the last G
alone. No decay touches the read of a row's own write: it is left out of both terms, so that decays near zero keep their
gradient's digits. dlog decay_t sums dG over the rows from t on. In that sum the read of row j by row i and the write of
row j to row i cancel. Both are therefore computed from the same rounded factors: with different ones the rounding
errors left over from the cancellation would, summed over a chunk, be as large as the gradient of strong decays.

key_pairs first computes everything that does not depend on keys. Then key_gradient is launched twice: for chunks in
which all rows meet in one product, which needs few registers, and for the other chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.keywise import (
    GROUP,
    Keyed,
    Running,
    factors,
    from_row,
    load_chunk,
    load_row,
    meeting,
    power,
    rounded,
)
from dsf.kernels.triton.chunk.scalars import ERASE, READ, SOURCE
from dsf.kernels.triton.chunk.tiles import (
    is_later,
    load_rows,
    load_terms,
    product,
    split,
    store_rows,
    turn,
    whole,
)
from dsf.kernels.triton.packed import place_of_chunk, slot_to_read
from dsf.kernels.triton.structs import Rows, of_head


class Gradients(NamedTuple):
    """Outputs of both kernels, in slices of P. pairs: dy_i·x_j and (DELTA) f_i·x_j for j < i
    [slices, B, T, H, L or 2L].

    alone: dy_i·x_i [slices, B, T, H]; dv [B, T, H, P]; dq (None: not wanted), dk, dr (None where r is k), dg
    [slices, B, T, H, N], to be summed over slices; and gradients of the scalars [slices · keys / BK, B, T, H], except
    ds of delta rules [slices, B, T, H].
    """

    pairs: Any
    alone: Any
    dq: Any
    dk: Any
    dv: Any
    dr: Any
    dg: Any
    ds: Any
    db: Any
    dc: Any


@dataclass(frozen=True, repr=False)
class KeyGradient(Keyed):
    """BP channels a slice. SOURCE_WANTED, READ_WANTED: whether the gradients of s (write strength) and c (read scale)
    are needed.

    ONCE: handles the chunks in which all rows meet in one product, one chunk a program; otherwise handles the other
    chunks, GROUP of them a program. X_TERMS: bfloat16 terms of x and f; TERMS: without DELTA, of the adjoint state.
    APART: r is not k, and its gradient, in which no sum over keys averages rounding errors, is from all terms of x and
    f.
    """

    BP: int = 0
    X_TERMS: int = 1
    APART: bool = False
    ONCE: bool = False
    SOURCE_WANTED: bool = False
    READ_WANTED: bool = False

    @property
    def PITCH(self) -> Any:
        """Width of a row of `pairs`."""
        return 2 * self.L if self.DELTA else self.L

    @property
    def BETWEEN(self) -> Any:
        """The dtype of operands of products between rows."""
        return tl.float32 if self.TERMS == 2 else self.KIND


@triton.jit(do_not_specialize=["base", "count"])
def key_pairs(v, dy, scalars, made, adjoint_entries, adjoints, to, table, sizes, base, count, C: tl.constexpr):
    """dv of a slice of P, `pairs` and `alone`; of `count` chunks from `base` on. DELTA: also ds, of that slice."""
    heads: tl.constexpr = sizes.heads
    tokens, length = sizes.tokens, sizes.length
    chunk, lane, piece = tl.program_id(0) + base, tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, head = lane // heads, lane % heads
    v = of_head(v, batch, head)
    begin, end = place_of_chunk(table, chunk, tokens, C.L)
    behind = chunk * C.L - begin  # rows of slots less rows of tokens
    scalars += lane * length + behind
    flat = batch * tokens * heads + head
    part = flat + piece * tl.num_programs(1).to(tl.int64) * tokens
    pairs = to.pairs + part * C.PITCH
    keys, columns, local = tl.arange(0, C.BN), piece * C.BP + tl.arange(0, C.BP), tl.arange(0, C.L)
    rows = begin + local
    earlier = local[:, None] > local[None, :]
    at = part + rows.to(tl.int64) * heads
    given = load_rows(dy + flat * C.P, heads * C.P, rows, end, columns, C.P, C.BP, C.KIND)
    x = v
    if C.DELTA:
        x = Rows(made.entries + flat * C.P * C.X_TERMS, None, heads * C.P * C.X_TERMS, None, None)
    written = load_terms(x.at, x.token, rows, end, columns, C.P, C.BP, C.KIND, C.X_TERMS)
    tl.store(to.alone + at, tl.sum(given.to(tl.float32) * whole(written, C.X_TERMS), axis=1), mask=rows < end)
    written = turn(written)
    products = tl.where(earlier, product((given, given), written, 1, C.X_TERMS, C.PRECISION), 0.0)
    store_rows(pairs, heads * C.PITCH, rows, end, local, C.L, C.L, rounded(products, C.BETWEEN, C.PRECISION))
    if C.DELTA:
        adjoint_entries += (((batch * count - base) * C.L + behind) * heads + head) * C.P * C.X_TERMS
        f = load_terms(adjoint_entries, heads * C.P * C.X_TERMS, rows, end, columns, C.P, C.BP, C.KIND, C.X_TERMS)
        if C.GROUP > 1:
            earlier = is_later(local[:, None], local[None, :], C.GROUP)
        BOTH: tl.constexpr = C.X_TERMS if C.APART else 1
        products = tl.where(earlier, product(f, written, BOTH, BOTH, C.PRECISION), 0.0)
        store_rows(pairs + C.L, heads * C.PITCH, rows, end, local, C.L, C.L, rounded(products, C.BETWEEN, C.PRECISION))
        grad_v = whole(f, C.X_TERMS)
        if C.SOURCE_WANTED:
            values = load_rows(v.at, v.token, rows, end, columns, C.P, C.BP, tl.float32)
            tl.store(to.ds + at, tl.sum(grad_v * values, axis=1), mask=rows < end)
    else:
        adjoints += (lane * count + slot_to_read(table, chunk, begin, end, base) - base) * C.N * C.P
        adjoint = split(_load_state(adjoints, keys, columns, C.N, C.P, tl.float32), C.TERMS, C.KIND)
        kept = load_chunk(made.writes + (lane * length + chunk * C.L) * C.N, local, keys, C.N, C.BN).to(C.KIND)
        grad_v = product((kept, kept), adjoint, 1, C.TERMS, C.PRECISION)
        scores = tl.trans(load_rows(made.scores + flat * C.L, heads * C.L, rows, end, local, C.L, C.L, C.KIND))
        if C.READ_SCALED:
            scores = (scores.to(tl.float32) * tl.load(scalars + READ * sizes.plane + rows)[None, :]).to(C.KIND)
        grad_v = tl.dot(scores, given, grad_v, input_precision=C.PRECISION)
    if C.SCALED:
        grad_v *= tl.load(scalars + SOURCE * sizes.plane + rows)[:, None]
    store_rows(to.dv + flat * C.P, heads * C.P, rows, end, columns, C.P, C.BP, grad_v)


@triton.jit(do_not_specialize=["base", "count"])
def key_gradient(
    q, k, r, v, dy, scalars, made, adjoint_entries, adjoints, to, table, sizes, base, count, C: tl.constexpr
):  # fmt: skip
    """A slice of P's part of the gradients, to be summed, BK keys a program; of `count` chunks from `base` on."""
    heads: tl.constexpr = sizes.heads
    BLOCKS: tl.constexpr = (C.N + C.BK - 1) // C.BK
    tokens, length = sizes.tokens, sizes.length
    block, lane, piece = tl.program_id(0) % BLOCKS, tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, head = lane // heads, lane % heads
    q, k, v = of_head(q, batch, head), of_head(k, batch, head), of_head(v, batch, head)
    if r.at is not None:
        r = of_head(r, batch, head)
    scalars += lane * length
    flat = batch * tokens * heads + head
    size = tl.num_programs(1).to(tl.int64) * tokens
    part = flat + piece * size
    if C.DELTA:
        x = Rows(made.entries + flat * C.P * C.X_TERMS, None, heads * C.P * C.X_TERMS, None, None)
    else:
        x = v
    dy += flat * C.P
    adjoint_entries += ((batch * count - base) * C.L * heads + head) * C.P * C.X_TERMS
    running = made.running + lane * length * C.N
    first_levels = made.first_levels + lane * (length // C.L)
    at_scalars = flat + (piece * BLOCKS + block) * size
    to = Gradients(
        to.pairs + part * C.PITCH, to.alone + part, None if to.dq is None else to.dq + part * C.N, to.dk + part * C.N,
        to.dv, None if to.dr is None else to.dr + part * C.N, to.dg + part * C.N,
        to.ds + at_scalars, to.db + at_scalars, to.dc + at_scalars,
    )  # fmt: skip
    keys, columns = block * C.BK + tl.arange(0, C.BK), piece * C.BP + tl.arange(0, C.BP)
    EACH: tl.constexpr = 1 if C.ONCE else GROUP
    first_chunk = tl.program_id(0) // BLOCKS * EACH
    if C.ONCE:
        chunk = first_chunk + base
        if tl.load(first_levels + chunk) == C.LEVELS - 1:
            _of_keys(
                q, k, r, x, dy, scalars, running, made.states, C.LEVELS - 1, adjoint_entries, adjoints, to, chunk, lane,
                base, count, table, sizes, (keys, columns), C,
            )  # fmt: skip
    else:
        for chunk in tl.range(first_chunk + base, base + tl.minimum(first_chunk + GROUP, count), num_stages=1):
            first = tl.load(first_levels + chunk)
            if first < C.LEVELS - 1:
                _of_keys(
                    q, k, r, x, dy, scalars, running, made.states, first, adjoint_entries, adjoints, to, chunk, lane,
                    base, count, table, sizes, (keys, columns), C,
                )  # fmt: skip


@triton.jit
def _of_keys(
    q, k, r, x, dy, scalars, running, state_of, first, adjoint_entries, adjoint_of, to, chunk, lane, base, count, table,
    sizes, place, C: tl.constexpr,
):  # fmt: skip
    """dq, dk, dr, dg and the scalars' gradients of one chunk, in parts that load what they need again.

    place: the keys and channels of the program.
    """
    F_PITCH: tl.constexpr = C.P * C.X_TERMS
    heads: tl.constexpr = sizes.heads
    plane, length = sizes.plane, sizes.length
    keys, columns = place
    local = tl.arange(0, C.L)
    begin, end = place_of_chunk(table, chunk, sizes.tokens, C.L)
    rows = begin + local
    scalars += chunk * C.L - begin
    adjoint_entries += (lane * 0 + chunk * C.L - begin) * heads * F_PITCH
    running += chunk * C.L * C.N
    running = Running(running, running + (lane * 0 + plane) * C.N)
    slot = slot_to_read(table, chunk, begin, end, base)
    state_of += (lane * (length // C.L) + slot) * C.N * C.P
    adjoint_of += (lane * count + slot - base) * C.N * C.P
    at = rows.to(tl.int64) * heads
    # S carried through to the last state
    last = load_row(running.at, C.L - 1, keys, C.N)
    adjoint = _load_state(adjoint_of, keys, columns, C.N, C.P, tl.float32)
    of_end = tl.exp2(last) * tl.sum(_load_state(state_of, keys, columns, C.N, C.P, tl.float32) * adjoint, axis=1)
    tl.debug_barrier()  # or loads move up, and registers run out
    # what the rows read
    rows_k = load_rows(k.at, k.token, rows, end, keys, C.N, C.BK, tl.float32)
    if C.SCALED and not C.DELTA:
        rows_k *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    rows_q = load_rows(q.at, q.token, rows, end, keys, C.N, C.BK, tl.float32)
    if C.READ_SCALED:
        rows_q *= tl.load(scalars + READ * plane + rows)[:, None]
    read, log = _reads(
        dy, heads * C.P, to.pairs, heads * C.PITCH, state_of, rows_q, rows_k, running, first, rows, end, keys, columns,
        local, 1, C,
    )  # fmt: skip
    read += tl.load(to.alone + at, mask=rows < end, other=0.0)[:, None] * rows_k
    if C.READ_WANTED:
        unscaled = load_rows(q.at, q.token, rows, end, keys, C.N, C.BK, tl.float32)
        tl.store(to.dc + at, tl.sum(read * unscaled, axis=1), mask=rows < end)
    if C.READ_SCALED:
        read *= tl.load(scalars + READ * plane + rows)[:, None]
    if to.dq is not None:
        store_rows(to.dq, heads * C.N, rows, end, keys, C.N, C.BK, read)
    z = tl.zeros([C.L, C.BK], tl.float32)
    if C.DELTA:  # what their erasing reads
        tl.debug_barrier()
        rows_k = load_rows(k.at, k.token, rows, end, keys, C.N, C.BK, tl.float32)
        rows_r = rows_k
        if r.at is not None:
            rows_r = load_rows(r.at, r.token, rows, end, keys, C.N, C.BK, tl.float32)
        strength = -tl.load(scalars + ERASE * plane + rows)[:, None]
        read, of_erased = _reads(
            adjoint_entries, heads * F_PITCH, to.pairs + C.L, heads * C.PITCH, state_of, rows_r * strength, rows_k,
            running, first, rows, end, keys, columns, local, C.X_TERMS if C.APART else 1, C,
        )  # fmt: skip
        log += of_erased
        if to.dr is None:
            z = read * strength
        else:
            store_rows(to.dr, heads * C.N, rows, end, keys, C.N, C.BK, read * strength)
        tl.store(to.db + at, -tl.sum(read * rows_r, axis=1), mask=rows < end)
    # z = G x: what later rows and the last state read of what the rows write
    tl.debug_barrier()
    adjoint = _load_state(adjoint_of, keys, columns, C.N, C.P, C.KIND)
    written = load_rows(x.at, x.token, rows, end, columns, C.P, C.BP, C.KIND)
    into = tl.dot(written, tl.trans(adjoint), input_precision=C.PRECISION)
    weights = tl.trans(load_rows(to.pairs, heads * C.PITCH, rows, end, local, C.L, C.L, C.BETWEEN))
    rows_k = load_rows(k.at, k.token, rows, end, keys, C.N, C.BK, tl.float32)
    rows_q = load_rows(q.at, q.token, rows, end, keys, C.N, C.BK, tl.float32)
    if C.SCALED and not C.DELTA:
        rows_k *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    if C.READ_SCALED:
        rows_q *= tl.load(scalars + READ * plane + rows)[:, None]
    if C.DELTA:
        rows_r = rows_k
        if r.at is not None:
            rows_r = load_rows(r.at, r.token, rows, end, keys, C.N, C.BK, tl.float32)
        strength = -tl.load(scalars + ERASE * plane + rows)[:, None]
        erasing = tl.trans(load_rows(to.pairs + C.L, heads * C.PITCH, rows, end, local, C.L, C.L, C.BETWEEN))
    if C.ONCE:
        gap = from_row(running, C.L // 2 - 1, local, keys, C.N, C.BK, C.FINE)
        reader, writer = tl.exp2(gap), tl.exp2(-gap)
        source = rounded(rows_k * writer, C.BETWEEN, C.PRECISION).to(tl.float32)
        to_end = last - load_row(running.at, C.L // 2 - 1, keys, C.N)
        if C.FINE:
            to_end += load_row(running.rest, C.L - 1, keys, C.N) - load_row(running.rest, C.L // 2 - 1, keys, C.N)
        into *= tl.exp2(to_end)[None, :]
        of_end += tl.sum(into * source, axis=0)
        into = tl.dot(weights, rounded(rows_q * reader, C.BETWEEN, C.PRECISION), into, input_precision=C.PRECISION)
        if C.DELTA:
            into = tl.dot(
                erasing, rounded(rows_r * strength * reader, C.BETWEEN, C.PRECISION), into, input_precision=C.PRECISION
            )
        log -= into * source
        z += into * writer
    else:
        into *= tl.exp2(-from_row(running, C.L - 1, local, keys, C.N, C.BK, C.FINE))
        of_end += tl.sum(into * rows_k, axis=0)
        into, of_writes = _by_levels(
            into, into * rows_k, weights, rows_q, rows_k, running, first, local, keys, False, C
        )  # fmt: skip
        if C.DELTA:
            into, of_writes = _by_levels(
                into, of_writes, erasing, rows_r * strength, rows_k, running, first, local, keys, False, C
            )  # fmt: skip
        log -= of_writes
        z += into
    z += tl.load(to.alone + at, mask=rows < end, other=0.0)[:, None] * rows_q
    if C.SOURCE_WANTED and not C.DELTA:
        unscaled = load_rows(k.at, k.token, rows, end, keys, C.N, C.BK, tl.float32)
        tl.store(to.ds + at, tl.sum(z * unscaled, axis=1), mask=rows < end)
    if C.SCALED and not C.DELTA:
        z *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    store_rows(to.dk, heads * C.N, rows, end, keys, C.N, C.BK, z)
    log = tl.cumsum(log, axis=0, reverse=True) + of_end[None, :]
    store_rows(to.dg, heads * C.N, rows, end, keys, C.N, C.BK, log)


@triton.jit
def _reads(
    field, field_t, pairs, pairs_t, state_of, mine, rows_k, running, first, rows, end, keys, columns, local,
    TERMS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """What rows read of the first state (by its products with `field`, of so many terms) and of earlier rows; and that
    times mine."""
    state = _load_state(state_of, keys, columns, C.N, C.P, C.KIND)
    weights = load_rows(pairs, pairs_t, rows, end, local, C.L, C.L, C.BETWEEN)
    read = load_terms(field, field_t, rows, end, columns, C.P, C.BP, C.KIND, TERMS)
    read = product(read, turn((state, state)), TERMS, 1, C.PRECISION)
    if C.ONCE:
        gap = from_row(running, C.L // 2 - 1, local, keys, C.N, C.BK, C.FINE)
        middle = load_row(running.at, C.L // 2 - 1, keys, C.N)
        from_start = power(middle, load_row(running.rest, C.L // 2 - 1, keys, C.N) if C.FINE else middle, C.FINE)
        reader, source = tl.exp2(gap), rounded(rows_k * tl.exp2(-gap), C.BETWEEN, C.PRECISION)
        read = tl.dot(weights, source, read * from_start[None, :], input_precision=C.PRECISION)
        log = read * rounded(mine * reader, C.BETWEEN, C.PRECISION).to(tl.float32)
        read *= reader
    else:
        read *= tl.exp2(load_chunk(running.at, local, keys, C.N, C.BK))
        read, log = _by_levels(
            read, read * mine, weights, rows_k, mine, running, first, local, keys, True, C
        )  # fmt: skip
    return read, log


@triton.jit
def _by_levels(out, log, weights, x, mine, running, first, local, keys, READS: tl.constexpr, C: tl.constexpr):
    """out + Σ_j weights[i, j] exp(-|G_i - G_j|) x_j of rows that i reads (READS) or that read i; log + mine ⊙ that."""
    meet = meeting(local, first)
    for level in tl.range(first, C.LEVELS, num_stages=1):
        if READS:
            factor, other = factors(running, local, keys, level, C.N, C.BK, C.FINE)
        else:
            other, factor = factors(running, local, keys, level, C.N, C.BK, C.FINE)
        there = rounded(x * other, C.BETWEEN, C.PRECISION)
        products = tl.dot(tl.where((meet >> level) == 1, weights, 0.0), there, input_precision=C.PRECISION)
        out += products * factor
        log += products * rounded(mine * factor, C.BETWEEN, C.PRECISION).to(tl.float32)
    return out, log


@triton.jit
def _load_state(base, keys, columns, N: tl.constexpr, P: tl.constexpr, KIND: tl.constexpr):
    """A tile of a state [N, P]."""
    inside = (keys[:, None] < N) & (columns[None, :] < P)
    return tl.load(base + keys[:, None] * P + columns[None, :], mask=inside, other=0.0).to(KIND)
