"""The chunk form of elementwise transitions: segments of the scan, without A and B of the whole sequence.

Each segment's A, B, C, D are computed from the small inputs, used and freed; the backward pass computes them again from
the segment's first state. Memory is the inputs plus one state for each segment, instead of several tensors [T, N, P]
(the recomputation of Mamba, arXiv 2312.00752 §3.3.2).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Body = Callable[..., tuple[Tensor, Tensor]]


def segments(
    body: Body, inputs: tuple[Tensor, ...], state: Tensor, length: int, keep: bool = False
) -> tuple[Tensor, Tensor]:
    """Run `body` segment by segment.

    body: (state, *pieces) -> (y, state) on slices [B, ≤length, ...] of `inputs`, each [B, T, ...].
    keep: store the tensors of the backward pass instead of computing them again, for short sequences.
    Returns y of all segments, joined along axis 1, and the last state.
    """
    outputs = []
    for pieces in zip(*(x.split(length, dim=1) for x in inputs), strict=True):
        if keep:
            y, state = body(state, *pieces)
        else:
            y, state = checkpoint(body, state, *pieces, use_reentrant=False, preserve_rng_state=False)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state
