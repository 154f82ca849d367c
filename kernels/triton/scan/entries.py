"""The adjoint of a fused scan whose state entries need nothing of each other: one entry after the other.

A program of one warp owns BP channels of one head and one segment of time. L tokens lie in registers, a tuple of
tiles [1, 1, BP]; a loop over the state entries walks them forward and backward, so that states never leave the
registers, and what has no Key axis is computed once for all entries. What an entry needs of its own waits in shared
memory where there is room (scan_table.shared_states): the L2 has none for that of all programs, and what is asked for
an entry ahead comes too late, because ptxas moves loads down to save registers. Besides `setup`, `step` and `finish`
(dsf.kernels.triton.scan.walk) the printed holes are (the first two with _back after their names)

    plain(args, at) -> tokens' inputs without a Key axis
    runs(args, at, L) -> L tokens of one entry (lanes.load_lanes), or of a tile of entries with a token a lane
    spread(run, L) -> these tokens apart    parted(held) -> (what has a Key axis, what has none) of what Params make
    whole(args, tokens, at) -> a token's inputs of both axes     merge(keyed, loose) -> what is held, in order
    moved(tokens, held, A, B, state, at) -> the state after a token; A, B: of `step`
    passed(tokens, held, A, dB, at) -> the cotangent of the state before it; dB: of the state after it
    entry(tokens, held, grads, dA, dB, dC, dA_A, state, at) -> a token's terms of sums over the entries, of sums over
        channels, and of Params' sums; state: before it
    keys_added(grads, values, at) -> L tokens' terms summed over the channels, as far as takes no waiting
    keys_stored(grads, places, sums, ok, sink, L, BP): stores them -> the next entry's places
    keys_at(grads, at, sink, L, BP) -> an entry's places, and zeros in the form of such sums
    after(tokens, held, found, dE, dD, at) -> gradients of a token's inputs without a Key axis, and Params' terms
    puts(grads, values, at, sink): stores L tokens' gradients
    blank(BP) -> zeros for the sums over entries, Params' sums of an entry, and those without
"""

import triton
import triton.language as tl

from dsf.kernels.triton import lanes
from dsf.kernels.triton.scan.forward import token
from dsf.kernels.triton.scan.walk import _program, packed_ends
from dsf.kernels.triton.tile import fixed, in_order, tile_of, tokens_of


@triton.jit
def _at(tile, t0, end, i: tl.constexpr, n, N: tl.constexpr, BP: tl.constexpr, MASKED: tl.constexpr):
    """What the holes know of token i after t0, and of one entry."""
    i_b, i_h, p, p_ok, place, T, H, P = tile
    zero = tl.zeros((1, 1, 1), tl.int32)
    t = zero.to(tl.int64) + i  # with 64 bits its product with a stride is one instruction
    t_ok = t0 + t < end if MASKED else zero == 0
    return (i_b, i_h, t0, t, n + zero, p, t_ok, zero == 0, p_ok, place, place * BP, T, H, P, N)


@triton.jit
def _all_at(tile, t0, end, N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr, MASKED: tl.constexpr):
    """What the holes know of L tokens."""
    i_b, i_h, p, p_ok, place, T, H, P = tile
    t = tl.arange(0, L)[:, None, None]
    zero = tl.zeros((1, 1, 1), tl.int32)
    t_ok = t0 + t < end if MASKED else t >= 0
    return (i_b, i_h, t0, t.to(tl.int64), zero, p, t_ok, zero == 0, p_ok, place, place * BP, T, H, P, N)


