"""Gradients of one chunk whose decays differ along the Key axis; all chunks in parallel.

The sums of gradient.py with decays inside the Key axis: what meets the chunk's first state or last adjoint is one
product, what meets rows of the chunk goes through the blocks of keywise.py. The log decays' gradient comes from the
rows': G_i grows with what row i reads and falls with what it writes, so dG = q ⊙ dq - k ⊙ dk inside the chunk, where
writes into the last state and S carried through depend on the last G alone. What a row reads of its own write no decay
touches: it is left out of both, so that decays near zero keep their gradient's digits. dlog decay_t sums dG over the
rows from t on. In that sum the read of row j by row i and the write of row j to row i cancel. Both are therefore
computed from the same rounded factors: with different ones the rounding errors left over from the cancellation would,
summed over a chunk, be as large as the gradient of strong decays.

key_pairs first makes what does not depend on keys; then key_gradient runs on chunks whose rows all meet at once, in
few registers, and once more on the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.keywise import GROUP, factors, load_chunk, load_row, meeting, rounded
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
from dsf.kernels.triton.packed import place_of_chunk


@triton.jit(do_not_specialize=["base", "count"])
def key_pairs(
    v, dy, scalars, writes, scores_of, entries, adjoint_entries, adjoints, pairs, alone, dv, ds, table,
    tokens, heads: tl.constexpr, length, plane, base, count,
    v_b, v_t: tl.constexpr, v_h, v_group,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, L: tl.constexpr,
    DELTA: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr, SOURCE_WANTED: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """dv of a slice of P; dy_i·x_j and (DELTA) f_i·x_j of j < i, pairs [slices, B, T, H, L or 2L]; alone: dy_i·x_i.

    Of `count` chunks from `base` on. DELTA: also ds, of that slice [slices, B, T, H]. TERMS: of x and f (DELTA), or
    of the adjoint state.
    """
    chunk, lane, piece = tl.program_id(0) + base, tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, head = lane // heads, lane % heads
    PITCH: tl.constexpr = 2 * L if DELTA else L
    X_TERMS: tl.constexpr = TERMS if DELTA else 1
    BETWEEN: tl.constexpr = tl.float32 if TERMS == 2 else KIND
    v += batch * v_b + head // v_group * v_h
    begin, end = place_of_chunk(table, chunk, tokens, L)
    behind = chunk * L - begin  # rows of slots less rows of tokens
    scalars += lane * length + behind
    flat = batch * tokens * heads + head
    part = flat + piece * tl.num_programs(1).to(tl.int64) * tokens
    pairs += part * PITCH
    keys, columns, local = tl.arange(0, BN), piece * BP + tl.arange(0, BP), tl.arange(0, L)
    rows = begin + local
    earlier = local[:, None] > local[None, :]
    at = part + rows.to(tl.int64) * heads
    given = load_rows(dy + flat * P, heads * P, rows, end, columns, P, BP, KIND)
    x, x_t = v, v_t
    if DELTA:
        x, x_t = entries + flat * P * X_TERMS, heads * P * X_TERMS
    written = load_terms(x, x_t, rows, end, columns, P, BP, KIND, X_TERMS)
    tl.store(alone + at, tl.sum(given.to(tl.float32) * whole(written, X_TERMS), axis=1), mask=rows < end)
    written = turn(written)
    products = tl.where(earlier, product((given, given), written, 1, X_TERMS, PRECISION), 0.0)
    store_rows(pairs, heads * PITCH, rows, end, local, L, L, rounded(products, BETWEEN, PRECISION))
    if DELTA:
        adjoint_entries += (((batch * count - base) * L + behind) * heads + head) * P * X_TERMS
        f = load_terms(adjoint_entries, heads * P * X_TERMS, rows, end, columns, P, BP, KIND, X_TERMS)
        products = tl.where(earlier, tl.dot(f[0], written[0], input_precision=PRECISION), 0.0)
        store_rows(pairs + L, heads * PITCH, rows, end, local, L, L, rounded(products, BETWEEN, PRECISION))
        grad_v = whole(f, X_TERMS)
        if SOURCE_WANTED:
            values = load_rows(v, v_t, rows, end, columns, P, BP, tl.float32)
            tl.store(ds + at, tl.sum(grad_v * values, axis=1), mask=rows < end)
    else:
        adjoints += (lane * count + chunk - base) * N * P
        adjoint = split(_load_state(adjoints, keys, columns, N, P, tl.float32), TERMS, KIND)
        kept = load_chunk(writes + (lane * length + chunk * L) * N, local, keys, N, BN).to(KIND)
        grad_v = product((kept, kept), adjoint, 1, TERMS, PRECISION)
        scores = tl.trans(load_rows(scores_of + flat * L, heads * L, rows, end, local, L, L, KIND))
        if READ_SCALED:
            scores = (scores.to(tl.float32) * tl.load(scalars + READ * plane + rows)[None, :]).to(KIND)
        grad_v = tl.dot(scores, given, grad_v, input_precision=PRECISION)
    if SCALED:
        grad_v *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    store_rows(dv + flat * P, heads * P, rows, end, columns, P, BP, grad_v)


@triton.jit(do_not_specialize=["base", "count"])
def key_gradient(
    q, k, v, dy, scalars, running, first_levels, pairs, alone, entries, adjoint_entries, states, adjoints,
    dq, dk, dg, ds, db, dc, table,
    tokens, heads: tl.constexpr, length, plane, base, count,
    q_b, q_t: tl.constexpr, q_h, q_group, k_b, k_t: tl.constexpr, k_h, k_group, v_b, v_t: tl.constexpr, v_h, v_group,
    N: tl.constexpr, P: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr, L: tl.constexpr,
    LEVELS: tl.constexpr, ONCE: tl.constexpr, DELTA: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr,
    SOURCE_WANTED: tl.constexpr, READ_WANTED: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """A slice of P's part of the gradients, to be summed, BK keys a program; of `count` chunks from `base` on.

    dq, dk, dg [slices, B, T, H, N]; the scalars' [slices · keys / BK, B, T, H]. ONCE: of chunks whose rows all meet in
    one product, one a program; else of the others, of every GROUP chunks.
    """
    BLOCKS: tl.constexpr = (N + BK - 1) // BK
    block, lane, piece = tl.program_id(0) % BLOCKS, tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, head = lane // heads, lane % heads
    q += batch * q_b + head // q_group * q_h
    k += batch * k_b + head // k_group * k_h
    v += batch * v_b + head // v_group * v_h
    scalars += lane * length
    flat = batch * tokens * heads + head
    size = tl.num_programs(1).to(tl.int64) * tokens
    part = flat + piece * size
    PITCH: tl.constexpr = 2 * L if DELTA else L
    X_TERMS: tl.constexpr = TERMS if DELTA else 1
    if DELTA:
        x, x_t = entries + flat * P * X_TERMS, heads * P * X_TERMS
    else:
        x, x_t = v, v_t
    adjoint_entries += ((batch * count - base) * L * heads + head) * P * X_TERMS
    running += lane * length * N
    first_levels += lane * (length // L)
    at_scalars = flat + (piece * BLOCKS + block) * size
    keys, columns = block * BK + tl.arange(0, BK), piece * BP + tl.arange(0, BP)
    EACH: tl.constexpr = 1 if ONCE else GROUP
    first_chunk = tl.program_id(0) // BLOCKS * EACH
    if ONCE:
        chunk = first_chunk + base
        if tl.load(first_levels + chunk) == LEVELS - 1:
            _of_keys(
                q, q_t, k, k_t, dy + flat * P, x, x_t, scalars, running, LEVELS - 1, pairs + part * PITCH, alone + part,
                adjoint_entries, states, adjoints, dq + part * N, dk + part * N, dg + part * N,
                ds + at_scalars, db + at_scalars, dc + at_scalars, chunk, lane, base, count, table, tokens, heads,
                plane, length, keys, columns, True, N, P, BK, BP, L, LEVELS,
                DELTA, SCALED, READ_SCALED, SOURCE_WANTED, READ_WANTED, KIND, PRECISION, TERMS,
            )  # fmt: skip
    else:
        for chunk in tl.range(first_chunk + base, base + tl.minimum(first_chunk + GROUP, count), num_stages=1):
            first = tl.load(first_levels + chunk)
            if first < LEVELS - 1:
                _of_keys(
                    q, q_t, k, k_t, dy + flat * P, x, x_t, scalars, running, first, pairs + part * PITCH, alone + part,
                    adjoint_entries, states, adjoints, dq + part * N, dk + part * N, dg + part * N,
                    ds + at_scalars, db + at_scalars, dc + at_scalars, chunk, lane, base, count, table, tokens, heads,
                    plane, length, keys, columns, False, N, P, BK, BP, L, LEVELS,
                    DELTA, SCALED, READ_SCALED, SOURCE_WANTED, READ_WANTED, KIND, PRECISION, TERMS,
                )  # fmt: skip


@triton.jit
def _of_keys(
    q, q_t, k, k_t, dy, x, x_t, scalars, running, first, pairs, alone, adjoint_entries, state_of, adjoint_of,
    dq, dk, dg, ds, db, dc, chunk, lane, base, count, table, tokens, heads, plane, length, keys, columns,
    ONCE: tl.constexpr,
    N: tl.constexpr, P: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr,
    DELTA: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr,
    SOURCE_WANTED: tl.constexpr, READ_WANTED: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    TERMS: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg and the scalars' gradients of one chunk, in parts that load what they need again."""
    PITCH: tl.constexpr = 2 * L if DELTA else L
    F_PITCH: tl.constexpr = P * (TERMS if DELTA else 1)
    BETWEEN: tl.constexpr = tl.float32 if TERMS == 2 else KIND
    local = tl.arange(0, L)
    begin, end = place_of_chunk(table, chunk, tokens, L)
    rows = begin + local
    scalars += chunk * L - begin
    adjoint_entries += (lane * 0 + chunk * L - begin) * heads * F_PITCH
    running += chunk * L * N
    state_of += (lane * (length // L) + chunk) * N * P
    adjoint_of += (lane * count + chunk - base) * N * P
    at = rows.to(tl.int64) * heads
    # S carried through to the last state
    last = load_row(running, L - 1, keys, N)
    adjoint = _load_state(adjoint_of, keys, columns, N, P, tl.float32)
    of_end = tl.exp2(last) * tl.sum(_load_state(state_of, keys, columns, N, P, tl.float32) * adjoint, axis=1)
    tl.debug_barrier()  # or loads move up, and registers run out
    # what the rows read
    rows_k = load_rows(k, k_t, rows, end, keys, N, BK, tl.float32)
    if SCALED and not DELTA:
        rows_k *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    rows_q = load_rows(q, q_t, rows, end, keys, N, BK, tl.float32)
    if READ_SCALED:
        rows_q *= tl.load(scalars + READ * plane + rows)[:, None]
    read, log = _reads(
        dy, heads * P, pairs, heads * PITCH, state_of, rows_q, rows_k, running, first, rows, end, keys, columns,
        local, ONCE, N, P, BK, BP, L, LEVELS, KIND, BETWEEN, PRECISION,
    )  # fmt: skip
    read += tl.load(alone + at, mask=rows < end, other=0.0)[:, None] * rows_k
    if READ_WANTED:
        unscaled = load_rows(q, q_t, rows, end, keys, N, BK, tl.float32)
        tl.store(dc + at, tl.sum(read * unscaled, axis=1), mask=rows < end)
    if READ_SCALED:
        read *= tl.load(scalars + READ * plane + rows)[:, None]
    store_rows(dq, heads * N, rows, end, keys, N, BK, read)
    z = tl.zeros([L, BK], tl.float32)
    if DELTA:  # what their erasing reads
        tl.debug_barrier()
        rows_k = load_rows(k, k_t, rows, end, keys, N, BK, tl.float32)
        strength = -tl.load(scalars + ERASE * plane + rows)[:, None]
        read, of_erased = _reads(
            adjoint_entries, heads * F_PITCH, pairs + L, heads * PITCH, state_of, rows_k * strength, rows_k, running,
            first, rows, end, keys, columns, local, ONCE, N, P, BK, BP, L, LEVELS, KIND, BETWEEN, PRECISION,
        )  # fmt: skip
        log += of_erased
        z = read * strength
        tl.store(db + at, -tl.sum(read * rows_k, axis=1), mask=rows < end)
    # z = G x: what later rows and the last state read of what the rows write
    tl.debug_barrier()
    adjoint = _load_state(adjoint_of, keys, columns, N, P, KIND)
    written = load_rows(x, x_t, rows, end, columns, P, BP, KIND)
    into = tl.dot(written, tl.trans(adjoint), input_precision=PRECISION)
    weights = tl.trans(load_rows(pairs, heads * PITCH, rows, end, local, L, L, BETWEEN))
    rows_k = load_rows(k, k_t, rows, end, keys, N, BK, tl.float32)
    rows_q = load_rows(q, q_t, rows, end, keys, N, BK, tl.float32)
    if SCALED and not DELTA:
        rows_k *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    if READ_SCALED:
        rows_q *= tl.load(scalars + READ * plane + rows)[:, None]
    own = load_chunk(running, local, keys, N, BK)
    if DELTA:
        strength = -tl.load(scalars + ERASE * plane + rows)[:, None]
        erasing = tl.trans(load_rows(pairs + L, heads * PITCH, rows, end, local, L, L, BETWEEN))
    if ONCE:
        middle = load_row(running, L // 2 - 1, keys, N)
        gap = own - middle[None, :]
        reader, writer = tl.exp2(gap), tl.exp2(-gap)
        source = rounded(rows_k * writer, BETWEEN, PRECISION).to(tl.float32)
        into *= tl.exp2(last - middle)[None, :]
        of_end += tl.sum(into * source, axis=0)
        into = tl.dot(weights, rounded(rows_q * reader, BETWEEN, PRECISION), into, input_precision=PRECISION)
        if DELTA:
            into = tl.dot(
                erasing, rounded(rows_k * strength * reader, BETWEEN, PRECISION), into, input_precision=PRECISION
            )
        log -= into * source
        z += into * writer
    else:
        into *= tl.exp2(last[None, :] - own)
        of_end += tl.sum(into * rows_k, axis=0)
        into, of_writes = _by_levels(
            into, into * rows_k, weights, rows_q, rows_k, running, first, own, local, keys,
            False, LEVELS, N, BK, BETWEEN, PRECISION,
        )  # fmt: skip
        if DELTA:
            into, of_writes = _by_levels(
                into, of_writes, erasing, rows_k * strength, rows_k, running, first, own, local, keys,
                False, LEVELS, N, BK, BETWEEN, PRECISION,
            )  # fmt: skip
        log -= of_writes
        z += into
    z += tl.load(alone + at, mask=rows < end, other=0.0)[:, None] * rows_q
    if SOURCE_WANTED and not DELTA:
        unscaled = load_rows(k, k_t, rows, end, keys, N, BK, tl.float32)
        tl.store(ds + at, tl.sum(z * unscaled, axis=1), mask=rows < end)
    if SCALED and not DELTA:
        z *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    store_rows(dk, heads * N, rows, end, keys, N, BK, z)
    log = tl.cumsum(log, axis=0, reverse=True) + of_end[None, :]
    store_rows(dg, heads * N, rows, end, keys, N, BK, log)


@triton.jit
def _reads(
    field, field_t, pairs, pairs_t, state_of, mine, rows_k, running, first, rows, end, keys, columns, local,
    ONCE: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr, L: tl.constexpr,
    LEVELS: tl.constexpr, KIND: tl.constexpr, BETWEEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What rows read of the first state (by its products with `field`) and of earlier rows; and that times mine."""
    state = _load_state(state_of, keys, columns, N, P, KIND)
    own = load_chunk(running, local, keys, N, BK)
    weights = load_rows(pairs, pairs_t, rows, end, local, L, L, BETWEEN)
    read = load_rows(field, field_t, rows, end, columns, P, BP, KIND)
    read = tl.dot(read, tl.trans(state), input_precision=PRECISION)
    if ONCE:
        middle = load_row(running, L // 2 - 1, keys, N)
        gap = own - middle[None, :]
        reader, source = tl.exp2(gap), rounded(rows_k * tl.exp2(-gap), BETWEEN, PRECISION)
        read = tl.dot(weights, source, read * tl.exp2(middle)[None, :], input_precision=PRECISION)
        log = read * rounded(mine * reader, BETWEEN, PRECISION).to(tl.float32)
        read *= reader
    else:
        read *= tl.exp2(own)
        read, log = _by_levels(
            read, read * mine, weights, rows_k, mine, running, first, own, local, keys,
            True, LEVELS, N, BK, BETWEEN, PRECISION,
        )  # fmt: skip
    return read, log


@triton.jit
def _by_levels(
    out, log, weights, x, mine, running, first, own, local, keys,
    READS: tl.constexpr, LEVELS: tl.constexpr, N: tl.constexpr, BK: tl.constexpr,
    BETWEEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out + Σ_j weights[i, j] exp(-|G_i - G_j|) x_j of rows that i reads (READS) or that read i; log + mine ⊙ that."""
    meet = meeting(local, first)
    for level in tl.range(first, LEVELS, num_stages=1):
        if READS:
            factor, other = factors(running, own, local, keys, level, N, BK)
        else:
            other, factor = factors(running, own, local, keys, level, N, BK)
        there = rounded(x * other, BETWEEN, PRECISION)
        products = tl.dot(tl.where((meet >> level) == 1, weights, 0.0), there, input_precision=PRECISION)
        out += products * factor
        log += products * rounded(mine * factor, BETWEEN, PRECISION).to(tl.float32)
    return out, log


@triton.jit
def _load_state(base, keys, columns, N: tl.constexpr, P: tl.constexpr, KIND: tl.constexpr):
    """A tile of a state [N, P]."""
    inside = (keys[:, None] < N) & (columns[None, :] < P)
    return tl.load(base + keys[:, None] * P + columns[None, :], mask=inside, other=0.0).to(KIND)
