"""The adjoint of the fused scan: computes states again from checkpoints, walks cotangents backwards in time, and calls
the holes for gradients.

G_t = C_t E_t dy_t + A_{t+1} G_{t+1};  dA_t = G_t S_{t-1},  dB_t = G_t,  dC_t = S_t E_t dy_t,  dE_t = dy_t Σ C_t S_t,
dD_t = dy_t. Nothing is divided by A, so zero and negative decays are as good as any.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton.scan.mixing import left_by, moved_back, walked
from dsf.kernels.triton.scan.tiles import (
    blend,
    cleared,
    entered,
    fill,
    first_tokens,
    firsts,
    given_offset,
    join,
    moved,
    packed_ends,
    program,
    row_of,
    saved_offset,
    state_offset,
    turns,
)
from dsf.kernels.triton.tile import sum_key, take


class Pull(NamedTuple):
    """The adjoint's inputs and where gradients go: pointers that the holes use for both, cotangents, values of
    Params, `sink`."""

    args: Any
    grads: Any
    given: Any
    held: Any
    sink: Any


class Room(NamedTuple):
    """What the adjoint keeps. saved: the state before every M-th token, [B, H, ⌈T/M⌉, N, P].

    cotangents: [B, H, segments, N, P], the cotangent that reaches the end of a launch's part of each segment; it is
    replaced by the one that reaches the start of that part. totals: the Params' sums between launches, or None where
    one launch does everything. scratch: states that a program computes again.
    """

    saved: Any
    cotangents: Any
    totals: Any
    scratch: Any


@triton.jit
def tile_at(at, t0, end):
    """The position of the tile at t0; end: None where all its tokens exist, as for tiles of one token."""
    return moved(at, t0, at.t >= 0 if end is None or at.t.shape[0] == 1 else t0 + at.t < end)


@triton.jit
def fetch_both(x, at, holes: tl.constexpr):
    """The tile's tokens, and its outputs' gradients (float32); loaded one tile ahead of their use."""
    tokens = holes.load(x.args, at)
    base = x.given.dy + given_offset(at)
    return tokens, tl.load(base + at.t * (at.H * at.P) + at.p, mask=at.t_ok & at.p_ok, other=0.0).to(tl.float32)


@triton.jit
def fetch_group(x, at, t0, end, holes: tl.constexpr, shape: tl.constexpr):
    """The tokens of U tiles; past the end the last token again."""
    found = ()
    for u in tl.static_range(shape.U):
        here = tile_at(at, tl.minimum(t0 + u * shape.K, end - 1), end)
        found = found + (holes.load(x.args, here),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def pass_tile(x, tokens, state, at, holes: tl.constexpr, shape: tl.constexpr):
    """The state after a whole tile, from `state` before it."""
    a, b, c, e, d = holes.step(tokens, x.held, at)
    a, b = blend(a, b, True, shape, False)
    return left_by(a, b, state, tokens, x.held, at, holes, shape)


@triton.jit
def walk_back(a, fresh, written, late, cotangent, shape: tl.constexpr, ARRIVING: tl.constexpr):
    """The cotangents of the states after every token, and of the state before the tile.

    fresh: of `first_tokens`; written: contributions of outputs; late: of final states (ARRIVING).
    """
    K: tl.constexpr = shape.K
    G: tl.constexpr = shape.G
    t = turns(K, G)
    AXIS: tl.constexpr = 0 if G == 1 else 1
    left = cotangent
    if G > 1:
        last = tl.arange(0, G)[:, None, None] == 0
        add = tl.where(last, cotangent, 0.0)
        keep = tl.full(add.shape, 1.0, tl.float32)
        for j in tl.static_range(K):
            _, add = pass_back(a, fresh, written, late, add, t, K - 1 - j, AXIS, shape.BEFORE, ARRIVING)
            keep = cleared(keep * take(a, t, K - 1 - j, AXIS), fresh, t, K - 1 - j, AXIS)
        entering, left = join(keep, add, G, fresh is not None)
        cotangent = tl.where(last, cotangent, entering)
    g = a
    for j in tl.static_range(K):
        here, cotangent = pass_back(a, fresh, written, late, cotangent, t, K - 1 - j, AXIS, shape.BEFORE, ARRIVING)
        g = tl.where(t == K - 1 - j, here, g)
    if G == 1:
        left = cotangent
    return g, left


@triton.jit
def pass_back(
    a, fresh, written, late, cotangent, t, k: tl.constexpr, AXIS: tl.constexpr, BEFORE: tl.constexpr,
    ARRIVING: tl.constexpr,
):  # fmt: skip
    """The cotangents of the states after and before token k."""
    if ARRIVING:
        cotangent += take(late, t, k, AXIS)
    if not BEFORE:
        cotangent += take(written, t, k, AXIS)
    earlier = take(a, t, k, AXIS) * cotangent
    if BEFORE:
        earlier += take(written, t, k, AXIS)
    return cotangent, cleared(earlier, fresh, t, k, AXIS)


@triton.jit
def entering(saved, at, t0, end, shape: tl.constexpr):
    """The stored states before the runs of a vector state's tile at t0, [G, 1, BP]; end: None where all exist."""
    run = t0 + firsts(shape.K, shape.G, True)
    to = saved + saved_offset(run, at.n, at, shape.M)
    return tl.load(to, mask=at.p_ok if end is None else (run < end) & at.p_ok, other=0.0)


