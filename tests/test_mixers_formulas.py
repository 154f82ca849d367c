"""The papers' equations written again as plain loops, one head at a time, against the zoo's recurrences.

Each formula takes one head's inputs, x[t] being token t's, and gives the list of outputs y_t [P].
"""

import math

import mixer_inputs
import pytest
import torch
import torch.nn.functional as F
from torch import einsum, eye, outer, zeros

from dsf import mixers

sigmoid, softplus, exp = torch.sigmoid, F.softplus, torch.exp


def softmax_attention(q, k, v):
    scores = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(~torch.ones(len(q), len(q)).tril().bool(), -math.inf)
    return scores.softmax(-1) @ v


def masked(scores, seen):
    return scores.masked_fill(~seen, -math.inf)


def sliding_window_attention(q, k, v):
    age = torch.arange(len(q))[:, None] - torch.arange(len(q))
    return masked(q @ k.T / math.sqrt(q.shape[1]), (age >= 0) & (age < 128)).softmax(-1) @ v


def alibi(q, k, v, slope):
    age = torch.arange(len(q))[:, None] - torch.arange(len(q))
    return masked(q @ k.T / math.sqrt(q.shape[1]) - slope * age, age >= 0).softmax(-1) @ v


def sink_attention(q, k, v, s):
    scores = masked(q @ k.T / math.sqrt(q.shape[1]), torch.ones(len(q), len(q)).tril().bool())
    return torch.cat([scores, s.expand(len(q), 1)], -1).softmax(-1)[:, :-1] @ v


def softmax_one(q, k, v):
    return sink_attention(q, k, v, torch.zeros(1, 1))


def fox(q, k, v, f):
    total = torch.cumsum(F.logsigmoid(f), 0)
    scores = q @ k.T / math.sqrt(q.shape[1]) + total[:, None] - total
    return scores.masked_fill(~torch.ones(len(q), len(q)).tril().bool(), -math.inf).softmax(-1) @ v


def mesanet(q, k, v, f, beta, lam):
    G, H = zeros(k.shape[1], v.shape[1]), zeros(k.shape[1], k.shape[1])
    for t in range(len(q)):
        G = sigmoid(f[t]) * G + beta[t] * outer(k[t], v[t])
        H = sigmoid(f[t]) * H + beta[t] * outer(k[t], k[t])
        yield q[t] @ torch.linalg.inv(H + torch.diag(0.25 + softplus(lam))) @ G


def linear_attention(q, k, v):
    weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).T).tril()
    return weights @ v / weights.sum(1, keepdim=True)


def normalized_attention_exp(q, k, v, eta):
    return (q @ k.T).tril() @ v / exp(eta)[:, None]


def normalized_attention_softplus(q, k, v, eta):
    return (q @ k.T).tril() @ v / softplus(eta)[:, None]


def normalized_attention_sigmoid(q, k, v, eta):
    return (q @ k.T).tril() @ v / sigmoid(eta)[:, None]


def s6(x, dt, b, c, A_log, D):
    h = zeros(x.shape[1], b.shape[1])  # [P, N], as the paper stores it
    for t in range(len(x)):
        delta = softplus(dt[t])[:, None]
        h = exp(-delta * exp(A_log.T)) * h + delta * x[t][:, None] * b[t]
        yield h @ c[t] + D * x[t]


def s6_negative(x, dt, b, c, A_log, D):
    h = zeros(x.shape[1], b.shape[1])
    for t in range(len(x)):
        delta = softplus(dt[t])[:, None]
        h = (2 * exp(-delta * exp(A_log.T)) - 1) * h + delta * x[t][:, None] * b[t]
        yield h @ c[t] + D * x[t]


def ssd(x, dt, b, c, A_log, D, dt_bias):
    h = zeros(x.shape[1], b.shape[1])
    for t in range(len(x)):
        delta = softplus(dt[t] + dt_bias)
        h = exp(-delta * exp(A_log)) * h + delta * outer(x[t], b[t])
        yield h @ c[t] + D * x[t]


def qlstm(x, f, i, o):
    h = zeros(x.shape[1])
    for t in range(len(x)):
        h = sigmoid(f[t]) * h + sigmoid(i[t]) * x[t]
        yield sigmoid(o[t]) * h


def modified_qlstm(x, f, i, o, a):
    h = zeros(x.shape[1])
    for t in range(len(x)):
        h = sigmoid(-f[t]).pow(torch.relu(a)) * h + sigmoid(i[t]) * x[t]
        yield sigmoid(o[t]) * h


