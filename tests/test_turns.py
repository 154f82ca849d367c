"""Turns of key pairs and previous values, each against a computation of its own; states, errors, spectra."""

import math

import pytest
import torch
import torch.nn.functional as F

import dsf
from dsf import (
    I,
    InputError,
    Key,
    Pair,
    Param,
    Scalar,
    Steps,
    System,
    TraceError,
    Value,
    compose,
    diag,
    mixers,
    outer,
    prev,
    sigmoid,
    softplus,
    turn,
)
from dsf.analysis import measures as m
from dsf.checking.examples import Example
from dsf.checking.laws import LAWS
from dsf.checking.measure import Subject
from dsf.checking.ranges import ranges_of
from dsf.kernels.turns import SumsApart, turn_pairs, turned_back

CLOSE = {"rtol": 1e-11, "atol": 1e-11}


@dsf.recurrence
def rotary(q: Key, k: Key, v: Value, w: Param[Pair]) -> System:
    """Linear attention with RoPE: nothing decays, every token turns the state by the same angles."""
    return System(A=turn(w), B=k * v, C=q)


@dsf.recurrence
def spiral(q: Key, k: Key, v: Value, a: Scalar, t: Pair) -> System:
    return System(A=sigmoid(a) * turn(t), B=k * v, C=q)


@dsf.recurrence
def ellipses(q: Key, k: Key, v: Value, a: Key, t: Pair) -> System:
    """Decays that differ within a pair: no gauge."""
    return System(A=diag(sigmoid(a)) @ turn(t), B=k * v, C=q)


@dsf.recurrence
def turned_kda(q: Key, k: Key, v: Value, g: Pair, b: Scalar, t: Scalar) -> System:
    return System(A=(I - sigmoid(b) * outer(k, k)) @ diag(sigmoid(g)) @ turn(t), B=k * (sigmoid(b) * v), C=q)


@dsf.recurrence
def two_tokens(q: Key, k: Key, v: Value, a: Scalar) -> System:
    return System(A=sigmoid(a), B=0.5 * k * v + 0.5 * prev(k * v), C=q)


@dsf.recurrence
def taps(x: Value, w: Param[Value], u: Param[Value]) -> System:
    """A convolution of three taps, in front of a sum."""
    return System(A=0.5, B=x + w * prev(x) + u * prev(prev(x)), C=1)


LINES = [rotary, spiral, ellipses, turned_kda, two_tokens, taps, mixers.mamba3, mixers.mamba3_mimo_of(2)]
EVERY = pytest.mark.parametrize("r", LINES, ids=lambda r: r.name)


