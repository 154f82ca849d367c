"""Gradients of a chunk's writes: of keys, values, write strengths and erasures (notation: gradient.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.gradient_parts import (
    entry_gradients,
    load_given,
    place_of,
    weigh,
)
from dsf.kernels.triton.chunk.scalars import (
    ERASE,
    FRESH_SOURCE,
    READ,
    SOURCE,
    prefix_of,
    strength_seen,
    suffix_of,
    turned,
)
from dsf.kernels.triton.chunk.states import load_state, times_slices, times_state
from dsf.kernels.triton.chunk.tiles import (
    is_later,
    load_rows,
    of_one_token,
    product,
    seen_by,
    split,
    store_rows,
    turn,
    whole,
)


@triton.jit
def of_writes(
    q, v, dy, x, known, to, at_row, normal, d_ones, beside, skip, of_skip, here, sizes, EARLY: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Store dk, dv, ds, db, the gradient of `ones` and d_skip.

    EARLY: the products with f come first, and q and dy are loaded after them, since shared memory does not hold all of
    these. Returns dlog decay's sum [L] over the products of decays that end in the chunk's last state or in an erasure.
    """
    scalars, rows, local, rows_q, given = known.scalars, here.rows, here.local, x.q, x.dy
    at = here.part + rows.to(tl.int64) * sizes.heads
    before = seen_by(local, True, C.TOGETHER)
    place = place_of(at, here, C)
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
        given = load_given(dy, here, sizes, C)
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
    xy = weigh(xy, scalars, sizes.plane, rows, before, True, C)
    if C.READ_SCALED:
        xy *= tl.load(scalars + READ * sizes.plane + rows)[None, :]
    if C.FRESH:
        same = of_one_token(local, C.TOGETHER)
        own, xy = tl.where(same, xy, 0.0), tl.where(same, 0.0, xy)
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
        if C.FRESH:
            own = product(split(own, C.PAIR_TERMS, C.KIND), (rows_q, rows_q), C.PAIR_TERMS, 1, C.PRECISION)
            tl.store(to.db + at, tl.sum(own * x.k.to(tl.float32), axis=1), mask=rows < here.end)
            z += own * tl.load(scalars + FRESH_SOURCE * sizes.plane + rows)[:, None]
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
            if C.UNDECAYED:
                before = is_later(local[None, :], local[:, None], C.GROUP)
            grad -= tl.sum(tl.where(before, reads[None, :], 0.0), axis=1)
        grad += tl.sum(tl.where(local[:, None] > local[None, :], writes[None, :], 0.0), axis=1)
    return grad


@triton.jit
def _later(known, place, here, C: tl.constexpr):
    """f, and the chunk's first state S."""
    f = entry_gradients(known, here, C)
    return f, load_state(known.states, place.state, place.inside, tl.program_id(2), C.N, C.P, C.KIND)


@triton.jit
def _of_erased(f, x, state, known, to, place, here, sizes, C: tl.constexpr):
    """-b d, with d_t = S_{t-1} f_t after its decay (the part of dk that comes from erasing), and with decays the
    part k·(prefix S f) [L] that comes from the chunk's first state; stores db."""
    scalars, rows, local = known.scalars, here.rows, here.local
    db = to.db + place.scalars
    fx = product(f, turn(x.written), C.STATE_TERMS, C.STATE_TERMS, C.PRECISION)
    fx = weigh(fx, scalars, sizes.plane, rows, is_later(local[:, None], local[None, :], C.GROUP), False, C)
    d, reads = times_state(f, state, C.STATE_TERMS, C.PRECISION), rows
    if C.DECAY:
        d *= prefix_of(scalars, rows)[:, None]
        reads = tl.sum(d * x.k.to(tl.float32), axis=1)
    d = product(split(fx, C.STATE_TERMS, C.KIND), (x.k, x.k), C.STATE_TERMS, 1, C.PRECISION, d)
    tl.store(db, -tl.sum(d * x.k.to(tl.float32), axis=1), mask=rows < here.end)
    return d * -tl.load(scalars + ERASE * sizes.plane + rows)[:, None], reads


@triton.jit
def _of_erasing(written, f, known, here, sizes, C: tl.constexpr):
    """The weights -b_i M_it (f_i·x_t) of later rows' erasures [t, i], zero unless i > t."""
    xf = product(written, turn(f), C.STATE_TERMS, C.STATE_TERMS, C.PRECISION)
    if C.GROUP > 1:
        earlier = is_later(here.local[None, :], here.local[:, None], C.GROUP)
    else:
        earlier = here.local[:, None] < here.local[None, :]
    xf = weigh(xf, known.scalars, sizes.plane, here.rows, earlier, True, C)
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
    scores = weigh(scores, scalars, sizes.plane, rows, seen_by(here.local, True, C.TOGETHER), True, C)
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
    if C.FRESH:  # the strength of a row depends on who reads it
        grad_v *= tl.load(scalars + SOURCE * sizes.plane + rows)[:, None]
        scores *= strength_seen(scalars, sizes.plane, rows, here.local, True, C)
    grad_v = product(split(scores, C.PAIR_TERMS, C.KIND), (given, given), C.PAIR_TERMS, 1, C.PRECISION, grad_v)
    if C.SCALED and not C.FRESH:
        grad_v *= tl.load(scalars + SOURCE * sizes.plane + rows)[:, None]
    return grad_v
