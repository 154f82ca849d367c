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

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.states import load_state, place_of_state, times_slices, times_state
from dsf.kernels.triton.chunk.tiles import (
    ERASE,
    READ,
    SOURCE,
    TINY,
    Chunked,
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
    whole,
)
from dsf.kernels.triton.packed import place_of_chunk
from dsf.kernels.triton.structs import of_head


class Known(NamedTuple):
    """What is known of chunks: the prepared scalars; states [B, H, held, N, P] and entries [B, H, held, L, P] of chunks
    from `since` on, adjoints [B, H, count, N, P] and adjoint_entries [B, H, count, L, P] of chunks from `base` on."""

    scalars: Any
    entries: Any
    adjoint_entries: Any
    states: Any
    adjoints: Any


class Gradients(NamedTuple):
    """dv [B, T, H, P]; dq, dk [slices, B, kept, H, N] of `kept` tokens from `shift` on, and the scalars' [slices, B, T,
    H], None where they are not wanted, to be summed over the slices; with two ROLES dg is [2 · slices, ...]."""

    dq: Any
    dk: Any
    dv: Any
    dg: Any
    ds: Any
    db: Any
    dc: Any
    d_skip: Any


class NormalGradients(NamedTuple):
    """Of the normaliser: what drives it and the gradient of what is read of it [B, H, T], its states and their
    gradients between chunks; where the gradient of what drives it goes."""

    ones: Any = None
    slopes: Any = None
    states: Any = None
    adjoints: Any = None
    d_ones: Any = None


class Beside(NamedTuple):
    """A chunk of the normaliser: what drives it and the gradient of what is read of it [L], its first state and the
    gradient of its last one [N]; both gradients are 0 but for the first slice of P."""

    drive: Any
    slope: Any
    weight: Any
    weight_adjoint: Any


class Chunk(NamedTuple):
    """A program's chunk: its first token, its sequence's end, numbers [B, T, H] of its sequence's first row and (part)
    of that one's gradients; its rows, keys and channels."""

    begin: Any
    end: Any
    flat: Any
    part: Any
    rows: Any
    local: Any
    keys: Any
    columns: Any


class Place(NamedTuple):
    """Where a chunk's scalars' gradients lie, its entries in a state, and which of them there are."""

    scalars: Any
    state: Any
    inside: Any


class Loaded(NamedTuple):
    """q, k, dy and what is written, in terms, of a chunk's rows."""

    q: Any
    k: Any
    dy: Any
    written: Any


@dataclass(frozen=True, repr=False)
class Gradient(Chunked):
    """BP channels a program. TERMS: bfloat16 terms of e, ADJOINT_TERMS: of f; where these are fewer, the reverse walk
    made dv and ds, of f before it was rounded. PAIR_TERMS: of the products between rows as they meet the next ones.

    With two ROLES a chunk has two programs, one for what reads give and one for what writes give: neighbours, so that
    the second finds its operands in the cache; in one program they would not fit in registers.
    NORMAL: 0 none, 1 driven by 1, 2 by what `ones` holds. SKIP: the printed adjoint of what y has beside what is read,
    given what LOADS finds: its part of dv, and that of an input without time, d_skip [slices, B, chunks, H].
    """

    BP: int
    ROLES: int
    NORMAL: int
    LOADS: Any
    SKIP: Any
    TERMS: int
    STATE_TERMS: int
    PAIR_TERMS: int
    ADJOINT_TERMS: int


