"""The normaliser of systems with one decay a head: n_t = a_t n_{t-1} + s_t o_t k_t, read as c_t q_t·n_t.

Computes what every chunk adds to n, then n between chunks by a scan over the chunks; backwards the same for the
gradient of n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels.triton.chunk.gradient_parts import NormalGradients
from dsf.kernels.triton.chunk.scalars import TOTAL
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.packed import chunks_of


@dataclass
class Normaliser:
    """The normaliser's tensors of one call, besides those it shares with its system.

    ones: its input [B, T, H], None for 1; state: its first state [B or sequences, H, N]. For backward: slope [B, T, H]
    and final_gradient [B, H, N], the gradients of its readout and of its last state, and the states of the forward
    pass. The call fills the rest. Forward: read [B, T, H], final [B, H, N] and states, its values between chunks
    [B · H, chunks, N]. Backward: d_ones and first, the gradients of ones and state, and adjoints, the gradients of its
    states between chunks. added [B · H, chunks, N]: what every chunk adds to states, or to adjoints.
    """

    ones: Tensor | None = None
    state: Tensor | None = None
    slope: Tensor | None = None
    final_gradient: Tensor | None = None
    read: Tensor | None = None
    final: Tensor | None = None
    d_ones: Tensor | None = None
    first: Tensor | None = None
    states: Tensor | None = None
    adjoints: Tensor | None = None
    added: Tensor | None = None


def kind_of(normal: Normaliser | None) -> int:
    """The walks' and the gradient kernel's NORMAL: 0 none, 1 driven by 1, 2 by what `ones` holds."""
    return 0 if normal is None else 1 + (normal.ones is not None)


def by_lane(x: Tensor | None) -> Tensor | None:
    """[B, T, H] contiguous in time: [B, H, T]."""
    return None if x is None else x.movedim(-1, 1).contiguous()


@triton.jit
def _after(decay, value, decay_next, value_next):
    """Composition of two maps n → decay n + value."""
    return decay * decay_next, value * decay_next + value_next


@triton.jit
def carry_weights(
    added, start, scalars, states, final, table,
    chunks, length, plane,
    N: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
    DECAY: tl.constexpr, START: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Normalisers before each chunk (REVERSE: after it) [B·H, chunks, N] from what chunks add, and the last one.

    table: of packed sequences, which have initial and last normalisers [S, H, N] each.
    """
    lane, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2)
    low, stop = chunks_of(table, sequence, chunks)
    of_ends = (sequence * tl.num_programs(1) + lane) * N
    keys, steps = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BLOCK)
    here = keys < N
    weight = tl.zeros([BN], tl.float32)
    if START:
        weight = tl.load(start + of_ends + keys, mask=here, other=0.0)
    count = stop - low
    for first in range(0, count, BLOCK):
        step = first + steps
        inside = step < count
        chunk = tl.where(inside, stop - 1 - step if REVERSE else low + step, 0)
        at = (lane * chunks + chunk)[:, None] * N + keys[None, :]
        mask = inside[:, None] & here[None, :]
        value = tl.load(added + at, mask=mask, other=0.0)
        decay = tl.full([BLOCK], 1.0, tl.float32)
        if DECAY:
            decay = tl.load(scalars + TOTAL * plane + lane * length + chunk * L, mask=inside, other=1.0)
        passed, value = tl.associative_scan((tl.broadcast_to(decay[:, None], (BLOCK, BN)), value), 0, _after)
        after = passed * weight[None, :] + value
        tl.store(states + at, weight[None, :] + tl.zeros([BLOCK, BN], tl.float32), mask=mask & (step == first)[:, None])
        onward = at - N if REVERSE else at + N
        tl.store(states + onward, after, mask=mask & ((step + 1 < count) & (steps + 1 < BLOCK))[:, None])
        weight = tl.sum(tl.where((steps == BLOCK - 1)[:, None], after, 0.0), axis=0)
    tl.store(final + of_ends + keys, weight, mask=here)


def between_chunks(
    call: Any, added: Tensor, start: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Normalisers (reverse: their gradients) between chunks [B·H, chunks, N], and the last one [B or sequences, H, N].

    call: the chunk kernels' sizes, strides and scalars; added: what each chunk adds, which `prepare` has summed.
    """
    states = call.empty(call.lanes, call.chunks, call.n, dtype=torch.float32)
    final = call.empty(call.ends, call.heads, call.n, dtype=torch.float32)
    launch(
        carry_weights, (-(-call.n // 32), call.lanes, call.sequences),
        added, start, call.scalars, states, final, call.sequence_table,
        call.chunks, call.length, call.plane,
        N=call.n, BN=32, L=call.tiles.chunk, BLOCK=32, DECAY=call.decay, START=start is not None, REVERSE=reverse,
        num_warps=4,
    )  # fmt: skip
    return states, final


def gradients_between_chunks(call: Any, normal: Normaliser) -> NormalGradients:
    """Fill the gradients of the normaliser's states. Returns what the gradient kernels need of it."""
    assert normal.added is not None
    normal.adjoints, normal.first = between_chunks(call, normal.added, normal.final_gradient, True)
    if normal.ones is not None:
        normal.d_ones = call.empty(call.batch, call.heads, call.tokens, dtype=torch.float32).movedim(1, -1)
    own = by_lane(normal.ones), by_lane(normal.slope)
    return NormalGradients(*own, normal.states, normal.adjoints, by_lane(normal.d_ones))
