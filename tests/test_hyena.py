"""The long convolution and Hyena's layer, against sums over lags, and what they refuse."""

import math
from itertools import pairwise

import pytest
import torch

import dsf
from dsf import FormError, InputError, mixers

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def by_lags(x, h, gate, D):
    """y_t = gate_t (Σ_s h_{t-s} x_s + D x_t), term by term."""
    rows = []
    for t in range(x.shape[1]):
        terms = [h[:, t - s] * x[:, s] for s in range(t + 1) if t - s < h.shape[1]]
        rows.append(gate[:, t] * (sum(terms) + D * x[:, t]))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("length", [1, 4, 11, 30])
@pytest.mark.parametrize("form", ["naive", "convolution"])
def test_it_is_the_sum_over_lags_with_all_gradients(length, form):
    x, gate = torch.randn(2, 2, 11, 3, 2)
    leaves = [y.requires_grad_() for y in (x, torch.randn(3, length, 2), gate, torch.randn(3, 2))]
    y, expected = dsf.long_convolution(*leaves, form=form), by_lags(*leaves)
    torch.testing.assert_close(y, expected, **CLOSE)
    dy = torch.randn_like(y)
    for a, b in zip(*(torch.autograd.grad(out, leaves, dy) for out in (y, expected)), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_packed_sequences_are_convolved_one_by_one():
    x, gate = torch.randn(2, 1, 20, 2, 3)
    h, D, bounds = torch.randn(2, 20, 3), torch.randn(2, 3), [0, 0, 7, 8, 20, 20]
    y = dsf.long_convolution(x, h, gate, D, cu_seqlens=torch.tensor(bounds))
    alone = [by_lags(x[:, a:b], h, gate[:, a:b], D) for a, b in pairwise(bounds) if b > a]
    torch.testing.assert_close(y, torch.cat(alone, 1), **CLOSE)


@pytest.mark.parametrize("form", ["recurrent", "scan", "chunk", "kernel"])
def test_there_is_no_state_of_fixed_size(form):
    x, h = torch.randn(1, 4, 1, 2), torch.randn(1, 4, 2)
    with pytest.raises(FormError, match=f"there is no {form} form: a filter .* has no state of fixed size"):
        dsf.long_convolution(x, h, form=form)
    with pytest.raises(FormError, match="a final state was asked for: a filter"):
        dsf.long_convolution(x, h, return_state=True)


def test_wrong_tensors_are_named():
    x, h = torch.randn(1, 4, 1, 2), torch.randn(1, 4, 2)
    for given, words in (
        ((x[0], h), r"`x` must be floating point \[B, T, H, P\]"),
        ((x, h[:, :, :1]), r"`h` has shape \[1, 4, 1\], expected \[H, L, P\] = \[1, L, 2\]"),
        ((x, h, x[:, :3]), r"`gate` is torch.float64 \[1, 3, 1, 2\], expected as `x`"),
        ((x, h, x, torch.randn(2)), r"`D` has shape \[2\], expected \[H, P\] = \[1, 2\]"),
    ):
        with pytest.raises(InputError, match=words):
            dsf.long_convolution(*given)
    with pytest.raises(InputError, match="expected B = 1, got B = 2"):
        dsf.long_convolution(torch.cat([x, x]), h, cu_seqlens=torch.tensor([0, 4]))


@pytest.mark.parametrize("order", [2, 3])
def test_hyena_layer(order):
    torch.manual_seed(0)
    m, x, T, C = mixers.Hyena(4, l_max=16, order=order, width=8).double(), torch.randn(9, 4), 9, 4
    taps, u = m.conv1d.weight[:, 0], x @ m.in_proj.weight.T + m.in_proj.bias
    past = torch.cat([torch.zeros(2, u.shape[1]), u])
    u = torch.stack([(past[t : t + 3].T * taps).sum(1) for t in range(T)]) + m.conv1d.bias
    *gates, v = u.split(C, -1)
    lag = torch.arange(16.0)
    features = torch.stack([lag / 15, torch.cos(2e-4 * math.pi * lag / 16), -torch.sin(2e-4 * math.pi * lag / 16)], 1)
    for layer in m.filter.inner:
        features = torch.sin(features @ layer.weight.T + layer.bias)
    filters = (features @ m.filter.outer.weight.T) * torch.exp(-lag[:, None] / 15 * m.filter.deltas)
    for place in range(order - 1):
        z, h = v * gates[order - 1 - place], filters[:, place * C : (place + 1) * C]
        v = by_lags(z[None, :, None], h[None], torch.ones(1, T, 1, C), m.D[place][None])[0, :, 0]
    expected = (v * gates[0]) @ m.out_proj.weight.T + m.out_proj.bias
    y, state = m(x[None])
    torch.testing.assert_close(y[0], expected, **CLOSE)
    assert state is None
    packed, _ = m(torch.cat([x[:6], x[:3]])[None], cu_seqlens=torch.tensor([0, 6, 9]))
    torch.testing.assert_close(packed[0], torch.cat([expected[:6], expected[:3]]), **CLOSE)


def test_hyena_runs_from_the_last_token_to_the_first():
    m, x = mixers.Hyena(4, l_max=16, width=8), torch.randn(1, 9, 4)
    torch.testing.assert_close(m(x, reverse=True)[0], m(x.flip(1))[0].flip(1), **CLOSE)
    y, _ = m(x, cu_seqlens=torch.tensor([0, 4, 4, 9]), reverse=True, attention_mask=None, use_cache=True)
    torch.testing.assert_close(y, torch.cat([m(part, reverse=True)[0] for part in (x[:, :4], x[:, 4:])], 1), **CLOSE)


def test_hyena_refuses_steps_states_and_longer_sequences():
    m = mixers.Hyena(4, l_max=8, width=8)
    with pytest.raises(InputError, match="Hyena: attention_mask has 1 padded tokens"):
        m(torch.randn(1, 3, 4), attention_mask=torch.tensor([[0, 1, 1]]))
    with pytest.raises(InputError, match="ranks cannot share a sequence"):
        m(torch.randn(1, 3, 4), parallel=dsf.parallel.Simulated(2))
    hybrid = torch.nn.ModuleList([m, mixers.S6(4)])
    with pytest.raises(InputError, match="Hyena: its filters reach over all tokens"):
        dsf.parallel.attach(hybrid, dsf.parallel.Simulated(2))
    assert dsf.parallel.attach(hybrid, None) is hybrid
    with pytest.raises(TypeError, match="nonsense"):
        m(torch.randn(1, 3, 4), nonsense=1)
    with pytest.raises(FormError, match="Hyena has no step: its filters have a number of their own for every lag"):
        m.step(torch.randn(1, 4), in_place=True)
    with pytest.raises(FormError, match="Hyena continues no state"):
        m(torch.randn(1, 3, 4), state=torch.zeros(1))
    with pytest.raises(InputError, match="9 tokens, but its filters are laid out on l_max = 8"):
        m(torch.randn(1, 9, 4))
    packed = torch.randn(1, 13, 4)
    assert m(packed, cu_seqlens=torch.tensor([0, 8, 13]))[0].shape == packed.shape
    for bounds in (torch.tensor([0, 4, 13]), dsf.Packing([0, 9, 13])):  # the ninth token did not see the first
        with pytest.raises(InputError, match="9 tokens, but its filters are laid out on l_max = 8"):
            m(packed, cu_seqlens=bounds)
    with pytest.raises(InputError, match="order is 1"):
        mixers.Hyena(4, order=1)


def test_hyena_is_drawn_again_and_keeps_its_rates_in_float32():
    torch.set_default_dtype(torch.float32)
    m = mixers.Hyena(4, l_max=8, width=8, dtype=torch.bfloat16)
    assert m.D.dtype == m.filter.deltas.dtype == torch.float32 and m.out_proj.weight.dtype == torch.bfloat16
    assert m(torch.randn(1, 5, 4, dtype=torch.bfloat16))[0].dtype == torch.bfloat16
    before = m.D.clone()
    m.reset_parameters()
    assert not torch.equal(m.D, before)


def test_hyena_is_found_by_name_and_has_no_recurrence():
    layer = mixers.layer_for("Hyena", 8, l_max=16)
    assert type(layer) is mixers.Hyena and type(mixers.layer_for("vision-mamba", 8)) is mixers.VisionMamba
    assert type(mixers.layer_for(mixers.Hyena, 8, l_max=16)) is mixers.Hyena
    sizes = {"vocab_size": 8, "d_model": 8, "n_layers": 1}
    assert dsf.models.ModelConfig(mixers=[mixers.Hyena], **sizes).mixers == ("hyena",)
    with pytest.raises(dsf.InputError, match=r"^hydra reads its sequences in both directions"):
        dsf.models.ModelConfig(mixers=[mixers.Hydra], **sizes)
    with pytest.raises(KeyError, match=r"'hyena' is a layer without .* own, dsf\.mixers\.Hyena"):
        mixers.get("hyena")
    assert not set(mixers.LAYERS) & {entry.name for entry in mixers.ZOO}


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
def test_a_quantised_layer_is_near_the_layer():
    """The filters asked the quantised map for its weight, which is a method there."""
    torch.manual_seed(0)
    layer, x = mixers.Hyena(16, l_max=32).float(), torch.randn(2, 9, 16, dtype=torch.float32)
    short = torch.ao.quantization.quantize_dynamic(layer, {torch.nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        expected, found = layer(x)[0], short(x)[0]
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()
