"""Compiled kernels are kept by what Triton compiles them for: none is launched for a call that needs another."""

import pytest
import torch
from interpreted import INTERPRETED
from test_compiled import front_end, pull, tensor

from dsf.mixers import get
from dsf.triton.choose import elsewhere

pytest.importorskip("triton")
from dsf.kernels.triton import launch
from dsf.kernels.triton.operators import noted

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter compiles nothing"),
    pytest.mark.skipif(launch._Mode is None, reason="this Triton compiles one kernel after the other, without keys"),
]


@pytest.mark.parametrize("name", ["mlstm", "ssd", "linear_attention", "gated_deltanet", "rwkv7", "s6", "fox"])
def test_launches_that_are_one_kernel_to_us_are_one_to_triton(name, monkeypatch):
    """Parts of longer sequences, as many numbers in each, so that few strides tell the heads, channels and tokens."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    recurrence, known = get(name).recurrence, {}
    for tokens, heads, width in (
        (512, 64, 32),
        (2048, 16, 32),
        (1024, 32, 32),
        (1024, 16, 64),
        (512, 2, 48),
        (512, 3, 48),
    ):
        sizes = {"B": 1, "T": 2 * tokens, "H": heads, "N": 32, "P": width}
        given = {}
        for i in recurrence.spec.inputs:
            x = tensor(*(sizes[a] for a in i.kind.layout()), grad=False)
            given[i.name] = (x[:, :tokens] if i.kind.time else x).requires_grad_()
        with noted() as schedules, elsewhere():
            pull([recurrence(**given, backend="triton")], list(given.values()))
        for x in (x for schedule in schedules for x in schedule.launches):
            asked = front_end().of(x).key
            assert known.setdefault(launch._key(x), asked) == asked, x.kernel.__name__
