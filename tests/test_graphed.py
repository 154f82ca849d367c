"""Training steps from a CUDA graph (mixers/models/graphed.py), with a graph of a CPU in place of CUDA's."""

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch

import dsf
from dsf.mixers.models import graphed
from dsf.models import CausalLM, Graphed, ModelConfig


class Replayed:
    """What capturing gives, where a replay computes again, with the numbers that Python had at the capture."""

    def __init__(self, step, parameters, tensors, pool):
        self.step, self.parameters = step, parameters
        self.inputs = tuple(x.clone() for x in tensors)
        self.loss = step(self.inputs)
        self.gradients = [p.grad for p in parameters]
        for x in (self.loss, *self.gradients):
            if x is not None:
                x.fill_(torch.nan)  # a capture computes nothing
        self.replays = 0

    def replay(self):
        self.replays += 1
        before = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        self.loss.copy_(self.step(self.inputs))
        for p, old, own in zip(self.parameters, before, self.gradients, strict=True):
            if own is not None:
                own.copy_(p.grad)
            p.grad = old


@pytest.fixture
def made(monkeypatch):
    """The graphs that were captured."""
    found = []

    def capture(*given):
        found.append(Replayed(*given))
        return found[-1]

    monkeypatch.setattr(graphed, "capture", capture)
    monkeypatch.setattr(graphed, "capturable", lambda parameters, device: True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    return found


def pair(**sizes):
    """(a model, an equal one, its step)."""
    config = ModelConfig(vocab_size=31, d_model=16, n_layers=1, mixers=["gated_deltanet"], **sizes)
    torch.manual_seed(0)
    one, other = CausalLM(config).double(), CausalLM(config).double()
    other.load_state_dict(one.state_dict())
    return one, other, Graphed(other, lambda ids: other(ids, labels=ids, return_state=False).loss)


def same_gradients(one, other):
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        if p.grad is None:
            assert q.grad is None, name
        else:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-12, msg=name)


def drawn(tokens=6, seed=0):
    return torch.randint(0, 31, (2, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("to_none", [True, False])
def test_steps_of_an_optimizer_are_those_without_a_graph(made, to_none):
    one, other, step = pair()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (one, other)]
    losses = []
    for seed in range(7):
        ids = drawn(seed=seed)
        loss = one(ids, labels=ids).loss
        loss.backward()
        losses.append((loss.detach(), step(ids)))
        same_gradients(one, other)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    assert [g.replays for g in made] == [5]
    for expected, found in losses:  # losses that were kept are those of their steps
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def test_gradients_accumulate_over_calls_of_several_shapes(made):
    one, other, step = pair()
    for number in range(12):
        ids = drawn(6 if number % 3 else 5, number)
        one(ids, labels=ids).loss.backward()
        step(ids)
        same_gradients(one, other)
    assert [g.replays for g in made] == [6, 2]


def test_what_changes_a_step_is_captured_anew(made):
    one, other, step = pair()
    for _ in range(4):
        step(drawn())
    other.model.embed_tokens.weight.requires_grad_(False)
    other.zero_grad()
    for _ in range(3):
        step(drawn())
    assert [g.replays for g in made] == [2, 1] and other.model.embed_tokens.weight.grad is None
    other.eval()
    for _ in range(3):
        step(drawn())
    assert len(made) == 3 == len(step.graphs)
    other.load_state_dict({k: v.clone() for k, v in one.state_dict().items()}, assign=True)  # at another place
    other.zero_grad()
    for _ in range(3):
        step(drawn())
    assert len(made) == 4 and len(step.graphs) == 1


def test_a_ninth_kind_and_a_call_that_is_refused_go_on_without_a_graph(made, monkeypatch):
    one, other, step = pair()
    for tokens in range(2, 12):
        for _ in range(3):
            step(drawn(tokens))
    assert len(made) == graphed.MOST

    def refused(*given):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    one, other, step = pair()
    monkeypatch.setattr(graphed, "capture", refused)
    ids = drawn()
    for number in range(5):
        one(ids, labels=ids).loss.backward()
        if number == graphed.EAGER:
            with pytest.warns(UserWarning, match="operation not permitted when stream is capturing$"):
                step(ids)
        else:
            step(ids)
        same_gradients(one, other)
    monkeypatch.setattr(graphed, "ranks", lambda: 2)  # the other rank waits for this one's collectives
    step.clear()
    for _ in range(graphed.EAGER):
        step(ids)
    with pytest.raises(RuntimeError, match=r"step \(operation not permitted when stream is capturing\); take it"):
        step(ids)


def test_a_model_whose_gradients_are_reduced_by_hooks_takes_no_graph(made):
    class Wrapped(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, module):
            torch.nn.Module.__init__(self)
            self.module = module

    _, other, _ = pair()
    step = Graphed(Wrapped(other), lambda ids: other(ids, labels=ids, return_state=False).loss)
    for _ in range(4):
        step(drawn())
    assert not made and not step.graphs


def test_a_cpu_takes_its_steps_as_ever():
    one, other, step = pair()
    for seed in range(4):
        ids = drawn(seed=seed)
        expected = one(ids, labels=ids).loss
        expected.backward()
        found = step(ids)
        assert torch.equal(found, expected.detach()) and not found.requires_grad
        same_gradients(one, other)
    assert not step.graphs


@pytest.mark.parametrize(
    ("loss_of", "got"),
    [
        (lambda model, ids: model(ids, labels=ids), "CausalOutput"),
        (lambda model, ids: model(ids).logits, r"shape \[1, "),
        (lambda model, ids: model(ids).loss, "NoneType"),
    ],
)
def test_a_loss_that_is_none_is_refused_in_words(loss_of, got):
    model, _, _ = pair()
    with pytest.raises(dsf.InputError, match=f"loss_of returned {got}.*expected a tensor of one number"):
        Graphed(model, partial(loss_of, model))(drawn()[:1])


def test_hooks_and_processes_without_nccl_take_no_graph(monkeypatch):
    model = torch.nn.Linear(3, 1)
    parameters = list(model.parameters())
    assert not graphed.capturable(parameters, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device = type("Device", (), {"type": "cuda", "__eq__": lambda self, other: True, "__hash__": object.__hash__})()
    assert graphed.capturable(parameters, device)
    monkeypatch.setattr(graphed, "ranks", lambda: 2)
    for backend, captured in (("cpu:gloo,cuda:gloo", False), ("cpu:gloo,cuda:nccl", True)):
        monkeypatch.setattr(torch.distributed, "get_backend_config", lambda backend=backend: backend)
        assert graphed.capturable(parameters, device) == captured
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    assert not graphed.capturable(parameters, device)


def test_random_numbers_work_again_after_a_capture_that_failed(monkeypatch):
    done, device = [], torch.device("cpu")

    @contextmanager
    def graph(*args, **options):
        yield
        done.append("captured")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(graphed, "recover", lambda device: done.append("recovered"))
    with graphed.capturing(device):
        pass
    with pytest.raises(RuntimeError, match="refused"), graphed.capturing(device):
        raise RuntimeError("refused")
    assert done == ["captured", "recovered"]
