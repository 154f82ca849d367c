"""The adjoint of a fused scan whose state entries need nothing of each other: one entry after the other.

A program of one warp owns BP channels of one head and one segment of time. L tokens lie in registers, a tuple of
tiles [1, 1, BP]; a loop over the state entries walks them forward and backward, so that states never leave the
registers, and what has no Key axis is computed once for all entries. Besides `setup`, `step` and `finish`
(dsf.kernels.triton.scan) the printed holes are (the first two with _back after their names)

    plain(args, at) -> tokens' inputs without a Key axis     runs(args, at, L) -> L tokens of one entry (fn.load_lanes)
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

from dsf.kernels.triton.functions import fixed, in_order, run_of, tile_of, tokens_of
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
    args, tile, t0, end, now, pace, then, lane, setup: tl.constexpr, plain: tl.constexpr, runs: tl.constexpr,
    whole: tl.constexpr, step: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """From the states before L tokens, at `now`, `pace` numbers an entry, to those after them, at `then` [N, BP]."""
    tokens = _apart(plain(args, _all_at(tile, t0, end, N, L, BP, False)), L)
    at = _at(tile, t0, end, 0, 0, N, BP, False)
    ahead = (setup(args, at), tl.load(in_order(now), mask=tile[3], other=0.0), runs(args, at, L))
    for n in range(N):
        held, state, run = ahead
        coming = tl.minimum(n + 1, N - 1)
        at = _at(tile, t0, end, 0, coming, N, BP, False)
        ahead = (setup(args, at), tl.load(in_order(now + coming * pace), mask=tile[3], other=0.0), runs(args, at, L))
        run = _spread(run, L)
        for i in tl.static_range(L):
            here = _at(tile, t0, end, i, n, N, BP, False)
            a, b, c, e, d = step(token(args, tokens, run, here, i, whole), held, here)
            state = a * state + b
        tl.store(in_order(then + n * BP + lane), tl.broadcast_to(state, (1, 1, BP)))
    tl.debug_barrier()


@triton.jit
def _spread(run, L: tl.constexpr):
    """The L tokens of every Key input."""
    found = ()
    for j in tl.static_range(len(run)):
        found = found + (run_of(run[j], L),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _sums(totals, like, n, lane, N: tl.constexpr, BP: tl.constexpr):
    """The Params' sums of entry n."""
    found = ()
    for j in tl.static_range(len(like)):
        found = found + (tl.load(in_order(totals + (j * N + n) * BP + lane)),)  # type: ignore[assignment]  # noqa: RUF005
    return found


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
    args, tile, t0, end, now, pace, spot, totals, lane, n, setup: tl.constexpr, runs: tl.constexpr,
    blank: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """What entry n needs from memory, on its way while the entry before it is computed."""
    at = _at(tile, t0, end, 0, n, N, BP, False)
    state = tl.load(in_order(now + n * pace), mask=tile[3], other=0.0)
    cotangent = tl.load(in_order(spot + n * tile[7]), mask=tile[3], other=0.0)
    return setup(args, at), state, cotangent, _sums(totals, blank(BP)[1], n, lane, N, BP), runs(args, at, L)


