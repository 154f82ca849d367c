"""The fused scan: one skeleton for every elementwise system, forward and adjoint.

A program owns `BP` channels of one head and one segment of time. It walks its segment `K` tokens at a time; a tile is
[K, N, BP] with the channels on lanes and tokens and state entries in registers, so the walk inside a tile picks
registers and the sum over N stays inside a thread. A vector state (N = 1) comes in
tiles of G runs of K tokens, [G, K, BP]: threads walk their run, and an associative scan over the runs joins them. What
the system is, comes in as holes, printed from the spec (dsf.triton.print_scan) and passed one function an argument:

    setup(args, at) -> what depends on Params alone           load(args, at) -> this tile's tokens
    step(tokens, held, at) -> A, B, C, E, D with y = E Σ_n C S + D, each broadcasting to the tile
    pull(tokens, held, sums, grads, dA, dB, dC, dE, dD, at, sink) -> sums, storing the tokens' gradients
    zeros(NB, BP) -> the Params' sums before the first token
    finish(args, grads, sums, segment, segments, at): stores the Params' gradients of this program

`args`, `grads`: the pointers and strides that the holes know. `at` is where the tile lies: (batch, head, first token,
t, n, p, their three masks, channel block, its first channel, T, H, P, N). `sink`: how gradients that programs share are
laid out (rows a batch row, what to add to a token's number). A, B, C, D exist in registers only.

Tokens past the end are loaded as zeros, and what holes make of zeros may be infinite or NaN: whatever is added to other
tokens' is set to zero there, after it was computed.
"""

import triton
import triton.language as tl

from dsf.kernels.triton.tile import sum_key, take


@triton.jit
def channels(place, P, N: tl.constexpr, NB: tl.constexpr, BP: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr):
    """The tile's state entries n [1, NB, 1] and channels p [1, 1, BP], and which exist (n_ok, p_ok).

    V neighbouring channels share a thread. EVEN: P is a multiple of BP, so that all of them exist.
    """
    n = tl.arange(0, NB)[None, :, None]
    p = tl.multiple_of(place * BP + tl.arange(0, BP)[None, None, :], [1, 1, V])
    p_ok = tl.full((1, 1, BP), True, tl.int1) if EVEN else p < P
    return n, p, n < N, p_ok


@triton.jit
def state_offset(row, n, p, P, N: tl.constexpr):
    """Where entry (n, p) of state number `row` lies in a buffer [rows, N, P]."""
    return row * (N * P) + n * P + p


@triton.jit
def firsts(K: tl.constexpr, G: tl.constexpr, BACK: tl.constexpr = False):
    """The first tokens of the tile's runs, [G, 1, 1], with BACK the last run's first."""
    g = tl.arange(0, G)[:, None, None]
    return (G - 1 - g if BACK else g) * K


@triton.jit
def numbers(K: tl.constexpr, G: tl.constexpr, BACK: tl.constexpr = False):
    """The tile's tokens in order, [K, 1, 1] or run after run [G, K, 1], with BACK the last run first."""
    if G == 1:
        t = tl.arange(0, K)[:, None, None]
    else:
        t = firsts(K, G, BACK) + tl.arange(0, K)[None, :, None]
    return t


@triton.jit
def turns(K: tl.constexpr, G: tl.constexpr):
    """The tokens that a thread walks, on their axis: [K, 1, 1], or [1, K, 1] of every run."""
    return tl.arange(0, K)[:, None, None] if G == 1 else tl.arange(0, K)[None, :, None]


@triton.jit
def fill(x, K: tl.constexpr, NB: tl.constexpr, G: tl.constexpr, BP: tl.constexpr):
    """x as a full tile, [K, NB, BP] or [G, K, BP]."""
    return tl.broadcast_to(x, (K, NB, BP)) if G == 1 else tl.broadcast_to(x, (G, K, BP))


@triton.jit
def blend(a, b, t_ok, K: tl.constexpr, NB: tl.constexpr, G: tl.constexpr, BP: tl.constexpr, MASKED: tl.constexpr):
    """A and B as full tiles; tokens past the end leave the state as it is."""
    a = fill(a, K, NB, G, BP)
    b = fill(b, K, NB, G, BP)
    if MASKED:
        a = tl.where(t_ok, a, 1.0)
        b = tl.where(t_ok, b, 0.0)
    return a, b


