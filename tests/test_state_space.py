"""Discretisations, HiPPO and the time-invariant layers, each against its paper's formula in complex numbers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dsf
from dsf import InputError, Key, Pair, Param, Scalar, System, TraceError, Value, exp, mixers, softplus
from dsf.analysis import measures
from dsf.mixers._state_space import frequencies, hippo_legs, legs_in_pairs

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
B, T, H, N, P = 2, 9, 2, 4, 3


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def complex_of(x):
    """Pairs along the last axis as complex numbers."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def run(a, b, c, x):
    """y_t = Re(c · S_t), S_t = a S_{t-1} + b x_t, for complex a, b, c [N/2] and x [T]."""
    state, out = torch.zeros_like(a), []
    for one in x:
        state = a * state + b * one
        out.append((c * state).sum().real)
    return torch.stack(out)


RULES = {
    dsf.zoh: lambda a, d: (torch.exp(a * d), (torch.exp(a * d) - 1) / a),
    dsf.bilinear: lambda a, d: ((1 + a * d / 2) / (1 - a * d / 2), d / (1 - a * d / 2)),
    dsf.euler: lambda a, d: (1 + a * d, d + 0 * a),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("form", ["naive", "recurrent", "chunk", "convolution"])
def test_complex_discretisations(rule, form):
    @dsf.recurrence
    def bank(x: Value, dt: Param[Scalar], a: Param[Pair], w: Param[Pair], b: Param[Key], c: Param[Key]):
        step = rule((-exp(a), w), b, 0.2 * exp(dt))
        return System(A=step.A, B=step.B * x, C=c)

    x, dt = torch.randn(B, T, H, P), torch.randn(H)
    (a, w), (b, c) = 0.3 * torch.randn(2, H, N // 2), torch.randn(2, H, N)
    y = bank(x, dt, a, w, b, c, form=form)
    for h in range(H):
        A, gain = RULES[rule](torch.complex(-a[h].exp(), w[h]), 0.2 * dt[h].exp())
        expected = run(A, gain * complex_of(b[h]), complex_of(c[h]).conj(), x[1, :, h, 2])
        torch.testing.assert_close(y[1, :, h, 2], expected, **CLOSE)


@pytest.mark.parametrize("rule", RULES, ids=lambda f: f.__name__)
def test_real_discretisations_with_a_step_that_data_decide(rule):
    @dsf.recurrence
    def selective(x: Value, dt: Scalar, a: Param[Key], b: Key, c: Key):
        step = rule(-exp(a), b, softplus(dt))
        return System(A=step.A, B=step.B * x, C=c)

    x, dt, a = torch.randn(1, T, 1, 1), torch.randn(1, T, 1) - 2, torch.randn(1, N)
    b, c = torch.randn(2, 1, T, 1, N)
    state, out = torch.zeros(N), []
    for t in range(T):
        A, gain = RULES[rule](-a[0].exp(), F.softplus(dt[0, t, 0]))
        state = A * state + gain * b[0, t, 0] * x[0, t, 0, 0]
        out.append(c[0, t, 0] @ state)
    torch.testing.assert_close(selective(x, dt, a, b, c)[0, :, 0, 0], torch.stack(out), **CLOSE)


@pytest.mark.parametrize("rule", RULES, ids=lambda f: f.__name__)
def test_one_number_a_pair_is_no_complex_number(rule):
    """Spread over its pair, b would be b + b i."""

    def bank(x: Value, b: Param[Pair], w: Param[Pair], c: Param[Key]):
        step = rule((-exp(w), w), 2 * b, 0.1)
        return System(A=step.A, B=step.B * x, C=c)

    with pytest.raises(TraceError, match=r"`2 \* b` is one number a pair.* write pair\(2 \* b, 0\)"):
        dsf.recurrence(bank)


@pytest.mark.parametrize("q, words", [(1, "`1` has no Key axis"), ("w", "`w` is one number a pair")])
def test_what_is_subtracted_from_complex_rates_is_made_of_complex_numbers(q, words):
    """The number 1 stood for (1, 0) in A, and for (1, 1) in the factor of the inverse."""

    def bank(x: Value, w: Param[Pair], c: Param[Key]):
        step = dsf.bilinear((-exp(w), w), c, 0.1, minus=(c, w if q == "w" else q))
        return System(A=step.A, B=step.B * x, C=c)

    with pytest.raises(TraceError, match=words):
        dsf.recurrence(bank)


def test_tiny_steps_lose_no_digits():
    """e^x - 1 by its definition keeps none of them at a step of 1e-12."""

    @dsf.recurrence
    def bank(x: Value, dt: Param[Scalar], a: Param[Pair], w: Param[Pair], c: Param[Key]):
        step = dsf.zoh((-exp(a), w), 1, exp(dt))
        return System(A=step.A, B=step.B * x, C=c)

    x, dt = torch.ones(1, 1, 1, 1), torch.tensor([math.log(1e-12)])
    y = bank(x, dt, torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([[1.0, 0.0]]))
    torch.testing.assert_close(y.squeeze(), torch.tensor(1e-12), rtol=1e-11, atol=0)


def dense_s4(a_log, a_imag, p, b, dt):
    """The bilinear transform of S4's A and B by a matrix inverse."""
    blocks = [torch.tensor([[-r, -w], [w, -r]]) for r, w in zip(a_log.exp().tolist(), a_imag.tolist(), strict=True)]
    rate = torch.block_diag(*blocks) - torch.outer(p, p)
    one, half = torch.eye(len(p)), dt.exp() / 2
    inverse = torch.linalg.inv(one - half * rate)
    return inverse @ (one + half * rate), 2 * half * (inverse @ b)


@pytest.mark.parametrize("form", ["naive", "recurrent", "scan", "chunk", "convolution"])
def test_s4_is_the_bilinear_transform_of_diagonal_plus_rank_one(form):
    r = mixers.s4
    x, dt, D = torch.randn(B, T, H, P), torch.randn(H), torch.randn(H, P)
    (a, w), (p, b, c) = torch.randn(2, H, N // 2), torch.randn(3, H, N)
    y = r(x, dt, a, w, p, b, c, D, form=form)
    for h in range(H):
        A, write = dense_s4(a[h], w[h], p[h], b[h], dt[h])
        state = torch.zeros(B, N, P)
        for t in range(T):
            state = A @ state + write[:, None] * x[:, t, h, None]
            torch.testing.assert_close(y[:, t, h], c[h] @ state + D[h] * x[:, t, h], **CLOSE)


def test_hippo_legs_in_pairs_is_hippo_legs():
    with pytest.raises(InputError, match="n is 5, expected an even number"):
        legs_in_pairs(5)
    a, b = hippo_legs(8)
    assert a[3, 1] == -math.sqrt(7 * 3) and a[3, 3] == -4 and a[1, 3] == 0 and b[2] == math.sqrt(5)
    w, p, written = legs_in_pairs(8)
    rate = torch.block_diag(*[torch.tensor([[-0.5, -x], [x, -0.5]]) for x in w.tolist()]) - torch.outer(p, p)
    for k in range(4):  # the same impulse responses in p and B, whatever the basis
        left, right = torch.linalg.matrix_power(rate, k), torch.linalg.matrix_power(a, k)
        own = torch.sqrt(torch.arange(8.0) + 0.5)
        torch.testing.assert_close(p @ left @ written, own @ right @ b, rtol=1e-9, atol=0)
    assert (w > 0).all()


def test_frequencies_are_the_papers():
    torch.testing.assert_close(frequencies(2, 3, "lin")[1], math.pi * torch.arange(3.0))
    torch.testing.assert_close(frequencies(1, 2, "inv")[0], 4 / math.pi * torch.tensor([3.0, 1 / 3]))
    torch.testing.assert_close(frequencies(1, 4, "legs")[0], legs_in_pairs(8)[0])


def moved(layer):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def block(m, y):
    """GELU and the gated linear unit behind the banks of S4."""
    both = F.gelu(y) @ m.output_linear.weight.T + m.output_linear.bias
    return both[:, : both.shape[1] // 2] * torch.sigmoid(both[:, both.shape[1] // 2 :])


def bank(m, x, c):
    """Every channel's system, with zero-order hold; c [channels, N/2]."""
    rates = torch.complex(-m.A_log.exp(), m.A_imag)
    columns = []
    for h in range(x.shape[1]):
        A, gain = RULES[dsf.zoh](rates[h], m.log_dt[h].exp())
        columns.append(run(A, gain, c[h], x[:, h]) + m.D[h] * x[:, h])
    return torch.stack(columns, 1)


def of_pairs(c):
    return torch.view_as_complex(c.contiguous())


@pytest.mark.parametrize("init", ["lin", "inv", "legs"])
def test_s4d_layer(init):
    m, x = moved(mixers.S4D(3, 4, init=init)), torch.randn(T, 3)
    torch.testing.assert_close(m(x[None])[0][0], block(m, bank(m, x, 2 * of_pairs(m.C))), **CLOSE)


def test_dss_layer():
    m, x = moved(mixers.DSS(3, 4)), torch.randn(T, 3)
    torch.testing.assert_close(m(x[None])[0][0], block(m, bank(m, x, of_pairs(m.W))), **CLOSE)


def test_s4_layer():
    m, x = moved(mixers.S4(3, 4)), torch.randn(T, 3)
    c = torch.stack([2 * m.C[..., 0], -2 * m.C[..., 1]], -1).flatten(1)
    columns = []
    for h in range(3):
        A, write = dense_s4(m.A_log[h], m.A_imag[h], m.p[h], m.B[h], m.log_dt[h])
        state, rows = torch.zeros(4), []
        for t in range(T):
            state = A @ state + write * x[t, h]
            rows.append(c[h] @ state + m.D[h] * x[t, h])
        columns.append(torch.stack(rows))
    torch.testing.assert_close(m(x[None])[0][0], block(m, torch.stack(columns, 1)), **CLOSE)


def test_h3_layer():
    m, x = moved(mixers.H3(3, 4, d_conv=4)), torch.randn(T, 3)
    q, k, v = (x @ m.qkv_proj.weight.T + m.qkv_proj.bias).chunk(3, -1)
    taps = m.conv1d.weight[:, 0]
    past = torch.cat([torch.zeros(3, 3), k])
    k = torch.stack([(past[t : t + 4].T * taps).sum(1) for t in range(T)])
    y = q * bank(m, k * v, 2 * of_pairs(m.C))
    torch.testing.assert_close(m(x[None])[0][0], y @ m.output_linear.weight.T + m.output_linear.bias, **CLOSE)


def unit(m, x, A, gain, c):
    """x_t = A x_{t-1} + gain · B u_t, Re(C x) + D u, GELU and gated linear unit."""
    state, rows = torch.zeros_like(A), []
    for one in x:
        state = A * state + gain * (torch.complex(m.B[:, 0], m.B[:, 1]) @ one.to(A.dtype))
        rows.append((of_pairs(c) @ state).real + m.D * one)
    both = F.gelu(torch.stack(rows), approximate="tanh") @ m.out.weight.T + m.out.bias
    return both[:, :3] * torch.sigmoid(both[:, 3:])


def test_lru_layer():
    m, x = moved(mixers.LRU(3, 4)), torch.randn(T, 3)
    A = torch.exp(torch.complex(-m.nu_log.exp(), m.theta_log.exp()))
    torch.testing.assert_close(m(x[None])[0][0], unit(m, x, A, m.gamma_log.exp(), m.C), **CLOSE)


def test_lru_begins_on_its_ring_with_states_of_variance_one():
    m = mixers.LRU(3, 500, r_min=0.5, r_max=0.8, max_phase=0.3)
    radius, phase = torch.exp(-m.nu_log.exp()), m.theta_log.exp()
    assert radius.min() >= 0.5 and radius.max() <= 0.8 and phase.max() <= 0.3
    torch.testing.assert_close(m.gamma_log.exp() ** 2, 1 - radius**2, **CLOSE)


def test_s5_layer():
    m, x = moved(mixers.S5(3, 8, blocks=2)), torch.randn(T, 3)
    A, gain = RULES[dsf.zoh](torch.complex(m.Lambda_re.clamp(max=-1e-4), m.Lambda_im), m.log_step.exp())
    torch.testing.assert_close(m(x[None])[0][0], unit(m, x, A, gain, 2 * m.C), **CLOSE)


@dsf.recurrence
def linoss(x: Value, A: Param[Pair], dt: Param[Pair], b: Param[Pair], C: Param[Key]) -> System:
    """LinOSS-IM: oscillators y'' = -A y + b x by an implicit step; the states are (√A-scaled velocity, position)."""
    w, step = dsf.sqrt(dsf.abs(A) + 1e-3), dsf.sigmoid(dt)
    angle, gain = step * w, step / (1 + step * step * w * w)
    write = dsf.pair(gain * b / w, gain * step * b)
    return System(A=dsf.rsqrt(1 + angle * angle) * dsf.turn(dsf.atan2(angle, 1)), B=write * x, C=C)


class _Copies(TorchDispatchMode):
    """Refuses tensors of Python's numbers: on a GPU the host waits for such a copy."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten.lift_fresh.default, "numbers were copied from the host"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["S4D", "DSS", "S4", "S5", "LRU", "H3"])
def test_a_layer_s_call_copies_nothing_from_the_host(name):
    layer, x = getattr(mixers, name)(8, 4), torch.randn(1, 70, 8)
    with _Copies():
        y, _ = layer(x, use_cache=False)
        y.sum().backward()
    with pytest.raises(AssertionError, match="copied"), _Copies():
        x.new_tensor([1.0, -1.0])


def test_linoss_is_its_implicit_step():
    """Rusch & Rus (arXiv 2410.03943), equation 3: z_t = z + dt (-A y_t + b x_t), y_t = y + dt z_t."""
    x, (a, dt, b), c = torch.randn(1, T, 1, 1), torch.randn(3, 1, 1), torch.tensor([[0.0, 1.0]])
    stiff, step = a.abs().item() + 1e-3, torch.sigmoid(dt).item()
    z = y = 0.0
    out = []
    for one in x.flatten().tolist():
        y = (y + step * z + step * step * b.item() * one) / (1 + step * step * stiff)
        z = z + step * (-stiff * y + b.item() * one)
        out.append(y)
    for form in ("recurrent", "chunk", "convolution"):
        torch.testing.assert_close(linoss(x, a, dt, b, c, form=form).flatten(), torch.tensor(out), **CLOSE)


def test_sines_and_complex_numbers_take_tokens_too_and_states_go_on():
    @dsf.recurrence
    def spun(x: Value, t: Scalar, b: Pair, q: Key):
        write = dsf.quarter_turn(dsf.pair(b, dsf.sin(t)))
        return System(A=0.9 * dsf.cos(t), B=write * x, C=q)

    assert dsf.check(spun, laws=("forms", "split", "packed", "step"), examples=2).ok


def test_spectra_are_in_the_plane():
    m = mixers.S4D(2, 4)
    found = measures.eigenvalues(m.recurrence.trajectory(**m.inputs(torch.randn(1, 5, 2))))
    rates = torch.complex(-m.A_log.exp(), m.A_imag) * m.log_dt.exp()[:, None]
    expected = torch.cat([rates.exp(), rates.exp().conj()], 1)
    for h in range(2):
        got = found[0, 0, h].flatten()
        assert all((got - one).abs().min() < 1e-12 for one in expected[h].detach())


def test_errors_say_what_would_be_right():
    with pytest.raises(
        TraceError, match="`k` has an entry a place, a pair is made of one number each; annotate it Pair"
    ):

        @dsf.recurrence
        def places(x: Value, k: Key, q: Key):
            return System(A=0.5, B=dsf.pair(k, 0) * x, C=q)

    with pytest.raises(TraceError, match=r"quarter_turn\(s\) turns pairs of the N places of the Key axis"):

        @dsf.recurrence
        def flat(x: Value, s: Scalar, q: Key):
            return System(A=0.5, B=dsf.quarter_turn(s) * x, C=q)

    @dsf.recurrence
    def odd(x: Value, q: Key):
        return System(A=0.5, B=dsf.quarter_turn(q) * x, C=q)

    with pytest.raises(
        InputError, match="pair takes places of the Key axis in pairs, so N must be even, but `q` has N = 3"
    ):
        odd(torch.randn(1, 2, 1, 1), torch.randn(1, 2, 1, 3))
    with pytest.raises(InputError, match="S4D: init is 'fout'; there are 'lin', 'inv', 'legs', 'real'"):
        mixers.S4D(4, 4, init="fout")
    with pytest.raises(InputError, match="S4: d_state 5 must be even"):
        mixers.S4(4, 5)
