"""The forward passes of the fused scan, one state entry after the other.

A program of one warp owns `BP` channels of one head and one segment of time: lanes lie along the channels. It loads K
tokens at a time into registers, as a tuple of tiles [1, 1, BP], and walks them once for every state entry. What has no
Key axis is computed once for all entries; what has only a Key axis is the same in all lanes. An entry's state is in
memory between its turns. Entries must be independent of each other. Besides the holes of
dsf.kernels.triton.scan.tiles this pass needs five:

    plain(args, at) -> a token's inputs without a Key axis
    runs(args, at, L) -> L tokens of one entry for each input with a Key axis alone; these tokens are contiguous
    whole(args, tokens, at) -> a token's inputs with both axes; tokens: those without a Key axis
    ahead(args, at, L, BP): prefetches the inputs of L tokens
    moved(tokens, held, A, B, state, at) -> the state after a token; A, B: of `step`
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl

from dsf.kernels.triton.launch import constant
from dsf.kernels.triton.scan.tiles import Shape, entered, place_of, program, row_of, state_offset
from dsf.kernels.triton.tile import widened


@dataclass(frozen=True, repr=False)
class Entries(Shape):
    """NB is 1. U: entries whose turns are unrolled, so that values loaded one turn ahead are not copied; it divides N.

    NEAR: the L1 can hold what is prefetched. For summaries: LOW: products up to this size count as zero; PARTS:
    programs that share the entries of a segment; LAST: the summary of the last segment is needed, too.
    """

    NEAR: bool = False
    LOW: float = 0.0
    PARTS: int = 1
    LAST: bool = False

    @property
    def single(self) -> Any:
        """The Shape with K = 1."""
        return constant(replace(self, K=1))


@triton.jit
def plain_tokens(args, at, c0, holes: tl.constexpr, shape: tl.constexpr):
    """The inputs without a Key axis of K tokens."""
    found = ()
    for k in tl.static_range(shape.K):
        found = found + (holes.plain(args, place_of(at, c0, 0, k)),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def token(args, tokens, run, at, k: tl.constexpr, holes: tl.constexpr):
    """Token k in the form that `step` takes."""
    found = tokens[k]
    for i in tl.static_range(len(run)):
        found = found + (run[i][k],)  # noqa: RUF005
    return found + holes.whole(args, tokens[k], at)


@triton.jit
def turn(args, at, c0, n, states, holes: tl.constexpr, shape: tl.constexpr):
    """The loads of a turn of entry n (or the last one): held values, K tokens of Key inputs, the state."""
    n = tl.minimum(n, shape.N - 1)
    here = place_of(at, c0, n)
    state = states + n * at.P + at.p
    return holes.setup(args, here), holes.runs(args, here, shape.K), tl.load(state, mask=at.p_ok, other=0.0)


@triton.jit
def endings(ends, c0, K: tl.constexpr):
    """The numbers of packed sequences that end at each of K tokens, 0 for none; whether any ends or begins there."""
    found = ()
    some = tl.load(ends + c0 - 1, mask=c0 > 0, other=0).to(tl.int64)
    for k in tl.static_range(K):
        number = tl.load(ends + c0 + k).to(tl.int64)
        found = found + (number,)  # type: ignore[assignment]  # noqa: RUF005
        some += number
    return found, some > 0


@triton.jit
def forward(args, out, states, numbers, at, c0, holes: tl.constexpr, shape: tl.constexpr):
    """The outputs of K tokens from c0 on; updates the states [N, P].

    numbers: None, or the numbers of the sequences that end at each token, whose final states are stored; only there
    sequences also begin.
    """
    if out.saved is None:  # to the same memory; this store keeps ptxas from delaying the next turn's loads
        saved = states
    else:
        saved = out.saved + (row_of(at) * tl.cdiv(at.T, shape.M) + c0 // shape.M) * (shape.N * at.P)
    tokens = plain_tokens(args, at, c0, holes, shape)
    alike = holes.setup(args, place_of(at, c0, 0))
    sums = ()
    for _ in tl.static_range(shape.K):
        sums = sums + (tl.zeros((1, 1, shape.BP), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    now = turn(args, at, c0, 0, states, holes, shape)
    run = now[1]
    for n0 in range(0, shape.N, shape.U):
        for u in tl.static_range(shape.U):
            n = n0 + u
            held, run, state = now
            now = turn(args, at, c0, n + 1, states, holes, shape)
            tl.store(saved + n * at.P + at.p, state, mask=at.p_ok & (c0 % shape.M == 0))
            added = ()
            for k in tl.static_range(shape.K):
                here = place_of(at, c0, n, k)
                one = token(args, tokens, run, here, k, holes)
                a, b, c, e, d = holes.step(one, held, here)
                before = state
                if numbers is not None:
                    before = entered(state, one, here, holes)
                state = holes.moved(one, held, a, b, before, here)
                if numbers is not None:
                    to = out.final + state_offset((numbers[k] - 1) * at.H + at.head, n, at)
                    tl.store(to, state, mask=at.p_ok & (numbers[k] > 0))
                added = added + (tl.fma(c, before if shape.BEFORE else state, sums[k]),)  # type: ignore[assignment]  # noqa: RUF005
            sums = added
            tl.store(states + n * at.P + at.p, state, mask=at.p_ok)
    tokens = plain_tokens(args, at, c0, holes, shape)  # loaded again, to save registers
    first = out.y + ((at.batch * at.T + c0) * at.H + at.head) * at.P + at.p
    for k in tl.static_range(shape.K):
        here = place_of(at, c0, 0, k)
        a, b, c, e, d = holes.step(token(args, tokens, run, here, k, holes), alike, here)
        y = tl.broadcast_to(e * sums[k] + d, (1, 1, shape.BP)).to(out.y.dtype.element_ty)
        tl.store(first + k * (at.H * at.P), y, mask=at.p_ok)


@triton.jit
def advance(args, out, states, at, c0, holes: tl.constexpr, shape: tl.constexpr):
    """`forward`, also with first and final states for the few ranges in which packed sequences begin or end."""
    if out.ends is None:
        forward(args, out, states, None, at, c0, holes, shape)
    else:
        numbers, some = endings(out.ends, c0, shape.K)
        if some:
            forward(args, out, states, numbers, at, c0, holes, shape)
        else:
            forward(args, out, states, None, at, c0, holes, shape)


@triton.jit(do_not_specialize=["T", "span"])
def outputs_by_entry(args, out, states, T, H, P, segments, span, holes: tl.constexpr, shape: tl.constexpr):
    """y [B, T, H, P] of each segment of `span` tokens from its first state, and final states of packed sequences.

    states: [B, H, segments, N, P], the entering states, overwritten by the segments' last states. M is a multiple of K.
    """
    at, segment = program(T, H, P, segments, shape)
    row = row_of(at)
    begin = segment * span
    end = tl.minimum(begin + span, T)
    whole_end = begin + (end - begin) // shape.K * shape.K
    states += (row * segments + segment) * (shape.N * P)
    for c0 in range(begin, whole_end, shape.K):
        if shape.NEAR:
            then = row * 0 + tl.minimum(c0 + shape.K, whole_end - shape.K)
            holes.ahead(args, place_of(at, then, 0), shape.K, shape.BP)
        advance(args, out, states, at, row * 0 + c0, holes, shape)
    for c0 in range(whole_end, end):
        advance(args, out, states, at, row * 0 + c0, holes, shape.single)


@triton.jit
def absorb(args, given, local, products, at, c0, low, high, holes: tl.constexpr, shape: tl.constexpr):
    """Add K tokens from c0 on to the summary of entries `low` to `high`.

    Returns how many products of A were above LOW before these tokens.
    """
    K: tl.constexpr = shape.K
    LAST: tl.constexpr = K - 1
    STATES: tl.constexpr = given.dy is None  # states, not cotangents
    tokens = plain_tokens(args, at, c0, holes, shape)
    scales = ()
    if given.dy is not None:
        first = given.dy + ((at.batch * at.T + c0) * at.H + at.head) * at.P + at.p
        for k in tl.static_range(K):
            dy = tl.load(first + k * (at.H * at.P), mask=at.p_ok, other=0.0)
            scales = scales + (widened(dy),)  # type: ignore[assignment]  # noqa: RUF005
    alive = 0
    product = tl.load(products + low * at.P + at.p, mask=at.p_ok, other=0.0)
    state = tl.load(local + low * at.P + at.p, mask=at.p_ok, other=0.0)
    for n in range(low, high):
        then = tl.minimum(n + 1, high - 1) * at.P + at.p
        next_product = tl.load(products + then, mask=at.p_ok, other=0.0)
        next_state = tl.load(local + then, mask=at.p_ok, other=0.0)
        some = tl.sum((~(tl.abs(product) <= shape.LOW)).to(tl.int32))  # counts NaN as above LOW
        for _ in range(tl.minimum(some, 1)):  # a loop, since the compiler moves nothing out of a branch
            held = holes.setup(args, place_of(at, c0, n))
            run = holes.runs(args, place_of(at, c0, n), K)
            inside = place_of(at, c0, n).t_ok  # the sequence that the walk began in
            for k in tl.static_range(LAST if STATES else 0, -1 if STATES else K, -1 if STATES else 1):
                here = place_of(at, c0, n, k)
                one = token(args, tokens, run, here, k, holes)
                a, b, c, e, d = holes.step(one, held, here)
                if STATES:
                    new = tl.fma(product, b, state)
                    state = new if holes.fresh is None else tl.where(inside, new, state)
                    product = entered(product * a, one, here, holes)
                    if holes.fresh is not None:
                        inside = inside & ~holes.fresh(one, here)
                else:
                    if holes.fresh is not None:
                        inside = inside & ~holes.fresh(one, here)
                    new = state
                    written = c * (e * scales[k])
                    if shape.BEFORE:
                        new = tl.fma(product, written, new)
                    product = entered(product * a, one, here, holes)
                    if given.states is not None:
                        number = tl.load(given.ends + c0 + k).to(tl.int64)
                        there = given.states + state_offset((number - 1) * at.H + at.head, n, at)
                        new += product * tl.load(there, mask=at.p_ok & (number > 0), other=0.0)
                    if not shape.BEFORE:
                        new = tl.fma(product, written, new)
                    state = new if holes.fresh is None else tl.where(inside, new, state)
            tl.store(local + n * at.P + at.p, state, mask=at.p_ok)
            tl.store(products + n * at.P + at.p, product, mask=at.p_ok)
        alive += some
        product = next_product
        state = next_state
    return alive


@triton.jit(do_not_specialize=["T", "span", "segments", "origin"])
def summaries_by_entry(
    args, given, local, products, T, H, P, segments, span, origin, holes: tl.constexpr, shape: tl.constexpr
):
    """The effect of a segment of `span` tokens on its entering state: multiplied by `products`, plus `local`.

    With dy (the adjoint): on the cotangent that enters from its end. Both are [B, H, segments, N, P], initially ones
    and zeros. Segments begin at origin + segment span; all but the last (with dy, the first) have a program. Tokens are
    processed from the end of the segment at which the result leaves, until all products are at most LOW: tokens farther
    away then no longer count. Only the last segment may not be a multiple of K tokens. The second axis of the grid
    divides the entries.
    """
    at, segment = program(T, H, P, segments - 1, shape)
    K: tl.constexpr = shape.K
    low = tl.program_id(1) * (shape.N // shape.PARTS)
    high = low + shape.N // shape.PARTS
    if given.dy is not None:
        segment += 1
    begin = origin + segment * span
    end = tl.maximum(tl.minimum(begin + span, T), begin)
    row = row_of(at)
    local += (row * segments + segment) * (shape.N * P)
    products += (row * segments + segment) * (shape.N * P)
    count = (end - begin) // K
    stop = end
    if shape.LAST and given.dy is None:  # runs of K tokens are aligned, so that what is left over comes first
        stop = begin + count * K
        for after in range(stop, end):
            c0 = row * 0 + end - 1 - (after - stop)
            absorb(args, given, local, products, at, c0, low, high, holes, shape.single)
    i = 0
    alive = 1
    while (i < count) & (alive > 0):
        c0 = stop - (i + 1) * K if given.dy is None else begin + i * K
        j = tl.minimum(i + 1, count - 1)
        if shape.NEAR:
            then = row * 0 + (stop - (j + 1) * K if given.dy is None else begin + j * K)
            holes.ahead(args, place_of(at, then, 0), K, shape.BP)
        alive = absorb(args, given, local, products, at, row * 0 + c0, low, high, holes, shape)
        i += 1
    if given.dy is not None:  # for states only the last segment may end within a tile, and its result is not used
        for c0 in range(begin + count * K, end):
            absorb(args, given, local, products, at, row * 0 + c0, low, high, holes, shape.single)
