"""The adjoint of a fused scan with independent state entries: it processes one entry after the other.

A program of one warp handles BP channels of one head and one segment of time. K tokens are in registers, as a tuple of
tiles [1, 1, BP]. A loop over the state entries walks these tokens forward and backward, so states stay in registers,
and whatever has no Key axis is computed once for all entries. Each entry has a row of numbers (rows.py), in shared
memory where there is room (table.shared_states): the rows of all programs do not fit the L2, and loading a row one
entry ahead does not help, because ptxas delays loads to save registers. The printed holes are `setup`, `step` and
`finish` (dsf.kernels.triton.scan.tiles) and these; *held* are values computed from Params alone:

    plain, plain_back(args, at) -> the inputs without a Key axis, of one token or of K
    runs, runs_back(args, at, L) -> Key inputs of one entry: L tokens in every lane, or a token a lane (lanes.py)
    spread(run, L) -> the L tokens of runs_back as separate values
    whole(args, tokens, at) -> a token's inputs with both axes
    parted(held) -> (held values with a Key axis, those without)    merge(keyed, loose) -> the held values, in order
    moved(tokens, held, A, B, state, at) -> the state after a token; A, B: of `step`
    passed(tokens, held, A, dB, at) -> the cotangent of the state before a token; dB: of the state after it
    entry(tokens, held, grads, dA, dB, dC, dA_A, state, at) -> a token's terms of sums over entries, of sums over
        channels, and of Params' sums; state: before the token
    keys_added(grads, values, at) -> L tokens' terms partly summed over channels, without waiting for other lanes
    keys_stored(grads, places, sums, ok, sink, L, BP): finishes and stores these sums -> the next entry's addresses
    keys_at(grads, at, sink, L, BP) -> the first entry's addresses, and zeros for such sums
    after(tokens, held, found, dE, dD, at) -> gradients of a token's inputs without a Key axis, and Params' terms
    puts(grads, values, at, sink): stores these gradients of L tokens
    blank(BP) -> zeros for the sums over entries, for Params' sums of an entry, and for those without a Key axis
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton import lanes
from dsf.kernels.triton.scan.adjoint import Pull
from dsf.kernels.triton.scan.forward import token
from dsf.kernels.triton.scan.rows import (
    Kept,
    advance,
    all_at,
    apart,
    begin,
    entry_of,
    existing,
    in_turn,
    numbers_of,
    plus,
    shelf_of,
    shelve,
    together,
)
from dsf.kernels.triton.scan.tiles import entered, given_offset, packed_ends, place_of, program, row_of
from dsf.kernels.triton.tile import fixed, in_order, tokens_of


@triton.jit
def walk_entry(x, tokens, held, run, state, at, t0, end, n, holes: tl.constexpr, shape: tl.constexpr):
    """The states of an entry before and after each of K tokens, and each token's (A, C, E)."""
    states = (state,)
    steps = ()
    for i in tl.static_range(shape.K):
        here = place_of(at, t0, n, i, end)
        one = token(x.args, tokens, run, here, i, holes)
        a, b, c, e, d = holes.step(one, held, here)
        then = holes.moved(one, held, a, b, entered(state, one, here, holes), here)
        state = tl.where(here.t_ok, then, state) if shape.MASKED else then
        states = states + (state,)  # type: ignore[assignment]  # noqa: RUF005
        steps = steps + ((a, c, e),)  # type: ignore[assignment]  # noqa: RUF005
    return states, steps