def sample(r, B=2, T=9, H=2, N=6, P=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = {"B": B, "T": T, "H": H, "N": N, "N/2": N // 2, "P": P}
    found = {}
    for i in r.spec.inputs:
        shape = [sizes.get(axis, i.kind.steps) for axis in i.kind.layout()]
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        found[i.name] = F.normalize(x, dim=-1) if i.name == "k" else x
    return found


def as_complex(x):
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def complex_run(q, k, v, a):
    """The state as N / 2 complex rows: h = a h + k v, y = Re(conj(q) h). a: [B, T, H, N/2]."""
    q, k, v = as_complex(q), as_complex(k), v.to(torch.complex128)
    h, out = 0, []
    for t in range(q.shape[1]):
        h = a[:, t, :, :, None] * h + k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append((q[:, t, :, :, None].conj() * h).real.sum(2))
    return torch.stack(out, dim=1)


@pytest.mark.parametrize("form", spiral.forms)
def test_a_turn_is_a_complex_decay(form):
    x = sample(spiral)
    a = torch.sigmoid(x["a"])[..., None] * torch.exp(1j * x["t"])
    torch.testing.assert_close(spiral(**x, form=form), complex_run(x["q"], x["k"], x["v"], a), **CLOSE)


def rotated(x, angle):
    return torch.view_as_real(as_complex(x) * torch.exp(1j * angle)).flatten(-2)


def test_rotary_linear_attention_is_attention_of_rotated_queries_and_keys():
    x = sample(rotary, T=70)
    places = -torch.arange(70)[None, :, None, None] * x["w"]  # a state that turns forward is keys that turn back
    q, k = rotated(x["q"], places), rotated(x["k"], places)
    scores = torch.einsum("bihn,bjhn->bhij", q, k).tril()
    torch.testing.assert_close(rotary(**x), torch.einsum("bhij,bjhp->bihp", scores, x["v"]), **CLOSE)


@pytest.mark.parametrize("form", mixers.mamba3.forms)
def test_mamba3_is_its_papers_recurrence(form):
    """h_t = α_t R_t (h_{t-1} + (1 - λ_t) Δ_t B_{t-1} x_{t-1}) + λ_t Δ_t B_t x_t in complex numbers."""
    x = sample(mixers.mamba3)
    delta, share = F.softplus(x["dt"] + x["dt_bias"]), torch.sigmoid(x["lam"])
    decay = torch.exp(-delta * F.softplus(x["a"]).clamp(min=1e-4))
    a = decay[..., None] * torch.exp(1j * delta[..., None] * math.pi * x["angle"].tanh())
    b, c, u = as_complex(x["b"]), as_complex(x["c"]), x["x"].to(torch.complex128)
    h, before, out = 0, 0, []
    for t in range(u.shape[1]):
        write = b[:, t, :, :, None] * u[:, t, :, None, :]
        late, own = ((1 - share) * delta)[:, t, :, None, None], (share * delta)[:, t, :, None, None]
        h = a[:, t, :, :, None] * (h + late * before) + own * write
        out.append((c[:, t, :, :, None].conj() * h).real.sum(2) + x["D"][:, None] * x["x"][:, t])
        before = write
    torch.testing.assert_close(mixers.mamba3(**x, form=form), torch.stack(out, dim=1), **CLOSE)


def test_previous_values_are_the_inputs_one_token_later():
    x = sample(two_tokens)
    h, out = 0, []
    write = x["k"].unsqueeze(-1) * x["v"].unsqueeze(-2)
    late = torch.cat([torch.zeros_like(write[:, :1]), write[:, :-1]], dim=1)
    for t in range(9):
        h = torch.sigmoid(x["a"])[:, t, :, None, None] * h + 0.5 * write[:, t] + 0.5 * late[:, t]
        out.append((x["q"][:, t].unsqueeze(-1) * h).sum(-2))
    for form in two_tokens.forms:
        torch.testing.assert_close(two_tokens(**x, form=form), torch.stack(out, dim=1), **CLOSE)


def test_previous_values_make_a_convolution():
    x = sample(taps)
    u, one = x["x"], torch.ones_like(x["w"])
    weight = torch.stack([x["u"], x["w"], one], dim=-1).flatten(0, 1).unsqueeze(1)
    signal = F.pad(u.flatten(2).mT, (2, 0))
    written = F.conv1d(signal, weight, groups=weight.shape[0]).mT.unflatten(-1, u.shape[2:])
    h, out = 0, []
    for t in range(9):
        h = 0.5 * h + written[:, t]
        out.append(h)
    torch.testing.assert_close(taps(**x), torch.stack(out, dim=1), **CLOSE)


@EVERY
@pytest.mark.parametrize("law", ["forms", "causality", "split", "packed", "step", "heads", "contract"])
def test_laws(r, law):
    timed = [i.name for i in r.spec.inputs if i.kind.time]
    example = Example(
        batch=2, tokens=11 if law == "step" else 38, heads=2, n=4, p=3, initial=True, cuts=(1, 8), seed=3,
        groups={timed[-1]: 1} if len(timed) > 1 else {},
    )  # fmt: skip
    subject = Subject(r, ranges_of(r.spec))
    for form in ["recurrent"] if law == "step" else r.forms:
        broken = [x for x in LAWS[law].measure(subject, form, example) if not x.ok]
        assert not broken, f"{form}: {broken}"


@dsf.recurrence
def lagged_pairs(q: Key, k: Key, v: Value, r: Pair, t: Pair) -> System:
    """The product of a Pair and a Key of the token before, and turns of that token's angles."""
    return System(A=turn(prev(t)), B=prev(r * k * v), C=q)


@dsf.recurrence
def lagged_ellipses(q: Key, k: Key, v: Value, a: Key, t: Pair) -> System:
    return System(A=diag(sigmoid(a)) @ turn(prev(t)), B=k * v, C=q)


@pytest.mark.parametrize("r", [lagged_pairs, lagged_ellipses], ids=lambda r: r.name)
def test_pairs_of_the_token_before(r):
    """Their forms end in no error, and agree on the gradient of what the state holds of them."""
    subject, example = Subject(r, ranges_of(r.spec)), Example(tokens=9, n=4, p=3, initial=True, seed=3)
    for form in r.forms:
        broken = [x for x in LAWS["forms"].measure(subject, form, example) if not x.ok]
        assert not broken, f"{form}: {broken}"


def test_states_are_the_declarations_and_hold_factors_not_products():
    x = sample(two_tokens, T=5, N=6, P=4)
    _, state = two_tokens(**x, return_state=True)
    assert state.shape[2:] == two_tokens.state_shape(N=6, P=4) == (6, 4 + 1 + 1)
    torch.testing.assert_close(state[..., 4], x["k"][:, -1])
    torch.testing.assert_close(state[..., :4, 5], x["v"][:, -1])
    torch.testing.assert_close(two_tokens.true_state(state, 4), state[..., :4])
    y, after = spiral(**sample(spiral), return_state=True)
    torch.testing.assert_close(spiral.trajectory(**sample(spiral)).states()[:, -1], after, **CLOSE)
    state = state.contiguous()
    token = {name: value[:, 0] for name, value in sample(two_tokens, seed=1).items()}
    with torch.no_grad():
        y, new = two_tokens.step(state, **token)
        same, kept = two_tokens.step(state, **token, in_place=True)
    assert kept is state
    torch.testing.assert_close((same, kept), (y, new))


def test_angles_of_long_sequences_are_summed_without_loss():
    """A float32 sum of 4,096 angles of up to 30 radians would be off by 1e-2."""
    x = {name: value.float() for name, value in sample(spiral, B=1, T=4096).items()}
    x["t"] = 30 * x["t"].abs()
    x["a"] = x["a"].abs() + 6
    exact = spiral(**{name: value.double() for name, value in x.items()}, form="recurrent")
    error = (spiral(**x, form="chunk").double() - exact).norm() / exact.norm()
    assert error < 3e-6


@dsf.recurrence
def ringing(q: Key, k: Key, v: Value, a: Scalar, w: Param[Pair]):
    return System(A=0.5 * sigmoid(a) * turn(w), B=k * v, C=q)


@dsf.recurrence
def ringing_faster(q: Key, k: Key, v: Value, a: Scalar, w: Param[Pair]):
    return System(A=0.5 * sigmoid(a) * turn(softplus(a) * w), B=k * v, C=q)


@pytest.mark.parametrize("ringing", [ringing, ringing_faster], ids=["params alone", "params and tokens"])
@pytest.mark.parametrize("form", ["recurrent", "scan", "chunk", "kernel"])
def test_gradients_of_angles_of_params_keep_their_digits(form, ringing):
    """Sums over 600 tokens of float32 numbers would not: what the state of a few tokens' life gives cancels in them."""

    x = {name: value.float() for name, value in sample(ringing, B=1, T=600).items()}
    found = []
    for inputs, how in ((x, form), ({n: v.double() for n, v in x.items()}, "naive")):
        w = inputs["w"].clone().requires_grad_()
        y = ringing(**inputs | {"w": w}, form=how)
        assert y.dtype == w.dtype
        found.append(torch.autograd.grad(y.square().sum(), w)[0].double())
    assert (found[0] - found[1]).norm() <= 3e-6 * found[1].norm()


@pytest.mark.parametrize("dtype, tokens", [("float32", 1), ("bfloat16", 1), ("bfloat16", 9)])
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_angles_of_steps_that_forget_everything_have_the_gradients_that_are_left(form, dtype, tokens):
    """A step of e^12 turns by 1e5 radians what it takes to 0: 6e-8 of that is more than the gradient."""
    s4d = dsf.mixers.s4d
    subject = Subject(s4d, ranges_of(s4d.spec))
    for seed in (3, 574):
        example = Example(tokens=tokens, p=2, dtype=dtype, regimes={"dt": "saturated"}, seed=seed)
        found = subject.outcome(form, example).grads["A_imag"].double()
        exact = subject.outcome("naive", example).grads["A_imag"].double()
        torch.testing.assert_close(found, exact, rtol=2e-5 if dtype == "float32" else 2e-2, atol=1e-9)


def test_eigenvalues_are_complex_pairs():
    x = sample(spiral)
    found = m.eigenvalues(spiral.trajectory(**x)).squeeze(-1)
    turns = torch.sigmoid(x["a"])[..., None] * torch.exp(1j * x["t"])
    first, second = found.unflatten(-1, (-1, 2)).unbind(-1)  # of each pair, a e^{±iθ}
    torch.testing.assert_close(first, second.conj(), **CLOSE)
    torch.testing.assert_close(torch.where(turns.imag > 0, first, second), turns, **CLOSE)
    for r in (ellipses, turned_kda):
        t = r.trajectory(**sample(r))
        dense = torch.linalg.eigvals(t.dense())
        found = m.eigenvalues(t).movedim(-1, -2).to(dense.dtype)
        gap = (found.unsqueeze(-1) - dense.unsqueeze(-2)).abs()
        assert gap.amin(-1).max() < 1e-9 and gap.amin(-2).max() < 1e-9


def test_reports_show_complex_eigenvalues_in_the_plane():
    pytest.importorskip("matplotlib")
    from dsf.analysis.compare.pictures import eigenvalue_histogram
    from dsf.analysis.probe import SQUARES, of_eigenvalues

    ring = 0.9 * torch.exp(1j * torch.linspace(-math.pi, math.pi, 400, dtype=torch.float64))
    found = of_eigenvalues(ring)
    shares = torch.tensor(found.plane.shares)
    places = (torch.arange(SQUARES) + 0.5) / SQUARES * 2.2 - 1.1
    radius = (places[:, None] ** 2 + places[None] ** 2).sqrt()
    assert shares.sum().item() == pytest.approx(1)
    assert (shares[(radius < 0.8) | (radius > 1)] == 0).all()
    assert len(eigenvalue_histogram(found, "#123456", True).axes[0].images) == 1
    assert "plane" not in of_eigenvalues(torch.rand(9)).to_dict()


def test_what_lies_far_off_the_plane_is_at_the_edge_that_it_is_nearest_to():
    from dsf.analysis.probe import plane_of

    values = torch.tensor([1j, complex(math.inf, 0), complex(0, -math.inf), complex(1e30, 1e30), math.nan])
    shares = torch.tensor(plane_of(values).shares)
    last, middle = len(shares) - 1, len(shares) // 2
    assert [shares[middle, last], shares[0, middle], shares[last, last]] == [0.25] * 3 and shares.sum() == 1


def test_plans_name_what_runs():
    assert mixers.mamba3.spec.structure == "turned scalar decay"
    plan = mixers.mamba3.plan(T=256, H=4, N=64, P=64)
    assert (plan.form, plan.kernel, plan.state_shape) == ("chunk", "decay chunks", (1, 4, 64, 66))
    assert "previous values and turned inputs are made first" in plan.reason
    assert ellipses.plan(T=256).kernel == "scan of 2 x 2 blocks"


def test_the_block_is_one_function_of_its_tokens():
    torch.manual_seed(0)
    for options in ({}, {"n_groups": 2, "rope_fraction": 1.0, "is_outproj_norm": True}):
        layer = mixers.Mamba3(32, d_state=16, headdim=16, **options).double()
        x = torch.randn(1, 11, 32, dtype=torch.float64)
        y, state = layer(x)
        parts, carried, tokens, now = [], None, [], None
        for piece in x.split([3, 1, 7], dim=1):
            out, carried = layer(piece, carried)
            parts.append(out)
        for token in x.unbind(1):
            out, now = layer.step(token, now)
            tokens.append(out)
        torch.testing.assert_close(torch.cat(parts, dim=1), y)
        torch.testing.assert_close(torch.stack(tokens, dim=1), y)
        packed, _ = layer(x, cu_seqlens=torch.tensor([0, 4, 11]))
        torch.testing.assert_close(packed, torch.cat([layer(x[:, :4])[0], layer(x[:, 4:])[0]], dim=1))
        assert layer.state_size() == state.recurrent[0].numel()
    with pytest.raises(ValueError, match="rope_fraction is"):
        mixers.Mamba3(32, d_state=16, headdim=16, rope_fraction=0.3)


@dsf.recurrence
def mimo(q1: Key, q2: Key, k1: Key, k2: Key, v: Value, w: Value, u: Value, a: Scalar, t: Pair):
    write = k1 * (w * v) + k2 * v
    return System(A=dsf.sigmoid(a) * turn(t), B=write, C=q1 * dsf.sigmoid(u) + q2 * dsf.tanh(w))


def test_a_turn_read_in_several_ways_is_a_gauge():
    """Several writes and gated reads under one scalar decay (MIMO): chunks of matrix products, not 2 x 2 blocks."""
    plan = mimo.plan(T=200, N=8, P=8)
    assert mimo.spec.structure == "turned scalar decay" and plan.kernel == "decay chunks"
    report = dsf.check(mimo, laws=("forms", "split", "packed", "step"), examples=1, dtypes=("float64",))
    assert report.ok, report


def test_a_plan_of_sizes_refuses_odd_keys_under_a_turn():
    with pytest.raises(dsf.InputError, match=r"mimo: places of the Key axis are taken in pairs, .* got N = 7"):
        mimo.plan(N=7)


@dsf.recurrence
def two_tokens_turned(q: Key, k: Key, v: Value, t: Scalar) -> System:
    return System(A=turn(t), B=prev(k * v), C=q)


@pytest.mark.parametrize("recurrence", [mimo, two_tokens_turned, dsf.mixers.get("s5").recurrence], ids=lambda r: r.name)
def test_the_shape_of_a_state_refuses_odd_keys_in_pairs(recurrence):
    """By turns, by `prev` beside them and by complex numbers: it was a shape that no state has."""
    assert recurrence.state_shape(N=8, P=4)[0] == 8
    with pytest.raises(dsf.InputError, match=rf"{recurrence.name}: places of the Key axis .* pairs, .* got N = 7"):
        recurrence.state_shape(N=7, P=4)


def refused(function, message):
    with pytest.raises(TraceError, match=message) as error:
        dsf.recurrence(function)
    assert "test_turns.py:" in str(error.value)


def test_declarations_without_a_meaning_are_refused():
    def entry(q: Key, k: Key, v: Value, t: Key):
        return System(A=turn(t), B=k * v, C=q)

    def channel(q: Key, k: Key, v: Value, t: Value):
        return System(A=turn(t), B=k * v, C=q)

    def vector(v: Value, t: Scalar):
        return System(A=turn(t), B=v, C=1)

    def summed(q: Key, k: Key, v: Value, t: Scalar):
        return System(A=I + turn(t), B=k * v, C=q)

    def features(q: Key, k: Key, v: Value, t: Scalar):
        return System(A=turn(t), B=dsf.taylor_features(k, 2) * v, C=dsf.taylor_features(q, 2))

    def param(q: Key, k: Key, v: Value, w: Param[Key]):
        return System(A=I, B=k * v + prev(w) * v, C=q)

    def number(q: Key, k: Key, v: Value):
        return System(A=I, B=k * v * prev(2.0), C=q)

    def driven(q: Key, k: Key, v: Value):
        return System(A=I, B=k * v + prev(k * v), C=q, normalize=dsf.ratio, drive=v)

    def cached(q: Key, k: Key, v: Value):
        return System(A=I, B=dsf.exp_features(prev(k)) * v, C=dsf.exp_features(q), normalize=dsf.ratio)

    def stabilised(q: Key, k: Key, v: Value, a: Key, t: Scalar, i: Scalar):
        rule = lambda num, den, one: num / dsf.maximum(dsf.abs(den), one)  # noqa: E731
        return System(A=diag(sigmoid(a)) @ turn(t), B=dsf.exp(i) * k * v, C=q, normalize=rule)

    refused(
        entry, r"turn\(t\): two neighbouring places turn by one angle, but `t` has an entry a place; annotate .* Pair"
    )
    refused(channel, r"turn\(t\) turns places of the Key axis; an angle cannot differ by channel")
    refused(vector, r"turn\(t\) turns pairs of places of the Key axis, but the state has none: A is no operator on Key")
    refused(summed, r"turn\(t\) is in one term of a sum and not in the others")
    refused(features, r"turn\(t\) turns pairs of key entries; Taylor features have no such pairs")
    refused(param, r"prev\(w\): Params are the same for every token")
    refused(number, r"prev\(2\): a number is the same for every token")
    refused(driven, "which drives it, would have been one before the sequence began")
    refused(cached, "softmax attention keeps keys and values alone")
    refused(stabilised, "the decay differs within a pair, and exp")
    with pytest.raises(TraceError, match="takes Pair alone"):
        Param[Pair, Value]


def test_calls_that_do_not_fit_are_refused():
    x = sample(spiral)
    odd = {name: value[..., :5] if name in ("q", "k") else value for name, value in x.items()}
    with pytest.raises(InputError, match="`t` has an entry for each pair of places, N/2 = 3, but `q` has N = 5"):
        spiral(**odd)

    @dsf.recurrence
    def shared(q: Key, k: Key, v: Value, t: Scalar):
        return System(A=turn(t), B=k * v, C=q)

    with pytest.raises(
        InputError, match="turn takes places of the Key axis in pairs, so N must be even, but `q` has N = 5"
    ):
        shared(**sample(shared, N=5))
    with pytest.raises(InputError, match=r"initial_state has shape \[2, 2, 6, 4\], expected \[2, 2, 6, 6\]"):
        two_tokens(**sample(two_tokens), initial_state=torch.zeros(2, 2, 6, 4, dtype=torch.float64))


def test_pairs_of_micro_steps_and_a_turn_between_them():
    @dsf.recurrence
    def between(q: Key, k: Steps[Key, 2], v: Value, t: Steps[Pair, 2]):
        first = System(A=turn(t[0]) @ (I - 0.5 * outer(k[0], k[0])), B=k[0] * v)
        return compose(first, System(A=turn(0.5 * t[1]), B=k[1] * prev(v), C=q, read="before"))

    x = sample(between, T=20)
    naive = between(**x, form="naive")
    for form in between.forms[1:]:
        torch.testing.assert_close(between(**x, form=form), naive, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", [3, 4])
def test_a_turn_by_nothing_is_none(n):
    @dsf.recurrence
    def still(q: Key, k: Key, v: Value, g: Key):
        return System(A=turn(-0.0) @ diag(dsf.sigmoid(g)) @ turn(0), B=k * v, C=q)

    x = sample(still, N=n)
    assert still.spec.structure == "key-diagonal decay"
    torch.testing.assert_close(still(**x), still(**x, form="naive"), rtol=1e-9, atol=1e-9)
    with pytest.raises(dsf.TraceError, match=r"cancelled: A = turn\(1\) @ turn\(-1\): its turns add up to 0"):

        @dsf.recurrence
        def cancelled(q: Key, k: Key, v: Value):
            return System(A=turn(1) @ turn(-1), B=k * v, C=q)


def test_copies_and_compiled_calls_agree():
    import copy
    import pickle

    x = sample(mixers.mamba3)
    y = mixers.mamba3(**x)
    for other in (copy.deepcopy(mixers.mamba3), pickle.loads(pickle.dumps(mixers.mamba3))):
        torch.testing.assert_close(other(**x), y)


@pytest.mark.parametrize("pairs", [1, 3])
def test_turning_back_is_turning_by_minus_the_angle(pairs):
    x = torch.randn(2, 5, 4, 6, 2, dtype=torch.float64, requires_grad=True)
    angle = torch.randn(2, 5, 4, pairs, 1, dtype=torch.float64, requires_grad=True)
    first, second = x[..., ::2, :], x[..., 1::2, :]
    ahead = torch.complex(first, second) * torch.exp(1j * angle)
    expected = torch.stack([ahead.real, ahead.imag], dim=-2).flatten(-3, -2)
    found = turn_pairs(x, angle)
    again = turned_back(found, angle.cos(), angle.sin())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(again, x, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(x)
    one = torch.autograd.grad((turned_back(x, angle.cos(), angle.sin()) * weight).sum(), (x, angle))
    other = torch.autograd.grad((turn_pairs(x, -angle) * weight).sum(), (x, angle))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_sums_apart_are_differentiable_twice_and_keep_what_is_not_finite_to_its_sequence():
    bounds = torch.tensor([0, 3, 3, 4, 9])
    which = torch.tensor([0, 0, 0, 2, 3, 3, 3, 3, 3])
    places = which, bounds[:-1], (bounds[1:] - 1).clamp(min=0)
    x = torch.randn(1, 9, 2, 1, 1, dtype=torch.float64, requires_grad=True)
    whole = torch.cat([x[:, a:b].cumsum(1) for a, b in ((0, 3), (3, 4), (4, 9))], 1)
    torch.testing.assert_close(SumsApart.apply(x, *places), whole, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: SumsApart.apply(x, *places), x)
    assert torch.autograd.gradgradcheck(lambda x: SumsApart.apply(x, *places), x)
    for value in (math.nan, math.inf):
        bad, slope = x.detach().clone(), torch.ones_like(x)
        bad[:, 5] = slope[:, 5] = value
        bad.requires_grad_()
        y = SumsApart.apply(bad, *places)
        (grad,) = torch.autograd.grad(y, bad, slope)
        assert y[:, :5].isfinite().all() and not y[:, 5:].isfinite().any()
        assert grad[:, :4].isfinite().all() and not grad[:, 4:6].isfinite().any() and grad[:, 6:].isfinite().all()


@dsf.recurrence
def spinning_window(q: Key, k: Key, v: Value, th: Param[Scalar]) -> System:
    """A token sees itself alone, so that no angle matters."""
    return System(A=turn(th), B=k * v, C=q, window=1)


@dsf.recurrence
def spinning_pair(q: Key, k: Key, v: Value, th: Param[Scalar]) -> System:
    """A token sees itself and the one before."""
    return System(A=turn(th), B=k * v, C=q, window=2)


@pytest.mark.parametrize("form", ["auto", "kernel"])
def test_float32_finds_the_gradient_of_an_angle_that_turns_every_token(form):
    """Its terms cancel in all, or but for a small rest, where tokens turn by a hundred radians."""
    drawn = [torch.randn(2, 49, 2, n) for n in (4, 4, 3)]
    leaves = [*drawn, torch.tensor([3.0, -1.5])]
    found = {}
    for dtype in (torch.float32, torch.float64):
        given = [x.to(dtype).requires_grad_() for x in leaves]
        y, cache = spinning_window(*given, form=form, return_state=True)
        assert y.dtype == cache.k.dtype == dtype
        found[dtype] = torch.autograd.grad(y.sin().sum(), given)
    assert found[torch.float32][3].abs().max() < 1e-5
    for a, b in zip(found[torch.float32], found[torch.float64], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_such_gradients_of_packed_sequences_that_go_on_from_a_cache():
    drawn = [torch.randn(1, 33, 2, n) for n in (4, 4, 3)]
    before = [torch.randn(3, 5, 2, n) for n in (4, 4, 3)]
    bounds, found = torch.tensor([0, 20, 20, 33]), {}
    for dtype in (torch.float32, torch.float64):
        th = torch.tensor([0.7, -1.5], dtype=dtype, requires_grad=True)
        _, cache = spinning_pair(*(x.to(dtype) for x in before), th, return_state=True)
        y, _ = spinning_pair(
            *(x.to(dtype) for x in drawn), th, initial_state=cache, cu_seqlens=bounds, return_state=True
        )
        (grad,) = torch.autograd.grad(y.sin().sum(), th)
        found[dtype] = y, grad
    for a, b in zip(found[torch.float32], found[torch.float64], strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
