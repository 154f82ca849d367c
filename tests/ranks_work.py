"""What the ranks of tests/test_parallel_ranks.py do: every case against the whole sequence, computed on every rank."""

import copy
import pickle
import tempfile

import torch
import torch.distributed as dist
from functorch.compile import min_cut_rematerialization_partition
from structures import channel_delta, gated_delta, product, sample, softmax, stabilised, trapezoid, turned_delta
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import dsf
from dsf import mixers
from dsf.checking.measure import distance
from dsf.language.annotations import Kind
from dsf.language.expr import VALUE
from dsf.models import CausalLM, ModelConfig
from dsf.parallel import Sequence, attach
from dsf.parallel.layout import LAYOUTS

OUTPUT = Kind(frozenset({VALUE}))
# One of each structure: tests/test_parallel.py has every recurrence and layer, on ranks in one process.
LAYERS = ["gated_deltanet", "s6", "rg_lru", "retnet", "rwkv7", "softmax_attention", "mamba3", "lru"]
RECURRENCES = {
    r.name: r for r in (gated_delta, channel_delta, product, stabilised, softmax, mixers.s6, turned_delta, trapezoid)
}


def worst(pairs):
    """The largest error over heads and blocks of tokens."""
    return max(distance(a.detach(), b.detach(), kind, "float64", 1.0) for a, b, kind in pairs)


def own(cp, x, kind=None):
    return cp.shard(x) if kind is None or kind.time else x


def summed(x):
    """A replicated tensor's gradient: the sum of what every rank found."""
    x = x.contiguous().clone()
    dist.all_reduce(x)
    return x


def whole_and_own(recurrence, inputs, cp, state=None, bounds=None, zero_loss=False, reverse=False):
    """Errors of y, the final state and all gradients of a call over ranks against the whole."""
    kinds = {i.name: i.kind for i in recurrence.spec.inputs}
    options = {"reverse": reverse} | ({} if bounds is None else {"cu_seqlens": bounds})
    finite = not recurrence.spec.is_softmax

    def run(tensors, world, weight):
        leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
        start = None if state is None else state.clone().requires_grad_()
        more = {} if world is None else {"parallel": world}
        y, last = recurrence(**leaves, initial_state=start, return_state=True, **options, **more)
        loss = (y.sin() * weight).sum()
        if finite:
            true = recurrence.true_state(last, y.shape[-1])
            share = 1.0 if world is None else (world.rank + 1) / sum(range(1, world.ranks + 1))
            loss = loss + (0.0 if zero_loss else share) * true.cos().sum()
        wrt = [*leaves.values(), *([] if start is None else [start])]
        grads = torch.autograd.grad(loss, wrt, allow_unused=True)
        grads = [torch.zeros_like(w) if g is None else g for w, g in zip(wrt, grads, strict=True)]
        return y, true if finite else None, grads

    y, last, grads = run(inputs, None, 1.0)
    if zero_loss:
        leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
        y = recurrence(**leaves, **options)
        lead = torch.ones(y.shape[1], dtype=torch.float64)
        lead[cp.positions(y.shape[1])] = 0.0 if cp.rank == 0 else 1.0
        dist.all_reduce(lead, op=dist.ReduceOp.MIN)
        grads = torch.autograd.grad((y.sin() * lead[None, :, None, None]).sum(), list(leaves.values()))
    got_y, got_last, got = run(
        {n: own(cp, x, kinds[n]) for n, x in inputs.items()}, cp, 0.0 if zero_loss and not cp.rank else 1.0
    )
    pairs = [(got_y, own(cp, y), OUTPUT)]
    if last is not None:
        pairs.append((got_last, last, None))
    names = list(inputs)
    for name, a, b in zip(names, got, grads, strict=False):
        pairs.append((a, own(cp, b), kinds[name]) if kinds[name].time else (summed(a), b, kinds[name]))
    if state is not None:
        plain = recurrence.true_state(torch.zeros_like(state), y.shape[-1]).shape[-1]
        pairs.append((summed(got[-1])[..., :plain], grads[-1][..., :plain], None))
    return worst(pairs)


