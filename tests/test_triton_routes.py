"""Later calls over ranks on the kernels: checks, plan and exchange are those of the first call of the kind."""

import copy
import pickle

import pytest
import torch
from interpreted import interpreted
from mixer_inputs import sample
from torch.testing._internal.distributed.fake_pg import FakeStore

import dsf
from dsf.language.errors import InputError
from dsf.mixers import get
from dsf.parallel import Sequence, Simulated, agree, call

pytestmark = interpreted


@pytest.fixture
def along(counting):
    """How many calls took a route."""
    return counting(call, "_along")


def draw(name, tokens=21, dtype=torch.float32):
    torch.manual_seed(0)
    recurrence = get(name).recurrence
    return recurrence, {n: x.to(dtype) for n, x in sample(recurrence, 1, tokens, 1).items()}


def outcome(recurrence, given, world, state=None):
    """y, the final state and all gradients."""
    leaves = {n: x.detach().requires_grad_() for n, x in given.items()}
    start = None if state is None else state.detach().requires_grad_()
    y, final = recurrence(**leaves, initial_state=start, return_state=True, backend="triton", parallel=world)
    wanted = [*leaves.values()] + ([] if start is None else [start])
    return [y, final, *torch.autograd.grad((y.float().square().sum() + final.sum()), wanted)]


@pytest.mark.parametrize(("name", "layout"), [("gated_deltanet", "headtail"), ("s6", "contiguous")])
def test_later_calls_have_the_same_bits(name, layout, along):
    recurrence, given = draw(name, 12)
    world = Simulated(2, layout)
    early = {n: x[:, :3] if x.dim() > 1 and x.shape[1] == 12 else x for n, x in given.items()}
    state = recurrence(**early, return_state=True)[1]
    first = outcome(recurrence, given, world, state)
    assert along[0] == 0
    for count in (1, 2):
        for got, want in zip(outcome(recurrence, given, world, state), first, strict=True):
            assert torch.equal(got, want)
        assert along[0] == count


def test_a_route_is_of_one_kind_of_call(along):
    recurrence, given = draw("gated_deltanet")
    world = Simulated(2)

    def run(x=given, **options):
        before = along[0]
        recurrence(**x, backend="triton", parallel=world, **options)
        return along[0] - before

    assert [run(), run()] == [0, 1]
    for other in (
        {n: x.bfloat16() for n, x in given.items()}, {n: x[:, :20] for n, x in given.items()},
        {**given, "v": given["v"].clone().requires_grad_()},
    ):  # fmt: skip
        assert [run(other), run(other)] == [0, 1]
    with torch.no_grad():
        assert [run(), run()] == [0, 1]
    assert [run(return_state=True), run(return_state=True)] == [0, 1]
    assert [run(reverse=True), run(reverse=True)] == [0, 1]
    cuts = torch.tensor([0, 5, 21]), dsf.Packing([0, 6, 21]), dsf.Packing([0, 5, 21]), torch.tensor([0, 6, 21])
    assert [run(cu_seqlens=bounds) for bounds in cuts] == [0, 0, 1, 1]
    recurrence(*given.values(), backend="triton", parallel=world)  # by position
    assert along[0] == 10


def test_an_input_twice_and_transposed(along):
    """The same tensor as two inputs, and inputs whose strides differ from the first call's."""
    recurrence, given = draw("gated_deltanet")
    world = Simulated(2)
    for x in (
        {**given, "q": given["k"]},
        {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in given.items()},
    ):
        recurrence(**given, backend="triton", parallel=world)
        found = outcome(recurrence, x, world), outcome(recurrence, x, world)
        expected = outcome(
            recurrence, {n: y.clone(memory_format=torch.contiguous_format) for n, y in x.items()}, Simulated(2)
        )
        for got, again, want in zip(*found, expected, strict=True):
            assert torch.equal(got, want) and torch.equal(again, want)
    assert along[0] > 0


def test_a_known_kind_is_still_checked(along):
    recurrence, given = draw("gated_deltanet")
    world = Simulated(2)
    for _ in range(2):
        recurrence(**given, backend="triton", parallel=world)
    with pytest.raises(InputError):
        recurrence(**{**given, "beta": given["beta"][:, :-1]}, backend="triton", parallel=world)
    with pytest.raises(InputError):
        recurrence(**given, initial_state=torch.zeros(1, 1, 3, 3), backend="triton", parallel=world)
    with pytest.raises(InputError):
        recurrence(**{n: x for n, x in given.items() if n != "beta"}, backend="triton", parallel=world)
    with dsf.validate(), pytest.raises(dsf.DsfError, match="alpha"):
        recurrence(**{**given, "alpha": given["alpha"] * torch.nan}, backend="triton", parallel=world)
    assert along[0] == 1


def test_autocast_is_off_in_known_calls_too(along):
    recurrence, given = draw("gated_deltanet")
    world = Simulated(2)
    first = outcome(recurrence, given, world)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = outcome(recurrence, given, world)
    assert along[0] == 1 and all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_worlds_forget():
    recurrence, given = draw("gated_deltanet")
    world = Simulated(2)
    recurrence(**given, backend="triton", parallel=world)
    recurrence(**given, backend="triton", parallel=world.backwards())
    assert len(world.routes.kept) == len(world.backwards().routes.kept) == 1
    assert copy.deepcopy(world) is world
    assert not pickle.loads(pickle.dumps(world)).routes.kept
    assert all(x.numel() == 0 for route in world.routes.kept.values() for one in route.hollows
               for x in (*one.summary.bound.tensors.values(), *one.shard.operands, *one.held, *one.saved))  # fmt: skip
    world.agreed = {"kind"}
    world.forget()
    assert not (world.routes.kept or world.backwards().routes.kept or world.agreed)


@pytest.fixture
def told(monkeypatch):
    """A `Sequence` as rank 1 of 2, whose collectives return at once, and what it told the other rank."""
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    texts = []

    def tell(self, text, device):
        texts.append(text)
        status, _, *rest = text.split("\n")
        return [text, "\n".join([status, "other tokens", *rest])]

    monkeypatch.setattr(Sequence, "tell", tell)
    yield texts
    torch.distributed.destroy_process_group()


def test_ranks_compare_a_kind_once_and_again_when_it_is_forgotten(told, along, monkeypatch):
    recurrence, given = draw("gated_deltanet", 6)
    world = Sequence()
    world.log = []

    def run(x=given):
        before = len(world.log)
        leaves = {n: y.detach().requires_grad_() for n, y in x.items()}
        y = recurrence(**leaves, backend="triton", parallel=world)
        torch.autograd.grad(y.sum(), list(leaves.values()))
        return world.log[before:]

    first = run()
    assert [kind for kind, *_ in first] == ["gather", "gather"] and run() == run() == first
    assert (len(told), along[0]) == (1, 2)
    run({n: x[:, :5] for n, x in given.items()})  # of the kind, whatever its tokens: known to the other rank
    assert (len(told), along[0]) == (1, 2)
    monkeypatch.setattr(agree, "KINDS", 1)
    run({n: x[:, :, :, :2] if x.dim() > 3 else x for n, x in given.items()})  # one kind too many: all ranks forget
    assert len(told) == 2
    assert run() == first and (len(told), along[0]) == (3, 2)
    checked = Sequence(check=True)
    for _ in range(3):
        recurrence(**given, backend="triton", parallel=checked)
    assert (len(told), along[0]) == (6, 2)
