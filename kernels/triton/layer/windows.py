"""The window of K - 1 inputs before a short convolution over ranks: each rank's part of it, and its gradient.

Fragment j of the sequence adds its last c_j = min(L, K - 1) inputs to the window; the first one adds K - 1, those of
the given state among them. Lengths of other ranks are not known on the host, so c_j is sent with the inputs: a row of
it behind them. Entry i of a window is d = K - 1 - i tokens before its end.

As custom operators of one launch each: a rank sends `tails`; from those of all ranks `enter` gives the windows before
its slots. Backward `leave` adds to dx what the windows of later fragments say (dsf.parallel.windows has the
collectives).

Memory: x, dx [rows, L, C], row b · slots + s for a slot s of a rank; sent [slots, B, K, C]; every [ranks, slots, B, K,
C]; windows and states [rows, C, K - 1]; gradients of all ranks' windows [ranks, slots + 1, B, C, K - 1], the last of
them that of the window after the sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.ranks import number_of, rank_slot
from dsf.kernels.triton.sizes import power


@triton.jit(do_not_specialize=["L", "B", "C"])
def window_tails(
    x, x_row, x_stride, state, sent, L, B, C,
    SLOTS: tl.constexpr, FIRST: tl.constexpr, PAST: tl.constexpr, W: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """What the rank sends: grid (rows, C / BC). FIRST: its slot 0 is the sequence's first fragment."""
    row = tl.program_id(0)
    b, slot = row // SLOTS, row % SLOTS
    c = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    i = tl.arange(0, W)[:, None]
    ok = (i < PAST) & (c < C)
    token = L - PAST + i
    found = tl.load(x + row.to(tl.int64) * x_row + token.to(tl.int64) * x_stride + c, mask=ok & (token >= 0), other=0.0)
    begins = FIRST & (slot == 0)
    if state is not None:
        early = tl.load(state + (b * C + c) * PAST + i + L, mask=ok & (token < 0) & begins, other=0.0)
        found = tl.where(token < 0, early, found)
    to = sent + (slot * B + b) * (PAST + 1) * C
    tl.store(to + i * C + c, found, mask=ok)
    count = tl.where(begins, PAST, tl.minimum(L, PAST)).to(tl.float32)
    tl.store(to + PAST * C + c + i * 0, (count + i * 0 + c * 0).to(sent.dtype.element_ty), mask=(i == 0) & (c < C))


