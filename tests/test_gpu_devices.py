"""Tensors on a GPU that is not the current one: models spread over several GPUs call their layers so."""

import pytest
import torch
from scan_family import aligned
from test_gpu_calls import step_of
from test_gpu_matrix import draw

from dsf.mixers import get

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
NAMES = ["unnormalized_linear_attention", "gated_deltanet", "kda", "rwkv7", "mlstm", "ssd", "s6", "rg_lru"]
FINITE = [*(get(name).recurrence for name in NAMES), aligned]  # aligned: a printed kernel before the scan
SOFTMAX = get("softmax_attention").recurrence


def moved(given, device):
    return {name: x.detach().to(device).requires_grad_(x.requires_grad) for name, x in given.items()}


def outcome(recurrence, given, **options):
    y, state = recurrence(**given, return_state=True, backend="triton", **options)
    return y, state, *torch.autograd.grad(y.float().sum() + state.sum(), list(given.values()), materialize_grads=True)


@pytest.mark.parametrize("cuts", [None, [0, 70, 200]], ids=["whole", "packed"])
@pytest.mark.parametrize("recurrence", [*FINITE, SOFTMAX], ids=lambda r: r.name)
def test_the_second_gpu_answers_as_the_first(recurrence, cuts):
    given = draw(recurrence, 200, 16, 32, torch.bfloat16, batch=1)
    options = {} if cuts is None else {"cu_seqlens": torch.tensor(cuts)}
    if recurrence is SOFTMAX:  # torch's kernels; its state are the keys and values themselves
        first, second = (recurrence(**moved(given, f"cuda:{i}"), **options) for i in range(2))
        assert second.device.index == 1 and torch.equal(first.cpu(), second.cpu())
        return
    # three calls: all but the first run a schedule that was kept
    first, second, third, fourth, fifth = (
        outcome(recurrence, moved(given, f"cuda:{i}"), **options) for i in (0, 1, 1, 1, 0)
    )
    for a, *others in zip(first, second, third, fourth, fifth, strict=True):
        assert [x.device.index for x in others] == [1, 1, 1, 0]
        assert all(torch.equal(a.cpu(), x.cpu()) for x in others)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("recurrence", FINITE, ids=lambda r: r.name)
def test_steps_on_the_second_gpu(recurrence):
    given = step_of(recurrence, 3, 2, 16, 32, torch.bfloat16)
    (y, state), (z, other) = (recurrence.step(None, **moved(given, f"cuda:{i}")) for i in range(2))
    assert z.device.index == other.device.index == 1
    assert torch.equal(y.cpu(), z.cpu()) and torch.equal(state.cpu(), other.cpu())