def layer_error(name, cp, bounds=None, **options):
    torch.manual_seed(1)
    layer = mixers.get(name).module(d_model=32, **options).double()
    x = torch.randn(2 if bounds is None else 1, 10, 32, dtype=torch.float64)

    def run(x, world):
        x = x.clone().requires_grad_()
        y, _ = layer(x, cu_seqlens=bounds, parallel=world)
        return y, torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()], allow_unused=True)

    (y, (dx, *dp)), (got, (gx, *gp)) = run(x, None), run(own(cp, x), cp)
    pairs = [(got, own(cp, y), OUTPUT), (gx, own(cp, dx), OUTPUT)]
    pairs += [(summed(a), b, Kind(frozenset(), time=False)) for a, b in zip(gp, dp, strict=True) if b is not None]
    return worst(pairs)


def positions(*worlds):
    """Errors of RetNet's outputs and state, which count tokens: whole, packed, and after an earlier call."""
    torch.manual_seed(2)
    layer = mixers.RetNet(16).double()
    x, early = torch.randn(2, 12, 16, dtype=torch.float64), torch.randn(2, 5, 16, dtype=torch.float64)
    packed, bounds = x[:1], dsf.Packing([0, 2, 2, 9, 12])
    before = layer(early)[1]
    begun = layer(early.flatten(0, 1)[None], cu_seqlens=dsf.Packing([0, 3, 7, 8, 10]))[1]
    pairs = []
    for cp in worlds:
        for tokens, state, cuts in (
            (x, None, None),
            (x, before, None),
            (packed, None, bounds),
            (packed, begun, bounds),
        ):
            y, after = layer(tokens, state, cuts)
            got, found = layer(own(cp, tokens), state, cuts, parallel=cp)
            pairs += [(got, own(cp, y), OUTPUT), (found.recurrent, after.recurrent, None)]
            assert torch.equal(found.position, after.position)
    return worst(pairs)


def behind_nobody(cp):
    """RG-LRU, which asks where sequences begin, where all tokens are the second rank's and nobody said so."""
    torch.manual_seed(1)
    layer, x = mixers.RGLRU(16).double(), torch.randn(2, 7, 16, dtype=torch.float64)
    got = layer(x if cp.rank else x[:, :0], parallel=cp)[0]
    return float((got - layer(x)[0][:, : got.shape[1]]).abs().max()) if cp.rank else 0.0


def small_model():
    torch.manual_seed(4)
    config = ModelConfig(d_model=32, n_layers=3, vocab_size=17, mixers=["gated_deltanet", "softmax_attention", "rwkv6"])
    return CausalLM(config).double()


def model_error(cp, tokens=10):
    """The error of a model's logits, whole and after one token of an earlier call; its attention has positions."""
    model = small_model()
    ids = torch.randint(17, (2, tokens + 3))
    with torch.no_grad():
        state = model(ids[:, :3]).state
        expected = [model(ids[:, 3:]).logits, model(ids[:, 3:], state=state).logits]
        attach(model, cp)
        found = [model(own(cp, ids[:, 3:])).logits, model(own(cp, ids[:, 3:]), state=state).logits]
    return max(float((a - own(cp, b)).abs().max()) for a, b in zip(found, expected, strict=True))


def refused(call):
    """The error that a call raises, as text."""
    try:
        call()
    except dsf.InputError as error:
        return str(error)
    return None


