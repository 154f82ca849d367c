"""What the ranks of tests/test_parallel_heads.py do: layers whose heads are shared, against the whole layers."""

import copy
import tempfile
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from structures import gated_delta, product
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import dsf
from dsf import mixers
from dsf.language.errors import InputError
from dsf.mixers._own import fill
from dsf.models import CausalLM, ModelConfig, next_labels
from dsf.parallel import Checkpoint, HeadShard, Sequence, attach, plan_of
from dsf.parallel.heads import canonical

D = 32
M = mixers
# Every layer of the zoo and what its options change; sizes that 4 ranks can share.
LAYERS = {
    **{e.name: e.module for e in mixers.ZOO if e.module is not None},
    "deltanet, shared keys": partial(M.DeltaNet, n_heads=8, n_key_heads=4, allow_neg_eigval=True),
    "gated_deltanet, bare": partial(M.GatedDeltaNet, bare=True),
    "ssd": partial(M.SSD, headdim=8, d_state=16),
    "ssd, groups": partial(M.SSD, headdim=8, d_state=16, n_groups=4),
    "ssd, bare": partial(M.SSD, headdim=8, d_state=16, bare=True),
    "mamba3": partial(M.Mamba3, headdim=8, d_state=16, rope_fraction=1.0),
    "mamba3, groups": partial(M.Mamba3, headdim=8, d_state=16, n_groups=4, is_outproj_norm=True),
    "mamba3_mimo": partial(M.Mamba3, headdim=8, d_state=16, is_mimo=True, mimo_rank=3),
    "mamba3_mimo, groups": partial(M.Mamba3, headdim=8, d_state=16, n_groups=4, is_mimo=True, mimo_rank=2),
    "s6, bare": partial(M.S6, bare=True),
    "gla, convolved": partial(M.GLA, d_conv=4, bias=True),
    "hgrn, convolved": partial(M.HGRN, d_conv=4, bias=True),
    "fox, grouped": partial(M.ForgettingAttention, n_heads=8, n_kv_heads=4),
    "fox, plain": partial(M.ForgettingAttention, pro=False),
    "softmax_attention, grouped": partial(M.SoftmaxAttention, n_heads=8, n_kv_heads=4),
    "rwkv6, bare": partial(M.RWKV6, bare=True),
    "mlstm, bare": partial(M.MLSTM, bare=True),
    "s5, bare": partial(M.S5, d_state=16, blocks=2, bare=True),
    "h3": partial(M.H3, d_conv=4),
    "hyena": partial(M.Hyena, l_max=16, order=3),
    "hydra": partial(M.Hydra, headdim=8, d_state=16, bias=True),
    "hydra, groups": partial(M.Hydra, headdim=8, d_state=16, n_groups=4),
    "vision_lstm": M.VisionLSTM,
    "vision_mamba": M.VisionMamba,
    "bidirectional": lambda d: M.Bidirectional(M.GLA(d), M.S6(d)),
    "layer of three steps": partial(M.Layer, product),
    "layer of shared keys": partial(M.Layer, gated_delta, n_heads=8, n_key_heads=4),
    "layer of kda": partial(M.Layer, M.kda),
    "layer of s6": partial(M.Layer, M.s6),
}  # fmt: skip

# One of each way in which ranks tell each other of what they share.
ON_FOUR = [
    "gated_deltanet", "s6", "hgrn2", "mlstm", "qlstm", "lru", "s4d", "ssd", "mamba3", "hydra", "hyena",
    "generalized_linear_attention", "fox, grouped", "rwkv7", "layer of three steps",
]  # fmt: skip


def inputs_of(layer):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 9, D, dtype=torch.float64, generator=generator)


