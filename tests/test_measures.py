"""Every measure equals its closed form, or a dense float64 computation, on random trajectories of every structure."""

import math
import time
from dataclasses import replace

import mixer_inputs
import pytest
import structures
import torch

import dsf
from dsf import FormError, I, InputError, Key, Param, Scalar, Steps, System, Value, mixers
from dsf.analysis import measures as m
from dsf.analysis.special_cases import CASES
from dsf.analysis.subjects import Subject

ALL = [*(e.recurrence for e in mixers.ZOO), *structures.ALL]
FINITE = [r for r in ALL if not r.spec.is_softmax]
EVERY = pytest.mark.parametrize("r", ALL, ids=lambda r: r.name)
UNDRIVEN = (
    mixers.mamba3,
    mixers.mamba3_mimo,
    mixers.s5,
    mixers.lru,
    mixers.h3,
    structures.dense_write,
    structures.two_writes,
    structures.trapezoid,
    structures.remembered,
)
DRIVEN = [r for r in ALL if r not in UNDRIVEN]  # one input, linear in it
EVERY_DRIVEN = pytest.mark.parametrize("r", DRIVEN, ids=lambda r: r.name)
EVERY_DRIVEN_FINITE = pytest.mark.parametrize("r", [r for r in DRIVEN if r in FINITE], ids=lambda r: r.name)
EVERY_FINITE = pytest.mark.parametrize("r", FINITE, ids=lambda r: r.name)
CLOSE = {"rtol": 1e-8, "atol": 1e-8}
DTYPES = (torch.float64, torch.float32)


def trajectory(r, tokens=6, **options):
    return r.trajectory(**mixer_inputs.sample(r, tokens=tokens, **options))


def dense(t):
    """A of every token [B, T, H, p, N, N], micro-steps multiplied out."""
    rows, micro = t.dense(), t.problem.micro
    steps = rows.unflatten(1, (-1, micro)).unbind(2)
    out = steps[0]
    for step in steps[1:]:
        out = step @ out
    return out


@EVERY_FINITE
def test_eigenvalues_are_those_of_the_dense_transition(r):
    t = trajectory(r)
    values = m.eigenvalues(t)
    expected = torch.linalg.eigvals(dense(t)).movedim(-1, -2)
    values = values.expand(expected.shape)
    assert values.shape[:3] == (2, 6, 2)
    # power sums characterise the set of eigenvalues, whatever its order
    for power in range(1, expected.shape[-2] + 1):
        torch.testing.assert_close((values.to(torch.complex128) ** power).sum(-2), (expected**power).sum(-2), **CLOSE)
    torch.testing.assert_close(
        m.spectral_radius(t).expand(expected.abs().amax(-2).shape), expected.abs().amax(-2), **CLOSE
    )


@EVERY_FINITE
def test_transition_and_propagator_norms_are_the_dense_ones(r):
    t = trajectory(r)
    matrices = dense(t)
    expected = torch.linalg.matrix_norm(matrices, 2)
    torch.testing.assert_close(m.transition_norm(t).expand(expected.shape), expected, **CLOSE)
    product = matrices[:, 2]
    for i, norm in enumerate(m.propagator_norm(t, start=2).unbind(1)):
        product = product if i == 0 else matrices[:, 2 + i] @ product
        expected = torch.linalg.matrix_norm(product, 2)
        torch.testing.assert_close(norm.expand(expected.shape), expected, **CLOSE)


def test_the_norm_of_a_decay_of_one_beside_unit_vectors():
    """|l| |r| = 1 and one d = 1: a half of a half of the first bracket falls on 1, a pole."""
    q, w, a = (torch.zeros(1, 1, 1, 4, dtype=torch.float64) + x for x in (0.0, torch.tensor([100.0, 0, 0, 0]), 0.5))
    t = structures.rank_one.trajectory(q=q, k=q, v=q, w=w, a=a, b=a * torch.tensor([-1.0, 1, 1, 1]))
    expected = torch.linalg.matrix_norm(t.dense(), 2)
    assert 1.1 < expected.item() < 1.4
    torch.testing.assert_close(m.transition_norm(t), expected)


@EVERY_FINITE
def test_lyapunov_exponents_add_up_to_the_log_determinant(r):
    t = trajectory(r, tokens=5)
    exponents = m.lyapunov_exponents(t)
    logs = torch.linalg.slogdet(dense(t)).logabsdet.mean(1)
    finite = logs.isfinite()
    torch.testing.assert_close(exponents.sum(-2).expand(logs.shape)[finite], logs[finite], **CLOSE)
    assert (exponents.diff(dim=-2) <= 0).all() | (exponents == -math.inf).any()


