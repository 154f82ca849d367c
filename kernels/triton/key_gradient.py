"""Gradients of one chunk whose decays differ along the Key axis; all chunks in parallel.

The sums of gradient.py with decays inside the Key axis: what meets the chunk's first state or last adjoint is one
product, what meets rows of the chunk goes through the blocks of keywise.py. The log decays' gradient comes from the
rows': G_i grows with what row i reads and falls with what it writes, so dG = q ⊙ dq - k ⊙ dk inside the chunk, where
writes into the last state and S carried through depend on the last G alone. What a row reads of its own write no decay
touches: it is left out of both, so that decays near zero keep their gradient's digits. dlog decay_t sums dG over the
rows from t on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.keywise import load_chunk, pair_products, rounded
from dsf.kernels.triton.tiles import ERASE, READ, SOURCE, load_rows, store_rows


@triton.jit(do_not_specialize=["base", "count"])
def key_gradient(
    q, k, v, dy, scalars, running, writes, scores_of, entries, adjoint_entries, states, adjoints,
    dq, dk, dv, dg, ds, db, dc,
    tokens, heads, length, plane, base, count,
    q_b, q_t, q_h, q_group, k_b, k_t, k_h, k_group, v_b, v_t, v_h, v_group,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr, L: tl.constexpr,
    LEVELS: tl.constexpr, DELTA: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr,
    SOURCE_WANTED: tl.constexpr, READ_WANTED: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv of a slice of P, and that slice's part of all the others, to be summed; of `count` chunks from `base` on.

    A chunk has a program for what reads give and one for what writes give for each BK keys, and without the delta rule
    one for dv: neighbours, so that all but the first find their operands in the cache; in one program they would not
    fit in registers. dq, dk [slices, B, T, H, N]; dg [2 · slices, B, T, H, N]; the scalars' [slices · keys / BK, ..].
    """
    BLOCKS: tl.constexpr = BN // BK
    ROLES: tl.constexpr = 2 * BLOCKS if DELTA else 2 * BLOCKS + 1
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
    keys = role % BLOCKS * BK + tl.arange(0, BK)
    at_rows = flat + piece * size
    at_scalars = flat + (piece * BLOCKS + role % BLOCKS) * size + rows.to(tl.int64) * heads
    if role < BLOCKS:
        of_rows = _of_reads(
            q, q_t, k, k_t, dy, x, x_t, scalars, running + block, states, dq + at_rows * N, dc + at_scalars,
            rows, tokens, heads, plane, keys, columns, local,
            N, P, BK, BP, L, LEVELS, DELTA, SCALED, READ_SCALED, READ_WANTED, KIND, PRECISION,
        )  # fmt: skip
        log = _sum_after(of_rows, local, KIND, PRECISION)
        store_rows(dg + at_rows * N, heads * N, rows, tokens, keys, N, BK, log)
    elif role < 2 * BLOCKS:
        of_rows, of_end = _of_writes(
            q, q_t, k, k_t, v, v_t, dy, x, x_t, scalars, running + block, adjoint_entries,
            states, adjoints, dk + at_rows * N, dv + flat * P, ds + at_scalars, db + at_scalars,
            role == BLOCKS, rows, tokens, heads, plane, keys, columns, local,
            N, P, BK, BP, L, LEVELS, DELTA, SCALED, READ_SCALED, SOURCE_WANTED, KIND, PRECISION,
        )  # fmt: skip
        log = _sum_after(of_rows, local, KIND, PRECISION) + of_end[None, :]
        store_rows(dg + (at_rows + tl.num_programs(2) * size) * N, heads * N, rows, tokens, keys, N, BK, log)
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
def _of_reads(
    q, q_t, k, k_t, dy, x, x_t, scalars, running, state_of, dq, dc,
    rows, tokens, heads, plane, keys, columns, local,
    N: tl.constexpr, P: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr,
    DELTA: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr, READ_WANTED: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and dc. Returns the gradient of G as the reads have it, [L, BK]."""
    given = load_rows(dy, heads * P, rows, tokens, columns, P, BP, KIND)
    written = load_rows(x, x_t, rows, tokens, columns, P, BP, KIND)
    state = _load_state(state_of, keys, columns, N, P, KIND)
    yx = tl.dot(given, tl.trans(written), input_precision=PRECISION)
    own = load_chunk(running, local, keys, N, BK)
    grad_q = tl.dot(given, tl.trans(state), input_precision=PRECISION) * tl.exp2(own)
    rows_k = load_rows(k, k_t, rows, tokens, keys, N, BK, tl.float32)
    if SCALED and not DELTA:
        rows_k *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    rows_q = load_rows(q, q_t, rows, tokens, keys, N, BK, tl.float32)
    read_q = rows_q
    if READ_SCALED:
        read_q *= tl.load(scalars + READ * plane + rows)[:, None]
    grad_q, of_rows = pair_products(
        grad_q, grad_q * read_q, yx, rows_k, read_q, running, own, local, keys,
        True, LEVELS, N, BK, KIND, PRECISION,
    )  # fmt: skip
    grad_q += _diagonal(yx, local)[:, None] * rows_k
    if READ_WANTED:
        tl.store(dc, tl.sum(grad_q * rows_q, axis=1), mask=rows < tokens)
    if READ_SCALED:
        grad_q *= tl.load(scalars + READ * plane + rows)[:, None]
    store_rows(dq, heads * N, rows, tokens, keys, N, BK, grad_q)
    return of_rows


@triton.jit
def _of_writes(
    q, q_t, k, k_t, v, v_t, dy, x, x_t, scalars, running, adjoint_entries, state_of, adjoint_of,
    dk, dv, ds, db, is_first, rows, tokens, heads, plane, keys, columns, local,
    N: tl.constexpr, P: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr,
    DELTA: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr, SOURCE_WANTED: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, ds, db and (DELTA) dv. Returns the gradient of G as writes and erasing have it, and its last row's."""
    adjoint = _load_state(adjoint_of, keys, columns, N, P, KIND)
    state = _load_state(state_of, keys, columns, N, P, KIND)
    through = tl.sum(state.to(tl.float32) * adjoint.to(tl.float32), axis=1)
    written = load_rows(x, x_t, rows, tokens, columns, P, BP, KIND)
    rows_k = load_rows(k, k_t, rows, tokens, keys, N, BK, tl.float32)
    written_k = rows_k
    if SCALED and not DELTA:
        written_k *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    own = load_chunk(running, local, keys, N, BK)
    # z = G x, from the last state and from the reads of later rows; its part of the gradient of G is negative
    last = tl.sum(tl.where((local == L - 1)[:, None], own, 0.0), axis=0)
    z = tl.dot(written, tl.trans(adjoint), input_precision=PRECISION) * tl.exp2(last[None, :] - own)
    at_end = z * written_k
    of_end = tl.sum(at_end, axis=0) + tl.exp2(last) * through
    given = load_rows(dy, heads * P, rows, tokens, columns, P, BP, KIND)
    xy = tl.dot(written, tl.trans(given), input_precision=PRECISION)
    rows_q = load_rows(q, q_t, rows, tokens, keys, N, BK, tl.float32)
    if READ_SCALED:
        rows_q *= tl.load(scalars + READ * plane + rows)[:, None]
    z, of_rows = pair_products(
        z, at_end, xy, rows_q, written_k, running, own, local, keys, False, LEVELS, N, BK, KIND, PRECISION
    )
    at_once = _diagonal(xy, local)[:, None] * rows_q
    if DELTA:
        f = load_rows(adjoint_entries, heads * P, rows, tokens, columns, P, BP, KIND)
        xf = tl.dot(written, tl.trans(f), input_precision=PRECISION)
        erased = rows_k * -tl.load(scalars + ERASE * plane + rows)[:, None]
        z, of_rows = pair_products(
            z, of_rows, xf, erased, rows_k, running, own, local, keys, False, LEVELS, N, BK, KIND, PRECISION
        )
        # d, what the erasing of each row read: S_{t-1} decayed, times f; db
        fx = tl.dot(f, tl.trans(written), input_precision=PRECISION)
        d = tl.dot(f, tl.trans(state), input_precision=PRECISION) * tl.exp2(own)
        d, of_erased = pair_products(
            d, d * erased, fx, rows_k, erased, running, own, local, keys, True, LEVELS, N, BK, KIND, PRECISION
        )
        of_rows = of_erased - of_rows
        tl.store(db, -tl.sum(d * rows_k, axis=1), mask=rows < tokens)
        z += at_once - d * tl.load(scalars + ERASE * plane + rows)[:, None]
        store_rows(dk, heads * N, rows, tokens, keys, N, BK, z)
        grad_v = f.to(tl.float32)
        if SOURCE_WANTED:
            values = load_rows(v, v_t, rows, tokens, columns, P, BP, tl.float32)
            tl.store(ds, tl.where(is_first, tl.sum(grad_v * values, axis=1), 0.0), mask=rows < tokens)
        if SCALED:
            grad_v *= tl.load(scalars + SOURCE * plane + rows)[:, None]
        if is_first:
            store_rows(dv, heads * P, rows, tokens, columns, P, BP, grad_v)
    else:
        of_rows = -of_rows
        z += at_once
        if SOURCE_WANTED:
            tl.store(ds, tl.sum(z * rows_k, axis=1), mask=rows < tokens)
        if SCALED:
            z *= tl.load(scalars + SOURCE * plane + rows)[:, None]
        store_rows(dk, heads * N, rows, tokens, keys, N, BK, z)
    return of_rows, of_end


@triton.jit
def _sum_after(x, local, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """[t]: the sum of the rows of x from t on."""
    after = tl.where(local[:, None] <= local[None, :], 1.0, 0.0).to(KIND)
    main = rounded(x, KIND, PRECISION)
    out = tl.dot(after, main, input_precision=PRECISION)
    if PRECISION == "tf32":  # sums whose terms cancel: what rounding left out
        out += tl.dot(after, (x - main.to(tl.float32)).to(KIND), input_precision=PRECISION)
    return out


@triton.jit
def _load_state(base, keys, columns, N: tl.constexpr, P: tl.constexpr, KIND: tl.constexpr):
    """A tile of a state [N, P]."""
    inside = (keys[:, None] < N) & (columns[None, :] < P)
    return tl.load(base + keys[:, None] * P + columns[None, :], mask=inside, other=0.0).to(KIND)


@triton.jit
def _diagonal(x, local):
    """The diagonal of x [L, L] as [L]."""
    return tl.sum(tl.where(local[:, None] == local[None, :], x, 0.0), axis=1)
