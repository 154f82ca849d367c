"""Gradients of one chunk whose decays differ along the Key axis; all chunks in parallel.

The sums of gradient.py with decays inside the Key axis: what meets the chunk's first state or last adjoint is one
product, what meets rows of the chunk goes through the blocks of keywise.py. The log decays' gradient comes from the
rows': G_i grows with what row i reads and falls with what it writes, so dG = q ⊙ dq - k ⊙ dk inside the chunk, where
writes into the last state and S carried through depend on the last G alone. What a row reads of its own write no decay
touches: it is left out of both, so that decays near zero keep their gradient's digits. dlog decay_t sums dG over the
rows from t on. There what a row reads of another and what that one writes to it cancel, so both are products of the
same rounded factors: others would leave, summed over a chunk, as much as what remains of strong decays.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.keywise import factors, load_chunk, meeting, rounded, row_of
from dsf.kernels.triton.tiles import ERASE, READ, SOURCE, load_rows, store_rows


@triton.jit(do_not_specialize=["base", "count"])
def key_gradient(
    q, k, v, dy, scalars, running, first_levels, writes, scores_of, entries, adjoint_entries, states, adjoints,
    dq, dk, dv, dg, ds, db, dc,
    tokens, heads, length, plane, base, count,
    q_b, q_t, q_h, q_group, k_b, k_t, k_h, k_group, v_b, v_t, v_h, v_group,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr, L: tl.constexpr,
    LEVELS: tl.constexpr, DELTA: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr,
    SOURCE_WANTED: tl.constexpr, READ_WANTED: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv of a slice of P, and that slice's part of all the others, to be summed; of `count` chunks from `base` on.

    A chunk has a program for each BK keys, and without the delta rule one for dv: neighbours, so that all but the first
    find their operands in the cache. dq, dk, dg [slices, B, T, H, N]; the scalars' [slices · keys / BK, B, T, H].
    """
    BLOCKS: tl.constexpr = (N + BK - 1) // BK
    ROLES: tl.constexpr = BLOCKS if DELTA else BLOCKS + 1
    role, chunk = tl.program_id(0) % ROLES, tl.program_id(0) // ROLES + base
    lane, piece = tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, head = lane // heads, lane % heads
    q += batch * q_b + head // q_group * q_h
    k += batch * k_b + head // k_group * k_h
    v += batch * v_b + head // v_group * v_h
    scalars += lane * length
    flat = batch * tokens * heads + head
    size = tl.num_programs(1).to(tl.int64) * tokens
    states += (lane * tl.cdiv(tokens, L) + chunk) * N * P
    adjoints += (lane * count + chunk - base) * N * P
    adjoint_entries += ((batch * count - base) * L * heads + head) * P
    columns, local = piece * BP + tl.arange(0, BP), tl.arange(0, L)
    rows = chunk * L + local
    dy += flat * P
    if DELTA:
        x, x_t = entries + flat * P, heads * P
    else:
        x, x_t = v, v_t
    block = (lane * length + chunk * L) * N
    at_rows = (flat + piece * size) * N
    at_scalars = flat + (piece * BLOCKS + role) * size + rows.to(tl.int64) * heads
    if role < BLOCKS:
        first = tl.load(first_levels + lane * (length // L) + chunk)
        if first == LEVELS - 1:
            _of_keys(
                q, q_t, k, k_t, v, v_t, dy, x, x_t, scalars, running + block, first, adjoint_entries,
                states, adjoints, dq + at_rows, dk + at_rows, dv + flat * P, dg + at_rows,
                ds + at_scalars, db + at_scalars, dc + at_scalars, role == 0, rows, tokens, heads, plane,
                role * BK + tl.arange(0, BK), columns, local, True,
                N, P, BK, BP, L, LEVELS, DELTA, SCALED, READ_SCALED, SOURCE_WANTED, READ_WANTED, KIND, PRECISION,
            )  # fmt: skip
        else:
            _of_keys(
                q, q_t, k, k_t, v, v_t, dy, x, x_t, scalars, running + block, first, adjoint_entries,
                states, adjoints, dq + at_rows, dk + at_rows, dv + flat * P, dg + at_rows,
                ds + at_scalars, db + at_scalars, dc + at_scalars, role == 0, rows, tokens, heads, plane,
                role * BK + tl.arange(0, BK), columns, local, False,
                N, P, BK, BP, L, LEVELS, DELTA, SCALED, READ_SCALED, SOURCE_WANTED, READ_WANTED, KIND, PRECISION,
            )  # fmt: skip
    elif not DELTA:
        _of_values(
            dy, scalars, writes + block, scores_of + flat * L, adjoints, dv + flat * P,
            rows, tokens, heads, plane, tl.arange(0, BN), columns, local,
            N, P, BN, BP, L, SCALED, READ_SCALED, KIND, PRECISION,
        )  # fmt: skip


@triton.jit
def _of_values(
    dy, scalars, writes, scores_of, adjoint_of, dv, rows, tokens, heads, plane, keys, columns, local,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, L: tl.constexpr,
    SCALED: tl.constexpr, READ_SCALED: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv without the delta rule."""
    given = load_rows(dy, heads * P, rows, tokens, columns, P, BP, KIND)
    adjoint = _load_state(adjoint_of, keys, columns, N, P, KIND)
    grad_v = tl.dot(load_chunk(writes, local, keys, N, BN).to(KIND), adjoint, input_precision=PRECISION)
    scores = tl.trans(load_rows(scores_of, heads * L, rows, tokens, local, L, L, KIND))
    if READ_SCALED:
        scores = (scores.to(tl.float32) * tl.load(scalars + READ * plane + rows)[None, :]).to(KIND)
    grad_v = tl.dot(scores, given, grad_v, input_precision=PRECISION)
    if SCALED:
        grad_v *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    store_rows(dv, heads * P, rows, tokens, columns, P, BP, grad_v)


@triton.jit
def _of_keys(
    q, q_t, k, k_t, v, v_t, dy, x, x_t, scalars, running, first, adjoint_entries, state_of, adjoint_of,
    dq, dk, dv, dg, ds, db, dc, is_first, rows, tokens, heads, plane, keys, columns, local, ONCE: tl.constexpr,
    N: tl.constexpr, P: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr,
    DELTA: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr,
    SOURCE_WANTED: tl.constexpr, READ_WANTED: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg, the scalars' gradients and (DELTA) dv. ONCE: all rows meet in one product."""
    own = load_chunk(running, local, keys, N, BK)
    middle = row_of(own, local, L // 2 - 1)
    last = row_of(own, local, L - 1)
    # q and k as the sums have them
    rows_q = load_rows(q, q_t, rows, tokens, keys, N, BK, tl.float32)
    if READ_SCALED:
        rows_q *= tl.load(scalars + READ * plane + rows)[:, None]
    rows_k = load_rows(k, k_t, rows, tokens, keys, N, BK, tl.float32)
    if SCALED and not DELTA:
        rows_k *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    if DELTA:
        strength = -tl.load(scalars + ERASE * plane + rows)[:, None]
    given = load_rows(dy, heads * P, rows, tokens, columns, P, BP, KIND)
    written = load_rows(x, x_t, rows, tokens, columns, P, BP, KIND)
    at_once = tl.sum(given.to(tl.float32) * written.to(tl.float32), axis=1)[:, None]
    # reads: of the first state, of earlier rows
    products = tl.dot(given, tl.trans(written), input_precision=PRECISION)
    products = tl.where(local[:, None] > local[None, :], products, 0.0).to(KIND)
    state = _load_state(state_of, keys, columns, N, P, KIND)
    read = tl.dot(given, tl.trans(state), input_precision=PRECISION)
    if ONCE:
        gap = own - middle[None, :]
        reader, writer = tl.exp2(gap), tl.exp2(-gap)
        query, source = rounded(rows_q * reader, KIND, PRECISION), rounded(rows_k * writer, KIND, PRECISION)
        from_middle, to_end = tl.exp2(middle)[None, :], tl.exp2(last - middle)[None, :]
        read = read * from_middle + tl.dot(products, source, input_precision=PRECISION)
        log = read * query.to(tl.float32)
        read *= reader
    else:
        read *= tl.exp2(own)
        read, log = _by_levels(
            read, read * rows_q, products, rows_k, rows_q, running, first, own, local, keys,
            True, LEVELS, N, BK, KIND, PRECISION,
        )  # fmt: skip
    read += at_once * rows_k
    if READ_WANTED:
        unscaled = load_rows(q, q_t, rows, tokens, keys, N, BK, tl.float32)
        tl.store(dc, tl.sum(read * unscaled, axis=1), mask=rows < tokens)
    if READ_SCALED:
        read *= tl.load(scalars + READ * plane + rows)[:, None]
    store_rows(dq, heads * N, rows, tokens, keys, N, BK, read)
    # z = G x: writes into the last state, into later rows
    products = tl.dot(written, tl.trans(given), input_precision=PRECISION)
    products = tl.where(local[:, None] < local[None, :], products, 0.0).to(KIND)
    adjoint = _load_state(adjoint_of, keys, columns, N, P, KIND)
    of_end = tl.exp2(last) * tl.sum(state.to(tl.float32) * adjoint.to(tl.float32), axis=1)
    z = tl.dot(written, tl.trans(adjoint), input_precision=PRECISION)
    if DELTA:
        f = load_rows(adjoint_entries, heads * P, rows, tokens, columns, P, BP, KIND)
        erasing = tl.dot(written, tl.trans(f), input_precision=PRECISION)
        erasing = tl.where(local[:, None] < local[None, :], erasing, 0.0).to(KIND)
    if ONCE:
        z *= to_end
        of_end += tl.sum(z * source.to(tl.float32), axis=0)
        z += tl.dot(products, query, input_precision=PRECISION)
        if DELTA:
            erased = rounded(rows_k * strength * reader, KIND, PRECISION)
            z += tl.dot(erasing, erased, input_precision=PRECISION)
        log -= z * source.to(tl.float32)
        z *= writer
    else:
        z *= tl.exp2(last[None, :] - own)
        of_end += tl.sum(z * rows_k, axis=0)
        z, of_writes = _by_levels(
            z, z * rows_k, products, rows_q, rows_k, running, first, own, local, keys,
            False, LEVELS, N, BK, KIND, PRECISION,
        )  # fmt: skip
        if DELTA:
            z, of_writes = _by_levels(
                z, of_writes, erasing, rows_k * strength, rows_k, running, first, own, local, keys,
                False, LEVELS, N, BK, KIND, PRECISION,
            )  # fmt: skip
        log -= of_writes
    z += at_once * rows_q
    if DELTA:
        # d: what the erasing of each row read, S_{t-1} decayed, times f
        products = tl.dot(f, tl.trans(written), input_precision=PRECISION)
        products = tl.where(local[:, None] > local[None, :], products, 0.0).to(KIND)
        d = tl.dot(f, tl.trans(state), input_precision=PRECISION)
        if ONCE:
            d = d * from_middle + tl.dot(products, source, input_precision=PRECISION)
            log += d * erased.to(tl.float32)
            d *= reader
        else:
            d *= tl.exp2(own)
            d, log = _by_levels(
                d, log + d * rows_k * strength, products, rows_k, rows_k * strength, running, first, own, local, keys,
                True, LEVELS, N, BK, KIND, PRECISION,
            )  # fmt: skip
        tl.store(db, -tl.sum(d * rows_k, axis=1), mask=rows < tokens)
        z += d * strength
        grad_v = f.to(tl.float32)
        if SOURCE_WANTED:
            values = load_rows(v, v_t, rows, tokens, columns, P, BP, tl.float32)
            tl.store(ds, tl.where(is_first, tl.sum(grad_v * values, axis=1), 0.0), mask=rows < tokens)
        if SCALED:
            grad_v *= tl.load(scalars + SOURCE * plane + rows)[:, None]
        if is_first:
            store_rows(dv, heads * P, rows, tokens, columns, P, BP, grad_v)
    else:
        if SOURCE_WANTED:
            unscaled = load_rows(k, k_t, rows, tokens, keys, N, BK, tl.float32)
            tl.store(ds, tl.sum(z * unscaled, axis=1), mask=rows < tokens)
        if SCALED:
            z *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    store_rows(dk, heads * N, rows, tokens, keys, N, BK, z)
    log = tl.cumsum(log, axis=0, reverse=True) + of_end[None, :]
    store_rows(dg, heads * N, rows, tokens, keys, N, BK, log)


@triton.jit
def _by_levels(
    out, log, weights, x, mine, running, first, own, local, keys,
    READS: tl.constexpr, LEVELS: tl.constexpr, N: tl.constexpr, BK: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out + Σ_j weights[i, j] exp(-|G_i - G_j|) x_j of rows that i reads (READS) or that read i; log + mine ⊙ that."""
    meet = meeting(local, first)
    for level in tl.range(first, LEVELS, num_stages=1):
        if READS:
            factor, other = factors(running, own, local, keys, level, N, BK)
        else:
            other, factor = factors(running, own, local, keys, level, N, BK)
        there = rounded(x * other, KIND, PRECISION)
        products = tl.dot(tl.where((meet >> level) == 1, weights, 0.0), there, input_precision=PRECISION)
        out += products * factor
        log += products * rounded(mine * factor, KIND, PRECISION).to(tl.float32)
    return out, log


@triton.jit
def _load_state(base, keys, columns, N: tl.constexpr, P: tl.constexpr, KIND: tl.constexpr):
    """A tile of a state [N, P]."""
    inside = (keys[:, None] < N) & (columns[None, :] < P)
    return tl.load(base + keys[:, None] * P + columns[None, :], mask=inside, other=0.0).to(KIND)