@triton.jit
def _apart(tiles, L: tl.constexpr):
    """A tuple of tiles, as a tuple of every token's."""
    columns = ()
    for j in tl.static_range(len(tiles)):
        columns = columns + (tokens_of(tiles[j]),)  # type: ignore[assignment]  # noqa: RUF005
    found = ()
    for i in tl.static_range(L):
        found = found + (_in_turn(columns, i, len(tiles)),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _together(tokens):
    """A tuple of every token's, as a tuple of tiles."""
    found = ()
    for j in tl.static_range(len(tokens[0])):
        found = found + (tile_of(_in_turn(tokens, j, len(tokens))),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _shelve(args, tile, t0, end, shelf, runs: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr):
    """Put the Key inputs of L tokens and all entries on the shelf, in order: input, entry, token."""
    lane = tl.arange(0, BP)[None, None, :]
    for i in tl.static_range(N * L // BP):
        found = runs(args, _at(tile, t0, end, 0, i * (BP // L) + lane // L, N, BP, False), L)
        for j in tl.static_range(len(found)):
            lanes.put(lanes.behind(shelf, lane, True), j * (N * L // BP) + i, found[j], BP, True)
    tl.debug_barrier()


@triton.jit
def _numbers(row, FIRST: tl.constexpr, COUNT: tl.constexpr, BP: tl.constexpr, SHARED: tl.constexpr):
    """COUNT numbers a channel of an entry's row."""
    found = ()
    for j in tl.static_range(COUNT):
        found = found + (lanes.get(row, FIRST + j, BP, SHARED),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _entry(
    args, tile, t0, end, row, shelf, place, n, runs: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr,
    KEYED: tl.constexpr, KEYS: tl.constexpr, SHARED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Of entry n: what Params make, the state, L tokens of Key inputs, BACK: the cotangent and the Params' sums."""
    run = ()
    if SHARED:
        for i in tl.static_range(KEYS):
            run = run + (lanes.from_shelf(shelf, (i * N + n) * L, L),)  # type: ignore[assignment]  # noqa: RUF005
    else:
        run = runs(args, _at(tile, t0, end, 0, n, N, BP, False), L)
    found = (_numbers(row, 1 + KEYED, KEYED, BP, SHARED), lanes.get(row, place, BP, SHARED), run)
    if BACK:
        found = found + (lanes.get(row, 0, BP, SHARED), _numbers(row, 1, KEYED, BP, SHARED))  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _entries(
    args, tile, t0, end, row, shelf, place, n, runs: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr,
    KEYED: tl.constexpr, KEYS: tl.constexpr, ROW: tl.constexpr, SHARED: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """U of _entry, from n on."""
    found = ()
    for u in tl.static_range(U):
        m = tl.minimum(n + u, N - 1)
        here = lanes.behind(row, u * ROW * BP, SHARED)
        one = _entry(args, tile, t0, end, here, shelf, place, m, runs, N, L, BP, KEYED, KEYS, SHARED, False)
        found = found + (one,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def advance(
    args, tile, t0, end, room, shelf, place, then, left, kept, loose, plain: tl.constexpr, runs: tl.constexpr,
    spread: tl.constexpr, whole: tl.constexpr, merge: tl.constexpr, step: tl.constexpr, moved: tl.constexpr,
    N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr, KEYED: tl.constexpr, KEYS: tl.constexpr, ROW: tl.constexpr,
    SHARED: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """From the states before L tokens, `place` of every entry's row, to those after them, `then` of it.

    Where they are to be `kept`, they are also stored to `left` [N, BP]. U entries at a time, none of which waits.
    """
    tokens = _apart(plain(args, _all_at(tile, t0, end, N, L, BP, False)), L)
    if SHARED:
        _shelve(args, tile, t0, end, shelf, runs, N, L, BP)
        shelf = lanes.apart(room) + N * ROW * BP * 4
    else:
        ahead = _entries(args, tile, t0, end, room, shelf, place, 0, runs, N, L, BP, KEYED, KEYS, ROW, False, U)
    for n in tl.range(0, N, U):
        first = room
        room = lanes.behind(room, U * ROW * BP, SHARED)
        if SHARED:
            now = _entries(args, tile, t0, end, first, shelf, place, n, runs, N, L, BP, KEYED, KEYS, ROW, True, U)
        else:
            now = ahead
            ahead = _entries(args, tile, t0, end, room, shelf, place, n + U, runs, N, L, BP, KEYED, KEYS, ROW, False, U)
        for u in tl.static_range(U):
            keyed, state, run = now[u]
            held = merge(keyed, loose)
            if not SHARED:
                run = spread(run, L)
            for i in tl.static_range(L):
                here = _at(tile, t0, end, i, n + u, N, BP, False)
                one = token(args, tokens, run, here, i, whole)
                a, b, c, e, d = step(one, held, here)
                state = moved(one, held, a, b, state, here)
            lanes.put(lanes.behind(first, u * ROW * BP, SHARED), then, state, BP, SHARED)
            if left is not None:
                tl.store(in_order(left + (n + u) * BP), tl.broadcast_to(state, (1, 1, BP)), mask=kept)
    tl.debug_barrier()


@triton.jit
def _plus(sums, terms):
    """Two tuples, added."""
    found = ()
    for i in tl.static_range(len(terms)):
        found = found + (sums[i] + terms[i],)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _existing(values, ok, MASKED: tl.constexpr):
    """A tuple of tiles, zeros where MASKED says that the token may lie past the end and ok that it does.

    What lies there is computed from zeros, so it may be infinite or NaN, and 0 · NaN is not 0: all that is added to
    other tokens' (Params' sums, and sums by tensor cores, which multiply all tokens of a run by 0 or 1) goes through
    here.
    """
    found = ()
    for i in tl.static_range(len(values)):
        found = found + (tl.where(ok, values[i], 0.0) if MASKED else values[i],)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _in_turn(terms, j: tl.constexpr, COUNT: tl.constexpr):
    """Number j of each of COUNT tuples (given, because Triton takes tuples of as many tensors for one type)."""
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (terms[i][j],)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _begin(
    first, step, p_ok, room, place, N: tl.constexpr, U: tl.constexpr, BP: tl.constexpr, ROW: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Bring every entry's state into its row; in memory they lie `step` apart."""
    for n in range(0, N, U):
        states = ()
        for u in tl.static_range(U):
            states = states + (tl.load(in_order(first + (n + u) * step), mask=p_ok, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        for u in tl.static_range(U):
            lanes.put(lanes.behind(room, (n + u) * (ROW * BP), SHARED), place, states[u], BP, SHARED)


@triton.jit
def pull_run(
    args, grads, dy, ends, arriving, tile, t0, end, room, shelf, place, sink, alone, loose,
    plain: tl.constexpr, runs: tl.constexpr, spread: tl.constexpr, whole: tl.constexpr, merge: tl.constexpr,
    step: tl.constexpr, moved: tl.constexpr, passed: tl.constexpr, entry: tl.constexpr, keys_at: tl.constexpr,
    keys_added: tl.constexpr, keys_stored: tl.constexpr, after: tl.constexpr, puts: tl.constexpr, blank: tl.constexpr,
    N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr, KEYED: tl.constexpr, KEYS: tl.constexpr, ROW: tl.constexpr,
    SHARED: tl.constexpr, BEFORE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """L tokens backwards, from the states before them, `place` of every row; cotangents in the rows become earlier."""
    i_b, i_h, p, p_ok, block, T, H, P = tile
    all_at = _all_at(tile, t0, end, N, L, BP, MASKED)
    tokens = _apart(plain(args, all_at), L)
    outer = fixed(dy + ((i_b * T + t0) * H + i_h) * P + p, all_at[3] * (H * P))
    dd = tokens_of(tl.load(outer, mask=all_at[6] & p_ok, other=0.0).to(tl.float32))
    found = ()
    read = ()
    for _ in tl.static_range(L):
        found = found + (blank(BP)[0],)  # type: ignore[assignment]  # noqa: RUF005
        read = read + (tl.zeros((1, 1, BP), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    if SHARED:
        _shelve(args, tile, t0, end, shelf, runs, N, L, BP)
        shelf = lanes.apart(room) + N * ROW * BP * 4
    else:
        ahead = _entry(args, tile, t0, end, room, shelf, place, 0, runs, N, L, BP, KEYED, KEYS, False, True)
    places, sums = keys_at(grads, _at(tile, t0, end, 0, -1, N, BP, False), sink, L, BP)
    for n in range(N):
        places = keys_stored(grads, places, sums, n > 0, sink, L, BP)  # of the last turn: its sums wait no more
        row = room
        room = lanes.behind(room, ROW * BP, SHARED)
        if SHARED:
            keyed, state, run, cotangent, summed = _entry(
                args, tile, t0, end, row, shelf, place, n, runs, N, L, BP, KEYED, KEYS, True, True
            )  # fmt: skip
        else:
            keyed, state, run, cotangent, summed = ahead
            later = tl.minimum(n + 1, N - 1)
            ahead = _entry(args, tile, t0, end, room, shelf, place, later, runs, N, L, BP, KEYED, KEYS, False, True)
            run = spread(run, L)
        held = merge(keyed, alone)
        states = (state,)
        steps = ()
        for i in tl.static_range(L):
            here = _at(tile, t0, end, i, n, N, BP, MASKED)
            one = token(args, tokens, run, here, i, whole)
            a, b, c, e, d = step(one, held, here)
            then = moved(one, held, a, b, state, here)
            state = tl.where(here[6], then, state) if MASKED else then
            states = states + (state,)  # type: ignore[assignment]  # noqa: RUF005
            steps = steps + ((a, c, e),)  # type: ignore[assignment]  # noqa: RUF005
        adds = ()
        reads = ()
        values = ()
        for i in tl.static_range(L - 1, -1, -1):
            here = _at(tile, t0, end, i, n, N, BP, MASKED)
            a, c, e = steps[i]
            scaled = e * dd[i]
            (written,) = _existing((c * scaled,), here[6], MASKED)
            if arriving is not None:
                to, last = packed_ends(ends, t0, here[3], here[6], i_h, here[4], p, H, P, N)
                cotangent += tl.load(arriving + to, mask=last & p_ok, other=0.0)
            one = token(args, tokens, run, here, i, whole)
            if BEFORE:
                seen = states[i]
                g = cotangent
            else:
                seen = states[i + 1]
                g = cotangent + written
            cotangent = passed(one, held, a, g, here)
            if MASKED:
                cotangent = tl.where(here[6], cotangent, g)
            if BEFORE:
                cotangent += written
            if MASKED:
                g = tl.where(here[6], g, 0.0)
            terms, value, sums = entry(
                one, held, grads, g * states[i], g, seen * scaled, a * g * states[i], states[i], here
            )  # fmt: skip
            adds = (_plus(found[i], terms),) + adds  # type: ignore[assignment]  # noqa: RUF005
            reads = (read[i] + c * seen,) + reads  # type: ignore[assignment]  # noqa: RUF005
            values = (_existing(value, here[6], MASKED),) + values  # type: ignore[assignment]  # noqa: RUF005
            summed = _plus(summed, _existing(sums, here[6], MASKED))
        found = adds
        read = reads
        lanes.put(row, 0, cotangent, BP, SHARED)
        for j in tl.static_range(KEYED):
            lanes.put(row, 1 + j, summed[j], BP, SHARED)
        across = ()
        for j in tl.static_range(len(run)):
            across = across + (_in_turn(values, j, L),)  # type: ignore[assignment]  # noqa: RUF005
        sums = keys_added(grads, across, here)
    keys_stored(grads, places, sums, True, sink, L, BP)
    tl.debug_barrier()
    held = merge(blank(BP)[1], alone)
    stored = ()
    for k in tl.static_range(L):
        there = _at(tile, t0, end, k, 0, N, BP, MASKED)
        value, terms = after(tokens[k], held, found[k], dd[k] * read[k], dd[k], there)
        stored = stored + (_existing(value, there[6], MASKED),)  # type: ignore[assignment]  # noqa: RUF005
        loose = _plus(loose, _existing(terms, there[6], MASKED))
    puts(grads, _together(stored), all_at, sink)
    return loose


@triton.jit(do_not_specialize=["T", "span", "low", "high", "rows", "each"])
def entry_gradients(
    args, grads, dy, ends, arriving, saved, cotangents, totals, scratch, T, H, P, segments, span, low, high, rows, each,
    setup: tl.constexpr, plain: tl.constexpr, runs: tl.constexpr, spread: tl.constexpr, whole: tl.constexpr,
    step: tl.constexpr, moved: tl.constexpr, passed: tl.constexpr, parted: tl.constexpr, merge: tl.constexpr,
    entry: tl.constexpr, keys_at: tl.constexpr, keys_added: tl.constexpr, keys_stored: tl.constexpr,
    after: tl.constexpr, puts: tl.constexpr, blank: tl.constexpr, finish: tl.constexpr, N: tl.constexpr,
    L: tl.constexpr, BP: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr, BEFORE: tl.constexpr, M: tl.constexpr,
    LOOSE: tl.constexpr, KEYED: tl.constexpr, KEYS: tl.constexpr, S: tl.constexpr, SHARED: tl.constexpr,
    U: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Gradients of the tokens in groups `low` to `high` of M tokens of every segment; at low = 0 the Params' part.

    saved: the state before every M-th token, [B, H, ⌈T/M⌉, N, P]. cotangents: [B, H, segments, N, P], what reaches the
    end of group high - 1 of each segment, replaced by what reaches the start of `low`. totals: the Params' sums so far,
    zeros at first, [programs, KEYED N + LOOSE, BP]: those with a Key axis, and those without. MASKED: T is no multiple
    of L.

    An entry has a row: its cotangent, the Params' KEYED sums, KEYED numbers that Params make, and S states, those
    before runs of L tokens. Rows are SHARED in shared memory, and L tokens of all KEYS inputs of a Key axis alone on a
    shelf behind them; or else in scratch, with U rows more, so that what is loaded ahead is there. States before all
    other runs of a group lie in scratch: they are found in one walk through it, and fetched S at a time.

    Gradients of Key inputs are summed over the program's channels to buffers [blocks, B, H, N, rows], `rows` tokens a
    batch row, `each` a segment.
    """
    STATES: tl.constexpr = 1 + 2 * KEYED
    ROW: tl.constexpr = STATES + S
    LEFT: tl.constexpr = ((M // L + S - 1) // S - 1) * S
    place, segment, i_h, i_b = _program(P, segments, H, BP)
    program = tl.program_id(0).to(tl.int64)
    lane = tl.multiple_of(tl.arange(0, BP)[None, None, :], [1, 1, V])
    p = tl.multiple_of(place * BP + lane, [1, 1, V])
    p_ok = tl.full((1, 1, BP), True, tl.int1) if EVEN else p < P
    tile = (i_b, i_h, p, p_ok, place, T, H, P)
    begin = segment * span
    end = tl.minimum(begin + span, T)
    row = i_b * H + i_h
    spot = cotangents + (row * segments + segment) * (N * P) + p
    spare = scratch + program * (((0 if SHARED else N + U) * ROW + LEFT * N) * BP) + lane
    left = spare if LEFT > 0 else None
    if SHARED:
        floor = lanes.claim(tl.program_id(1), N * ROW * BP + KEYS * N * L)
        room = floor + lane * 4
        shelf = floor + N * ROW * BP * 4 + lane * 0
    else:
        room = spare + LEFT * N * BP
        shelf = room
    totals += program * ((KEYED * N + LOOSE) * BP)
    start = program * 0 + begin
    sink = (rows, program * 0 + segment * each - begin - low * M)
    for n in range(N):
        here = lanes.behind(room, n * (ROW * BP), SHARED)
        keyed, alone = parted(setup(args, _at(tile, start, end, 0, n, N, BP, False)))
        lanes.put(here, 0, tl.load(in_order(spot + n * P), mask=p_ok, other=0.0), BP, SHARED)
        for k in tl.static_range(KEYED):
            lanes.put(here, 1 + k, tl.load(in_order(totals + (k * N + n) * BP + lane)), BP, SHARED)
            lanes.put(here, 1 + KEYED + k, keyed[k], BP, SHARED)
    keyed, alone = parted(setup(args, _at(tile, start, end, 0, 0, N, BP, False)))
    loose = ()
    for i in tl.static_range(LOOSE):
        loose = loose + (blank(BP)[2][i] + tl.load(in_order(totals + (KEYED * N + i) * BP + lane)),)  # type: ignore[assignment]  # noqa: RUF005
    tl.debug_barrier()
    groups = tl.minimum(high, tl.cdiv(end - begin, M))
    for back in range(groups - low):
        c0 = begin + (groups - 1 - back) * M
        c1 = tl.minimum(c0 + M, end)
        t0 = program * 0 + c0
        count = tl.cdiv(c1 - c0, L)
        before = saved + (row * tl.cdiv(T, M) + c0 // M) * (N * P) + p
        skip = (tl.cdiv(count, S) - 1) * S
        _begin(before, P, p_ok, room, STATES, N, U, BP, ROW, SHARED)
        tl.debug_barrier()
        for j in range(count - 1):
            advance(
                args, tile, t0 + j * L, end, room, shelf, STATES + tl.maximum(j - skip, 0),
                STATES + tl.maximum(j + 1 - skip, 0), None if left is None else left + j * (N * BP), j + 1 < skip,
                alone, plain, runs, spread, whole, merge, step, moved, N, L, BP, KEYED, KEYS, ROW, SHARED, U,
            )  # fmt: skip
        for turn in range(tl.cdiv(count, S)):
            if LEFT > 0:
                for j in range(tl.minimum(turn, 1) * S):  # none in the first turn
                    if skip + j == S:
                        _begin(before, P, p_ok, room, STATES, N, U, BP, ROW, SHARED)
                    else:
                        other = left + (skip + j - S - 1) * (N * BP)
                        _begin(other, BP, True, room, STATES + j, N, U, BP, ROW, SHARED)
                skip -= tl.minimum(turn, 1) * S
                tl.debug_barrier()
            held = tl.minimum(count - skip, S)
            for j in range(held):
                last = held - 1 - j
                loose = pull_run(
                    args, grads, dy, ends, arriving, tile, t0 + (skip + last) * L, end, room, shelf,
                    STATES + last, sink, alone, loose, plain, runs, spread, whole, merge, step, moved, passed, entry,
                    keys_at, keys_added, keys_stored, after, puts, blank, N, L, BP, KEYED, KEYS, ROW, SHARED, BEFORE,
                    MASKED,
                )  # fmt: skip
    for i in tl.static_range(LOOSE):
        tl.store(in_order(totals + (KEYED * N + i) * BP + lane), tl.broadcast_to(loose[i], (1, 1, BP)))
    for n in range(N):
        here = lanes.behind(room, n * (ROW * BP), SHARED)
        tl.store(in_order(spot + n * P), lanes.get(here, 0, BP, SHARED), mask=p_ok)
        sums = _numbers(here, 1, KEYED, BP, SHARED)
        if low == 0:
            finish(args, grads, merge(sums, loose), segment, segments, _at(tile, start, end, 0, n, N, BP, False))
        else:
            for k in tl.static_range(KEYED):
                tl.store(in_order(totals + (k * N + n) * BP + lane), sums[k])
