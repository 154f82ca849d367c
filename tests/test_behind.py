"""Kernels of gradients, which are compiled beside those of the call: the right ones, for nothing else."""

from functools import partial

import pytest
import torch
from layer_family import pull, tensor
from test_compiled import call

from dsf.kernels.convolution import Piece, short_convolution
from dsf.kernels.triton import launch
from dsf.kernels.triton.operators import Scheduled, noted
from dsf.mixers import get
from dsf.triton.choose import elsewhere


@pytest.fixture
def foreseen(monkeypatch):
    """What is foreseen at every call of an operator, as `kinds` has it."""
    found, schedule = [], Scheduled.schedule

    def spied(self, *args):
        made = schedule(self, *args)
        if self.behind is not None:
            found.append(kinds(self._behind(args, made, torch.device("meta"))))
        return made

    monkeypatch.setattr(Scheduled, "schedule", spied)
    return found


def kinds(launches):
    """All that compiled kernels depend on."""
    return {(x.kernel.fn, str([launch._kinds(y) for y in x.args]), str(x.named)) for x in launches}


NAMES = [
    "ssd", "gated_deltanet", "mlstm", "linear_attention", "gla", "kda", "rwkv7", "delta_product", "mamba3", "s6",
    "rg_lru", "modified_qlstm", "rwkv4", "longhorn_exact",
]  # fmt: skip


def convolved(bounds=None):
    given = tensor(1, 2048, 256), tensor(256, 4), tensor(256)
    ys, _ = short_convolution(*given, None, bounds, pieces=[Piece(128, 32), Piece(128)], backend="triton")
    pull(ys, given)


CALLS = {name: partial(call, get(name).recurrence, T=200, N=16, P=16) for name in NAMES}
CALLS |= {f"{name}, packed": partial(call, get(name).recurrence, packed=True) for name in ("gated_deltanet", "s6")}
CALLS["convolution"] = convolved


@pytest.mark.parametrize("name", CALLS)
def test_what_gradients_launch_is_foreseen(name, foreseen):
    with noted() as schedules, elsewhere():
        CALLS[name]()
    (expected,) = [x for x in foreseen if x]
    assert any(kinds(x.launches) == expected for x in schedules)


def test_nothing_is_foreseen_where_nothing_is_differentiated(foreseen):
    with elsewhere(), torch.no_grad():
        for name in CALLS:
            if name != "convolution":
                CALLS[name](grad=False)
        short_convolution(tensor(1, 2048, 256, grad=False), tensor(256, 4), backend="triton")
    assert len(foreseen) > len(NAMES) and not any(foreseen)
