"""Diagonal plus rank one, backwards: the gradients of one chunk from its first state and its last state's adjoint.

With S_0 and the adjoint dS_L of S_L (rank_one.py's walk in both directions), all chunks in parallel: first the rows

    u = W S_0 + T BK v,   f = Tᵀ â dS_L + (QA T)ᵀ dy,   dv = Mᵀ dy + K dS_L

(f: the gradient of BK v + b̃ S_0), then for each key what the four vectors of a row take part in. Reads q and b have
dy and f in front of S_0, u and v; writes a and k have u and v in front of dS_L, dy and f: one function for all four.

Log decays: every product of rows decays by exp(G_i - G_j), so a decay's gradient sums the products whose reading row is
after it (or at it, for q) less those whose writing row is. Both take the same rounded factors, so that products inside
the sum cancel; products that no decay touches (q with its own row, b with the row before) are left out of both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.keywise import load_chunk
from dsf.kernels.triton.rank_one import factors, load_earlier, meeting, middle_of
from dsf.kernels.triton.tiles import load_rows, store_rows


@triton.jit
def rank_one_entries(
    outer, inner, writes, mixed, v, dy, states, adjoints, entries, adjoint_entries, dv, weights,
    tokens, heads, length, v_b, v_t, v_h, v_group,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, L: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """u, f and dv [B, T, H, P] of one chunk, and the gradients of QA | QK | BA | BK [B, T, H, 4L], unmasked."""
    chunk, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = lane // heads, lane % heads
    keys, local = tl.arange(0, BN), tl.arange(0, L)
    rows = chunk * L + local
    at = batch * tokens * heads + head
    mixed += at * 4 * L
    row, wide = heads * P, heads * 4 * L
    block = (lane * length + chunk * L) * N
    to_state = (lane * tl.cdiv(tokens, L) + chunk) * N * P
    v += batch * v_b + head // v_group * v_h
    dy += at * P
    entries += at * P
    adjoint_entries += at * P
    for first in tl.range(0, P, BP, num_stages=1):
        columns = first + tl.arange(0, BP)
        values = load_rows(v, v_t, rows, tokens, columns, P, BP, KIND)
        state = load_state(states + to_state, keys, columns, N, P, KIND)
        out = tl.dot(load_rows(inner + block, N, local, L, keys, N, BN, KIND), state, input_precision=PRECISION)
        known = load_rows(mixed + L, wide, rows, tokens, local, L, L, KIND)
        out = tl.dot(known, values, out, input_precision=PRECISION)
        store_rows(entries, row, rows, tokens, columns, P, BP, out)
        adjoint = load_state(adjoints + to_state, keys, columns, N, P, KIND)
        given = load_rows(dy, row, rows, tokens, columns, P, BP, KIND)
        out = tl.dot(load_rows(outer + block, N, local, L, keys, N, BN, KIND), adjoint, input_precision=PRECISION)
        inverse = tl.trans(load_rows(mixed + 2 * L, wide, rows, tokens, local, L, L, KIND))
        out = tl.dot(inverse, out.to(KIND), input_precision=PRECISION)
        through = tl.trans(load_rows(mixed + 3 * L, wide, rows, tokens, local, L, L, KIND))
        out = tl.dot(through, given, out, input_precision=PRECISION)
        store_rows(adjoint_entries, row, rows, tokens, columns, P, BP, out)
        out = tl.dot(load_rows(writes + block, N, local, L, keys, N, BN, KIND), adjoint, input_precision=PRECISION)
        direct = tl.trans(load_rows(mixed, wide, rows, tokens, local, L, L, KIND))
        out = tl.dot(direct, given, out, input_precision=PRECISION)
        store_rows(dv + at * P, row, rows, tokens, columns, P, BP, out)
    qa = tl.zeros([L, L], tl.float32)
    qk = tl.zeros([L, L], tl.float32)
    ba = tl.zeros([L, L], tl.float32)
    bk = tl.zeros([L, L], tl.float32)
    tl.debug_barrier()  # u and f are read again, by other threads
    for first in tl.range(0, P, BP, num_stages=2):
        columns = first + tl.arange(0, BP)
        given = load_rows(dy, row, rows, tokens, columns, P, BP, KIND)
        adjoint = load_rows(adjoint_entries, row, rows, tokens, columns, P, BP, KIND)
        entry = tl.trans(load_rows(entries, row, rows, tokens, columns, P, BP, KIND))
        values = tl.trans(load_rows(v, v_t, rows, tokens, columns, P, BP, KIND))
        qa = tl.dot(given, entry, qa, input_precision=PRECISION)
        qk = tl.dot(given, values, qk, input_precision=PRECISION)
        ba = tl.dot(adjoint, entry, ba, input_precision=PRECISION)
        bk = tl.dot(adjoint, values, bk, input_precision=PRECISION)
    weights += at * 4 * L
    store_rows(weights, wide, rows, tokens, local, L, L, qa)
    store_rows(weights + L, wide, rows, tokens, local, L, L, qk)
    store_rows(weights + 2 * L, wide, rows, tokens, local, L, L, ba)
    store_rows(weights + 3 * L, wide, rows, tokens, local, L, L, bk)


@triton.jit
def rank_one_gradient(
    x, y, first, second, of_x, of_y, weights, running, state, other, dx, dy, dg,
    tokens, heads, length,
    x_b, x_t, x_h, x_group, y_b, y_t, y_h, y_group, first_b, first_t, first_h, first_group,
    second_b, second_t, second_h, second_group, of_x_b, of_x_t, of_x_h, of_x_group, of_y_b, of_y_t, of_y_h, of_y_group,
    N: tl.constexpr, P: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr, L: tl.constexpr, READS: tl.constexpr,
    LEVELS: tl.constexpr, AT_ONCE: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of x, y [B, T, H, N] for BK keys of one chunk, and what the two give the log decays.

    READS: x, y are q, b (of dy, f), first, second a, k, state is S_0, and dg is written; else x, y are a, k (of u, v),
    first, second are q, b, state is dS_L, other S_0, and dg is added to.
    """
    BLOCKS: tl.constexpr = (N + BK - 1) // BK
    chunk, lane = tl.program_id(0) // BLOCKS, tl.program_id(1).to(tl.int64)
    keys, local = tl.program_id(0) % BLOCKS * BK + tl.arange(0, BK), tl.arange(0, L)
    batch, head = lane // heads, lane % heads
    x += batch * x_b + head // x_group * x_h
    y += batch * y_b + head // y_group * y_h
    first += batch * first_b + head // first_group * first_h
    second += batch * second_b + head // second_group * second_h
    of_x += batch * of_x_b + head // of_x_group * of_x_h
    of_y += batch * of_y_b + head // of_y_group * of_y_h
    at = batch * tokens * heads + head
    weights += at * 4 * L
    dg += at * N
    running += (lane * length + chunk * L) * N
    to_state = (lane * tl.cdiv(tokens, L) + chunk) * N * P
    state += to_state
    rows = chunk * L + local
    log = _one_of_four(
        of_x, of_x_t, weights, state, x, x_t, first, first_t, second, second_t, dx + at * N, running,
        rows, tokens, heads, keys, local, 0, READS, N, P, BK, BP, L, LEVELS, AT_ONCE, KIND, PRECISION,
    )  # fmt: skip
    tl.debug_barrier()  # or loads move up, and registers run out
    log += _one_of_four(
        of_y, of_y_t, weights, state, y, y_t, first, first_t, second, second_t, dy + at * N, running,
        rows, tokens, heads, keys, local, 1, READS, N, P, BK, BP, L, LEVELS, AT_ONCE, KIND, PRECISION,
    )  # fmt: skip
    if not READS:
        carried = tl.zeros([BK], tl.float32)
        for begin in tl.range(0, P, BP, num_stages=1):
            columns = begin + tl.arange(0, BP)
            beside = load_state(other + to_state, keys, columns, N, P, tl.float32)
            carried += tl.sum(beside * load_state(state, keys, columns, N, P, tl.float32), axis=1)
        last = tl.load(running + (L - 1) * N + keys, mask=keys < N, other=0.0)
        log += (tl.exp2(last) * carried)[None, :]
        log += load_rows(dg, heads * N, rows, tokens, keys, N, BK, tl.float32)
    store_rows(dg, heads * N, rows, tokens, keys, N, BK, log)


