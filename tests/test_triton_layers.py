"""Layers with their fused parts, in Triton's interpreter: the layers in float64, and their laws."""

import pytest
import torch
from interpreted import interpreted

from dsf import mixers
from dsf.kernels import convolution, norm

pytestmark = interpreted

SIZES = {
    "deltanet": {"n_heads": 2, "n_key_heads": 1, "d_state": 4, "headdim": 8},
    "gated_deltanet": {"n_heads": 2, "d_state": 8, "headdim": 4, "allow_neg_eigval": True},
    "ssd": {"d_state": 4, "headdim": 4, "n_groups": 2},
    "s6": {"d_state": 2},
    "longhorn": {"d_state": 2},
    "kda": {"n_heads": 2},
}


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """What is not float64 takes the kernels, on a CPU too."""
    from dsf.kernels.triton.layer import table

    monkeypatch.setattr(convolution, "_chosen", lambda x, *rest: x.dtype != torch.float64)
    monkeypatch.setattr(norm, "_chosen", lambda x, *rest: x.dtype != torch.float64)
    monkeypatch.setattr(
        table, "convolution", lambda *key: table.Tile(16, 7 if key[-1] else 4, 4, 1)
    )  # runs of four tokens


def layers(name):
    torch.manual_seed(0)
    layer = mixers.get(name).module(8, **SIZES[name])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    exact = mixers.get(name).module(8, **SIZES[name]).double()
    exact.load_state_dict(layer.state_dict())
    return layer, exact


def outcome(layer, x, state=None, cu_seqlens=None):
    x = x.detach().requires_grad_()
    y, last = layer(x, state, cu_seqlens)
    parameters = dict(layer.named_parameters())
    loss = (y * torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype)).sum() + last.conv.square().sum()
    return {"y": y, "conv": last.conv} | dict(
        zip(["x", *parameters], torch.autograd.grad(loss, [x, *parameters.values()]), strict=True)
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_layers_and_their_gradients_are_those_in_float64(name, packed):
    layer, exact = layers(name)
    x = torch.randn(1 if packed else 2, 7, 8)
    cuts = torch.tensor([0, 2, 3, 7]) if packed else None
    found, wanted = outcome(layer, x, None, cuts), outcome(exact, x.double(), None, cuts)
    for part, b in wanted.items():
        a = found[part].double()
        assert (a - b).abs().max() <= 1e-4 * b.abs().max().clamp(min=1e-2), part


@pytest.mark.parametrize("name", ["deltanet", "ssd"])
def test_layers_cut_and_step_by_step_are_the_whole(name):
    layer, _ = layers(name)
    x = torch.randn(2, 6, 8)
    with torch.no_grad():
        whole, last = layer(x)
        first, state = layer(x[:, :4])
        second, state = layer(x[:, 4:5], state)
        third, state = layer.step(x[:, 5], state)
    torch.testing.assert_close(torch.cat([first, second, third[:, None]], 1), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.conv, last.conv)


def test_a_step_overwrites_the_window_on_request():
    layer, _ = layers("ssd")
    conv = layer.conv1d
    x, state = torch.randn(2, 1, conv.in_channels), torch.randn(2, conv.in_channels, 3)
    with torch.no_grad():
        wanted, new = conv(x, state)
        found, same = conv(x, state, in_place=True)
    assert same is state and torch.equal(same, new)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
