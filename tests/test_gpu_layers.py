"""Layers on a GPU, whose last norm and output projection share a launch, against float64 on a CPU."""

import pytest
import torch
from kept_bytes import kept_bytes

from dsf import mixers
from dsf.kernels.reversal import joined, reversed_tokens

pytestmark = pytest.mark.gpu
NAMES = ("deltanet", "gated_deltanet", "gla", "kda", "retnet", "ssd", "hgrn", "hgrn2")
MORE = ("rg_lru", "rwkv4", "rwkv6", "rwkv7", "mlstm")  # which have other parts around their recurrences


def outcome(layer, x, dy):
    """y, and the gradients of x and of every parameter, by name."""
    y = layer(x)[0]
    names, leaves = zip(*layer.named_parameters(), strict=True)
    found = torch.autograd.grad(y, [x, *leaves], dy.to(y.dtype), allow_unused=True)
    return {"y": y} | {n: g for n, g in zip(("x", *names), found, strict=True) if g is not None}


def three_calls(layer, tokens):
    """Each call in float32 is the definition, by blocks of 64 tokens; the last two are so bit for bit."""
    x, dy = torch.randn(2, 2, tokens, 64, dtype=torch.float64)
    exact = outcome(layer, x.requires_grad_(), dy)
    layer, calls = layer.float().cuda(), []
    for _ in range(3):
        calls.append(outcome(layer, x.detach().float().cuda().requires_grad_(), dy.float().cuda()))
        assert calls[-1].keys() == exact.keys()
        for n, b in exact.items():
            size, axis = (64, 1) if n in ("x", "y") else (b.shape[0], 0)
            apart = (calls[-1][n].double().cpu() - b).split(size, axis)
            usual = [part.norm() for part in b.split(size, axis)]
            error = torch.stack([part.norm() for part in apart]).max() / torch.stack(usual).median().clamp(min=1e-6)
            assert error < 1e-4, (n, error)
    assert all(torch.equal(a, calls[2][n]) for n, a in calls[1].items())


@pytest.mark.parametrize("tokens", [37, 130])
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_s_gradients_are_the_definition_s(name, tokens):
    torch.manual_seed(0)
    layer = mixers.get(name).module(64).double()
    x, dy = torch.randn(2, 2, tokens, 64, dtype=torch.float64)
    exact = outcome(layer, x.requires_grad_(), dy)
    layer = layer.float().cuda()
    kept = outcome(layer, x.detach().float().cuda().requires_grad_(), dy.float().cuda())
    own = getattr(layer, "o_proj", None) or layer.out_proj
    own.register_forward_hook(lambda *_: None)  # so that the norm's result is made for it, and kept
    plain = outcome(layer, x.detach().float().cuda().requires_grad_(), dy.float().cuda())
    for found in (kept, plain):
        assert found.keys() == exact.keys()
        for n, b in exact.items():
            error = (found[n].double().cpu() - b).norm() / b.norm().clamp(min=1e-6)
            assert error < 1e-4, (n, error)


@pytest.mark.parametrize("tokens", [2, 37, 130])
@pytest.mark.parametrize("name", MORE)
def test_a_layer_of_other_parts(name, tokens):
    """Three calls, from weights that are not the initial ones, of which many are zero."""
    torch.manual_seed(0)
    layer = mixers.get(name).module(64).double()
    with torch.no_grad():
        for w in layer.parameters():
            w.add_(0.1 * torch.randn_like(w))
    three_calls(layer, tokens)


BOTH = {"Hydra": {"d_state": 16, "headdim": 32}, "VisionMamba": {}, "VisionLSTM": {}}


@pytest.mark.parametrize("tokens", [1, 37, 4100])
@pytest.mark.parametrize("name", BOTH)
def test_layers_of_both_directions(name, tokens):
    """Of 4,100 tokens kernels make the reversed copies, too."""
    torch.manual_seed(0)
    layer = getattr(mixers, name)(64, **BOTH[name]).double()
    three_calls(layer, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 37, 3, 24), (1, 1, 1, 5), (3, 1030, 4, 128), (2, 130, 100)], ids=str)