@triton.jit
def link(keep, add, kept, added, later_keep, later_add, later_kept, later_added):
    """Two stretches of runs as one: s -> keep s + add through all of it, kept s + added up to its last run."""
    return (
        keep * later_keep,
        later_keep * add + later_add,
        keep * later_kept,
        later_kept * add + later_added,
    )


@triton.jit
def join(keep, add, G: tl.constexpr):
    """What enters every run but the first, and what leaves the last, of runs s -> keep s + add [G, 1, BP].

    The state that enters the first is in its `add`.
    """
    one = tl.full(add.shape, 1.0, tl.float32)
    keep, add, kept, added = tl.associative_scan((keep, add, one, one - 1.0), 0, link)
    g = tl.arange(0, G)[:, None, None]
    return added, tl.sum(tl.where(g == G - 1, add, -0.0), 0, keep_dims=True)


@triton.jit
def walk(a, b, state, K: tl.constexpr, G: tl.constexpr):
    """States before and after every token of a tile, and the last one.

    state: what enters the tile, or (then there is no last one) every run [G, 1, BP].
    """
    t = turns(K, G)
    last = state
    if G > state.shape[0]:
        first = tl.arange(0, G)[:, None, None] == 0
        add = tl.where(first, state, 0.0)
        keep = tl.full(add.shape, 1.0, tl.float32)
        for k in tl.static_range(K):
            add = take(a, t, k, 1) * add + take(b, t, k, 1)
            keep *= take(a, t, k, 1)
        entering, last = join(keep, add, G)
        state = tl.where(first, state, entering)
    AXIS: tl.constexpr = 0 if G == 1 else 1
    before = a
    after = a
    for k in tl.static_range(K):
        before = tl.where(t == k, state, before)
        state = take(a, t, k, AXIS) * state + take(b, t, k, AXIS)
        after = tl.where(t == k, state, after)
    if G == 1:
        last = state
    return before, after, last


@triton.jit
def last_state(a, b, state, K: tl.constexpr):
    """The state after a tile without runs."""
    t = turns(K, 1)
    for k in tl.static_range(K):
        state = take(a, t, k) * state + take(b, t, k)
    return state


@triton.jit
def fetch(
    args, i_b, i_h, t0, end, t, n, p, n_ok, p_ok, place, T, H, P, load: tl.constexpr, N: tl.constexpr, BP: tl.constexpr
):
    """The tokens of the tile at t0. Walks call it one tile ahead, so that memory answers while they compute."""
    return load(args, (i_b, i_h, t0, t, n, p, t0 + t < end, n_ok, p_ok, place, place * BP, T, H, P, N))


@triton.jit
def packed_ends(ends, t0, t, t_ok, i_h, n, p, H, P, N: tl.constexpr):
    """Where the states after sequences' last tokens lie in a buffer [sequences, H, N, P], and which tokens are last.

    ends: [T], a sequence's number from 1 at its last token, 0 elsewhere.
    """
    number = tl.load(ends + t0 + t, mask=t_ok, other=0)
    return state_offset((number.to(tl.int64) - 1) * H + i_h, n, p, P, N), number > 0


