"""What a first call costs beside its kernels, and the kernels of its gradients, which are compiled at the same time."""

import random
from functools import partial

import pytest
import torch
from layer_family import pull, tensor
from test_compiled import call

from dsf.kernels.convolution import Piece, short_convolution
from dsf.kernels.mixture import token_mixtures
from dsf.kernels.norm import added_rms_norm, gated_rms_norm
from dsf.kernels.rotary import rotary
from dsf.kernels.triton import launch, schedule
from dsf.kernels.triton.operators import Scheduled, noted
from dsf.kernels.triton.unwritten import result
from dsf.mixers import get
from dsf.triton.choose import elsewhere


@pytest.fixture
def foreseen(monkeypatch):
    """What is foreseen at every call of an operator, as `kinds` has it."""
    found, own = [], Scheduled.schedule

    def spied(self, *args):
        made = own(self, *args)
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
    "rg_lru", "modified_qlstm", "rwkv4", "longhorn_exact", "fox",
]  # fmt: skip


def convolved(bounds=None):
    given = tensor(1, 2048, 256), tensor(256, 4), tensor(256)
    ys, _ = short_convolution(*given, None, bounds, pieces=[Piece(128, 32), Piece(128)], backend="triton")
    pull(ys, given)


def normed(gate=False, heads=0, then=False):
    shape = (1, 2048, heads, 256 // heads) if heads else (1, 2048, 256)
    given = tensor(*shape), tensor(shape[-1]), tensor(*shape) if gate else None
    y = gated_rms_norm(*given, backend="triton", then=tensor(128, 256) if then else None)
    pull([y], [x for x in given if x is not None])


def summed():
    x, other, weight = given = tensor(1, 2048, 256), tensor(1, 2048, 256), tensor(256)
    pull(added_rms_norm(x, other, weight, backend="triton"), given)


def turned():
    angle = torch.empty(1, 2048, 32, device="meta")
    pull(rotary(q := tensor(1, 2048, 4, 64), k := tensor(1, 2048, 2, 64), angle, angle, 0.5, "triton"), [q, k])


def mixed():
    x, other, shares = tensor(1, 2048, 256), tensor(1, 2048, 256), [tensor(256) for _ in range(6)]
    pull(token_mixtures(x, other, shares, None, "triton"), [x, other, *shares])


RECURRENCES = {name: partial(call, get(name).recurrence, T=200, N=16, P=16) for name in NAMES}
RECURRENCES |= {
    f"{name}, packed": partial(call, get(name).recurrence, packed=True) for name in ("gated_deltanet", "s6")
}
RECURRENCES |= {
    f"{name}, states": partial(call, get(name).recurrence, state=True) for name in ("gated_deltanet", "gla", "s6")
}
CALLS = RECURRENCES | {
    "convolution": convolved, "norm": normed, "norm and gate": partial(normed, gate=True, then=True),
    "norm of heads": partial(normed, heads=4, then=True), "sum": summed, "rotary": turned, "mixture": mixed,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_gradients_launch_is_foreseen(name, foreseen):
    with noted() as schedules, elsewhere():
        CALLS[name]()
    (expected,) = [x for x in foreseen if x]
    assert any(kinds(x.launches) == expected for x in schedules)


def test_nothing_is_foreseen_where_nothing_is_differentiated(foreseen):
    with elsewhere(), torch.no_grad():
        for name in RECURRENCES:
            if name != "fox":  # which asks whether q has a gradient
                RECURRENCES[name](grad=False)
        short_convolution(tensor(1, 2048, 256, grad=False), tensor(256, 4), backend="triton")
    assert len(foreseen) > len(NAMES) and not any(foreseen)


# Functions whose rules for tensors without memory are not in Python.
LIGHT = {
    "__getitem__", "contiguous", "element_size", "expand", "flatten", "float", "index_select", "long", "movedim",
    "new_empty", "new_zeros", "numel", "permute", "select", "squeeze", "to", "transpose", "unbind", "unflatten",
    "unsqueeze", "view",
}  # fmt: skip


@pytest.mark.parametrize("name", [x for x in CALLS if "s6, " not in x])  # sums of axes in another order
def test_no_rule_of_torchs_compiler_is_asked_for(name, monkeypatch):
    """They import SymPy or all of it, seconds of a process's first call."""
    asked = set()

    def spied(function, args, named):
        def noted_function(*args, **named):
            asked.add(function.__name__)
            return function(*args, **named)

        noted_function.__name__ = function.__name__
        return result(noted_function, args, named)

    monkeypatch.setattr(schedule, "result", spied)
    with noted(), elsewhere():
        CALLS[name]()
    assert asked or name == "rotary"
    assert asked - LIGHT == set()


def empty(shape):
    return torch.empty(shape, device="meta")


def any_view(draw):
    """A tensor without memory: contiguous, expanded, a part of one, or with its axes in another order."""
    shape = [draw.choice([1, 2, 3, 5]) for _ in range(draw.randint(1, 5))]
    way = draw.randrange(5)
    x = empty([1] * len(shape)).expand(shape) if way == 0 else empty(shape)
    if way == 1:
        return x.narrow(axis := draw.randrange(x.dim()), 0, -(-x.shape[axis] // 2))
    return x.permute(*draw.sample(range(x.dim()), x.dim())) if way == 2 else x


def test_results_without_torchs_rules_are_those_with_them():
    draw = random.Random(0)
    for _ in range(2000):
        x, kind = any_view(draw), draw.choice(["empty_like", "zeros_like", "sum", "cat"])
        axis, named = draw.randrange(-x.dim(), x.dim()), draw.choice([{}, {"dtype": torch.float64}])
        if kind == "cat":
            other = x.expand(x.shape) if draw.randrange(2) else empty(x.shape)
            call = torch.cat, ([x, other.narrow(axis, 0, 1)], axis), {}
        elif kind == "sum":
            call = torch.Tensor.sum, (x, axis), named
        else:
            call = getattr(torch, kind), (x,), named
        found, expected = result(*call), call[0](*call[1], **call[2])
        assert found.dtype == expected.dtype
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())