def test_lyapunov_exponents_of_one_repeated_matrix_tend_to_its_log_eigenvalues():
    tokens, k = 400, torch.nn.functional.normalize(torch.randn(1, 1, 1, 3, dtype=torch.float64), dim=-1)
    shape = (1, tokens, 1, 3)
    t = mixers.kda.trajectory(
        q=torch.randn(shape, dtype=torch.float64), k=k.expand(shape), v=torch.randn(shape, dtype=torch.float64),
        g=torch.tensor([-0.1, -0.5, -1.0], dtype=torch.float64).expand(shape),
        beta=torch.full((1, tokens, 1), 0.7, dtype=torch.float64),
    )  # fmt: skip
    expected = m.eigenvalues(t)[0, 0, 0, :, 0].abs().log().sort(descending=True).values
    torch.testing.assert_close(m.lyapunov_exponents(t)[0, 0, :, 0], expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("r", [mixers.kda, structures.turned_blocks], ids=lambda r: r.name)
def test_lyapunov_exponents_of_float32_are_those_of_float64(r):
    """Tokens shrink some directions by 10^8."""
    inputs = mixer_inputs.sample(r, tokens=12)
    strong = "g" if "g" in inputs else "a"
    inputs[strong] = -12 * inputs[strong].abs()
    expected, got = (m.lyapunov_exponents(r.trajectory(**{k: x.to(d) for k, x in inputs.items()})) for d in DTYPES)
    assert got.dtype == torch.float32 and expected.min() < -12
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def test_closed_forms_of_the_delta_family():
    inputs = mixer_inputs.sample(mixers.gated_deltanet)
    t = mixers.gated_deltanet.trajectory(**inputs)
    k2 = (inputs["k"] ** 2).sum(-1)
    alpha, beta = inputs["alpha"], inputs["beta"]
    values = m.eigenvalues(t).squeeze(-1)
    torch.testing.assert_close(values[..., 0], alpha * (1 - beta * k2), **CLOSE)
    torch.testing.assert_close(values[..., 1:], alpha.unsqueeze(-1).expand(*alpha.shape, 2), **CLOSE)
    gates = m.gate_strengths(t)
    torch.testing.assert_close(gates.decay, alpha, **CLOSE)
    torch.testing.assert_close(gates.erase, beta * k2, **CLOSE)
    torch.testing.assert_close(gates.write, beta * k2.sqrt() * inputs["v"].norm(dim=-1), **CLOSE)
    half = m.half_life(t)[..., 0, 0]
    torch.testing.assert_close(half, math.log(0.5) / alpha.log().mean(1), **CLOSE)
    torch.testing.assert_close(m.horizon(t, 0.25)[..., 0, 0], 2 * half, **CLOSE)
    torch.testing.assert_close(m.cumulative_decay(t)[..., 0, 0], alpha.cumprod(1), **CLOSE)


def test_normalised_attention_in_the_papers_form_has_the_ratio_of_etas():
    inputs = mixer_inputs.sample(mixers.normalized_attention_softplus)
    t = mixers.normalized_attention_softplus.trajectory(**inputs)
    eta = torch.nn.functional.softplus(inputs["eta"])
    values = m.eigenvalues(t, paper=True)[..., 0]
    torch.testing.assert_close(values[:, 1:], (eta[:, :-1] / eta[:, 1:]).unsqueeze(-1).expand(-1, -1, -1, 3), **CLOSE)
    assert (m.eigenvalues(t) == 1).all()


def test_a_denominator_that_changes_its_sign_turns_the_papers_eigenvalue_negative():
    @dsf.recurrence
    def signed(q: Key, k: Key, v: Value):
        return System(A=I, B=k * v, C=q, normalize=dsf.ratio)

    q, k, v = torch.randn(3, 1, 20, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    eta = (q * k.cumsum(1)).sum(-1, keepdim=True)
    ratio = eta[:, :-1] / eta[:, 1:]
    found = m.eigenvalues(signed.trajectory(q, k, v), paper=True)[:, 1:, ..., 0]
    assert ratio.min() < 0
    torch.testing.assert_close(found, ratio.expand_as(found))


def test_a_quotients_denominator_is_its_gauge_in_the_papers_form():
    inputs = mixer_inputs.sample(mixers.linear_attention)
    q, k = (torch.nn.functional.elu(inputs[n]) + 1 for n in ("q", "k"))
    eta = (q * k.cumsum(1)).sum(-1)
    values = m.eigenvalues(mixers.linear_attention.trajectory(**inputs), paper=True)[..., 0]
    torch.testing.assert_close(values[:, 1:], (eta[:, :-1] / eta[:, 1:]).unsqueeze(-1).expand(-1, -1, -1, 3), **CLOSE)
    inputs = mixer_inputs.sample(mixers.softmax_attention)
    scores = torch.einsum("bihn,bjhn->bhij", inputs["q"], inputs["k"]) * 3**-0.5
    eta = scores.exp().tril().sum(-1).transpose(1, 2)
    t = mixers.softmax_attention.trajectory(**inputs)
    torch.testing.assert_close(m.eigenvalues(t, paper=True)[:, 1:, :, 0, 0], eta[:, :-1] / eta[:, 1:], **CLOSE)
    assert (m.eigenvalues(t) == 1).all()
    inputs = mixer_inputs.sample(mixers.mlstm)
    f, i = torch.sigmoid(inputs["f"]), inputs["i"].exp()
    dot, n, etas = torch.einsum, torch.zeros(2, 2, 3, dtype=torch.float64), []
    for t in range(7):
        n = f[:, t, :, None] * n + i[:, t, :, None] * inputs["k"][:, t]
        etas.append(dot("bhn,bhn->bh", inputs["q"][:, t], n).mul(3**-0.5).abs().clamp(min=1))
    eta = torch.stack(etas, 1)
    values = m.eigenvalues(mixers.mlstm.trajectory(**inputs), paper=True)[:, 1:, :, 0, 0]
    torch.testing.assert_close(values, f[:, 1:] * eta[:, :-1] / eta[:, 1:], **CLOSE)


@EVERY_DRIVEN
def test_phi_times_the_input_is_the_output(r):
    inputs = mixer_inputs.sample(r)
    torch.testing.assert_close(m.output(r.trajectory(**inputs)), r(**inputs, form="naive"), **CLOSE)


def _above_one(n, d, one):
    return n / dsf.maximum(dsf.abs(d), one)


def turned_gains(q: Key, k: Key, v: Value, i: Scalar, f: Scalar, t: Scalar):
    return System(A=dsf.sigmoid(f) * dsf.turn(t), B=dsf.exp(i) * k * v, C=q, normalize=_above_one)


def quarter_turns(q: Key, k: Key, v: Value, i: Scalar):
    """Its diagonal is nearly zero, and the gains vanish."""
    return System(A=dsf.turn(math.pi / 2), B=dsf.exp(-400 * dsf.abs(i)) * k * v, C=q, normalize=_above_one)


def some_channels_gated(q: Key, k: Key, l: Key, v: Value, u: Value):
    return System(A=0.9, B=k * v + l * (v * u), C=q)


def window_with_skip(q: Key, k: Key, v: Value, b: Scalar, d: Param[Value]):
    b = dsf.sigmoid(b)
    return System(A=0.9, B=k * (b * v), C=q, D=d * b * v - 0.5 * (v * b), window=2)


def gated_window(q: Key, k: Key, v: Value, o: Value):
    return System(A=0.9, B=k * v, C=q * dsf.sigmoid(o), D=v, window=3)


def sink_by_channel(q: Key, k: Key, v: Value, s: Param[Value]):
    weigh, read = dsf.exp_features(k), dsf.exp_features(q)
    return System(A=I, B=weigh * v, C=read, normalize=lambda n, d, one: n / (d + dsf.exp(s) * one))


IN_NO_LIBRARY = [
    turned_gains, quarter_turns, some_channels_gated, window_with_skip, gated_window, sink_by_channel,
]  # fmt: skip


@pytest.mark.parametrize("declared", IN_NO_LIBRARY)
def test_phi_of_declarations_in_no_library(declared):
    r = dsf.recurrence(declared)
    inputs = structures.sample(r, T=24)
    t, y = r.trajectory(**inputs), r(**inputs, form="naive")
    torch.testing.assert_close(m.output(t), y, **CLOSE)
    part = t.select(batch=slice(1, 2), tokens=slice(0, 9), heads=slice(1, 2), channels=slice(1, 2))
    torch.testing.assert_close(m.output(part), y[1:, :9, 1:, 1:], **CLOSE)


def test_a_skip_that_a_windows_weights_cannot_hold_is_refused():
    @dsf.recurrence
    def skips(q: Key, k: Key, v: Value, u: Value):
        return System(A=0.9, B=k * v, C=q, D=u * dsf.sigmoid(v), window=2)

    with pytest.raises(
        FormError, match=r"skips: D = u \* sigmoid\(v\) is no multiple of v, the values that the window"
    ):
        trajectory(skips)


def root_of_squares(n, d, one):
    return n / dsf.sqrt(n * n + d * d + one * one)


@pytest.mark.parametrize(
    "system",
    [
        lambda q, k, v: System(A=0.9, B=k * v, C=q, normalize=root_of_squares),
        lambda q, k, v: System(A=0.9, B=k * v, C=q, normalize=root_of_squares, window=3),
        lambda q, k, v: System(
            A=0.9, B=dsf.exp_features(k) * v, C=dsf.exp_features(q), normalize=lambda n, d, one: (n + one) / (d + one)
        ),
    ],
    ids=["state", "window", "attention"],
)
def test_phi_of_a_rule_that_is_not_linear_is_refused(system):
    @dsf.recurrence
    def bent(q: Key, k: Key, v: Value):
        return system(q, k, v)

    with pytest.raises(FormError, match=r"bent: normalize = .* is not linear in num, so y is no matrix"):
        trajectory(bent).kernel_matrix()


def test_an_input_that_keys_depend_on_drives_nothing():
    @dsf.recurrence
    def bent(q: Key, k: Key, v: Value):
        return System(A=0.9, B=(k + dsf.sum_value(v) * q) * v, C=q)

    assert trajectory(bent).drive is None


def test_phi_does_not_apply_to_an_input_where_none_drives_the_system():
    for r in UNDRIVEN:
        with pytest.raises(InputError, match=f"{r.name}: the system has no single driving input"):
            m.output(trajectory(r))


@EVERY
def test_phi_is_causal_and_its_pictures_are_normalised(r):
    t = trajectory(r)
    phi = m.kernel_matrix(t)
    micro = phi.shape[3] // 6
    later = torch.arange(6)[:, None] < torch.arange(6 * micro)[None] // micro
    assert (phi[:, :, later] == 0).all()
    rows = m.attention_map(t).sum(-1)
    torch.testing.assert_close(rows[rows > 0], torch.ones_like(rows[rows > 0]))


def test_mean_distance_of_a_fixed_decay_is_the_geometric_mean_age():
    one = torch.ones(1, 200, 1, 1, dtype=torch.float64)
    t = mixers.retnet.trajectory(q=one, k=one, v=one, slope=torch.full((1,), 0.2, dtype=torch.float64))
    gamma = math.exp(-0.2)
    assert m.mean_distance(t)[0, 0, -1, 0].item() == pytest.approx(gamma / (1 - gamma), rel=1e-8)


@pytest.mark.parametrize("r", UNDRIVEN, ids=lambda r: r.name)
def test_a_token_is_one_place_whatever_it_writes(r):
    """Where no input drives the system, Phi has a column for each of a token's writes."""
    t, tokens = trajectory(r), 6
    phi = m.kernel_matrix(t).abs()
    by_token = phi.unflatten(3, (tokens, -1)).sum(4)
    torch.testing.assert_close(m.attention_map(t).sum(-1), torch.ones(2, 2, tokens, dtype=torch.float64))
    assert m.attention_map(t).shape == (2, 2, tokens, tokens)
    age = (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs().double()
    expected = (by_token * age[..., None]).sum(3) / by_token.sum(3)
    torch.testing.assert_close(m.mean_distance(t), expected)
    past = phi.shape[3] // tokens * 2
    values = torch.linalg.svdvals(m.kernel_matrix(t).movedim(-1, 2)[..., 2:, :past])
    torch.testing.assert_close(m.effective_state_size(t, at=[2]).entropy[:, :, 0], m.entropy_rank(values))


@pytest.mark.parametrize("part", [slice(0, 5), slice(3, 7), slice(6, None)], ids=str)
def test_places_of_a_part_of_attention_are_those_of_its_tokens(part):
    whole = trajectory(mixers.softmax_attention, tokens=9)
    start, stop, _ = part.indices(9)
    cut = whole.select(tokens=slice(start, None)).select(tokens=slice(0, stop - start))
    torch.testing.assert_close(m.mean_distance(cut), m.mean_distance(whole)[:, :, part])
    expected = m.entropy_rank(torch.linalg.svdvals(m.kernel_matrix(whole)[:, :, part, :, 0][..., 1:, : part.start + 1]))
    torch.testing.assert_close(m.effective_state_size(cut, at=[1]).entropy[:, :, 0, 0], expected)


@EVERY_DRIVEN_FINITE
def test_effective_state_size_is_at_most_the_states_rows(r):
    t = trajectory(r, tokens=12)
    size = m.effective_state_size(t, at=[3, 6], tolerance=1e-9)
    assert size.tolerance.shape[2] == 2
    if r.spec.rule is None and r is not structures.remembered:  # whose Phi has a column for each of a token's writes
        assert size.tolerance.max() <= t.state_size[0]
    assert (size.entropy <= size.tolerance.clamp(min=1) * 1.001 + 1e-6).all()


def test_effective_state_size_of_a_lag_is_its_length():
    taps, tokens = 4, 20
    phi = sum(torch.diag(torch.full((tokens - j,), 1.0 + j, dtype=torch.float64), -j) for j in range(taps))
    sigma = torch.linalg.svdvals(phi[10:, :10])
    assert int((sigma > 1e-9).sum()) == taps - 1
    assert m.entropy_rank(torch.ones(5)).item() == pytest.approx(5)
    assert m.entropy_rank(torch.zeros(5)).item() == 0


@EVERY_FINITE
def test_state_statistics_are_those_of_the_unrolled_states(r):
    t = trajectory(r)
    states = t.states()
    torch.testing.assert_close(m.state_norms(t), states.flatten(3).norm(dim=-1), **CLOSE)
    change = (states.diff(dim=1).flatten(3).norm(dim=-1)) / states[:, :-1].flatten(3).norm(dim=-1)
    torch.testing.assert_close(m.state_change(t), change, **CLOSE)
    ranks = m.effective_rank(t, every=2)
    assert ranks.shape == (2, 3, 2) and (ranks >= 1 - 1e-9).all()


def test_a_state_that_stays_zero_does_not_change():
    inputs = mixer_inputs.sample(mixers.gla, tokens=4)
    inputs["v"][:, :2] = 0
    change = m.state_change(mixers.gla.trajectory(**inputs))
    assert (change[:, 0] == 0).all() and change[:, 1].isinf().all() and change[:, 2].isfinite().all()


def test_effective_rank_counts_equal_directions():
    eye = torch.eye(3, dtype=torch.float64)[None, :, None]
    t = mixers.unnormalized_linear_attention.trajectory(q=eye, k=eye, v=eye)
    torch.testing.assert_close(m.effective_rank(t)[0, :, 0], torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))


@EVERY_FINITE
def test_gates_agree_with_the_dense_system(r):
    t = trajectory(r)
    gates = m.gate_strengths(t)
    written = t.injection.flatten(3).norm(dim=-1).unflatten(1, (6, -1)).sum(2)
    torch.testing.assert_close(gates.write, written.expand(gates.write.shape), **CLOSE)
    if t.transition.left is None:
        assert (gates.erase == 0).all()
    if t.transition.left is not None and t.transition.left.shape[-1] == 1 and t.transition.decay.shape[-1] == 1:
        n = t.state_size[0]
        decays = t.token_transition
        base = torch.linalg.det(replace(decays, left=None, right=None).to_dense(n).expand(2, 6, 2, 1, n, n)).squeeze(-1)
        kept = (torch.linalg.det(dense(t)).squeeze(-1) / base).abs()
        torch.testing.assert_close(gates.erase, 1 - kept, **CLOSE)


@pytest.mark.parametrize("r", [mixers.gated_deltanet, mixers.gated_delta_product], ids=lambda r: r.name)
def test_a_token_that_clears_the_state_erases_nothing_more(r):
    inputs = mixer_inputs.sample(r)
    there = m.gate_strengths(r.trajectory(**inputs))
    inputs["alpha"][:, 2] = 0
    gates = m.gate_strengths(r.trajectory(**inputs))
    assert (gates.decay[:, 2] == 0).all() and gates.erase.isfinite().all()
    assert r is mixers.gated_delta_product or (gates.erase[:, 2] == 0).all()  # its later steps erase what was written
    torch.testing.assert_close(gates.erase[:, 3:], there.erase[:, 3:], **CLOSE)


@pytest.mark.parametrize("n", [4, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("keyed", [False, True], ids=["scalar", "key"])
def test_gates_of_turned_pairs_are_those_without_turns_where_decays_are_0_too(keyed, dtype, n):
    """They were nan at a decay of 0, and where products of N decays left the range of numbers."""
    from dsf import I, Key, Pair, Scalar, System, Value, diag, outer, turn

    @dsf.recurrence
    def turned(q: Key, k: Key, v: Value, g: Key if keyed else Scalar, b: Scalar, t: Pair):
        return System(A=(I - b * outer(k, k)) @ ((diag(g) if keyed else g) @ turn(t)), B=k * v, C=q)

    @dsf.recurrence
    def plain(q: Key, k: Key, v: Value, g: Key if keyed else Scalar, b: Scalar):
        return System(A=(I - b * outer(k, k)) @ (diag(g) if keyed else g * I), B=k * v, C=q)

    q, k = torch.randn(2, 2, 6, 3, n, dtype=dtype)
    k, (v, t) = torch.nn.functional.normalize(k, dim=-1), torch.randn(2, 2, 6, 3, n // 2, dtype=dtype)
    g, b = torch.rand(2, 6, 3, *[n] * keyed, dtype=dtype), torch.rand(2, 6, 3, dtype=dtype)
    g[:, 1], g[:, 3], g[:, 4] = 0, 1e-30, 1e-6
    if keyed:
        g[:, 2, :, 0] = 0
    got, expected = (
        m.gate_strengths(r.trajectory(*x)) for r, x in ((turned, (q, k, v, g, b, t)), (plain, (q, k, v, g, b)))
    )
    assert (got.erase[:, 1] == 0).all() and (got.erase[:, 2:] > 0).all()
    torch.testing.assert_close(got.erase, expected.erase, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-6)
    if not keyed:
        torch.testing.assert_close(got.decay, expected.decay, rtol=1e-5, atol=0.0)


SIZES = [
    ("softmax_attention", {"heads": 16, "N": 128, "P": 128, "context": 4096}, 2 * 4096 * 16 * 128),
    ("softmax_attention", {"heads": 16, "N": 128, "P": 128, "context": 4096, "window": 512}, 2 * 512 * 16 * 128),
    ("softmax_attention", {"heads": 16, "N": 128, "P": 128, "context": 10, "key_heads": 4}, 2 * 10 * 4 * 128),
    ("gated_deltanet", {"heads": 16, "N": 128, "P": 64, "context": 9999}, 16 * 128 * 64),
    ("s6", {"heads": 1, "N": 16, "P": 4096}, 65536),
    ("qlstm", {"heads": 1, "P": 2048}, 2048),
    ("rg_lru", {"heads": 4, "P": 512, "conv": 2048 * 3}, 2048 * 4),
]


@pytest.mark.parametrize("name, sizes, numbers", SIZES)
def test_state_sizes_are_the_tables(name, sizes, numbers):
    found = m.state_size(mixers.get(name).recurrence, **sizes)
    assert found.numbers == numbers and found.bytes == 4 * numbers


@dsf.recurrence
def fading_window(q: Key, k: Key, v: Value):
    return System(A=0.9, B=k * v, C=q, window=4)


@dsf.recurrence
def gained_window(q: Key, k: Key, v: Value, i: Scalar):
    guard = {"normalize": lambda num, den, one: num / dsf.maximum(dsf.abs(den), one), "drive": v}
    return System(A=I, B=dsf.exp(i) * k * v, C=q, window=4, **guard)


@dsf.recurrence
def turned_attention(q: Key, k: Key, v: Value, s: Scalar, t: Param[dsf.Pair]):
    a = dsf.sigmoid(s) * dsf.turn(t)
    return System(A=a, B=dsf.exp_features(k) * v, C=dsf.exp_features(q), normalize=dsf.ratio)


CACHES = [fading_window, gained_window, turned_attention]


@pytest.mark.parametrize("r", CACHES, ids=lambda r: r.name)
def test_sizes_of_caches_are_those_of_the_states_and_of_the_formula(r):
    inputs = mixer_inputs.sample(r, batch=1, tokens=6)
    state = r(**inputs, return_state=True)[1]
    sizes = {"heads": 2, "N": inputs["k"].shape[-1], "P": 4}
    subject = Subject(r.name, r)
    numbers = {"T": 6, "H": 2, "N": sizes["N"], "P": 4}
    assert m.state_size(r, 6, **sizes).numbers == state.numel() == subject.state_numbers(6, **sizes)
    assert eval(subject.state_formula().replace("·", "*"), numbers) == state.numel()


@EVERY
def test_costs_name_every_form(r):
    found = m.costs(r, T=256, heads=2, N=8, P=8)
    assert [c.form for c in found] == list(r.forms)
    assert all(c.flops > 0 and c.bytes > 0 for c in found)


def test_a_step_of_ssd_costs_what_one_counts():
    steps = {c.form: c for c in m.costs(mixers.ssd, T=100, heads=3, N=8, P=4)}
    n_p = 8 * 4
    assert steps["recurrent"].flops == 3 * (3 + 2) * n_p  # decay 1, write 2, read 2 a number of the state
    inputs = 3 * (4 + 1 + 8 + 8 + 4) * 4 + 3 * 3 * 4 / 100  # x, dt, b, c, y a token; three numbers a head once
    assert steps["recurrent"].bytes == pytest.approx(inputs + 2 * 3 * n_p * 4)


@pytest.mark.parametrize("window", [None, 10])
def test_a_step_of_attention_reads_its_cache_and_writes_one_token(window):
    @dsf.recurrence
    def attention(q: Key, k: Key, v: Value):
        weigh, read = dsf.exp_features(k), dsf.exp_features(q)
        return System(A=I, B=weigh * v, C=read, normalize=dsf.ratio, window=window)

    steps = {c.form: c for c in m.costs(attention, T=100, heads=3, N=8, P=4)}
    token, read = 3 * (8 + 4) * 4, sum(min(t, window or t) for t in range(1, 101)) / 100
    assert steps["recurrent"].bytes == pytest.approx(3 * (8 + 8 + 4 + 4) * 4 + token * (read + 1))
    plan = attention.plan(T=100, H=3, N=8, P=4)
    assert m.state.step_bytes(plan, 100) == pytest.approx(token * (min(100, window or 100) + 1))


def test_parameters_are_counted_once():
    assert m.parameter_count(torch.nn.Linear(3, 4)) == 16


def test_gated_deltanet_at_alpha_one_is_deltanet():
    inputs = mixer_inputs.sample(mixers.deltanet)
    translate = lambda x: {**x, "alpha": torch.ones_like(x["beta"])}  # noqa: E731
    assert m.special_case(mixers.gated_deltanet, mixers.deltanet, inputs, translate) < 1e-14
    half = lambda x: {**x, "alpha": torch.full_like(x["beta"], 0.5)}  # noqa: E731
    assert m.special_case(mixers.gated_deltanet, mixers.deltanet, inputs, half) > 1e-2
    a, b = mixers.deltanet.trajectory(**inputs), mixers.gated_deltanet.trajectory(**translate(inputs))
    assert m.phi_distance(a, b).max() < 1e-14
    assert m.phi_distance(a, mixers.gated_deltanet.trajectory(**half(inputs))).min() > 1e-2


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.general} -> {case.special}")
def test_special_cases_are_what_the_table_says(case):
    assert case.error() < 1e-13


@EVERY_DRIVEN_FINITE
def test_a_small_state_embeds_in_a_larger_one(r):
    t = trajectory(r)
    size, n = t.state_size[0], r.spec.keys_of(7)
    wide = m.embed(t, n)
    assert wide.state_size[0] == n
    torch.testing.assert_close(m.kernel_matrix(wide), m.kernel_matrix(t), rtol=1e-12, atol=1e-12)
    assert (wide.states()[..., size:, :] != 0).any()
    with pytest.raises(InputError, match="cannot be embedded in 0 rows"):
        m.embed(t, 0)


def test_taylor_error_is_that_of_the_finite_system_and_vanishes():
    inputs = mixer_inputs.sample(mixers.softmax_attention)
    t = mixers.softmax_attention.trajectory(**inputs)
    errors = m.taylor_error(t, [0, 1, 2, 12])
    exact = mixers.softmax_attention(**inputs)
    for order, error in zip((0, 1, 2), errors, strict=False):
        y = mixers.softmax_attention.taylor(order)(**inputs)
        expected = (y - exact).abs().max() / (exact.max() - exact.min())
        assert error == pytest.approx(expected.item(), rel=1e-8)
    assert errors[-1] < 1e-6 < errors[2] < errors[0]


@pytest.mark.parametrize(
    "r", [mixers.sink_attention, mixers.softmax_one, mixers.alibi, mixers.fox], ids=lambda r: r.name
)
def test_taylor_error_of_other_than_plain_attention_is_refused(r):
    """With a sink errors did not vanish for any order."""
    with pytest.raises(InputError, match=f"{r.name}: a Taylor truncation needs plain softmax attention"):
        m.taylor_error(trajectory(r), [1])


def test_taylor_error_of_a_window_of_a_finite_state_is_refused():
    @dsf.recurrence
    def windowed(q: Key, k: Key, v: Value):
        return System(A=I, B=k * v, C=q, window=3)

    with pytest.raises(InputError, match="windowed: a Taylor truncation needs plain softmax attention"):
        m.taylor_error(trajectory(windowed), [1])


def test_taylor_error_counts_keys_whose_weights_vanish():
    """Cut series give them weights that do not."""
    q, k = torch.tensor([1.0, 1.0])[None, :, None, None], torch.tensor([-150.0, 0.0])[None, :, None, None]
    v = torch.tensor([1.0, 0.0])[None, :, None, None]
    y = mixers.softmax_attention.taylor(1)(q, k, v)
    error = m.taylor_error(mixers.softmax_attention.trajectory(q, k, v), [1])[0]
    assert error == pytest.approx(float(y[0, 1]), rel=1e-5)


@EVERY
def test_a_selection_is_the_same_system_on_fewer_heads_and_tokens(r):
    t = trajectory(r)
    part = t.select(batch=slice(1, 2), heads=slice(1, 2), tokens=slice(0, 4))
    phi = m.kernel_matrix(t)
    columns = phi.shape[3] // 6 * 4 if t.attention is None else 6
    torch.testing.assert_close(m.kernel_matrix(part), phi[1:2, 1:2, :4, :columns], **CLOSE)
    if t.attention is None:
        torch.testing.assert_close(part.states(), t.states()[1:2, :4, 1:2], **CLOSE)


def test_states_start_from_the_state_that_was_given():
    inputs = mixer_inputs.sample(mixers.gated_deltanet)
    whole = mixers.gated_deltanet.trajectory(**inputs).states()
    head = {n: x[:, :3] for n, x in inputs.items()}
    tail = {n: x[:, 3:] for n, x in inputs.items()}
    _, state = mixers.gated_deltanet(**head, return_state=True)
    rest = mixers.gated_deltanet.trajectory(**tail, initial_state=state).states()
    torch.testing.assert_close(rest, whole[:, 3:], **CLOSE)


@pytest.mark.parametrize("of", ["decay", "transition"])
def test_a_decay_of_nan_is_no_half_life(of):
    """It was left out of the mean, or counted as never, and where all were nan as cleared at once."""
    inputs = mixer_inputs.sample(mixers.gla)
    there = m.half_life(mixers.gla.trajectory(**inputs), of)
    inputs["g"][1, 2] = math.nan
    lives = m.half_life(mixers.gla.trajectory(**inputs), of)
    assert lives[1].isnan().all()
    torch.testing.assert_close(lives[0], there[0])


@pytest.mark.parametrize(
    "r, name",
    [(mixers.kda, "beta"), (mixers.delta_product, "beta"), (structures.turned_blocks, "a"), (mixers.deltanet, "beta")],
    ids=lambda x: getattr(x, "name", ""),
)
def test_a_token_that_is_not_finite_has_nan_and_leaves_the_others(r, name):
    """torch raises for a whole batch of matrices."""
    inputs = mixer_inputs.sample(r)
    there = r.trajectory(**inputs)
    inputs[name][1, 2] = math.nan
    t = r.trajectory(**inputs)
    assert m.eigenvalues(t)[1, 2].isnan().any()
    for measure in (m.spectral_radius, m.transition_norm, m.propagator_norm, m.effective_rank):
        got, expected = measure(t), measure(there)
        assert got[1, 2].isnan().any(), measure.__name__
        torch.testing.assert_close(got[0], expected[0], **CLOSE)
        torch.testing.assert_close(got[1, :2], expected[1, :2], **CLOSE)
    with pytest.raises(InputError, match="Phi has numbers that are not finite, at or behind token 3"):
        m.effective_state_size(t)


def test_long_gated_deltanet_spectrum_is_quick():
    shape = (1, 2048, 16)
    q, k, v = (torch.randn(*shape, 128) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    t = mixers.gated_deltanet.trajectory(q, k, v, torch.rand(shape), torch.rand(shape))
    start = time.perf_counter()
    assert m.eigenvalues(t).shape == (1, 2048, 16, 128, 1)
    assert time.perf_counter() - start < 5


def test_bad_requests_say_what_is_wrong():
    t = trajectory(mixers.gated_deltanet)
    with pytest.raises(InputError, match="0 < eps < 1, got 2"):
        m.horizon(t, 2)
    with pytest.raises(InputError, match="token 6 has no past or no future"):
        m.effective_state_size(t, at=[6])
    with pytest.raises(InputError, match="plain softmax attention"):
        m.taylor_error(t, [1])
    for orders in ([], [2, -1]):
        with pytest.raises(InputError, match=r"orders are \[.*\], expected at least one, from 0 on"):
            m.taylor_error(trajectory(mixers.softmax_attention), orders)
    with pytest.raises(InputError, match="of is 'decays', expected 'decay' or 'transition'"):
        m.half_life(t, of="decays")
    with pytest.raises(InputError, match="start is 6, expected 0 ≤ start < 6"):
        m.propagator_norm(t, start=6)
    with pytest.raises(InputError, match="every is 0, expected at least 1"):
        m.effective_rank(t, every=0)
    with pytest.raises(InputError, match="context is -3, expected at least 0"):
        m.state_size(mixers.softmax_attention, -3, heads=2)
    with pytest.raises(InputError, match="at names no token"):
        m.effective_state_size(t, at=[])
    with pytest.raises(FormError, match="features are infinite"):
        m.half_life(trajectory(mixers.softmax_attention))
    for r in (mixers.fox, mixers.alibi):
        with pytest.raises(FormError, match="features are infinite"):
            m.gate_strengths(trajectory(r))
    with pytest.raises(FormError, match=r"a window forgets whole tokens, .* not tensors; use kernel_matrix\(\)$"):
        m.gate_strengths(trajectory(dsf.recurrence(gated_window)))
    big = {n: torch.rand(1, 2, 1, 300) for n in ("q", "k", "v", "g")}
    with pytest.raises(InputError, match="the limit is N = 256"):
        m.lyapunov_exponents(mixers.kda.trajectory(**big, beta=torch.rand(1, 2, 1)))


def test_percentiles_keep_infinities():
    x = torch.tensor([1.0, 2.0, 3.0, math.inf])
    assert m.percentiles(x, (0, 50, 100)).tolist() == [1.0, 3.0, math.inf]


def test_percentiles_are_at_the_places_that_they_name():
    assert m.percentiles(torch.arange(100.0), tuple(range(100))).tolist() == list(range(100))


def test_matrices_of_writes_with_both_axes_and_of_rules_that_read_inputs():
    @dsf.recurrence
    def whole(q: Key, w: Steps[Key, Value, 1], a: Scalar):
        return System(A=dsf.sigmoid(a), B=w[0], C=q)

    @dsf.recurrence
    def gated_quotient(q: Key, k: Key, v: Value, o: Value):
        return System(A=I, B=dsf.elu1(k) * v, C=dsf.elu1(q), normalize=lambda n, d: dsf.sigmoid(o) * n / d)

    q, k = torch.randn(2, 1, 5, 2, 3)
    v, o = torch.randn(2, 1, 5, 2, 4)
    w = (k.unsqueeze(-1) * v.unsqueeze(-2)).unsqueeze(2)
    given = {"q": q, "w": w, "a": torch.randn(1, 5, 2)}
    trajectory = whole.trajectory(**given)
    assert trajectory.drive is None, "no Value input drives it"
    torch.testing.assert_close(trajectory.states()[:, -1], whole(**given, return_state=True)[1])
    with pytest.raises(FormError, match=r"gated_quotient: normalize = .* reads inputs"):
        gated_quotient.trajectory(q, k, v, o).kernel_matrix()