@triton.jit
def pull_entry(
    x, tokens, held, run, states, steps, dd, cotangent, totals, at, t0, end, n, holes: tl.constexpr,
    shape: tl.constexpr,
):  # fmt: skip
    """K tokens of an entry, from the last to the first.

    totals: (sums over entries, Σ C S) of every token so far, and the Params' sums. Returns the state's cotangent before
    the tokens, the new totals, and every token's terms of sums over channels.
    """
    found, read, summed = totals
    adds = ()
    reads = ()
    values = ()
    MASKED: tl.constexpr = shape.MASKED
    for i in tl.static_range(shape.K - 1, -1, -1):
        here = place_of(at, t0, n, i, end)
        a, c, e = steps[i]
        scaled = e * dd[i]
        (written,) = existing((c * scaled,), here.t_ok, MASKED)
        if x.given.states is not None:
            to, last = packed_ends(x.given.ends, here)
            cotangent += tl.load(x.given.states + to, mask=last & at.p_ok, other=0.0)
        one = token(x.args, tokens, run, here, i, holes)
        before = entered(states[i], one, here, holes)
        if shape.BEFORE:
            seen = before
            g = cotangent
        else:
            seen = states[i + 1]
            g = cotangent + written
        cotangent = holes.passed(one, held, a, g, here)
        if MASKED:
            cotangent = tl.where(here.t_ok, cotangent, g)
        if shape.BEFORE:
            cotangent += written
        cotangent = entered(cotangent, one, here, holes)
        if MASKED:
            g = tl.where(here.t_ok, g, 0.0)
        terms, value, sums = holes.entry(
            one, held, x.grads, g * before, g, seen * scaled, a * g * before, before, here
        )  # fmt: skip
        adds = (plus(found[i], terms),) + adds  # type: ignore[assignment]  # noqa: RUF005
        reads = (read[i] + c * seen,) + reads  # type: ignore[assignment]  # noqa: RUF005
        values = (existing(value, here.t_ok, MASKED),) + values  # type: ignore[assignment]  # noqa: RUF005
        summed = plus(summed, existing(sums, here.t_ok, MASKED))
    return cotangent, (adds, reads, summed), values


