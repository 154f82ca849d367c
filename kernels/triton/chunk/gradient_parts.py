"""Structs and helpers that the gradient kernels of a chunk share (dsf.kernels.triton.chunk.gradient has the
notation)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.scalars import between
from dsf.kernels.triton.chunk.tiles import (
    TINY,
    Chunked,
    is_later,
    load_rows,
    load_terms,
    product,
    split,
)


class Known(NamedTuple):
    """What earlier kernels computed of chunks: the prepared scalars; states [B, H, held, N, P] and entries (v_new)
    [B, H, held, L, P] of chunks from `since` on, adjoints [B, H, count, N, P] and adjoint_entries
    [B, H, count, L, P] of chunks from `base` on."""

    scalars: Any
    entries: Any
    adjoint_entries: Any
    states: Any
    adjoints: Any


class Gradients(NamedTuple):
    """Where gradients are stored; None: not wanted. dv [B, T, H, P]; dq, dk [slices, B, kept, H, N] of `kept` tokens
    from `shift` on, and those of the scalars [slices, B, T, H], all to be summed over the slices; with two ROLES dg
    is [2 · slices, ...]."""

    dq: Any
    dk: Any
    dv: Any
    dg: Any
    ds: Any
    db: Any
    dc: Any
    d_skip: Any


class NormalGradients(NamedTuple):
    """The normaliser: its input, the gradient of its readout [B, H, T], its states and their gradients between chunks,
    and where the gradient of its input is stored."""

    ones: Any = None
    slopes: Any = None
    states: Any = None
    adjoints: Any = None
    d_ones: Any = None


class Beside(NamedTuple):
    """The normaliser in one chunk: its input and the gradient of its readout [L], its first state and the gradient
    of its last state [N]. Both gradients are 0 except in the first slice of P."""

    drive: Any
    slope: Any
    weight: Any
    weight_adjoint: Any


class Chunk(NamedTuple):
    """A program's chunk: its first token; the end of its sequence; the index in [B, T, H] of its sequence's first
    row, and (part) the index of the gradient of that row; its rows, keys and channels."""

    begin: Any
    end: Any
    flat: Any
    part: Any
    rows: Any
    local: Any
    keys: Any
    columns: Any


class Place(NamedTuple):
    """Addresses of a chunk's scalars' gradients; offsets of its entries in a state, and which of them exist."""

    scalars: Any
    state: Any
    inside: Any


class Loaded(NamedTuple):
    """q, k, dy and the written values of a chunk's rows, each as a sum of terms."""

    q: Any
    k: Any
    dy: Any
    written: Any


@dataclass(frozen=True, repr=False)
class Gradient(Chunked):
    """Each program handles BP channels. TERMS and ADJOINT_TERMS: the number of bfloat16 terms of e and of f. Where
    ADJOINT_TERMS is the smaller one, the reverse walk has computed dv and ds, from f before it was rounded. PAIR_TERMS:
    terms of the products between rows, where they enter the next products.

    With two ROLES a chunk has two programs, one for the gradients that come from reads and one for those that come from
    writes. They are neighbours, so that the second finds its operands in the cache; the operands of both would not fit
    in the registers of one program.
    NORMAL: 0: no normaliser, 1: its input is 1, 2: its input is `ones`. SKIP: the printed adjoint of the terms that y
    has in addition to the readout, from what LOADS loads: their part of dv, and the gradient d_skip
    [slices, B, chunks, H] of an input without a time axis.
    """

    BP: int
    ROLES: int
    NORMAL: int
    LOADS: Any
    SKIP: Any
    TERMS: int
    STATE_TERMS: int
    PAIR_TERMS: int
    ADJOINT_TERMS: int


@triton.jit
def load_given(dy, here, sizes, C: tl.constexpr):
    """dy of a chunk [L, BP]."""
    at = dy + here.flat * C.P
    return load_rows(at, sizes.heads * C.P, here.rows, here.end, here.columns, C.P, C.BP, C.KIND)


@triton.jit
def place_of(scalars, here, C: tl.constexpr):
    """The Place of a chunk. scalars: address of their gradients."""
    state = here.keys[:, None] * C.P + here.columns[None, :]
    return Place(scalars, state, (here.keys[:, None] < C.N) & (here.columns[None, :] < C.P))


@triton.jit
def entry_gradients(known, here, C: tl.constexpr):
    """f (the gradient of v_new) of a chunk, in terms."""
    wide = C.P * C.ADJOINT_TERMS
    return load_terms(
        known.adjoint_entries, wide, here.local, None, here.columns, C.P, C.BP, C.KIND, C.ADJOINT_TERMS
    )  # fmt: skip


@triton.jit
def decay_gradient(grad, decays, rows, tokens, DECAY: tl.constexpr):
    """The gradient of a decay's operand from that of its logarithm, which is the operand but for DECAY 2."""
    if DECAY == 2:
        decay = tl.load(decays, mask=rows < tokens, other=1.0)
        # In float32, as float16 has no TINY: since Triton 3.9 a bound is of the type of what it bounds.
        grad /= tl.where(decay < 0, -1.0, 1.0) * tl.maximum(tl.abs(decay).to(tl.float32), TINY)
    return grad


@triton.jit
def spanning(
    pairs, local, transposed: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, TERMS: tl.constexpr,
    AFTER: tl.constexpr = 0,
):  # fmt: skip
    """For every row t the sum of pairs [i, j] (transposed: [j, i]) with i ≥ t > j, which the decay of t scales.

    AFTER: GROUP, if only rows i of later groups than t's count.
    """
    later, upto = local[:, None] > local[None, :], local[:, None] <= local[None, :]
    if AFTER:
        upto = is_later(local[None, :], local[:, None], AFTER)
    if transposed:
        gathered = tl.where(later, 1.0, 0.0).to(KIND)  # [t, j]
        gathered = product((gathered, gathered), split(pairs, TERMS, KIND), 1, TERMS, PRECISION)
        return tl.sum(tl.where(upto, gathered, 0.0), axis=1)
    gathered = tl.where(upto, 1.0, 0.0).to(KIND)  # [t, i]
    pairs = split(tl.where(later, pairs, 0.0), TERMS, KIND)
    gathered = product((gathered, gathered), pairs, 1, TERMS, PRECISION)
    return tl.sum(tl.where(later, gathered, 0.0), axis=1)


@triton.jit
def weigh(x, scalars, plane, rows, seen, transposed: tl.constexpr, C: tl.constexpr):
    """x times the decay between its row and column, 0 where not `seen`."""
    if C.DECAY:
        return x * between(scalars, plane, rows, seen, transposed, C.FINE)
    return tl.where(seen, x, 0.0)
