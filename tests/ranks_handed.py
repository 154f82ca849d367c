"""More of what the ranks of tests/test_parallel_ranks.py do: states handed on, solves, angles of half precision."""

import importlib
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import ranks_work
import torch
from ranks_work import OUTPUT, layer_error, own, summed, whole_and_own, worst
from structures import gated_delta, sample, turned_delta
from test_graphed import Replayed
from torch.distributed.device_mesh import init_device_mesh

import dsf.models
from dsf import mixers
from dsf.mixers import sliding_window_attention
from dsf.parallel import Sequence, attach, prepare


def two():
    """What `ranks_work.two` finds, with more errors."""
    found, *rest = ranks_work.two()
    cp, headtail = Sequence(), Sequence(layout="headtail")
    found |= {f"handed on, {name}": error for name, error in handed_on(headtail).items()}
    found["mesanet"] = max(layer_error("mesanet", cp), solved(cp))
    found["turns of half precision"] = max(half_turns(cp, dtype) for dtype in (torch.bfloat16, torch.float16))
    found["hybrid"] = hybrid()
    found["steps from a graph"] = graphed()
    nothing = Sequence(sizes=(10, 0))
    for name in ("fox", "sliding_window_attention", "s5", "mamba3"):
        options = {"window": 3} if name == "sliding_window_attention" else {}
        found[f"no tokens, {name}"] = layer_error(name, nothing, **options)
    for name in ("gated_deltanet", "mamba3"):
        found[f"no tokens behind the last sequence, {name}"] = layer_error(name, nothing, torch.tensor([0, 3, 10]))
    for name in ("gated_deltanet", "softmax_attention"):
        found[f"no tokens, a model of {name}"] = max(model_without_tokens(name, fused) for fused in (False, True))
    found["gradients of queries alone"] = wanted_alone(nothing, sliding_window_attention, "q")
    found["gradients of a state alone"] = max(wanted_alone(world, gated_delta) for world in (cp, headtail))
    for world, name, kept in ((cp, "gated_deltanet", False), (headtail, "softmax_attention", False), (cp, "fox", True)):
        found[f"packed in a graph, {name}"] = packed_in_a_graph(world, name, kept)
    found["reversed in a graph"] = reversed_in_a_graph()
    found["rates over ranks"] = max(rates_over_ranks())
    return found, *rest


def graphed():
    """How far training steps over both ranks from a graph, a CPU's in place of CUDA's, are from those without one."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
    cp, found = Sequence(mesh), []
    for capturable in (True, False):
        model = prepare(attach(ranks_work.small_model(), cp), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_of(ids, labels, model=model):
            return model(ids, shift_labels=labels, return_state=False).loss

        step, losses = dsf.models.Graphed(model, loss_of), []
        instead = {"capture": Replayed, "capturable": lambda *_, is_so=capturable: is_so}
        with mock.patch.multiple("dsf.mixers.models.graphed", **instead), mock.patch("torch.cuda.graph_pool_handle"):
            for number in range(5):
                ids = torch.randint(17, (2, 10), generator=torch.Generator().manual_seed(number))
                losses.append(step(*cp.shard(ids, dsf.models.next_labels(ids))))
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        assert len(step.graphs) == capturable
        found.append([torch.stack(losses), *(p.detach().full_tensor() for p in model.parameters())])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def rates_over_ranks():
    """By how much y of every layer that has rates differs where its parameters are divided, relative to the largest."""
    torch.manual_seed(5)
    mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), torch.randn(1, 5, 32, dtype=torch.float64)
    for entry in mixers.ZOO:
        layer = None if entry.module is None else entry.module(32).double()
        if layer is not None and "rate" in layer.kinds.values():
            y = layer(x)[0]
            yield float((prepare(layer, mesh=mesh)(x)[0] - y).abs().max() / y.abs().max().clamp(min=1e-30))


def hybrid():
    """By how much losses of benchmarks/hybrid.py are apart from those of one rank, beyond what roundings are allowed:
    31 tokens in float32, then head and tail in bfloat16."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    script, mesh = importlib.import_module("hybrid"), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
    asked, whole = (
        Namespace(dry=True, lr=1e-3, graphed=False),
        mock.patch("torch.autocast", lambda *_, **__: nullcontext()),
    )
    excess = 0.0
    for layout, tokens, precision, allowed in (
        ("contiguous", 31, whole, 2e-6),
        ("headtail", 32, nullcontext(), 1e-3),
    ):
        ids = script.text(2, tokens, torch.device("cpu"))
        with precision:
            one = script.trained(asked, ids, None, None)["losses"]
            both = script.trained(asked, ids, script.shared(mesh, layout, tokens), mesh)["losses"]
        excess = max(excess, *(abs(a / b - 1) - allowed for a, b in zip(both, one, strict=True)))
    return excess


def solved(cp):
    """Errors of MesaNet's recurrence, whose readout is a solve, after a state."""
    inputs, before = sample(mixers.mesanet, T=10), sample(mixers.mesanet, T=3)
    for x in (inputs, before):  # strengths of writing are positive, or there is nothing to solve
        x["beta"] = x["beta"].sigmoid()
    return whole_and_own(mixers.mesanet, inputs, cp, mixers.mesanet(**before, return_state=True)[1])