def rg_lru(x, r, i, reset, Lambda):
    h = zeros(x.shape[1])
    for t in range(len(x)):
        a = exp(-8 * softplus(Lambda) * sigmoid(r[t]))
        new = reset[t] > 0
        h = (0 if new else a) * h + (1 if new else torch.sqrt(1 - a**2)) * sigmoid(i[t]) * x[t]
        yield h


def deltanet(q, k, v, beta):
    memory = zeros(v.shape[1], k.shape[1])  # [P, N]: memory @ key = value
    for t in range(len(q)):
        memory = memory - beta[t] * outer(memory @ k[t] - v[t], k[t])
        yield memory @ q[t]


def efla(q, k, v, beta):
    memory = zeros(v.shape[1], k.shape[1])
    for t in range(len(q)):
        length = k[t] @ k[t]
        alpha = (1 - exp(-beta[t] * length)) / length
        memory = memory - alpha * outer(memory @ k[t] - v[t], k[t])
        yield memory @ q[t]


def gated_deltanet(q, k, v, alpha, beta):
    memory = zeros(v.shape[1], k.shape[1])
    for t in range(len(q)):
        memory = memory @ (alpha[t] * (eye(k.shape[1]) - beta[t] * outer(k[t], k[t]))) + beta[t] * outer(v[t], k[t])
        yield memory @ q[t]


def comba(q, k, v, g, beta, b, d):
    state = zeros(k.shape[1], v.shape[1])
    for t in range(len(q)):
        read = sigmoid(b) * k[t] @ state
        state = exp(g[t]) * state + sigmoid(beta[t]) * outer(k[t], v[t] - read)
        yield (q[t] - d * k[t]) @ state


def gated_deltanet2(q, k, v, g, b, w):
    state = zeros(k.shape[1], v.shape[1])
    for t in range(len(q)):
        state = exp(g[t])[:, None] * state
        state = state + outer(k[t], sigmoid(w[t]) * v[t] - (sigmoid(b[t]) * k[t]) @ state)
        yield q[t] @ state


def kda(q, k, v, g, beta):
    state = zeros(k.shape[1], v.shape[1])
    for t in range(len(q)):
        state = exp(g[t])[:, None] * state
        state = state + beta[t] * outer(k[t], v[t] - k[t] @ state)
        yield q[t] @ state


def longhorn(q, k, x, beta, D):
    state = zeros(x.shape[1], k.shape[1])
    for t in range(len(q)):
        eps = beta[t] / (1 + beta[t] * k[t].dot(k[t]))
        state = (1 - outer(eps, k[t] ** 2)) * state + outer(eps * x[t], k[t])
        yield state @ q[t] + D * x[t]


def longhorn_exact(q, k, x, beta, D):
    """argmin |S - S_{t-1}|² + beta (S k - x)² for each channel, by solving its normal equations."""
    state = zeros(x.shape[1], k.shape[1])
    for t in range(len(q)):
        gram = eye(k.shape[1]) + einsum("p,n,m->pnm", beta[t], k[t], k[t])
        state = torch.linalg.solve(gram, state + outer(beta[t] * x[t], k[t]))
        yield state @ q[t] + D * x[t]


def retnet(q, k, v, slope):
    at = torch.arange(len(q))
    return ((q @ k.T) * exp(-slope * (at[:, None] - at))).tril() @ v


def gla(q, k, v, g):
    state = zeros(k.shape[1], v.shape[1])
    for t in range(len(q)):
        state = sigmoid(g[t]).pow(1 / 16)[:, None] * state + outer(k[t], v[t])
        yield q[t] @ state


def hgrn(f, i):
    h = zeros(i.shape[1])
    for t in range(len(i)):
        h = sigmoid(f[t]) * h + (1 - sigmoid(f[t])) * i[t]
        yield h


def hgrn2(q, f, i):
    state = zeros(f.shape[1], i.shape[1])
    for t in range(len(q)):
        state = sigmoid(f[t])[:, None] * state + outer(1 - sigmoid(f[t]), i[t])
        yield q[t] @ state


def mingru(z, h):
    state = zeros(h.shape[1])
    for t in range(len(h)):
        state = (1 - sigmoid(z[t])) * state + sigmoid(z[t]) * h[t]
        yield state


def rwkv4(k, v, w, u):
    for t in range(len(k)):
        ages = torch.arange(t - 1, -1, -1)[:, None]
        weights = torch.cat([exp(-ages * exp(w) + k[:t]), exp(u + k[t])[None]])
        yield (weights * v[: t + 1]).sum(0) / weights.sum(0)


