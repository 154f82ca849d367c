"""States as they are stored between the walks and the gradients: in the operands' dtype, float32, or float16.

float16 states are divided by a power of two for each SLICE of channels, so that any magnitude fits; the logarithms of
these powers are stored after the entries. Operands that float16 states are multiplied with become float16, too, with a
power of two a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsf.kernels.triton.chunk.tiles import product, whole

SLICE = tl.constexpr(64)
POWERS = tl.constexpr(16)


def sizes_of_state(n: int, p: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The shape in which one state [N, P] is stored."""
    return (n * p + POWERS.value,) if dtype == torch.float16 else (n, p)


@triton.jit
def place_of_state(states, index, SIZE: tl.constexpr):
    """The address of a stored state; SIZE: N P."""
    if states.dtype.element_ty == tl.float16:
        return states + index * (SIZE + POWERS)
    else:
        return states + index * SIZE


@triton.jit
def power_of(largest):
    """x such that 2^-x times numbers up to `largest` is below 2^15 and, unless it underflows, at least 2^14."""
    return tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15) - 141


@triton.jit
def power_of_two(x):
    """2^x in float32, for int32 x."""
    return ((x + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_state(to, place, inside, piece, x, SIZE: tl.constexpr):
    """Store a slice of a state."""
    if to.dtype.element_ty == tl.float16:
        tl.static_assert(x.shape[1] == SLICE)
        power = power_of(tl.max(tl.max(tl.abs(x), axis=1), axis=0))
        tl.store(to + SIZE + piece, power.to(tl.float16))
        x *= power_of_two(-power)
    tl.store(to + place, x.to(to.dtype.element_ty), mask=inside)


@triton.jit
def load_state(at, place, inside, piece, N: tl.constexpr, P: tl.constexpr, KIND: tl.constexpr):
    """A stored state, or one or two slices of it: (numbers in KIND or float16, their factor, 1 or [1, P])."""
    found = tl.load(at + place, mask=inside, other=0.0)
    if at.dtype.element_ty == tl.float16:
        BP: tl.constexpr = place.shape[1]
        powers = at + N * P + piece * (BP // SLICE)
        factor = power_of_two(tl.load(powers).to(tl.int32))
        if BP > SLICE:
            tl.static_assert(BP == 2 * SLICE)
            power = tl.load(powers + 1, mask=piece * BP + SLICE < P, other=0.0)
            second = tl.arange(0, BP)[None, :] >= SLICE
            factor = tl.where(second, power_of_two(power.to(tl.int32)), factor)
        return found, factor
    else:
        return found.to(KIND), 1.0


@triton.jit
def _halved(x):
    """float32 x as float16 numbers, and the factors of its rows [L, 1]."""
    power = power_of(tl.max(tl.abs(x), axis=1, keep_dims=True))
    return (x * power_of_two(-power)).to(tl.float16), power_of_two(power)


@triton.jit
def times_state(x, state, TERMS: tl.constexpr, PRECISION: tl.constexpr, out=None):
    """out + x Sᵀ, for x [L, P] in TERMS terms and state from load_state; x becomes float16 for a float16 state."""
    if state[0].dtype == tl.float16:
        rows, factor = _halved(whole(x, TERMS) * state[1])
        found = tl.dot(rows, tl.trans(state[0])) * factor
        if out is not None:
            found += out
        return found
    else:
        turned_state = tl.trans(state[0])
        return product(x, (turned_state, turned_state), TERMS, 1, PRECISION, out)


@triton.jit
def times_slices(x, state, PRECISION: tl.constexpr):
    """x S, for x [L, N] and state from load_state."""
    if state[0].dtype == tl.float16:
        rows, factor = _halved(x.to(tl.float32))
        return tl.dot(rows, state[0]) * factor * state[1]
    else:
        return tl.dot(x, state[0], input_precision=PRECISION)