@triton.jit
def pull_tile(
    x, tokens, dd, state, cotangent, sums, at, holes: tl.constexpr, shape: tl.constexpr, MASKED: tl.constexpr
):
    """One tile, from the last token to the first. state: before it; cotangent: after it. The holes store gradients."""
    a, b, c, e, d = holes.step(tokens, x.held, at)
    a, b = blend(a, b, at.t_ok, shape, MASKED)
    before, after, _ = walked(a, b, state, tokens, x.held, at, holes, shape)
    seen = before if shape.BEFORE else after
    scaled = e * dd
    written = fill(c * scaled, shape, shape.NB)
    if MASKED:  # past the end it is computed from zeros and may be NaN
        written = tl.where(at.t_ok, written, 0.0)
    late = written
    if x.given.states is not None:
        to, last = packed_ends(x.given.ends, at)
        late = tl.load(x.given.states + to, mask=last & at.n_ok & at.p_ok, other=0.0)
    de = dd * sum_key(c * seen, at.n_ok)
    if holes.elementwise:
        fresh = first_tokens(tokens, at, a, holes)
        g, cotangent = walk_back(a, fresh, written, late, cotangent, shape, x.given.states is not None)
        if MASKED:
            g = tl.where(at.t_ok, g, 0.0)
        sums = holes.pull(tokens, x.held, sums, x.grads, g * before, g, seen * scaled, de, dd, at, x.sink)
    else:
        g = cotangent if x.given.states is None else cotangent + late
        if not shape.BEFORE:
            g += written
        earlier, da, dmix = moved_back(a, g, before, tokens, x.held, at, holes)
        cotangent = entered(earlier + written if shape.BEFORE else earlier, tokens, at, holes)
        sums = holes.pull(tokens, x.held, sums, x.grads, da, g, seen * scaled, de, dd, at, x.sink, dmix)
    return cotangent, sums


@triton.jit
def find_states(x, saved, mine, at, c0, c1, end, holes: tl.constexpr, shape: tl.constexpr):
    """Store the states before the groups of U tiles from c0 to c1 in `mine`; the last one is returned instead."""
    long = row_of(at) * 0  # makes offsets 64-bit
    state = tl.load(saved + saved_offset(c0, at.n, at, shape.M), mask=at.n_ok & at.p_ok, other=0.0)
    EACH: tl.constexpr = shape.U * shape.K
    groups = tl.cdiv(c1 - c0, EACH)
    group = fetch_group(x, at, long + c0, end, holes, shape)
    for j in range(groups - 1):
        tl.store(mine + j * (shape.NB * shape.BP), state)
        ahead = fetch_group(x, at, long + c0 + tl.minimum(j + 1, groups - 2) * EACH, end, holes, shape)
        for u in tl.static_range(shape.U):
            here = tile_at(at, long + c0 + j * EACH + u * shape.K, end)
            state = pass_tile(x, group[u], state, here, holes, shape)
        group = ahead
    tl.debug_barrier()
    return state


