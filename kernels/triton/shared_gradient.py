"""Gradients of heads that share queries and keys, of decays alone: several heads' chunks in one program.

Notation as in kernels.triton.gradient. A chunk of HEADS heads has three programs, which walk them one after the other:
dq and dk, as sums over these heads which stay in registers, and what each head has of its own: dv and its scalars'.
What the decays' gradient takes of dq and dk comes from q S and k G there, so that sums can go on inside products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.gradient import decay_gradient, spanning, turned
from dsf.kernels.triton.tiles import (
    PREFIX_READ,
    READ,
    SOURCE,
    between,
    load_rows,
    prefix_of,
    store_rows,
    suffix_of,
    total_of,
)


@triton.jit(do_not_specialize=["base", "count", "first", "shift", "kept"])
def shared_gradient(
    q, k, v, dy, g, scalars, states, adjoints,
    dq, dk, dv, dg, ds, dc, extra, d_skip,
    tokens, heads, length, plane, batches, base, count, first, shift, kept,
    q_b, q_t, q_h, q_group, k_b, k_t, k_h, k_group, v_b, v_t, v_h, v_group, g_b, g_t, g_h,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr,
    DECAY: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr,
    SOURCE_WANTED: tl.constexpr, READ_WANTED: tl.constexpr, LOADS: tl.constexpr, SKIP: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of HEADS consecutive heads of a chunk; arguments as chunk_gradient's.

    dq, dk [slices, B, kept, H / HEADS, N]; the scalars' [slices, B, T, H].
    """
    role, chunk = tl.program_id(0) % 3, tl.program_id(0) // 3 + first
    lane, piece = tl.program_id(1).to(tl.int64) * HEADS, tl.program_id(2)
    batch, head = lane // heads, lane % heads
    q += batch * q_b + head // q_group * q_h
    k += batch * k_b + head // k_group * k_h
    v += batch * v_b
    flat, chunks = batch * tokens * heads + head, tl.cdiv(tokens, L)
    dy += flat * P
    at_row = (((piece.to(tl.int64) * batches + batch) * kept - shift) * heads + head) // HEADS * N
    keys, columns, local = tl.arange(0, BN), piece * BP + tl.arange(0, BP), tl.arange(0, L)
    rows = chunk * L + local
    place = keys[:, None] * P + columns[None, :]
    inside = (keys[:, None] < N) & (columns[None, :] < P)
    scalars += lane * length
    states += (lane * chunks + chunk) * N * P
    adjoints += (lane * count + chunk - base) * N * P
    if role == 0:
        sums = tl.zeros([L, BN], tl.float32)
        others = load_rows(k, k_t, rows, tokens, keys, N, BN, KIND)
        for i in tl.range(HEADS, num_stages=STAGES):
            given = load_rows(dy + i * P, heads * P, rows, tokens, columns, P, BP, KIND)
            values = v + (head + i) // v_group * v_h
            written = load_rows(values, v_t, rows, tokens, columns, P, BP, KIND)
            state = tl.load(states + i * chunks * N * P + place, mask=inside, other=0.0).to(KIND)
            sums = _of_rows(
                given, written, state, others, scalars + i * length, sums, plane, rows, local,
                DECAY, READ_SCALED, SCALED, False, KIND, PRECISION,
            )  # fmt: skip
        store_rows(dq + at_row, heads // HEADS * N, rows, tokens, keys, N, BN, sums)
    elif role == 1:
        sums = tl.zeros([L, BN], tl.float32)
        others = load_rows(q, q_t, rows, tokens, keys, N, BN, KIND)
        for i in tl.range(HEADS, num_stages=STAGES):
            given = load_rows(dy + i * P, heads * P, rows, tokens, columns, P, BP, KIND)
            values = v + (head + i) // v_group * v_h
            written = load_rows(values, v_t, rows, tokens, columns, P, BP, KIND)
            state = tl.load(adjoints + i * count * N * P + place, mask=inside, other=0.0).to(KIND)
            sums = _of_rows(
                written, given, state, others, scalars + i * length, sums, plane, rows, local,
                DECAY, SCALED, READ_SCALED, True, KIND, PRECISION,
            )  # fmt: skip
        store_rows(dk + at_row, heads // HEADS * N, rows, tokens, keys, N, BN, sums)
    else:
        rows_q = load_rows(q, q_t, rows, tokens, keys, N, BN, KIND)
        rows_k = load_rows(k, k_t, rows, tokens, keys, N, BN, KIND)
        for i in tl.range(HEADS, num_stages=1):
            given = load_rows(dy + i * P, heads * P, rows, tokens, columns, P, BP, KIND)
            values = v + (head + i) // v_group * v_h
            written = load_rows(values, v_t, rows, tokens, columns, P, BP, KIND)
            # else products of q and k would be made before the loop and kept, for which there is no room
            again = (chunk * 0 + i).to(tl.float32) * 0.0
            at = flat + i + piece.to(tl.int64) * batches * tokens * heads + rows.to(tl.int64) * heads
            state = tl.load(states + i * chunks * N * P + place, mask=inside, other=0.0).to(KIND)
            adjoint = tl.load(adjoints + i * count * N * P + place, mask=inside, other=0.0).to(KIND)
            grad_v, grad = _of_head(
                rows_q, rows_k, again, given, written, state, adjoint, scalars + i * length, ds + at, dc + at,
                chunk, tokens, plane, rows, local,
                L, DECAY, SCALED, READ_SCALED, SOURCE_WANTED, READ_WANTED, KIND, PRECISION,
            )  # fmt: skip
            if SKIP is not None:
                tile = (
                    batch, head + i, batch * 0 + chunk * L, local[:, None], 0, columns[None, :],
                    (rows < tokens)[:, None], True, (columns < P)[None, :], piece, 0, tokens, heads, P, N,
                )  # fmt: skip
                of_value, of_skip = SKIP(LOADS(extra, tile), given.to(tl.float32), written.to(tl.float32))
                grad_v += of_value
                to = d_skip + ((piece.to(tl.int64) * batches + batch) * chunks + chunk) * heads + head + i
                tl.store(to, tl.sum(tl.sum(of_skip, axis=1), axis=0))
            store_rows(dv + (flat + i) * P, heads * P, rows, tokens, columns, P, BP, grad_v)
            if DECAY:
                decays = g + batch * g_b + (head + i) * g_h + rows.to(tl.int64) * g_t
                tl.store(dg + at, decay_gradient(grad, decays, rows, tokens, DECAY), mask=rows < tokens)


@triton.jit
def _of_rows(
    mine, other, state, others, scalars, sums, plane, rows, local,
    DECAY: tl.constexpr, SCALED: tl.constexpr, OTHER_SCALED: tl.constexpr, WRITES: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq's sums with one head's part, of rows `mine` of dy, `other` of v, S and k; WRITES: dk's, of v, dy, G and q."""
    weights = tl.dot(mine, tl.trans(other), input_precision=PRECISION)
    seen = local[:, None] <= local[None, :] if WRITES else local[:, None] >= local[None, :]
    if DECAY:
        weights *= between(scalars, rows, seen, WRITES)
        scale = suffix_of(scalars, plane, rows) if WRITES else tl.load(scalars + PREFIX_READ * plane + rows)
    else:
        weights = tl.where(seen, weights, 0.0)
    if SCALED:
        own = tl.load(scalars + (SOURCE if WRITES else READ) * plane + rows)
        weights *= own[:, None]
        if not DECAY:
            scale = own
        elif WRITES:
            scale *= own
    if OTHER_SCALED:
        weights *= tl.load(scalars + (READ if WRITES else SOURCE) * plane + rows)[None, :]
    if DECAY or SCALED:
        mine = (mine.to(tl.float32) * scale[:, None]).to(KIND)
    sums = tl.dot(mine, tl.trans(state), sums, input_precision=PRECISION)
    return tl.dot(weights.to(KIND), others, sums, input_precision=PRECISION)


@triton.jit
def _of_head(
    rows_q, rows_k, again, given, written, state, adjoint, scalars, ds, dc, chunk, tokens, plane, rows, local,
    L: tl.constexpr, DECAY: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr,
    SOURCE_WANTED: tl.constexpr, READ_WANTED: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ds, dc; returns dv and dlog decay [L]. Products between rows have sources down and reads across."""
    grad = tl.zeros([L], tl.float32)
    if DECAY:  # S carried through the chunk
        grad += tl.sum(state.to(tl.float32) * adjoint.to(tl.float32)) * total_of(scalars, plane, chunk * L)
    if DECAY or READ_WANTED:
        reads = tl.sum(tl.dot(rows_q, state, input_precision=PRECISION) * given.to(tl.float32), axis=1)
        if DECAY:
            reads *= prefix_of(scalars, rows)
    grad_v = tl.dot(rows_k, adjoint, input_precision=PRECISION)
    seen = local[:, None] <= local[None, :]
    products = tl.dot(rows_k, tl.trans(rows_q), tl.full([L, L], 1.0, tl.float32) * again, input_precision=PRECISION)
    if DECAY:
        grad_v *= suffix_of(scalars, plane, rows)[:, None]
        writes = tl.sum(grad_v * written.to(tl.float32), axis=1)
        scores = products * between(scalars, rows, seen, True)
    else:
        scores = tl.where(seen, products, 0.0)
    if DECAY or READ_WANTED:
        pairs = tl.dot(written, tl.trans(given), input_precision=PRECISION) * scores
        if SCALED:
            pairs *= tl.load(scalars + SOURCE * plane + rows)[:, None]
        if READ_WANTED:
            tl.store(dc, turned(reads + tl.sum(pairs, axis=0), scalars, plane, rows, DECAY), mask=rows < tokens)
    if READ_SCALED:
        read = tl.load(scalars + READ * plane + rows)
        scores *= read[None, :]
    grad_v = tl.dot(scores.to(KIND), given, grad_v, input_precision=PRECISION)
    if SOURCE_WANTED:
        of_source = tl.sum(grad_v * written.to(tl.float32), axis=1)
        tl.store(ds, turned(of_source, scalars, plane, rows, DECAY), mask=rows < tokens)
    if SCALED:
        grad_v *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    if DECAY:
        if READ_SCALED:
            pairs *= read[None, :]
            reads *= read
        if SCALED:
            writes *= tl.load(scalars + SOURCE * plane + rows)
        grad += spanning(pairs, local, True, KIND, PRECISION)
        grad += tl.sum(tl.where(local[:, None] <= local[None, :], reads[None, :], 0.0), axis=1)
        grad += tl.sum(tl.where(local[:, None] > local[None, :], writes[None, :], 0.0), axis=1)
    return grad_v, grad
