"""Gradients of one chunk from its first state S and the gradient G of its last one; all chunks in parallel.

With e the entries written (e = s v without the delta rule), and f = dL/de (EQUATIONS: f_t = G_tᵀ k_t):
    dq_i = c_i (prefix_i S dy_i + Σ_{j ≤ i} M_ij (dy_i·e_j) k_j)
    z_t  = G_t x_t, x = e (delta) or v
         = suffix_t G x_t + Σ_{i ≥ t} c_i M_it (dy_i·x_t) q_i - Σ_{i > t} b_i M_it (f_i·x_t) k_i
    d_t  = S_{t-1} decayed to t, times f_t = prefix_t S f_t + Σ_{j < t} M_tj (f_t·e_j) k_j
    dk = z - b d (delta) or s z;  db = -k·d;  ds = v·f;  dv = s f;  dc = q·dq / c
    dlog decay_t = Σ over every product of decays that contains row t: pairs i ≥ t > j, reads of S at i ≥ t, writes
    into the last state at j < t, and S carried through. Each such term is computed and summed, none is the difference
    of two larger ones, so decays near zero keep their digits.
NORMAL: with a normaliser. Its state is n, its input o_j takes the place of e_j, and dn_i is the gradient of its output
at row i. It adds dn_i o_j to every dy_i·e_j, dn_i n to S dy_i, and o_j times the adjoint of n to G x_j. Only the
programs of the first slice of P add these, since the normaliser has one column.
States kept in float16 (dsf.kernels.triton.chunk.states) are multiplied in it, with rows that become float16 for that.
Transposed score matrices are products of their own: no accumulator is transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.states import load_state, place_of_state, times_slices, times_state
from dsf.kernels.triton.chunk.tiles import (
    ERASE,
    READ,
    SOURCE,
    TINY,
    between,
    load_rows,
    load_terms,
    prefix_of,
    product,
    split,
    store_rows,
    suffix_of,
    total_of,
    turn,
    turned,
)
from dsf.kernels.triton.packed import place_of_chunk


@triton.jit(do_not_specialize=["base", "count", "first", "shift", "kept", "since", "held"])
def chunk_gradient(
    q, k, v, dy, g, scalars, entries, adjoint_entries, states, adjoints,
    dq, dk, dv, dg, ds, db, dc, ones, slopes, weight_states, weight_adjoints, d_ones, extra, d_skip, table,
    tokens, heads: tl.constexpr, length, plane, batches, base, count, first, shift, kept, since, held,
    q_b, q_t: tl.constexpr, q_h, q_group, k_b, k_t: tl.constexpr, k_h, k_group, v_b, v_t: tl.constexpr, v_h,
    v_group, g_b, g_t, g_h,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, L: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr,
    SOURCE_WANTED: tl.constexpr, READ_WANTED: tl.constexpr, ROLES: tl.constexpr, NORMAL: tl.constexpr,
    LOADS: tl.constexpr, SKIP: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    TERMS: tl.constexpr, STATE_TERMS: tl.constexpr, PAIR_TERMS: tl.constexpr, ADJOINT_TERMS: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk from `first` on: dv of a slice of P, and that slice's part of all the others.

    states [B, H, held, N, P] and entries [B, H, held, L, P] are those of chunks from `since` on, adjoints [B, H, count,
    N, P] and adjoint_entries [B, H, count, L, P] of chunks from `base` on.
    dv [B, T, H, P]; dq, dk [slices, B, kept, H, N] of `kept` tokens from `shift` on, and the scalars' [slices, B, T,
    H], to be summed over the slices. With two ROLES a chunk has two programs, one for what reads give and one for what
    writes give (dg [2 · slices, ...]): neighbours, so that the second finds its operands in the cache; in one program
    they would not fit in registers.
    TERMS: bfloat16 terms of e, ADJOINT_TERMS: of f; where these are fewer, the reverse walk made dv and ds, of f before
    it was rounded. PAIR_TERMS: of the products between rows as they meet the next ones.
    SKIP: the printed adjoint of what y has beside what is read, given what LOADS finds at `extra`: its part of dv, and
    that of an input without time, d_skip [slices, B, chunks, H].
    """
    role, chunk = tl.program_id(0) % ROLES, tl.program_id(0) // ROLES + first
    lane, piece = tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, head = lane // heads, lane % heads
    q += batch * q_b + head // q_group * q_h
    k += batch * k_b + head // k_group * k_h
    v += batch * v_b + head // v_group * v_h
    begin, end = place_of_chunk(table, chunk, tokens, L)
    behind = chunk * L - begin  # rows of slots less rows of tokens
    scalars += lane * length + behind
    flat = batch * tokens * heads + head
    part = flat + piece.to(tl.int64) * batches * tokens * heads
    at_row = (((piece.to(tl.int64) * batches + batch) * kept - shift) * heads + head) * N
    dq += at_row
    dk += at_row
    states = place_of_state(states, lane * held + chunk - since, N * P)
    adjoints = place_of_state(adjoints, lane * count + chunk - base, N * P)
    entries += (lane * held + chunk - since) * L * P * TERMS
    adjoint_entries += (lane * count + chunk - base) * L * P * ADJOINT_TERMS
    keys, columns, local = tl.arange(0, BN), piece * BP + tl.arange(0, BP), tl.arange(0, L)
    rows = begin + local
    EARLY: tl.constexpr = DELTA and not DECAY and ROLES == 2 and SKIP is None
    rows_k = load_rows(k, k_t, rows, end, keys, N, BN, KIND)
    rows_q, given = rows_k, rows_k
    if not EARLY:
        rows_q = load_rows(q, q_t, rows, end, keys, N, BN, KIND)
        given = load_rows(dy + flat * P, heads * P, rows, end, columns, P, BP, KIND)
    if DELTA:
        written = load_terms(entries, P * TERMS, local, end - begin, columns, P, BP, KIND, TERMS)
    else:
        value = load_rows(v, v_t, rows, end, columns, P, BP, KIND)
        written = value, value
    beside = (rows, rows, keys, keys)
    if NORMAL:
        at = (lane * (length // L) + chunk) * N
        beside = _beside(
            ones, slopes, weight_states + at, weight_adjoints + at, lane * tokens, rows, end, keys, piece,
            N, L, NORMAL,
        )  # fmt: skip
        d_ones += lane * tokens
    skip = (rows, d_skip)
    if SKIP is not None:
        at = (
            batch, head, lane * 0 + begin, local[:, None], 0, columns[None, :], (rows < end)[:, None],
            True, (columns < P)[None, :], piece, 0, tokens, heads, P, N,
        )  # fmt: skip
        d_skip += ((piece.to(tl.int64) * batches + batch) * (length // L) + chunk) * heads + head
        skip = (LOADS(extra, at), d_skip)
    if ROLES == 1:
        grad = _of_reads(
            rows_q, rows_k, given, written, scalars, adjoint_entries, states, adjoints,
            dq, dg, dc, begin, end, heads, plane, flat, part, keys, columns, local, beside,
            N, P, BN, BP, L, DECAY, DELTA, SCALED, READ_SCALED, READ_WANTED, NORMAL, KIND, PRECISION,
            TERMS, PAIR_TERMS, ADJOINT_TERMS,
        )  # fmt: skip
        grad += _of_writes(
            q, q_t, dy + flat * P, rows_q, rows_k, given, written, v, v_t, scalars, adjoint_entries, states, adjoints,
            dk, dv, dg, ds, db, d_ones, begin, end, heads, plane, flat, part, keys, columns, local, beside, skip,
            N, P, BN, BP, L, DECAY, DELTA, SCALED, READ_SCALED, SOURCE_WANTED, NORMAL, SKIP, KIND, PRECISION,
            TERMS, STATE_TERMS, PAIR_TERMS, ADJOINT_TERMS, False,
        )  # fmt: skip
    else:
        if role == 0:
            grad = _of_reads(
                load_rows(q, q_t, rows, end, keys, N, BN, KIND) if EARLY else rows_q, rows_k,
                load_rows(dy + flat * P, heads * P, rows, end, columns, P, BP, KIND) if EARLY else given,
                written, scalars, adjoint_entries, states, adjoints,
                dq, dg, dc, begin, end, heads, plane, flat, part, keys, columns, local, beside,
                N, P, BN, BP, L, DECAY, DELTA, SCALED, READ_SCALED, READ_WANTED, NORMAL, KIND, PRECISION,
                TERMS, PAIR_TERMS, ADJOINT_TERMS,
            )  # fmt: skip
        else:
            grad = _of_writes(
                q, q_t, dy + flat * P, rows_q, rows_k, given, written, v, v_t, scalars, adjoint_entries, states,
                adjoints,
                dk, dv, dg, ds, db, d_ones, begin, end, heads, plane, flat, part, keys, columns, local, beside, skip,
                N, P, BN, BP, L, DECAY, DELTA, SCALED, READ_SCALED, SOURCE_WANTED, NORMAL, SKIP, KIND, PRECISION,
                TERMS, STATE_TERMS, PAIR_TERMS, ADJOINT_TERMS, EARLY,
            )  # fmt: skip
    if DECAY:
        grad = decay_gradient(grad, g + batch * g_b + head * g_h + rows.to(tl.int64) * g_t, rows, end, DECAY)
        at = part + role.to(tl.int64) * tl.num_programs(2) * batches * tokens * heads + rows.to(tl.int64) * heads
        tl.store(dg + at, grad, mask=rows < end)


@triton.jit
def _of_reads(
    rows_q, rows_k, given, written, scalars, adjoint_entries, state_of, adjoint_of, dq, dg, dc,
    begin, end, heads, plane, flat, part, keys, columns, local, beside,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, L: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr,
    READ_WANTED: tl.constexpr, NORMAL: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    TERMS: tl.constexpr, PAIR_TERMS: tl.constexpr, ADJOINT_TERMS: tl.constexpr,
):  # fmt: skip
    """dq and dc. Returns dlog decay's sum over the products of decays that end in a read [L]."""
    rows, at = begin + local, part + (begin + local).to(tl.int64) * heads
    place = keys[:, None] * P + columns[None, :]
    inside = (keys[:, None] < N) & (columns[None, :] < P)
    grad = tl.zeros([L], tl.float32)
    drive, slope, weight, weight_adjoint = beside
    # beside both terms of pairs, or of e, shared memory has no room for the state, of two programs a processor
    LATER: tl.constexpr = PAIR_TERMS == 2 and (TERMS > ADJOINT_TERMS or not DELTA)
    if not LATER:
        state, carried = _carried(
            state_of, adjoint_of, place, inside, weight, weight_adjoint, scalars, plane, begin,
            N, P, DECAY, NORMAL, KIND,
        )  # fmt: skip
        grad += carried
    yx = product((given, given), turn(written), 1, TERMS, PRECISION)
    if NORMAL:
        yx += slope[:, None] * drive[None, :]
    yx = _weigh(yx, scalars, rows, local[:, None] >= local[None, :], False, DECAY)
    if SCALED and not DELTA:
        yx *= tl.load(scalars + SOURCE * plane + rows)[None, :]
    if DECAY:
        pairs = tl.dot(rows_q, tl.trans(rows_k), input_precision=PRECISION) * yx
        if READ_SCALED:
            pairs *= tl.load(scalars + READ * plane + rows)[:, None]
        if DELTA:
            f = load_terms(adjoint_entries, P * ADJOINT_TERMS, local, None, columns, P, BP, KIND, ADJOINT_TERMS)
            fx = product(f, turn(written), ADJOINT_TERMS, ADJOINT_TERMS, PRECISION)
            fx = _weigh(fx, scalars, rows, local[:, None] > local[None, :], False, DECAY)
            fx *= tl.load(scalars + ERASE * plane + rows)[:, None]
            pairs -= tl.dot(rows_k, tl.trans(rows_k), input_precision=PRECISION) * fx
        grad += spanning(pairs, local, False, KIND, PRECISION, PAIR_TERMS)
    if LATER:
        state, carried = _carried(
            state_of, adjoint_of, place, inside, weight, weight_adjoint, scalars, plane, begin,
            N, P, DECAY, NORMAL, KIND,
        )  # fmt: skip
        grad += carried
    grad_q = times_state((given, given), state, 1, PRECISION)
    if NORMAL:
        grad_q += slope[:, None] * weight[None, :]
    if DECAY:
        grad_q *= prefix_of(scalars, rows)[:, None]
        reads = tl.sum(grad_q * rows_q.to(tl.float32), axis=1)
        if READ_SCALED:
            reads *= tl.load(scalars + READ * plane + rows)
    grad_q = product(split(yx, PAIR_TERMS, KIND), (rows_k, rows_k), PAIR_TERMS, 1, PRECISION, grad_q)
    if READ_WANTED:
        of_read = tl.sum(grad_q * rows_q.to(tl.float32), axis=1)
        tl.store(dc + at, turned(of_read, scalars, plane, rows, DECAY), mask=rows < end)
    if READ_SCALED:
        grad_q *= tl.load(scalars + READ * plane + rows)[:, None]
    store_rows(dq, heads * N, rows, end, keys, N, BN, grad_q)
    if DECAY:
        grad += tl.sum(tl.where(local[:, None] <= local[None, :], reads[None, :], 0.0), axis=1)
    return grad


@triton.jit
def _carried(
    state_of, adjoint_of, place, inside, weight, weight_adjoint, scalars, plane, begin,
    N: tl.constexpr, P: tl.constexpr, DECAY: tl.constexpr, NORMAL: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """S, and what the gradients of all decays of the chunk have of S carried through it, the normaliser's added."""
    piece = tl.program_id(2)
    state, carried = load_state(state_of, place, inside, piece, N, P, KIND), 0.0
    if DECAY:
        adjoint, factor = load_state(adjoint_of, place, inside, piece, N, P, tl.float32)
        carried = state[0].to(tl.float32) * adjoint.to(tl.float32)
        if adjoint.dtype == tl.float16:
            carried = tl.sum(carried, axis=0, keep_dims=True) * state[1] * factor
        carried = tl.sum(carried)
        if NORMAL:
            carried += tl.sum(weight * weight_adjoint)
        carried *= total_of(scalars, plane, begin)
    return state, carried


@triton.jit
def _of_writes(
    q, q_t, dy, rows_q, rows_k, given, written, v, v_t, scalars, adjoint_entries, state_of, adjoint_of,
    dk, dv, dg, ds, db, d_ones, begin, end, heads, plane, flat, part, keys, columns, local, beside, skip,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, L: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr,
    SOURCE_WANTED: tl.constexpr, NORMAL: tl.constexpr, SKIP: tl.constexpr, KIND: tl.constexpr,
    PRECISION: tl.constexpr, TERMS: tl.constexpr, STATE_TERMS: tl.constexpr, PAIR_TERMS: tl.constexpr,
    ADJOINT_TERMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """dk, dv, ds, db, that of `ones` and d_skip.

    EARLY: all that f enters comes first, and q and dy are loaded here, after it: shared memory has no room for both.
    Returns dlog decay's sum over the products that end in the last state, or in an erasing [L].
    """
    rows, at = begin + local, part + (begin + local).to(tl.int64) * heads
    before = local[:, None] <= local[None, :]
    place = keys[:, None] * P + columns[None, :]
    inside = (keys[:, None] < N) & (columns[None, :] < P)
    grad = tl.zeros([L], tl.float32)
    WALKED: tl.constexpr = DELTA and TERMS > ADJOINT_TERMS  # f enters when e's second term has left shared memory
    if DELTA and not WALKED:
        f, state = _of_later(adjoint_entries, state_of, place, inside, local, columns, N, P, BP, KIND, ADJOINT_TERMS)
        if EARLY:
            grad_v = _of_values(
                f, v, v_t, scalars, ds + at, rows, end, columns, plane,
                P, BP, DECAY, SCALED, SOURCE_WANTED, ADJOINT_TERMS,
            )  # fmt: skip
            store_rows(dv + flat * P, heads * P, rows, end, columns, P, BP, grad_v)
            xf = _of_erasing(written, f, scalars, plane, rows, local, DECAY, PRECISION, STATE_TERMS)
        d, reads = _of_erased(
            f, written, rows_k, state, scalars, db + at, rows, end, plane, local, DECAY, KIND, PRECISION, STATE_TERMS
        )  # fmt: skip

    if EARLY:
        d = product(split(xf, STATE_TERMS, KIND), (rows_k, rows_k), STATE_TERMS, 1, PRECISION, d)
        rows_q = load_rows(q, q_t, rows, end, keys, N, BN, KIND)
        given = load_rows(dy, heads * P, rows, end, columns, P, BP, KIND)
    # z = G x, from the last state and from the reads of later rows; dk
    adjoint = load_state(adjoint_of, place, inside, tl.program_id(2), N, P, KIND)
    if DELTA and not DECAY:
        z = times_state(written, adjoint, TERMS, PRECISION, d)
    else:
        z = times_state(written, adjoint, TERMS, PRECISION)
    drive, slope, _, weight_adjoint = beside
    if NORMAL:
        z += drive[:, None] * weight_adjoint[None, :]
    if DECAY:
        z *= suffix_of(scalars, plane, rows)[:, None]
        writes = tl.sum(z * rows_k.to(tl.float32), axis=1)
        if SCALED and not DELTA:
            writes *= tl.load(scalars + SOURCE * plane + rows)
    turned_given = tl.trans(given)
    xy = product(written, (turned_given, turned_given), TERMS, 1, PRECISION)
    if NORMAL:
        xy += drive[:, None] * slope[None, :]
    xy = _weigh(xy, scalars, rows, before, True, DECAY)
    if READ_SCALED:
        xy *= tl.load(scalars + READ * plane + rows)[None, :]
    z = product(split(xy, PAIR_TERMS, KIND), (rows_q, rows_q), PAIR_TERMS, 1, PRECISION, z)
    if WALKED:
        f, state = _of_later(adjoint_entries, state_of, place, inside, local, columns, N, P, BP, KIND, ADJOINT_TERMS)
        d, reads = _of_erased(
            f, written, rows_k, state, scalars, db + at, rows, end, plane, local, DECAY, KIND, PRECISION, STATE_TERMS
        )  # fmt: skip
    if DELTA and not EARLY:
        xf = _of_erasing(written, f, scalars, plane, rows, local, DECAY, PRECISION, STATE_TERMS)
        z = product(split(xf, STATE_TERMS, KIND), (rows_k, rows_k), STATE_TERMS, 1, PRECISION, z)
        if DECAY:
            z += d
        if not WALKED:
            grad_v = _of_values(
                f, v, v_t, scalars, ds + at, rows, end, columns, plane,
                P, BP, DECAY, SCALED, SOURCE_WANTED, ADJOINT_TERMS,
            )  # fmt: skip
    elif not DELTA:
        if SOURCE_WANTED:
            of_source = tl.sum(z * rows_k.to(tl.float32), axis=1)
            tl.store(ds + at, turned(of_source, scalars, plane, rows, DECAY), mask=rows < end)
        if SCALED:
            z *= tl.load(scalars + SOURCE * plane + rows)[:, None]
        scores = tl.dot(rows_k, tl.trans(rows_q), input_precision=PRECISION)
        scores = _weigh(scores, scalars, rows, before, True, DECAY)
        grad_v = times_slices(rows_k, adjoint, PRECISION)
        if DECAY:
            grad_v *= suffix_of(scalars, plane, rows)[:, None]
        if READ_SCALED:
            scores *= tl.load(scalars + READ * plane + rows)[None, :]
        if NORMAL == 2:
            of_drive = tl.sum(rows_k.to(tl.float32) * weight_adjoint[None, :], axis=1)
            if DECAY:
                of_drive *= suffix_of(scalars, plane, rows)
            of_drive += tl.sum(scores * slope[None, :], axis=1)
            if SCALED:
                of_drive *= tl.load(scalars + SOURCE * plane + rows)
            tl.store(d_ones + rows, of_drive, mask=(rows < end) & (tl.program_id(2) == 0))
        grad_v = product(split(scores, PAIR_TERMS, KIND), (given, given), PAIR_TERMS, 1, PRECISION, grad_v)
        if SCALED:
            grad_v *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    store_rows(dk, heads * N, rows, end, keys, N, BN, z)
    if SKIP is not None:
        loaded, d_skip = skip
        of_value, of_skip = SKIP(loaded, given.to(tl.float32), written[0].to(tl.float32))
        if WALKED:
            grad_v = load_rows(dv + flat * P, heads * P, rows, end, columns, P, BP, tl.float32)
        grad_v += of_value
        tl.store(d_skip, tl.sum(tl.sum(of_skip, axis=1), axis=0))
    if not EARLY and not (WALKED and SKIP is None):
        store_rows(dv + flat * P, heads * P, rows, end, columns, P, BP, grad_v)

    if DECAY:  # last, when registers are free
        if DELTA:
            reads *= tl.load(scalars + ERASE * plane + rows)
            grad -= tl.sum(tl.where(before, reads[None, :], 0.0), axis=1)
        grad += tl.sum(tl.where(local[:, None] > local[None, :], writes[None, :], 0.0), axis=1)
    return grad


@triton.jit
def _of_later(
    adjoint_entries, state_of, place, inside, local, columns,
    N: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, KIND: tl.constexpr, ADJOINT_TERMS: tl.constexpr,
):  # fmt: skip
    """f, and S."""
    f = load_terms(adjoint_entries, P * ADJOINT_TERMS, local, None, columns, P, BP, KIND, ADJOINT_TERMS)
    return f, load_state(state_of, place, inside, tl.program_id(2), N, P, KIND)


@triton.jit
def _of_erased(
    f, written, rows_k, state, scalars, db, rows, end, plane, local,
    DECAY: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, STATE_TERMS: tl.constexpr,
):  # fmt: skip
    """-b d, d what the erasing of each row read: S_{t-1} decayed, times f; k·(S_0 f) decayed, of decays; stores db."""
    fx = product(f, turn(written), STATE_TERMS, STATE_TERMS, PRECISION)
    fx = _weigh(fx, scalars, rows, local[:, None] > local[None, :], False, DECAY)
    d, reads = times_state(f, state, STATE_TERMS, PRECISION), rows
    if DECAY:
        d *= prefix_of(scalars, rows)[:, None]
        reads = tl.sum(d * rows_k.to(tl.float32), axis=1)
    d = product(split(fx, STATE_TERMS, KIND), (rows_k, rows_k), STATE_TERMS, 1, PRECISION, d)
    tl.store(db, -tl.sum(d * rows_k.to(tl.float32), axis=1), mask=rows < end)
    return d * -tl.load(scalars + ERASE * plane + rows)[:, None], reads


@triton.jit
def _of_erasing(
    written, f, scalars, plane, rows, local,
    DECAY: tl.constexpr, PRECISION: tl.constexpr, STATE_TERMS: tl.constexpr,
):  # fmt: skip
    """-b_i M_it (f_i·x_t), of x_t down and i > t across [L, L]."""
    xf = product(written, turn(f), STATE_TERMS, STATE_TERMS, PRECISION)
    xf = _weigh(xf, scalars, rows, local[:, None] < local[None, :], True, DECAY)
    return xf * -tl.load(scalars + ERASE * plane + rows)[None, :]


@triton.jit
def _of_values(
    f, v, v_t, scalars, ds, rows, end, columns, plane,
    P: tl.constexpr, BP: tl.constexpr, DECAY: tl.constexpr, SCALED: tl.constexpr, SOURCE_WANTED: tl.constexpr,
    TERMS: tl.constexpr,
):  # fmt: skip
    """dv of a delta rule; stores ds."""
    grad_v = f[0].to(tl.float32)
    if TERMS == 2:
        grad_v += f[1].to(tl.float32)
    if SOURCE_WANTED:
        values = load_rows(v, v_t, rows, end, columns, P, BP, tl.float32)
        of_source = tl.sum(grad_v * values, axis=1)
        tl.store(ds, turned(of_source, scalars, plane, rows, DECAY), mask=rows < end)
    if SCALED:
        grad_v *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    return grad_v


@triton.jit
def _beside(
    ones, slopes, weight_states, weight_adjoints, lane, rows, end, keys, piece,
    N: tl.constexpr, L: tl.constexpr, NORMAL: tl.constexpr,
):  # fmt: skip
    """Of the normaliser: what drives it and the gradient of what is read of it [L], its first state and the gradient of
    its last one [N]; both gradients are 0 but for the first slice of P."""
    drive = tl.full([L], 1.0, tl.float32)
    if NORMAL == 2:
        drive = tl.load(ones + lane + rows, mask=rows < end, other=0.0)
    slope = tl.load(slopes + lane + rows, mask=(rows < end) & (piece == 0), other=0.0)
    weight = tl.load(weight_states + keys, mask=keys < N, other=0.0)
    weight_adjoint = tl.load(weight_adjoints + keys, mask=(keys < N) & (piece == 0), other=0.0)
    return drive, slope, weight, weight_adjoint


@triton.jit
def decay_gradient(grad, decays, rows, tokens, DECAY: tl.constexpr):
    """The gradient of what is given of a decay, from its logarithm's: itself, or at `decays` the decay (DECAY 2)."""
    if DECAY == 2:
        decay = tl.load(decays, mask=rows < tokens, other=1.0)
        grad /= tl.where(decay < 0, -1.0, 1.0) * tl.maximum(tl.abs(decay), TINY)
    return grad


@triton.jit
def spanning(pairs, local, transposed: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, TERMS: tl.constexpr):
    """[t]: the sum of pairs [i, j] (transposed: [j, i]) with i ≥ t > j, whose product of decays contains row t's."""
    later, upto = local[:, None] > local[None, :], local[:, None] <= local[None, :]
    if transposed:
        gathered = tl.where(later, 1.0, 0.0).to(KIND)  # [t, j]
        gathered = product((gathered, gathered), split(pairs, TERMS, KIND), 1, TERMS, PRECISION)
        return tl.sum(tl.where(upto, gathered, 0.0), axis=1)
    gathered = tl.where(upto, 1.0, 0.0).to(KIND)  # [t, i]
    pairs = split(tl.where(later, pairs, 0.0), TERMS, KIND)
    gathered = product((gathered, gathered), pairs, 1, TERMS, PRECISION)
    return tl.sum(tl.where(later, gathered, 0.0), axis=1)


@triton.jit
def _weigh(x, scalars, rows, seen, transposed: tl.constexpr, DECAY: tl.constexpr):
    """x times the decays between its rows and columns, 0 where not `seen`."""
    if DECAY:
        return x * between(scalars, rows, seen, transposed)
    return tl.where(seen, x, 0.0)
