"""States, types and layouts: what comes in and goes out of a call besides its numbers."""

import copy
import pickle
from functools import partial

import mixer_inputs
import pytest
import structures
import torch

import dsf
from dsf import I, Key, Param, Scalar, System, Value, diag, exp, prev, sigmoid, softplus
from dsf.call import plan
from dsf.mixers import mesanet, sink_attention

EACH = pytest.mark.parametrize("recurrence", structures.FINITE, ids=lambda r: r.name)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest number."""
    return ((got.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


@EACH
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_types_of_outputs_and_states(recurrence, dtype):
    inputs = structures.sample(recurrence, T=20, dtype=dtype)
    oracle = recurrence(**{name: x.double() for name, x in inputs.items()}, form="naive")
    for form in recurrence.forms:
        y, state = recurrence(**inputs, form=form, return_state=True)
        assert y.dtype == dtype and y.shape == (2, 20, 2, 2)
        assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert state.shape == (2, 2, *recurrence.state_shape(N=recurrence.spec.keys_of(3), P=2))
        assert error(y, oracle) < TOLERANCE[dtype], form


@EACH
def test_parameters_may_be_wider_than_half_precision_tokens(recurrence):
    params = {i.name for i in recurrence.spec.inputs if not i.kind.time}
    inputs = {
        n: x if n in params else x.bfloat16() for n, x in structures.sample(recurrence, dtype=torch.float32).items()
    }
    assert recurrence(**inputs).dtype == torch.bfloat16


@EACH
@pytest.mark.parametrize("sizes", [{"T": 1}, {"N": 1, "P": 1}, {"B": 1, "H": 1}, {"T": 67, "N": 5, "P": 3}])
def test_any_size(recurrence, sizes):
    inputs = structures.sample(recurrence, **sizes)
    expected, last = recurrence(**inputs, form="naive", return_state=True)
    p = expected.shape[-1]
    for form in recurrence.forms:
        y, state = recurrence(**inputs, form=form, return_state=True)
        torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
        true, want = (recurrence.true_state(s, p) for s in (state, last))
        torch.testing.assert_close(true, want, rtol=1e-9, atol=1e-9)


@EACH
def test_layouts_do_not_matter(recurrence):
    inputs = structures.sample(recurrence)
    odd = {n: x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
           for n, x in inputs.items()}  # fmt: skip
    strided = {n: torch.stack([x, x], dim=-1)[..., 0] for n, x in inputs.items()}
    for form in recurrence.forms:
        expected = recurrence(**inputs, form=form)
        for other in (odd, strided):
            assert not any(x.is_contiguous() and x.dim() > 2 for x in other.values())
            torch.testing.assert_close(recurrence(**other, form=form), expected, rtol=1e-12, atol=1e-12)


@EACH
def test_expanded_inputs_get_gradients_of_their_own_shape(recurrence):
    inputs = structures.sample(recurrence, B=1)
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    wide = {n: x.expand(3, *x.shape[1:]) if n in timed else x for n, x in leaves.items()}
    y = recurrence(**wide)
    grads = torch.autograd.grad(y.square().sum(), list(leaves.values()))
    alone = torch.autograd.grad(recurrence(**leaves).square().sum(), list(leaves.values()))
    for a, b in zip(grads, alone, strict=True):
        torch.testing.assert_close(a, 3 * b, rtol=1e-9, atol=1e-9)


@EACH
def test_only_what_requires_a_gradient_gets_one(recurrence):
    for name in structures.sample(recurrence):
        inputs = structures.sample(recurrence)
        inputs[name].requires_grad_()
        expected = torch.autograd.grad(recurrence(**inputs, form="naive").square().sum(), inputs[name])[0]
        for form in ("recurrent", "scan", "chunk"):
            (got,) = torch.autograd.grad(recurrence(**inputs, form=form).square().sum(), inputs[name])
            torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9)


@EACH
def test_no_grad_and_inference_mode(recurrence):
    inputs = {n: x.requires_grad_() for n, x in structures.sample(recurrence).items()}
    expected = recurrence(**inputs).detach()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            y, state = recurrence(**inputs, return_state=True)
            assert not y.requires_grad and not state.requires_grad
            torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


@EACH
def test_autocast_outside_changes_nothing_inside(recurrence):
    inputs = structures.sample(recurrence, dtype=torch.float32)
    for form in recurrence.forms:
        expected = recurrence(**inputs, form=form)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, state = recurrence(**inputs, form=form, return_state=True)
        assert state.dtype == torch.float32
        assert torch.equal(y, expected)


@EACH
@pytest.mark.parametrize("form", ["naive", "recurrent", "scan", "chunk", "kernel"])
def test_a_state_continues_in_any_form(recurrence, form):
    inputs = structures.sample(recurrence, T=9)
    whole, last = recurrence(**inputs, form="naive", return_state=True)
    for cut in (1, 8):
        first, state = recurrence(**structures.tokens_of(recurrence, inputs, slice(0, cut)), return_state=True)
        second, final = recurrence(
            **structures.tokens_of(recurrence, inputs, slice(cut, None)),
            initial_state=state, return_state=True, form=form,
        )  # fmt: skip
        torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=1e-9, atol=1e-9)
        true, want = (recurrence.true_state(s, 2) for s in (final, last))
        torch.testing.assert_close(true, want, rtol=1e-9, atol=1e-9)


@EACH
def test_steps_are_the_whole(recurrence):
    inputs, state, outputs = structures.sample(recurrence), None, []
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    for t in range(6):
        y, state = recurrence.step(state, **{n: x[:, t] if n in timed else x for n, x in inputs.items()})
        outputs.append(y)
    whole, last = recurrence(**inputs, return_state=True)
    torch.testing.assert_close(torch.stack(outputs, dim=1), whole, rtol=1e-9, atol=1e-9)
    true, want = (recurrence.true_state(s, 2) for s in (state, last))
    torch.testing.assert_close(true, want, rtol=1e-9, atol=1e-9)


@dsf.recurrence
def oja(q: Key, k: Key, v: Value, g: Value, b: Scalar):
    b = dsf.sigmoid(b)
    return System(A=(I - b * dsf.outer(v, v)) @ dsf.diag(dsf.sigmoid(g)), B=b * k * v, C=q)


@pytest.mark.parametrize("recurrence", [*structures.FINITE, oja], ids=lambda r: r.name)
def test_a_step_may_overwrite_any_final_state(recurrence):
    inputs = structures.sample(recurrence)
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    token = {n: x[:, 0] if n in timed else x for n, x in inputs.items()}
    found = [recurrence(**inputs, form=form, return_state=True)[1] for form in recurrence.forms]
    for state in (*found, recurrence.step(None, **token)[1]):
        y, after = recurrence.step(state, **token)
        again, same = recurrence.step(state, **token, in_place=True)
        assert same is state and torch.equal(again, y) and torch.equal(state, after)


@EACH
def test_a_final_state_of_one_sequence_keeps_no_other_state_alive(recurrence):
    inputs = structures.sample(recurrence, B=1, T=70)
    for form in recurrence.forms:
        state = recurrence(**inputs, form=form, return_state=True)[1]
        kept = state.untyped_storage().nbytes()
        assert kept == state.nbytes, form


@dsf.recurrence
def segmented(q: Key, k: Key, v: Value, d: Value, p: Param[Key, Value], b: Param[Value], e: Param[Key]) -> System:
    return System(A=exp(-(softplus(d + b) * exp(p) + sigmoid(d))), B=k * exp(e) * v, C=q, D=b * v)


@dsf.recurrence
def delayed(q: Key, k: Key, v: Value, a: Scalar, p: Param[Key]) -> System:
    return System(A=sigmoid(a), B=k * exp(p) * v + prev(k * exp(p)) * prev(v), C=q)


@dsf.recurrence
def read_twice(q: Key, k: Key, v: Value, a: Key, g: Value, h: Value) -> System:
    return System(A=diag(sigmoid(a)), B=k * v, C=q * g + k * h)


SHORT = (0, 1, 3, 8, 25, 70, 200)


@pytest.mark.parametrize(
    ("recurrence", "tokens", "bounds"),
    [
        (segmented, 120, None), (segmented, 200, SHORT), (structures.scalar, 200, SHORT), (delayed, 100, None),
        (read_twice, 100, None), (mesanet, 60, None), (sink_attention, 200, SHORT),
    ],
    ids=lambda x: getattr(x, "name", None),
)  # fmt: skip
def test_gradients_of_half_precision_are_sums_that_are_rounded_once(recurrence, tokens, bounds, monkeypatch):
    """Of inputs that several parts of a call take: segments, batches of packed sequences, two systems."""
    monkeypatch.setattr(plan, "SEGMENT_NUMBERS", 1)  # segments of 16 tokens
    given = {n: x.bfloat16() for n, x in mixer_inputs.sample(recurrence, 1, tokens).items()}
    packed = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}
    found = []
    for form, dtype in (("naive", torch.float64), ("chunk", torch.bfloat16)):
        leaves = {n: x.to(dtype).requires_grad_() for n, x in given.items()}
        y = recurrence(**leaves, form=form, backend="torch", **packed)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype))
        found.append({n: x.grad for n, x in leaves.items()})
    for name, expected in found[0].items():
        least = (expected.bfloat16() - expected).norm()
        assert (found[1][name] - expected).norm() < 1.2 * least, name


@EACH
def test_gradients_reach_the_initial_state_and_come_through_the_final_one(recurrence):
    inputs = structures.sample(recurrence)
    _, start = recurrence(**structures.sample(recurrence), return_state=True)
    leaves = [x.requires_grad_() for x in [*inputs.values(), start.detach()]]
    found = {}
    for form in recurrence.forms:
        y, final = recurrence(**inputs, initial_state=leaves[-1], return_state=True, form=form)
        true = recurrence.true_state(final, 2)
        found[form] = torch.autograd.grad(y.square().sum() + true.square().sum(), leaves)
    assert found["naive"][-1].abs().max() > 1e-6
    for form, grads in found.items():
        for a, b in zip(grads, found["naive"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8, msg=lambda m, form=form: f"{form}: {m}")


@EACH
def test_groups_share_heads(recurrence):
    inputs = structures.sample(recurrence, H=4)
    timed = [i.name for i in recurrence.spec.inputs if i.kind.time]
    for name in timed:
        axis = next(i for i in recurrence.spec.inputs if i.name == name).kind.layout().index("H")
        fewer = inputs | {name: inputs[name].narrow(axis, 0, 2)}
        written_out = inputs | {name: fewer[name].repeat_interleave(2, dim=axis)}
        torch.testing.assert_close(recurrence(**fewer), recurrence(**written_out), rtol=1e-12, atol=1e-12)


def test_states_that_overflow_float32_stay_finite_when_stabilised():
    inputs = structures.sample(structures.stabilised, T=50, dtype=torch.float32)
    inputs["i"] = inputs["i"] * 60 + 100
    y, state = structures.stabilised(**inputs, return_state=True)
    assert y.isfinite().all() and state.isfinite().all()
    oracle = structures.stabilised(**{n: x.double() for n, x in inputs.items()}, form="naive")
    assert error(y, oracle) < 1e-4


@dsf.recurrence
def faint(q: Key, k: Key, v: Value, i: Scalar, f: Scalar, s: dsf.Param[Scalar]):
    """A sink beside tokens that hardly weigh anything."""
    rule = lambda num, den, one: num / (den + dsf.exp(s) * one)  # noqa: E731
    return System(A=sigmoid(f), B=dsf.exp(i) * dsf.elu1(k) * v, C=dsf.elu1(q), normalize=rule)


@pytest.mark.parametrize("form", [f for f in faint.forms if f != "naive"])
@pytest.mark.parametrize("gate, sink", [(-90.0, -90.0), (-200.0, -195.0), (-120.0, 20.0)])
def test_the_number_one_has_its_scale_beside_gains_that_are_small(form, gate, sink):
    inputs = structures.sample(faint, T=20)
    inputs["i"], inputs["s"] = inputs["i"] + gate, torch.full_like(inputs["s"], sink)
    leaves = [x.requires_grad_() for x in inputs.values()]
    found = []
    for way in ("naive", form):
        y = faint(**inputs, form=way)
        found.append([y, *torch.autograd.grad(y.sum(), leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9 * float(a.detach().abs().max()))


def _above_one(n, d, one):
    return n / dsf.maximum(dsf.abs(d), one)


def corrections_apart(q: Key, k: Key, v: Value, a: Key, i: Scalar, b: Scalar):
    first, last = (I - dsf.sigmoid(b) * dsf.outer(x, x) for x in (dsf.l2norm(a), dsf.l2norm(k)))
    return System(A=last @ first, B=dsf.exp(i) * k * v, C=q, normalize=_above_one)


def a_decay_first(q: Key, k: Key, v: Value, i: Scalar, f: Scalar):
    write = System(A=I, B=dsf.exp(i) * k * v + q * v, C=q, normalize=_above_one)
    return dsf.compose(System(A=dsf.sigmoid(f), B=0), write)


def entries_of_their_own(q: Key, k: Key, v: Value, f: Key):
    write = System(A=I, B=dsf.exp(k) * v, C=dsf.exp(q), normalize=dsf.ratio)
    return dsf.compose(System(A=dsf.sigmoid(f), B=0), write)


@pytest.mark.parametrize("declared", [corrections_apart, a_decay_first, entries_of_their_own])
def test_steps_that_write_nothing_before_the_first_exponential_gain(declared):
    recurrence = dsf.recurrence(declared)
    inputs = {n: x.requires_grad_() for n, x in structures.sample(recurrence, T=19).items()}

    def outcome(form):
        y, state = recurrence(**inputs, form=form, return_state=True)
        state = recurrence.true_state(state, y.shape[-1])
        total = y.sin().sum() + state.sin().sum()
        return [y, state, *torch.autograd.grad(total, list(inputs.values()))]

    expected = outcome("naive")
    for form in recurrence.forms[1:]:
        for found, wanted in zip(outcome(form), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("strength", [-1000.0, 0.0, 200.0])
@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("axes", [Scalar, Key, Value])
def test_a_skip_without_a_gain_of_its_own_has_the_true_scale(axes, read, strength):
    rule = lambda n, d, one: n / dsf.maximum(dsf.abs(d), one)  # noqa: E731

    @dsf.recurrence
    def skipping(q: Key, k: Key, v: Value, i: axes, f: Scalar):
        q, k = dsf.elu1(q), dsf.elu1(k)
        skip = v + dsf.dot(q, k) * v
        return System(A=dsf.sigmoid(f), B=dsf.exp(i) * k * v, C=q, D=skip, read=read, normalize=rule)

    inputs = structures.sample(skipping, T=19)
    inputs = {n: (x + strength if n == "i" else x).requires_grad_() for n, x in inputs.items()}

    def outcome(form):
        y = skipping(**inputs, form=form)
        return [y, *torch.autograd.grad(y.sin().sum(), list(inputs.values()))]

    expected = outcome("naive")
    for form in skipping.forms[1:]:
        for found, wanted in zip(outcome(form), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
    assert error(skipping(**{n: x.float() for n, x in inputs.items()}), expected[0]) < 1e-4


def test_a_call_leaves_its_inputs_and_its_state_alone():
    inputs = structures.sample(structures.gated_delta)
    _, state = structures.gated_delta(**inputs, return_state=True)
    before = {n: x.clone() for n, x in (inputs | {"state": state}).items()}
    for form in structures.gated_delta.forms:
        structures.gated_delta(**inputs, initial_state=state, form=form)
    structures.gated_delta.step(state, **{n: x[:, 0] for n, x in inputs.items()})
    assert all(torch.equal(before[n], x) for n, x in (inputs | {"state": state}).items())


@pytest.mark.parametrize("again", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_recurrences_are_copied_and_pickled_with_the_modules_that_hold_them(again):
    for r in (
        structures.gated_delta,
        structures.softmax,
        structures.normalised,
        structures.stabilised,
        structures.product,
    ):
        inputs = structures.sample(r)
        assert torch.equal(again(r)(**inputs), r(**inputs))
        assert str(again(r)) == str(r)


def test_runs_repeat_bit_for_bit():
    for r in structures.FINITE:
        inputs = structures.sample(r, T=70, dtype=torch.float32)
        assert torch.equal(r(**inputs), r(**inputs)), r.name


def test_den_sums_ones_where_num_sums_what_drives_it():
    """B and D sum the driving input over channels, of which den has P ones."""

    @dsf.recurrence
    def summed(q: Key, k: Key, v: Value, a: Scalar) -> System:
        weight = sigmoid(a + dsf.sum_value(v))
        return System(A=sigmoid(a), B=k * (weight * v), C=q, D=dsf.sum_value(v), normalize=dsf.ratio)

    q, k = torch.rand(2, 1, 12, 1, 4, dtype=torch.float64)
    v, a = torch.rand(1, 12, 1, 3, dtype=torch.float64), torch.randn(1, 12, 1, dtype=torch.float64)
    for form in summed.forms:
        y = summed(q, k, v, a, form=form)
        S, den = torch.zeros(4, 3, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
        for t in range(12):
            qt, kt, vt, at = (x[0, t, 0] for x in (q, k, v, a))
            S = at.sigmoid() * S + kt[:, None] * ((at + vt.sum()).sigmoid() * vt)
            den = at.sigmoid() * den + kt * (at + 3).sigmoid()
            torch.testing.assert_close(y[0, t, 0], (qt @ S + vt.sum()) / (qt @ den + 3))


def test_the_normaliser_and_the_running_maximum_have_columns():
    assert structures.scalar.state_shape(N=5, P=4) == (5, 4)
    assert structures.vector.state_shape(N=5, P=4) == (1, 4)
    assert structures.normalised.state_shape(N=5, P=4) == (5, 4 + 1 + 1)
    assert structures.stabilised.state_shape(N=5, P=4) == (5, 4 + 1 + 1)

    @dsf.recurrence
    def linear_attention(q: Key, k: Key, v: Value):
        return System(A=I, B=dsf.elu1(k) * v, C=dsf.elu1(q), normalize=dsf.ratio)

    assert linear_attention.state_shape(N=5, P=4) == (5, 4 + 1)


def test_inputs_may_be_called_as_the_rule_s_arguments():
    @dsf.recurrence
    def odd(num: Key, den: Key, one: Value):
        return System(A=I, B=dsf.exp(den) * one, C=dsf.exp(num), normalize=lambda n, d: n / d + 0 * one)

    q, k, v = torch.randn(1, 9, 2, 3), torch.randn(1, 9, 2, 3), torch.randn(1, 9, 2, 2)
    torch.testing.assert_close(odd(q, k, v), structures.normalised(q, k, v))
    assert "y = num / den + 0 * one" in str(odd)


@EACH
def test_second_derivatives_are_right_or_refused(recurrence):
    inputs = structures.sample(recurrence, T=12)

    def second(form: str) -> tuple[torch.Tensor, ...]:
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        first = torch.autograd.grad(
            recurrence(**leaves, form=form).square().sum(), list(leaves.values()), create_graph=True
        )
        return torch.autograd.grad(sum(g.square().sum() for g in first), list(leaves.values()))

    expected = second("naive")
    for form in recurrence.forms:
        try:
            found = second(form)
        except RuntimeError as error:
            assert "second derivatives (create_graph=True) do not pass through this form" in str(error)
            assert form in ("scan", "chunk")
            continue
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7, msg=lambda m, form=form: f"{form}: {m}")


def test_arguments_of_a_rule_that_have_defaults_are_its_own():
    def declare(rule):
        @dsf.recurrence
        def quotient(q: Key, k: Key, v: Value):
            return System(A=I, B=dsf.elu1(k) * v, C=dsf.elu1(q), normalize=rule)

        return quotient

    given = structures.sample(declare(dsf.ratio))
    expected = declare(lambda num, den: num / (den + 0.5))(**given)
    named = partial(lambda num, den, *, eps: num / (den + eps), eps=0.5)
    for rule in (lambda num, den, eps=0.5: num / (den + eps), named):
        assert torch.equal(declare(rule)(**given), expected)