def rwkv6(r, k, v, w, u):
    state = zeros(k.shape[1], v.shape[1])
    for t in range(len(r)):
        yield r[t] @ (state + outer(u * k[t], v[t]))
        state = exp(-exp(w[t]))[:, None] * state + outer(k[t], v[t])


def rwkv7(r, w, k, v, kappa, a, u):
    state = zeros(v.shape[1], k.shape[1])
    for t in range(len(r)):
        decay = exp(-math.exp(-0.5) * sigmoid(w[t]))
        state = state @ (torch.diag(decay) - outer(kappa[t], sigmoid(a[t]) * kappa[t])) + outer(v[t], k[t])
        yield state @ r[t] + (r[t] * u * k[t]).sum() * v[t]


def mlstm(q, k, v, i, f):
    """With the stabiliser of the paper (m_t), which must not show in the outputs."""
    n, m = zeros(k.shape[1]), torch.tensor(-math.inf)
    c = zeros(v.shape[1], k.shape[1])
    for t in range(len(q)):
        key, old = k[t] / math.sqrt(k.shape[1]), m
        m = torch.maximum(F.logsigmoid(f[t]) + m, i[t])
        forget, write = exp(F.logsigmoid(f[t]) + old - m), exp(i[t] - m)
        c, n = forget * c + write * outer(v[t], key), forget * n + write * key
        yield c @ q[t] / torch.maximum((n @ q[t]).abs(), exp(-m))


def delta_product(q, k, v, beta):
    memory = zeros(v.shape[2], k.shape[2])
    for t in range(len(q)):
        for j in range(k.shape[1]):
            memory = memory - beta[t, j] * outer(memory @ k[t, j] - v[t, j], k[t, j])
        yield memory @ q[t]


def gated_delta_product(q, k, v, beta, alpha):
    memory = zeros(v.shape[2], k.shape[2])
    for t in range(len(q)):
        memory = alpha[t] * memory
        for j in range(k.shape[1]):
            memory = memory - beta[t, j] * outer(memory @ k[t, j] - v[t, j], k[t, j])
        yield memory @ q[t]


FORMULAS = [
    *(softmax_attention, fox, linear_attention),
    *(normalized_attention_exp, normalized_attention_softplus, normalized_attention_sigmoid),
    *(
        s6,
        s6_negative,
        ssd,
        qlstm,
        modified_qlstm,
        rg_lru,
        deltanet,
        gated_deltanet,
        gated_deltanet2,
        comba,
        efla,
        kda,
        longhorn,
        longhorn_exact,
    ),
    *(retnet, gla, hgrn, hgrn2, mingru, rwkv4, rwkv6, rwkv7, mlstm, delta_product, gated_delta_product),
]


@pytest.fixture(autouse=True)
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda f: f.__name__)
def test_recurrence_is_the_papers_formula(formula):
    r = mixers.get(formula.__name__).recurrence
    inputs = mixer_inputs.sample(r, batch=2, tokens=11, heads=2)
    y = r(**inputs)
    for b in range(2):
        for h in range(2):
            one = {}
            for i in r.spec.inputs:
                x = inputs[i.name]
                one[i.name] = x[b].select(2 if i.kind.steps else 1, h) if i.kind.time else x[h]
            expected = torch.stack(list(formula(**one)))
            torch.testing.assert_close(y[b, :, h], expected, rtol=1e-9, atol=1e-9)


def causal_conv(x, conv):
    """silu of the taps applied to the last K inputs, by its definition. x: [T, C]."""
    taps = conv.weight[:, 0]
    padded = torch.cat([zeros(taps.shape[1] - 1, x.shape[1]), x])
    windows = [(padded[t : t + taps.shape[1]].T * taps).sum(1) for t in range(len(x))]
    return F.silu(torch.stack(windows) + (0 if conv.bias is None else conv.bias))


def test_s6_module_is_the_mamba_block():
    m, x = mixers.S6(6, d_state=3, d_conv=3), torch.randn(1, 7, 6)
    u, z = m.in_proj(x[0]).chunk(2, -1)
    u = causal_conv(u, m.conv1d)
    low, b, c = m.x_proj(u).split([1, 3, 3], -1)
    y = torch.stack(list(s6(u, m.dt_proj(low), b, c, m.A_log.T, m.D)))
    torch.testing.assert_close(m(x)[0][0], m.out_proj(y * F.silu(z)), rtol=1e-9, atol=1e-9)