@triton.jit
def _one_of_four(
    field, field_t, weights, state_of, x, x_t, first, first_t, second, second_t, out, running,
    rows, tokens, heads, keys, local, turn: tl.constexpr,
    READS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr, L: tl.constexpr,
    LEVELS: tl.constexpr, AT_ONCE: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of the vector x of every row: field meets the state, weights the vectors first and second of other rows.

    READS: x reads first and second, else first and second read x. turn: 1 for the second of both kinds; where that is
    b, it reads what was before its row. Returns what x gives the log decays [L, BK].
    """
    grad = tl.zeros([L, BK], tl.float32)
    for begin in tl.range(0, P, BP):
        columns = begin + tl.arange(0, BP)
        mine = load_rows(field, field_t, rows, tokens, columns, P, BP, KIND)
        state = load_state(state_of, keys, columns, N, P, KIND)
        grad = tl.dot(mine, tl.trans(state), grad, input_precision=PRECISION)
    wide = heads * 4 * L
    if READS:
        at_one, at_two, to_one, to_two = 2 * turn, 2 * turn + 1, turn, turn
    else:
        at_one, at_two, to_one, to_two = turn, 2 + turn, 0, 1
    with_one = load_rows(weights + at_one * L, wide, rows, tokens, local, L, L, KIND)
    with_two = load_rows(weights + at_two * L, wide, rows, tokens, local, L, L, KIND)
    own = load_chunk(running, local, keys, N, BK)
    before = load_earlier(running, local, turn if READS else 1, keys, N, BK)
    rows_x = load_rows(x, x_t, rows, tokens, keys, N, BK, KIND)
    rows_1 = load_rows(first, first_t, rows, tokens, keys, N, BK, KIND)
    rows_2 = load_rows(second, second_t, rows, tokens, keys, N, BK, KIND)
    nothing = tl.zeros([L, BK], tl.float32)
    if READS and AT_ONCE:  # the state is one more of what is read at the chunk's start
        grad, of_rows = _meet(
            grad, with_one, with_two, rows_x, rows_1, rows_2, own, before, 0.0, local, LEVELS - 1, to_one, to_two,
            True, True, KIND, PRECISION,
        )  # fmt: skip
    else:
        if READS:
            grad *= tl.exp2(before)
            of_rows = grad * rows_x.to(tl.float32)
        else:  # what is carried to the chunk's end gives to the decays after its row: to all, less those up to it
            last = tl.load(running + (L - 1) * N + keys, mask=keys < N, other=0.0)
            grad *= tl.exp2(last[None, :] - own)
            of_rows = tl.where((local < L - 1)[:, None], grad * rows_x.to(tl.float32), 0.0)
            carried = tl.sum(of_rows, axis=0)
        if AT_ONCE:
            met, of_met = _meet(
                nothing, with_one, with_two, rows_x, rows_1, rows_2, own, before, 0.0, local, LEVELS - 1,
                to_one, to_two, True, READS, KIND, PRECISION,
            )  # fmt: skip
            grad += met
            of_rows += of_met
        else:
            for level in tl.range(0, LEVELS, num_stages=1):
                middle = middle_of(running, local, keys, level, N, BK)
                met, of_met = _meet(
                    nothing, with_one, with_two, rows_x, rows_1, rows_2, own, before, middle, local, level,
                    to_one, to_two, False, READS, KIND, PRECISION,
                )  # fmt: skip
                grad += met
                of_rows += of_met
            # what no decay touches: the row's own, or the neighbour's that b reads
            gap = local[:, None] - local[None, :]
            near = tl.sum(tl.where(gap == to_one, with_one.to(tl.float32), 0.0), axis=1 if READS else 0)
            grad += near[:, None] * _neighbours(rows_1, first, first_t, rows, tokens, keys, turn, READS, 0, N, BK)
            near = tl.sum(tl.where(gap == to_two, with_two.to(tl.float32), 0.0), axis=1 if READS else 0)
            grad += near[:, None] * _neighbours(rows_2, second, second_t, rows, tokens, keys, turn, READS, 1, N, BK)
    store_rows(out, heads * N, rows, tokens, keys, N, BK, grad)
    if READS:
        log = sum_rows(local[:, None] + turn <= local[None, :], of_rows, KIND, PRECISION)
    else:
        log = carried[None, :] - sum_rows(local[:, None] <= local[None, :], of_rows, KIND, PRECISION)
    return log


@triton.jit
def _meet(
    start, with_one, with_two, rows_x, rows_1, rows_2, own, before, middle, local, level, to_one, to_two,
    AT_ONCE: tl.constexpr, READS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Parts of the gradient and of what it gives the log decays, by row, of `start` and one size of blocks [L, BK].

    AT_ONCE: products that no decay touches are among them, and cancel in what the log decays are given.
    """
    UNDECAYED: tl.constexpr = 0 if AT_ONCE else 1
    after, earlier, source = factors(own, before, middle, AT_ONCE)
    if READS:
        mine, factor_1, factor_2 = earlier, source, source
    else:
        mine, factor_1, factor_2 = source, after, earlier
    weights = tl.where(meeting(local, level, UNDECAYED + to_one, AT_ONCE), with_one, 0.0)
    if not READS:
        weights = tl.trans(weights)
    out = tl.dot(weights, (rows_1.to(tl.float32) * factor_1).to(KIND), start, input_precision=PRECISION)
    weights = tl.where(meeting(local, level, UNDECAYED + to_two, AT_ONCE), with_two, 0.0)
    if not READS:
        weights = tl.trans(weights)
    out = tl.dot(weights, (rows_2.to(tl.float32) * factor_2).to(KIND), out, input_precision=PRECISION)
    return out * mine, (rows_x.to(tl.float32) * mine).to(KIND).to(tl.float32) * out


@triton.jit
def _neighbours(
    own_rows, base, stride, rows, tokens, keys, turn: tl.constexpr,
    READS: tl.constexpr, SECOND: tl.constexpr, N: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The rows that meet without decay: their own, or for b those before; of b those after."""
    if READS:
        return load_rows(base, stride, tl.maximum(rows - turn, 0), tokens, keys, N, BK, tl.float32)
    if SECOND:
        return load_rows(base, stride, rows + 1, tokens, keys, N, BK, tl.float32)
    return own_rows.to(tl.float32)


@triton.jit
def sum_rows(chosen, x, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """[t]: the sum of the rows of x that are chosen[t], [L, ·]."""
    weights = tl.where(chosen, 1.0, 0.0).to(KIND)
    main = x.to(KIND)
    out = tl.dot(weights, main, input_precision=PRECISION)
    if KIND != tl.float32:  # sums whose terms cancel: what rounding left out
        out += tl.dot(weights, (x - main.to(tl.float32)).to(KIND), input_precision=PRECISION)
    return out


@triton.jit
def load_state(base, keys, columns, N: tl.constexpr, P: tl.constexpr, KIND: tl.constexpr):
    """A tile of a state [N, P]."""
    inside = (keys[:, None] < N) & (columns[None, :] < P)
    return tl.load(base + keys[:, None] * P + columns[None, :], mask=inside, other=0.0).to(KIND)
