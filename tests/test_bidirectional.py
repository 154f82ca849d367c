"""Layers of both directions against direct formulas; packed sequences; ranks; what they refuse."""

import pytest
import torch
import torch.nn.functional as F

import dsf
from dsf import mixers
from dsf.parallel import Simulated, attach

BOUNDS = [0, 5, 5, 6, 14]


def made(name):
    torch.manual_seed(3)
    layers = {
        "VisionMamba": lambda: mixers.VisionMamba(16, d_state=4),
        "Hydra": lambda: mixers.Hydra(16, d_state=4, headdim=8, n_groups=2),
        "VisionLSTM": lambda: mixers.VisionLSTM(16, n_heads=2),
        "Bidirectional": lambda: mixers.Bidirectional(mixers.RWKV6(16), mixers.RetNet(16)),
    }
    return layers[name]().double()


@pytest.mark.parametrize("name", ["VisionMamba", "Hydra", "VisionLSTM", "Bidirectional"])
def test_packed_sequences_are_separate_and_every_token_sees_every_other(name):
    layer = made(name)
    x = torch.randn(1, 14, 16, dtype=torch.float64, requires_grad=True)
    together, state = layer(x, cu_seqlens=torch.tensor(BOUNDS))
    assert state is None
    alone = torch.cat([layer(x[:, a:b])[0] for a, b in ((0, 5), (5, 6), (6, 14))], dim=1)
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(layer(x, cu_seqlens=dsf.Packing(BOUNDS))[0], alone, rtol=1e-9, atol=1e-10)
    wrt = [x, *layer.parameters()]
    grads = [torch.autograd.grad(y.sin().sum(), wrt) for y in (together, alone)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
    seen = torch.autograd.functional.jacobian(lambda u: layer(u)[0].sum(-1)[0], x[:, :5].detach()).abs().sum(-1)
    assert (seen[:, 0] > 0).all(), "from every token to every other"


def test_vision_mamba_is_algorithm_1():
    """Both directions between one in_proj, one gate and one out_proj."""
    layer = made("VisionMamba")
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    u, z = F.linear(x, layer.ahead.in_proj.weight).chunk(2, dim=-1)
    total = 0
    for way, turn in ((layer.ahead, False), (layer.back, True)):
        v = u.flip(1) if turn else u
        v = F.silu(F.conv1d(F.pad(v.transpose(1, 2), (3, 0)), way.conv1d.weight, way.conv1d.bias, groups=32)).mT
        dt, b, c = (v @ way.x_proj.weight.T).split([1, 4, 4], dim=-1)
        delta = F.softplus(F.linear(dt, way.dt_proj.weight, way.dt_proj.bias))
        h, ys = torch.zeros(2, 32, 4, dtype=torch.float64), []
        for t in range(9):
            h = torch.exp(-way.A_log.exp() * delta[:, t, :, None]) * h + (delta * v)[:, t, :, None] * b[:, t, None]
            ys.append((h * c[:, t, None]).sum(-1) + way.D * v[:, t])
        y = torch.stack(ys, 1)
        total = total + (y.flip(1) if turn else y)
    torch.testing.assert_close(layer(x)[0], (total * F.silu(z)) @ layer.ahead.out_proj.weight.T)
    assert not hasattr(layer.back, "in_proj") and not hasattr(layer.back, "out_proj")


def test_hydra_is_a_quasiseparable_matrix():
    """Its matrix written out: below the diagonal one direction, above it the other, on it what data says."""
    layer = made("Hydra")
    T, H, P, N = 9, 4, 8, 4
    x = torch.randn(1, T, 16, dtype=torch.float64)
    z, u, dt = layer.in_proj(x).split([32, 32 + 4 * 2 * N, 2 * H], dim=-1)
    u = F.silu(F.conv1d(u.mT, layer.conv1d.weight, layer.conv1d.bias, padding=3, groups=u.shape[-1]).mT)[0]
    v, b, c, b2, c2 = u.split([32, 8, 8, 8, 8], dim=-1)
    delta = F.softplus(dt[0].unflatten(-1, (2, H)) + layer.dt_bias)
    M = torch.zeros(H, T, T, dtype=torch.float64)
    for h in range(H):
        part = slice(0, N) if h < 2 else slice(N, 2 * N)
        decay = torch.exp(-layer.A_log[h].exp() * delta[..., h])
        for i in range(T):
            for j in range(i):  # the output of token i - 1
                M[h, i, j] = c[i - 1, part] @ b[j, part] * delta[j, 0, h] * decay[j + 1 : i, 0].prod()
            for j in range(i + 1, T):
                M[h, i, j] = c2[i + 1, part] @ b2[j, part] * delta[j, 1, h] * decay[i + 1 : j, 1].prod()
            M[h, i, i] = layer.fc_D.weight[h] @ v[i] + layer.D[h]
    y = torch.einsum("hij,jhp->ihp", M, v.unflatten(-1, (H, P))).flatten(1)
    y = F.rms_norm(y, (32,), layer.norm.weight, 1e-5) * F.silu(z[0])
    torch.testing.assert_close(layer(x)[0][0], layer.out_proj(y))


@pytest.mark.parametrize("bounds", [None, torch.tensor([0, 1, 7])], ids=["whole", "packed"])
def test_who_looks_at_hydras_convolution_sees_it(bounds):
    layer, seen = made("Hydra"), []
    layer.conv1d.register_forward_hook(lambda module, given, y: seen.append((given[0].shape, y.shape)))
    layer(torch.randn(1, 7, 16, dtype=torch.float64), cu_seqlens=bounds)
    assert seen == [((1, 7, 64), (1, 7, 64))]


def test_two_layers_are_moved_and_cast_as_one():
    layer = mixers.Bidirectional(mixers.GLA(16), mixers.S6(16), dtype=torch.bfloat16)
    assert next(layer.ahead.parameters()).dtype is torch.bfloat16 and layer.back.A_log.dtype is torch.float32
    assert all(p.is_meta for p in mixers.Bidirectional(mixers.GLA(16), mixers.GLA(16), device="meta").parameters())


def test_vision_lstm_is_two_blocks_in_turn():
    layer = made("VisionLSTM")
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    middle = x + layer.ahead(F.layer_norm(x, (16,), layer.ahead_norm.weight))[0]
    last = middle + layer.back(F.layer_norm(middle, (16,), layer.back_norm.weight).flip(1))[0].flip(1)
    torch.testing.assert_close(layer(x)[0], last)


def test_norms_of_vision_lstm_add_up_gradients_in_float32():
    norm = mixers.VisionLSTM(16, n_heads=2).bfloat16().ahead_norm
    x, dy = torch.randn(4000, 16).bfloat16(), (torch.randn(4000, 16) + 1).bfloat16()
    norm(x).backward(dy)
    expected = (F.layer_norm(x.double(), (16,)) * dy.double()).sum(0)
    assert (norm.weight.grad - expected).norm() < 4e-3 * expected.norm()


def test_packed_convolutions_of_hydra_round_once_like_single_ones():
    layer, x = mixers.Hydra(16, d_state=4, headdim=8).bfloat16(), torch.randn(1, 40, 16).bfloat16()
    torch.testing.assert_close(layer.ways(x, torch.tensor([0, 40])), layer.ways(x), rtol=2**-7, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # one type of all inputs
        assert layer.float()(x.float(), cu_seqlens=torch.tensor([0, 40]))[0].dtype is torch.bfloat16


def test_one_layer_twice_shares_everything():
    gla = mixers.GLA(16).double()
    layer, x = mixers.Bidirectional(gla, gla), torch.randn(1, 7, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0].flip(1), layer(x.flip(1))[0])
    assert len(list(layer.parameters())) == len(list(gla.parameters()))


@pytest.mark.parametrize("name", ["VisionMamba", "VisionLSTM", "Bidirectional"])
def test_over_ranks(name):
    layer, x = made(name), torch.randn(1, 14, 16, dtype=torch.float64)
    expected = layer(x, cu_seqlens=torch.tensor(BOUNDS))[0]
    for world in (Simulated(3), Simulated(3, sizes=(1, 0, 13))):
        found = layer(x, cu_seqlens=torch.tensor(BOUNDS), parallel=world)[0]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    attach(layer, Simulated(2))
    assert name != "VisionMamba" or layer.parallel is not None, "what runs between the projections is told, too"
    torch.testing.assert_close(layer(x, cu_seqlens=torch.tensor(BOUNDS))[0], expected, rtol=1e-9, atol=1e-10)


def test_what_they_refuse():
    layer = made("Hydra")
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    with pytest.raises(dsf.InputError, match=r"Hydra: .* so there is no step"):
        layer.step(x[:, 0], in_place=True)
    with pytest.raises(dsf.InputError, match=r"VisionMamba: .* none goes on from a state"):
        made("VisionMamba")(x, state=object())
    for name in ("Hydra", "VisionLSTM"):
        with pytest.raises(dsf.InputError, match=f"{name}: .* reverse=True would only exchange"):
            made(name)(x, reverse=True)
        with pytest.raises(dsf.InputError, match=f"{name}: attention_mask has 1 padded tokens"):
            made(name)(x, attention_mask=torch.tensor([[0, 1, 1, 1]]))
    ones = torch.ones(1, 4)
    assert torch.equal(layer(x, attention_mask=ones, use_cache=True)[0], layer(x)[0])
    with pytest.raises(dsf.InputError, match="Hydra: its convolution looks ahead"):
        attach(layer, Simulated(2))(x)
    with pytest.raises(dsf.InputError, match="d_conv must be odd, got 4"):
        mixers.Hydra(16, d_conv=4, headdim=8)
    with pytest.raises(dsf.InputError, match="headdim 64 must divide 32"):
        mixers.Hydra(16)
    assert type(mixers.layer_for(mixers.Hydra, 16, headdim=8)) is mixers.Hydra
    with pytest.raises(dsf.InputError, match=r"a class of layers .* not the class Linear"):
        mixers.layer_for(torch.nn.Linear, 16)


@pytest.mark.parametrize("name", ["VisionMamba", "Hydra", "VisionLSTM", "Bidirectional"])
def test_a_converted_layer_is_recorded_in_both_directions(name):
    layer, x = made(name), torch.randn(1, 9, 16, dtype=torch.float64)
    expected = layer(x)[0]
    with torch.no_grad(), dsf.convert(layer) as converted, dsf.analysis.record(converted) as recording:
        assert torch.equal(layer(x)[0], expected) and not converted.left_alone
        assert [entry.backward for entry in recording] == [False, True]
        assert all(size.recurrent > 0 for size in converted.state_size(9).values())
    assert torch.equal(layer(x)[0], expected) and len(recording) == 2


def test_the_ways_of_a_layer_are_what_its_recurrence_runs_on():
    x, seen = torch.randn(1, 7, 16, dtype=torch.float64), []
    vision, hydra = made("VisionMamba"), made("Hydra")
    ahead, back = (vision.recurrence(**way) for way in vision.ways(x))
    _, side = vision.ahead.project(x)
    torch.testing.assert_close(vision.ahead.readout(ahead + back.flip(1), side), vision(x)[0])

    ahead, back = (F.pad(hydra.recurrence(**way), (0, 0, 0, 0, 1, -1)) for way in hydra.ways(x))
    v = hydra.ways(x)[0]["x"]
    skip = hydra.fc_D(v.flatten(2)) + hydra.D
    hydra.norm.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    hydra(x)
    torch.testing.assert_close((ahead + back.flip(1) + v * skip.unsqueeze(-1)).flatten(2), seen[0])


def test_rates_stay_wide_and_parameters_begin_again():
    layer = mixers.Hydra(16, headdim=8, dtype=torch.bfloat16)
    assert layer.A_log.dtype == torch.float32 and layer.in_proj.weight.dtype == torch.bfloat16
    assert layer(torch.randn(1, 6, 16).bfloat16())[0].dtype == torch.bfloat16
    with torch.device("meta"):
        layer = mixers.VisionMamba(16)
    layer.to_empty(device="cpu")
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert torch.equal(layer.back.A_log, mixers.S6(16).A_log)
