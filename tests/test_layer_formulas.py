"""The papers' layers written again as plain loops over tokens and heads, on a layer's own weights."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import outer, zeros

from dsf import mixers

sigmoid, softplus, exp, silu = torch.sigmoid, F.softplus, torch.exp, F.silu
T, C, H = 6, 8, 2
D = C // H


@pytest.fixture(autouse=True)
def double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def moved(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def same(layer, x, expected):
    torch.testing.assert_close(layer(x[None])[0][0], torch.stack(list(expected)), rtol=1e-9, atol=1e-9)


def heads(x, size):
    """[T, H·size] -> H tensors [T, size]."""
    return x.split(size, dim=-1)


def conv(x, weight):
    taps = weight[:, 0]
    padded = torch.cat([zeros(taps.shape[1] - 1, x.shape[1]), x])
    return silu(torch.stack([(padded[t : t + taps.shape[1]].T * taps).sum(1) for t in range(len(x))]))


def rms(x, weight, eps=1e-5):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def unit(x):
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def standard(x, eps):
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + eps)


def test_gla_layer():
    m, x = moved(mixers.GLA(C, H, gate_rank=3)), torch.randn(T, C)
    q, k, v = m.in_proj(x).split([4, 4, 8], -1)
    alpha = sigmoid(m.gk_proj[1](m.gk_proj[0](x))) ** (1 / 16)
    out = []
    for h in range(H):
        S, rows = zeros(2, D), []
        for t in range(T):
            S = heads(alpha, 2)[h][t][:, None] * S + outer(heads(k, 2)[h][t], heads(v, D)[h][t])
            rows.append(heads(q, 2)[h][t] / math.sqrt(2) @ S)
        out.append(rms(torch.stack(rows), m.o_norm.weight))
    same(m, x, m.o_proj(torch.cat(out, -1) * silu(m.g_proj(x))))


@pytest.mark.parametrize("n_heads", [2, 3, 4, 6, 8])
def test_alibi_slopes(n_heads):
    m = mixers.SoftmaxAttention(24, n_heads, alibi=True)
    known = {
        2: [1 / 16, 1 / 256], 3: [1 / 16, 1 / 256, 1 / 4], 4: [1 / 4, 1 / 16, 1 / 64, 1 / 256],
        6: [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8], 8: [0.5**i for i in range(1, 9)],
    }  # fmt: skip
    assert m.slope.tolist() == known[n_heads] and not isinstance(m.slope, torch.nn.Parameter)


def test_attention_in_a_window_with_a_sink_and_biases():
    m = moved(mixers.SoftmaxAttention(C, H, n_kv_heads=1, window=3, sink="learnt", alibi=True))
    x, out = torch.randn(T, C), []
    k, v = m.k_proj(x), m.v_proj(x)
    for h in range(H):
        rows = []
        for t in range(T):
            seen = range(max(0, t - 2), t + 1)
            q = heads(m.q_proj(x), D)[h][t]
            scores = [q @ k[j] / math.sqrt(D) - m.slope[h] * (t - j) for j in seen]
            weights = torch.stack([*scores, m.s[h]]).softmax(0)
            rows.append(sum(w * v[j] for w, j in zip(weights, seen, strict=False)))
        out.append(torch.stack(rows))
    same(m, x, m.o_proj(torch.cat(out, -1)))
    assert m.state_size(9) == 3 * (2 * D + H) and mixers.SoftmaxAttention(C, H, window=3).state_size(2) == 2 * 2 * H * D


def test_mesanet_layer():
    m, x = moved(mixers.MesaNet(C, H, d_state=3, headdim=5, d_conv=2, gate=True)), torch.randn(T, C)
    q, k = conv(m.in_proj(x), m.conv1d.weight).split([6, 6], -1)
    v, f, beta = m.v_proj(x), sigmoid(m.a_proj(x)), sigmoid(m.b_proj(x))
    out = []
    for h in range(H):
        ks, vs, rows = unit(heads(k, 3)[h]), heads(v, 5)[h], []
        for t in range(T):  # the regression of all tokens so far, from its normal equations
            w = torch.stack([beta[j, h] * f[j + 1 : t + 1, h].prod() for j in range(t + 1)])[:, None]
            normal = ks[: t + 1].T @ (w * ks[: t + 1]) + torch.diag(0.25 + softplus(m.lam[h]))
            rows.append(unit(heads(q, 3)[h][t]) @ torch.linalg.solve(normal, ks[: t + 1].T @ (w * vs[: t + 1])))
        out.append(rms(torch.stack(rows), m.o_norm.weight))
    same(m, x, m.o_proj(torch.cat(out, -1) * silu(m.g_proj(x))))


def test_kda_layer():
    m, x = moved(mixers.KDA(C, H, d_state=3, headdim=5, d_conv=2)), torch.randn(T, C)
    q, k, v = conv(m.in_proj(x), m.conv1d.weight).split([6, 6, 10], -1)
    rate = m.f_proj[1](m.f_proj[0](x))
    out = []
    for h in range(H):
        g = -exp(m.A_log[h]) * softplus(heads(rate, 3)[h] + m.dt_bias[h])
        S, rows = zeros(3, 5), []
        for t in range(T):
            key, beta = unit(heads(k, 3)[h][t]), sigmoid(m.b_proj(x[t]))[h]
            S = exp(g[t])[:, None] * S
            S = S + beta * outer(key, heads(v, 5)[h][t] - key @ S)
            rows.append(unit(heads(q, 3)[h][t]) / math.sqrt(3) @ S)
        out.append(rms(torch.stack(rows), m.o_norm.weight))
    same(m, x, m.o_proj(torch.cat(out, -1) * sigmoid(m.g_proj[1](m.g_proj[0](x)))))


def test_gated_deltanet2_layer():
    m, x = moved(mixers.GatedDeltaNet2(C, H, d_state=3, headdim=5, d_conv=2)), torch.randn(T, C)
    q, k, v = conv(m.in_proj(x), m.conv1d.weight).split([6, 6, 10], -1)
    rate, erase, write = m.f_proj[1](m.f_proj[0](x)), sigmoid(m.b_proj(x)), sigmoid(m.w_proj(x))
    out = []
    for h in range(H):
        g = -exp(m.A_log[h]) * softplus(heads(rate, 3)[h] + m.dt_bias[h])
        S, rows = zeros(3, 5), []
        for t in range(T):
            key = unit(heads(k, 3)[h][t])
            S = exp(g[t])[:, None] * S
            S = S + outer(key, heads(write, 5)[h][t] * heads(v, 5)[h][t] - (heads(erase, 3)[h][t] * key) @ S)
            rows.append(unit(heads(q, 3)[h][t]) / math.sqrt(3) @ S)
        out.append(rms(torch.stack(rows), m.o_norm.weight))
    same(m, x, m.o_proj(torch.cat(out, -1) * sigmoid(m.g_proj[1](m.g_proj[0](x)))))


def test_comba_layer():
    m, x = moved(mixers.Comba(C, H, d_state=3, headdim=5, d_conv=2)), torch.randn(T, C)
    q, k, v = conv(m.qkv_proj(x), m.conv1d.weight).split([6, 6, 10], -1)
    out = []
    for h in range(H):
        g = -exp(m.A_log[h]) * softplus(m.a_proj(x)[:, h] + m.dt_bias[h])
        S, rows = zeros(3, 5), []
        for t in range(T):
            query, key, beta = unit(heads(q, 3)[h][t]), unit(heads(k, 3)[h][t]), sigmoid(m.b_proj(x[t]))[h]
            S = exp(g[t]) * S + beta * outer(key, heads(v, 5)[h][t] - sigmoid(m.b[h]) * key @ S)
            rows.append((query - m.d[h] * key) / math.sqrt(3) @ S)
        out.append(rms(torch.stack(rows), m.o_norm.weight))
    same(m, x, m.o_proj(torch.cat(out, -1) * silu(m.g_proj(x))))


def test_retnet_layer_is_its_parallel_form_with_complex_rotation():
    m, x = moved(mixers.RetNet(C, H, d_state=4, headdim=3)), torch.randn(T, C)
    q, k, v = m.in_proj(x).split([8, 8, 6], -1)
    theta = 10000.0 ** (-torch.arange(2) / 2)
    turn = exp(1j * torch.arange(T)[:, None] * theta)
    decay = [1 - 2.0 ** (-5 - h) for h in range(H)]
    out = []
    for h in range(H):
        a, b = (torch.complex(*heads(w, 4)[h].chunk(2, -1)) * turn for w in (q, k))
        scores = (a @ b.conj().T).real / math.sqrt(4)
        age = torch.arange(T)[:, None] - torch.arange(T)
        scores = scores * torch.where(age >= 0, decay[h] ** age.clamp(min=0), 0.0)
        out.append(rms(scores @ heads(v, 3)[h], m.o_norm.weight))
    same(m, x, m.o_proj(torch.cat(out, -1) * silu(m.g_proj(x))))


def test_forgetting_attention_layer_is_its_pro_block():
    """Lin et al. (arXiv 2503.02130), Figure 2: k and v mixed with the token before, norms, output gate."""
    m, x = moved(mixers.ForgettingAttention(C, H, headdim=3)), torch.randn(T, C)
    share = sigmoid(m.shift_proj(x))
    before = F.pad(m.kv_proj(x), (0, 0, 1, 0))[:-1]
    kv = [h * s[:, None] + w * (1 - s[:, None]) for h, w, s in
          zip(heads(before, 3), heads(m.kv_proj(x), 3), share.T, strict=True)]  # fmt: skip
    gate, out = F.logsigmoid(m.f_proj(x)).cumsum(0), []
    for h in range(H):
        q = rms(heads(m.q_proj(x), 3)[h], heads(m.q_norm.weight[None], 3)[h][0])
        k = rms(kv[h], heads(m.k_norm.weight[None], 3)[h][0])
        scores = q @ k.T / math.sqrt(3) + gate[:, h, None] - gate[:, h]
        y = scores.masked_fill(~torch.ones(T, T).tril().bool(), -math.inf).softmax(-1) @ kv[H + h]
        out.append(rms(y, heads(m.o_norm.weight[None], 3)[h][0]))
    same(m, x, m.o_proj(torch.cat(out, -1) * sigmoid(m.g_proj(x))))


@pytest.mark.parametrize("way", ["by_block", "by_head"])
def test_mlstm_layer(way, monkeypatch):
    """Its maps as on a CPU, and as on a GPU."""
    module = importlib.import_module("dsf.mixers.mlstm")
    monkeypatch.setattr(module, "by_block", getattr(module, way))
    m, x = moved(mixers.MLSTM(C, H, d_conv=3)), torch.randn(T, C)
    u, z = m.up_proj(x).chunk(2, -1)
    taps = F.pad(u.T, (2, 0)).unfold(1, 3, 1)  # [C, T, 3]
    c = silu((taps * m.conv1d.weight[:, 0][:, None]).sum(-1).T + m.conv1d.bias)
    q, k, v = (
        F.linear(w, torch.block_diag(*p.weight)) for w, p in ((c, m.q_proj), (c, m.k_proj), (u, m.v_proj))
    )  # fmt: skip
    gates = F.linear(torch.cat([q, k, v], -1), m.gates.weight, m.gates.bias)
    out = []
    for h in range(H):
        S, n, size, rows = zeros(8, 8), zeros(8), 8, []
        for t in range(T):
            i, f = exp(gates[t, h]), sigmoid(gates[t, H + h])
            key = heads(k, 8)[h][t] / math.sqrt(size)
            S, n = f * S + i * outer(key, heads(v, 8)[h][t]), f * n + i * key
            query = heads(q, 8)[h][t]
            rows.append(query @ S / torch.maximum((n @ query).abs(), torch.ones(())))
        out.append(standard(torch.stack(rows), 1e-5))
    same(m, x, m.down_proj((torch.cat(out, -1) * m.norm + m.skip * c) * silu(z)))


@pytest.mark.parametrize("bound", [0.0, 0.7])
def test_hgrn_layers_hold_their_lower_bound(bound):
    x = torch.randn(T, C)
    m = moved(mixers.HGRN(C, lower_bound=bound))
    f, i = m.in_proj(x).chunk(2, -1)
    f, h, rows = bound + (1 - bound) * sigmoid(f), zeros(C), []
    for t in range(T):
        h = f[t] * h + (1 - f[t]) * silu(i[t])
        rows.append(h)
    same(m, x, m.o_proj(rms(torch.stack(rows), m.o_norm.weight) * silu(m.g_proj(x))))
    m = moved(mixers.HGRN2(C, H, d_state=3, lower_bound=bound))
    q, i = m.in_proj(x).split([6, 8], -1)
    f, out = bound + (1 - bound) * sigmoid(m.f_proj(x)), []
    for h in range(H):
        S, rows = zeros(3, D), []
        for t in range(T):
            gate = heads(f, 3)[h][t]
            S = gate[:, None] * S + outer(1 - gate, heads(i, D)[h][t])
            rows.append(silu(heads(q, 3)[h][t]) @ S)
        out.append(torch.stack(rows))
    same(m, x, m.o_proj(rms(torch.cat(out, -1), m.o_norm.weight)))


def test_mingru_layer():
    m, x = moved(mixers.MinGRU(C, d_conv=0)), torch.randn(T, C)
    z, h = m.in_proj(x).chunk(2, -1)
    z, h = sigmoid(z), torch.where(h >= 0, h + 0.5, sigmoid(h))
    s, rows = zeros(2 * C), []
    for t in range(T):
        s = (1 - z[t]) * s + z[t] * h[t]
        rows.append(s)
    same(m, x, m.out_proj(torch.stack(rows)))


@pytest.mark.parametrize("make", [mixers.DeltaProduct, mixers.GatedDeltaProduct])
def test_delta_product_layers(make):
    m, x = moved(make(C, H, d_state=3, headdim=5, n_steps=3, d_conv=2)), torch.randn(T, C)
    q, k, v = conv(m.in_proj(x), m.conv1d.weight).split([6, 18, 30], -1)
    gated = make is mixers.GatedDeltaProduct
    out = []
    for h in range(H):
        S, rows = zeros(3, 5), []
        for t in range(T):
            if gated:
                S = exp(-exp(m.A_log[h]) * softplus(m.a_proj(x[t])[h] + m.dt_bias[h])) * S
            for j in range(3):
                key, beta = unit(heads(k, 3)[j * H + h][t]), 2 * sigmoid(m.b_proj(x[t]))[j * H + h]
                S = S + beta * outer(key, heads(v, 5)[j * H + h][t] - key @ S)
            rows.append(unit(heads(q, 3)[h][t]) / math.sqrt(3) @ S)
        out.append(rms(torch.stack(rows), m.o_norm.weight))
    y = torch.cat(out, -1)
    same(m, x, m.o_proj(y * silu(m.g_proj(x)) if gated else y))


def before(x):
    return torch.cat([zeros(1, x.shape[1]), x[:-1]])


def test_rwkv4_layer():
    m, x = moved(mixers.RWKV4(C)), torch.randn(T, C)
    r, k, v = (
        layer(x * mix + before(x) * (1 - mix))
        for layer, mix in ((m.receptance, m.time_mix_r), (m.key, m.time_mix_k), (m.value, m.time_mix_v))
    )
    a, b, rows = zeros(C), zeros(C), []
    for t in range(T):
        now = exp(m.time_first + k[t])
        rows.append((a + now * v[t]) / (b + now))
        decay = exp(-exp(m.time_decay))
        a, b = decay * a + exp(k[t]) * v[t], decay * b + exp(k[t])
    same(m, x, m.output(sigmoid(r) * torch.stack(rows)))


def test_rwkv6_layer():
    m, x = moved(mixers.RWKV6(C, H, mix_rank=3, decay_rank=2)), torch.randn(T, C)
    change = before(x) - x
    low = torch.tanh((x + change * m.time_maa_x) @ m.time_maa_w1).view(T, 5, 3)
    seen = {}
    for j, name in enumerate("wkvrg"):
        seen[name] = x + change * (getattr(m, f"time_maa_{name}") + low[:, j] @ m.time_maa_w2[j])
    r, k, v, g = m.receptance(seen["r"]), m.key(seen["k"]), m.value(seen["v"]), silu(m.gate(seen["g"]))
    w = exp(-exp(m.time_decay.flatten() + torch.tanh(seen["w"] @ m.time_decay_w1) @ m.time_decay_w2))
    out = []
    for h in range(H):
        S, rows = zeros(D, D), []
        for t in range(T):
            kv = outer(heads(k, D)[h][t], heads(v, D)[h][t])
            rows.append(heads(r, D)[h][t] @ (S + m.time_faaaa[h][:, None] * kv))
            S = heads(w, D)[h][t][:, None] * S + kv
        out.append(standard(torch.stack(rows), 64e-5))
    same(m, x, m.output((torch.cat(out, -1) * m.ln_weight + m.ln_bias) * g))


def test_rwkv7_layer():
    m, x = moved(mixers.RWKV7(C, H, ranks=(2, 3, 2, 4), value_residual=True)), torch.randn(T, C)
    first = torch.randn(T, C)
    change = before(x) - x
    xr, xw, xk, xv, xa, xg = (x + change * getattr(m, f"x_{n}") for n in "rwkvag")
    r, k, v = m.receptance(xr), m.key(xk), m.value(xv)
    w = -softplus(-(m.w0.flatten() + torch.tanh(xw @ m.w1) @ m.w2)) - 0.5
    v = v + (first - v) * sigmoid(m.v0 + xv @ m.v1 @ m.v2)
    a = sigmoid(m.a0.flatten() + xa @ m.a1 @ m.a2)
    g = sigmoid(xg @ m.g1) @ m.g2
    kappa, k = k * m.k_k, k * (1 + (a - 1) * m.k_a)
    out = []
    for h in range(H):
        S, rows = zeros(D, D), []  # [value, key], as the released code keeps it
        for t in range(T):
            rt, wt, kt, vt, at = (heads(s, D)[h][t] for s in (r, w, k, v, a))
            removal = F.normalize(heads(kappa, D)[h][t], dim=0)
            S = S * exp(-exp(wt)) + outer(S @ -removal, removal * at) + outer(vt, kt)
            rows.append(S @ rt)
        y = standard(torch.stack(rows), 64e-5) * heads(m.ln_weight, D)[h] + heads(m.ln_bias, D)[h]
        rh, kh, vh = (heads(s, D)[h] for s in (r, k, v))
        out.append(y + (rh * kh * m.r_k[h]).sum(-1, keepdim=True) * vh)
    expected = m.output(torch.cat(out, -1) * g)
    torch.testing.assert_close(m(x[None], v_first=first[None])[0][0], expected, rtol=1e-9, atol=1e-9)


def test_rwkv_starts_follow_the_depth_as_in_the_released_code():
    layers = [mixers.RWKV7(64, layer_idx=i, n_layers=4) for i in range(4)]
    n = torch.arange(64)
    for i, m in enumerate(layers):
        zero_to_one, one_to_zero = i / 3, 1 - i / 4
        decay = -7 + 5 * (n / 63) ** (0.85 + zero_to_one**0.5) + 0.5
        torch.testing.assert_close(m.w0.detach().flatten(), decay)
        mixed = 1 - ((n / 64) ** (0.9 * one_to_zero) + 0.4 * zero_to_one)
        torch.testing.assert_close(m.x_k.detach(), mixed)
        assert m.receptance.weight.abs().max() <= 0.5 / 8 and m.output.weight.abs().max() == 0
    first, last = mixers.RWKV4(64, layer_idx=0, n_layers=4), mixers.RWKV4(64, layer_idx=3, n_layers=4)
    torch.testing.assert_close(first.time_decay.detach(), -5 + 8 * (n / 63) ** 0.7)
    torch.testing.assert_close(last.time_mix_v.detach(), (n / 64) ** 0.25 + 0.3)
    torch.testing.assert_close(first.time_first.detach()[:3], math.log(0.3) + torch.tensor([0.0, 0.5, -0.5]))


@pytest.mark.parametrize("tokens", [1, 7])
def test_maps_by_blocks_and_by_heads_are_the_same(tokens):
    module = importlib.import_module("dsf.mixers.mlstm")
    maps, x = [moved(module.Blocks(6, 4)) for _ in range(2)], torch.randn(3, tokens, 24, requires_grad=True)
    gates, dy = torch.randn(5, 24, requires_grad=True), torch.randn(3, tokens, 5 + 2 * 24)
    leaves = [x, gates, *(m.weight for m in maps)]

    def ran(way):
        y = torch.cat([part.flatten(2) for part in way(x, 3, gates, *maps)], dim=-1)
        first = torch.autograd.grad(y, leaves, dy, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves, retain_graph=True)
        return y, *torch.autograd.grad(y, leaves, dy), *first, *second

    for one, other in zip(ran(module.by_head), ran(module.by_block), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_blocks_of_mlstm_may_reach_into_the_next_head():
    layer = moved(mixers.MLSTM(6, n_heads=4))  # 3 blocks of 4 channels, heads of 3
    assert len(layer.q_proj.weight) == 3 and layer(torch.randn(2, 5, 6))[0].shape == (2, 5, 6)


def test_forget_gates_of_mlstm_start_between_their_bounds():
    bias = mixers.MLSTM(64, 4).gates.bias.detach()
    torch.testing.assert_close(bias[4:], torch.linspace(3, 6, 4))
    assert bias[:4].abs().max() < 0.6


def test_s4d_layer_with_real_rates():
    m, x = moved(mixers.S4D(C, 3, init="real")), torch.randn(T, C)
    a, step = -exp(m.A_log), exp(m.log_dt)[:, None]
    S, rows = zeros(C, 3), []
    for t in range(T):
        S = exp(a * step) * S + (exp(a * step) - 1) / a * x[t][:, None]
        rows.append((S * m.C).sum(1) + m.D * x[t])
    y = F.gelu(torch.stack(rows)) @ m.output_linear.weight.T + m.output_linear.bias
    same(m, x, y[:, :C] * sigmoid(y[:, C:]))


def test_complex_s6():
    layer = moved(mixers.S6(C, d_state=6, complex=True))
    x = torch.randn(T, C)
    u, z = layer.in_proj(x).chunk(2, -1)
    u = layer.conv1d(u[None])[0][0]
    low, b, c = layer.x_proj(u).split([layer.dt_proj.in_features, 6, 6], -1)
    step, rate = softplus(layer.dt_proj(low)), torch.complex(-exp(layer.A_log), layer.A_imag)
    b, c = (torch.complex(part[:, 0::2], part[:, 1::2]) for part in (b, c))
    state, out = 0, []
    for t in range(T):
        state = exp(rate * step[t, :, None]) * state + (step[t] * u[t])[:, None] * b[t]
        y = (c[t].conj() * state).real.sum(1) + layer.D * u[t]
        out.append(layer.out_proj(y * silu(z[t])))
    same(layer, x, out)
