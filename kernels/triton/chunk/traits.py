"""What the chunk kernels' host code is told of a call, besides its tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dsf.kernels.triton.chunk.cross import Border


class Wanted(NamedTuple):
    """Which gradients are wanted: read: that of the read scale; summed: those of q and k are summed over the heads
    that share them; exact: which of q, k, v, r have a gradient that is differentiated further, and is therefore kept in
    float32; border: room for what turns of the states between chunks would change."""

    read: bool = True
    summed: bool = False
    exact: tuple[bool, ...] = (False,) * 4
    border: Border | None = None


class Traits(NamedTuple):
    """What is known of a call's rows: positive: no write strength is negative; group: so many rows, a power of two, act
    at once, as corrections of one sum. Only the first of them has a decay. undecayed: rows erase before their decay, by
    which b is divided. right: the rows r [B, T, Hr, N] along which is erased, None for those of k. precise: as Program
    has it. together: rows of a token, each of which reads what all of them write; fresh: the write strengths
    [B, T, H] that a token's own reads see, None for s (`Chunked`)."""

    positive: bool = False
    group: int = 1
    undecayed: bool = False
    right: Tensor | None = None
    precise: bool = False
    together: int = 1
    fresh: Tensor | None = None
