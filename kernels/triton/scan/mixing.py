"""Tokens that mix the entries of a channel: S_t = A ⊙ Z + Σ l (r'Z) + B, where Z is S_{t-1} with its pairs turned.

The holes `angle` and `low` give the cosine and sine of the pairs' angle, and l and r of every correction in turn; a
hole is None where the system has none. Tiles have one token. Turns and corrections of the transition do not compose as
cheaply as decays, so that time is not cut into segments.

Turned pairs: R(θ) = cos θ + sin θ J with J (x, y) = (-y, x), whose transpose is -J.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsf.kernels.triton.scan.tiles import entered, first_tokens, last_state, walk
from dsf.kernels.triton.tile import sum_key


@triton.jit
def quarter(x):
    """J x: neighbouring entries (x, y) become (-y, x)."""
    pairs = tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2, x.shape[2]))
    first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(-second, first), (0, 1, 3, 2)), x.shape)


@triton.jit
def turned(state, tokens, held, at, holes: tl.constexpr):
    """Z, the state with its pairs turned."""
    if holes.angle is not None:
        cosine, sine = holes.angle(tokens, held, at)
        state = cosine * state + sine * quarter(state)
    return state


@triton.jit
def moved_on(a, b, state, tokens, held, at, holes: tl.constexpr):
    """The state after a token, from the one before it."""
    z = turned(state, tokens, held, at, holes)
    found = a * z + b
    if holes.low is not None:
        low = holes.low(tokens, held, at)
        for i in tl.static_range(len(low) // 2):
            found += low[2 * i] * sum_key(low[2 * i + 1] * z, at.n_ok)
    return found


@triton.jit
def walked(a, b, state, tokens, held, at, holes: tl.constexpr, shape: tl.constexpr):
    """States before and after every token of a tile, and the last one, from `state` before it."""
    if holes.elementwise:
        found = walk(a, b, first_tokens(tokens, at, a, holes), state, shape.K, shape.G)
    else:
        before = entered(state, tokens, at, holes)
        after = moved_on(a, b, before, tokens, held, at, holes)
        found = before, after, after
    return found


@triton.jit
def left_by(a, b, state, tokens, held, at, holes: tl.constexpr, shape: tl.constexpr):
    """The last state of a tile without runs, from `state` before it."""
    if holes.elementwise:
        found = last_state(a, b, first_tokens(tokens, at, a, holes), state, shape.K)
    else:
        found = moved_on(a, b, entered(state, tokens, at, holes), tokens, held, at, holes)
    return found


@triton.jit
def moved_back(a, g, state, tokens, held, at, holes: tl.constexpr):
    """The cotangents of the state before a token, of A, and of what the holes gave (in their order), from g, the one of
    the state after it."""
    z = turned(state, tokens, held, at, holes)
    dz = a * g
    found = ()
    if holes.low is not None:
        low = holes.low(tokens, held, at)
        for i in tl.static_range(len(low) // 2):
            written = sum_key(low[2 * i] * g, at.n_ok)
            found = found + (g * sum_key(low[2 * i + 1] * z, at.n_ok), z * written)  # type: ignore[assignment]  # noqa: RUF005
            dz += low[2 * i + 1] * written
    if holes.angle is not None:
        cosine, sine = holes.angle(tokens, held, at)
        found = (dz * state, dz * quarter(state)) + found  # type: ignore[assignment]  # noqa: RUF005
        dz = cosine * dz - sine * quarter(dz)
    return dz, g * z, found
