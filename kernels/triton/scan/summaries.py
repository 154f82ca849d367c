"""The effect of segments of the fused scan on states (*summaries*): passes before the output pass and the adjoint."""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.scan.tiles import (
    blend,
    cleared,
    first_tokens,
    given_offset,
    joint,
    moved,
    packed_ends,
    program,
    row_of,
    state_offset,
)
from dsf.kernels.triton.tile import take


@triton.jit
def fetch_outer(args, given, at, t0, end, holes: tl.constexpr, INSIDE: tl.constexpr = False):
    """The tokens of the tile at t0, and in the adjoint the gradients of its outputs (float32).

    INSIDE: no token lies past the end.
    """
    at = moved(at, t0, at.t >= 0 if INSIDE else t0 + at.t < end)
    found = at.t
    if given.dy is not None:
        base = given.dy + given_offset(at)
        found = tl.load(base + at.t * (at.H * at.P) + at.p, mask=at.t_ok & at.p_ok, other=0.0).to(tl.float32)
    return holes.load(args, at), found


@triton.jit
def absorb_tile(
    found, held, given, state, decay, at, t0, end, holes: tl.constexpr, shape: tl.constexpr, MASKED: tl.constexpr
):
    """One tile of a summary: the state after it (with dy: the cotangent before it), and the product of A so far.

    With the hole `rate`, instead of the product the sum of its log2 without the factor along the Key axis.
    """
    at = moved(at, t0, t0 + at.t < end)
    K: tl.constexpr = shape.K
    a, b, c, e, d = holes.step(found[0], held, at)
    if given.dy is not None:
        b = c * (e * found[1])
    a, b = blend(a, b, at.t_ok, shape, MASKED)
    fresh = first_tokens(found[0], at, a, holes)
    late = b
    if given.states is not None:
        to, last = packed_ends(given.ends, at)
        late = tl.load(given.states + to, mask=last & at.n_ok & at.p_ok, other=0.0)
    for k in tl.static_range(K):
        if given.dy is None:
            state = take(a, at.t, k) * cleared(state, fresh, at.t, k) + take(b, at.t, k)
            if holes.rate is None:
                decay = cleared(decay * take(a, at.t, k), fresh, at.t, k)
        else:
            if given.states is not None:
                state += take(late, at.t, K - 1 - k)
            if not shape.BEFORE:
                state += take(b, at.t, K - 1 - k)
            state *= take(a, at.t, K - 1 - k)
            if shape.BEFORE:
                state += take(b, at.t, K - 1 - k)
            state = cleared(state, fresh, at.t, K - 1 - k)
            if holes.rate is None:
                decay = cleared(decay * take(a, at.t, K - 1 - k), fresh, at.t, K - 1 - k)
    if holes.rate is not None:
        found_rate = holes.rate(found[0], held, at)
        if MASKED:
            found_rate = tl.where(at.t_ok, found_rate, 0.0)
        decay += tl.sum(found_rate, 0, keep_dims=True)
    return state, decay


@triton.jit
def absorb_rest(args, held, given, state, decay, at, whole, end, holes: tl.constexpr, shape: tl.constexpr):
    """The tiles from `whole` to the segment's end, with dy in reverse."""
    count = tl.cdiv(tl.maximum(end - whole, 0), shape.K)
    for i in range(count):
        t0 = whole + (i if given.dy is None else count - 1 - i) * shape.K
        found = fetch_outer(args, given, at, t0, end, holes)
        state, decay = absorb_tile(found, held, given, state, decay, at, t0, end, holes, shape, shape.K > 1)
    return state, decay


@triton.jit
def _inside(t0, begin, end, K: tl.constexpr):
    """t0 clamped to the segment where a tile is one token, so that its last token is read again past the end."""
    t0 = tl.maximum(t0, begin)
    return tl.minimum(t0, end - 1) if K == 1 else t0