def stirred(layer):
    """No parameter at a start that hides what it does, as zeros."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn(p.shape, dtype=p.dtype, generator=generator))
    return layer


def whole_of(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def in_order(layer, name, tensor):
    """A gradient as the unsharded layer has it."""
    for path, module in layer.named_modules():
        prefix = f"{path}." if path else ""
        if hasattr(module, "_local") and name.startswith(prefix):
            tensor = canonical(module, name.removeprefix(prefix), tensor)
    return whole_of(tensor)


def gap(a, b):
    a, b = whole_of(a.detach()), whole_of(b.detach())
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))


def layer_error(name, mesh):
    """Outputs, gradients and one step of AdamW, packed and decoding where the layer can; a state dict on one rank."""
    torch.manual_seed(3)
    whole = stirred(LAYERS[name](D).double())
    shared = share(copy.deepcopy(whole), mesh)
    x, found = inputs_of(whole), {}

    def run(layer):
        leaf = x.clone().requires_grad_()
        y, _ = layer(leaf)
        y.sin().sum().backward()
        return y, leaf.grad

    (y, dx), (got, gx) = run(whole), run(shared)
    found["y"], found["dx"] = gap(got, y), gap(gx, dx)
    grads = dict(whole.named_parameters())
    for path, p in shared.named_parameters():
        own = grads[path].grad
        assert (own is None) == (p.grad is None), path
        if own is not None:
            found[f"d {path}"] = gap(in_order(shared, path, p.grad), own)
    for layer in (whole, shared):
        stepped(layer)
    saved = {key: whole_of(value).clone() for key, value in shared.state_dict().items()}
    expected = whole.state_dict()
    assert list(saved) == list(expected)
    for key, value in expected.items():
        found[f"saved {key}"] = gap(saved[key], value)
    with torch.no_grad():
        for p in shared.parameters():
            p.zero_()
    shared.load_state_dict(saved)
    found["loaded"] = gap(shared(x)[0], whole(x)[0])
    if isinstance(whole, mixers.Mixer):
        state, parted = whole(x[:, :4])[1], shared(x[:, :4])[1]
        found["step"] = gap(shared.step(x[:, 4], parted)[0], whole.step(x[:, 4], state)[0])
        cuts = torch.tensor([0, 3, 9])
        found["packed"] = gap(shared(x[:1], cu_seqlens=cuts)[0], whole(x[:1], cu_seqlens=cuts)[0])
    return {what: error for what, error in found.items() if not error < 1e-9}


def stepped(layer):
    """One step of AdamW: of DTensors on what they hold here, which is what it comes to."""
    params = [p for p in layer.parameters() if p.grad is not None]
    assert all(p.grad.placements == p.placements for p in params if isinstance(p, DTensor))
    local = [nn.Parameter(p.to_local() if isinstance(p, DTensor) else p) for p in params]
    for own, p in zip(local, params, strict=True):
        own.grad = p.grad.to_local() if isinstance(p, DTensor) else p.grad
    torch.optim.AdamW(local, lr=1e-2).step()


def refusals(mesh):
    """What is refused, in words, of layers that two ranks cannot share."""
    calls = [
        lambda: share(M.GatedDeltaNet(33, n_heads=3), mesh),
        lambda: share(M.SoftmaxAttention(32, n_heads=4, n_kv_heads=1), mesh),
        lambda: share(M.SSD(48, headdim=8, n_groups=3), mesh),
        lambda: share(M.S6(5, expand=1, d_state=4), mesh),
        lambda: share(M.MLSTM(8, n_heads=2, expand=1.5, qkv_block=4), mesh),
        lambda: share(nn.Linear(2, 2), mesh),
        lambda: share(nn.Sequential(M.GLA(32), M.SSD(24, headdim=16)), mesh),
        lambda: share(share(M.GLA(32), mesh), mesh),
        lambda: share(Own(32), mesh),
        lambda: share(M.GLA(32), DeviceMesh("cpu", [1, 0])),
    ]
    found = []
    for call in calls:
        try:
            found.append(call())
        except InputError as error:
            found.append(str(error))
    return found


class Own(mixers.Mixer):
    """A user's layer that says nothing of ranks."""

    recurrence = mixers.gla


def share(module, mesh):
    return parallelize_module(module, mesh, {"": HeadShard()})


def started(mesh):
    """The difference of what layers made without memory begin as from what whole ones do, by the same draws."""
    worst = 0.0
    for make in (partial(M.MLSTM, D), partial(M.Layer, M.kda, D), partial(M.GatedDeltaNet, D), partial(M.KDA, D)):
        whole = make()
        with torch.device("meta"):
            empty = make()
        shared = share(empty, mesh).to_empty(device="cpu")
        for module in shared.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for layer in (whole, shared):
            for module in layer.modules():
                for name, start in getattr(module, "starts", {}).items():
                    torch.manual_seed(5)
                    fill(getattr(module, name), start)
        saved = shared.state_dict()
        assert all(torch.isfinite(whole_of(value)).all() for value in saved.values())
        for path, module in whole.named_modules():
            for name in getattr(module, "starts", {}):
                key = f"{path}.{name}" if path else name
                worst = max(worst, gap(saved[key], whole.state_dict()[key]))
    return worst


def over_tokens_and_heads(mesh):
    """Four ranks, two of tokens and two of heads: a layer's output and gradients."""
    torch.manual_seed(3)
    whole = stirred(M.GatedDeltaNet(D).double())
    shared = share(copy.deepcopy(whole), mesh["tp"])
    cp, x = Sequence(mesh["cp"]), inputs_of(whole)
    y, _ = whole(x)
    y.sin().sum().backward()
    own, _ = shared(cp.shard(x), parallel=cp)
    own.sin().sum().backward()
    worst = gap(own, cp.shard(y))
    for path, p in shared.named_parameters():
        grad = in_order(shared, path, p.grad)
        dist.all_reduce(grad, group=mesh["cp"].get_group())
        worst = max(worst, gap(grad, dict(whole.named_parameters())[path].grad))
    return worst


ONE_PATTERN, OTHER_PATTERN = ("gated_deltanet", "ssd", "softmax_attention"), ("mamba3", "lru", "s4d")
SIZES = {"ssd": {"headdim": 16, "d_state": 16}, "mamba3": {"headdim": 16, "d_state": 16}, "s4d": {"d_state": 8}}