@triton.jit
def pull_run(
    args, grads, dy, ends, arriving, tile, t0, end, now, pace, spot, totals, lane, sink, loose,
    setup: tl.constexpr, plain: tl.constexpr, runs: tl.constexpr, whole: tl.constexpr, step: tl.constexpr,
    entry: tl.constexpr, keys: tl.constexpr, after: tl.constexpr, puts: tl.constexpr, blank: tl.constexpr,
    N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr, BEFORE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """L tokens backwards, from the states before them at `now`; at `spot` the cotangents after them become earlier."""
    i_b, i_h, p, p_ok, place, T, H, P = tile
    all_at = _all_at(tile, t0, end, N, L, BP, MASKED)
    tokens = _apart(plain(args, all_at), L)
    outer = fixed(dy + ((i_b * T + t0) * H + i_h) * P + p, all_at[3] * (H * P))
    dd = tokens_of(tl.load(outer, mask=all_at[6] & p_ok, other=0.0).to(tl.float32))
    found = ()
    read = ()
    for _ in tl.static_range(L):
        found = found + (blank(BP)[0],)  # type: ignore[assignment]  # noqa: RUF005
        read = read + (tl.zeros((1, 1, BP), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    ahead = _entry_ahead(args, tile, t0, end, now, pace, spot, totals, lane, 0, setup, runs, blank, N, L, BP)
    for n in range(N):
        first = _at(tile, t0, end, 0, n, N, BP, False)
        held, state, cotangent, summed, run = ahead
        coming = tl.minimum(n + 1, N - 1)
        ahead = _entry_ahead(args, tile, t0, end, now, pace, spot, totals, lane, coming, setup, runs, blank, N, L, BP)
        run = _spread(run, L)
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
        tl.store(in_order(spot + n * P), cotangent, mask=p_ok)
        for j in tl.static_range(len(summed)):
            where = in_order(totals + (j * N + n) * BP + lane)
            tl.store(where, summed[j])
        across = ()
        for j in tl.static_range(len(run)):
            across = across + (_in_turn(values, j, L),)  # type: ignore[assignment]  # noqa: RUF005
        keys(grads, across, first, sink)
    tl.debug_barrier()
    held = setup(args, _at(tile, t0, end, 0, 0, N, BP, False))
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
    setup: tl.constexpr, plain: tl.constexpr, runs: tl.constexpr, whole: tl.constexpr, step: tl.constexpr,
    merge: tl.constexpr, entry: tl.constexpr, keys: tl.constexpr, after: tl.constexpr, puts: tl.constexpr,
    blank: tl.constexpr, finish: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr, V: tl.constexpr,
    EVEN: tl.constexpr, BEFORE: tl.constexpr, M: tl.constexpr, LOOSE: tl.constexpr, KEYED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Gradients of the tokens in groups `low` to `high` of M tokens of every segment; at low = 0 the Params' part.

    saved: the state before every M-th token, [B, H, ⌈T/M⌉, N, P]. cotangents: [B, H, segments, N, P], what reaches the
    end of group high - 1 of each segment, replaced by what reaches the start of `low`. totals: the Params' sums so far,
    zeros at first, [programs, KEYED N + LOOSE, BP]: those with a Key axis, and those without. scratch: room for
    M / L - 1 states a program. MASKED: T is no multiple of L.

    Gradients of Key inputs are summed over the program's channels to buffers [blocks, B, H, N, rows], `rows` tokens a
    batch row, `each` a segment.
    """
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
    scratch += program * ((M // L - 1) * N * BP)
    totals += program * ((KEYED * N + LOOSE) * BP)
    states = scratch + lane
    start = program * 0 + begin
    sink = (rows, program * 0 + segment * each - begin - low * M)
    loose = ()
    for i in tl.static_range(LOOSE):
        loose = loose + (blank(BP)[2][i] + tl.load(in_order(totals + (KEYED * N + i) * BP + lane)),)  # type: ignore[assignment]  # noqa: RUF005
    groups = tl.minimum(high, tl.cdiv(end - begin, M))
    for back in range(groups - low):
        c0 = begin + (groups - 1 - back) * M
        c1 = tl.minimum(c0 + M, end)
        first = saved + (row * tl.cdiv(T, M) + c0 // M) * (N * P) + p
        count = tl.cdiv(c1 - c0, L)
        t0 = program * 0 + c0
        for j in range(count - 1):
            now = tl.where(j == 0, first, states + (j - 1) * (N * BP))
            pace = tl.where(j == 0, P, BP)
            then = scratch + j * (N * BP)
            advance(args, tile, t0 + j * L, end, now, pace, then, lane, setup, plain, runs, whole, step, N, L, BP)
        for j in range(count):
            last = count - 1 - j
            now = tl.where(last == 0, first, states + (last - 1) * (N * BP))
            pace = tl.where(last == 0, P, BP)
            loose = pull_run(
                args, grads, dy, ends, arriving, tile, t0 + last * L, end, now, pace, spot, totals, lane, sink, loose,
                setup, plain, runs, whole, step, entry, keys, after, puts, blank, N, L, BP, BEFORE, MASKED,
            )  # fmt: skip
    for i in tl.static_range(LOOSE):
        tl.store(in_order(totals + (KEYED * N + i) * BP + lane), tl.broadcast_to(loose[i], (1, 1, BP)))
    if low == 0:
        for n in range(N):
            keyed = ()
            for k in tl.static_range(KEYED):
                keyed = keyed + (tl.load(in_order(totals + (k * N + n) * BP + lane)),)  # type: ignore[assignment]  # noqa: RUF005
            finish(args, grads, merge(keyed, loose), segment, segments, _at(tile, start, end, 0, n, N, BP, False))
