"""The windows of a short convolution whose tokens are spread over ranks, as custom operators: one launch each.

A rank sends `window_tails`; from those of all ranks `enter_windows` gives the windows before its slots. Backward
`leave_windows` adds to dx what the windows of later fragments say (dsf.parallel.windows has the collectives).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.layer.windows import enter_windows as enter
from dsf.kernels.triton.layer.windows import leave_windows as leave
from dsf.kernels.triton.layer.windows import window_tails as tails
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.sizes import power

BLOCK = 256  # channels of a program


def _tails(x: Tensor, state: Tensor | None, past: int, slots: int, first: bool) -> Tensor:
    """[slots, B, past + 1, C] of x [B · slots, L, C]. first: the rank's slot 0 begins the sequence, in `state`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    state = None if state is None else state.contiguous()
    rows, length, channels = x.shape
    sent = x.new_empty(slots, rows // slots, past + 1, channels)
    launch(
        tails, (rows, -(-channels // BLOCK)), x, x.stride(0), x.stride(1), state, sent, length, rows // slots, channels,
        SLOTS=slots, FIRST=first, PAST=past, W=power(past), BC=BLOCK, num_warps=4,
    )  # fmt: skip
    return sent


def _enter(every: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of every [ranks, slots, B, past + 1, C]: windows [B · slots, C, past], the last [B, C, past], counts int32."""
    ranks, slots, batch, rows, channels = every.shape
    starts, last = (every.new_empty(batch * n, channels, rows - 1) for n in (slots, 1))
    counts = every.new_empty(ranks * slots, dtype=torch.int32)
    launch(
        enter, (slots + 1, batch, -(-channels // BLOCK)), every, starts, last, counts, rank, ranks, batch, channels,
        SLOTS=slots, PAST=rows - 1, FRAGMENTS=power(ranks * slots), W=power(rows - 1), BC=BLOCK, num_warps=4,
    )  # fmt: skip
    return starts, last, counts


def _leave(every: Tensor, counts: Tensor, own: Tensor, dx: Tensor, rank: int, stateful: bool) -> list[Tensor]:
    """Change dx [B · slots, L, C] in place; stateful: returns the gradient of the given state, on its rank.

    every: gradients [ranks, slots + 1, B, C, past] of all ranks' windows; own: [B · slots, C, past] of this rank's.
    """
    ranks, slots, batch, channels, past = every.shape
    dstate = own.new_empty(batch, channels, past) if stateful else None
    launch(
        leave, (dx.shape[0], -(-channels // BLOCK)), every, counts, own, dx, dstate, dx.shape[1], rank, ranks, batch,
        channels, SLOTS=slots - 1, PAST=past, W=power(past), BC=BLOCK, num_warps=4,
    )  # fmt: skip
    return [] if dstate is None else [dstate]


window_tails = operator("window_tails(Tensor x, Tensor? state, int past, int slots, bool first) -> Tensor", _tails)
enter_windows = operator("enter_windows(Tensor every, int rank) -> (Tensor, Tensor, Tensor)", _enter)
leave_windows = operator(
    "leave_windows(Tensor every, Tensor counts, Tensor own, Tensor(a!) dx, int rank, bool stateful) -> Tensor[]", _leave
)