@triton.jit
def pull_rest(x, state, sums, cotangent, at, r0, c1, end, holes: tl.constexpr, shape: tl.constexpr):
    """The tokens r0 to c1, less than a group, in reverse; each tile is walked from the state before the first."""
    long = row_of(at) * 0
    rest = tl.cdiv(c1 - r0, shape.K)
    for i in range(rest):
        s = state
        for j in range(rest - 1 - i):
            here = tile_at(at, long + r0 + j * shape.K, end)
            s = pass_tile(x, holes.load(x.args, here), s, here, holes, shape)
        here = tile_at(at, long + r0 + (rest - 1 - i) * shape.K, end)
        tokens, outer = fetch_both(x, here, holes)
        cotangent, sums = pull_tile(x, tokens, outer, s, cotangent, sums, here, holes, shape, shape.K > 1)
    return cotangent, sums


@triton.jit
def pull_chunk(x, saved, mine, sums, cotangent, at, c0, c1, end, holes: tl.constexpr, shape: tl.constexpr):
    """The tokens c0 to c1, at most M, in reverse, from the stored state before the first."""
    long = row_of(at) * 0
    K: tl.constexpr = shape.K
    U: tl.constexpr = shape.U
    state = find_states(x, saved, mine, at, c0, c1, end, holes, shape)
    whole = (c1 - c0) // (U * K)
    if U * K > 1:
        cotangent, sums = pull_rest(x, state, sums, cotangent, at, c0 + whole * (U * K), c1, end, holes, shape)
    tokens, outer = fetch_both(x, tile_at(at, long + c0 + tl.maximum(whole - 1, 0) * (U * K), end), holes)
    for j in range(whole):
        g0 = long + c0 + (whole - 1 - j) * (U * K)
        if g0 + U * K < c1:
            state = tl.load(mine + (whole - 1 - j) * (shape.NB * shape.BP))
        states = (state,)
        for u in tl.static_range(U - 1):
            ahead, outer = fetch_both(x, tile_at(at, g0 + (u + 1) * K, end), holes)
            state = pass_tile(x, tokens, state, tile_at(at, g0 + u * K, end), holes, shape)
            states = states + (state,)  # type: ignore[assignment]  # noqa: RUF005
            tokens = ahead
        for u in tl.static_range(U):
            if u == U - 1:
                next0 = tl.maximum(g0 - U * K, long + c0)
            else:
                next0 = g0 + (U - 2 - u) * K
            ahead, outer_ahead = fetch_both(x, tile_at(at, next0, end), holes)
            here = tile_at(at, g0 + (U - 1 - u) * K, end)
            cotangent, sums = pull_tile(
                x, tokens, outer, states[U - 1 - u], cotangent, sums, here, holes, shape, False
            )  # fmt: skip
            tokens = ahead
            outer = outer_ahead
    tl.debug_barrier()
    return cotangent, sums


@triton.jit
def total_places(totals, like, i: tl.constexpr, lane, shape: tl.constexpr):
    """The address of sum i between two launches."""
    places = totals + i * (shape.NB * shape.BP) + lane
    return places + tl.arange(0, shape.NB)[None, :, None] * shape.BP if like.shape[1] == shape.NB else places