@triton.jit
def pull_run(x, at, t0, end, kept, place, loose, holes: tl.constexpr, shape: tl.constexpr):
    """K tokens of all entries, from the last to the first.

    place: the position in every row of the state before the tokens. The cotangents in the rows become those before the
    tokens. end: None where all tokens exist. Returns the Params' sums without a Key axis: `loose` plus these tokens'.
    """
    K: tl.constexpr = shape.K
    BP: tl.constexpr = shape.BP
    row = kept.rows
    shelf = kept.shelf
    here = all_at(at, t0, end, K)
    tokens = apart(holes.plain_back(x.args, here), K)
    outer = fixed(x.given.dy + given_offset(here) + at.p, here.t * (at.H * at.P))
    dd = tokens_of(tl.load(outer, mask=here.t_ok & at.p_ok, other=0.0).to(tl.float32))
    found = ()
    read = ()
    for _ in tl.static_range(K):
        found = found + (holes.blank(BP)[0],)  # type: ignore[assignment]  # noqa: RUF005
        read = read + (tl.zeros((1, 1, BP), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    if shape.SHARED:
        shelve(x, at, t0, kept, holes, shape)
        shelf = shelf_of(kept, shape)
    else:
        ahead = entry_of(x, at, t0, row, shelf, place, 0, holes, shape, True)
    places, sums = holes.keys_at(x.grads, place_of(at, t0, -1), x.sink, K, BP)
    for n in range(shape.N):
        places = holes.keys_stored(x.grads, places, sums, n > 0, x.sink, K, BP)  # of the turn before, now complete
        mine = row
        row = lanes.behind(row, shape.ROW * BP, shape.SHARED)
        if shape.SHARED:
            keyed, state, run, cotangent, summed = entry_of(x, at, t0, mine, shelf, place, n, holes, shape, True)
        else:
            keyed, state, run, cotangent, summed = ahead
            ahead = entry_of(x, at, t0, row, shelf, place, tl.minimum(n + 1, shape.N - 1), holes, shape, True)
            run = holes.spread(run, K)
        held = holes.merge(keyed, x.held)
        states, steps = walk_entry(x, tokens, held, run, state, at, t0, end, n, holes, shape)
        cotangent, totals, values = pull_entry(
            x, tokens, held, run, states, steps, dd, cotangent, (found, read, summed), at, t0, end, n, holes, shape
        )
        found, read, summed = totals
        lanes.put(mine, 0, cotangent, BP, shape.SHARED)
        for j in tl.static_range(shape.KEYED):
            lanes.put(mine, 1 + j, summed[j], BP, shape.SHARED)
        across = ()
        for j in tl.static_range(len(run)):
            across = across + (in_turn(values, j, K),)  # type: ignore[assignment]  # noqa: RUF005
        sums = holes.keys_added(x.grads, across, place_of(at, t0, n, 0, end))
    holes.keys_stored(x.grads, places, sums, True, x.sink, K, BP)
    tl.debug_barrier()
    held = holes.merge(holes.blank(BP)[1], x.held)
    stored = ()
    for k in tl.static_range(K):
        there = place_of(at, t0, 0, k, end)
        value, terms = holes.after(tokens[k], held, found[k], dd[k] * read[k], dd[k], there)
        stored = stored + (existing(value, there.t_ok, shape.MASKED),)  # type: ignore[assignment]  # noqa: RUF005
        loose = plus(loose, existing(terms, there.t_ok, shape.MASKED))
    holes.puts(x.grads, together(stored), here, x.sink)
    return loose


@triton.jit
def pull_group(x, before, left, at, c0, end, kept, loose, holes: tl.constexpr, shape: tl.constexpr):
    """M tokens from c0 on, from the last to the first.

    before: the stored states before them; left: scratch for states between runs of K tokens, or None.
    """
    STATES: tl.constexpr = shape.STATES
    c1 = tl.minimum(c0 + shape.M, end)
    t0 = row_of(at) * 0 + c0
    count = tl.cdiv(c1 - c0, shape.K)
    skip = (tl.cdiv(count, shape.S) - 1) * shape.S
    begin(before, at.P, at.p_ok, kept.rows, STATES, shape)
    tl.debug_barrier()
    for j in range(count - 1):
        advance(
            x, at, t0 + j * shape.K, kept, STATES + tl.maximum(j - skip, 0), STATES + tl.maximum(j + 1 - skip, 0),
            None if left is None else left + j * (shape.N * shape.BP), j + 1 < skip, holes, shape,
        )  # fmt: skip
    for turn in range(tl.cdiv(count, shape.S)):
        if left is not None:
            for j in range(tl.minimum(turn, 1) * shape.S):  # not in the first turn
                if skip + j == shape.S:
                    begin(before, at.P, at.p_ok, kept.rows, STATES, shape)
                else:
                    other = left + (skip + j - shape.S - 1) * (shape.N * shape.BP)
                    begin(other, shape.BP, True, kept.rows, STATES + j, shape)
            skip -= tl.minimum(turn, 1) * shape.S
            tl.debug_barrier()
        slots = tl.minimum(count - skip, shape.S)
        for j in range(slots):
            last = slots - 1 - j
            bound = end if shape.MASKED else None
            skip = skip  # Triton 3.4 cannot carry empty tuples alone, such as `loose` may be
            loose = pull_run(x, at, t0 + (skip + last) * shape.K, bound, kept, STATES + last, loose, holes, shape)
    return loose


@triton.jit(do_not_specialize=["T", "span", "low", "high", "rows", "each"])
def entry_gradients(
    args, grads, given, room, T, H, P, segments, span, low, high, rows, each, holes: tl.constexpr,
    shape: tl.constexpr,
):  # fmt: skip
    """Gradients of the tokens in groups `low` to `high` (M tokens each) of every segment; at low = 0 also of Params.

    room.totals: [programs, KEYED N + LOOSE, BP], Params' sums with a Key axis and those without; zeros before the first
    launch. Gradients of Key inputs are summed over the program's channels into buffers [blocks, B, H, N, rows] with
    `rows` tokens a batch row and `each` a segment.
    """
    N: tl.constexpr = shape.N
    BP: tl.constexpr = shape.BP
    KEYED: tl.constexpr = shape.KEYED
    lane = tl.multiple_of(tl.arange(0, BP)[None, None, :], [1, 1, shape.V])
    at, segment = program(T, H, P, segments, shape, lane=lane)
    number = tl.program_id(0).to(tl.int64)
    first = segment * span
    end = tl.minimum(first + span, T)
    row = row_of(at)
    spot = room.cotangents + (row * segments + segment) * (N * P) + at.p
    spare = room.scratch + number * (((0 if shape.SHARED else N + shape.U) * shape.ROW + shape.LEFT * N) * BP) + lane
    if shape.SHARED:
        floor = lanes.claim(tl.program_id(1), N * shape.ROW * BP + shape.KEYS * N * shape.K)
        kept = Kept(floor + lane * 4, floor + N * shape.ROW * BP * 4 + lane * 0)
    else:
        kept = Kept(spare + shape.LEFT * N * BP, spare + shape.LEFT * N * BP)
    totals = room.totals + number * ((KEYED * N + shape.LOOSE) * BP)
    start = number * 0 + first
    for n in range(N):
        here = lanes.behind(kept.rows, n * (shape.ROW * BP), shape.SHARED)
        keyed, alone = holes.parted(holes.setup(args, place_of(at, start, n)))
        lanes.put(here, 0, tl.load(in_order(spot + n * P), mask=at.p_ok, other=0.0), BP, shape.SHARED)
        for k in tl.static_range(KEYED):
            lanes.put(here, 1 + k, tl.load(in_order(totals + (k * N + n) * BP + lane)), BP, shape.SHARED)
            lanes.put(here, 1 + KEYED + k, keyed[k], BP, shape.SHARED)
    if not shape.SHARED:  # what loads ahead read behind the last row
        for j in range(N * shape.ROW, (N + shape.U) * shape.ROW):
            lanes.put(kept.rows, j, tl.zeros((1, 1, BP), tl.float32), BP, False)
    keyed, alone = holes.parted(holes.setup(args, place_of(at, start, 0)))
    x = Pull(args, grads, given, alone, (rows, number * 0 + segment * each - first - low * shape.M))
    loose = ()
    for i in tl.static_range(shape.LOOSE):
        before = tl.load(in_order(totals + (KEYED * N + i) * BP + lane))
        loose = loose + (holes.blank(BP)[2][i] + before,)  # type: ignore[assignment]  # noqa: RUF005
    tl.debug_barrier()
    groups = tl.minimum(high, tl.cdiv(end - first, shape.M))
    for back in range(groups - low):
        c0 = first + (groups - 1 - back) * shape.M
        groups = groups  # as in pull_group
        entering = room.saved + (row * tl.cdiv(T, shape.M) + c0 // shape.M) * (N * P) + at.p
        loose = pull_group(x, entering, spare if shape.LEFT > 0 else None, at, c0, end, kept, loose, holes, shape)
    for i in tl.static_range(shape.LOOSE):
        tl.store(in_order(totals + (KEYED * N + i) * BP + lane), tl.broadcast_to(loose[i], (1, 1, BP)))
    for n in range(N):
        here = lanes.behind(kept.rows, n * (shape.ROW * BP), shape.SHARED)
        tl.store(in_order(spot + n * P), lanes.get(here, 0, BP, shape.SHARED), mask=at.p_ok)
        sums = numbers_of(here, 1, shape)
        if low == 0:
            holes.finish(args, grads, holes.merge(sums, loose), segment, segments, place_of(at, start, n))
        else:
            for k in tl.static_range(KEYED):
                tl.store(in_order(totals + (k * N + n) * BP + lane), sums[k])
