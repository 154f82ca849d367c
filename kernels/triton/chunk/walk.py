"""The two walks: states forwards with outputs, and the adjoint states backwards.

One program per (slice of P, sequence and head, segment of T) keeps its state [N, slice] in registers and walks those
chunks of L rows of its segment that lie from `base` up to `limit`. Rows write k_j e_jᵀ: e_j = s_j v_j in decay systems;
with the delta rule e solves, per chunk, (I + b ⊙ strict(K Kᵀ ⊙ M)) e = s ⊙ v - b ⊙ prefix ⊙ K S_0, whose inverse is
I + `solve`, made by the transform: so a row's own right side is not rounded before it is e.
SCORED: the products between a chunk's rows (q_i·k_j M_ij, times the read scale of scalar decays) were made before.
TERMS: 1, or 2 to keep what rounding leaves out of the rows that are scaled before they are written; with the delta rule
of e as it is kept, and of scores backwards, too. STATE_TERMS: with the delta rule of states; RIGHT_TERMS: of right
sides and their inverse; SCORE_TERMS: of scores forwards; READ_TERMS: of a delta rule's e as y reads it; ADJOINT_TERMS:
of e's adjoint as it is written, and kept.
KEY_TERMS, where KEYWISE: of scores (DELTA), with e and its adjoint as they are kept; else of the rows that are written
into states and the states that are read. What rounding left of scores or rows is in `rest_of`.
AHEAD: the values of a chunk are loaded into registers one chunk before they are used; so are, in the forward walk, the
scores (three pipeline stages of their second terms do not fit into shared memory), and in the reverse walk the given
gradients and the scores.
SUMMARY: what segments do to states, so that all can be walked at once: what each adds to a state of zero, and the
product of its decays per key or, for DELTA, its transition [N, N]: programs beyond P's carry the identity.
KEYWISE: q, k and erased are queries and erased keys decayed from their chunk's start, written keys decayed to its end.
NORMAL: y's normaliser is read too, of each chunk's first one, made before (kernels.triton.weights), and of its rows.
WHOLE: no chunk ends beyond the tokens: rows need no masks. Grouped heads: the head's index is divided, nothing copied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.keywise import last_running
from dsf.kernels.triton.chunk.states import place_of_state, store_state
from dsf.kernels.triton.chunk.tiles import (
    ERASE,
    PREFIX_ERASE,
    READ,
    SOURCE,
    between,
    first_term,
    load_lower,
    load_rows,
    load_terms,
    product,
    read_scale,
    split,
    store_output,
    store_rows,
    store_terms,
    suffix_of,
    total_of,
    turn,
    turned,
    written_scale,
)
from dsf.kernels.triton.packed import place_of_segment

# An end before every row: rows of segments without chunks lie as far below 0 as their place in the table.
NOWHERE = tl.constexpr(-(1 << 31))


@triton.jit(do_not_specialize=["segments", "per_segment", "base", "limit", "beside"])
def forward_walk(
    q, k, erased, v, scalars, running, scores_of, rest_of, solve, y, entries, states, start, final, passed,
    ones, weights, weight_states, extra, more, table,
    tokens, heads: tl.constexpr, segments, per_segment, base, limit, beside, length, plane,
    q_b, q_t: tl.constexpr, q_h, q_group, k_b, k_t: tl.constexpr, k_h, k_group, v_b, v_t: tl.constexpr, v_h, v_group,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, L: tl.constexpr,
    DECAY: tl.constexpr, KEYWISE: tl.constexpr, DELTA: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr,
    SCORED: tl.constexpr, PITCH: tl.constexpr, NORMAL: tl.constexpr, LOADS: tl.constexpr, FINISH: tl.constexpr,
    START: tl.constexpr, OUTPUT: tl.constexpr, STATES: tl.constexpr, FINAL: tl.constexpr, SUMMARY: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, TERMS: tl.constexpr, STATE_TERMS: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, KEY_TERMS: tl.constexpr, READ_TERMS: tl.constexpr, LATE: tl.constexpr,
    RIGHT_TERMS: tl.constexpr, WHOLE: tl.constexpr, SCORE_TERMS: tl.constexpr,
):  # fmt: skip
    """y (OUTPUT), e and every chunk's first state (STATES), the last state (FINAL; of packed ones of each segment).

    SUMMARY: also `passed`, what a segment does to its first state: [S, B, H, N], or (DELTA) [S, B, H, N, N].
    NORMAL: also weights [B, H, T], what is read of the normaliser driven by 1, or (2) by `ones`.
    FINISH: the printed function that makes y of what is read and of what LOADS finds with pointers and strides `extra`,
    early: whatever feeds no product is not loaded ahead. more: None, or where to leave more digits of y.
    STATES: states [B, H, limit - base, N, P] of the walked chunks, and entries [B, H, limit - base, L, P], but where
    KEYWISE [B, T, H, P].
    heads and the strides of tokens are constants: two of three instructions that make addresses go.
    LATE: a chunk's y is stored when the next one begins, while its rows are on their way.
    START: how many of the states in `start` there are for a segment, which begins with its first one; -1: there is one
    segment, which begins with zeros where `base` is 0.
    beside: programs along the grid's third axis that come before its segments.
    """
    piece, lane, segment = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) - beside
    batch, head = lane // heads, lane % heads
    q += batch * q_b + head // q_group * q_h
    k += batch * k_b + head // k_group * k_h
    erased += batch * k_b + head // k_group * k_h
    v += batch * v_b + head // v_group * v_h
    scalars += lane * length
    solve += lane * (length // L) * PITCH
    scores_of += (batch * tokens * heads + head) * L if KEYWISE else lane * (length // L) * PITCH
    rest_of += (batch * tokens * heads + head) * L if DELTA else batch * k_b + head // k_group * k_h
    flat = (batch * tokens * heads + head) * P
    y += flat
    if more is not None:
        more += flat
    of_walked = lane * (limit - base) - base  # chunks kept before the first one of all
    ROW_TERMS: tl.constexpr = (KEY_TERMS if KEYWISE else TERMS) if DELTA else 1
    ENTRY_TERMS: tl.constexpr = READ_TERMS if DELTA else 1
    SPLIT_TERMS: tl.constexpr = ENTRY_TERMS if OUTPUT and ENTRY_TERMS > ROW_TERMS else ROW_TERMS
    WRITE_TERMS: tl.constexpr = TERMS if DELTA or DECAY or SCALED else 1
    first, stop, shift, end = place_of_segment(table, segment, per_segment, tokens, SUMMARY)
    first, stop = first + base, tl.minimum(stop + base, limit)
    scalars -= shift
    within = end
    if WHOLE:
        within = None
    chunks = length // L
    filled = within
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
        at_start = (segment * START * tl.num_programs(1) + lane) * N * P
        there = inside
        if START < 0:
            there &= base > 0
        state = tl.load(start + at_start + place, mask=there, other=0.0)
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
        if KEY_TERMS == 2 and DELTA:
            next_scores = load_rows(scores_of, heads * L, next_rows, within, local, L, L, KIND)
            if STAGES > 2:
                next_rest = load_rows(rest_of, heads * L, next_rows, within, local, L, L, KIND)
    if LATE:
        held = tl.zeros([L, BP], y.dtype.element_ty if more is None else tl.float32)
    for chunk in tl.range(first, stop, num_stages=STAGES):
        rows = chunk * L + local + shift
        if LATE:
            past = tl.where(chunk > first, end, NOWHERE)
            store_output(y, more, heads * P, rows - L, past, columns, P, BP, held)
        if STATES:  # before what is loaded is waited for
            to = place_of_state(states, of_walked + chunk, N * P)
            store_state(to, place, inside, piece, state, N * P)
        rows_of_k = chunk * L + local if KEYWISE else rows
        rows_k = load_rows(k, k_t, rows_of_k, length if KEYWISE else within, keys, N, BN, KIND)
        if AHEAD:
            write = next_write
            next_write = load_rows(v, v_t, rows + L, filled, columns, P, BP, KIND)
            if KEY_TERMS == 2 and DELTA:
                scores = next_scores
                if STAGES > 2:
                    rest = next_rest
                else:
                    rest = load_rows(rest_of, heads * L, rows, within, local, L, L, KIND)
                next_scores = load_rows(scores_of, heads * L, rows + L, within, local, L, L, KIND)
                if STAGES > 2:
                    next_rest = load_rows(rest_of, heads * L, rows + L, within, local, L, L, KIND)
        else:
            write = load_rows(v, v_t, rows, filled, columns, P, BP, KIND)
        written = write, write
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
        seen = split(state, STATE_TERMS, KIND)
        if DELTA:
            read_k = rows_k
            if KEYWISE:
                read_k = load_rows(erased, k_t, rows_of_k, length if KEYWISE else within, keys, N, BN, KIND)
            known = product((read_k, read_k), seen, 1, STATE_TERMS, PRECISION)
            erase = tl.load(scalars + (PREFIX_ERASE if DECAY else ERASE) * plane + rows)
            if SCALED:
                source = tl.load(scalars + SOURCE * plane + rows)[:, None]
                known = write.to(tl.float32) * source - known * erase[:, None]
            else:
                known = write.to(tl.float32) - known * erase[:, None]
            inverse = load_lower(solve + chunk * PITCH, local, L, KIND, RIGHT_TERMS)
            right = split(known, RIGHT_TERMS, KIND)
            entry = product(inverse, right, RIGHT_TERMS, RIGHT_TERMS, PRECISION, known)
            written = split(entry, SPLIT_TERMS, KIND, STATE_TERMS == 1 and (STATES or not DECAY))
            write = written[0]
            if STATES and KEYWISE:
                to = entries + flat * ROW_TERMS
                store_terms(to, heads * P * ROW_TERMS, rows, within, columns, P, BP, written, ROW_TERMS)
            elif STATES:
                to = entries + (of_walked + chunk) * L * P * ROW_TERMS
                store_terms(to, P * ROW_TERMS, local, None, columns, P, BP, written, ROW_TERMS)
        if OUTPUT:
            rows_q = load_rows(q, q_t, rows_of_k, length if KEYWISE else within, keys, N, BN, KIND)
            if KEY_TERMS == 2 and DELTA and KEYWISE:
                tl.static_assert(AHEAD)
                weights_of = scores, rest
            elif SCORED:
                if KEYWISE:
                    weights_of = load_terms(scores_of, heads * L, rows, within, local, L, L, KIND, SCORE_TERMS)
                else:
                    weights_of = load_lower(scores_of + chunk * PITCH, local, L, KIND, SCORE_TERMS)
                scores = weights_of[0]
            else:
                scores = tl.dot(rows_q, tl.trans(rows_k), input_precision=PRECISION)
            out = product((rows_q, rows_q), seen, 1, STATE_TERMS, PRECISION)
            if KEY_TERMS == 2 and not DELTA:
                out += tl.dot(rows_q, (state - seen[0].to(tl.float32)).to(KIND), input_precision=PRECISION)
            if NORMAL:
                den = tl.sum(rows_q.to(tl.float32) * weight[None, :], axis=1)
                if DECAY:
                    den *= read_scale(scalars, plane, rows, DECAY, READ_SCALED, DELTA)
            if DECAY:
                out *= read_scale(scalars, plane, rows, DECAY, READ_SCALED, DELTA)[:, None]
            if DECAY and not SCORED:
                scores *= between(scalars, rows, causal, False, plane, SCALED == 2)
                if READ_SCALED:
                    scores *= tl.load(scalars + READ * plane + rows)[:, None]
            elif not SCORED:
                scores = tl.where(causal, scores, 0.0)
            if SCALED and not DELTA and SCALED != 2:
                scores *= tl.load(scalars + SOURCE * plane + rows)[None, :]
            if NORMAL:  # of the very weights that the values have
                seen_rows = scores
                if SCORE_TERMS == 1:
                    seen_rows = scores.to(KIND).to(tl.float32)
                if NORMAL == 2:
                    seen_rows *= drive[None, :]
                den += tl.sum(seen_rows, axis=1)
                if READ_SCALED and not DECAY:
                    den *= tl.load(scalars + READ * plane + rows)
                tl.store(weights + lane * tokens + rows, den, mask=(rows < end) & (piece == 0))
            if not (SCORED and DELTA):
                weights_of = split(scores, SCORE_TERMS, KIND)
            out = product(weights_of, written, SCORE_TERMS, ENTRY_TERMS, PRECISION, out)
            if READ_SCALED and not DECAY:
                out *= tl.load(scalars + READ * plane + rows)[:, None]
            if FINISH is not None:
                out = FINISH(loaded, out, den[:, None] if NORMAL else out, value)
            if LATE:
                held = out.to(held.dtype)
            else:
                store_output(y, more, heads * P, rows, within, columns, P, BP, out)
        if DECAY:
            scale = written_scale(scalars, plane, rows, DECAY, SCALED and not DELTA)
            if DELTA:
                written = split(entry * scale[:, None], WRITE_TERMS, KIND)
            else:
                exact = write.to(tl.float32) * scale[:, None]
                kept = first_term(exact, WRITE_TERMS)
                write = kept.to(KIND)
            state *= total_of(scalars, plane, chunk * L + shift)
            if SUMMARY and not DELTA:
                decayed *= total_of(scalars, plane, chunk * L + shift)
        elif SCALED and not DELTA:
            scale = tl.load(scalars + SOURCE * plane + rows)
            exact = write.to(tl.float32) * scale[:, None]
            kept = first_term(exact, WRITE_TERMS)
            write = kept.to(KIND)
        if KEYWISE:
            total = tl.exp2(last_running(running, lane, length, chunk, keys, N, L))
            state *= total[:, None]
            if SUMMARY and not DELTA:
                decayed *= total
        rows_k = tl.trans(rows_k)
        if DELTA:
            state = product((rows_k, rows_k), written, 1, WRITE_TERMS, PRECISION, state)
        else:
            state += tl.dot(rows_k, write, input_precision=PRECISION)
            if KEY_TERMS == 2:
                rest = tl.trans(load_rows(rest_of, k_t, rows_of_k, length if KEYWISE else within, keys, N, BN, KIND))
                state += tl.dot(rest, write, input_precision=PRECISION)
            if WRITE_TERMS == 2:
                state += tl.dot(rows_k, (exact - kept).to(KIND), input_precision=PRECISION)
    if LATE:
        rows = (stop - 1) * L + local + shift
        store_output(y, more, heads * P, rows, tl.where(stop > first, end, NOWHERE), columns, P, BP, held)
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
        if table is None:  # of the only sequence
            inside &= segment == segments - 1
            ends = lane * N * P
        tl.store(final + ends + place, state, mask=inside)


@triton.jit(do_not_specialize=["segments", "per_segment", "base", "limit"])
def reverse_walk(
    q, k, erased, dy, scalars, running, scores_of, rest_of, solve, adjoint_entries, adjoints, start, final,
    values, table,
    tokens, heads: tl.constexpr, segments, per_segment, base, limit, length, plane,
    q_b, q_t: tl.constexpr, q_h, q_group, k_b, k_t: tl.constexpr, k_h, k_group,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, L: tl.constexpr,
    DECAY: tl.constexpr, KEYWISE: tl.constexpr, DELTA: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr,
    SCORED: tl.constexpr, PITCH: tl.constexpr, START: tl.constexpr, STATES: tl.constexpr, FINAL: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, TERMS: tl.constexpr, STATE_TERMS: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, KEY_TERMS: tl.constexpr, RIGHT_TERMS: tl.constexpr, WHOLE: tl.constexpr,
    ADJOINT_TERMS: tl.constexpr, SOURCE_WANTED: tl.constexpr,
):  # fmt: skip
    """The gradient with respect to each chunk's last state (STATES), to e (DELTA and STATES), and to S_0 (FINAL).

    adjoints [B, H, limit - base, N, P] and adjoint_entries [B, H, limit - base, L, P] have room for the walked chunks,
    of KEYWISE ones the latter as [B, (limit - base) L, H, P].
    START: -1: there is one segment, which begins with zeros where `limit` is the end. start and final may be the same.
    values (DELTA): v, dv [B, T, H, P], ds [slices, B, T, H] and v's strides; of e's adjoint before it is rounded dv is
    made, and (SOURCE_WANTED) ds.
    """
    piece, lane, segment = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, head = lane // heads, lane % heads
    q += batch * q_b + head // q_group * q_h
    k += batch * k_b + head // k_group * k_h
    erased += batch * k_b + head // k_group * k_h
    scalars += lane * length
    solve += lane * (length // L) * PITCH
    scores_of += (batch * tokens * heads + head) * L if KEYWISE else lane * (length // L) * PITCH
    flat = (batch * tokens * heads + head) * P
    dy += flat
    first, stop, shift, end = place_of_segment(table, segment, per_segment, tokens, not STATES)
    if table is None:
        first, stop = first + base, tl.minimum(stop + base, limit)
    else:
        first, stop = tl.maximum(first, base), tl.minimum(stop, limit)
    scalars -= shift
    within = end
    if WHOLE:
        within = None
    rest_of += (batch * tokens * heads + head) * L if DELTA else batch * q_b + head // q_group * q_h
    if values is not None:
        v, dv, ds, v_b, v_t, v_h, v_group = values
        v += batch * v_b + head // v_group * v_h
        dv += flat
        ds += (piece.to(tl.int64) * (tl.num_programs(1) // heads) + batch) * tokens * heads + head
    ROW_TERMS: tl.constexpr = (KEY_TERMS if KEYWISE else TERMS) if DELTA else 1
    KEPT_TERMS: tl.constexpr = ROW_TERMS if KEYWISE else ADJOINT_TERMS
    GIVEN_TERMS: tl.constexpr = TERMS if READ_SCALED or DECAY else 1
    of_walked = lane * (limit - base) - base  # chunks kept before the first one of all
    if KEYWISE:
        adjoint_entries += (((batch * (limit - base) - base) * L - shift) * heads + head) * P * KEPT_TERMS
    keys, columns, local = tl.arange(0, BN), piece * BP + tl.arange(0, BP), tl.arange(0, L)
    causal = local[:, None] <= local[None, :]  # sources down, rows across
    place = keys[:, None].to(tl.int64) * P + columns[None, :]
    inside = (keys[:, None] < N) & (columns[None, :] < P)
    ends = (segment * tl.num_programs(1) + lane) * N * P
    if START:
        there = inside
        if START < 0:
            there &= limit < length // L
        state = tl.load(start + ends + place, mask=there, other=0.0)
    else:
        state = tl.zeros([BN, BP], tl.float32)
    if AHEAD:
        next_rows = tl.maximum((stop - 1) * L + local + shift, 0)
        next_given = load_rows(dy, heads * P, next_rows, within, columns, P, BP, KIND)
        next_scores = load_rows(scores_of, heads * L, next_rows, within, local, L, L, KIND)
    for step in tl.range(0, stop - first, num_stages=STAGES):
        chunk = stop - 1 - step
        rows = chunk * L + local + shift
        if STATES:  # before what is loaded is waited for
            at = place_of_state(adjoints, of_walked + chunk, N * P)
            store_state(at, place, inside, piece, state, N * P)
        rows_of_k = chunk * L + local if KEYWISE else rows
        rows_q = load_rows(q, q_t, rows_of_k, length if KEYWISE else within, keys, N, BN, KIND)
        if AHEAD:
            given, scores = next_given, next_scores
            next_rows = tl.maximum(rows - L, 0)
            next_given = load_rows(dy, heads * P, next_rows, within, columns, P, BP, KIND)
            next_scores = load_rows(scores_of, heads * L, next_rows, within, local, L, L, KIND)
        else:
            given = load_rows(dy, heads * P, rows, within, columns, P, BP, KIND)
        if DELTA:
            rows_k = load_rows(k, k_t, rows_of_k, length if KEYWISE else within, keys, N, BN, KIND)
            if AHEAD:
                rest = load_rows(rest_of, heads * L, rows, end, local, L, L, KIND)
                weights_of = turn((scores, rest))
                scores = weights_of[0]
            elif SCORED:
                if KEYWISE:
                    weights_of = load_terms(scores_of, heads * L, rows, within, local, L, L, KIND, ROW_TERMS)
                else:
                    weights_of = load_lower(scores_of + chunk * PITCH, local, L, KIND, ROW_TERMS)
                weights_of = turn(weights_of)
                scores = weights_of[0]
            else:
                scores = tl.dot(rows_k, tl.trans(rows_q), input_precision=PRECISION)
            carried = product((rows_k, rows_k), split(state, STATE_TERMS, KIND), 1, STATE_TERMS, PRECISION)
            if DECAY:
                carried *= suffix_of(scalars, plane, rows)[:, None]
            if not SCORED:
                scores = tl.where(causal, scores, 0.0)
            if READ_SCALED and not DECAY:
                if AHEAD:
                    scores = scores.to(tl.float32) + weights_of[1].to(tl.float32)
                scores *= tl.load(scalars + READ * plane + rows)[None, :]
            if not (SCORED and DECAY) and (READ_SCALED or not AHEAD):
                weights_of = split(scores, ROW_TERMS, KIND)
            carried = product(weights_of, (given, given), ROW_TERMS, 1, PRECISION, carried)
            inverse = turn(load_lower(solve + chunk * PITCH, local, L, KIND, RIGHT_TERMS))
            right = split(carried, RIGHT_TERMS, KIND)
            adjoint = product(inverse, right, RIGHT_TERMS, RIGHT_TERMS, PRECISION, carried)
            if values is not None:
                grad_v = adjoint
                if SOURCE_WANTED:
                    of_source = tl.sum(adjoint * load_rows(v, v_t, rows, within, columns, P, BP, tl.float32), axis=1)
                    of_source = turned(of_source, scalars, plane, rows, DECAY)
                    tl.store(ds + rows.to(tl.int64) * heads, of_source, mask=rows < end)
                if SCALED:
                    grad_v = adjoint * tl.load(scalars + SOURCE * plane + rows)[:, None]
                store_rows(dv, heads * P, rows, within, columns, P, BP, grad_v)
            if STATES:
                kept = split(adjoint, KEPT_TERMS, KIND, STATE_TERMS == 1)
                if KEYWISE:
                    store_terms(adjoint_entries, heads * P * KEPT_TERMS, rows, within, columns, P, BP, kept, KEPT_TERMS)
                else:
                    at = adjoint_entries + (of_walked + chunk) * L * P * KEPT_TERMS
                    store_terms(at, P * KEPT_TERMS, local, None, columns, P, BP, kept, KEPT_TERMS)
            adjoint *= -tl.load(scalars + (PREFIX_ERASE if DECAY else ERASE) * plane + rows)[:, None]
        read = given, given
        if READ_SCALED or DECAY:
            scale = read_scale(scalars, plane, rows, DECAY, READ_SCALED, DELTA)
            if DELTA:
                read = split(given.to(tl.float32) * scale[:, None], GIVEN_TERMS, KIND)
            else:
                exact = given.to(tl.float32) * scale[:, None]
                main = first_term(exact, GIVEN_TERMS)
                given = main.to(KIND)
        if DECAY:
            state *= total_of(scalars, plane, chunk * L + shift)
        if KEYWISE:
            if DELTA:
                rows_k = load_rows(erased, k_t, rows_of_k, length if KEYWISE else within, keys, N, BN, KIND)
            state *= tl.exp2(last_running(running, lane, length, chunk, keys, N, L))[:, None]
        rows_q = tl.trans(rows_q)
        if DELTA:
            state = product((rows_q, rows_q), read, 1, GIVEN_TERMS, PRECISION, state)
        else:
            state += tl.dot(rows_q, given, input_precision=PRECISION)
            if KEY_TERMS == 2:
                rest = tl.trans(load_rows(rest_of, q_t, rows_of_k, length if KEYWISE else within, keys, N, BN, KIND))
                state += tl.dot(rest, given, input_precision=PRECISION)
            if GIVEN_TERMS == 2:
                state += tl.dot(rows_q, (exact - main).to(KIND), input_precision=PRECISION)
        if DELTA:
            rows_k = tl.trans(rows_k)
            erasing = split(adjoint, ADJOINT_TERMS, KIND)
            state = product((rows_k, rows_k), erasing, 1, ADJOINT_TERMS, PRECISION, state)
    if FINAL:
        tl.store(final + ends + place, state, mask=inside)


@triton.jit(do_not_specialize=["pieces", "per_piece", "base", "limit"])
def both_walks(
    forward, forward_rows, reverse, values, reverse_rows,
    tokens, heads: tl.constexpr, pieces, per_piece, base, limit, length, plane,
    N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, L: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, SCALED: tl.constexpr, READ_SCALED: tl.constexpr, SCORED: tl.constexpr,
    PITCH: tl.constexpr, FIRST: tl.constexpr, START: tl.constexpr, SOURCE_WANTED: tl.constexpr, WHOLE: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, TERMS: tl.constexpr, STATE_TERMS: tl.constexpr,
    RIGHT_TERMS: tl.constexpr, ADJOINT_TERMS: tl.constexpr, STAGES: tl.constexpr, REVERSE_STAGES: tl.constexpr,
):  # fmt: skip
    """Of scalar decays or none: adjoint states of chunks base to limit, and beside them their first states from known
    ones; with the delta rule also e and its adjoint.

    In pieces of per_piece chunks. forward, reverse: pointers as the two walks take them; *_rows: strides. FIRST, START:
    theirs.
    """
    if tl.program_id(2) < pieces:
        reverse_walk(
            *reverse, values, None, tokens, heads, pieces, per_piece, base, limit, length, plane, *reverse_rows,
            N, P, BN, BP, L, DECAY, False, DELTA, SCALED, READ_SCALED, SCORED, PITCH, START, True, True,
            KIND, PRECISION, TERMS, STATE_TERMS, REVERSE_STAGES, False, 1, RIGHT_TERMS, WHOLE, ADJOINT_TERMS,
            SOURCE_WANTED,
        )  # fmt: skip
    else:
        forward_walk(
            *forward, tokens, heads, pieces, per_piece, base, limit, pieces, length, plane, *forward_rows,
            N, P, BN, BP, L, DECAY, False, DELTA, SCALED, READ_SCALED, SCORED, PITCH, 0, None, None,
            FIRST, False, True, False, False, KIND, PRECISION, TERMS, STATE_TERMS, STAGES,
            False, 1, 1, False, STATE_TERMS, WHOLE, 1,
        )  # fmt: skip
