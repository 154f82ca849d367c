"""What a plan says of the kernels: found without a GPU, the same that a call runs."""

import pickle

import pytest
import torch
from interpreted import interpreted
from mixer_inputs import sample

from dsf import mixers

pytest.importorskip("triton")


@pytest.mark.parametrize("name", ["gated_deltanet", "s6", "rwkv7", "mamba3", "mlstm", "delta_product"])
def test_a_plan_for_a_gpu_lists_its_launches(name):
    plan = mixers.get(name).recurrence.plan(T=300, H=2, N=16, P=32, dtype=torch.bfloat16, device="cuda")
    made = plan.schedules()
    kernels = {x.kernel.__name__ for schedule in made for x in schedule.launches}
    assert kernels and all(name in str(plan).splitlines()[-1] for name in kernels)
    assert [str(x) for x in pickle.loads(pickle.dumps(plan)).schedules()] == [str(x) for x in made]


def test_torch_plans_have_none():
    plan = mixers.gated_deltanet.plan(T=300)
    assert plan.schedules() == () and "launches" not in str(plan)


@pytest.mark.parametrize("name", ["gated_deltanet", "s6", "rwkv7", "mamba3"])
def test_gradients_launch_more(name):
    plan = mixers.get(name).recurrence.plan(T=300, H=2, N=16, P=32, dtype=torch.bfloat16, device="cuda")
    forward, both = (sum(len(x.launches) for x in plan.schedules(gradients)) for gradients in (False, True))
    assert both > 2 * forward - 2 and all(x.peak > 0 for x in plan.schedules(True) if x.launches)


@interpreted
@pytest.mark.parametrize("name", ["gated_deltanet", "s6"])
def test_schedules_are_what_a_call_runs(name, monkeypatch):
    from dsf.kernels.triton import operators

    recurrence = mixers.get(name).recurrence
    given = {n: x.float().requires_grad_() for n, x in sample(recurrence, tokens=21).items()}
    made, ran = recurrence.plan(**given, backend="triton").schedules(True), []
    runnable = operators.runnable
    monkeypatch.setattr(
        operators, "runnable", lambda schedule, *more: ran.append(schedule) or runnable(schedule, *more)
    )
    recurrence(**given, backend="triton").sum().backward()
    assert [[(x.kernel, x.grid) for x in y.launches] for y in made] == [
        [(x.kernel, x.grid) for x in y.launches] for y in ran
    ]
