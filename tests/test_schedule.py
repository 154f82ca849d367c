"""Schedules: host code run once for a kind of call, on tensors known by position; what it says is what calls do."""

import gc
import re
import weakref

import pytest
import torch

from dsf.kernels.recent import Recent
from dsf.kernels.triton import operators
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.operators import Scheduled


class Kernel:
    """What a launch of a JIT function calls; run: with tensors."""

    def __init__(self, run):
        self.run, self.fn, self.__name__ = run, run, run.__name__

    def __getitem__(self, grid):
        return self.run


@Kernel
def double(x, out, FACTOR=2):
    out.copy_(FACTOR * x)


def steps(x, y, nothing, power):
    """Memory that is filled, views, writing in place, lists of tensors, views of inputs."""
    calls.append(power)
    assert nothing is None
    room = x.new_empty(2, *x.shape)
    unused = x.new_empty(5)
    launch(double, (1,), x[:, 1:], room[1, :, 1:], FACTOR=2)
    launch(double, (1,), y, room[0], FACTOR=3)
    room[1, :, 0] = y[:, 0]
    rows = torch.cat([room[0], room[1].movedim(0, 1).contiguous().T], dim=-1).float() ** power
    total = torch.add(room[0], room[1], out=torch.empty_like(room[0], dtype=torch.float64))
    first, second = rows.unflatten(1, (2, -1)).unbind(1)
    return first - second, [total, room[1], unused[:0]], torch.where(x > 0, x, 0.0)


def expected_of(x, y, power):
    room = torch.stack([3 * y, torch.cat([y[:, :1], 2 * x[:, 1:]], dim=1)])
    first, second = torch.cat([room[0], room[1]], dim=-1).float().pow(power).unflatten(1, (2, -1)).unbind(1)
    return [first - second, (room[0] + room[1]).double(), room[1], torch.empty(0).to(x.dtype), x.clamp(min=0)]


calls: list[int] = []


def inputs(seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(3, 12, generator=g).to(dtype)
    return wide[:, 4:8], torch.randn(4, 3, generator=g).to(dtype).T, None


def flat(found):
    return [found[0], *found[1], found[2]]


@pytest.fixture(autouse=True)
def none_made_yet():
    operators.forget()
    calls.clear()
    yield
    operators.forget()


def test_host_code_runs_once_for_a_kind_of_call():
    run = Scheduled(steps)
    for seed in range(4):
        x, y, _ = given = inputs(seed)
        found = flat(run(*given, 2))
        for a, b in zip(found, expected_of(x, y, 2), strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype
        like = flat(run.shapes(*given, 2))
        assert [(a.shape, a.stride(), a.dtype) for a in found] == [(a.shape, a.stride(), a.dtype) for a in like]
    assert calls == [2] * 5  # once to run it, once for the sizes of each


@pytest.mark.parametrize("how", ["option", "dtype", "stride", "alignment"])
def test_kinds_are_told_apart(how):
    run = Scheduled(steps)
    for seed in range(3):
        run(*inputs(seed), 2)
    calls.clear()
    x, y, _ = inputs(0, torch.float16 if how == "dtype" else torch.float32)
    if how == "stride":
        x = x.contiguous()
    if how == "alignment":
        x = torch.randn(3, 12)[:, 2:6]
    power = 3 if how == "option" else 2
    found = flat(run(x, y, None, power))
    assert calls[0] == power  # then perhaps on symbols
    assert all(torch.equal(a, b) for a, b in zip(found, expected_of(x, y, power), strict=True))


def test_memory_is_freed_after_its_last_use():
    alive = []

    @Kernel
    def count(x):
        alive.append(sum(type(y) is torch.Tensor and y.shape == (7, 11, 13) for y in gc.get_objects()))

    def body(x):
        first, second = torch.empty_like(x), torch.empty_like(x)
        launch(double, (1,), x, first)
        launch(double, (1,), first, second)
        launch(count, (1,), second)
        return second + 1

    x = torch.randn(7, 11, 13)
    run = Scheduled(body)
    for _ in range(3):
        gone = weakref.ref(run(x))
        assert alive.pop() == 2 and gone() is None  # x, second; `first` is gone


@pytest.mark.parametrize("first", [True, False])
def test_tensors_that_are_one_are_two_arguments(first):
    run = Scheduled(lambda x, y: x - y)
    for seed in range(6):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        y = x if (seed < 3) == first else x + 1
        assert torch.equal(run(x, y), x - y)


def test_what_was_used_longest_ago_is_forgotten_first():
    kept = Recent(3)
    for key in (2, 3, 4):
        kept.put(key, str(key))
    assert kept.get(2) == "2" and kept.get(5) is None
    kept.put(5, "5")  # 3 was used longest ago
    assert list(kept.kept) == [4, 2, 5]


def test_a_tensor_that_is_no_argument_is_an_error():
    elsewhere = torch.ones(3, 4)
    with pytest.raises(AssertionError, match="no argument"):
        Scheduled(lambda x: x + elsewhere)(torch.randn(3, 4))


def test_as_many_results_as_the_schema_has():
    """Torch ends the process where an operator returns another number of tensors."""
    with pytest.raises(TypeError, match="returns 2 tensors, its schema has 3"):
        Scheduled(lambda x: (x + 1, x + 2), results=3)(torch.randn(3))


def test_what_a_schedule_cannot_say_is_an_error():
    with pytest.raises(AssertionError, match="no place"):
        Scheduled(torch.sort)(torch.randn(3))
    with pytest.raises(TypeError, match="not known"):
        Scheduled(lambda x: x if x.sum() > 0 else -x)(torch.randn(3))


def test_a_schedule_prints_all_that_a_call_does():
    made = Scheduled(steps).schedule(*inputs(0), 2)
    text = str(made)
    assert [x.kernel for x in made.launches] == [double, double]
    given, *each, returned = text.splitlines()
    assert len(each) == len(made.steps) and [line.startswith("double[") for line in each].count(True) == 2
    made_here = set(re.findall(r"^(t\d+) ", "\n".join(each), re.M)) | set(re.findall(r"t\d+", given))
    assert set(re.findall(r"\bt\d+", " ".join([*each, returned]))) <= made_here  # nothing comes from elsewhere


def test_lists_of_tensors_and_options_reach_the_host_code():
    def total(xs, state, factors, name):
        assert (len(xs), factors, name) == (2, (1.0, 2.0), "sum")
        return xs[0] * factors[0] + xs[1] * factors[1] + (0 if state is None else state)

    run, (x, y) = Scheduled(total), torch.randn(2, 3)
    assert torch.equal(run([x, y], None, [1.0, 2.0], "sum"), x + 2 * y)
    assert torch.equal(run([x, y], x, [1.0, 2.0], "sum"), x + 2 * y + x)