def two():
    """Errors, logs, refusals and a compiled call of a world of two ranks."""
    found = {}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    cp = Sequence(mesh["cp"])
    torch.manual_seed(0)
    for name, recurrence in RECURRENCES.items():
        inputs = sample(recurrence, T=10)
        state = None
        if not recurrence.spec.is_softmax:
            state = recurrence(**sample(recurrence, T=3), return_state=True)[1]
        found[f"recurrence {name}"] = whole_and_own(recurrence, inputs, cp, state)
    for name in LAYERS:
        found[f"layer {name}"] = layer_error(name, cp)
    found["empty first"] = behind_nobody(cp)
    found["layer of one tap"] = layer_error("gated_deltanet", cp, d_conv=1)
    found["positions"] = positions(cp, Sequence(mesh["cp"], "headtail"), Sequence(mesh["cp"], sizes=(11, 1)))
    found["model"] = model_error(Sequence(mesh["cp"], sizes=(7, 3)))
    found["model headtail"] = model_error(Sequence(mesh["cp"], "headtail"), 12)
    inputs = sample(gated_delta, B=1, T=12)
    bounds = torch.tensor([0, 2, 9, 12])
    state = gated_delta(**sample(gated_delta, B=3, T=3), return_state=True)[1]
    found["packed"] = whole_and_own(gated_delta, inputs, cp, state, bounds)
    found["reverse"] = whole_and_own(gated_delta, inputs, Sequence(mesh, sizes=(9, 3)), state, bounds, reverse=True)
    found["reverse, as even as can be"] = whole_and_own(gated_delta, sample(gated_delta, T=11), cp, reverse=True)
    found["headtail"] = whole_and_own(gated_delta, sample(gated_delta, T=12), Sequence(mesh, "headtail"))
    found["headtail softmax"] = whole_and_own(softmax, sample(softmax, T=12), Sequence(mesh, "headtail"))
    logs = []
    for sizes in ((5, 5), (10, 0), (0, 10)):
        world = Sequence(mesh["cp"], sizes=sizes, exchange="gather")
        world.log = []
        found[f"shards {sizes}"] = whole_and_own(gated_delta, sample(gated_delta, T=10), world)
        logs.append(list(world.log))
    world = Sequence(mesh["cp"], exchange="gather")
    world.log = []
    found["zero loss"] = whole_and_own(gated_delta, sample(gated_delta, T=10), world, zero_loss=True)
    logs.append(list(world.log))
    found["checkpointed"] = checkpointed(cp)
    found["copies"] = copies(cp)
    x = torch.arange(7.0)[None, :, None]
    found["gather"] = float((cp.gather(cp.shard(x), tokens=7) - x).abs().max())
    whole = sample(gated_delta, B=1, T=12)
    checking = Sequence(mesh["cp"], check=True)
    short = {n: x[:, : 4 + cp.rank] for n, x in whole.items()}
    other = {n: x.float() if cp.rank else x for n, x in whole.items()}
    wide = {n: x[:, :, :1] if cp.rank else x for n, x in whole.items()}
    errors = [
        refused(lambda: gated_delta(**whole, cu_seqlens=bounds, parallel=cp)),
        refused(lambda: gated_delta(**{n: x[:, :5] for n, x in whole.items()}, parallel=Sequence(mesh, "headtail"))),
        refused(lambda: gated_delta(**other, parallel=checking)),
        refused(lambda: gated_delta(**wide, parallel=checking)),
        refused(lambda: softmax(**{n: short[n] for n in ("q", "k", "v")}, parallel=checking)),
        refused(lambda: attach(small_model(), cp)(torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 5).long())),
    ]
    found["resumed"] = resumed(mesh)
    found["placed"], refusals = placed(mesh)
    found["prepared"], rough, more = prepared(mesh)
    assert rough < 0.05
    return found, logs, errors, [*refusals, *more], in_a_graph()


def compiled(cp):
    """Errors of a compiled function with a checkpointed layer in it, and the collectives of its graphs.

    The layer has a convolution, asks where sequences begin, and runs a recurrence: each has its collectives.
    """
    torch.manual_seed(3)
    layer, x = attach(mixers.RGLRU(16).double(), cp), torch.randn(1, 24, 16, dtype=torch.float64)
    graphs = []

    def kept(graph, _):  # what a compiler is given of the forward and of the backward pass
        called = [n for n in graph.graph.nodes if n.op == "call_function" and "c10d" in str(n.target)]
        graphs.append([f"{n.target} {list(n.meta['val'].shape)}" for n in called if "wait" not in str(n.target)])
        return graph.forward

    def step(x):
        return checkpoint(lambda z: layer(z)[0].sin(), 2 * x, use_reentrant=False)

    def run(function):
        leaf = own(cp, x).clone().requires_grad_()
        y = function(leaf)
        return y, *torch.autograd.grad(y.sum(), [leaf, *layer.parameters()])

    backend = aot_autograd(fw_compiler=kept, bw_compiler=kept, partition_fn=min_cut_rematerialization_partition)
    found = run(torch.compile(step, fullgraph=True, backend=backend))
    return max(float((a - b).detach().abs().max()) for a, b in zip(found, run(step), strict=True)), graphs


