"""Layers on a GPU, whose last norm and output projection share a launch, against float64 on a CPU."""

import pytest
import torch
from kept_bytes import kept_bytes

from dsf import mixers

pytestmark = pytest.mark.gpu
NAMES = ("deltanet", "gated_deltanet", "gla", "kda", "retnet", "ssd", "hgrn", "hgrn2")
MORE = ("rg_lru", "rwkv4", "rwkv6", "rwkv7", "mlstm")  # which have other parts around their recurrences


def outcome(layer, x, dy):
    """y, and the gradients of x and of every parameter, by name."""
    y = layer(x)[0]
    names, leaves = zip(*layer.named_parameters(), strict=True)
    found = torch.autograd.grad(y, [x, *leaves], dy.to(y.dtype), allow_unused=True)
    return {"y": y} | {n: g for n, g in zip(("x", *names), found, strict=True) if g is not None}


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
    x, dy = torch.randn(2, 2, tokens, 64, dtype=torch.float64)
    exact = outcome(layer, x.requires_grad_(), dy)
    layer, calls = layer.float().cuda(), []
    for _ in range(3):
        calls.append(outcome(layer, x.detach().float().cuda().requires_grad_(), dy.float().cuda()))
        assert calls[-1].keys() == exact.keys()
        for n, b in exact.items():
            error = (calls[-1][n].double().cpu() - b).norm() / b.norm().clamp(min=1e-6)
            assert error < 1e-4, (n, error)
    assert all(torch.equal(a, calls[2][n]) for n, a in calls[1].items())


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
