"""The forward passes of the fused scan, one state entry after the other.

A program of one warp owns `BP` channels of one head and one segment of time: lanes lie along the channels. It takes L
tokens at a time into registers, as a tuple of tiles [1, 1, BP], and walks them once for every state entry. What has no
Key axis is computed once for all entries; what has one, is the same in all lanes. An entry's state waits in memory for
its next turn. No entry may wait for another's, and besides the holes of dsf.kernels.triton.scan.walk this needs five:

    plain(args, at) -> a token's inputs without a Key axis
    runs(args, at, L) -> of each input with a Key axis alone, L tokens of an entry, which lie side by side
    whole(args, tokens, at) -> a token's inputs of both axes; `tokens`: those without a Key axis
    ahead(args, at, L, BP): asks for what L tokens will load
    moved(tokens, held, A, B, state, at) -> the state after a token; A, B: of `step`
"""

import triton
import triton.language as tl

from dsf.kernels.triton.scan.walk import _program, state_offset
from dsf.kernels.triton.tile import widened


@triton.jit
def place_of(tile, t0, n, N: tl.constexpr, BP: tl.constexpr, k: tl.constexpr = 0):
    """What the holes know of token t0 + k and entry n."""
    i_b, i_h, p, p_ok, place, T, H, P = tile
    zero = tl.zeros((1, 1, 1), tl.int32)
    return (i_b, i_h, t0, zero.to(tl.int64) + k, n + zero, p, zero == 0, zero == 0, p_ok, place, place * BP, T, H, P, N)


@triton.jit
def tile_at(place, i_b, i_h, T, H, P, BP: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr):
    """What all tokens and entries of a program share; EVEN: all its channels exist."""
    p = tl.multiple_of(place * BP + tl.arange(0, BP)[None, None, :], [1, 1, V])
    p_ok = tl.full((1, 1, BP), True, tl.int1) if EVEN else p < P
    return (i_b, i_h, p, p_ok, place, T, H, P)