@triton.jit(do_not_specialize=["rank", "ranks", "B", "C"])
def enter_windows(
    every, starts, last, counts, rank, ranks, B, C,
    SLOTS: tl.constexpr, PAST: tl.constexpr, FRAGMENTS: tl.constexpr, W: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The windows before this rank's slots, and the one after the sequence: grid (slots + 1, B, C / BC).

    counts [fragments]: every c_j, for the gradient. FRAGMENTS: their number, rounded up.
    """
    slot, b = tl.program_id(0), tl.program_id(1)
    c = (tl.program_id(2) * BC + tl.arange(0, BC))[None, :]
    i = tl.arange(0, W)[:, None]
    ok = (i < PAST) & (c < C)
    found = tl.zeros((W, BC), tl.float32)
    fragments = ranks * SLOTS
    left, to = fragments, last + b * C * PAST
    if slot < SLOTS:
        left, to = number_of(rank, slot, ranks), starts + (b * SLOTS + slot) * C * PAST
    passed = left * 0
    while (left > 0) & (passed < PAST):
        left -= 1
        r, s = rank_slot(left, ranks)
        at = every + ((r * SLOTS + s) * B + b) * (PAST + 1) * C
        count = tl.load(at + PAST * C).to(tl.int32)
        there = (PAST - i > passed) & (PAST - i <= passed + count)
        found += tl.load(at + (i + passed) * C + c, mask=ok & there, other=0.0).to(tl.float32)
        passed += count
    tl.store(to + c * PAST + i, found.to(starts.dtype.element_ty), mask=ok)
    if (slot == SLOTS) & (b == 0) & (tl.program_id(2) == 0):
        j = tl.arange(0, FRAGMENTS)
        r, s = rank_slot(j, ranks)
        at = every + ((r * SLOTS + s) * B * (PAST + 1) + PAST) * C
        tl.store(counts + j, tl.load(at, mask=j < fragments, other=0.0).to(tl.int32), mask=j < fragments)


@triton.jit
def _pulled(every, counts, i, c, ok, b, number, ranks, B, C, SLOTS: tl.constexpr, PAST: tl.constexpr):
    """The gradient of entry i of what fragment `number` sent, from the windows of all later ones."""
    fragments = ranks * SLOTS
    own = tl.load(counts + number)
    found, passed, n = i * 0.0 + c * 0.0, number * 0, number + 1
    while (n < fragments + ranks) & (passed < PAST):
        r, s = rank_slot(n, ranks)
        if n >= fragments:  # the window after the sequence, of which every rank holds a part of the gradient
            r, s = n - fragments, r * 0 + SLOTS
        at = every + ((r * (SLOTS + 1) + s) * B + b) * C * PAST
        there = ok & (i >= passed) & (i < PAST) & (PAST - i <= own)
        found += tl.load(at + c * PAST + i - passed, mask=there, other=0.0).to(tl.float32)
        if n < fragments:
            passed += tl.load(counts + n)
        n += 1
    return found


@triton.jit(do_not_specialize=["L", "rank", "ranks", "B", "C"])
def leave_windows(
    every, counts, own, dx, dstate, L, rank, ranks, B, C,
    SLOTS: tl.constexpr, PAST: tl.constexpr, W: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Add to dx what later fragments' windows say of its last tokens: grid (rows, C / BC).

    dstate [B, C, K - 1], or None: the gradient of the given state, where slot 0 is the first fragment. own: of this
    rank's windows, of which the first is that state.
    """
    row = tl.program_id(0)
    b, slot = row // SLOTS, row % SLOTS
    c = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    i = tl.arange(0, W)[:, None]
    ok = (i < PAST) & (c < C)
    number = number_of(rank, slot, ranks)
    token = L - PAST + i
    there = ok & (token >= 0)
    g = _pulled(every, counts, i, c, there, b, number, ranks, B, C, SLOTS, PAST)
    at = dx + (row.to(tl.int64) * L + token) * C + c
    before = tl.load(at, mask=there, other=0.0).to(tl.float32)
    tl.store(at, (before + g.to(dx.dtype.element_ty).to(tl.float32)).to(dx.dtype.element_ty), mask=there)
    if dstate is not None:  # noqa: SIM102  # a constant, then a number
        if slot == 0:
            early = _pulled(every, counts, i - L, c, ok & (i >= L), b, number, ranks, B, C, SLOTS, PAST)
            early += tl.load(own + row * C * PAST + c * PAST + i, mask=ok, other=0.0).to(tl.float32)
            tl.store(dstate + (b * C + c) * PAST + i, early.to(dstate.dtype.element_ty), mask=ok)


BLOCK = 256  # channels of a program


def _tails(x: Tensor, state: Tensor | None, past: int, slots: int, first: bool) -> Tensor:
    """[slots, B, past + 1, C] of x [B · slots, L, C]. first: the rank's slot 0 begins the sequence, in `state`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    state = None if state is None else state.contiguous()
    rows, length, channels = x.shape
    sent = x.new_empty(slots, rows // slots, past + 1, channels)
    launch(
        window_tails, (rows, -(-channels // BLOCK)), x, x.stride(0), x.stride(1), state, sent, length, rows // slots,
        channels, SLOTS=slots, FIRST=first, PAST=past, W=power(past), BC=BLOCK, num_warps=4,
    )  # fmt: skip
    return sent


def _enter(every: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of every [ranks, slots, B, past + 1, C]: windows [B · slots, C, past], the last [B, C, past], counts int32."""
    ranks, slots, batch, rows, channels = every.shape
    starts, last = (every.new_empty(batch * n, channels, rows - 1) for n in (slots, 1))
    counts = every.new_empty(ranks * slots, dtype=torch.int32)
    launch(
        enter_windows, (slots + 1, batch, -(-channels // BLOCK)), every, starts, last, counts, rank, ranks, batch,
        channels, SLOTS=slots, PAST=rows - 1, FRAGMENTS=power(ranks * slots), W=power(rows - 1), BC=BLOCK, num_warps=4,
    )  # fmt: skip
    return starts, last, counts


def _leave(every: Tensor, counts: Tensor, own: Tensor, dx: Tensor, rank: int, stateful: bool) -> list[Tensor]:
    """Change dx [B · slots, L, C] in place; stateful: returns the gradient of the given state, on its rank.

    every: gradients [ranks, slots + 1, B, C, past] of all ranks' windows; own: [B · slots, C, past] of this rank's.
    """
    ranks, slots, batch, channels, past = every.shape
    dstate = own.new_empty(batch, channels, past) if stateful else None
    launch(
        leave_windows, (dx.shape[0], -(-channels // BLOCK)), every, counts, own, dx, dstate, dx.shape[1], rank, ranks,
        batch, channels, SLOTS=slots - 1, PAST=past, W=power(past), BC=BLOCK, num_warps=4,
    )  # fmt: skip
    return [] if dstate is None else [dstate]


tails = operator("window_tails(Tensor x, Tensor? state, int past, int slots, bool first) -> Tensor", _tails)
enter = operator("enter_windows(Tensor every, int rank) -> (Tensor, Tensor, Tensor)", _enter)
leave = operator(
    "leave_windows(Tensor every, Tensor counts, Tensor own, Tensor(a!) dx, int rank, bool stateful) -> Tensor[]", _leave
)