def checkpointed(cp):
    """Activation checkpointing runs the collectives again, on every rank alike."""
    layer = attach(mixers.GatedDeltaNet(16).double(), cp)
    x = own(cp, torch.randn(1, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))

    def run(call):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(call(leaf).sin().sum(), leaf)[0]

    return float(
        (run(lambda u: checkpoint(lambda z: layer(z)[0], u, use_reentrant=False)) - run(lambda u: layer(u)[0]))
        .abs()
        .max()
    )


def copies(cp):
    """A copied model talks to the same ranks; a pickled one finds them by name."""
    layer = attach(mixers.GatedDeltaNet(16).double(), cp)
    x = own(cp, torch.randn(1, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    y = layer(x)[0]
    again = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    return max(float((m(x)[0] - y).detach().abs().max()) for m in again)


def four():
    """Exchanges on a mesh of two nodes with two ranks each."""
    found, logs = {}, {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    torch.manual_seed(0)
    cases = {"gated_delta": gated_delta, "stabilised": stabilised, "s6": mixers.s6, "channel_delta": channel_delta}
    chosen = [("gated_delta", x, y) for x in ("gather", "transpose", "relay", "two-level") for y in LAYOUTS]
    chosen += [("stabilised", "two-level", "contiguous"), ("stabilised", "transpose", "headtail")]
    chosen += [("s6", "gather", "headtail"), ("channel_delta", "relay", "contiguous")]
    for name, exchange, layout in chosen:
        inputs = sample(cases[name], T=16, H=3)
        cp = Sequence(mesh, layout, exchange=exchange)
        cp.log = []
        found[f"{name} {exchange} {layout}"] = whole_and_own(cases[name], inputs, cp)
        logs[f"{name} {exchange} {layout}"] = cp.log
    for name, exchange in (("gated_delta", "two-level"), ("gated_delta", "transpose"), ("channel_delta", "relay")):
        inputs, cp = sample(cases[name], T=14, H=3), Sequence(mesh, exchange=exchange)
        cp.log = []
        found[f"{name} {exchange} in reverse"] = whole_and_own(cases[name], inputs, cp, reverse=True)
        logs[f"{name} {exchange} in reverse"] = cp.log
    flat = Sequence(None, sizes=(1, 2, 0, 13))
    for name in ("gated_deltanet", "rg_lru", "rwkv7", "retnet", "softmax_attention"):
        torch.manual_seed(1)
        layer = mixers.get(name).module(d_model=32).double()
        x = torch.randn(1, 16, 32, dtype=torch.float64)
        found[f"layer {name}"] = float(
            (layer(own(flat, x), parallel=flat)[0] - own(flat, layer(x)[0])).detach().abs().sum()
        )
    return found, logs


def prepared(mesh):
    """A model over both ranks' tokens and parameters: errors of gradients, a decoding step, what is refused."""
    import torch.distributed.fsdp as fsdp
    from torch.distributed.tensor.parallel import parallelize_module

    ids, whole = torch.randint(17, (1, 12), generator=torch.Generator().manual_seed(0)), small_model()
    cp = Sequence(mesh["cp"])
    whole(ids).logits.sin().sum().backward()
    model = small_model()
    parallelize_module(model, mesh["cp"], {"": dsf.parallel.SequenceShard()})
    dsf.parallel.prepare(model, mesh=mesh["cp"])
    (model(cp.shard(ids)).logits.sin().sum() * cp.ranks).backward()
    expected = dict(whole.named_parameters())
    error = 0.0
    for name, p in model.named_parameters():
        g = expected[name.replace("rates.", "")].grad
        error = max(error, float((p.grad.full_tensor() - g).abs().max() / g.abs().max().clamp(min=1e-3)))
    layer = mixers.SSD(16, headdim=16)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    x, early = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(1)), layer(torch.ones(1, 3, 16))[1]
    y, after = copy.deepcopy(layer)(x, early)
    sharded = dsf.parallel.prepare(copy.deepcopy(layer), mesh=mesh["cp"], mp_policy=policy)
    found, state = sharded(x, early)
    again, _ = sharded.step(x[:, 0], early)
    rough = max(float((found - y).abs().max()), float((again - y[:, 0]).abs().max())) / float(y.abs().max())
    assert state.recurrent.dtype == torch.float32 and sharded.A_log.dtype == torch.float32
    cast = fsdp.fully_shard(copy.deepcopy(layer), mesh=mesh["cp"], mp_policy=policy)
    return (
        error,
        rough,
        [refused(lambda: dsf.parallel.prepare(cast)), refused(lambda: dsf.parallel.prepare(torch.nn.Linear(2, 2)))],
    )


def resumed(mesh):
    """A model's distributed checkpoint of two ranks, loaded on one: the largest difference."""
    import torch.distributed.checkpoint as dcp

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    model = dsf.parallel.prepare(small_model(), mesh=mesh["cp"])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    one, before = small_model(), small_model().state_dict()
    state = {"model": one.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    one.load_state_dict(state["model"])
    names = dict(one.named_parameters())
    return max(float((one.state_dict()[n] - before[n] - 0.5).abs().max()) for n in names)


def placed(mesh):
    """Calls on DTensors of heads, of the batch and of tokens: the error, and what is refused."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    inputs, ssd = sample(gated_delta, B=2, T=8), sample(mixers.ssd, B=2, T=8)
    cp = Sequence(mesh["cp"])

    def run(recurrence, given, places, **options):
        leaves = {n: distribute_tensor(x, mesh["cp"], [places[n]]).requires_grad_() for n, x in given.items()}
        y, last = recurrence(**leaves, return_state=True, **options)
        loss = y.full_tensor().sin().sum() + last.full_tensor().cos().sum()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        return [x.full_tensor() for x in (y, last, *grads)]

    most = 0.0
    for recurrence, given in ((gated_delta, inputs), (mixers.ssd, ssd)):
        leaves = {n: x.clone().requires_grad_() for n, x in given.items()}
        y, last = recurrence(**leaves, return_state=True)
        expected = [y, last, *torch.autograd.grad(y.sin().sum() + last.cos().sum(), list(leaves.values()))]
        for param, timed, how in ((Shard(0), 2, {}), (Replicate(), 0, {}), (Replicate(), 1, {"parallel": cp})):
            places = {i.name: Shard(timed) if i.kind.time else param for i in recurrence.spec.inputs}
            found = run(recurrence, given, places, **how)
            most = max(most, *(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)))
    tokens = {n: distribute_tensor(x, mesh["cp"], [Shard(1)]) for n, x in inputs.items()}
    heads = {n: distribute_tensor(x, mesh["cp"], [Shard(2)]) for n, x in inputs.items()}
    wide = {n: distribute_tensor(x, mesh["cp"], [Shard(3 if n == "q" else 2)]) for n, x in inputs.items()}
    calls = [tokens, {**heads, "q": tokens["q"]}, {**heads, "q": inputs["q"]}, wide]
    cache = {n: heads[n] for n in ("q", "k", "v")}
    of_cache = refused(lambda: softmax(**cache, return_state=True))
    return most, [*(refused(lambda given=given: gated_delta(**given)) for given in calls), of_cache]


def in_a_graph():
    """The error of a compiled call, and the collectives of its graphs, on two ranks."""
    return compiled(Sequence(exchange="gather"))
