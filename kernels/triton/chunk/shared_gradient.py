"""Gradients of heads that share queries and keys, of decays alone: several heads' chunks in one program.

Notation as in kernels.triton.gradient. A chunk of HEADS heads has three programs, which walk them one after the other:
dq and dk, as sums over these heads which stay in registers (what heads share is multiplied once, by the sum of their
weights between rows), and what each head has of its own: dv and its scalars'. What the decays' gradient takes of dq
and dk comes from q S and k G, so that sums can go on inside products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.gradient_parts import decay_gradient, spanning
from dsf.kernels.triton.chunk.tiles import (
    READ,
    SOURCE,
    TOTAL,
    between,
    load_rows,
    prefix_of,
    product,
    read_scale,
    split,
    store_rows,
    suffix_of,
    turned,
    written_scale,
)


@triton.jit(do_not_specialize=["base", "count", "first", "shift", "kept", "since", "held"])
def shared_gradient(
    q, k, v, dy, g, scalars, states, adjoints,
    dq, dk, dv, dg, ds, dc, extra, d_skip,
    tokens, heads: tl.constexpr, length, plane, batches, base, count, first, shift, kept, since, held,
    q_b, q_t: tl.constexpr, q_h, q_group, k_b, k_t: tl.constexpr, k_h, k_group, v_b, v_t: tl.constexpr, v_h,
    v_group, g_b, g_t, g_h,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr,
    DECAY: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr,
    SOURCE_WANTED: tl.constexpr, READ_WANTED: tl.constexpr, LOADS: tl.constexpr, SKIP: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PAIR_TERMS: tl.constexpr,
):  # fmt: skip
    """Gradients of HEADS consecutive heads of a chunk; arguments as chunk_gradient's.

    dq, dk [slices, B, kept, H / HEADS, N]; ds [slices, B, T, H]; dg, dc [2 · slices, B, T, H], of reads and of writes.
    """
    role, chunk = tl.program_id(0) % 3, tl.program_id(0) // 3 + first
    lane, piece = tl.program_id(1).to(tl.int64) * HEADS, tl.program_id(2)
    batch, head = lane // heads, lane % heads
    flat, chunks = batch * tokens * heads + head, tl.cdiv(tokens, L)
    at_row = (((piece.to(tl.int64) * batches + batch) * kept - shift) * heads + head) // HEADS * N
    part = flat + piece.to(tl.int64) * batches * tokens * heads
    dy += flat * P
    v += batch * v_b
    q += batch * q_b + head // q_group * q_h
    k += batch * k_b + head // k_group * k_h
    g += batch * g_b + head * g_h
    scalars += lane * length
    states += (lane * held + chunk - since) * N * P
    adjoints += (lane * count + chunk - base) * N * P
    if role == 0:
        _of_reads(
            q, k, v, dy, g, scalars, states, adjoints, dq + at_row, dg + part, dc + part,
            chunk, head, heads, tokens, length, plane, piece, held * N * P, count * N * P,
            q_t, k_t, v_t, v_h, v_group, g_t, g_h,
            N, P, BN, BP, L, HEADS, DECAY, SCALED, READ_SCALED, READ_WANTED, KIND, PRECISION, STAGES,
            PAIR_TERMS,
        )  # fmt: skip
    elif role == 1:
        _of_writes(
            q, v, dy, scalars, adjoints, dk + at_row, chunk, head, heads, tokens, length, plane, piece, count * N * P,
            q_t, v_t, v_h, v_group, N, P, BN, BP, L, HEADS, DECAY, SCALED, READ_SCALED, KIND, PRECISION, STAGES,
            PAIR_TERMS,
        )  # fmt: skip
    else:
        part += tl.num_programs(2).to(tl.int64) * batches * tokens * heads
        ds += flat + piece.to(tl.int64) * batches * tokens * heads
        if SKIP is not None:
            d_skip += ((piece.to(tl.int64) * batches + batch) * chunks + chunk) * heads + head
        _of_values(
            q, k, v, dy, g, scalars, adjoints, dv + flat * P, dg + part, ds, dc + part, extra, d_skip,
            batch, chunk, head, heads, tokens, length, plane, piece, count * N * P,
            q_t, k_t, v_t, v_h, v_group, g_t, g_h,
            N, P, BN, BP, L, HEADS, DECAY, SCALED, READ_SCALED, SOURCE_WANTED, READ_WANTED, LOADS, SKIP,
            KIND, PRECISION, STAGES, PAIR_TERMS,
        )  # fmt: skip


@triton.jit
def _of_reads(
    q, k, v, dy, g, scalars, states, adjoints, dq, dg, dc,
    chunk, head, heads, tokens, length, plane, piece, next_state, next_adjoint,
    q_t, k_t, v_t, v_h, v_group, g_t, g_h,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr,
    DECAY: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr, READ_WANTED: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PAIR_TERMS: tl.constexpr,
):  # fmt: skip
    """dq of all heads, and of each what the gradients of decays and read scales have of S."""
    keys, columns, local = tl.arange(0, BN), piece * BP + tl.arange(0, BP), tl.arange(0, L)
    rows = chunk * L + local
    place = keys[:, None] * P + columns[None, :]
    inside = (keys[:, None] < N) & (columns[None, :] < P)
    rows_q = load_rows(q, q_t, rows, tokens, keys, N, BN, KIND)
    sums, weights = tl.zeros([L, BN], tl.float32), tl.zeros([L, L], tl.float32)
    for i in tl.range(HEADS, num_stages=STAGES):
        given = load_rows(dy + i * P, heads * P, rows, tokens, columns, P, BP, KIND)
        written = load_rows(v + (head + i) // v_group * v_h, v_t, rows, tokens, columns, P, BP, KIND)
        state = tl.load(states + i * next_state + place, mask=inside, other=0.0).to(KIND)
        if DECAY or READ_WANTED:
            at = rows.to(tl.int64) * heads + i
            reads = tl.sum(tl.dot(rows_q, state, input_precision=PRECISION) * given.to(tl.float32), axis=1)
            if DECAY:
                reads *= prefix_of(scalars + i * length, rows)
            if READ_WANTED:
                tl.store(dc + at, turned(reads, scalars + i * length, plane, rows, DECAY), mask=rows < tokens)
            if READ_SCALED:
                reads *= tl.load(scalars + i * length + READ * plane + rows)
            if DECAY:
                tl.store(dg + at, reads, mask=rows < tokens)
        sums, weights = _add_head(
            given, written, state, scalars + i * length, sums, weights, plane, rows, local,
            DECAY, READ_SCALED, SCALED, False, KIND, PRECISION,
        )  # fmt: skip
    rows_k = load_rows(k, k_t, rows, tokens, keys, N, BN, KIND)
    sums = product(split(weights, PAIR_TERMS, KIND), (rows_k, rows_k), PAIR_TERMS, 1, PRECISION, sums)
    store_rows(dq, heads // HEADS * N, rows, tokens, keys, N, BN, sums)
    if DECAY:  # S carried through the chunk, and what later rows read of it
        each = tl.arange(0, HEADS)
        carried = tl.zeros([HEADS], tl.float32)
        for i in range(HEADS):
            state = tl.load(states + i * next_state + place, mask=inside, other=0.0).to(tl.float32)
            state *= tl.load(adjoints + i * next_adjoint + place, mask=inside, other=0.0)
            carried += tl.where(each == i, tl.sum(state), 0.0)
        carried *= tl.load(scalars + each * length + TOTAL * plane + chunk * L)
        tl.debug_barrier()  # what follows was stored by other threads
        at = rows[None, :].to(tl.int64) * heads + each[:, None]
        reads = tl.load(dg + at, mask=(rows < tokens)[None, :], other=0.0)
        grad = tl.cumsum(reads, axis=1, reverse=True) + carried[:, None]
        at_decay = g + each[:, None] * g_h + rows[None, :].to(tl.int64) * g_t
        tl.store(dg + at, decay_gradient(grad, at_decay, rows[None, :], tokens, DECAY), mask=(rows < tokens)[None, :])


@triton.jit
def _of_writes(
    q, v, dy, scalars, adjoints, dk,
    chunk, head, heads, tokens, length, plane, piece, next_adjoint, q_t, v_t, v_h, v_group,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr,
    DECAY: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr, KIND: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, PAIR_TERMS: tl.constexpr,
):  # fmt: skip
    """dk of all heads."""
    keys, columns, local = tl.arange(0, BN), piece * BP + tl.arange(0, BP), tl.arange(0, L)
    rows = chunk * L + local
    place = keys[:, None] * P + columns[None, :]
    inside = (keys[:, None] < N) & (columns[None, :] < P)
    sums, weights = tl.zeros([L, BN], tl.float32), tl.zeros([L, L], tl.float32)
    for i in tl.range(HEADS, num_stages=STAGES):
        given = load_rows(dy + i * P, heads * P, rows, tokens, columns, P, BP, KIND)
        written = load_rows(v + (head + i) // v_group * v_h, v_t, rows, tokens, columns, P, BP, KIND)
        adjoint = tl.load(adjoints + i * next_adjoint + place, mask=inside, other=0.0).to(KIND)
        sums, weights = _add_head(
            written, given, adjoint, scalars + i * length, sums, weights, plane, rows, local,
            DECAY, SCALED, READ_SCALED, True, KIND, PRECISION,
        )  # fmt: skip
    rows_q = load_rows(q, q_t, rows, tokens, keys, N, BN, KIND)
    sums = product(split(weights, PAIR_TERMS, KIND), (rows_q, rows_q), PAIR_TERMS, 1, PRECISION, sums)
    store_rows(dk, heads // HEADS * N, rows, tokens, keys, N, BN, sums)


@triton.jit
def _of_values(
    q, k, v, dy, g, scalars, adjoints, dv, dg, ds, dc, extra, d_skip,
    batch, chunk, head, heads, tokens, length, plane, piece, next_adjoint,
    q_t, k_t, v_t, v_h, v_group, g_t, g_h,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr,
    DECAY: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr,
    SOURCE_WANTED: tl.constexpr, READ_WANTED: tl.constexpr, LOADS: tl.constexpr, SKIP: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PAIR_TERMS: tl.constexpr,
):  # fmt: skip
    """What every head has of its own: dv, ds, a skip's, and what the other gradients of scalars have of writes."""
    keys, columns, local = tl.arange(0, BN), piece * BP + tl.arange(0, BP), tl.arange(0, L)
    rows = chunk * L + local
    place = keys[:, None] * P + columns[None, :]
    inside = (keys[:, None] < N) & (columns[None, :] < P)
    rows_q = load_rows(q, q_t, rows, tokens, keys, N, BN, KIND)
    rows_k = load_rows(k, k_t, rows, tokens, keys, N, BN, KIND)
    for i in tl.range(HEADS, num_stages=STAGES):
        given = load_rows(dy + i * P, heads * P, rows, tokens, columns, P, BP, KIND)
        written = load_rows(v + (head + i) // v_group * v_h, v_t, rows, tokens, columns, P, BP, KIND)
        adjoint = tl.load(adjoints + i * next_adjoint + place, mask=inside, other=0.0).to(KIND)
        # else products of q and k would be made before the loop and kept, for which there is no room
        again = (chunk * 0 + i).to(tl.float32) * 0.0
        at = rows.to(tl.int64) * heads + i
        grad_v, grad = _of_head(
            rows_q, rows_k, again, given, written, adjoint, scalars + i * length, ds + at, dc + at,
            tokens, plane, rows, local,
            L, DECAY, SCALED, READ_SCALED, SOURCE_WANTED, READ_WANTED, KIND, PRECISION, PAIR_TERMS,
        )  # fmt: skip
        if SKIP is not None:
            tile = (
                batch, head + i, batch * 0 + chunk * L, local[:, None], 0, columns[None, :],
                (rows < tokens)[:, None], True, (columns < P)[None, :], piece, 0, tokens, heads, P, N,
            )  # fmt: skip
            of_value, of_skip = SKIP(LOADS(extra, tile), given.to(tl.float32), written.to(tl.float32))
            grad_v += of_value
            tl.store(d_skip + i, tl.sum(tl.sum(of_skip, axis=1), axis=0))
        store_rows(dv + i * P, heads * P, rows, tokens, columns, P, BP, grad_v)
        if DECAY:
            grad = decay_gradient(grad, g + i * g_h + rows.to(tl.int64) * g_t, rows, tokens, DECAY)
            tl.store(dg + at, grad, mask=rows < tokens)


@triton.jit
def _add_head(
    mine, other, state, scalars, sums, total, plane, rows, local,
    DECAY: tl.constexpr, SCALED: tl.constexpr, OTHER_SCALED: tl.constexpr, WRITES: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One head's part of dq added: of rows `mine` of dy, `other` of v and S; to sums what states give [L, N], to total
    the weights of the keys that all heads share [L, L]. WRITES: of dk, from v, dy and G; the weights are queries'.
    """
    weights = tl.dot(mine, tl.trans(other), input_precision=PRECISION)
    seen = local[:, None] <= local[None, :] if WRITES else local[:, None] >= local[None, :]
    if DECAY:
        weights *= between(scalars, rows, seen, WRITES, plane, (SCALED if WRITES else OTHER_SCALED) == 2)
        if WRITES:
            scale = written_scale(scalars, plane, rows, DECAY, SCALED)
        else:
            scale = read_scale(scalars, plane, rows, DECAY, SCALED)
    else:
        weights = tl.where(seen, weights, 0.0)
    if SCALED and not (WRITES and SCALED == 2):
        own = tl.load(scalars + (SOURCE if WRITES else READ) * plane + rows)
        weights *= own[:, None]
        if not DECAY:
            scale = own
    if OTHER_SCALED and (WRITES or OTHER_SCALED != 2):
        weights *= tl.load(scalars + (READ if WRITES else SOURCE) * plane + rows)[None, :]
    if DECAY or SCALED:
        mine = (mine.to(tl.float32) * scale[:, None]).to(KIND)
    return tl.dot(mine, tl.trans(state), sums, input_precision=PRECISION), total + weights


@triton.jit
def _of_head(
    rows_q, rows_k, again, given, written, adjoint, scalars, ds, dc, tokens, plane, rows, local,
    L: tl.constexpr, DECAY: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr,
    SOURCE_WANTED: tl.constexpr, READ_WANTED: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    PAIR_TERMS: tl.constexpr,
):  # fmt: skip
    """ds and pairs' dc; returns dv and dlog decay [L]. Products between rows have sources down and reads across."""
    grad = tl.zeros([L], tl.float32)
    seen = local[:, None] <= local[None, :]
    scores = tl.dot(rows_k, tl.trans(rows_q), tl.full([L, L], 1.0, tl.float32) * again, input_precision=PRECISION)
    if DECAY:
        scores *= between(scalars, rows, seen, True)
    else:
        scores = tl.where(seen, scores, 0.0)
    if READ_SCALED:
        read = tl.load(scalars + READ * plane + rows)
    if DECAY or READ_WANTED:
        pairs = tl.dot(written, tl.trans(given), input_precision=PRECISION) * scores
        if SCALED:
            pairs *= tl.load(scalars + SOURCE * plane + rows)[:, None]
        if READ_WANTED:
            tl.store(dc, turned(tl.sum(pairs, axis=0), scalars, plane, rows, DECAY), mask=rows < tokens)
        if READ_SCALED:
            pairs *= read[None, :]
        if DECAY:  # before there is dv, which would have no room in registers beside its terms
            grad += spanning(pairs, local, True, KIND, PRECISION, PAIR_TERMS)
    if READ_SCALED:
        scores *= read[None, :]
    grad_v = tl.dot(rows_k, adjoint, input_precision=PRECISION)
    if DECAY:
        grad_v *= suffix_of(scalars, plane, rows)[:, None]
        writes = tl.sum(grad_v * written.to(tl.float32), axis=1)
        if SCALED:
            writes *= tl.load(scalars + SOURCE * plane + rows)
        grad += tl.sum(tl.where(local[:, None] > local[None, :], writes[None, :], 0.0), axis=1)
    grad_v = product(split(scores, PAIR_TERMS, KIND), (given, given), PAIR_TERMS, 1, PRECISION, grad_v)
    if SOURCE_WANTED:
        of_source = tl.sum(grad_v * written.to(tl.float32), axis=1)
        tl.store(ds, turned(of_source, scalars, plane, rows, DECAY), mask=rows < tokens)
    if SCALED:
        grad_v *= tl.load(scalars + SOURCE * plane + rows)[:, None]
    return grad_v, grad


@triton.jit(do_not_specialize=["kept"])
def sum_heads(
    parts, out, batches, kept, out_b, out_t, out_h,
    N: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, EACH: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """out [B, kept, H, N]: parts [slices, B, kept, H · EACH, N], summed. Grid (kept / ROWS, H, B)."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, keys = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BN)
    width = tl.num_programs(1) * EACH * N
    total = tl.zeros([ROWS, BN], tl.float32)
    for piece in tl.static_range(SLICES):
        first = parts + (piece * batches + batch) * kept * width + head * EACH * N
        for i in tl.static_range(EACH):
            total += load_rows(first + i * N, width, rows, kept, keys, N, BN, tl.float32)
    store_rows(out + batch * out_b + head.to(tl.int64) * out_h, out_t, rows, kept, keys, N, BN, total)
