"""The torch forms on a CUDA device: the same numbers as the float64 oracle on the CPU, forward and every gradient."""

from __future__ import annotations

import mixer_inputs
import pytest
import torch
from torch import Tensor

from dsf import mixers

pytestmark = pytest.mark.gpu
BLOCK = 32
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def run(r, inputs: dict[str, Tensor], form: str, **options) -> list[Tensor]:
    """y and the gradient of a fixed random functional of it in every input, on the CPU in float64."""
    leaves = {n: x.detach().clone().requires_grad_(n != "reset") for n, x in inputs.items()}
    y = r(**leaves, form=form, **options)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(y)
    grads = torch.autograd.grad((y * weight).sum(), [x for x in leaves.values() if x.requires_grad])
    return [x.double().cpu() for x in (y, *grads)]


def worst(have: Tensor, want: Tensor) -> float:
    """Worst error over blocks of tokens, relative to the block (or to 1e-3 of the tensor's mean where that is more)."""
    floor = 1e-3 * want.norm() / want.numel() ** 0.5
    blocks = zip(have.split(BLOCK, 1), want.split(BLOCK, 1), strict=True) if want.dim() > 2 else [(have, want)]
    return max(float((h - w).norm() / (w.norm() + floor * w.numel() ** 0.5)) for h, w in blocks)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("entry", mixers.ZOO, ids=lambda e: e.name)
def test_every_torch_form_agrees_with_the_oracle(entry, dtype: torch.dtype) -> None:
    r = entry.recurrence
    inputs = {n: x.to(dtype) for n, x in mixer_inputs.sample(r, tokens=150).items()}
    want = run(r, {n: x.double() for n, x in inputs.items()}, "naive")
    on_gpu = {n: x.cuda() for n, x in inputs.items()}
    for form in r.forms:
        for have, truth in zip(run(r, on_gpu, form, backend="torch"), want, strict=True):
            assert worst(have, truth) <= TOLERANCE[dtype], form
