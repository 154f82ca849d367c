"""The adjoint of the fused scan: states again from checkpoints, cotangents backwards in time, gradients by the holes.

G_t = C_t E_t dy_t + A_{t+1} G_{t+1};  dA_t = G_t S_{t-1},  dB_t = G_t,  dC_t = S_t E_t dy_t,  dE_t = dy_t Σ C_t S_t,
dD_t = dy_t. Nothing is divided by A, so zero and negative decays are as good as any.
"""

import triton
import triton.language as tl

from dsf.kernels.triton.scan.walk import (
    _program,
    blend,
    channels,
    fill,
    firsts,
    join,
    last_state,
    numbers,
    packed_ends,
    state_offset,
    turns,
    walk,
)
from dsf.kernels.triton.tile import sum_key, take


@triton.jit
def at_of(tile, N: tl.constexpr, BP: tl.constexpr):
    """What the holes know of a tile; end: None where all its tokens exist, as a single one always does."""
    i_b, i_h, t0, end, t, n, p, n_ok, p_ok, place, T, H, P = tile
    t_ok = t >= 0 if end is None or t.shape[0] == 1 else t0 + t < end
    return (i_b, i_h, t0, t, n, p, t_ok, n_ok, p_ok, place, place * BP, T, H, P, N)


@triton.jit
def fetch_both(args, dy, tile, load: tl.constexpr, N: tl.constexpr, BP: tl.constexpr):
    """The tile's tokens, and its outputs' gradients (float32).

    All of it one tile ahead: memory answers while the walk computes.
    """
    at = at_of(tile, N, BP)
    i_b, i_h, t0, t, n, p, t_ok, n_ok, p_ok, place, edge, T, H, P, count = at
    base = dy + ((i_b * T + t0) * H + i_h) * P
    return load(args, at), tl.load(base + t * (H * P) + p, mask=t_ok & p_ok, other=0.0).to(tl.float32)


