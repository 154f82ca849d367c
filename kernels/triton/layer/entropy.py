"""Cross entropy of rows of logits with its gradient, as an operator: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.sizes import power

LEAST = tl.constexpr(-1e30)  # of a maximum, so that logits of minus infinity have a probability of 0


@triton.jit
def entropy_rows(logits, targets, divisor, own, slopes, V, IGNORED: tl.constexpr, SIZE: tl.constexpr):
    """own [R]: log of the sum of exponentials of a row less its target's logit; slopes [R, V] or None: (softmax - 1 at
    the target) / divisor, in which each number is rounded once. Both are 0 where the target is IGNORED.

    logits: [R, V], contiguous; targets: [R]; divisor: its address. A lane keeps the maximum and the sum of what it
    sees. Grid (R).
    """
    row = tl.program_id(0).to(tl.int64)
    at, target = tl.arange(0, SIZE), tl.load(targets + row)
    logits += row * V
    top, total = tl.full([SIZE], LEAST, tl.float32), tl.zeros([SIZE], tl.float32)
    for start in range(0, V, SIZE):
        x = tl.load(logits + start + at, mask=start + at < V, other=float("-inf")).to(tl.float32)
        new = tl.maximum(top, x)
        total = total * tl.exp(top - new) + tl.exp(x - new)
        top = new
    most = tl.max(top, 0)
    rest = tl.log(tl.sum(total * tl.exp(top - most), 0))  # less the maximum, beside which it may have no digits
    shown, known = target != IGNORED, (target >= 0) & (target < V)
    there = tl.load(logits + target, mask=shown & known, other=float("nan")).to(tl.float32)
    tl.store(own + row, tl.where(shown, rest + (most - there), 0.0))
    if slopes is not None:
        share = tl.where(shown, 1.0 / tl.load(divisor).to(tl.float32), 0.0)
        slopes += row * V
        for start in range(0, V, SIZE):
            x = tl.load(logits + start + at, mask=start + at < V, other=0.0).to(tl.float32)
            slope = (tl.exp(x - most - rest) - tl.where(start + at == target, 1.0, 0.0)) * share
            tl.store(slopes + start + at, tl.where(shown, slope, 0.0).to(slopes.dtype.element_ty), mask=start + at < V)


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
