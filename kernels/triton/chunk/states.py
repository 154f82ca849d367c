"""States as they are kept between the walks and the gradients: in the operands' dtype, float32, or float16.

States in float16 are kept times powers of two, so that any magnitude fits: one power for each SLICE of channels. The
logarithms of these powers lie behind the entries. The operands that states are multiplied with become float16, too, row
by row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsf.kernels.triton.chunk.tiles import product, whole

SLICE = tl.constexpr(64)
POWERS = tl.constexpr(16)


def sizes_of_state(n: int, p: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The sizes of one kept state [N, P]."""
    return (n * p + POWERS.value,) if dtype == torch.float16 else (n, p)


@triton.jit
def place_of_state(states, index, SIZE: tl.constexpr):
    """Where one of the kept states of SIZE entries begins."""
    if states.dtype.element_ty == tl.float16:
        return states + index * (SIZE + POWERS)
    else:
        return states + index * SIZE


@triton.jit
def power_of(largest):
    """The logarithm of what float16 numbers are times whose largest is 2^14 to 2^15."""
    return tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15) - 141


@triton.jit
def power_of_two(x):
    """2^x of whole numbers in float32."""
    return ((x + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_state(to, place, inside, piece, x, SIZE: tl.constexpr):
    """Keep a slice of a state."""
    if to.dtype.element_ty == tl.float16:
        tl.static_assert(x.shape[1] == SLICE)
        power = power_of(tl.max(tl.max(tl.abs(x), axis=1), axis=0))
        tl.store(to + SIZE + piece, power.to(tl.float16))
        x *= power_of_two(-power)
    tl.store(to + place, x.to(to.dtype.element_ty), mask=inside)


@triton.jit
def load_state(at, place, inside, piece, N: tl.constexpr, P: tl.constexpr, KIND: tl.constexpr):
    """A kept state, or one or two slices of it, in KIND or float16, and what the latter's are to be times [1, P]."""
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
    """float32 x in float16 and what its rows are to be times [L, 1]."""
    power = power_of(tl.max(tl.abs(x), axis=1, keep_dims=True))
    return (x * power_of_two(-power)).to(tl.float16), power_of_two(power)


@triton.jit
def times_state(x, state, TERMS: tl.constexpr, PRECISION: tl.constexpr, out=None):
    """out + x Sᵀ, of x [L, P] in TERMS terms, and of what load_state found; in float16 x is rounded to one term."""
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
    """x S, of x [L, N] and of what load_state found."""
    if state[0].dtype == tl.float16:
        rows, factor = _halved(x.to(tl.float32))
        return tl.dot(rows, state[0]) * factor * state[1]
    else:
        return tl.dot(x, state[0], input_precision=PRECISION)
