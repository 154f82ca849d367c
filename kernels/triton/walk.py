"""The two walks: states forwards with outputs, and the adjoint states backwards.

One program per (slice of P, sequence and head, segment of T) keeps its state [N, slice] in registers and walks those
chunks of L rows of its segment that lie from `base` up to `limit`. Rows write k_j e_jᵀ: e_j = s_j v_j in decay systems;
with the delta rule e solves, per chunk, (I + b ⊙ strict(K Kᵀ ⊙ M)) e = s ⊙ v - b ⊙ prefix ⊙ K S_0, whose inverse is
I + `solve`, made by the transform: so a row's own right side is not rounded before it is e.
SCORED: the products between a chunk's rows (q_i·k_j M_ij, times the read scale of scalar decays) were made before.
TERMS: 1, or 2 to keep what rounding leaves out of the rows that are scaled before they are written. READ_TERMS 2: of
KEYWISE scores (DELTA) or queries, too, left in `rest_of`, and of the states that these read.
AHEAD: values (reverse: what is given, and scores) come from registers, loaded a chunk before they are used.
SUMMARY: what segments do to states, so that all of them can be walked at once: what each adds to a state of zero, and
either the product of its decays per key or, for DELTA, its transition [N, N]: programs beyond P's carry the identity.
KEYWISE: q, k and erased are queries and erased keys decayed from their chunk's start, written keys decayed to its end.
NORMAL: y's normaliser is read too, of each chunk's first one, made before (kernels.triton.weights), and of its rows.
Grouped heads are read by dividing the head's index; nothing is copied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.keywise import last_running
from dsf.kernels.triton.packed import place_of_segment, segments_of
from dsf.kernels.triton.tiles import (
    ERASE,
    PREFIX_ERASE,
    PREFIX_READ,
    READ,
    SOURCE,
    between,
    load_rows,
    store_rows,
    suffix_of,
    total_of,
)


@triton.jit(do_not_specialize=["segments", "per_segment", "base", "limit"])
def forward_walk(
    q, k, erased, v, scalars, running, scores_of, rest_of, solve, y, entries, states, start, final, passed,
    ones, weights, weight_states, extra, table,
    tokens, heads, segments, per_segment, base, limit, length, plane,
    q_b, q_t, q_h, q_group, k_b, k_t, k_h, k_group, v_b, v_t, v_h, v_group,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, L: tl.constexpr,
    DECAY: tl.constexpr, KEYWISE: tl.constexpr, DELTA: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr,
    SCORED: tl.constexpr, PITCH: tl.constexpr, NORMAL: tl.constexpr, LOADS: tl.constexpr, FINISH: tl.constexpr,
    START: tl.constexpr, OUTPUT: tl.constexpr, STATES: tl.constexpr, FINAL: tl.constexpr, SUMMARY: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, TERMS: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, READ_TERMS: tl.constexpr,
):  # fmt: skip
    """y (OUTPUT), e and every chunk's first state (STATES), the last state of each segment (FINAL).

    SUMMARY: also `passed`, what a segment does to its first state: [S, B, H, N], or (DELTA) [S, B, H, N, N].
    NORMAL: also weights [B, H, T], what is read of the normaliser driven by 1, or (2) by `ones`.
    FINISH: the printed function that makes y of what is read and of what LOADS finds with pointers and strides `extra`,
    early: whatever feeds no product is not loaded ahead.
    """
    piece, lane, segment = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, head = lane // heads, lane % heads
    q += batch * q_b + head // q_group * q_h
    k += batch * k_b + head // k_group * k_h
    erased += batch * k_b + head // k_group * k_h
    v += batch * v_b + head // v_group * v_h
    scalars += lane * length
    solve += (batch * tokens * heads + head) * PITCH
    scores_of += (batch * tokens * heads + head) * PITCH
    rest_of += (batch * tokens * heads + head) * PITCH if DELTA else batch * q_b + head // q_group * q_h
    flat = (batch * tokens * heads + head) * P
    y += flat
    entries += flat
    first, stop, shift, end = place_of_segment(table, segment, per_segment, tokens, SUMMARY)
    first, stop = tl.maximum(first, base), tl.minimum(stop, limit)
    scalars -= shift
    chunks = length // L
    filled = end
    if SUMMARY and DELTA:
        carries = piece >= tl.cdiv(P, BP)
        piece -= tl.where(carries, tl.cdiv(P, BP), 0)
        filled = tl.where(carries, 0, end)
    keys, columns, local = tl.arange(0, BN), piece * BP + tl.arange(0, BP), tl.arange(0, L)
    causal = local[:, None] >= local[None, :]
    place = keys[:, None].to(tl.int64) * P + columns[None, :]
    inside = (keys[:, None] < N) & (columns[None, :] < P)
    ends = (segment * tl.num_programs(1) + lane) * N * P
    if START:
        state = tl.load(start + ends + place, mask=inside, other=0.0)
    else:
        state = tl.zeros([BN, BP], tl.float32)
    if SUMMARY:
        if DELTA:
            state = tl.where((keys[:, None] == columns[None, :]) & carries, 1.0, 0.0)
        else:
            decayed = tl.full([BN], 1.0, tl.float32)
    if AHEAD:
        next_rows = first * L + local + shift
        next_write = load_rows(v, v_t, next_rows, filled, columns, P, BP, KIND)
        if READ_TERMS == 2 and DELTA:
            next_scores = load_rows(scores_of, heads * PITCH, next_rows, end, local, L, L, KIND)
            next_rest = load_rows(rest_of, heads * PITCH, next_rows, end, local, L, L, KIND)
    for chunk in tl.range(first, stop, num_stages=STAGES):
        rows = chunk * L + local + shift
        rows_of_k, filled_k = (chunk * L + local, length) if KEYWISE else (rows, end)
        rows_k = load_rows(k, k_t, rows_of_k, filled_k, keys, N, BN, KIND)
        if AHEAD:
            write = next_write
            next_write = load_rows(v, v_t, rows + L, filled, columns, P, BP, KIND)
            if READ_TERMS == 2 and DELTA:
                scores, rest = next_scores, next_rest
                next_scores = load_rows(scores_of, heads * PITCH, rows + L, end, local, L, L, KIND)
                next_rest = load_rows(rest_of, heads * PITCH, rows + L, end, local, L, L, KIND)
        else:
            write = load_rows(v, v_t, rows, filled, columns, P, BP, KIND)
        if OUTPUT:
            if FINISH is not None:
                at = (
                    batch, head, lane * 0 + chunk * L + shift, local[:, None], 0, columns[None, :],
                    (rows < end)[:, None], True, (columns < P)[None, :], piece, 0, tokens, heads, P, N,
                )  # fmt: skip
                loaded, value = LOADS(extra, at), write
            if NORMAL:
                weight = tl.load(weight_states + (lane * chunks + chunk) * N + keys, mask=keys < N, other=0.0)
            if NORMAL == 2:
                drive = tl.load(ones + lane * tokens + rows, mask=rows < end, other=0.0)
        if STATES:
            tl.store(states + (lane * chunks + chunk) * N * P + place, state.to(states.dtype.element_ty), mask=inside)
        seen = state.to(KIND)
        if DELTA:
            read_k = rows_k
            if KEYWISE:
                read_k = load_rows(erased, k_t, rows_of_k, filled_k, keys, N, BN, KIND)
            known = tl.dot(read_k, seen, input_precision=PRECISION)
            erase = tl.load(scalars + (PREFIX_ERASE if DECAY else ERASE) * plane + rows)
            if SCALED:
                known = (
                    write.to(tl.float32) * tl.load(scalars + SOURCE * plane + rows)[:, None] - known * erase[:, None]
                )
            else:
                known = write.to(tl.float32) - known * erase[:, None]
            inverse = load_rows(solve, heads * PITCH, rows, end, local, L, L, KIND)
            entry = tl.dot(inverse, known.to(KIND), known, input_precision=PRECISION)
            write = entry.to(KIND)
            if STATES:
                store_rows(entries, heads * P, rows, end, columns, P, BP, write)
        if OUTPUT:
            rows_q = load_rows(q, q_t, rows_of_k, filled_k, keys, N, BN, KIND)
            if READ_TERMS == 2 and DELTA:
                tl.static_assert(AHEAD)
            elif SCORED:
                scores = load_rows(scores_of, heads * PITCH, rows, end, local, L, L, KIND)
            else:
                scores = tl.dot(rows_q, tl.trans(rows_k), input_precision=PRECISION)
            out = tl.dot(rows_q, seen, input_precision=PRECISION)
            if READ_TERMS == 2 and not DELTA:
                rest = load_rows(rest_of, q_t, rows_of_k, filled_k, keys, N, BN, KIND)
                out += tl.dot(rest, seen, input_precision=PRECISION)
                out += tl.dot(rows_q, (state - seen.to(tl.float32)).to(KIND), input_precision=PRECISION)
            if NORMAL:
                den = tl.sum(rows_q.to(tl.float32) * weight[None, :], axis=1)
                if DECAY:
                    den *= tl.load(scalars + PREFIX_READ * plane + rows)
            if DECAY:
                out *= tl.load(scalars + PREFIX_READ * plane + rows)[:, None]
            if DECAY and not SCORED:
                scores *= between(scalars, rows, causal, False)
                if READ_SCALED:
                    scores *= tl.load(scalars + READ * plane + rows)[:, None]
            elif not SCORED:
                scores = tl.where(causal, scores, 0.0)
            if SCALED and not DELTA:
                scores *= tl.load(scalars + SOURCE * plane + rows)[None, :]
            if NORMAL:  # of the very weights that the values have
                seen_rows = scores.to(KIND).to(tl.float32)
                if NORMAL == 2:
                    seen_rows *= drive[None, :]
                den += tl.sum(seen_rows, axis=1)
                if READ_SCALED and not DECAY:
                    den *= tl.load(scalars + READ * plane + rows)
                tl.store(weights + lane * tokens + rows, den, mask=(rows < end) & (piece == 0))
            out += tl.dot(scores.to(KIND), write, input_precision=PRECISION)
            if READ_TERMS == 2 and DELTA:
                out += tl.dot(rest, write, input_precision=PRECISION)
            if READ_SCALED and not DECAY:
                out *= tl.load(scalars + READ * plane + rows)[:, None]
            if FINISH is not None:
                out = FINISH(loaded, out, den[:, None] if NORMAL else out, value)
            store_rows(y, heads * P, rows, end, columns, P, BP, out)
        if DECAY:
            scale = suffix_of(scalars, plane, rows)
            if SCALED and not DELTA:
                scale *= tl.load(scalars + SOURCE * plane + rows)
            exact = write.to(tl.float32) * scale[:, None]
            write = exact.to(KIND)
            state *= total_of(scalars, plane, chunk * L + shift)
            if SUMMARY and not DELTA:
                decayed *= total_of(scalars, plane, chunk * L + shift)
        elif SCALED and not DELTA:
            exact = write.to(tl.float32) * tl.load(scalars + SOURCE * plane + rows)[:, None]
            write = exact.to(KIND)
        if KEYWISE:
            total = tl.exp2(last_running(running, lane, length, chunk, keys, N, L))
            state *= total[:, None]
            if SUMMARY and not DELTA:
                decayed *= total
        state += tl.dot(tl.trans(rows_k), write, input_precision=PRECISION)
        if TERMS == 2 and (DECAY or (SCALED and not DELTA)):
            state += tl.dot(tl.trans(rows_k), (exact - write.to(tl.float32)).to(KIND), input_precision=PRECISION)
    if SUMMARY:
        at = segment * tl.num_programs(1) + lane
        if DELTA:
            if carries:
                to = passed + at * N * N + keys[:, None] * N + columns[None, :]
                tl.store(to, state, mask=(keys[:, None] < N) & (columns[None, :] < N))
            else:
                tl.store(final + ends + place, state, mask=inside)
        else:
            tl.store(final + ends + place, state, mask=inside)
            if piece == 0:
                tl.store(passed + at * N + keys, decayed, mask=keys < N)
    elif FINAL:
        tl.store(final + ends + place, state, mask=inside)


@triton.jit(do_not_specialize=["segments", "per_segment", "base", "limit"])
def reverse_walk(
    q, k, erased, dy, scalars, running, scores_of, solve, adjoint_entries, adjoints, start, final, table,
    tokens, heads, segments, per_segment, base, limit, length, plane,
    q_b, q_t, q_h, q_group, k_b, k_t, k_h, k_group,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, L: tl.constexpr,
    DECAY: tl.constexpr, KEYWISE: tl.constexpr, DELTA: tl.constexpr, READ_SCALED: tl.constexpr,
    SCORED: tl.constexpr, PITCH: tl.constexpr, START: tl.constexpr, STATES: tl.constexpr, FINAL: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, TERMS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The gradient with respect to each chunk's last state (STATES), to e (DELTA and STATES), and to S_0 (FINAL).

    adjoints [B, H, limit - base, N, P] and adjoint_entries [B, (limit - base) L, H, P] have room for the walked chunks.
    """
    piece, lane, segment = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, head = lane // heads, lane % heads
    q += batch * q_b + head // q_group * q_h
    k += batch * k_b + head // k_group * k_h
    erased += batch * k_b + head // k_group * k_h
    scalars += lane * length
    solve += (batch * tokens * heads + head) * PITCH
    scores_of += (batch * tokens * heads + head) * PITCH
    flat = (batch * tokens * heads + head) * P
    dy += flat
    first, stop, shift, end = place_of_segment(table, segment, per_segment, tokens, not STATES)
    first, stop = tl.maximum(first, base), tl.minimum(stop, limit)
    scalars -= shift
    adjoint_entries += (((batch * (limit - base) - base) * L - shift) * heads + head) * P
    keys, columns, local = tl.arange(0, BN), piece * BP + tl.arange(0, BP), tl.arange(0, L)
    causal = local[:, None] <= local[None, :]  # sources down, rows across
    place = keys[:, None].to(tl.int64) * P + columns[None, :]
    inside = (keys[:, None] < N) & (columns[None, :] < P)
    ends = (segment * tl.num_programs(1) + lane) * N * P
    if START:
        state = tl.load(start + ends + place, mask=inside, other=0.0)
    else:
        state = tl.zeros([BN, BP], tl.float32)
    if AHEAD:
        next_rows = tl.maximum((stop - 1) * L + local + shift, 0)
        next_given = load_rows(dy, heads * P, next_rows, end, columns, P, BP, KIND)
        next_scores = load_rows(scores_of, heads * PITCH, next_rows, end, local, L, L, KIND)
    for step in tl.range(0, stop - first, num_stages=STAGES):
        chunk = stop - 1 - step
        rows = chunk * L + local + shift
        rows_of_k, filled_k = (chunk * L + local, length) if KEYWISE else (rows, end)
        rows_q = load_rows(q, q_t, rows_of_k, filled_k, keys, N, BN, KIND)
        if AHEAD:
            given, ahead_scores = next_given, next_scores
            next_rows = tl.maximum(rows - L, 0)
            next_given = load_rows(dy, heads * P, next_rows, end, columns, P, BP, KIND)
            next_scores = load_rows(scores_of, heads * PITCH, next_rows, end, local, L, L, KIND)
        else:
            given = load_rows(dy, heads * P, rows, end, columns, P, BP, KIND)
        if STATES:
            at = adjoints + (lane * (limit - base) + chunk - base) * N * P + place
            tl.store(at, state.to(adjoints.dtype.element_ty), mask=inside)
        if DELTA:
            rows_k = load_rows(k, k_t, rows_of_k, filled_k, keys, N, BN, KIND)
            if AHEAD:
                scores = tl.trans(ahead_scores)
            elif SCORED:
                scores = tl.trans(load_rows(scores_of, heads * PITCH, rows, end, local, L, L, KIND))
            else:
                scores = tl.dot(rows_k, tl.trans(rows_q), input_precision=PRECISION)
            carried = tl.dot(rows_k, state.to(KIND), input_precision=PRECISION)
            if DECAY:
                carried *= suffix_of(scalars, plane, rows)[:, None]
            if not SCORED:
                scores = tl.where(causal, scores, 0.0)
            if READ_SCALED and not DECAY:
                scores *= tl.load(scalars + READ * plane + rows)[None, :]
            carried += tl.dot(scores.to(KIND), given, input_precision=PRECISION)
            inverse = load_rows(solve, heads * PITCH, rows, end, local, L, L, KIND)
            adjoint = tl.dot(tl.trans(inverse), carried.to(KIND), carried, input_precision=PRECISION)
            if STATES:
                store_rows(adjoint_entries, heads * P, rows, end, columns, P, BP, adjoint)
            adjoint *= tl.load(scalars + (PREFIX_ERASE if DECAY else ERASE) * plane + rows)[:, None]
        if READ_SCALED or DECAY:
            scale = tl.load(scalars + (PREFIX_READ if DECAY else READ) * plane + rows)
            exact = given.to(tl.float32) * scale[:, None]
            given = exact.to(KIND)
        if DECAY:
            state *= total_of(scalars, plane, chunk * L + shift)
        if KEYWISE:
            if DELTA:
                rows_k = load_rows(erased, k_t, rows_of_k, filled_k, keys, N, BN, KIND)
            state *= tl.exp2(last_running(running, lane, length, chunk, keys, N, L))[:, None]
        state += tl.dot(tl.trans(rows_q), given, input_precision=PRECISION)
        if TERMS == 2 and (READ_SCALED or DECAY):
            state += tl.dot(tl.trans(rows_q), (exact - given.to(tl.float32)).to(KIND), input_precision=PRECISION)
        if DELTA:
            state -= tl.dot(tl.trans(rows_k), adjoint.to(KIND), input_precision=PRECISION)
    if FINAL:
        tl.store(final + ends + place, state, mask=inside)


