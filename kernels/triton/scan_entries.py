"""The adjoint of a fused scan whose state entries need nothing of each other: one entry after the other.

A program of one warp owns BP channels of one head and one segment of time. L tokens lie in registers, a tuple of
tiles [1, 1, BP]; a loop over the state entries walks them forward and backward, so that states never leave the
registers, and what has no Key axis is computed once for all entries. Besides `setup`, `step` and `finish`
(dsf.kernels.triton.scan) the printed holes are (the first two with _back after their names)

    plain(args, at) -> tokens' inputs without a Key axis     runs(args, at, L) -> L tokens of one entry (fn.load_lanes)
    spread(run, L) -> these tokens apart    parted(held) -> (what has a Key axis, what has none) of what Params make
    whole(args, tokens, at) -> a token's inputs of both axes     merge(keyed, loose) -> what is held, in order
    entry(tokens, held, grads, dA, dB, dC, dA_A, at) -> a token's terms of sums over the entries, of sums over channels,
        and of Params' sums
    keys(grads, values, at, sink): sums L tokens' terms over channels and stores them
    after(tokens, held, found, dE, dD, at) -> gradients of a token's inputs without a Key axis, and Params' terms
    puts(grads, values, at, sink): stores L tokens' gradients
    blank(BP) -> zeros for the sums over entries, Params' sums of an entry, and those without
"""

import triton
import triton.language as tl