def small_model(pattern):
    torch.manual_seed(4)
    options = {name: SIZES[name] for name in pattern if name in SIZES}
    config = ModelConfig(
        d_model=32, n_layers=3, vocab_size=20, mixers=list(pattern), n_heads=4, mixer_options=options,
        tie_embeddings=True,
    )  # fmt: skip
    return CausalLM(config).double()


def spread(model, dp, cp, tp):
    """A model over dp x cp x tp ranks, its sequence, and what its loss is to be multiplied with."""
    mesh = init_device_mesh("cpu", (dp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))
    parallelize_module(model, mesh["tp"], plan_of(model))
    world = Sequence(mesh["cp"])
    attach(model, world)
    return dsf.parallel.prepare(model, mesh=mesh["dp", "cp"]._flatten("fsdp")), world, mesh


def trained(model, optimizer, steps, first=0, world=None, mesh=None):
    """Losses of some steps on drawn tokens: of the whole batch, or of this rank's part of it."""
    found = []
    for step in range(first, first + steps):
        ids = torch.randint(20, (4, 12), generator=torch.Generator().manual_seed(step))
        targets, scale, count = next_labels(ids), 1, 4 * 11
        if world is not None:
            rows = ids.chunk(mesh["dp"].size()), targets.chunk(mesh["dp"].size())
            ids, targets = world.shard(*(part[mesh["dp"].get_local_rank()] for part in rows))
            scale = mesh["dp"].size() * world.ranks
        logits = model(ids, return_state=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") * scale / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if world is not None:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        found.append(float(total))
    return found


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)  # one operation of DTensors


def resumed(dp, cp, tp, pattern):
    """Losses of a whole model; of one that ranks share, saved and gone on with by one, and the other way round."""
    whole = small_model(pattern)
    expected = trained(whole, adam(whole), 6)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    shared, world, mesh = spread(small_model(pattern), dp, cp, tp)
    optimizer = adam(shared)
    found = trained(shared, optimizer, 3, 0, world, mesh)
    dcp.save({"training": Checkpoint(shared, optimizer)}, checkpoint_id=f"{folder[0]}/of ranks")
    alone = small_model(pattern)
    reset(alone)
    optimizer = adam(alone)
    dcp.load({"training": Checkpoint(alone, optimizer)}, checkpoint_id=f"{folder[0]}/of ranks")
    down = found + trained(alone, optimizer, 3, 3)
    dcp.save({"training": Checkpoint(alone, optimizer)}, checkpoint_id=f"{folder[0]}/of one")
    again, world, mesh = spread(reset(small_model(pattern)), dp, cp, tp)
    optimizer = adam(again)
    dcp.load({"training": Checkpoint(again, optimizer)}, checkpoint_id=f"{folder[0]}/of one")
    up = trained(again, optimizer, 2, 6, world, mesh)
    return max(abs(a - b) for a, b in zip(down, expected, strict=True)), max(
        abs(a - b) for a, b in zip(up, trained(alone, optimizer_of(alone, folder), 2, 6), strict=True)
    )


def optimizer_of(model, folder):
    optimizer = adam(model)
    dcp.load({"training": Checkpoint(model, optimizer)}, checkpoint_id=f"{folder[0]}/of one")
    return optimizer


def reset(model):
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return model


def compiled(mesh):
    """Errors of a compiled function around two layers whose heads are shared, one checkpointed: all is one graph."""
    first, second = share(M.GatedDeltaNet(D).double(), mesh), share(M.S6(D).double(), mesh)
    x, params = inputs_of(None), [*first.parameters(), *second.parameters()]

    def run(f):
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        grads = torch.autograd.grad(y.sin().sum(), [leaf, *params])
        return [y, *(g.to_local() if isinstance(g, DTensor) else g for g in grads)]

    def f(x):
        return checkpoint(lambda z: second(z)[0], first(2 * x)[0] * 3, use_reentrant=False)

    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        found = run(torch.compile(f, fullgraph=True, backend="aot_eager"))
    return max(gap(a, b) for a, b in zip(found, run(f), strict=True))


def unplanned():
    """What plan_of refuses."""
    try:
        return str(plan_of(nn.Sequential(nn.Embedding(3, 4), nn.Conv1d(4, 4, 1))))
    except InputError as error:
        return str(error)


def two():
    """Errors of every layer on two ranks, what is refused, and a model that goes on with another number of ranks."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    errors = {name: layer_error(name, mesh) for name in LAYERS}
    return errors, [*refusals(mesh), unplanned()], max(started(mesh), compiled(mesh)), resumed(1, 1, 2, ONE_PATTERN)


def four():
    """Errors of layers with each kind of collective, on four ranks; of a layer and a model on two by two."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    return (
        {name: layer_error(name, mesh) for name in ON_FOUR},
        over_tokens_and_heads(both),
        resumed(1, 2, 2, OTHER_PATTERN),
    )