@triton.jit
def combine_segments(
    local, passed, start, starts, table, segments, size, P,
    N: tl.constexpr, BLOCK: tl.constexpr, START: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """First state of every segment from what each adds: S_{s+1} = passed_s S_s + local_s, in either direction."""
    lane, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2)
    low, stop = segments_of(table, sequence, segments)
    lanes = tl.num_programs(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    if START:
        state = tl.load(start + (sequence * lanes + lane) * size + at, mask=inside, other=0.0)
    else:
        state = tl.zeros([BLOCK], tl.float32)
    for step in range(stop - low):
        segment = (stop - 1 - step if REVERSE else low + step) * lanes + lane
        tl.store(starts + segment * size + at, state, mask=inside)
        state *= tl.load(passed + segment * N + at // P, mask=inside, other=0.0)
        state += tl.load(local + segment * size + at, mask=inside, other=0.0)


@triton.jit
def combine_moves(
    local, moves, start, starts, table, segments,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
    START: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same with transitions [N, N] (transposed in reverse), which meet the stored state BK rows at a time."""
    lane, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2)
    low, stop = segments_of(table, sequence, segments)
    lanes = tl.num_programs(1)
    keys, columns = tl.arange(0, BN), tl.program_id(0) * BP + tl.arange(0, BP)
    place = keys[:, None] * P + columns[None, :]
    inside = (keys[:, None] < N) & (columns[None, :] < P)
    if START:
        state = tl.load(start + (sequence * lanes + lane) * N * P + place, mask=inside, other=0.0)
    else:
        state = tl.zeros([BN, BP], tl.float32)
    for step in range(stop - low):
        segment = (stop - 1 - step if REVERSE else low + step) * lanes + lane
        first = starts + segment * N * P
        tl.store(first + place, state, mask=inside)
        tl.debug_barrier()  # it is read again, by other threads
        state = tl.load(local + segment * N * P + place, mask=inside, other=0.0)
        for block in tl.range(0, BN, BK, num_stages=2):
            inner = block + tl.arange(0, BK)
            if REVERSE:
                at = inner[None, :] * N + keys[:, None]
            else:
                at = keys[:, None] * N + inner[None, :]
            move = tl.load(moves + segment * N * N + at, mask=(keys[:, None] < N) & (inner[None, :] < N), other=0.0)
            rows = (inner[:, None] < N) & (columns[None, :] < P)
            part = tl.load(first + inner[:, None] * P + columns[None, :], mask=rows, other=0.0)
            state = tl.dot(move, part, state, input_precision=PRECISION)
