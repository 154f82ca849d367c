"""Gradients of one chunk from its first state S and the gradient G of its last one; all chunks in parallel.

With e the new values (v_new; e = s v without the delta rule) and f = dL/de (EQUATIONS: f_t = G_tᵀ k_t):
    dq_i = c_i (prefix_i S dy_i + Σ_{j ≤ i} M_ij (dy_i·e_j) k_j)
    z_t  = G_t x_t, x = e (delta) or v
         = suffix_t G x_t + Σ_{i ≥ t} c_i M_it (dy_i·x_t) q_i - Σ_{i > t} b_i M_it (f_i·x_t) k_i
    d_t  = S_{t-1} decayed to t, times f_t = prefix_t S f_t + Σ_{j < t} M_tj (f_t·e_j) k_j
    dk = z - b d (delta) or s z;  db = -k·d;  ds = v·f;  dv = s f;  dc = q·dq / c
    dlog decay_t = Σ over every product of decays that contains row t: pairs i ≥ t > j, reads of S at i ≥ t, writes
    into the last state at j < t, and S carried through. Each such term is computed and summed, none is the difference
    of two larger ones, so decays near zero keep their digits. UNDECAYED: of erasures only those at i > t.
NORMAL: with a normaliser. Its state is n, its input o_j takes the place of e_j, and dn_i is the gradient of its output
at row i. It adds dn_i o_j to every dy_i·e_j, dn_i n to S dy_i, and o_j times the adjoint of n to G x_j. Only the
programs of the first slice of P add these, since the normaliser has one column.
States kept in float16 (dsf.kernels.triton.chunk.states) are multiplied in it, with rows that become float16 for that.
Transposed score matrices are products of their own: no accumulator is transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.gradient_parts import (
    Beside,
    Chunk,
    Known,
    Loaded,
    decay_gradient,
    entry_gradients,
    load_given,
    place_of,
    spanning,
    weigh,
)
from dsf.kernels.triton.chunk.scalars import ERASE, READ, prefix_of, strength_seen, total_of, turned
from dsf.kernels.triton.chunk.states import load_state, place_of_state, times_state
from dsf.kernels.triton.chunk.tiles import (
    load_rows,
    load_terms,
    product,
    seen_by,
    split,
    store_rows,
    turn,
)
from dsf.kernels.triton.chunk.write_gradient import of_writes
from dsf.kernels.triton.packed import place_of_chunk, slot_to_read
from dsf.kernels.triton.structs import of_head


@triton.jit(do_not_specialize=["base", "count", "first", "shift", "kept", "since", "held"])
def chunk_gradient(
    q, k, v, dy, g, known, to, normal, extra, table, sizes, batches, base, count, first, shift, kept, since, held,
    C: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk, from `first` on: dv of a slice of P, and that slice's part of all other gradients."""
    role, chunk = tl.program_id(0) % C.ROLES, tl.program_id(0) // C.ROLES + first
    lane, piece = tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, head = lane // sizes.heads, lane % sizes.heads
    q, k, v = of_head(q, batch, head), of_head(k, batch, head), of_head(v, batch, head)
    begin, end = place_of_chunk(table, chunk, sizes.tokens, C.L)
    flat = batch * sizes.tokens * sizes.heads + head
    part = flat + piece.to(tl.int64) * batches * sizes.tokens * sizes.heads
    at_row = (((piece.to(tl.int64) * batches + batch) * kept - shift) * sizes.heads + head) * C.N
    slot = slot_to_read(table, chunk, begin, end, first)
    known = Known(
        known.scalars + (lane * sizes.length + (chunk * C.L - begin)),  # indexed by rows of tokens, not of slots
        known.entries + (lane * held + slot - since) * C.L * C.P * C.TERMS,
        known.adjoint_entries + (lane * count + slot - base) * C.L * C.P * C.ADJOINT_TERMS,
        place_of_state(known.states, lane * held + slot - since, C.N * C.P),
        place_of_state(known.adjoints, lane * count + slot - base, C.N * C.P),
    )
    keys, columns, local = tl.arange(0, C.BN), piece * C.BP + tl.arange(0, C.BP), tl.arange(0, C.L)
    rows = begin + local
    here = Chunk(begin, end, flat, part, rows, local, keys, columns)
    EARLY: tl.constexpr = C.DELTA and not C.DECAY and C.ROLES == 2 and C.SKIP is None
    rows_k = load_rows(k.at, k.token, rows, end, keys, C.N, C.BN, C.KIND)
    rows_q, given = rows_k, rows_k
    if not EARLY:
        rows_q = load_rows(q.at, q.token, rows, end, keys, C.N, C.BN, C.KIND)
        given = load_given(dy, here, sizes, C)
    if C.DELTA:
        written = load_terms(known.entries, C.P * C.TERMS, local, end - begin, columns, C.P, C.BP, C.KIND, C.TERMS)
    else:
        value = load_rows(v.at, v.token, rows, end, columns, C.P, C.BP, C.KIND)
        written = value, value
    beside = Beside(rows, rows, keys, keys)
    if C.NORMAL:
        beside = _beside(normal, lane * sizes.tokens, (lane * (sizes.length // C.L) + slot) * C.N, piece, here, C)
    skip = rows
    if C.SKIP is not None:
        at = (
            batch, head, lane * 0 + begin, local[:, None], 0, columns[None, :], (rows < end)[:, None],
            True, (columns < C.P)[None, :], piece, 0, sizes.tokens, sizes.heads, C.P, C.N,
        )  # fmt: skip
        skip = C.LOADS(extra, at)
    of_skip = ((piece.to(tl.int64) * batches + batch) * (sizes.length // C.L) + chunk) * sizes.heads + head
    d_ones = lane * sizes.tokens
    if C.ROLES == 1:
        x = Loaded(rows_q, rows_k, given, written)
        grad = _of_reads(x, known, to, at_row, beside, here, sizes, C)
        grad += of_writes(
            q, v, dy, x, known, to, at_row, normal, d_ones, beside, skip, of_skip, here, sizes, False, C
        )  # fmt: skip
    else:
        if role == 0:
            if EARLY:  # both names had rows of keys
                read = load_rows(q.at, q.token, rows, end, keys, C.N, C.BN, C.KIND)
                entered = Loaded(read, rows_k, load_given(dy, here, sizes, C), written)
                grad = _of_reads(entered, known, to, at_row, beside, here, sizes, C)
            else:
                grad = _of_reads(Loaded(rows_q, rows_k, given, written), known, to, at_row, beside, here, sizes, C)
        else:
            x = Loaded(rows_q, rows_k, given, written)
            grad = of_writes(
                q, v, dy, x, known, to, at_row, normal, d_ones, beside, skip, of_skip, here, sizes, EARLY, C
            )  # fmt: skip
    if C.DECAY:
        decays = g.at + batch * g.batch + head * g.head + rows.to(tl.int64) * g.token
        grad = decay_gradient(grad, decays, rows, end, C.DECAY)
        part += role.to(tl.int64) * tl.num_programs(2) * batches * sizes.tokens * sizes.heads
        at = part + rows.to(tl.int64) * sizes.heads
        tl.store(to.dg + at, grad, mask=rows < end)


@triton.jit
def _of_reads(x, known, to, at_row, beside, here, sizes, C: tl.constexpr):
    """dq and dc. Returns the part of dlog decay from products of decays that end in a read [L]."""
    scalars, rows, local = known.scalars, here.rows, here.local
    place = place_of(here.part + rows.to(tl.int64) * sizes.heads, here, C)
    grad = tl.zeros([C.L], tl.float32)
    # with both terms of pairs or of e, shared memory does not suffice for the state and two programs a processor
    LATER: tl.constexpr = C.PAIR_TERMS == 2 and (C.TERMS > C.ADJOINT_TERMS or not C.DELTA)
    if not LATER:
        state, carried = _carried(known, beside, place, here, sizes, C)
        grad += carried
    yx = product((x.dy, x.dy), turn(x.written), 1, C.TERMS, C.PRECISION)
    if C.NORMAL:
        yx += beside.slope[:, None] * beside.drive[None, :]
    yx = weigh(yx, scalars, sizes.plane, rows, seen_by(local, False, C.TOGETHER), False, C)
    if C.SCALED and not C.DELTA:
        yx *= strength_seen(scalars, sizes.plane, rows, local, False, C)
    if C.DECAY:
        pairs = tl.dot(x.q, tl.trans(x.k), input_precision=C.PRECISION) * yx
        if C.READ_SCALED:
            pairs *= tl.load(scalars + READ * sizes.plane + rows)[:, None]
        if C.DELTA:
            f = entry_gradients(known, here, C)
            fx = product(f, turn(x.written), C.ADJOINT_TERMS, C.ADJOINT_TERMS, C.PRECISION)
            fx = weigh(fx, scalars, sizes.plane, rows, local[:, None] > local[None, :], False, C)
            fx *= tl.load(scalars + ERASE * sizes.plane + rows)[:, None]
            of_erasing = tl.dot(x.k, tl.trans(x.k), input_precision=C.PRECISION) * fx
            if C.UNDECAYED:
                grad -= spanning(of_erasing, local, False, C.KIND, C.PRECISION, C.PAIR_TERMS, C.GROUP)
            else:
                pairs -= of_erasing
        grad += spanning(pairs, local, False, C.KIND, C.PRECISION, C.PAIR_TERMS)
    if LATER:
        state, carried = _carried(known, beside, place, here, sizes, C)
        grad += carried
    grad_q = times_state((x.dy, x.dy), state, 1, C.PRECISION)
    if C.NORMAL:
        grad_q += beside.slope[:, None] * beside.weight[None, :]
    if C.DECAY:
        grad_q *= prefix_of(scalars, rows)[:, None]
        reads = tl.sum(grad_q * x.q.to(tl.float32), axis=1)
        if C.READ_SCALED:
            reads *= tl.load(scalars + READ * sizes.plane + rows)
    grad_q = product(split(yx, C.PAIR_TERMS, C.KIND), (x.k, x.k), C.PAIR_TERMS, 1, C.PRECISION, grad_q)
    if to.dc is not None:
        of_read = tl.sum(grad_q * x.q.to(tl.float32), axis=1)
        tl.store(to.dc + place.scalars, turned(of_read, scalars, sizes.plane, rows, C.DECAY), mask=rows < here.end)
    if C.READ_SCALED:
        grad_q *= tl.load(scalars + READ * sizes.plane + rows)[:, None]
    store_rows(to.dq + at_row, sizes.heads * C.N, rows, here.end, here.keys, C.N, C.BN, grad_q)
    if C.DECAY:
        grad += tl.sum(tl.where(local[:, None] <= local[None, :], reads[None, :], 0.0), axis=1)
    return grad


@triton.jit
def _carried(known, beside, place, here, sizes, C: tl.constexpr):
    """S, and the part of every decay's gradient from the state carried through the chunk, normaliser included."""
    piece = tl.program_id(2)
    state, carried = load_state(known.states, place.state, place.inside, piece, C.N, C.P, C.KIND), 0.0
    if C.DECAY:
        adjoint, factor = load_state(known.adjoints, place.state, place.inside, piece, C.N, C.P, tl.float32)
        carried = state[0].to(tl.float32) * adjoint.to(tl.float32)
        if adjoint.dtype == tl.float16:
            carried = tl.sum(carried, axis=0, keep_dims=True) * state[1] * factor
        carried = tl.sum(carried)
        if C.NORMAL:
            carried += tl.sum(beside.weight * beside.weight_adjoint)
        carried *= total_of(known.scalars, sizes.plane, here.begin)
    return state, carried


@triton.jit
def _beside(normal, lane, at, piece, here, C: tl.constexpr):
    """The normaliser in a chunk. lane, at: offsets of its head, and of the chunk's states."""
    drive, keys = tl.full([C.L], 1.0, tl.float32), here.keys
    if C.NORMAL == 2:
        drive = tl.load(normal.ones + lane + here.rows, mask=here.rows < here.end, other=0.0)
    slope = tl.load(normal.slopes + lane + here.rows, mask=(here.rows < here.end) & (piece == 0), other=0.0)
    weight = tl.load(normal.states + at + keys, mask=keys < C.N, other=0.0)
    weight_adjoint = tl.load(normal.adjoints + at + keys, mask=(keys < C.N) & (piece == 0), other=0.0)
    return Beside(drive, slope, weight, weight_adjoint)
