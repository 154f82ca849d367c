"""torch.compile(fullgraph=True) of whole public calls and steps: the same numbers, forward and backward, at any T."""

import contextlib
import copy
import pickle

import pytest
import torch
from mixer_inputs import sample
from torch.utils.checkpoint import checkpoint

import dsf
from dsf import mixers
from dsf.call.packing import is_captured
from dsf.kernels.decays import LogPairProducts, LogWeighed
from dsf.kernels.walk import Walk
from dsf.models import CausalLM, ModelConfig

NAMES = ["mlstm", "gated_deltanet", "s6", "qlstm"]
AT_ANY_T = ["gated_deltanet", "s6"]  # compiled a second time, with T as a symbol: a chunk form and a scan


def leaves_of(recurrence, tokens):
    return {n: x.float().requires_grad_() for n, x in sample(recurrence, tokens=tokens).items()}


def loss_of(recurrence):
    def loss(given):
        y, state = recurrence(**{n: x * 1.0 for n, x in given.items()}, return_state=True)
        return y.sin().sum() + state.square().sum() * 1e-3

    return loss


@pytest.mark.parametrize("name", NAMES)
def test_a_training_call_is_one_graph(name):
    torch.compiler.reset()
    recurrence = mixers.get(name).recurrence
    loss = loss_of(recurrence)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for tokens in (20, 13) if name in AT_ANY_T else (20,):
        given = leaves_of(recurrence, tokens)
        wanted = list(given.values())
        for a, b in zip(
            torch.autograd.grad(compiled(given), wanted), torch.autograd.grad(loss(given), wanted), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mlstm", "rwkv7"])
def test_a_step_is_one_graph(name):
    torch.compiler.reset()
    recurrence = mixers.get(name).recurrence
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    given = {n: x.float() for n, x in sample(recurrence, tokens=2).items()}
    first, second = ({n: x[:, t] if n in timed else x for n, x in given.items()} for t in (0, 1))
    compiled = torch.compile(lambda state, x: recurrence.step(state, **x), fullgraph=True, backend="aot_eager")
    _, state = recurrence.step(None, **first)
    for a, b in zip(compiled(state, second), recurrence.step(state, **second), strict=True):
        torch.testing.assert_close(a, b)


def test_a_checkpointed_call_is_one_graph():
    torch.compiler.reset()
    delta = mixers.deltanet
    given = leaves_of(delta, 20)

    def loss(x):
        return checkpoint(lambda q, k, v, b: delta(q, k, v, b), *x.values(), use_reentrant=False).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    wanted = list(given.values())
    for a, b in zip(
        torch.autograd.grad(compiled(given), wanted), torch.autograd.grad(loss(given), wanted), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


FUNCTIONS = {
    "pair products": (LogPairProducts, [(3,)]),
    "products weighed": (LogWeighed, [(3, 3), (3,)]),
    "a walk over one chunk": (Walk, [(1, 1, 1, 2, 1), (1, 1, 1, 3, 2), (1, 1, 1, 3, 2), (1, 1, 1, 3, 2), (1, 1, 2, 2)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_function_wrote_in_place_has_gradients_in_a_graph(name):
    """In graphs of torch 2.11 they were zero, as in packed calls, whose lengths the host reads: no node of a graph."""
    torch.compiler.reset()
    function, shapes = FUNCTIONS[name]
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def last(*xs):
        found = function.apply(*xs)
        return (found[-1] if isinstance(found, tuple) else found).sin().sum()

    calls = torch.compile(last, fullgraph=True, backend="eager"), last
    for a, b in zip(*(torch.autograd.grad(f(*given), given, materialize_grads=True) for f in calls), strict=True):
        torch.testing.assert_close(a, b)


def test_calls_of_the_same_shapes_are_checked_once_and_others_again():
    delta = mixers.deltanet
    given = {n: x.float() for n, x in sample(delta, tokens=12).items()}
    first = delta(**given)
    assert torch.equal(delta(given["q"], given["k"], v=given["v"], beta=given["beta"]), first)
    with pytest.raises(dsf.InputError, match="beta"):
        delta(**given | {"beta": given["beta"][:, :5]})
    with pytest.raises(dsf.InputError, match="must be a tensor"):
        delta(**given | {"beta": 0.5})
    assert delta(**given | {"beta": given["beta"][:, :12]}).shape == first.shape


def test_recurrences_that_have_been_called_can_be_copied():
    delta = mixers.deltanet
    given = {n: x.float() for n, x in sample(delta, tokens=12).items()}
    first = delta(**given)
    for copied in (copy.deepcopy(delta), pickle.loads(pickle.dumps(delta))):
        assert torch.equal(copied(**given), first)


def test_a_layer_is_one_graph():
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = mixers.GatedDeltaNet(d_model=32, n_heads=2)
    x = torch.randn(2, 20, 32)
    expected = torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters()))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x)[0].square().sum(), list(layer.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_graph_does_not_ask_what_older_releases_cannot_trace(monkeypatch):
    """Up to torch 2.12 a graph ends at the question whether a device has autocast."""
    torch.compiler.reset()
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda kind: torch._dynamo.graph_break() or True)
    layer, x = mixers.GatedDeltaNet(16), torch.randn(1, 5, 16)
    for parallel in (None, dsf.parallel.Simulated(2)):
        call = torch.compile(lambda x, world=parallel: layer(x, parallel=world)[0], fullgraph=True, backend="eager")
        torch.testing.assert_close(call(x), layer(x)[0], rtol=1e-4, atol=1e-5)


def test_a_graph_of_packed_sequences_over_ranks(monkeypatch):
    """As on torch up to 2.12, where `is_compiling` is false inside a node: it kept boundaries without values for later
    calls. And of other boundaries there was no graph, since torch made symbols of them."""
    torch.compiler.reset()
    monkeypatch.setattr(torch.compiler, "_compile_session_context", contextlib.nullcontext, raising=False)
    layer, world, x = mixers.RGLRU(16).requires_grad_(False), dsf.parallel.Simulated(2), torch.randn(1, 12, 16)
    call = torch.compile(lambda p: layer(x, None, p, parallel=world)[0], fullgraph=True, backend="eager")
    for bounds in ([0, 3, 3, 9, 12], [0, 7, 7, 10, 12]):
        packing = dsf.Packing(bounds)
        for _ in range(2):
            torch.testing.assert_close(call(packing), layer(x, None, packing)[0], rtol=1e-4, atol=1e-5)


def test_a_graph_does_not_ask_whether_a_gpu_is_captured():
    """As calls of packed sequences over ranks do on a GPU, which made torch.compile(fullgraph=True) refuse them."""
    ask = torch.compile(lambda x: x + is_captured(torch.device("cuda")), fullgraph=True, backend="eager")
    assert ask(torch.ones(1)).item() == 1


def test_a_layer_and_a_call_in_reverse_are_one_graph():
    torch.compiler.reset()
    layer = mixers.GatedDeltaNet(16, bare=True).requires_grad_(False)
    x, given = torch.randn(2, 10, 16), leaves_of(mixers.qlstm, 10)

    def both(u, inputs):
        return layer(u, reverse=True)[0].sum() + mixers.qlstm(**inputs, reverse=True).sin().sum()

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(x, given), list(given.values())) for f in (compiled, both))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# S6 and Longhorn are scans of Params that come transposed; the others have other structures.
MODULES = {
    "S6": {"d_model": 8},
    "Longhorn": {"d_model": 8},
    "RGLRU": {"d_model": 8},
    "QLSTM": {"d_model": 8},
    "DeltaNet": {"d_model": 16, "n_heads": 2},
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_past_the_recurrent_form_are_one_graph(name):
    torch.compiler.reset()
    layer = getattr(mixers, name)(**MODULES[name])
    x = torch.randn(1, 11, MODULES[name]["d_model"])
    parameters = list(layer.parameters())
    expected = torch.autograd.grad(layer(x)[0].square().sum(), parameters, allow_unused=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x)[0].square().sum(), parameters, allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def graphs_of(module, inputs):
    """How many graphs torch.compile makes of these calls, each compared with the module's own."""
    torch.compiler.reset()
    made = []

    def backend(graph, _):
        made.append(graph)
        return graph.forward

    compiled = torch.compile(module, fullgraph=True, backend=backend)
    with torch.no_grad():
        for given in inputs:
            torch.testing.assert_close(compiled(given), module(given), rtol=1e-4, atol=1e-5)
    return len(made)


def test_lengths_share_a_graph():
    """Blocks of queries made each length a constant."""
    layer = mixers.get("alibi").module(8)
    assert graphs_of(lambda x: layer(x)[0], [torch.randn(2, tokens, 8) for tokens in (12, 23, 40)]) == 2


@pytest.mark.parametrize("fused", [False, True])
def test_lengths_of_a_model_share_a_graph(fused):
    """So did the check of rotary positions, and pieces of the fused loss."""
    config = ModelConfig(
        vocab_size=13, d_model=8, n_layers=1, n_heads=2, mixers=["softmax_attention"], fused_loss=fused
    )
    model, ids = CausalLM(config), torch.randint(13, (2, 40))
    calls = [ids[:, :tokens] for tokens in (12, 23, 40)]
    assert graphs_of(lambda x: model(x, labels=x, return_state=False).loss, calls) == 2
