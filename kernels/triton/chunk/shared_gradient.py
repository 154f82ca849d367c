"""Gradients of several heads that share queries and keys, in one program; decays alone (notation: gradient.py).

A chunk of HEADS heads has three programs. Each goes through the heads one after the other: the first sums dq over them,
the second dk, the third makes dv and the gradients of scalars, which every head has for itself. The sums stay in
registers. Their part from pairs of rows is one product for all heads: the heads' weights between rows are added up, and
the sum is multiplied by the keys (or queries) that the heads share. A decay's gradient needs each head's q·dq and k·dk,
which the sums no longer have apart; it comes from q S and k G of each head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.gradient_parts import Gradients, Known, decay_gradient, spanning
from dsf.kernels.triton.chunk.scalars import (
    READ,
    SOURCE,
    TOTAL,
    between,
    prefix_of,
    read_scale,
    suffix_of,
    turned,
    written_scale,
)
from dsf.kernels.triton.chunk.tiles import Chunked, load_rows, product, split, store_rows
from dsf.kernels.triton.structs import Numbers, Rows, of_head


class Heads(NamedTuple):
    """A program's chunk, sequence, first head and slice of P; the distances between the states, and between the adjoint
    states, of consecutive heads."""

    chunk: Any
    batch: Any
    head: Any
    piece: Any
    next_state: Any
    next_adjoint: Any


@dataclass(frozen=True, repr=False)
class Shared(Chunked):
    """BP channels and HEADS heads a program, in a loop of STAGES; LOADS, SKIP and PAIR_TERMS: as `Gradient`'s."""

    BP: int
    HEADS: int
    STAGES: int
    LOADS: Any
    SKIP: Any
    PAIR_TERMS: int


@triton.jit(do_not_specialize=["base", "count", "first", "shift", "kept", "since", "held"])
def shared_gradient(
    q, k, v, dy, g, known, to, extra, sizes, batches, base, count, first, shift, kept, since, held, C: tl.constexpr
):
    """Gradients of HEADS consecutive heads of a chunk; arguments as chunk_gradient's.

    dq, dk [slices, B, kept, H / HEADS, N]; ds [slices, B, T, H]; dg, dc [2 · slices, B, T, H], of reads and of writes.
    """
    heads: tl.constexpr = sizes.heads
    tokens = sizes.tokens
    role, chunk = tl.program_id(0) % 3, tl.program_id(0) // 3 + first
    lane, piece = tl.program_id(1).to(tl.int64) * C.HEADS, tl.program_id(2)
    batch, head = lane // heads, lane % heads
    flat, chunks = batch * tokens * heads + head, tl.cdiv(tokens, C.L)
    at_row = (((piece.to(tl.int64) * batches + batch) * kept - shift) * heads + head) // C.HEADS * C.N
    part = flat + piece.to(tl.int64) * batches * tokens * heads
    dy += flat * C.P
    v = Rows(v.at + batch * v.batch, None, v.token, v.head, v.group)
    q, k = of_head(q, batch, head), of_head(k, batch, head)
    g = Numbers(g.at + batch * g.batch + head * g.head, None, g.token, g.head)
    known = Known(
        known.scalars + lane * sizes.length, None, None, known.states + (lane * held + chunk - since) * C.N * C.P,
        known.adjoints + (lane * count + chunk - base) * C.N * C.P,
    )  # fmt: skip
    here = Heads(chunk, batch, head, piece, held * C.N * C.P, count * C.N * C.P)
    if role == 0:
        dc = None if to.dc is None else to.dc + part
        _of_reads(q, k, v, dy, g, known, to.dq + at_row, to.dg + part, dc, here, sizes, C)
    elif role == 1:
        _of_writes(q, v, dy, known, to.dk + at_row, here, sizes, C)
    else:
        of_source = flat + piece.to(tl.int64) * batches * tokens * heads
        part += tl.num_programs(2).to(tl.int64) * batches * tokens * heads
        of_skip = ((piece.to(tl.int64) * batches + batch) * chunks + chunk) * heads + head
        of_values = Gradients(
            None, None, to.dv + flat * C.P, to.dg + part, None if to.ds is None else to.ds + of_source, None,
            None if to.dc is None else to.dc + part, None if to.d_skip is None else to.d_skip + of_skip,
        )  # fmt: skip
        _of_values(q, k, v, dy, g, known, of_values, extra, here, sizes, C)


