"""The fused scan's output pass: y and the final state (tiles.py says what kernels are told)."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton.scan.mixing import walked
from dsf.kernels.triton.scan.tiles import (
    blend,
    fill,
    firsts,
    given_offset,
    moved,
    packed_ends,
    program,
    row_of,
    saved_offset,
    state_offset,
    turns,
)
from dsf.kernels.triton.tile import sum_key, take


class Outputs(NamedTuple):
    """y [B, T, H, P]; the final state [B, H, N, P]; `saved`: None, or memory for the states before every M-th token.

    ends: None, or where packed sequences end (`packed_ends`), which have a final state each.
    """

    y: Any
    final: Any
    saved: Any
    ends: Any


@triton.jit
def fetch(args, at, t0, end, holes: tl.constexpr):
    """The tokens of the tile at t0. Walks call it one tile ahead, so that memory answers while they compute."""
    return holes.load(args, moved(at, t0, t0 + at.t < end))


@triton.jit
def read_tile(tokens, held, out, state, at, t0, end, holes: tl.constexpr, shape: tl.constexpr, MASKED: tl.constexpr):
    """One tile of the output pass: stores y and, with `saved`, its runs' first states; returns the state."""
    at = moved(at, t0, at.t >= 0 if shape.G > 1 and not MASKED else t0 + at.t < end)
    a, b, c, e, d = holes.step(tokens, held, at)
    a, b = blend(a, b, at.t_ok, shape, MASKED)
    before, after, state = walked(a, b, state, tokens, held, at, holes, shape)
    if out.saved is not None:
        run = t0 + firsts(shape.K, shape.G)
        to = out.saved + saved_offset(run, at.n, at, shape.M)
        AXIS: tl.constexpr = 0 if shape.G == 1 else 1
        ok = (run % shape.M == 0) & (run < end) & at.p_ok
        tl.store(to, take(before, turns(shape.K, shape.G), 0, AXIS), mask=ok)
    if out.ends is not None:
        to, last = packed_ends(out.ends, at)
        tl.store(out.final + to, fill(after, shape, shape.NB), mask=last & at.n_ok & at.p_ok)
    y = e * sum_key(c * (before if shape.BEFORE else after), at.n_ok) + d
    to = out.y + given_offset(at)
    tl.store(to + at.t * (at.H * at.P) + at.p, fill(y, shape, 1).to(to.dtype.element_ty), mask=at.t_ok & at.p_ok)
    return state


@triton.jit(do_not_specialize=["T", "span"])
def outputs(args, out, starts, T, H, P, segments, span, holes: tl.constexpr, shape: tl.constexpr):
    """y and the final state, walking each segment of `span` tokens from its first state.

    starts: [B, H, segments, N, P] or None (zeros).
    """
    at, segment = program(T, H, P, segments, shape)
    begin = segment * span
    end = tl.minimum(begin + span, T)
    row = row_of(at)
    long = row * 0  # makes offsets 64-bit
    state = tl.zeros((1, shape.NB, shape.BP), tl.float32)
    if starts is not None:
        before = row * segments + segment
        state += tl.load(starts + state_offset(before, at.n, at), mask=at.n_ok & at.p_ok, other=0.0)
    held = holes.setup(args, at)
    if shape.G > 1 or shape.STAGES > 1:
        tile: tl.constexpr = shape.K * shape.G
        whole = begin + (end - begin) // tile * tile
        for t0 in tl.range(begin, whole, tile, num_stages=shape.STAGES):
            tokens = holes.load(args, moved(at, long + t0, at.t >= 0))
            state = read_tile(tokens, held, out, state, at, long + t0, end, holes, shape, False)
        if whole < end:
            tokens = fetch(args, at, long + whole, end, holes)
            state = read_tile(tokens, held, out, state, at, long + whole, end, holes, shape, True)
    else:
        alone = Outputs(out.y, out.final, None, out.ends)
        tokens = fetch(args, at, long + begin, end, holes)
        for c0 in range(begin, end, shape.M):
            if out.saved is not None:
                tl.store(out.saved + saved_offset(c0, at.n, at, shape.M), state, mask=at.n_ok & at.p_ok)
            c1 = tl.minimum(c0 + shape.M, end)
            whole = c0 + (c1 - c0) // shape.K * shape.K
            for t0 in range(c0, whole, shape.K):
                ahead = fetch(args, at, long + t0 + shape.K, end, holes)
                state = read_tile(tokens, held, alone, state, at, long + t0, end, holes, shape, False)
                tokens = ahead
            if shape.K > 1 and whole < c1:
                state = read_tile(tokens, held, alone, state, at, long + whole, end, holes, shape, True)
    if out.ends is None:  # noqa: SIM102  # known when compiling, unlike what follows
        if segment == segments - 1:
            tl.store(out.final + state_offset(row, at.n, at), state, mask=at.n_ok & at.p_ok)