def test_ssd_module_is_the_mamba2_block_with_groups_and_a_clamped_step():
    m, x = (
        mixers.SSD(8, d_state=3, d_conv=3, headdim=4, n_groups=2, dt_limit=(0.01, 0.05)),
        torch.randn(1, 7, 8),
    )
    z, xbc, dt = m.in_proj(x[0]).split([16, 16 + 2 * 6, 4], -1)
    u, b, c = causal_conv(xbc, m.conv1d).split([16, 6, 6], -1)
    heads = []
    for h in range(4):
        delta = softplus(dt[:, h] + m.dt_bias[h]).clamp(0.01, 0.05)
        group = slice(3 * (h // 2), 3 * (h // 2) + 3)
        same_step = delta + torch.log(-torch.expm1(-delta))  # softplus of it is delta
        one = ssd(u[:, 4 * h : 4 * h + 4], same_step, b[:, group], c[:, group], m.A_log[h], m.D[h], 0.0)
        heads.append(torch.stack(list(one)))
    y = (torch.cat(heads, -1) * F.silu(z)).unflatten(-1, (2, 8))
    y = (y / torch.sqrt(y.square().mean(-1, keepdim=True) + 1e-5)).flatten(-2) * m.norm.weight
    torch.testing.assert_close(m(x)[0][0], m.out_proj(y), rtol=1e-9, atol=1e-9)


def test_gated_deltanet_module_is_its_layer_with_shared_keys():
    m, x = (
        mixers.GatedDeltaNet(8, 4, n_key_heads=2, d_state=3, headdim=5, d_conv=3, allow_neg_eigval=True),
        torch.randn(1, 7, 8),
    )
    q, k, v = causal_conv(m.qkv_proj(x[0]), m.conv1d).split([6, 6, 20], -1)
    alpha = exp(-exp(m.A_log) * softplus(m.a_proj(x[0]) + m.dt_bias))
    beta = 2 * sigmoid(m.b_proj(x[0]))
    heads = []
    for h in range(4):
        group = slice(3 * (h // 2), 3 * (h // 2) + 3)
        unit = [w[:, group] / torch.sqrt(w[:, group].square().sum(-1, keepdim=True) + 1e-6) for w in (q, k)]
        one = gated_deltanet(unit[0] / math.sqrt(3), unit[1], v[:, 5 * h : 5 * h + 5], alpha[:, h], beta[:, h])
        y = torch.stack(list(one))
        heads.append(y / torch.sqrt(y.square().mean(-1, keepdim=True) + 1e-5) * m.o_norm.weight)
    expected = m.o_proj(torch.cat(heads, -1) * F.silu(m.g_proj(x[0])))
    torch.testing.assert_close(m(x)[0][0], expected, rtol=1e-9, atol=1e-9)


def test_softmax_module_repeats_its_key_heads():
    m, x = mixers.SoftmaxAttention(8, 4, n_kv_heads=2), torch.randn(1, 7, 8)
    q, k, v = m.q_proj(x[0]), m.k_proj(x[0]), m.v_proj(x[0])
    heads = [
        softmax_attention(q[:, 2 * h : 2 * h + 2], *(w[:, 2 * (h // 2) : 2 * (h // 2) + 2] for w in (k, v)))
        for h in range(4)
    ]
    torch.testing.assert_close(m(x)[0][0], m.o_proj(torch.cat(heads, -1)), rtol=1e-9, atol=1e-9)


def test_rg_lru_starts_in_the_papers_interval():
    radius = exp(-8 * softplus(mixers.RGLRU(64).Lambda))
    assert radius.min() >= 0.9 - 1e-6 and radius.max() <= 0.999 + 1e-6


@pytest.mark.parametrize("layer", [mixers.S6, mixers.SSD, mixers.GatedDeltaNet])
def test_time_steps_start_between_their_bounds(layer):
    module = layer(64)
    bias = module.dt_proj.bias if isinstance(module, mixers.S6) else module.dt_bias
    step = softplus(bias.detach().double())
    assert step.min() >= 1e-3 * (1 - 1e-4) and step.max() <= 0.1 * (1 + 1e-4)


def test_square_root_of_rg_lru_has_a_bounded_slope():
    r = mixers.get("rg_lru").recurrence
    inputs = mixer_inputs.sample(r)
    inputs |= {"reset": torch.zeros_like(inputs["reset"]), "r": torch.full_like(inputs["r"], -800.0)}
    inputs["r"][:, ::2] = -17.0  # a = 1 exactly, and a = 1 - 1e-7
    wanted = [inputs["r"].requires_grad_(), inputs["Lambda"].requires_grad_()]
    y = r(**inputs)
    assert y.abs().max() < 0.02  # nothing enters while nothing is forgotten
    for grad in torch.autograd.grad(y.sum(), wanted):
        assert grad.isfinite().all() and grad.abs().max() < 0.1