def handed_on(cp):
    """Packed sequences, one of one token and one without any, after states and with states after: errors by name."""
    found, bounds = {}, torch.tensor([0, 1, 1, 7, 12])
    for recurrence in (gated_delta, turned_delta, mixers.s6):
        state = recurrence(**sample(recurrence, B=4, T=3), return_state=True)[1]
        for reverse in (False, True):
            inputs = sample(recurrence, B=1, T=12)
            name = f"{recurrence.name}{', reverse' * reverse}"
            found[name] = whole_and_own(recurrence, inputs, cp, state, bounds, reverse=reverse)
    for name in ("gated_deltanet", "mesanet", "mamba3", "softmax_attention"):
        torch.manual_seed(1)
        layer = mixers.get(name).module(32).double()
        x, early = torch.randn(2, 1, 12, 32, dtype=torch.float64)
        before = layer(early, cu_seqlens=torch.tensor([0, 3, 4, 8, 12]))[1]
        (y, state), (got, after) = layer(x, before, bounds), layer(own(cp, x), before, bounds, parallel=cp)
        more, again = layer(x, state, bounds)[0], layer(own(cp, x), after, bounds, parallel=cp)[0]
        pairs = [(got, own(cp, y), OUTPUT), (again, own(cp, more), OUTPUT)]
        if state.conv is not None:
            pairs.append((after.conv, state.conv, None))
        found[name] = worst(pairs)
    return found


def model_without_tokens(name, fused_loss):
    """Errors of a model's loss and gradients where the second rank holds no token of whole sequences."""
    config = dsf.models.ModelConfig(d_model=32, n_layers=2, vocab_size=17, mixers=[name], fused_loss=fused_loss)
    torch.manual_seed(4)
    model, cp = dsf.models.CausalLM(config).double(), Sequence(sizes=(8, 0))
    ids = torch.randint(17, (2, 8), generator=torch.Generator().manual_seed(0))

    def run(*given):
        loss = model(given[0], shift_labels=given[1], num_items_in_batch=14, return_state=False).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    whole = ids, dsf.models.next_labels(ids)
    expected = run(*whole)
    attach(model, cp)
    found = [summed(x.detach()) for x in run(*cp.shard(*whole))]
    return max(float((a - b).detach().abs().max()) for a, b in zip(found, expected, strict=True))


def wanted_alone(cp, recurrence, name=None):
    """The error of the gradient of one input, or of the initial state, where nothing else wants one."""
    torch.manual_seed(6)
    tokens = sum(cp.sizes or (12,))
    inputs = sample(recurrence, B=2, T=tokens)
    state = None if name else recurrence(**sample(recurrence, B=2, T=3), return_state=True)[1]

    def run(given, world, weight):
        leaf = (state if name is None else given[name]).clone().requires_grad_()
        given, start = (given, leaf) if name is None else ({**given, name: leaf}, None)
        y = recurrence(**given, initial_state=start, parallel=world)
        return torch.autograd.grad((y.sin() * weight).sum(), leaf)[0]

    weight = torch.linspace(1, 2, tokens, dtype=torch.float64)[None, :, None, None]
    whole = run(inputs, None, weight)
    found = run({n: own(cp, x) for n, x in inputs.items()}, cp, own(cp, weight))
    return float((summed(found) - whole if name is None else found - own(cp, whole)).abs().sum())


def packed_in_a_graph(cp, name, kept):
    """Errors of a compiled layer's outputs, states and gradients on packed sequences, beside the same call before and
    after, and of its outputs beside the whole."""
    torch.manual_seed(1)
    layer, bounds = mixers.get(name).module(32).double(), dsf.Packing([0, 5, 5, 11, 16])
    x = torch.randn(1, 16, 32, dtype=torch.float64)

    def call(x, world):
        y, state = layer(x, None, bounds, use_cache=kept, parallel=world)
        return [y, *((state.recurrent.k, state.recurrent.v) if kept else ())]

    def run(call):
        leaf = own(cp, x).clone().requires_grad_()
        outputs = call(leaf, cp)
        return [*outputs, torch.autograd.grad(sum(z.sin().sum() for z in outputs), leaf)[0]]

    before, found, after = run(call), run(torch.compile(call, fullgraph=True, backend="aot_eager")), run(call)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    pairs = [(own(cp, call(x, None)[0]), found[0]), *zip(before, found, strict=True)]
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def reversed_in_a_graph():
    """The error of a compiled layer from the last token to the first, over ranks that made no such call before."""
    torch.manual_seed(1)
    layer, x, cp = mixers.RGLRU(16).double(), torch.randn(1, 11, 16, dtype=torch.float64), Sequence()
    call = torch.compile(lambda x: layer(x, parallel=cp, reverse=True)[0], fullgraph=True, backend="aot_eager")
    return float((call(own(cp, x)) - own(cp, layer(x, reverse=True)[0])).detach().abs().max())


def half_turns(cp, dtype):
    """By how much errors of a turned system's outputs and gradients exceed 1.1 times those of the whole sequence."""
    timed = [True, *(i.kind.time for i in turned_delta.spec.inputs)]
    inputs = sample(turned_delta, B=1, T=64)  # Params in float32: ranks' parts of a gradient may be larger than its sum
    inputs = {n: x.to(dtype if t else torch.float32) for (n, x), t in zip(inputs.items(), timed[1:], strict=True)}

    def run(tensors, **more):
        leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
        y = turned_delta(**leaves, **more)
        return [x.double() for x in (y, *torch.autograd.grad(y.double().sin().sum(), list(leaves.values())))]

    exact, whole = run({n: x.double() for n, x in inputs.items()}), run(inputs)
    cut = run({n: own(cp, x) if t else x for (n, x), t in zip(inputs.items(), timed[1:], strict=True)}, parallel=cp)
    excess = 0.0
    for true, rough, got, t in zip(exact, whole, cut, timed, strict=True):
        true, rough, got = (own(cp, true), own(cp, rough), got) if t else (true, rough, summed(got))
        allowed = 1.1 * (rough - true).norm() + 0.1 * torch.finfo(dtype).eps * true.norm()
        excess = max(excess, float((got - true).norm() - allowed))
    return excess