@triton.jit
def _place(here, C: tl.constexpr):
    """A chunk's keys, channels, rows in it and in T; the places of entries in a state, and which of them exist."""
    keys, columns, local = tl.arange(0, C.BN), here.piece * C.BP + tl.arange(0, C.BP), tl.arange(0, C.L)
    rows = here.chunk * C.L + local
    place = keys[:, None] * C.P + columns[None, :]
    return keys, columns, local, rows, place, (keys[:, None] < C.N) & (columns[None, :] < C.P)


@triton.jit
def _keys_of(x, rows, keys, sizes, C: tl.constexpr):
    """The rows of q or k, which the program's heads share."""
    return load_rows(x.at, x.token, rows, sizes.tokens, keys, C.N, C.BN, C.KIND)


@triton.jit
def _of_head_number(i, v, dy, rows, columns, here, sizes, C: tl.constexpr):
    """dy and v of the program's head number i."""
    heads: tl.constexpr = sizes.heads
    given = load_rows(dy + i * C.P, heads * C.P, rows, sizes.tokens, columns, C.P, C.BP, C.KIND)
    at = v.at + (here.head + i) // v.group * v.head
    return given, load_rows(at, v.token, rows, sizes.tokens, columns, C.P, C.BP, C.KIND)


@triton.jit
def _store_sums(to, sums, weights, x, rows, keys, sizes, C: tl.constexpr):
    """Store dq (or dk): `sums`, which came from states, plus the summed weights times the rows x of k (or q)."""
    heads: tl.constexpr = sizes.heads
    others = _keys_of(x, rows, keys, sizes, C)
    sums = product(split(weights, C.PAIR_TERMS, C.KIND), (others, others), C.PAIR_TERMS, 1, C.PRECISION, sums)
    store_rows(to, heads // C.HEADS * C.N, rows, sizes.tokens, keys, C.N, C.BN, sums)


@triton.jit
def _of_reads(q, k, v, dy, g, known, dq, dg, dc, here, sizes, C: tl.constexpr):
    """dq summed over the heads, and of each head dc's and dlog decay's parts that come from reads of S."""
    heads: tl.constexpr = sizes.heads
    tokens, length, plane = sizes.tokens, sizes.length, sizes.plane
    scalars = known.scalars
    keys, columns, local, rows, place, inside = _place(here, C)
    rows_q = _keys_of(q, rows, keys, sizes, C)
    sums, weights = tl.zeros([C.L, C.BN], tl.float32), tl.zeros([C.L, C.L], tl.float32)
    for i in tl.range(C.HEADS, num_stages=C.STAGES):
        given, written = _of_head_number(i, v, dy, rows, columns, here, sizes, C)
        state = tl.load(known.states + i * here.next_state + place, mask=inside, other=0.0).to(C.KIND)
        if C.DECAY or dc is not None:
            at = rows.to(tl.int64) * heads + i
            reads = tl.sum(tl.dot(rows_q, state, input_precision=C.PRECISION) * given.to(tl.float32), axis=1)
            if C.DECAY:
                reads *= prefix_of(scalars + i * length, rows)
            if dc is not None:
                tl.store(dc + at, turned(reads, scalars + i * length, plane, rows, C.DECAY), mask=rows < tokens)
            if C.READ_SCALED:
                reads *= tl.load(scalars + i * length + READ * plane + rows)
            if C.DECAY:
                tl.store(dg + at, reads, mask=rows < tokens)
        sums, weights = _add_head(
            given, written, state, scalars + i * length, sums, weights, plane, rows, local, False, C
        )  # fmt: skip
    _store_sums(dq, sums, weights, k, rows, keys, sizes, C)
    if C.DECAY:  # S carried through the chunk, and what later rows read of it
        each = tl.arange(0, C.HEADS)
        carried = tl.zeros([C.HEADS], tl.float32)
        for i in range(C.HEADS):
            state = tl.load(known.states + i * here.next_state + place, mask=inside, other=0.0).to(tl.float32)
            state *= tl.load(known.adjoints + i * here.next_adjoint + place, mask=inside, other=0.0)
            carried += tl.where(each == i, tl.sum(state), 0.0)
        carried *= tl.load(scalars + each * length + TOTAL * plane + here.chunk * C.L)
        tl.debug_barrier()  # what follows was stored by other threads
        at = rows[None, :].to(tl.int64) * heads + each[:, None]
        reads = tl.load(dg + at, mask=(rows < tokens)[None, :], other=0.0)
        grad = tl.cumsum(reads, axis=1, reverse=True) + carried[:, None]
        at_decay = g.at + each[:, None] * g.head + rows[None, :].to(tl.int64) * g.token
        tl.store(dg + at, decay_gradient(grad, at_decay, rows[None, :], tokens, C.DECAY), mask=(rows < tokens)[None, :])


@triton.jit
def _of_writes(q, v, dy, known, dk, here, sizes, C: tl.constexpr):
    """dk summed over the heads."""
    length, plane = sizes.length, sizes.plane
    scalars = known.scalars
    keys, columns, local, rows, place, inside = _place(here, C)
    sums, weights = tl.zeros([C.L, C.BN], tl.float32), tl.zeros([C.L, C.L], tl.float32)
    for i in tl.range(C.HEADS, num_stages=C.STAGES):
        given, written = _of_head_number(i, v, dy, rows, columns, here, sizes, C)
        adjoint = tl.load(known.adjoints + i * here.next_adjoint + place, mask=inside, other=0.0).to(C.KIND)
        sums, weights = _add_head(
            written, given, adjoint, scalars + i * length, sums, weights, plane, rows, local, True, C
        )  # fmt: skip
    _store_sums(dk, sums, weights, q, rows, keys, sizes, C)


@triton.jit
def _of_values(q, k, v, dy, g, known, to, extra, here, sizes, C: tl.constexpr):
    """Of every head dv, ds, the gradient of a skip, and the rest of dc and dlog decay: from pairs and from writes."""
    heads: tl.constexpr = sizes.heads
    tokens, length, plane = sizes.tokens, sizes.length, sizes.plane
    scalars = known.scalars
    keys, columns, local, rows, place, inside = _place(here, C)
    rows_q = _keys_of(q, rows, keys, sizes, C)
    rows_k = _keys_of(k, rows, keys, sizes, C)
    for i in tl.range(C.HEADS, num_stages=C.STAGES):
        given, written = _of_head_number(i, v, dy, rows, columns, here, sizes, C)
        adjoint = tl.load(known.adjoints + i * here.next_adjoint + place, mask=inside, other=0.0).to(C.KIND)
        # else products of q and k would be made before the loop and kept, for which there is no room
        again = (here.chunk * 0 + i).to(tl.float32) * 0.0
        at = rows.to(tl.int64) * heads + i
        grad_v, grad = _of_head(
            rows_q, rows_k, again, given, written, adjoint, scalars + i * length, None if to.ds is None else to.ds + at,
            None if to.dc is None else to.dc + at, tokens, plane, rows, local, C,
        )  # fmt: skip
        if C.SKIP is not None:
            tile = (
                here.batch, here.head + i, here.batch * 0 + here.chunk * C.L, local[:, None], 0, columns[None, :],
                (rows < tokens)[:, None], True, (columns < C.P)[None, :], here.piece, 0, tokens, heads, C.P, C.N,
            )  # fmt: skip
            of_value, of_skip = C.SKIP(C.LOADS(extra, tile), given.to(tl.float32), written.to(tl.float32))
            grad_v += of_value
            tl.store(to.d_skip + i, tl.sum(tl.sum(of_skip, axis=1), axis=0))
        store_rows(to.dv + i * C.P, heads * C.P, rows, tokens, columns, C.P, C.BP, grad_v)
        if C.DECAY:
            grad = decay_gradient(grad, g.at + i * g.head + rows.to(tl.int64) * g.token, rows, tokens, C.DECAY)
            tl.store(to.dg + at, grad, mask=rows < tokens)


@triton.jit
def _add_head(mine, other, state, scalars, sums, total, plane, rows, local, WRITES: tl.constexpr, C: tl.constexpr):
    """Add one head's part of dq, from its rows `mine` of dy and `other` of v, and from S: to `sums` [L, N] what comes
    from S, to `total` [L, L] the weights of the keys that all heads share.

    WRITES: of dk, from v, dy and G, and the weights are of queries.
    """
    SCALED: tl.constexpr = C.SCALED if WRITES else C.READ_SCALED
    OTHER_SCALED: tl.constexpr = C.READ_SCALED if WRITES else C.SCALED
    weights = tl.dot(mine, tl.trans(other), input_precision=C.PRECISION)
    seen = local[:, None] <= local[None, :] if WRITES else local[:, None] >= local[None, :]
    if C.DECAY:
        weights *= between(scalars, plane, rows, seen, WRITES, C.FINE, (SCALED if WRITES else OTHER_SCALED) == 2)
        if WRITES:
            scale = written_scale(scalars, plane, rows, C.DECAY, SCALED)
        else:
            scale = read_scale(scalars, plane, rows, C.DECAY, SCALED)
    else:
        weights = tl.where(seen, weights, 0.0)
    if SCALED and not (WRITES and SCALED == 2):
        own = tl.load(scalars + (SOURCE if WRITES else READ) * plane + rows)
        weights *= own[:, None]
        if not C.DECAY:
            scale = own
    if OTHER_SCALED and (WRITES or OTHER_SCALED != 2):
        weights *= tl.load(scalars + (READ if WRITES else SOURCE) * plane + rows)[None, :]
    if C.DECAY or SCALED:
        mine = (mine.to(tl.float32) * scale[:, None]).to(C.KIND)
    return tl.dot(mine, tl.trans(state), sums, input_precision=C.PRECISION), total + weights


@triton.jit
def _of_head(
    rows_q, rows_k, again, given, written, adjoint, scalars, ds, dc, tokens, plane, rows, local, C: tl.constexpr
):
    """One head's dv and dlog decay [L]; stores ds and the part of dc that comes from pairs of rows.

    Products between rows have written rows down and reading rows across.
    """
    grad = tl.zeros([C.L], tl.float32)
    seen = local[:, None] <= local[None, :]
    scores = tl.dot(rows_k, tl.trans(rows_q), tl.full([C.L, C.L], 1.0, tl.float32) * again, input_precision=C.PRECISION)
    if C.DECAY:
        scores *= between(scalars, plane, rows, seen, True, C.FINE)
    else:
        scores = tl.where(seen, scores, 0.0)
    if C.READ_SCALED:
        read = tl.load(scalars + READ * plane + rows)
    if C.DECAY or dc is not None:
        pairs = tl.dot(written, tl.trans(given), input_precision=C.PRECISION) * scores
        if C.SCALED:
            pairs *= tl.load(scalars + SOURCE * plane + rows)[:, None]
        if dc is not None:
            tl.store(dc, turned(tl.sum(pairs, axis=0), scalars, plane, rows, C.DECAY), mask=rows < tokens)
        if C.READ_SCALED:
            pairs *= read[None, :]
        if C.DECAY:  # before there is dv, which would have no room in registers beside its terms
            grad += spanning(pairs, local, True, C.KIND, C.PRECISION, C.PAIR_TERMS)
    if C.READ_SCALED:
        scores *= read[None, :]
    grad_v = tl.dot(rows_k, adjoint, input_precision=C.PRECISION)
    if C.DECAY:
        grad_v *= suffix_of(scalars, plane, rows)[:, None]
        writes = tl.sum(grad_v * written.to(tl.float32), axis=1)
        if C.SCALED:
            writes *= tl.load(scalars + SOURCE * plane + rows)
        grad += tl.sum(tl.where(local[:, None] > local[None, :], writes[None, :], 0.0), axis=1)
    grad_v = product(split(scores, C.PAIR_TERMS, C.KIND), (given, given), C.PAIR_TERMS, 1, C.PRECISION, grad_v)
    if ds is not None:
        of_source = tl.sum(grad_v * written.to(tl.float32), axis=1)
        tl.store(ds, turned(of_source, scalars, plane, rows, C.DECAY), mask=rows < tokens)
    if C.SCALED:
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