@triton.jit(do_not_specialize=["base", "count", "first", "shift", "kept", "since", "held"])
def chunk_gradient(
    q, k, v, dy, g, known, to, normal, extra, table, sizes, batches, base, count, first, shift, kept, since, held,
    C: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk from `first` on: dv of a slice of P, and that slice's part of all the others."""
    role, chunk = tl.program_id(0) % C.ROLES, tl.program_id(0) // C.ROLES + first
    lane, piece = tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, head = lane // sizes.heads, lane % sizes.heads
    q, k, v = of_head(q, batch, head), of_head(k, batch, head), of_head(v, batch, head)
    begin, end = place_of_chunk(table, chunk, sizes.tokens, C.L)
    flat = batch * sizes.tokens * sizes.heads + head
    part = flat + piece.to(tl.int64) * batches * sizes.tokens * sizes.heads
    at_row = (((piece.to(tl.int64) * batches + batch) * kept - shift) * sizes.heads + head) * C.N
    known = Known(
        known.scalars + (lane * sizes.length + (chunk * C.L - begin)),  # by rows of tokens, not of slots
        known.entries + (lane * held + chunk - since) * C.L * C.P * C.TERMS,
        known.adjoint_entries + (lane * count + chunk - base) * C.L * C.P * C.ADJOINT_TERMS,
        place_of_state(known.states, lane * held + chunk - since, C.N * C.P),
        place_of_state(known.adjoints, lane * count + chunk - base, C.N * C.P),
    )
    keys, columns, local = tl.arange(0, C.BN), piece * C.BP + tl.arange(0, C.BP), tl.arange(0, C.L)
    rows = begin + local
    here = Chunk(begin, end, flat, part, rows, local, keys, columns)
    EARLY: tl.constexpr = C.DELTA and not C.DECAY and C.ROLES == 2 and C.SKIP is None
    rows_k = load_rows(k.at, k.token, rows, end, keys, C.N, C.BN, C.KIND)
    rows_q, given = rows_k, rows_k
    if not EARLY:
        rows_q = load_rows(q.at, q.token, rows, end, keys, C.N, C.BN, C.KIND)
        given = _given(dy, here, sizes, C)
    if C.DELTA:
        written = load_terms(known.entries, C.P * C.TERMS, local, end - begin, columns, C.P, C.BP, C.KIND, C.TERMS)
    else:
        value = load_rows(v.at, v.token, rows, end, columns, C.P, C.BP, C.KIND)
        written = value, value
    beside = Beside(rows, rows, keys, keys)
    if C.NORMAL:
        beside = _beside(normal, lane * sizes.tokens, (lane * (sizes.length // C.L) + chunk) * C.N, piece, here, C)
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
        grad += _of_writes(
            q, v, dy, x, known, to, at_row, normal, d_ones, beside, skip, of_skip, here, sizes, False, C
        )  # fmt: skip
    else:
        if role == 0:
            if EARLY:
                rows_q = load_rows(q.at, q.token, rows, end, keys, C.N, C.BN, C.KIND)
                given = _given(dy, here, sizes, C)
            grad = _of_reads(Loaded(rows_q, rows_k, given, written), known, to, at_row, beside, here, sizes, C)
        else:
            x = Loaded(rows_q, rows_k, given, written)
            grad = _of_writes(
                q, v, dy, x, known, to, at_row, normal, d_ones, beside, skip, of_skip, here, sizes, EARLY, C
            )  # fmt: skip
    if C.DECAY:
        decays = g.at + batch * g.batch + head * g.head + rows.to(tl.int64) * g.token
        grad = decay_gradient(grad, decays, rows, end, C.DECAY)
        part += role.to(tl.int64) * tl.num_programs(2) * batches * sizes.tokens * sizes.heads
        at = part + rows.to(tl.int64) * sizes.heads
        tl.store(to.dg + at, grad, mask=rows < end)


@triton.jit
def _given(dy, here, sizes, C: tl.constexpr):
    """dy of a chunk [L, BP]."""
    at = dy + here.flat * C.P
    return load_rows(at, sizes.heads * C.P, here.rows, here.end, here.columns, C.P, C.BP, C.KIND)


@triton.jit
def _place(scalars, here, C: tl.constexpr):
    """The Place of a chunk. scalars: where their gradients lie."""
    state = here.keys[:, None] * C.P + here.columns[None, :]
    return Place(scalars, state, (here.keys[:, None] < C.N) & (here.columns[None, :] < C.P))


@triton.jit
def _of_reads(x, known, to, at_row, beside, here, sizes, C: tl.constexpr):
    """dq and dc. Returns dlog decay's sum over the products of decays that end in a read [L]."""
    scalars, rows, local = known.scalars, here.rows, here.local
    place = _place(here.part + rows.to(tl.int64) * sizes.heads, here, C)
    grad = tl.zeros([C.L], tl.float32)
    # beside both terms of pairs, or of e, shared memory has no room for the state, of two programs a processor
    LATER: tl.constexpr = C.PAIR_TERMS == 2 and (C.TERMS > C.ADJOINT_TERMS or not C.DELTA)
    if not LATER:
        state, carried = _carried(known, beside, place, here, sizes, C)
        grad += carried
    yx = product((x.dy, x.dy), turn(x.written), 1, C.TERMS, C.PRECISION)
    if C.NORMAL:
        yx += beside.slope[:, None] * beside.drive[None, :]
    yx = _weigh(yx, scalars, rows, local[:, None] >= local[None, :], False, C.DECAY)
    if C.SCALED and not C.DELTA:
        yx *= tl.load(scalars + SOURCE * sizes.plane + rows)[None, :]
    if C.DECAY:
        pairs = tl.dot(x.q, tl.trans(x.k), input_precision=C.PRECISION) * yx
        if C.READ_SCALED:
            pairs *= tl.load(scalars + READ * sizes.plane + rows)[:, None]
        if C.DELTA:
            f = _entry_gradients(known, here, C)
            fx = product(f, turn(x.written), C.ADJOINT_TERMS, C.ADJOINT_TERMS, C.PRECISION)
            fx = _weigh(fx, scalars, rows, local[:, None] > local[None, :], False, C.DECAY)
            fx *= tl.load(scalars + ERASE * sizes.plane + rows)[:, None]
            pairs -= tl.dot(x.k, tl.trans(x.k), input_precision=C.PRECISION) * fx
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
    """S, and what the gradients of all decays of the chunk have of S carried through it, the normaliser's added."""
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
def _of_writes(
    q, v, dy, x, known, to, at_row, normal, d_ones, beside, skip, of_skip, here, sizes, EARLY: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """dk, dv, ds, db, that of `ones` and d_skip.

    EARLY: all that f enters comes first, and q and dy are loaded here, after it: shared memory has no room for both.
    Returns dlog decay's sum over the products that end in the last state, or in an erasing [L].
    """
    scalars, rows, local, rows_q, given = known.scalars, here.rows, here.local, x.q, x.dy
    at = here.part + rows.to(tl.int64) * sizes.heads
    before = local[:, None] <= local[None, :]
    place = _place(at, here, C)
    dv, wide = to.dv + here.flat * C.P, sizes.heads * C.P
    grad = tl.zeros([C.L], tl.float32)
    WALKED: tl.constexpr = C.DELTA and C.TERMS > C.ADJOINT_TERMS  # f enters when e's second term left shared memory
    if C.DELTA and not WALKED:
        f, state = _later(known, place, here, C)
        if EARLY:
            grad_v = _of_values(f, v, to, known, place, here, sizes, C)
            store_rows(dv, wide, rows, here.end, here.columns, C.P, C.BP, grad_v)
            xf = _of_erasing(x.written, f, known, here, sizes, C)
        d, reads = _of_erased(f, x, state, known, to, place, here, sizes, C)
    if EARLY:
        d = product(split(xf, C.STATE_TERMS, C.KIND), (x.k, x.k), C.STATE_TERMS, 1, C.PRECISION, d)
        rows_q = load_rows(q.at, q.token, rows, here.end, here.keys, C.N, C.BN, C.KIND)
        given = _given(dy, here, sizes, C)
    # z = G x, from the last state and from the reads of later rows; dk
    adjoint = load_state(known.adjoints, place.state, place.inside, tl.program_id(2), C.N, C.P, C.KIND)
    if C.DELTA and not C.DECAY:
        z = times_state(x.written, adjoint, C.TERMS, C.PRECISION, d)
    else:
        z = times_state(x.written, adjoint, C.TERMS, C.PRECISION)
    if C.NORMAL:
        z += beside.drive[:, None] * beside.weight_adjoint[None, :]
    if C.DECAY:
        z *= suffix_of(scalars, sizes.plane, rows)[:, None]
        writes = tl.sum(z * x.k.to(tl.float32), axis=1)
        if C.SCALED and not C.DELTA:
            writes *= tl.load(scalars + SOURCE * sizes.plane + rows)
    turned_given = tl.trans(given)
    xy = product(x.written, (turned_given, turned_given), C.TERMS, 1, C.PRECISION)
    if C.NORMAL:
        xy += beside.drive[:, None] * beside.slope[None, :]
    xy = _weigh(xy, scalars, rows, before, True, C.DECAY)
    if C.READ_SCALED:
        xy *= tl.load(scalars + READ * sizes.plane + rows)[None, :]
    z = product(split(xy, C.PAIR_TERMS, C.KIND), (rows_q, rows_q), C.PAIR_TERMS, 1, C.PRECISION, z)
    if WALKED:
        f, state = _later(known, place, here, C)
        d, reads = _of_erased(f, x, state, known, to, place, here, sizes, C)
    if C.DELTA and not EARLY:
        xf = _of_erasing(x.written, f, known, here, sizes, C)
        z = product(split(xf, C.STATE_TERMS, C.KIND), (x.k, x.k), C.STATE_TERMS, 1, C.PRECISION, z)
        if C.DECAY:
            z += d
        if not WALKED:
            grad_v = _of_values(f, v, to, known, place, here, sizes, C)
    elif not C.DELTA:
        if to.ds is not None:
            of_source = tl.sum(z * x.k.to(tl.float32), axis=1)
            tl.store(to.ds + at, turned(of_source, scalars, sizes.plane, rows, C.DECAY), mask=rows < here.end)
        if C.SCALED:
            z *= tl.load(scalars + SOURCE * sizes.plane + rows)[:, None]
        grad_v = _of_read_values(rows_q, given, x.k, adjoint, normal, d_ones, beside, known, here, sizes, C)
    store_rows(to.dk + at_row, sizes.heads * C.N, rows, here.end, here.keys, C.N, C.BN, z)
    if C.SKIP is not None:
        of_value, of_skip_rows = C.SKIP(skip, given.to(tl.float32), x.written[0].to(tl.float32))
        if WALKED:
            grad_v = load_rows(dv, wide, rows, here.end, here.columns, C.P, C.BP, tl.float32)
        grad_v += of_value
        tl.store(to.d_skip + of_skip, tl.sum(tl.sum(of_skip_rows, axis=1), axis=0))
    if not EARLY and not (WALKED and C.SKIP is None):
        store_rows(dv, wide, rows, here.end, here.columns, C.P, C.BP, grad_v)

    if C.DECAY:  # last, when registers are free
        if C.DELTA:
            reads *= tl.load(scalars + ERASE * sizes.plane + rows)
            grad -= tl.sum(tl.where(before, reads[None, :], 0.0), axis=1)
        grad += tl.sum(tl.where(local[:, None] > local[None, :], writes[None, :], 0.0), axis=1)
    return grad


@triton.jit
def _entry_gradients(known, here, C: tl.constexpr):
    """f, in terms."""
    wide = C.P * C.ADJOINT_TERMS
    return load_terms(
        known.adjoint_entries, wide, here.local, None, here.columns, C.P, C.BP, C.KIND, C.ADJOINT_TERMS
    )  # fmt: skip


@triton.jit
def _later(known, place, here, C: tl.constexpr):
    """f, and S."""
    f = _entry_gradients(known, here, C)
    return f, load_state(known.states, place.state, place.inside, tl.program_id(2), C.N, C.P, C.KIND)


@triton.jit
def _of_erased(f, x, state, known, to, place, here, sizes, C: tl.constexpr):
    """-b d, d what the erasing of each row read: S_{t-1} decayed, times f; k·(S_0 f) decayed, of decays; stores db."""
    scalars, rows, local = known.scalars, here.rows, here.local
    db = to.db + place.scalars
    fx = product(f, turn(x.written), C.STATE_TERMS, C.STATE_TERMS, C.PRECISION)
    fx = _weigh(fx, scalars, rows, local[:, None] > local[None, :], False, C.DECAY)
    d, reads = times_state(f, state, C.STATE_TERMS, C.PRECISION), rows
    if C.DECAY:
        d *= prefix_of(scalars, rows)[:, None]
        reads = tl.sum(d * x.k.to(tl.float32), axis=1)
    d = product(split(fx, C.STATE_TERMS, C.KIND), (x.k, x.k), C.STATE_TERMS, 1, C.PRECISION, d)
    tl.store(db, -tl.sum(d * x.k.to(tl.float32), axis=1), mask=rows < here.end)
    return d * -tl.load(scalars + ERASE * sizes.plane + rows)[:, None], reads


@triton.jit
def _of_erasing(written, f, known, here, sizes, C: tl.constexpr):
    """-b_i M_it (f_i·x_t), of x_t down and i > t across [L, L]."""
    xf = product(written, turn(f), C.STATE_TERMS, C.STATE_TERMS, C.PRECISION)
    xf = _weigh(xf, known.scalars, here.rows, here.local[:, None] < here.local[None, :], True, C.DECAY)
    return xf * -tl.load(known.scalars + ERASE * sizes.plane + here.rows)[None, :]


@triton.jit
def _of_values(f, v, to, known, place, here, sizes, C: tl.constexpr):
    """dv of a delta rule; stores ds."""
    if to.ds is not None:
        ds = to.ds + place.scalars
    grad_v = whole(f, C.ADJOINT_TERMS)
    if to.ds is not None:
        values = load_rows(v.at, v.token, here.rows, here.end, here.columns, C.P, C.BP, tl.float32)
        of_source = turned(tl.sum(grad_v * values, axis=1), known.scalars, sizes.plane, here.rows, C.DECAY)
        tl.store(ds, of_source, mask=here.rows < here.end)
    if C.SCALED:
        grad_v *= tl.load(known.scalars + SOURCE * sizes.plane + here.rows)[:, None]
    return grad_v


@triton.jit
def _of_read_values(rows_q, given, rows_k, adjoint, normal, d_ones, beside, known, here, sizes, C: tl.constexpr):
    """dv without a delta rule; stores the gradient of what drives the normaliser."""
    scalars, rows = known.scalars, here.rows
    scores = tl.dot(rows_k, tl.trans(rows_q), input_precision=C.PRECISION)
    scores = _weigh(scores, scalars, rows, here.local[:, None] <= here.local[None, :], True, C.DECAY)
    grad_v = times_slices(rows_k, adjoint, C.PRECISION)
    if C.DECAY:
        grad_v *= suffix_of(scalars, sizes.plane, rows)[:, None]
    if C.READ_SCALED:
        scores *= tl.load(scalars + READ * sizes.plane + rows)[None, :]
    if C.NORMAL == 2:
        of_drive = tl.sum(rows_k.to(tl.float32) * beside.weight_adjoint[None, :], axis=1)
        if C.DECAY:
            of_drive *= suffix_of(scalars, sizes.plane, rows)
        of_drive += tl.sum(scores * beside.slope[None, :], axis=1)
        if C.SCALED:
            of_drive *= tl.load(scalars + SOURCE * sizes.plane + rows)
        tl.store(normal.d_ones + d_ones + rows, of_drive, mask=(rows < here.end) & (tl.program_id(2) == 0))
    grad_v = product(split(scores, C.PAIR_TERMS, C.KIND), (given, given), C.PAIR_TERMS, 1, C.PRECISION, grad_v)
    if C.SCALED:
        grad_v *= tl.load(scalars + SOURCE * sizes.plane + rows)[:, None]
    return grad_v


@triton.jit
def _beside(normal, lane, at, piece, here, C: tl.constexpr):
    """A chunk of the normaliser. lane, at: where its head begins, and the chunk's states."""
    drive, keys = tl.full([C.L], 1.0, tl.float32), here.keys
    if C.NORMAL == 2:
        drive = tl.load(normal.ones + lane + here.rows, mask=here.rows < here.end, other=0.0)
    slope = tl.load(normal.slopes + lane + here.rows, mask=(here.rows < here.end) & (piece == 0), other=0.0)
    weight = tl.load(normal.states + at + keys, mask=keys < C.N, other=0.0)
    weight_adjoint = tl.load(normal.adjoints + at + keys, mask=(keys < C.N) & (piece == 0), other=0.0)
    return Beside(drive, slope, weight, weight_adjoint)


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
