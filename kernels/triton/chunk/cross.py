"""The gradient of turning the state between two chunks, where keys and queries were turned (dsf.kernels.triton.turn).

A turn by φ of the pairs of a state S whose gradient is G has the slope Σ_p (S_{2i,p} G_{2i+1,p} - S_{2i+1,p} G_{2i,p})
in φ_i. It is the sum of the slopes of all later queries and keys, computed without that sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels.triton.chunk.states import SLICE, load_state, place_of_state
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.packed import place_of_chunk, sequence_of_chunk
from dsf.kernels.triton.sizes import power
from dsf.kernels.triton.structs import Config

if TYPE_CHECKING:
    from dsf.kernels.triton.chunk.matrix import _Call
    from dsf.kernels.triton.chunk.walks import Adjoints


@dataclass
class Border:
    """slopes: filled by a backward pass, of turning the state behind each chunk, [B, H, chunks, N / 2]; 0 behind a
    sequence's last one."""

    slopes: Tensor | None = None


@dataclass(frozen=True, repr=False)
class Cross(Config):
    """N and P of a state; W: N / 2 rounded up to a power of two; EXTRA: the first program takes the state before the
    stretch's first chunk, and its gradient in float32."""

    N: int
    P: int
    W: int
    EXTRA: bool


@triton.jit
def _slopes(first, second, d_first, d_second):
    return tl.sum(first * d_second - second * d_first, axis=1)


@triton.jit
def _pairs(at, pair, low, known, C: tl.constexpr):
    """A slice of a stored state: the first and the second places of its pairs [W, SLICE], in float32."""
    column = low * SLICE + tl.arange(0, SLICE)[None, :]
    inside = (pair < C.N // 2) & (column < C.P) & known
    place = 2 * pair * C.P + column
    first, factor = load_state(at, place, inside, low, C.N, C.P, tl.float32)
    second, _ = load_state(at, place + C.P, inside, low, C.N, C.P, tl.float32)
    return first.to(tl.float32) * factor, second.to(tl.float32) * factor


@triton.jit(do_not_specialize=["base", "count", "since", "held", "chunks"])
def cross(states, adjoints, last, to, table, base, count, since, held, chunks, C: tl.constexpr):
    """Slopes behind the chunks of a stretch: `count` chunks from `base` on; 0 behind a packed sequence's last chunk.

    states: first states of `held` chunks from `since` on, by lane; adjoints: gradients of the stretch's last states;
    last: that of the state before the stretch, of one segment [B, H, N, P].
    """
    place, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pair = tl.arange(0, C.W)
    chunk = base + place - C.EXTRA
    total = tl.zeros([C.W], tl.float32)
    known = chunk + 1 < since + held
    if table is not None:
        following = tl.where(known, chunk + 1, chunk)
        begin, end = place_of_chunk(table, following, 0, 1)
        _, first_of_sequence = sequence_of_chunk(table, following)
        known &= (begin < end) & (first_of_sequence <= chunk)
    at = place_of_state(states, lane * held + tl.where(known, chunk + 1 - since, 0), C.N * C.P)
    for low in tl.static_range((C.P + SLICE - 1) // SLICE):
        first, second = _pairs(at, pair[:, None], low, known, C)
        if C.EXTRA:
            if place == 0:
                d_first, d_second = _pairs(last + lane * (C.N * C.P), pair[:, None], low, known, C)
            else:
                of = place_of_state(adjoints, lane * count + place - 1, C.N * C.P)
                d_first, d_second = _pairs(of, pair[:, None], low, known, C)
        else:
            of = place_of_state(adjoints, lane * count + place, C.N * C.P)
            d_first, d_second = _pairs(of, pair[:, None], low, known, C)
        total += _slopes(first, second, d_first, d_second)
    stored = pair < C.N // 2
    if table is None:  # other chunks' are stored with the stretch that has their states
        stored &= known | (chunk + 1 == chunks)
    tl.store(to + (lane * chunks + chunk) * (C.N // 2) + pair, total, mask=stored)


def fill(call: _Call, found: Adjoints, border: Border) -> None:
    """Fill the slopes behind the chunks of a stretch, and before it where no other stretch has its first state."""
    slopes = border.slopes
    assert slopes is not None
    states, since, held = found.known
    extra = since == found.base and found.base > 0
    config: dict[str, Any] = {"N": call.n, "P": call.p, "W": power(call.n // 2), "EXTRA": extra}
    launch(
        cross, (found.chunks + extra, call.lanes), states, found.states, found.last if extra else None, slopes,
        call.chunk_table, found.base, found.chunks, since, held, call.chunks,
        C=Cross(**config), num_warps=8,
    )  # fmt: skip
