"""The chunk form of elementwise transitions: segments of the scan, A and B never stored for the whole sequence.

A segment's A, B, C, D are computed from the small inputs when the segment is reached, scanned, read and forgotten;
in the backward pass they are computed again from the segment's first state. Memory is the inputs plus one state a
segment, instead of several tensors [T, N, P] (the recomputation of Mamba, arXiv 2312.00752 §3.3.2, on any machine).
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
    """Run segment after segment.

    body: (state, *pieces) -> (y, state) on slices [B, ≤length, ...] of `inputs`, each [B, T, ...].
    keep: store what the backward pass needs instead of computing it again, for sequences where it is little.
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