@triton.jit
def plain_tokens(args, tile, c0, plain: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr):
    """What has no Key axis, of L tokens."""
    found = ()
    for k in tl.static_range(L):
        found = found + (plain(args, place_of(tile, c0, 0, N, BP, k)),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def token(args, tokens, run, at, k: tl.constexpr, whole: tl.constexpr):
    """Token k as `step` knows it."""
    found = tokens[k]
    for i in tl.static_range(len(run)):
        found = found + (run[i][k],)  # noqa: RUF005
    return found + whole(args, tokens[k], at)


@triton.jit
def turn(
    args, tile, c0, n, states, setup: tl.constexpr, runs: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    BP: tl.constexpr,
):  # fmt: skip
    """What a turn of entry n (or the last one) begins with: what Params make, L tokens of Key inputs, the state."""
    n = tl.minimum(n, N - 1)
    at = place_of(tile, c0, n, N, BP)
    return setup(args, at), runs(args, at, L), tl.load(states + n * tile[7] + tile[2], mask=tile[3], other=0.0)


@triton.jit
def endings(ends, c0, L: tl.constexpr):
    """The numbers of the packed sequences that end with each of L tokens, 0 for none, and whether there is one."""
    found = ()
    some = 0
    for k in tl.static_range(L):
        number = tl.load(ends + c0 + k).to(tl.int64)
        found = found + (number,)  # type: ignore[assignment]  # noqa: RUF005
        some += number
    return found, some > 0


@triton.jit
def forward(
    args, y, states, saved, numbers, final, tile, c0,
    setup: tl.constexpr, plain: tl.constexpr, runs: tl.constexpr, whole: tl.constexpr, step: tl.constexpr,
    moved: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr, U: tl.constexpr, BEFORE: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """The outputs of L tokens from c0 on, and what becomes of the states [N, P].

    saved: None, or room for the state before every M-th token. numbers: None, or of the sequences that end with each
    token, whose states are their `final` ones. U: entries whose turns are written out, so that what is loaded a turn
    ahead needs no move.
    """
    i_b, i_h, p, p_ok, place, T, H, P = tile
    if saved is None:  # to their own place: no load of the next turn's is moved behind a store, to where it is used
        saved = states
    else:
        saved += ((i_b * H + i_h) * tl.cdiv(T, M) + c0 // M) * (N * P)
    tokens = plain_tokens(args, tile, c0, plain, N, L, BP)
    alike = setup(args, place_of(tile, c0, 0, N, BP))
    sums = ()
    for _ in tl.static_range(L):
        sums = sums + (tl.zeros((1, 1, BP), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    now = turn(args, tile, c0, 0, states, setup, runs, N, L, BP)
    run = now[1]
    for n0 in range(0, N, U):
        for u in tl.static_range(U):
            n = n0 + u
            held, run, state = now
            now = turn(args, tile, c0, n + 1, states, setup, runs, N, L, BP)
            tl.store(saved + n * P + p, state, mask=p_ok & (c0 % M == 0))
            added = ()
            for k in tl.static_range(L):
                at = place_of(tile, c0, n, N, BP, k)
                one = token(args, tokens, run, at, k, whole)
                a, b, c, e, d = step(one, held, at)
                before = state
                state = moved(one, held, a, b, state, at)
                if numbers is not None:
                    to = final + state_offset((numbers[k] - 1) * H + i_h, n, p, P, N)
                    tl.store(to, state, mask=p_ok & (numbers[k] > 0))
                added = added + (tl.fma(c, before if BEFORE else state, sums[k]),)  # type: ignore[assignment]  # noqa: RUF005
            sums = added
            tl.store(states + n * P + p, state, mask=p_ok)
    tokens = plain_tokens(args, tile, c0, plain, N, L, BP)  # again: few registers hold them through all entries
    first = y + ((i_b * T + c0) * H + i_h) * P + p
    for k in tl.static_range(L):
        at = place_of(tile, c0, 0, N, BP, k)
        a, b, c, e, d = step(token(args, tokens, run, at, k, whole), alike, at)
        tl.store(first + k * (H * P), tl.broadcast_to(e * sums[k] + d, (1, 1, BP)).to(y.dtype.element_ty), mask=p_ok)


@triton.jit
def advance(
    args, y, states, saved, ends, final, tile, c0,
    setup: tl.constexpr, plain: tl.constexpr, runs: tl.constexpr, whole: tl.constexpr, step: tl.constexpr,
    moved: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr, U: tl.constexpr, BEFORE: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """`forward`, with the final states of the packed sequences that end in it, which few stretches have."""
    if ends is None:
        forward(
            args, y, states, saved, None, None, tile, c0, setup, plain, runs, whole, step, moved, N, L, BP, U, BEFORE,
            M,
        )  # fmt: skip
    else:
        numbers, some = endings(ends, c0, L)
        if some:
            forward(
                args, y, states, saved, numbers, final, tile, c0, setup, plain, runs, whole, step, moved, N, L, BP, U,
                BEFORE, M,
            )  # fmt: skip
        else:
            forward(
                args, y, states, saved, None, None, tile, c0, setup, plain, runs, whole, step, moved, N, L, BP, U,
                BEFORE, M,
            )  # fmt: skip


@triton.jit(do_not_specialize=["T", "span"])
def outputs_by_entry(
    args, y, states, final, saved, ends, T, H, P, segments, span,
    setup: tl.constexpr, plain: tl.constexpr, runs: tl.constexpr, whole: tl.constexpr, step: tl.constexpr,
    ahead: tl.constexpr, moved: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr, V: tl.constexpr,
    EVEN: tl.constexpr, U: tl.constexpr, BEFORE: tl.constexpr, M: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """y [B, T, H, P], walking each segment of `span` tokens from its first state.

    states: [B, H, segments, N, P], what enters each segment, replaced by what leaves it. saved: None, or room for the
    state before every M-th token, [B, H, ⌈T/M⌉, N, P]; M is a multiple of L. ends: None, or of packed sequences
    (dsf.kernels.triton.scan.walk.packed_ends), which have a `final` state each. N is a multiple of U. NEAR: the L1 has
    room for what is loaded next.
    """
    place, segment, i_h, i_b = _program(P, segments, H, BP)
    tile = tile_at(place, i_b, i_h, T, H, P, BP, V, EVEN)
    row = i_b * H + i_h
    begin = segment * span
    end = tl.minimum(begin + span, T)
    whole_end = begin + (end - begin) // L * L
    states += (row * segments + segment) * (N * P)
    for c0 in range(begin, whole_end, L):
        if NEAR:
            ahead(args, place_of(tile, row * 0 + tl.minimum(c0 + L, whole_end - L), 0, N, BP), L, BP)
        advance(
            args, y, states, saved, ends, final, tile, row * 0 + c0, setup, plain, runs, whole, step, moved, N, L,
            BP, U, BEFORE, M,
        )  # fmt: skip
    for c0 in range(whole_end, end):
        advance(
            args, y, states, saved, ends, final, tile, row * 0 + c0, setup, plain, runs, whole, step, moved, N, 1,
            BP, U, BEFORE, M,
        )  # fmt: skip


@triton.jit
def absorb(
    args, dy, ends, arriving, local, products, tile, c0, low, high,
    setup: tl.constexpr, plain: tl.constexpr, runs: tl.constexpr, whole: tl.constexpr, step: tl.constexpr,
    N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr, BEFORE: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """What L tokens from c0 on add to the summary of entries `low` to `high`.

    Returns how many products of A were not yet down to LOW before them.
    """
    i_b, i_h, p, p_ok, place, T, H, P = tile
    tokens = plain_tokens(args, tile, c0, plain, N, L, BP)
    given = ()
    if dy is not None:
        first = dy + ((i_b * T + c0) * H + i_h) * P + p
        for k in tl.static_range(L):
            given = given + (widened(tl.load(first + k * (H * P), mask=p_ok, other=0.0)),)  # type: ignore[assignment]  # noqa: RUF005
    alive = 0
    product = tl.load(products + low * P + p, mask=p_ok, other=0.0)
    state = tl.load(local + low * P + p, mask=p_ok, other=0.0)
    for n in range(low, high):
        then = tl.minimum(n + 1, high - 1) * P + p
        next_product = tl.load(products + then, mask=p_ok, other=0.0)
        next_state = tl.load(local + then, mask=p_ok, other=0.0)
        some = tl.sum((~(tl.abs(product) <= LOW)).to(tl.int32))  # NaN is more
        for _ in range(tl.minimum(some, 1)):  # a loop, not a branch, out of which nothing would be moved
            at = place_of(tile, c0, n, N, BP)
            held = setup(args, at)
            run = runs(args, at, L)
            for k in tl.static_range(L - 1 if dy is None else 0, -1 if dy is None else L, -1 if dy is None else 1):
                at = place_of(tile, c0, n, N, BP, k)
                a, b, c, e, d = step(token(args, tokens, run, at, k, whole), held, at)
                if dy is None:
                    state = tl.fma(product, b, state)
                    product *= a
                else:
                    written = c * (e * given[k])
                    if BEFORE:
                        state = tl.fma(product, written, state)
                    product *= a
                    if arriving is not None:
                        number = tl.load(ends + c0 + k).to(tl.int64)
                        there = arriving + state_offset((number - 1) * H + i_h, n, p, P, N)
                        state += product * tl.load(there, mask=p_ok & (number > 0), other=0.0)
                    if not BEFORE:
                        state = tl.fma(product, written, state)
            tl.store(local + n * P + p, state, mask=p_ok)
            tl.store(products + n * P + p, product, mask=p_ok)
        alive += some
        product = next_product
        state = next_state
    return alive


@triton.jit(do_not_specialize=["T", "span", "segments", "origin"])
def summaries_by_entry(
    args, dy, ends, arriving, local, products, T, H, P, segments, span, origin,
    setup: tl.constexpr, plain: tl.constexpr, runs: tl.constexpr, whole: tl.constexpr, step: tl.constexpr,
    ahead: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BP: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr,
    BEFORE: tl.constexpr, NEAR: tl.constexpr, LOW: tl.constexpr, PARTS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """What a segment of `span` tokens does to the state that enters it: multiplies by `products`, adds `local`.

    With dy (the adjoint): what it does to the cotangent entering from its end. Both [B, H, segments, N, P], ones and
    zeros at first; segments begin at origin + segment span, and all but the last (with dy, the first) have a program.
    Tokens come in the order in which what enters would meet them last, and no more of them than it takes to bring all
    products down to LOW: at zero, what lies beyond does not reach the other end. arriving: as in
    dsf.kernels.triton.scan.walk.summaries. PARTS: programs that share the entries of a segment, each a stretch of them.
    LAST: what the last segment does is of use, too, which alone may not be a multiple of L tokens.
    """
    place, segment, i_h, i_b = _program(P, segments - 1, H, BP)
    low = tl.program_id(1) * (N // PARTS)
    high = low + N // PARTS
    if dy is not None:
        segment += 1
    tile = tile_at(place, i_b, i_h, T, H, P, BP, V, EVEN)
    begin = origin + segment * span
    end = tl.maximum(tl.minimum(begin + span, T), begin)
    row = i_b * H + i_h
    local += (row * segments + segment) * (N * P)
    products += (row * segments + segment) * (N * P)
    count = (end - begin) // L
    i = 0
    alive = 1
    while (i < count) & (alive > 0):
        c0 = end - (i + 1) * L if dy is None else begin + i * L
        j = tl.minimum(i + 1, count - 1)
        if NEAR:
            ahead(args, place_of(tile, row * 0 + (end - (j + 1) * L if dy is None else begin + j * L), 0, N, BP), L, BP)
        alive = absorb(
            args, dy, ends, arriving, local, products, tile, row * 0 + c0, low, high, setup, plain, runs, whole, step,
            N, L, BP, BEFORE, LOW,
        )  # fmt: skip
        i += 1
    if dy is not None:  # of states, no segment but the last ends otherwise, and that one's reaches no other
        for c0 in range(begin + count * L, end):
            absorb(
                args, dy, ends, arriving, local, products, tile, row * 0 + c0, low, high, setup, plain, runs, whole,
                step, N, 1, BP, BEFORE, LOW,
            )  # fmt: skip
    elif LAST:
        for after in range(begin + 1, end - count * L + 1):
            absorb(
                args, dy, ends, arriving, local, products, tile, row * 0 + end - count * L - after + begin, low, high,
                setup, plain, runs, whole, step, N, 1, BP, BEFORE, LOW,
            )  # fmt: skip