def test_reversed_tokens_and_sums_of_both_directions(shape, dtype):
    """The copy bit for bit; the sum and its gradients against float64."""
    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=torch.float64).to(dtype) for _ in range(3)]
    given.append(torch.randn(shape[:3], dtype=torch.float64).to(dtype))
    leaves = [t.cuda().requires_grad_() for t in (given if len(shape) == 4 else given[:2])]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    slope = torch.randn(shape, dtype=dtype, device="cuda")
    copy = reversed_tokens(leaves[0], "triton")
    assert torch.equal(copy, leaves[0].flip(1))
    assert torch.equal(torch.autograd.grad(copy, leaves[0], slope)[0], slope.flip(1))
    for late in (0, 1):
        exact = joined(*wide, late=late, backend="torch")
        wanted = [exact, *torch.autograd.grad(exact, wide, slope.double(), allow_unused=True)]
        for _ in range(3):
            y = joined(*leaves, late=late, backend="triton")
            found = [y, *torch.autograd.grad(y, leaves, slope)]
        for a, b in zip(found, wanted, strict=True):
            least = 1e-5 if dtype is torch.float32 else 2.0**-8
            assert b is None or (a - b).abs().max() <= least * max(b.abs().max(), 1)


@pytest.mark.parametrize("name", [*(e.name for e in mixers.ZOO), "Hyena", *BOTH])
def test_a_layer_is_one_graph(name):
    """Whatever release of torch is beside the GPU: each leaves other functions out of its graphs. Of two lengths a
    graph each; the second graph holds for others, too, where it can."""
    torch.compiler.reset()
    torch.manual_seed(0)
    made = getattr(mixers, name) if name[0].isupper() else mixers.get(name).module
    layer = made(64, **BOTH.get(name, {})).cuda()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (70, 200, 333):
        x, dy = torch.randn(2, 2, tokens, 64, device="cuda")
        whole = outcome(compiled, x.requires_grad_(), dy)
        plain = outcome(layer, x, dy)
        for (n, a), (m, b) in zip(whole.items(), plain.items(), strict=True):
            assert n.removeprefix("_orig_mod.") == m and (a - b).norm() <= 1e-4 * b.norm().clamp(min=1e-6), n


@pytest.mark.parametrize("name", ["rg_lru", "retnet", "rwkv6", "gated_deltanet"])
def test_packed_sequences_in_a_compiled_layer(name):
    """By Inductor, which took no part of boundaries that the graph computes; of other boundaries, the same graph."""
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = mixers.get(name).module(64).cuda()
    x, dy = torch.randn(2, 1, 200, 64, device="cuda")
    whole = torch.compile(lambda x, bounds: layer(x, None, bounds, use_cache=False), fullgraph=True)
    for bounds in ([0, 3, 3, 130, 200], [0, 64, 127, 199, 200]):
        packed = torch.tensor(bounds, device="cuda", dtype=torch.int32)
        leaf = x.clone().requires_grad_()
        pairs = [torch.autograd.grad(f(leaf, packed)[0], [leaf, *layer.parameters()], dy)
                 for f in (whole, lambda x, b: layer(x, None, b, use_cache=False))]  # fmt: skip
        for a, b in zip(*pairs, strict=True):
            assert (a - b).norm() <= 1e-4 * b.norm().clamp(min=1e-6)


@pytest.mark.parametrize("width", [64, 6], ids=["blocks within heads", "blocks across heads"])
def test_mlstm_s_maps_are_the_definition_s(width):
    torch.manual_seed(0)
    layer = mixers.MLSTM(width, n_heads=4).double()
    with torch.no_grad():
        layer.gates.weight.normal_(std=0.1)
    x, dy = torch.randn(2, 2, 37, width, dtype=torch.float64)
    exact = outcome(layer, x.requires_grad_(), dy)
    found = outcome(layer.float().cuda(), x.detach().float().cuda().requires_grad_(), dy.float().cuda())
    assert found.keys() == exact.keys()
    for n, b in exact.items():
        assert (found[n].double().cpu() - b).norm() <= 1e-4 * b.norm().clamp(min=1e-6), n


def test_training_keeps_less_where_the_projection_is_plain():
    layer = mixers.DeltaNet(128).cuda()
    x = torch.randn(2, 256, 128, device="cuda")

    short = kept_bytes(lambda: layer(x))
    layer.o_proj.register_forward_hook(lambda *_: None)
    assert kept_bytes(lambda: layer(x)) - short == 4 * x.numel()
