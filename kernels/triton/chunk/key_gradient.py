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
from dsf.kernels.triton.chunk.tiles import (
    ERASE,
    READ,
    SOURCE,
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

    alone: dy_i·x_i [slices, B, T, H]; dv [B, T, H, P]; dq, dk, dg [slices, B, T, H, N], to be summed over slices; and
    gradients of the scalars [slices · keys / BK, B, T, H], except ds of delta rules [slices, B, T, H].
    """

    pairs: Any
    alone: Any
    dq: Any
    dk: Any
    dv: Any
    dg: Any
    ds: Any
    db: Any
    dc: Any


@dataclass(frozen=True, repr=False)
class KeyGradient(Keyed):
    """BP channels a slice. SOURCE_WANTED, READ_WANTED: whether the gradients of s (write strength) and c (read scale)
    are needed.

    ONCE: handles the chunks in which all rows meet in one product, one chunk a program; otherwise handles the other
    chunks, GROUP of them a program. TERMS: bfloat16 terms of x and, with DELTA, of f, or else of the adjoint state.
    """

    BP: int = 0
    ONCE: bool = False
    SOURCE_WANTED: bool = False
    READ_WANTED: bool = False

    @property
    def PITCH(self) -> Any:
        """Width of a row of `pairs`."""
        return 2 * self.L if self.DELTA else self.L

    @property
    def X_TERMS(self) -> Any:
        """Terms of x and f."""
        return self.TERMS if self.DELTA else 1

    @property
    def BETWEEN(self) -> Any:
        """The dtype of operands of products between rows."""
        return tl.float32 if self.TERMS == 2 else self.KIND


@triton.jit(do_not_specialize=["base", "count"])
def key_pairs(v, dy, scalars, made, adjoint_entries, adjoints, to, table, sizes, base, count, C: tl.constexpr):
    """dv of a slice of P, `pairs` and `alone`, for `count` chunks from `base` on. DELTA: also ds, of that slice."""
    N: tl.constexpr = C.N
    P: tl.constexpr = C.P
    BN: tl.constexpr = C.BN
    BP: tl.constexpr = C.BP
    L: tl.constexpr = C.L
    KIND: tl.constexpr = C.KIND
    PRECISION: tl.constexpr = C.PRECISION
    X_TERMS: tl.constexpr = C.X_TERMS
    heads: tl.constexpr = sizes.heads
    tokens, length = sizes.tokens, sizes.length
    chunk, lane, piece = tl.program_id(0) + base, tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, head = lane // heads, lane % heads
    v = of_head(v, batch, head)
    begin, end = place_of_chunk(table, chunk, tokens, L)
    behind = chunk * L - begin  # row number in slots minus row number in tokens
    scalars += lane * length + behind
    flat = batch * tokens * heads + head
    part = flat + piece * tl.num_programs(1).to(tl.int64) * tokens
    pairs = to.pairs + part * C.PITCH
    keys, columns, local = tl.arange(0, BN), piece * BP + tl.arange(0, BP), tl.arange(0, L)
    rows = begin + local
    earlier = local[:, None] > local[None, :]
    at = part + rows.to(tl.int64) * heads
    given = load_rows(dy + flat * P, heads * P, rows, end, columns, P, BP, KIND)
    x = v
    if C.DELTA:
        x = Rows(made.entries + flat * P * X_TERMS, None, heads * P * X_TERMS, None, None)
    written = load_terms(x.at, x.token, rows, end, columns, P, BP, KIND, X_TERMS)
    tl.store(to.alone + at, tl.sum(given.to(tl.float32) * whole(written, X_TERMS), axis=1), mask=rows < end)
    written = turn(written)
    products = tl.where(earlier, product((given, given), written, 1, X_TERMS, PRECISION), 0.0)
    store_rows(pairs, heads * C.PITCH, rows, end, local, L, L, rounded(products, C.BETWEEN, PRECISION))
    if C.DELTA:
        adjoint_entries += (((batch * count - base) * L + behind) * heads + head) * P * X_TERMS
        f = load_terms(adjoint_entries, heads * P * X_TERMS, rows, end, columns, P, BP, KIND, X_TERMS)
        products = tl.where(earlier, tl.dot(f[0], written[0], input_precision=PRECISION), 0.0)
        store_rows(pairs + L, heads * C.PITCH, rows, end, local, L, L, rounded(products, C.BETWEEN, PRECISION))
        grad_v = whole(f, X_TERMS)
        if C.SOURCE_WANTED:
            values = load_rows(v.at, v.token, rows, end, columns, P, BP, tl.float32)
            tl.store(to.ds + at, tl.sum(grad_v * values, axis=1), mask=rows < end)
    else:
        adjoints += (lane * count + slot_to_read(table, chunk, begin, end, base) - base) * N * P
        adjoint = split(_load_state(adjoints, keys, columns, N, P, tl.float32), C.TERMS, KIND)
        kept = load_chunk(made.writes + (lane * length + chunk * L) * N, local, keys, N, BN).to(KIND)
        grad_v = product((kept, kept), adjoint, 1, C.TERMS, PRECISION)
        scores = tl.trans(load_rows(made.scores + flat * L, heads * L, rows, end, local, L, L, KIND))
        if C.READ_SCALED:
            scores = (scores.to(tl.float32) * tl.load(scalars + READ * sizes.plane + rows)[None, :]).to(KIND)
        grad_v = tl.dot(scores, given, grad_v, input_precision=PRECISION)
    if C.SCALED:
        grad_v *= tl.load(scalars + SOURCE * sizes.plane + rows)[:, None]
    store_rows(to.dv + flat * P, heads * P, rows, end, columns, P, BP, grad_v)


@triton.jit(do_not_specialize=["base", "count"])
def key_gradient(q, k, v, dy, scalars, made, adjoint_entries, adjoints, to, table, sizes, base, count, C: tl.constexpr):
    """One slice's part of the gradients, to be summed; BK keys a program; for `count` chunks from `base` on."""
    N: tl.constexpr = C.N
    P: tl.constexpr = C.P
    heads: tl.constexpr = sizes.heads
    BLOCKS: tl.constexpr = (N + C.BK - 1) // C.BK
    tokens, length = sizes.tokens, sizes.length
    block, lane, piece = tl.program_id(0) % BLOCKS, tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, head = lane // heads, lane % heads
    q, k, v = of_head(q, batch, head), of_head(k, batch, head), of_head(v, batch, head)
    scalars += lane * length
    flat = batch * tokens * heads + head
    size = tl.num_programs(1).to(tl.int64) * tokens
    part = flat + piece * size
    if C.DELTA:
        x = Rows(made.entries + flat * P * C.X_TERMS, None, heads * P * C.X_TERMS, None, None)
    else:
        x = v
    dy += flat * P
    adjoint_entries += ((batch * count - base) * C.L * heads + head) * P * C.X_TERMS
    running = made.running + lane * length * N
    first_levels = made.first_levels + lane * (length // C.L)
    at_scalars = flat + (piece * BLOCKS + block) * size
    to = Gradients(
        to.pairs + part * C.PITCH, to.alone + part, to.dq + part * N, to.dk + part * N, to.dv, to.dg + part * N,
        to.ds + at_scalars, to.db + at_scalars, to.dc + at_scalars,
    )  # fmt: skip
    keys, columns = block * C.BK + tl.arange(0, C.BK), piece * C.BP + tl.arange(0, C.BP)
    EACH: tl.constexpr = 1 if C.ONCE else GROUP
    first_chunk = tl.program_id(0) // BLOCKS * EACH
    if C.ONCE:
        chunk = first_chunk + base
        if tl.load(first_levels + chunk) == C.LEVELS - 1:
            _of_keys(
                q, k, x, dy, scalars, running, made.states, C.LEVELS - 1, adjoint_entries, adjoints, to, chunk, lane,
                base, count, table, sizes, keys, columns, C,
            )  # fmt: skip
    else:
        for chunk in tl.range(first_chunk + base, base + tl.minimum(first_chunk + GROUP, count), num_stages=1):
            first = tl.load(first_levels + chunk)
            if first < C.LEVELS - 1:
                _of_keys(
                    q, k, x, dy, scalars, running, made.states, first, adjoint_entries, adjoints, to, chunk, lane,
                    base, count, table, sizes, keys, columns, C,
                )  # fmt: skip


@triton.jit
def _of_keys(
    q, k, x, dy, scalars, running, state_of, first, adjoint_entries, adjoint_of, to, chunk, lane, base, count, table,
    sizes, keys, columns, C: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg and the scalars' gradients of one chunk. Each part loads its operands again, to save registers."""
    N: tl.constexpr = C.N
    P: tl.constexpr = C.P
    BK: tl.constexpr = C.BK
    BP: tl.constexpr = C.BP
    L: tl.constexpr = C.L
    DELTA: tl.constexpr = C.DELTA
    SCALED: tl.constexpr = C.SCALED
    READ_SCALED: tl.constexpr = C.READ_SCALED
    KIND: tl.constexpr = C.KIND
    PRECISION: tl.constexpr = C.PRECISION
    PITCH: tl.constexpr = C.PITCH
    F_PITCH: tl.constexpr = P * C.X_TERMS
    BETWEEN: tl.constexpr = C.BETWEEN
    heads: tl.constexpr = sizes.heads
    plane, length = sizes.plane, sizes.length
    local = tl.arange(0, L)
    begin, end = place_of_chunk(table, chunk, sizes.tokens, L)
    rows = begin + local
    scalars += chunk * L - begin
    adjoint_entries += (lane * 0 + chunk * L - begin) * heads * F_PITCH
    running += chunk * L * N
    running = Running(running, running + (lane * 0 + plane) * N)
    slot = slot_to_read(table, chunk, begin, end, base)
    state_of += (lane * (length // L) + slot) * N * P
    adjoint_of += (lane * count + slot - base) * N * P
    at = rows.to(tl.int64) * heads
    # S carried through to the last state
    last = load_row(running.at, L - 1, keys, N)
    adjoint = _load_state(adjoint_of, keys, columns, N, P, tl.float32)
    of_end = tl.exp2(last) * tl.sum(_load_state(state_of, keys, columns, N, P, tl.float32) * adjoint, axis=1)
    tl.debug_barrier()  # keeps loads from moving up, which takes too many registers
    # reads of the rows
    rows_k = load_rows(k.at, k.token, rows, end, keys, N, BK, tl.float32)
    if SCALED and not DELTA:
        rows_k *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    rows_q = load_rows(q.at, q.token, rows, end, keys, N, BK, tl.float32)
    if READ_SCALED:
        rows_q *= tl.load(scalars + READ * plane + rows)[:, None]
    read, log = _reads(
        dy, heads * P, to.pairs, heads * PITCH, state_of, rows_q, rows_k, running, first, rows, end, keys, columns,
        local, C,
    )  # fmt: skip
    read += tl.load(to.alone + at, mask=rows < end, other=0.0)[:, None] * rows_k
    if C.READ_WANTED:
        unscaled = load_rows(q.at, q.token, rows, end, keys, N, BK, tl.float32)
        tl.store(to.dc + at, tl.sum(read * unscaled, axis=1), mask=rows < end)
    if READ_SCALED:
        read *= tl.load(scalars + READ * plane + rows)[:, None]
    store_rows(to.dq, heads * N, rows, end, keys, N, BK, read)
    z = tl.zeros([L, BK], tl.float32)
    if DELTA:  # reads of their erasing
        tl.debug_barrier()
        rows_k = load_rows(k.at, k.token, rows, end, keys, N, BK, tl.float32)
        strength = -tl.load(scalars + ERASE * plane + rows)[:, None]
        read, of_erased = _reads(
            adjoint_entries, heads * F_PITCH, to.pairs + L, heads * PITCH, state_of, rows_k * strength, rows_k,
            running, first, rows, end, keys, columns, local, C,
        )  # fmt: skip
        log += of_erased
        z = read * strength
        tl.store(to.db + at, -tl.sum(read * rows_k, axis=1), mask=rows < end)
    # z = G x: what later rows and the last state read of what the rows write
    tl.debug_barrier()
    adjoint = _load_state(adjoint_of, keys, columns, N, P, KIND)
    written = load_rows(x.at, x.token, rows, end, columns, P, BP, KIND)
    into = tl.dot(written, tl.trans(adjoint), input_precision=PRECISION)
    weights = tl.trans(load_rows(to.pairs, heads * PITCH, rows, end, local, L, L, BETWEEN))
    rows_k = load_rows(k.at, k.token, rows, end, keys, N, BK, tl.float32)
    rows_q = load_rows(q.at, q.token, rows, end, keys, N, BK, tl.float32)
    if SCALED and not DELTA:
        rows_k *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    if READ_SCALED:
        rows_q *= tl.load(scalars + READ * plane + rows)[:, None]
    if DELTA:
        strength = -tl.load(scalars + ERASE * plane + rows)[:, None]
        erasing = tl.trans(load_rows(to.pairs + L, heads * PITCH, rows, end, local, L, L, BETWEEN))
    if C.ONCE:
        gap = from_row(running, L // 2 - 1, local, keys, N, BK, C.FINE)
        reader, writer = tl.exp2(gap), tl.exp2(-gap)
        source = rounded(rows_k * writer, BETWEEN, PRECISION).to(tl.float32)
        to_end = last - load_row(running.at, L // 2 - 1, keys, N)
        if C.FINE:
            to_end += load_row(running.rest, L - 1, keys, N) - load_row(running.rest, L // 2 - 1, keys, N)
        into *= tl.exp2(to_end)[None, :]
        of_end += tl.sum(into * source, axis=0)
        into = tl.dot(weights, rounded(rows_q * reader, BETWEEN, PRECISION), into, input_precision=PRECISION)
        if DELTA:
            into = tl.dot(
                erasing, rounded(rows_k * strength * reader, BETWEEN, PRECISION), into, input_precision=PRECISION
            )
        log -= into * source
        z += into * writer
    else:
        into *= tl.exp2(-from_row(running, L - 1, local, keys, N, BK, C.FINE))
        of_end += tl.sum(into * rows_k, axis=0)
        into, of_writes = _by_levels(
            into, into * rows_k, weights, rows_q, rows_k, running, first, local, keys, False, C
        )  # fmt: skip
        if DELTA:
            into, of_writes = _by_levels(
                into, of_writes, erasing, rows_k * strength, rows_k, running, first, local, keys, False, C
            )  # fmt: skip
        log -= of_writes
        z += into
    z += tl.load(to.alone + at, mask=rows < end, other=0.0)[:, None] * rows_q
    if C.SOURCE_WANTED and not DELTA:
        unscaled = load_rows(k.at, k.token, rows, end, keys, N, BK, tl.float32)
        tl.store(to.ds + at, tl.sum(z * unscaled, axis=1), mask=rows < end)
    if SCALED and not DELTA:
        z *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    store_rows(to.dk, heads * N, rows, end, keys, N, BK, z)
    log = tl.cumsum(log, axis=0, reverse=True) + of_end[None, :]
    store_rows(to.dg, heads * N, rows, end, keys, N, BK, log)


@triton.jit
def _reads(
    field, field_t, pairs, pairs_t, state_of, mine, rows_k, running, first, rows, end, keys, columns, local,
    C: tl.constexpr,
):  # fmt: skip
    """Gradients of rows that read the first state (its products with `field`) and earlier rows; and times `mine`."""
    N: tl.constexpr = C.N
    P: tl.constexpr = C.P
    L: tl.constexpr = C.L
    KIND: tl.constexpr = C.KIND
    BETWEEN: tl.constexpr = C.BETWEEN
    PRECISION: tl.constexpr = C.PRECISION
    state = _load_state(state_of, keys, columns, N, P, KIND)
    weights = load_rows(pairs, pairs_t, rows, end, local, L, L, BETWEEN)
    read = load_rows(field, field_t, rows, end, columns, P, C.BP, KIND)
    read = tl.dot(read, tl.trans(state), input_precision=PRECISION)
    if C.ONCE:
        gap = from_row(running, L // 2 - 1, local, keys, N, C.BK, C.FINE)
        middle = load_row(running.at, L // 2 - 1, keys, N)
        from_start = power(middle, load_row(running.rest, L // 2 - 1, keys, N) if C.FINE else middle, C.FINE)
        reader, source = tl.exp2(gap), rounded(rows_k * tl.exp2(-gap), BETWEEN, PRECISION)
        read = tl.dot(weights, source, read * from_start[None, :], input_precision=PRECISION)
        log = read * rounded(mine * reader, BETWEEN, PRECISION).to(tl.float32)
        read *= reader
    else:
        read *= tl.exp2(load_chunk(running.at, local, keys, N, C.BK))
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