@triton.jit
def fetch_group(
    args, i_b, i_h, t0, end, t, n, p, n_ok, p_ok, place, T, H, P, load: tl.constexpr, N: tl.constexpr, BP: tl.constexpr,
    K: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """The tokens of U tiles; the last token again past the end."""
    found = ()
    for u in tl.static_range(U):
        tile = (i_b, i_h, tl.minimum(t0 + u * K, end - 1), end, t, n, p, n_ok, p_ok, place, T, H, P)
        found = found + (load(args, at_of(tile, N, BP)),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def pass_tile(
    tokens, held, state, tile, step: tl.constexpr, N: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, BP: tl.constexpr
):
    """The state after a whole tile that `state` enters."""
    at = at_of(tile, N, BP)
    a, b, c, e, d = step(tokens, held, at)
    a, b = blend(a, b, True, K, NB, 1, BP, False)
    return last_state(a, b, state, K)


@triton.jit
def walk_back(
    a, written, late, cotangent, K: tl.constexpr, G: tl.constexpr, BEFORE: tl.constexpr, ARRIVING: tl.constexpr
):
    """The cotangents of the states after every token, and the one that leaves the tile on its left.

    written: what outputs add, late: what final states add (ARRIVING).
    """
    t = turns(K, G)
    AXIS: tl.constexpr = 0 if G == 1 else 1
    left = cotangent
    if G > 1:
        last = tl.arange(0, G)[:, None, None] == 0
        add = tl.where(last, cotangent, 0.0)
        keep = tl.full(add.shape, 1.0, tl.float32)
        for j in tl.static_range(K):
            _, add = pass_back(a, written, late, add, t, K - 1 - j, AXIS, BEFORE, ARRIVING)
            keep *= take(a, t, K - 1 - j, AXIS)
        entering, left = join(keep, add, G)
        cotangent = tl.where(last, cotangent, entering)
    g = a
    for j in tl.static_range(K):
        here, cotangent = pass_back(a, written, late, cotangent, t, K - 1 - j, AXIS, BEFORE, ARRIVING)
        g = tl.where(t == K - 1 - j, here, g)
    if G == 1:
        left = cotangent
    return g, left


@triton.jit
def pass_back(
    a, written, late, cotangent, t, k: tl.constexpr, AXIS: tl.constexpr, BEFORE: tl.constexpr, ARRIVING: tl.constexpr
):
    """The cotangent of the state after token k, and of the one before it."""
    if ARRIVING:
        cotangent += take(late, t, k, AXIS)
    if not BEFORE:
        cotangent += take(written, t, k, AXIS)
    earlier = take(a, t, k, AXIS) * cotangent
    if BEFORE:
        earlier += take(written, t, k, AXIS)
    return cotangent, earlier


@triton.jit
def entering(saved, tile, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, M: tl.constexpr):
    """The states saved before the tile's runs, [G, 1, BP], of a vector state."""
    i_b, i_h, t0, end, t, n, p, n_ok, p_ok, place, T, H, P = tile
    run = t0 + firsts(K, G, True)
    to = saved + state_offset((i_b * H + i_h) * tl.cdiv(T, M) + run // M, n, p, P, N)
    return tl.load(to, mask=p_ok if end is None else (run < end) & p_ok, other=0.0)


@triton.jit
def pull_tile(
    tokens, dd, ends, arriving, grads, sink, held, sums, state, cotangent, tile,
    step: tl.constexpr, pull: tl.constexpr, N: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, G: tl.constexpr,
    BP: tl.constexpr, BEFORE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile backwards: `state` enters it from the left, `cotangent` from the right; the holes store gradients."""
    at = at_of(tile, N, BP)
    t0, t, n_ok, t_ok = at[2], at[3], at[7], at[6]
    a, b, c, e, d = step(tokens, held, at)
    a, b = blend(a, b, t_ok, K, NB, G, BP, MASKED)
    before, after, _ = walk(a, b, state, K, G)
    seen = before if BEFORE else after
    scaled = e * dd
    written = fill(c * scaled, K, NB, G, BP)
    if MASKED:  # computed from zeros past the end, where it may be NaN
        written = tl.where(t_ok, written, 0.0)
    late = written
    if arriving is not None:
        to, last = packed_ends(ends, t0, t, t_ok, at[1], at[4], at[5], at[12], at[13], N)
        late = tl.load(arriving + to, mask=last & n_ok & at[8], other=0.0)
    g, cotangent = walk_back(a, written, late, cotangent, K, G, BEFORE, arriving is not None)
    if MASKED:
        g = tl.where(t_ok, g, 0.0)
    de = dd * sum_key(c * seen, n_ok)
    sums = pull(tokens, held, sums, grads, g * before, g, seen * scaled, de, dd, at, sink)
    return cotangent, sums


@triton.jit
def pull_chunk(
    args, grads, dy, ends, arriving, saved, mine, sink, held, sums, cotangent, i_b, i_h, c0, c1, end, t, n, p, n_ok,
    p_ok, place, T, H, P, load: tl.constexpr, step: tl.constexpr, pull: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, BP: tl.constexpr, BEFORE: tl.constexpr, M: tl.constexpr,
    U: tl.constexpr,
):  # fmt: skip
    """The tokens c0 to c1 backwards, at most M of them, from the state saved before the first."""
    long = (i_b * H + i_h) * 0  # makes offsets 64-bit
    row = i_b * H + i_h
    chunk = row * tl.cdiv(T, M) + c0 // M
    state = tl.load(saved + state_offset(chunk, n, p, P, N), mask=n_ok & p_ok, other=0.0)
    groups = tl.cdiv(c1 - c0, U * K)
    group = fetch_group(args, i_b, i_h, long + c0, end, t, n, p, n_ok, p_ok, place, T, H, P, load, N, BP, K, U)
    for j in range(groups - 1):
        tl.store(mine + j * (NB * BP), state)
        g0 = long + c0 + j * (U * K)
        next0 = long + c0 + tl.minimum(j + 1, groups - 2) * (U * K)
        ahead = fetch_group(args, i_b, i_h, next0, end, t, n, p, n_ok, p_ok, place, T, H, P, load, N, BP, K, U)
        for u in tl.static_range(U):
            tile = (i_b, i_h, g0 + u * K, end, t, n, p, n_ok, p_ok, place, T, H, P)
            state = pass_tile(group[u], held, state, tile, step, N, K, NB, BP)
        group = ahead
    tl.debug_barrier()
    whole = (c1 - c0) // (U * K)
    if U * K > 1:
        r0 = c0 + whole * (U * K)
        rest = tl.cdiv(c1 - r0, K)
        for i in range(rest):  # tokens that fill no group, each from the group's first state
            s = state
            for j in range(rest - 1 - i):
                tile = (i_b, i_h, long + r0 + j * K, end, t, n, p, n_ok, p_ok, place, T, H, P)
                s = pass_tile(load(args, at_of(tile, N, BP)), held, s, tile, step, N, K, NB, BP)
            tile = (i_b, i_h, long + r0 + (rest - 1 - i) * K, end, t, n, p, n_ok, p_ok, place, T, H, P)
            tokens, outer = fetch_both(args, dy, tile, load, N, BP)
            cotangent, sums = pull_tile(
                tokens, outer, ends, arriving, grads, sink, held, sums, s, cotangent, tile,
                step, pull, N, K, NB, 1, BP, BEFORE, K > 1,
            )  # fmt: skip
    tile = (i_b, i_h, long + c0 + tl.maximum(whole - 1, 0) * (U * K), end, t, n, p, n_ok, p_ok, place, T, H, P)
    tokens, outer = fetch_both(args, dy, tile, load, N, BP)
    for j in range(whole):
        g0 = long + c0 + (whole - 1 - j) * (U * K)
        if g0 + U * K < c1:
            state = tl.load(mine + (whole - 1 - j) * (NB * BP))
        states = (state,)
        for u in tl.static_range(U - 1):
            tile = (i_b, i_h, g0 + u * K, end, t, n, p, n_ok, p_ok, place, T, H, P)
            then = (i_b, i_h, g0 + (u + 1) * K, end, t, n, p, n_ok, p_ok, place, T, H, P)
            ahead, outer = fetch_both(args, dy, then, load, N, BP)
            state = pass_tile(tokens, held, state, tile, step, N, K, NB, BP)
            states = states + (state,)  # type: ignore[assignment]  # noqa: RUF005
            tokens = ahead
        for u in tl.static_range(U):
            tile = (i_b, i_h, g0 + (U - 1 - u) * K, end, t, n, p, n_ok, p_ok, place, T, H, P)
            if u == U - 1:
                next0 = tl.maximum(g0 - U * K, long + c0)
            else:
                next0 = g0 + (U - 2 - u) * K
            then = (i_b, i_h, next0, end, t, n, p, n_ok, p_ok, place, T, H, P)
            ahead, outer_ahead = fetch_both(args, dy, then, load, N, BP)
            cotangent, sums = pull_tile(
                tokens, outer, ends, arriving, grads, sink, held, sums, states[U - 1 - u], cotangent, tile,
                step, pull, N, K, NB, 1, BP, BEFORE, False,
            )  # fmt: skip
            tokens = ahead
            outer = outer_ahead
    tl.debug_barrier()
    return cotangent, sums


@triton.jit
def total_places(totals, like, i: tl.constexpr, lane, NB: tl.constexpr, BP: tl.constexpr):
    """Where sum i lies between two calls."""
    places = totals + i * (NB * BP) + lane
    return places + tl.arange(0, NB)[None, :, None] * BP if like.shape[1] == NB else places


@triton.jit
def recall(totals, sums, lane, NB: tl.constexpr, BP: tl.constexpr):
    """The Params' sums as they were kept."""
    found = ()
    for i in tl.static_range(len(sums)):
        found = found + (tl.load(total_places(totals, sums[i], i, lane, NB, BP)),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def keep(totals, sums, lane, NB: tl.constexpr, BP: tl.constexpr):
    """Keep the Params' sums for the next launch."""
    for i in tl.static_range(len(sums)):
        places = total_places(totals, sums[i], i, lane, NB, BP)
        tl.store(places, tl.broadcast_to(sums[i], places.shape))


@triton.jit
def spread(sums, G: tl.constexpr, BP: tl.constexpr):
    """A Params' sum for every run, in the first of which are those so far."""
    found = ()
    for i in tl.static_range(len(sums)):
        first = tl.arange(0, G)[:, None, None] == 0
        found = found + (tl.where(first, tl.broadcast_to(sums[i], (G, 1, BP)), 0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def joined(sums):
    """All runs' sums as one."""
    found = ()
    for i in tl.static_range(len(sums)):
        found = found + (tl.sum(sums[i], 0, keep_dims=True),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit(do_not_specialize=["T", "span", "low", "high", "rows", "each"])
def gradients(
    args, grads, dy, ends, arriving, saved, cotangents, totals, scratch, T, H, P, segments, span, low, high,
    rows, each, setup: tl.constexpr, load: tl.constexpr, step: tl.constexpr, pull: tl.constexpr,
    zeros: tl.constexpr, finish: tl.constexpr, N: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, BP: tl.constexpr,
    V: tl.constexpr, EVEN: tl.constexpr, BEFORE: tl.constexpr, M: tl.constexpr, U: tl.constexpr,
    G: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of the tokens in chunks `low` to `high` of every segment; at low = 0 the Params' part.

    arriving: cotangents of packed sequences' final states, [sequences, H, N, P], or None (packed_ends). saved: the
    state before every M-th token. cotangents: [B, H, segments, N, P], what reaches the end of chunk
    high - 1 of each segment, replaced by what reaches the start of `low`. totals: the Params' sums between calls, or
    None where one call does all. scratch: room for M / (U K) states a program; states between two of those stay in
    registers.

    Gradients summed over channels go to buffers of `rows` tokens a batch row, `each` a segment.
    """
    place, segment, i_h, i_b = _program(P, segments, H, BP)
    first, p, n_ok, p_ok = channels(place, P, N, NB, BP, V, EVEN)
    t = numbers(K, G, True)
    begin = segment * span
    end = tl.minimum(begin + span, T)
    row = i_b * H + i_h
    program = tl.program_id(0).to(tl.int64)
    lane = tl.multiple_of(tl.arange(0, BP)[None, None, :], [1, 1, V])
    mine = scratch + program * (M // (U * K) * NB * BP) + first * BP + lane
    sums = zeros(NB, BP)
    if totals is not None:
        totals += program * (len(sums) * NB * BP)
    CHUNK: tl.constexpr = max(M, K * G)
    shift = program * 0 + segment * each - begin - low * CHUNK
    chunks = tl.minimum(high, tl.cdiv(end - begin, CHUNK))
    if G > 1 or STAGES > 1:
        at = (i_b, i_h, 0, t, first, p, True, n_ok, p_ok, place, place * BP, T, H, P, N)
        held = setup(args, at)
        spot = cotangents + state_offset(row * segments + segment, first, p, P, N)
        cotangent = tl.load(spot, mask=n_ok & p_ok, other=0.0)
        if totals is not None:
            sums = recall(totals, sums, lane, NB, BP)
        sums = spread(sums, G, BP)
        sink = (rows, shift)
        high = begin // CHUNK + chunks
        if (high * CHUNK > end) & (chunks > low):
            high -= 1
            chunks -= 1
            tile = (i_b, i_h, row * 0 + high * CHUNK, end, t, first, p, n_ok, p_ok, place, T, H, P)
            state = entering(saved, tile, N, K, G, M)
            tokens, outer = fetch_both(args, dy, tile, load, N, BP)
            cotangent, sums = pull_tile(
                tokens, outer, ends, arriving, grads, sink, held, sums, state, cotangent, tile,
                step, pull, N, K, NB, G, BP, BEFORE, True,
            )  # fmt: skip
        for back in tl.range(0, chunks - low, num_stages=STAGES):
            tile = (i_b, i_h, row * 0 + (high - 1 - back) * CHUNK, None, t, first, p, n_ok, p_ok, place, T, H, P)
            state = entering(saved, tile, N, K, G, M)
            tokens, outer = fetch_both(args, dy, tile, load, N, BP)
            cotangent, sums = pull_tile(
                tokens, outer, ends, arriving, grads, sink, held, sums, state, cotangent, tile,
                step, pull, N, K, NB, G, BP, BEFORE, False,
            )  # fmt: skip
        tl.store(spot, cotangent, mask=n_ok & p_ok)
        sums = joined(sums)
        if totals is not None:
            keep(totals, sums, lane, NB, BP)
        if low == 0:
            finish(args, grads, sums, segment, segments, at)
    else:
        held = setup(args, (i_b, i_h, 0, t, first, p, True, n_ok, p_ok, place, place * BP, T, H, P, N))
        spot = cotangents + state_offset(row * segments + segment, first, p, P, N)
        cotangent = tl.load(spot, mask=n_ok & p_ok, other=0.0)
        if totals is not None:
            sums = recall(totals, sums, lane, NB, BP)
        sink = (rows, shift)
        for back in range(chunks - low):
            c0 = begin + (chunks - 1 - back) * CHUNK
            c1 = tl.minimum(c0 + CHUNK, end)
            cotangent, sums = pull_chunk(
                args, grads, dy, ends, arriving, saved, mine, sink, held, sums, cotangent, i_b, i_h, c0, c1, end, t,
                first, p, n_ok, p_ok, place, T, H, P, load, step, pull, N, K, NB, BP, BEFORE, M, U,
            )  # fmt: skip
        tl.store(spot, cotangent, mask=n_ok & p_ok)
        if totals is not None:
            keep(totals, sums, lane, NB, BP)
        if low == 0:
            at = (i_b, i_h, 0, t, first, p, True, n_ok, p_ok, place, place * BP, T, H, P, N)
            finish(args, grads, sums, segment, segments, at)