@triton.jit
def recall(totals, sums, lane, shape: tl.constexpr):
    """Load the Params' sums of the launch before."""
    found = ()
    for i in tl.static_range(len(sums)):
        found = found + (tl.load(total_places(totals, sums[i], i, lane, shape)),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def keep(totals, sums, lane, shape: tl.constexpr):
    """Store the Params' sums for the next launch."""
    for i in tl.static_range(len(sums)):
        places = total_places(totals, sums[i], i, lane, shape)
        tl.store(places, tl.broadcast_to(sums[i], places.shape))


@triton.jit
def spread(sums, shape: tl.constexpr):
    """The Params' sums with one for every run; the first run has those so far."""
    found = ()
    for i in tl.static_range(len(sums)):
        first = tl.arange(0, shape.G)[:, None, None] == 0
        one = tl.where(first, tl.broadcast_to(sums[i], (shape.G, 1, shape.BP)), 0.0)
        found = found + (one,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def joined(sums):
    """The sum over all runs."""
    found = ()
    for i in tl.static_range(len(sums)):
        found = found + (tl.sum(sums[i], 0, keep_dims=True),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def pull_runs(x, saved, at, end, low, high, sums, chunks, cotangent, holes: tl.constexpr, shape: tl.constexpr):
    """Chunks `low` to `chunks` of a segment in reverse, one tile each, from the stored states before its runs.

    high: the last chunk's number plus 1, counted from the start of the sequence.
    """
    CHUNK: tl.constexpr = shape.K * shape.G
    long = row_of(at) * 0
    if (high * CHUNK > end) & (chunks > low):
        high -= 1
        chunks -= 1
        state = entering(saved, at, long + high * CHUNK, end, shape)
        here = tile_at(at, long + high * CHUNK, end)
        tokens, outer = fetch_both(x, here, holes)
        cotangent, sums = pull_tile(x, tokens, outer, state, cotangent, sums, here, holes, shape, True)
    for back in tl.range(0, chunks - low, num_stages=shape.STAGES):
        state = entering(saved, at, long + (high - 1 - back) * CHUNK, None, shape)
        here = tile_at(at, long + (high - 1 - back) * CHUNK, None)
        tokens, outer = fetch_both(x, here, holes)
        cotangent, sums = pull_tile(x, tokens, outer, state, cotangent, sums, here, holes, shape, False)
    return cotangent, sums


@triton.jit(do_not_specialize=["T", "span", "low", "high", "rows", "each"])
def gradients(
    args, grads, given, room, T, H, P, segments, span, low, high, rows, each, holes: tl.constexpr,
    shape: tl.constexpr,
):  # fmt: skip
    """Gradients of the tokens in chunks `low` to `high` of every segment; at low = 0 also of Params.

    room.scratch holds M / (U K) states a program; states between these stay in registers. Gradients summed over
    channels are stored in buffers of `rows` tokens a batch row, `each` a segment.
    """
    at, segment = program(T, H, P, segments, shape, True)
    begin = segment * span
    end = tl.minimum(begin + span, T)
    number = tl.program_id(0).to(tl.int64)
    lane = tl.multiple_of(tl.arange(0, shape.BP)[None, None, :], [1, 1, shape.V])
    EACH: tl.constexpr = shape.M // (shape.U * shape.K) * shape.NB * shape.BP
    mine = room.scratch + number * EACH + at.n * shape.BP + lane
    sums = holes.zeros(shape.NB, shape.BP)
    totals = room.totals
    if totals is not None:
        totals += number * (len(sums) * shape.NB * shape.BP)
    CHUNK: tl.constexpr = shape.M if shape.M > shape.K * shape.G else shape.K * shape.G
    shift = number * 0 + segment * each - begin - low * CHUNK
    chunks = tl.minimum(high, tl.cdiv(end - begin, CHUNK))
    x = Pull(args, grads, given, holes.setup(args, at), (rows, shift))
    spot = room.cotangents + state_offset(row_of(at) * segments + segment, at.n, at)
    cotangent = tl.load(spot, mask=at.n_ok & at.p_ok, other=0.0)
    if totals is not None:
        sums = recall(totals, sums, lane, shape)
    RUNS: tl.constexpr = shape.G > 1 or shape.STAGES > 1
    if RUNS:
        sums = spread(sums, shape)
        last = begin // CHUNK + chunks
        cotangent, sums = pull_runs(x, room.saved, at, end, low, last, sums, chunks, cotangent, holes, shape)
    else:
        for back in range(chunks - low):
            c0 = begin + (chunks - 1 - back) * CHUNK
            c1 = tl.minimum(c0 + CHUNK, end)
            cotangent, sums = pull_chunk(x, room.saved, mine, sums, cotangent, at, c0, c1, end, holes, shape)
    tl.store(spot, cotangent, mask=at.n_ok & at.p_ok)
    if RUNS:
        sums = joined(sums)
    if totals is not None:
        keep(totals, sums, lane, shape)
    if low == 0:
        holes.finish(args, grads, sums, segment, segments, at)
