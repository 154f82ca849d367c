"""Calls written down and played again: the same results, for calls of the same kind alone, and no memory held."""

import weakref

import pytest
import torch

from dsf.kernels.triton import tape
from dsf.kernels.triton.tape import Tape, played, recording


def launched(run, *args):
    """What a launch does: run it, and write it down."""
    if recording() is not None:
        recording().launch(run, args, False)
        with recording().paused():
            return run(*args)
    return run(*args)


def double(x, out):
    out.copy_(2 * x)


def steps(tensors, power):
    """Memory that is filled, views, writing in place, lists of tensors, an input handed through."""
    calls.append(power)
    x, y, nothing = tensors
    assert nothing is None
    room = torch.empty(2, *x.shape, dtype=x.dtype)
    unused = torch.empty(5)
    launched(double, x[:, 1:], room[1, :, 1:])
    launched(double, y, room[0])
    room[1, :, 0] = y[:, 0]
    rows = torch.cat([room[0], room[1].movedim(0, 1).contiguous().T], dim=-1).float() ** power
    total = torch.add(room[0], room[1], out=torch.empty_like(room[0], dtype=torch.float64))
    return rows.unflatten(1, (2, -1)), [total, room[1], unused[:0]], x


calls: list[int] = []


def inputs(seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(3, 12, generator=g).to(dtype)
    return wide[:, 3:7], torch.randn(4, 3, generator=g).to(dtype).T, None


def flat(found):
    return [found[0], *found[1], found[2]]


@pytest.fixture(autouse=True)
def none_played_yet():
    tape.forget()
    yield
    tape.forget()


def test_the_third_call_of_a_kind_is_played():
    calls.clear()
    for seed in range(5):
        given = inputs(seed)
        found = played(steps, given, 2)
        assert len(calls) == min(seed + 1, 2)
        expected = steps(given, 2)
        calls.pop()
        for a, b in zip(flat(found), flat(expected), strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype
        assert found[2] is given[0]


@pytest.mark.parametrize("how", ["option", "dtype", "stride", "alignment"])
def test_kinds_are_told_apart(how):
    for seed in range(3):
        played(steps, inputs(seed), 2)
    calls.clear()
    x, y, _ = inputs(0, torch.float16 if how == "dtype" else torch.float32)
    if how == "stride":
        x = x.contiguous()
    if how == "alignment":
        x = torch.randn(3, 12)[:, 2:6]
    power = 3 if how == "option" else 2
    found = played(steps, (x, y, None), power)
    assert calls == [power]
    assert all(torch.equal(a, b) for a, b in zip(flat(found), flat(steps((x, y, None), power)), strict=True))


def test_memory_is_freed_after_its_last_use():
    alive = []

    def body(tensors):
        first = torch.empty_like(tensors[0])
        launched(double, tensors[0], first)
        alive.append(weakref.ref(first))
        second = torch.empty_like(tensors[0])
        launched(double, first, second)
        launched(lambda x: alive.append(first_of_play()), second)
        return (second + 1,)

    def first_of_play():
        return sum(type(x) is torch.Tensor and x.shape == (7, 11, 13) for x in gc.get_objects())

    import gc

    x = torch.randn(7, 11, 13)
    counts = []
    for _ in range(4):
        played(body, (x,))
        counts.append(alive.pop())
    assert counts[0] == counts[1] == 3 and counts[2] == counts[3] == 2  # x, second; `first` is gone


@pytest.mark.parametrize("first", [True, False])
def test_tensors_that_are_one_are_told_from_those_that_are_equal(first):
    """A tape of a call in which two inputs were one tensor would hand the one for both to every later call."""

    def difference(tensors):
        return (tensors[0] - tensors[1],)

    for seed in range(6):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        y = x if (seed < 3) == first else x + 1
        assert torch.equal(played(difference, (x, y))[0], x - y)


def test_the_tape_played_longest_ago_is_forgotten_first(monkeypatch):
    monkeypatch.setattr(tape, "LARGEST", 3)
    for power in (2, 3, 4, 2, 5):  # 3 was played longest ago when 5 comes
        played(steps, inputs(0), power)
    assert [key[1] for key in tape._tapes] == [(4,), (2,), (5,)]


def test_a_tensor_from_elsewhere_is_an_error():
    elsewhere = torch.ones(3, 4)
    x = torch.randn(3, 4)
    played(lambda tensors: (tensors[0],), (x,))

    def adding(tensors):
        return (tensors[0] + elsewhere,)

    played(adding, (x,))
    with pytest.raises(AssertionError, match="came from elsewhere"):
        played(adding, (x,))


def test_what_a_tape_cannot_say_is_an_error():
    with pytest.raises(AssertionError, match="no place"), Tape((torch.randn(3),)):
        torch.sort(torch.randn(3))