@triton.jit
def read_tile(
    tokens, held, y, ends, final, saved, state, i_b, i_h, t0, end, t, n, p, n_ok, p_ok, place, T, H, P,
    step: tl.constexpr, N: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, G: tl.constexpr, BP: tl.constexpr,
    BEFORE: tl.constexpr, M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of the output pass: stores y and, with `saved`, its runs' first states; returns the state."""
    t_ok = t >= 0 if G > 1 and not MASKED else t0 + t < end
    at = (i_b, i_h, t0, t, n, p, t_ok, n_ok, p_ok, place, place * BP, T, H, P, N)
    a, b, c, e, d = step(tokens, held, at)
    a, b = blend(a, b, t_ok, K, NB, G, BP, MASKED)
    before, after, state = walk(a, b, state, K, G)
    if saved is not None:
        run = t0 + firsts(K, G)
        to = saved + state_offset((i_b * H + i_h) * tl.cdiv(T, M) + run // M, n, p, P, N)
        tl.store(to, take(before, turns(K, G), 0, 0 if G == 1 else 1), mask=(run % M == 0) & (run < end) & p_ok)
    if ends is not None:
        to, last = packed_ends(ends, t0, t, t_ok, i_h, n, p, H, P, N)
        tl.store(final + to, fill(after, K, NB, G, BP), mask=last & n_ok & p_ok)
    seen = c * (before if BEFORE else after)
    out = e * sum_key(seen, n_ok) + d
    base = y + ((i_b * T + t0) * H + i_h) * P
    tl.store(base + t * (H * P) + p, fill(out, K, 1, G, BP).to(y.dtype.element_ty), mask=t_ok & p_ok)
    return state


@triton.jit(do_not_specialize=["T", "span"])
def outputs(
    args, y, starts, final, saved, ends, T, H, P, segments, span,
    setup: tl.constexpr, load: tl.constexpr, step: tl.constexpr, N: tl.constexpr, K: tl.constexpr, NB: tl.constexpr,
    BP: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr, BEFORE: tl.constexpr, M: tl.constexpr,
    G: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y [B, T, H, P] and the final state, walking each segment of `span` tokens from its first state.

    starts: [B, H, segments, N, P] or None (zeros); saved: None, or room for the state before every M-th token,
    [B, H, ⌈T/M⌉, N, P]. ends: None, or of packed sequences (packed_ends), which have a final state each.
    """
    place, segment, i_h, i_b = _program(P, segments, H, BP)
    n, p, n_ok, p_ok = channels(place, P, N, NB, BP, V, EVEN)
    t = numbers(K, G)
    begin = segment * span
    end = tl.minimum(begin + span, T)
    row = i_b * H + i_h
    long = row * 0  # makes offsets 64-bit
    state = tl.zeros((1, NB, BP), tl.float32)
    if starts is not None:
        state += tl.load(starts + state_offset(row * segments + segment, n, p, P, N), mask=n_ok & p_ok, other=0.0)
    held = setup(args, (i_b, i_h, 0, t, n, p, True, n_ok, p_ok, place, place * BP, T, H, P, N))
    if G > 1 or STAGES > 1:
        whole = begin + (end - begin) // (K * G) * (K * G)
        for t0 in tl.range(begin, whole, K * G, num_stages=STAGES):
            at = (i_b, i_h, long + t0, t, n, p, t >= 0, n_ok, p_ok, place, place * BP, T, H, P, N)
            state = read_tile(
                load(args, at), held, y, ends, final, saved, state, i_b, i_h, long + t0, end, t, n, p, n_ok, p_ok,
                place, T, H, P, step, N, K, NB, G, BP, BEFORE, M, False,
            )  # fmt: skip
        if whole < end:
            tokens = fetch(args, i_b, i_h, long + whole, end, t, n, p, n_ok, p_ok, place, T, H, P, load, N, BP)
            state = read_tile(
                tokens, held, y, ends, final, saved, state, i_b, i_h, long + whole, end, t, n, p, n_ok, p_ok,
                place, T, H, P, step, N, K, NB, G, BP, BEFORE, M, True,
            )  # fmt: skip
    else:
        tokens = fetch(args, i_b, i_h, long + begin, end, t, n, p, n_ok, p_ok, place, T, H, P, load, N, BP)
        for c0 in range(begin, end, M):
            if saved is not None:
                chunk = row * tl.cdiv(T, M) + c0 // M
                tl.store(saved + state_offset(chunk, n, p, P, N), state, mask=n_ok & p_ok)
            c1 = tl.minimum(c0 + M, end)
            whole = c0 + (c1 - c0) // K * K
            for t0 in range(c0, whole, K):
                ahead = fetch(args, i_b, i_h, long + t0 + K, end, t, n, p, n_ok, p_ok, place, T, H, P, load, N, BP)
                state = read_tile(
                    tokens, held, y, ends, final, None, state, i_b, i_h, long + t0, end, t, n, p, n_ok, p_ok,
                    place, T, H, P, step, N, K, NB, G, BP, BEFORE, M, False,
                )  # fmt: skip
                tokens = ahead
            if K > 1 and whole < c1:
                state = read_tile(
                    tokens, held, y, ends, final, None, state, i_b, i_h, long + whole, end, t, n, p, n_ok, p_ok,
                    place, T, H, P, step, N, K, NB, G, BP, BEFORE, M, True,
                )  # fmt: skip
    if ends is None:  # noqa: SIM102  # known when compiling, unlike what follows
        if segment == segments - 1:
            tl.store(final + state_offset(row, n, p, P, N), state, mask=n_ok & p_ok)


@triton.jit
def _program(P, segments, H, BP: tl.constexpr):
    """This program's channel block, segment, head and batch row (64-bit)."""
    program = tl.program_id(0)
    blocks = tl.cdiv(P, BP)
    row = (program // (blocks * segments)).to(tl.int64)
    return (program % blocks).to(tl.int64), (program // blocks) % segments, row % H, row // H


@triton.jit
def fetch_outer(
    args, dy, i_b, i_h, t0, end, t, n, p, n_ok, p_ok, place, T, H, P, load: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, INSIDE: tl.constexpr = False,
):  # fmt: skip
    """The tokens of the tile at t0, and its outputs' gradients (float32) if there are some.

    INSIDE: no token lies past the end.
    """
    t_ok = t >= 0 if INSIDE else t0 + t < end
    found = t
    if dy is not None:
        base = dy + ((i_b * T + t0) * H + i_h) * P
        found = tl.load(base + t * (H * P) + p, mask=t_ok & p_ok, other=0.0).to(tl.float32)
    return load(args, (i_b, i_h, t0, t, n, p, t_ok, n_ok, p_ok, place, place * BP, T, H, P, N)), found


@triton.jit
def absorb_tile(
    found, held, dy, ends, arriving, state, decay, i_b, i_h, t0, end, t, n, p, n_ok, p_ok, place, T, H, P,
    step: tl.constexpr, rate: tl.constexpr, N: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, BP: tl.constexpr,
    BEFORE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of a summary: the state after it (with dy: the cotangent before it), and what that was multiplied by.

    With a rate, log2 of that without its factor along the Key axis, a sum.
    """
    t_ok = t0 + t < end
    at = (i_b, i_h, t0, t, n, p, t_ok, n_ok, p_ok, place, place * BP, T, H, P, N)
    a, b, c, e, d = step(found[0], held, at)
    if dy is not None:
        b = c * (e * found[1])
    a, b = blend(a, b, t_ok, K, NB, 1, BP, MASKED)
    late = b
    if arriving is not None:
        to, last = packed_ends(ends, t0, t, t_ok, i_h, n, p, H, P, N)
        late = tl.load(arriving + to, mask=last & n_ok & p_ok, other=0.0)
    for k in tl.static_range(K):
        if dy is None:
            state = take(a, t, k) * state + take(b, t, k)
            if rate is None:
                decay *= take(a, t, k)
        else:
            if arriving is not None:
                state += take(late, t, K - 1 - k)
            if not BEFORE:
                state += take(b, t, K - 1 - k)
            state *= take(a, t, K - 1 - k)
            if BEFORE:
                state += take(b, t, K - 1 - k)
            if rate is None:
                decay *= take(a, t, K - 1 - k)
    if rate is not None:
        found_rate = rate(found[0], held, at)
        if MASKED:
            found_rate = tl.where(t_ok, found_rate, 0.0)
        decay += tl.sum(found_rate, 0, keep_dims=True)
    return state, decay


@triton.jit
def absorb_rest(
    args, held, dy, ends, arriving, state, decay, i_b, i_h, whole, end, t, n, p, n_ok, p_ok, place, T, H, P,
    load: tl.constexpr, step: tl.constexpr, rate: tl.constexpr, N: tl.constexpr, K: tl.constexpr, NB: tl.constexpr,
    BP: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """The tiles from `whole` to the segment's end, with dy in reverse."""
    count = tl.cdiv(tl.maximum(end - whole, 0), K)
    for i in range(count):
        t0 = whole + (i if dy is None else count - 1 - i) * K
        found = fetch_outer(args, dy, i_b, i_h, t0, end, t, n, p, n_ok, p_ok, place, T, H, P, load, N, BP)
        state, decay = absorb_tile(
            found, held, dy, ends, arriving, state, decay, i_b, i_h, t0, end, t, n, p, n_ok, p_ok, place, T, H, P,
            step, rate, N, K, NB, BP, BEFORE, K > 1,
        )  # fmt: skip
    return state, decay


@triton.jit
def _inside(t0, begin, end, K: tl.constexpr):
    """A tile that begins in a segment: its last token again past the end, where a tile is one token."""
    t0 = tl.maximum(t0, begin)
    return tl.minimum(t0, end - 1) if K == 1 else t0


@triton.jit(do_not_specialize=["T", "span", "segments", "origin"])
def summaries(
    args, dy, ends, arriving, local, product, T, H, P, segments, span, origin,
    setup: tl.constexpr, load: tl.constexpr, step: tl.constexpr, rate: tl.constexpr, kept: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, BP: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr,
    BEFORE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """What a segment does to the state that enters it: multiplies by `product`, adds `local`.

    With dy (the adjoint): what it does to the cotangent entering from its end, walking backwards in time. Both
    [B, H, segments, N, P]. What leaves the last segment (the first, for cotangents) enters no other, so the grid has
    one segment less. Segment s begins at origin + s span. rate, kept: functions that give the product from a sum over
    tokens, or None. arriving: cotangents [sequences, H, N, P] of packed sequences' final states (packed_ends), or None.
    """
    place, segment, i_h, i_b = _program(P, segments - 1, H, BP)
    if dy is not None:
        segment += 1
    n, p, n_ok, p_ok = channels(place, P, N, NB, BP, V, EVEN)
    t = tl.arange(0, K)[:, None, None]
    begin = origin + segment * span
    end = tl.minimum(begin + span, T)
    held = setup(args, (i_b, i_h, 0, t, n, p, True, n_ok, p_ok, place, place * BP, T, H, P, N))
    long = i_b * 0  # makes offsets 64-bit
    state = tl.zeros((1, NB, BP), tl.float32)
    decay = tl.full((1, NB, BP), 1.0, tl.float32) if rate is None else tl.zeros((1, 1, BP), tl.float32)
    tiles = tl.maximum(end - begin, 0) // (AHEAD * K) * AHEAD
    whole = begin + tiles * K
    if AHEAD * K > 1 and dy is not None:
        state, decay = absorb_rest(
            args, held, dy, ends, arriving, state, decay, i_b, i_h, long + whole, end, t, n, p, n_ok, p_ok, place, T, H,
            P, load, step, rate, N, K, NB, BP, BEFORE,
        )  # fmt: skip
    pace: tl.constexpr = K if dy is None else -K
    first = begin if dy is None else whole - K
    line = ()
    for u in tl.static_range(AHEAD):
        t0 = long + _inside(first + u * pace, begin, end, K)
        found = fetch_outer(args, dy, i_b, i_h, t0, end, t, n, p, n_ok, p_ok, place, T, H, P, load, N, BP, K == 1)
        line = line + (found,)  # type: ignore[assignment]  # noqa: RUF005
    for i in range(0, tiles, AHEAD):
        coming = ()
        for u in tl.static_range(AHEAD):
            here = long + first + (i + u) * pace
            ahead = long + _inside(first + (i + u + AHEAD) * pace, begin, end, K)
            if AHEAD == 1:
                found = fetch_outer(
                    args, dy, i_b, i_h, ahead, end, t, n, p, n_ok, p_ok, place, T, H, P, load, N, BP, K == 1
                )
            state, decay = absorb_tile(
                line[u], held, dy, ends, arriving, state, decay, i_b, i_h, here, end, t, n, p, n_ok, p_ok, place, T, H,
                P, step, rate, N, K, NB, BP, BEFORE, False,
            )  # fmt: skip
            if AHEAD > 1:  # into the registers that are free now
                found = fetch_outer(
                    args, dy, i_b, i_h, ahead, end, t, n, p, n_ok, p_ok, place, T, H, P, load, N, BP, K == 1
                )
            coming = coming + (found,)  # type: ignore[assignment]  # noqa: RUF005
        line = coming
    if AHEAD * K > 1 and dy is None:
        state, decay = absorb_rest(
            args, held, dy, ends, arriving, state, decay, i_b, i_h, long + whole, end, t, n, p, n_ok, p_ok, place, T, H,
            P, load, step, rate, N, K, NB, BP, BEFORE,
        )  # fmt: skip
    if rate is not None:
        decay = kept(decay, held)
    row = (i_b * H + i_h) * segments + segment
    tl.store(local + state_offset(row, n, p, P, N), state, mask=n_ok & p_ok)
    tl.store(product + state_offset(row, n, p, P, N), tl.broadcast_to(decay, (1, NB, BP)), mask=n_ok & p_ok)


@triton.jit(do_not_specialize=["segments"])
def combine(local, product, first, size, segments, BLOCK: tl.constexpr, K: tl.constexpr, REVERSE: tl.constexpr):
    """Replace each segment's `local` by what enters the segment: states in time order, cotangents in reverse.

    local, product: [rows, segments, size]; first: [rows, size] or None (zeros) enters the first (last) segment.
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
            carry = take(keeps, k, j) * carry + take(adds, k, j)
        tl.store(local + here, enters, mask=(s0 + k < segments) & (i < size))