@triton.jit(do_not_specialize=["T", "span", "segments", "origin"])
def summaries(args, given, local, product, T, H, P, segments, span, origin, holes: tl.constexpr, shape: tl.constexpr):
    """The effect of each segment on its entering state: multiplied by `product`, plus `local`.

    With dy (the adjoint): the effect on the cotangent that enters from the segment's end. Both are [B, H, segments, N,
    P]. The last segment (the first, for cotangents) has no effect on another, so the grid has one segment less. Segment
    s begins at origin + s span. With the holes `rate` and `kept`, the product is computed from a sum over tokens.
    """
    at, segment = program(T, H, P, segments - 1, shape)
    if given.dy is not None:
        segment += 1
    K: tl.constexpr = shape.K
    AHEAD: tl.constexpr = shape.AHEAD
    begin = origin + segment * span
    end = tl.minimum(begin + span, T)
    held = holes.setup(args, at)
    long = at.batch * 0  # makes offsets 64-bit
    state = tl.zeros((1, shape.NB, shape.BP), tl.float32)
    if holes.rate is None:
        decay = tl.full((1, shape.NB, shape.BP), 1.0, tl.float32)
    else:
        decay = tl.zeros((1, 1, shape.BP), tl.float32)
    tiles = tl.maximum(end - begin, 0) // (AHEAD * K) * AHEAD
    whole = begin + tiles * K
    if AHEAD * K > 1 and given.dy is not None:
        state, decay = absorb_rest(args, held, given, state, decay, at, long + whole, end, holes, shape)
    pace: tl.constexpr = K if given.dy is None else -K
    first = begin if given.dy is None else whole - K
    line = ()
    for u in tl.static_range(AHEAD):
        t0 = long + _inside(first + u * pace, begin, end, K)
        line = line + (fetch_outer(args, given, at, t0, end, holes, K == 1),)  # type: ignore[assignment]  # noqa: RUF005
    for i in range(0, tiles, AHEAD):
        coming = ()
        for u in tl.static_range(AHEAD):
            here = long + first + (i + u) * pace
            ahead = long + _inside(first + (i + u + AHEAD) * pace, begin, end, K)
            if AHEAD == 1:
                found = fetch_outer(args, given, at, ahead, end, holes, K == 1)
            state, decay = absorb_tile(line[u], held, given, state, decay, at, here, end, holes, shape, False)
            if AHEAD > 1:  # into registers that are free now
                found = fetch_outer(args, given, at, ahead, end, holes, K == 1)
            coming = coming + (found,)  # type: ignore[assignment]  # noqa: RUF005
        line = coming
    if AHEAD * K > 1 and given.dy is None:
        state, decay = absorb_rest(args, held, given, state, decay, at, long + whole, end, holes, shape)
    if holes.rate is not None:
        decay = holes.kept(decay, held)
    to = state_offset(row_of(at) * segments + segment, at.n, at)
    tl.store(local + to, state, mask=at.n_ok & at.p_ok)
    tl.store(product + to, tl.broadcast_to(decay, (1, shape.NB, shape.BP)), mask=at.n_ok & at.p_ok)


@triton.jit(do_not_specialize=["segments"])
def combine(
    local, product, first, out, size, segments, BLOCK: tl.constexpr, K: tl.constexpr, REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """The entering state of every segment, in time order, or its cotangent, in reverse order.

    local, product, out: [rows, segments, size]; out may be local. first: [rows, size], enters the first (last) segment,
    or None for zeros. PACKED: sequences may begin in a segment, whose product is zero then.
    """
    blocks = tl.cdiv(size, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    i = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    k = tl.arange(0, K)[:, None]
    carry = tl.zeros((1, BLOCK), tl.float32)
    if first is not None:
        carry += tl.load(first + row * size + i, mask=i < size, other=0.0)
    for s0 in range(0, segments, K):
        order = segments - 1 - (s0 + k) if REVERSE else s0 + k
        ok = (s0 + k < segments - 1) & (i < size)
        here = (row * segments + order) * size + i
        adds = tl.load(local + here, mask=ok, other=0.0)
        keeps = tl.load(product + here, mask=ok, other=1.0)
        enters = adds
        for j in tl.static_range(K):
            enters = tl.where(k == j, carry, enters)
            carry = joint(take(keeps, k, j), carry, take(adds, k, j), PACKED)
        tl.store(out + here, enters, mask=(s0 + k < segments) & (i < size))
