"""Cross entropy of rows of logits as an operator."""

from __future__ import annotations

import torch
from torch import Tensor

from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.layer.entropy import entropy_rows
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.sizes import power

SIZE = 4096  # logits of a row that a program reads at a time


def _entropies(logits: Tensor, targets: Tensor, divisor: Tensor, ignored: int, gradient: bool) -> list[Tensor]:
    rows, words = logits.shape
    own = logits.new_empty(rows, dtype=torch.float32)
    slopes = logits.new_empty(rows, words) if gradient else None
    size = min(SIZE, power(words))
    launch(
        entropy_rows, (rows,), logits.contiguous(), targets.contiguous(), divisor, own, slopes, words, IGNORED=ignored,
        SIZE=size, num_warps=max(1, size // 512),
    )  # fmt: skip
    return [own] if slopes is None else [own, slopes]


entropies = operator(
    "entropies(Tensor logits, Tensor targets, Tensor divisor, int ignored, bool gradient) -> Tensor[]", _entropies
)