from dsf.kernels.triton.functions import fixed, in_order, tile_of, tokens_of
from dsf.kernels.triton.scan import _program, packed_ends
from dsf.kernels.triton.scan_forward import token


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
def advance(
    args, tile, t0, end, room, place, loose, plain: tl.constexpr, runs: tl.constexpr, spread: tl.constexpr,
    whole: tl.constexpr, merge: tl.constexpr, step: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr,
    KEYED: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """From the states before L tokens, `place` into every entry's row, to those after them, stored behind them."""
    tokens = _apart(plain(args, _all_at(tile, t0, end, N, L, BP, False)), L)
    at = _at(tile, t0, end, 0, 0, N, BP, False)
    ahead = (_kept(room, 1 + KEYED, KEYED, BP), tl.load(in_order(room + place)), runs(args, at, L))
    for n in tl.range(0, N, loop_unroll_factor=2 - N % 2):
        keyed, state, run = ahead
        held = merge(keyed, loose)
        at = _at(tile, t0, end, 0, tl.minimum(n + 1, N - 1), N, BP, False)
        then = room + place + BP
        room += ROW
        ahead = (_kept(room, 1 + KEYED, KEYED, BP), tl.load(in_order(room + place)), runs(args, at, L))
        run = spread(run, L)
        for i in tl.static_range(L):
            here = _at(tile, t0, end, i, n, N, BP, False)
            a, b, c, e, d = step(token(args, tokens, run, here, i, whole), held, here)
            state = a * state + b
        tl.store(in_order(then), tl.broadcast_to(state, (1, 1, BP)))
    tl.debug_barrier()


@triton.jit
def _kept(room, FIRST: tl.constexpr, COUNT: tl.constexpr, BP: tl.constexpr):
    """COUNT numbers a channel of an entry's row."""
    found = ()
    for j in tl.static_range(COUNT):
        found = found + (tl.load(in_order(room + (FIRST + j) * BP)),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _keep(room, values, FIRST: tl.constexpr, COUNT: tl.constexpr, BP: tl.constexpr):
    """Store COUNT numbers a channel to an entry's row."""
    for j in tl.static_range(COUNT):
        tl.store(in_order(room + (FIRST + j) * BP), tl.broadcast_to(values[j], (1, 1, BP)))


@triton.jit
def _plus(sums, terms):
    """Two tuples, added."""
    found = ()
    for i in tl.static_range(len(terms)):
        found = found + (sums[i] + terms[i],)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _in_turn(terms, j: tl.constexpr, COUNT: tl.constexpr):
    """Number j of each of COUNT tuples (given, because Triton takes tuples of as many tensors for one type)."""
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (terms[i][j],)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _entry_ahead(
    args, tile, t0, end, room, place, n, runs: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr,
    KEYED: tl.constexpr,
):  # fmt: skip
    """What entry n needs from memory, on its way while the entry before it is computed."""
    at = _at(tile, t0, end, 0, n, N, BP, False)
    state = tl.load(in_order(room + place))
    cotangent = tl.load(in_order(room))
    kept = _kept(room, 1 + KEYED, KEYED, BP)
    return kept, state, cotangent, _kept(room, 1, KEYED, BP), runs(args, at, L)


@triton.jit
def pull_run(
    args, grads, dy, ends, arriving, tile, t0, end, room, place, sink, alone, loose,
    plain: tl.constexpr, runs: tl.constexpr, spread: tl.constexpr, whole: tl.constexpr, merge: tl.constexpr,
    step: tl.constexpr, entry: tl.constexpr, keys: tl.constexpr, after: tl.constexpr, puts: tl.constexpr,
    blank: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr, KEYED: tl.constexpr, ROW: tl.constexpr,
    BEFORE: tl.constexpr, MASKED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """L tokens backwards, from the states before them, `place` into the rows; cotangents in the rows become earlier."""
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
    ahead = _entry_ahead(args, tile, t0, end, room, place, 0, runs, N, L, BP, KEYED)
    for n in tl.range(0, N, loop_unroll_factor=UNROLL):
        first = _at(tile, t0, end, 0, n, N, BP, False)
        keyed, state, cotangent, summed, run = ahead
        held = merge(keyed, alone)
        room += ROW
        ahead = _entry_ahead(args, tile, t0, end, room, place, tl.minimum(n + 1, N - 1), runs, N, L, BP, KEYED)
        run = spread(run, L)
        states = (state,)
        steps = ()
        for i in tl.static_range(L):
            here = _at(tile, t0, end, i, n, N, BP, MASKED)
            a, b, c, e, d = step(token(args, tokens, run, here, i, whole), held, here)
            if MASKED:
                a = tl.where(here[6], a, 1.0)
                b = tl.where(here[6], b, 0.0)
            state = a * state + b
            states = states + (state,)  # type: ignore[assignment]  # noqa: RUF005
            steps = steps + ((a, c, e),)  # type: ignore[assignment]  # noqa: RUF005
        adds = ()
        reads = ()
        values = ()
        for i in tl.static_range(L - 1, -1, -1):
            here = _at(tile, t0, end, i, n, N, BP, MASKED)
            a, c, e = steps[i]
            scaled = e * dd[i]
            if arriving is not None:
                to, last = packed_ends(ends, t0, here[3], here[6], i_h, here[4], p, H, P, N)
                cotangent += tl.load(arriving + to, mask=last & p_ok, other=0.0)
            if BEFORE:
                seen = states[i]
                g = cotangent
                cotangent = a * g + c * scaled
            else:
                seen = states[i + 1]
                g = cotangent + c * scaled
                cotangent = a * g
            if MASKED:
                g = tl.where(here[6], g, 0.0)
            terms, value, sums = entry(
                token(args, tokens, run, here, i, whole), held, grads, g * states[i], g, seen * scaled,
                a * g * states[i], here,
            )  # fmt: skip
            adds = (_plus(found[i], terms),) + adds  # type: ignore[assignment]  # noqa: RUF005
            reads = (read[i] + c * seen,) + reads  # type: ignore[assignment]  # noqa: RUF005
            values = (value,) + values  # type: ignore[assignment]  # noqa: RUF005
            summed = _plus(summed, sums)
        found = adds
        read = reads
        tl.store(in_order(room - ROW), tl.broadcast_to(cotangent, (1, 1, BP)))
        _keep(room - ROW, summed, 1, KEYED, BP)
        across = ()
        for j in tl.static_range(len(run)):
            across = across + (_in_turn(values, j, L),)  # type: ignore[assignment]  # noqa: RUF005
        keys(grads, across, first, sink)
    tl.debug_barrier()
    held = merge(blank(BP)[1], alone)
    stored = ()
    for k in tl.static_range(L):
        there = _at(tile, t0, end, k, 0, N, BP, MASKED)
        value, terms = after(tokens[k], held, found[k], dd[k] * read[k], dd[k], there)
        stored = stored + (value,)  # type: ignore[assignment]  # noqa: RUF005
        loose = _plus(loose, terms)
    puts(grads, _together(stored), all_at, sink)
    return loose


@triton.jit(do_not_specialize=["T", "span", "low", "high", "rows", "each"])
def entry_gradients(
    args, grads, dy, ends, arriving, saved, cotangents, totals, scratch, T, H, P, segments, span, low, high, rows, each,
    setup: tl.constexpr, plain: tl.constexpr, runs: tl.constexpr, spread: tl.constexpr, whole: tl.constexpr,
    step: tl.constexpr, parted: tl.constexpr, merge: tl.constexpr, entry: tl.constexpr, keys: tl.constexpr,
    after: tl.constexpr, puts: tl.constexpr, blank: tl.constexpr, finish: tl.constexpr, N: tl.constexpr,
    L: tl.constexpr, BP: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr, BEFORE: tl.constexpr, M: tl.constexpr,
    LOOSE: tl.constexpr, KEYED: tl.constexpr, MASKED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Gradients of the tokens in groups `low` to `high` of M tokens of every segment; at low = 0 the Params' part.

    saved: the state before every M-th token, [B, H, ⌈T/M⌉, N, P]. cotangents: [B, H, segments, N, P], what reaches the
    end of group high - 1 of each segment, replaced by what reaches the start of `low`. totals: the Params' sums so far,
    zeros at first, [programs, KEYED N + LOOSE, BP]: those with a Key axis, and those without. scratch: a row for
    every entry of a program, and one more, so that what is loaded ahead is there: a cotangent, the Params' KEYED sums,
    KEYED numbers made of Params, and M / L states, so that what an entry needs lies at fixed distances.
    MASKED: T is no multiple of L. UNROLL: entries whose turns are written out, a divisor of N.

    Gradients of Key inputs are summed over the program's channels to buffers [blocks, B, H, N, rows], `rows` tokens a
    batch row, `each` a segment.
    """
    ROW: tl.constexpr = (2 * KEYED + 1 + M // L) * BP
    U: tl.constexpr = 4 if N % 4 == 0 else 1
    STATES: tl.constexpr = (2 * KEYED + 1) * BP
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
    room = scratch + program * ((N + 1) * ROW) + lane
    totals += program * ((KEYED * N + LOOSE) * BP)
    start = program * 0 + begin
    sink = (rows, program * 0 + segment * each - begin - low * M)
    for n in range(N):
        here = room + n * ROW
        keyed, alone = parted(setup(args, _at(tile, start, end, 0, n, N, BP, False)))
        tl.store(in_order(here), tl.load(in_order(spot + n * P), mask=p_ok, other=0.0))
        for k in tl.static_range(KEYED):
            tl.store(in_order(here + (1 + k) * BP), tl.load(in_order(totals + (k * N + n) * BP + lane)))
        _keep(here, keyed, 1 + KEYED, KEYED, BP)
    keyed, alone = parted(setup(args, _at(tile, start, end, 0, 0, N, BP, False)))
    loose = ()
    for i in tl.static_range(LOOSE):
        loose = loose + (blank(BP)[2][i] + tl.load(in_order(totals + (KEYED * N + i) * BP + lane)),)  # type: ignore[assignment]  # noqa: RUF005
    tl.debug_barrier()
    groups = tl.minimum(high, tl.cdiv(end - begin, M))
    for back in range(groups - low):
        c0 = begin + (groups - 1 - back) * M
        c1 = tl.minimum(c0 + M, end)
        first = saved + (row * tl.cdiv(T, M) + c0 // M) * (N * P) + p
        for n0 in range(0, N, U):
            states = ()
            for u in tl.static_range(U):
                states = states + (tl.load(in_order(first + (n0 + u) * P), mask=p_ok, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
            for u in tl.static_range(U):
                tl.store(in_order(room + ((n0 + u) * ROW + STATES)), states[u])
        tl.debug_barrier()
        count = tl.cdiv(c1 - c0, L)
        t0 = program * 0 + c0
        for j in range(count - 1):
            advance(
                args, tile, t0 + j * L, end, room, STATES + j * BP, alone, plain, runs, spread, whole, merge, step,
                N, L, BP, KEYED, ROW,
            )  # fmt: skip
        for j in range(count):
            last = count - 1 - j
            loose = pull_run(
                args, grads, dy, ends, arriving, tile, t0 + last * L, end, room, STATES + last * BP, sink, alone, loose,
                plain, runs, spread, whole, merge, step, entry, keys, after, puts, blank, N, L, BP, KEYED, ROW, BEFORE,
                MASKED, UNROLL,
            )  # fmt: skip
    for i in tl.static_range(LOOSE):
        tl.store(in_order(totals + (KEYED * N + i) * BP + lane), tl.broadcast_to(loose[i], (1, 1, BP)))
    for n in range(N):
        here = room + n * ROW
        tl.store(in_order(spot + n * P), tl.load(in_order(here)), mask=p_ok)
        keyed = _kept(here, 1, KEYED, BP)
        if low == 0:
            finish(args, grads, merge(keyed, loose), segment, segments, _at(tile, start, end, 0, n, N, BP, False))
        else:
            for k in tl.static_range(KEYED):
                tl.store(in_order(totals + (k * N + n) * BP + lane), keyed[k])
