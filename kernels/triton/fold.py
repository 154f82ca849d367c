"""The fold of fragments' affine maps over ranks in one launch: dsf::fold_states, dsf::fold_gradients.

dsf.kernels.affine has the maps, dsf.parallel.fold the same fold by torch operators, several for each fragment. A
program has all rows of some columns of one head's state. It walks the fragments in the sequence's order, or back:

    S_{j+1} = M_j S_j + F_j          G_j = C_j + M_jᵀ G_{j+1}

With a running maximum m, F and S are relative to it: S_{j+1} has m = max(m_F, m_S + log |M|).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels import affine
from dsf.kernels.affine import Frame
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.ranks import rank_slot
from dsf.kernels.triton.sizes import power
from dsf.kernels.triton.structs import Config

EMPTY = tl.constexpr(affine.EMPTY)
WIDEST = 128  # rows of a state that a dense M [N, N] of one program may have


@dataclass(frozen=True, repr=False)
class Maps(Config):
    """N, P: rows and plain columns of a state; BN, BP: of a program's tile. BACK: gradients, from the last fragment on.

    GAIN: columns of m, 0 without one. DENSE: M is [N, N]; else [ROWS, COLUMNS], each N or P numbers or one, or nothing
    if ROWS is 0. With GAIN its logarithm, and if SIGNED its sign after it. SLOTS: fragments of a rank.
    """

    N: int
    P: int
    BN: int
    BP: int
    BACK: bool
    GAIN: int
    DENSE: bool
    ROWS: int
    COLUMNS: int
    SIGNED: bool
    SLOTS: int


@triton.jit
def place_of(j, ranks, C: tl.constexpr):
    """rank · slots + slot of fragment j."""
    rank, slot = rank_slot(j, ranks)
    return rank * C.SLOTS + slot


@triton.jit
def fold_maps(
    given, given_lane, moves, moves_lane, gains, out, first, count, low, ranks, lanes, C: tl.constexpr
):  # fmt: skip
    """Grid (B · H, P / BP). Of `count` fragments from `first` on, in their order or with BACK in reverse.

    given [places, lanes, given_lane]: F and M, or with BACK C. out: states low, low + 1, ..., or with BACK the
    gradients of low + 1, ... With BACK also moves: M of fragments low + 1, ..., and gains: m of all states.
    """
    lane = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, C.BN)[:, None]
    c = (tl.program_id(1) * C.BP + tl.arange(0, C.BP))[None, :]
    ok = (i < C.N) & (c < C.P)
    wide: tl.constexpr = C.P if C.BACK else C.P + C.GAIN
    entry, level = i * wide + c, i * wide + C.P
    if C.GAIN:
        level += c % C.GAIN
    given += lane * given_lane
    out += lane * (C.N * wide)
    if not C.BACK:
        moves = given - lane * given_lane + C.N * wide  # behind F
        if low == 0:
            tl.store(out + entry, tl.full((C.BN, C.BP), 0.0, tl.float32), mask=ok)
            if C.GAIN:
                tl.store(out + level, tl.full((C.BN, C.BP), EMPTY, tl.float32), mask=ok & (c < C.GAIN))
    at = given + place_of(first, ranks, C) * lanes * given_lane
    state = tl.load(at + entry, mask=ok, other=0.0)
    top = state
    if C.GAIN and not C.BACK:
        top = tl.load(at + level, mask=ok, other=0.0)
    for step in range(0, count):
        j = first - step if C.BACK else first + step
        if step > 0:
            place = place_of(j, ranks, C)
            at = given + place * lanes * given_lane
            new = tl.load(at + entry, mask=ok, other=0.0)
            move = moves
            if C.ROWS:
                move = moves + ((j - low - 1 if C.BACK else place) * lanes + lane) * moves_lane
            if C.DENSE:
                k = tl.arange(0, C.BN)
                turned = k[None, :] * C.N + k[:, None] if C.BACK else k[:, None] * C.N + k[None, :]
                factor = tl.load(move + turned, mask=(k[:, None] < C.N) & (k[None, :] < C.N), other=0.0)
                state = tl.dot(factor, state, input_precision="ieee") + new
            else:
                factor = tl.full((C.BN, C.BP), 0.0 if C.GAIN else 1.0, tl.float32)
                sign = factor
                if C.ROWS:
                    which = (i % C.ROWS) * C.COLUMNS + c % C.COLUMNS
                    factor = tl.load(move + which, mask=ok, other=0.0)
                    if C.SIGNED:
                        sign = tl.load(move + C.ROWS * C.COLUMNS + which, mask=ok, other=0.0)
                if C.GAIN:
                    if C.BACK:
                        early = gains + ((j * lanes + lane) * C.N + i) * C.GAIN + c % C.GAIN
                        before = tl.load(early, mask=ok, other=0.0)
                        after = tl.load(early + lanes * C.N * C.GAIN, mask=ok, other=0.0)
                        factor = tl.exp(factor + before - after)
                    else:
                        own, carried = tl.load(at + level, mask=ok, other=0.0), top + factor
                        top = tl.maximum(own, carried)
                        factor = tl.exp(carried - top)
                        new *= tl.exp(own - top)
                    if C.SIGNED:
                        factor *= sign
                state = state * factor + new
        to = j - 1 - low if C.BACK else j + 1 - low
        if to >= 0:
            tl.store(out + to * lanes * (C.N * wide) + entry, state, mask=ok)
            if C.GAIN and not C.BACK:
                tl.store(out + to * lanes * (C.N * wide) + level, top, mask=ok & (c < C.GAIN))


def folds(frame: Frame) -> bool:
    """Whether the kernel has maps of these shapes."""
    if frame.kind == "dense":
        return not frame.gain and frame.n <= WIDEST
    return frame.kind in ("identity", "scale")


def shape_of(frame: Frame) -> list[int]:
    """A frame as numbers."""
    dense, stored = frame.kind == "dense", frame.kind == "scale"
    rows, columns = (frame.n, frame.n) if dense else (frame.rows, frame.columns) if stored else (0, 1)
    signed = frame.signed and frame.gain > 0 and stored
    return [frame.n, frame.plain, frame.gain, int(dense), rows, columns, int(signed)]


def _config(frame: list[int], slots: int, back: bool) -> Maps:
    n, plain, gain, dense, rows, columns, signed = frame
    tall = max(16, power(n)) if dense else power(n)
    wide = 16 if dense else min(power(plain), 256, max(16, 2048 // tall))
    return Maps(n, plain, tall, wide, back, gain, bool(dense), rows, columns, bool(signed), slots)


def _states(rows: Tensor, frame: list[int], low: int, count: int) -> Tensor:
    """States low ... count of `count` fragments [count + 1 - low, B, H, N, columns], the first one empty.

    rows [ranks, slots, B, H, numbers]: F and M of every fragment; M of the first one is not read.
    """
    rows = rows.contiguous()
    ranks, slots, batch, heads, numbers = rows.shape
    n, plain, gain, *_ = frame
    out = rows.new_empty(count + 1 - low, batch, heads, n, plain + gain)
    config, lanes = _config(frame, slots, False), batch * heads
    launch(
        fold_maps, (lanes, -(-plain // config.BP)), rows, numbers, None, numbers, None, out, 0, count, low, ranks,
        lanes, C=config, num_warps=8 if config.DENSE else 4,
    )  # fmt: skip
    return out


def _gradients(own: Tensor, moves: Tensor | None, gains: Tensor | None, frame: list[int], low: int) -> Tensor:
    """The gradients of states low + 1 ... [fragments - 1 - low, B, H, N, plain].

    own [ranks, slots, B, H, N, plain]: C of every fragment. moves [fragments - 2 - low, B, H, ·]: M of fragments
    low + 1, ... but the last. gains [fragments, B, H, N, ·]: m of the states before fragments.
    """
    own = own.contiguous()
    moves, gains = (x if x is None else x.contiguous() for x in (moves, gains))
    ranks, slots, batch, heads, n, plain = own.shape
    last = ranks * slots - 1
    out = own.new_empty(last - low, batch, heads, n, plain)
    config, lanes = _config(frame, slots, True), batch * heads
    numbers = 0 if moves is None else moves[0, 0, 0].numel()
    launch(
        fold_maps, (lanes, -(-plain // config.BP)), own, n * plain, moves, numbers, gains, out, last, last - low, low,
        ranks, lanes, C=config, num_warps=8 if config.DENSE else 4,
    )  # fmt: skip
    return out


fold_states = operator("fold_states(Tensor rows, int[] frame, int low, int count) -> Tensor", _states)
fold_gradients = operator(
    "fold_gradients(Tensor own, Tensor? moves, Tensor? gains, int[] frame, int low) -> Tensor", _gradients
)
