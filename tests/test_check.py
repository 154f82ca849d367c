"""dsf.check: right recurrences pass, and everything a user or a kernel can get wrong is caught under its own name."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsf
import dsf.call.run
from dsf import I, Key, Pair, Param, Scalar, System, Value, diag, exp, outer, prev, sigmoid, testing
from dsf.checking import check as checking
from dsf.checking.examples import Example, draw_tensor, lengths
from dsf.checking.laws import LAWS
from dsf.checking.measure import Subject, distance
from dsf.checking.ranges import legal_ranges, ranges_of
from dsf.checking.values import Range
from dsf.fuzz import run as fuzz
from dsf.kernels.operators import Transition

FAST = {"examples": 2, "tokens": 70, "dtypes": (torch.float64,)}


@dsf.recurrence
def gated_delta(q: Key, k: Key, v: Value, alpha: Scalar, beta: Scalar) -> System:
    return System(A=alpha * (I - beta * outer(k, k)), B=k * (beta * v), C=q)


@dsf.recurrence
def decayed(q: Key, k: Key, v: Value, alpha: Scalar) -> System:
    return System(A=alpha, B=k * v, C=q)


def by_hand(q, k, v, alpha, beta, initial_state=None, sign=-1.0, decays=True, leak=0.0):
    """A user's own gated delta rule: S = alpha (S - beta k (k'S)) + beta k v', y = S'q."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v, alpha, beta = (x.to(wide) for x in (q, k, v, alpha, beta))
    state = initial_state
    if state is None:
        state = torch.zeros(q.shape[0], *q.shape[2:], v.shape[-1], dtype=wide)
    out = []
    for t in range(q.shape[1]):
        erased = torch.einsum("bhn,bhnp->bhp", k[:, t], state)
        state = state + sign * torch.einsum("bhn,bhp->bhnp", k[:, t], beta[:, t, :, None] * erased)
        state = (alpha[:, t, :, None, None] if decays else 1.0) * state
        state = state + torch.einsum("bhn,bhp->bhnp", k[:, t], beta[:, t, :, None] * v[:, t])
        ahead = v[:, min(t + 1, q.shape[1] - 1)]
        out.append(torch.einsum("bhn,bhnp->bhp", q[:, t], state) + leak * ahead)
    return torch.stack(out, dim=1), state


def in_input_dtype(**wrong):
    def function(q, k, v, alpha, beta, initial_state=None):
        y, state = by_hand(q, k, v, alpha, beta, initial_state, **wrong)
        return y.to(q.dtype), state

    return function


def broken(report):
    """{(law, form)} of a report's failures."""
    return {(f.row.law, f.row.form) for f in report.failures}


# ---- what is right passes -------------------------------------------------------------------------


def test_a_right_recurrence_obeys_every_law():
    report = dsf.check(gated_delta, examples=2, tokens=70)
    assert report.ok, str(report)
    assert {r.law for r in report.rows} == set(LAWS)
    assert {r.form for r in report.rows} == set(gated_delta.forms)
    assert {r.dtype for r in report.rows} == {"float64", "float32", "bfloat16"}
    assert all(r.error < 1e-11 for r in report.rows if r.law == "forms" and r.dtype == "float64")
    assert report.raise_if_failed() is report


def test_softmax_attention_obeys_every_law():
    from dsf.mixers import softmax_attention

    report = dsf.check(softmax_attention, **FAST)
    assert report.ok, str(report)
    assert "initial_state.k" in str(report)


def test_a_right_function_of_the_users_own_obeys_the_laws():
    report = dsf.check(gated_delta, against=in_input_dtype(), **FAST | {"tokens": 40})
    assert report.ok, str(report)
    assert {r.form for r in report.rows} == {"against"}
    assert {"forms", "finite", "gradcheck", "causality", "split", "layout", "contract"} <= {r.law for r in report.rows}


def test_a_function_without_state_is_checked_without_it():
    report = dsf.check(gated_delta, against=lambda *x: by_hand(*x)[0], **FAST | {"tokens": 20})
    assert report.ok, str(report)
    assert "split" not in {r.law for r in report.rows}


def test_a_function_that_only_takes_float32_is_checked_in_float32():
    def single(q, k, v, alpha):
        assert q.dtype == torch.float32
        return decayed(q, k, v, alpha)

    report = dsf.check(decayed, against=single, examples=2, tokens=20, dtypes=(torch.float32,))
    assert report.ok, str(report)
    assert {r.dtype for r in report.rows} == {"float32"} and "gradcheck" not in {r.law for r in report.rows}


def test_examples_tried_at_the_same_time_give_the_same_report(monkeypatch):
    monkeypatch.setattr(checking._Run, "compiled", True)
    recurrence, found = dsf.mixers.get("ssd").recurrence, []
    for threads in (1, 4):
        monkeypatch.setattr(checking, "THREADS", threads)
        report = dsf.check(recurrence, examples=3, tokens=12, laws=("forms", "split"), dtypes=(torch.float32,))
        found.append(report.rows)
        assert report.ok and report.examples > 5
    assert found[0] == found[1]


def test_compiled_kernels_serve_many_examples(monkeypatch):
    monkeypatch.setattr(checking._Run, "compiled", True)
    run, seen = checking._Run, []
    monkeypatch.setattr(run, "measure", lambda self, law, form, example: seen.append(example) or [])
    with pytest.raises(dsf.InputError, match="nothing is tested"):  # as nothing is measured here
        dsf.check(gated_delta, examples=9, dtypes=(torch.float32, torch.bfloat16), forms=("naive", "chunk"))
    assert {(e.dtype, e.heads, e.n, e.p, *e.groups.values()) for e in seen} == {
        ("float32", 4, 6, 2, 2), ("bfloat16", 4, 5, 3, 2)
    }  # fmt: skip
    assert len({e.tokens for e in seen}) > 9
    assert all(piece % 2 or e.tokens == checking.STABLE for e in seen for piece in lengths(e.bounds))


# ---- what is wrong in a user's function is caught, by name, small ---------------------------------

WRONG = [
    ({"sign": 1.0}, "forms", "a sign"),
    ({"decays": False}, "forms", "a missing decay"),
    ({"leak": 1e-3}, "causality", "a leaking future"),
]


@pytest.mark.parametrize(("wrong", "law", "what"), WRONG, ids=[w[2] for w in WRONG])
def test_a_wrong_function_is_caught_with_a_small_example(wrong, law, what):
    report = dsf.check(gated_delta, against=in_input_dtype(**wrong), laws=("forms", "causality"), **FAST)
    assert (law, "against") in broken(report)
    failure = next(f for f in report.failures if f.row.law == law)
    assert failure.shrunk
    example = failure.row.example
    assert (example.batch, example.heads, example.n, example.p) == (1, 1, 1, 1), example
    # a sign and a decay show at the second token, or at the first from an initial state; so does the future
    assert example.tokens <= 2 and not example.groups, example
    assert f"BROKEN {law}: against" in str(report)
    with pytest.raises(dsf.LawError, match=f"BROKEN {law}: against") as caught:
        report.raise_if_failed()
    assert isinstance(caught.value, AssertionError) and isinstance(caught.value, dsf.DsfError)


@dsf.recurrence
def gained(q: Key, k: Key, v: Value, alpha: Scalar, w: Param[Scalar], u: Param[Key]) -> System:
    return System(A=alpha, B=(u * k) * (w * v), C=q)


def test_errors_of_params_in_half_precision_are_relative_to_what_tokens_add():
    example = Example(batch=2, tokens=9, heads=2, n=3, p=2, dtype="bfloat16", initial=True)
    subject = Subject(gained, ranges_of(gained.spec, None))
    found, inputs = subject.outcome("naive", example), subject.inputs(example)
    for grads, terms in ((found.grads, found.terms), (found.state_grads, found.state_terms)):
        added = (grads["v"] * inputs["v"]).sum(-1) / inputs["w"]  # v and w are a product, so their gradients share it
        torch.testing.assert_close(grads["w"], added.sum((0, 1)))
        torch.testing.assert_close(terms["w"], added.sum(0).square().sum(0).sqrt())
        added = grads["k"] * inputs["k"] / inputs["u"]
        torch.testing.assert_close(terms["u"], added.sum(0).square().sum(0).sqrt())
    kind, expected = subject.kinds["w"], torch.tensor([1.0, -2.0])
    terms = torch.tensor([10.0, 1.0])
    assert distance(expected + torch.tensor([0.1, 0.0]), expected, kind, "bfloat16", terms=terms) == pytest.approx(0.01)
    assert distance(expected + torch.tensor([0.0, 0.1]), expected, kind, "bfloat16", terms=terms) == pytest.approx(0.05)
    assert subject.outcome("naive", replace(example, dtype="float32")).terms == {}


def test_the_printed_snippet_repeats_the_failure():
    report = dsf.check(gated_delta, against=in_input_dtype(decays=False), laws=("forms",), **FAST)
    failure = report.failures[0]
    printed = []
    scope = {"gated_delta": gated_delta, "your_function": in_input_dtype(decays=False), "print": printed.append}
    exec(failure.snippet, scope)
    assert printed[0][failure.row.quantity] == failure.row.error > 1e-9


def test_a_function_that_raises_is_a_finding_with_its_text():
    def broken_function(*inputs):
        raise RuntimeError("no kernel for this shape")

    report = dsf.check(decayed, against=broken_function, laws=("forms",), **FAST)
    assert broken(report) == {("forms", "against")}
    assert "RuntimeError: no kernel for this shape" in str(report)


# ---- what is wrong in a form is caught ------------------------------------------------------------


def sabotage(monkeypatch, name, wrap):
    monkeypatch.setattr(dsf.call.run, name, wrap(getattr(dsf.call.run, name)))


def without_decay(original):
    def wrong(problem, state, *rest):
        return original(replace(problem, decay=problem.decay * 0 + 1, log=False), state, *rest)

    return wrong


def leaking(original):
    """A causal mask that is off by one: y_t also sees what t + 1 writes."""

    def wrong(problem, state, *rest):
        y, final = original(problem, state, *rest)
        ahead = torch.cat([y[:, 1:], torch.zeros_like(y[:, :1])], dim=1)
        return y + 1e-6 * ahead, final

    return wrong


def state_detached(original):
    def wrong(problem, state, *rest):
        y, final = original(problem, state, *rest)
        return y, final.detach()

    return wrong


def start_detached(original):
    return lambda problem, state, *rest: original(problem, None if state is None else state.detach(), *rest)


def start_dropped(original):
    return lambda problem, state, *rest: original(problem, None, *rest)


def wrong_sign(original):
    def wrong(problem, state, *rest):
        return original(replace(problem, tie=-problem.tie), state, *rest)

    return wrong


def rounded_state(original):
    def wrong(problem, state, *rest):
        y, final = original(problem, state, *rest)
        return y, final.float()

    return wrong


def overflowing(original):
    def wrong(problem, state, *rest):
        y, final = original(problem, state, *rest)
        return y / torch.where(problem.decay.squeeze(-1) == 0, 0.0, 1.0), final

    return wrong


SABOTAGE = [
    ("recurrent", without_decay, "forms", "y"),
    ("recurrent", start_dropped, "split", "y"),
    ("chunk", leaking, "causality", "y"),
    ("chunk", state_detached, "forms", "grad of state"),
    ("chunk", start_detached, "forms", "grad initial_state"),
    ("chunk", wrong_sign, "forms", "y"),
    ("scan_blocks", wrong_sign, "forms", "y"),
    ("kernel_matrix", without_decay, "forms", "y"),
    ("chunk", rounded_state, "contract", "state"),
    ("recurrent", overflowing, "finite", "y"),
]
FORM_OF = {"kernel_matrix": "kernel", "scan_blocks": "scan"}


@pytest.mark.parametrize(
    ("name", "wrap", "law", "quantity"), SABOTAGE, ids=[f"{n}-{w.__name__}" for n, w, *_ in SABOTAGE]
)
def test_a_sabotaged_form_is_caught_under_its_law(monkeypatch, name, wrap, law, quantity):
    sabotage(monkeypatch, name, wrap)
    form = FORM_OF.get(name, name)
    report = dsf.check(gated_delta, laws=(law,) if law != "finite" else ("forms", "finite"), **FAST)
    assert (law, form) in broken(report), str(report)
    assert {f for _, f in broken(report)} == {form}, "the other forms are blamed too"
    bad = {r.quantity for r in report.rows if r.law == law and r.form == form and not r.ok}
    assert quantity in bad
    assert f"BROKEN {law}: {form}" in str(report)


def test_a_wrong_adjoint_is_caught_by_finite_differences(monkeypatch):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * 1.01

    original = Transition.apply
    monkeypatch.setattr(Transition, "apply", lambda self, state: original(self, Scaled.apply(state)))
    report = dsf.check(decayed, laws=("gradcheck",), forms=("naive", "recurrent"), **FAST)
    assert ("gradcheck", "recurrent") in broken(report)
    assert ("gradcheck", "naive") not in broken(report)


def test_packed_sequences_that_bleed_into_each_other_are_caught(monkeypatch):
    def bleeding(spec, bound, bounds, state, plan, declared):
        y, _ = dsf.call.run.run(spec, bound, None, None, plan)
        parts = [y[:, b - 1] for b in bounds[1:]]
        final = torch.stack([p[0, :, None] for p in parts])
        return y, final.expand(-1, -1, bound.sizes.n, -1)

    monkeypatch.setattr(dsf.call.run, "_run_packed", bleeding)
    report = dsf.check(decayed, laws=("packed",), forms=("chunk",), **FAST)
    assert broken(report) == {("packed", "chunk")}


# ---- inputs that make the state grow are reported -------------------------------------------------


def test_a_recurrence_whose_sign_makes_it_unstable_is_reported():
    @dsf.recurrence
    def grows(q: Key, k: Key, v: Value, beta: Scalar) -> System:
        return System(A=I + beta * outer(k, k), B=k * (beta * v), C=q)

    report = dsf.check(grows, laws=("finite",), forms=("chunk",))
    assert broken(report) == {("finite", "chunk")}
    assert "grows without bound" in str(report) and "ranges=" in str(report)


def test_a_gradient_that_is_infinite_at_the_end_of_a_range_is_reported():
    @dsf.recurrence
    def griffin_like(x: Value, a: Value) -> System:
        return System(A=a, B=dsf.sqrt(1 - a * a) * x, C=1)

    options = {"laws": ("finite",), "dtypes": (torch.float32,), "forms": ("scan",)}
    report = dsf.check(griffin_like, ranges={"a": (0, 1)}, **options)
    assert broken(report) == {("finite", "scan")} and report.failures[0].row.quantity == "grad a"
    assert dsf.check(griffin_like, **options).ok, "left alone, a stays where the square root has a slope"


# ---- ranges ----------------------------------------------------------------------------------------


def test_ranges_follow_from_the_expressions():
    def words(r, **given):
        return {name: str(x) for name, x in ranges_of(r.spec, given).items()}

    assert words(gated_delta) == {
        "q": "real", "k": "of unit length", "v": "real", "alpha": "in [0, 1]", "beta": "in [0, 2]"
    }  # fmt: skip
    assert words(gated_delta, alpha=(0.5, 0.9))["alpha"] == "in [0.5, 0.9]"

    @dsf.recurrence
    def inside(q: Key, k: Key, v: Value, g: Key, eta: Scalar, f: Scalar, rate: Param[Scalar]) -> System:
        return System(A=diag(exp(g) * exp(-rate)), B=k * (sigmoid(f) * v), C=q / eta)

    assert words(inside) == {
        "q": "real", "k": "real", "v": "real", "g": "≤ 0", "eta": "≥ 0.1", "f": "real", "rate": "≥ 0"
    }  # fmt: skip

    @dsf.recurrence
    def mixed(q: Key, k: Key, v: Value, floor: Param[Key], share: Scalar, keep: Scalar, f: Scalar) -> System:
        rows = floor + (1 - floor) * sigmoid(f)
        return System(A=rows * (share * keep + (1 - share) * 0.5), B=k * v, C=q)

    assert {words(mixed)[name] for name in ("floor", "share", "keep")} == {"in [0, 1]"}
    assert {"floor", "share", "keep"} <= legal_ranges(mixed.spec)[1]  # not necessary: others may make up for it

    @dsf.recurrence
    def erased(q: Key, k: Key, v: Value, g: Scalar, h: Scalar) -> System:
        return System(A=1 - g * (1 - h), B=k * v, C=q)

    assert words(erased)["g"] == "in [0, 2]" and words(erased)["h"] == "in [0, 1]"  # A up to 3 where h is above 1

    @dsf.recurrence
    def two_corrections(q: Key, k: Key, u: Key, v: Value, b: Scalar, c: Scalar) -> System:
        return System(A=I - b * outer(k, k) - c * outer(u, u), B=k * v, C=q)

    assert words(two_corrections)["b"] == words(two_corrections)["c"] == "in [0, 1]"

    @dsf.recurrence
    def sunk(q: Key, k: Key, v: Value, g: Scalar, s: Param[Scalar], t: Param[Scalar]) -> System:
        features = [dsf.exp_features(x) for x in (k, q)]
        rule = lambda num, den, one: num / (den + (s + exp(t)) * one)  # noqa: E731
        return System(A=exp(g), B=features[0] * v, C=features[1], normalize=rule)

    parts = {"Lambda_re": "≤ -0.1", "Lambda_im": "real"}  # re² + im² divides, so not both are 0
    assert parts.items() <= words(dsf.mixers.s5).items()
    assert legal_ranges(dsf.mixers.s5.spec)[1] >= {"Lambda_re"}, "0 beside another imaginary part is no mistake"

    @dsf.recurrence
    def powers(
        q: Key, k: Key, v: Value, a: Scalar, b: Scalar, c: Scalar, d: Scalar, e: Scalar, f: Scalar, g: Scalar, h: Key
    ) -> System:
        w = (1 - b) ** 0.5 + c**1.5 + d**-1 + e**f + dsf.log1p(g)
        return System(A=a**0.5, B=w * h**2 * k * (1 + h**-2) * v, C=q)

    assert words(powers) == {
        "q": "real", "k": "real", "v": "real", "a": "in [0.1, 1]", "b": "≤ 0.9", "c": "≥ 0", "d": "≥ 0.1", "e": "≥ 0.1",
        "f": "real", "g": "≥ 0", "h": "real"
    }  # fmt: skip
    ranges, loose = legal_ranges(powers.spec)
    assert str(ranges["b"]) == "≤ 1" and loose == {"d", "g"}, "1 / -1 and log1p(-0.5) are numbers, (-1) ** 0.5 is none"

    @dsf.recurrence
    def turned(q: Key, k: Key, v: Value, a: Pair, t: Pair, re: Param[Pair], b: Scalar) -> System:
        last = System(A=I - prev(b) * outer(prev(k), prev(k)), B=k * v, C=q)
        return dsf.compose(System(A=(a * exp(re)) * dsf.turn(t), B=0), last)

    assert words(turned) == {
        "q": "real", "k": "of unit length", "v": "real", "a": "in [0, 1]", "t": "real", "re": "≤ 0", "b": "in [0, 2]"
    }  # fmt: skip

    @dsf.recurrence
    def gates(q: Key, k: Key, v: Value, a: Scalar, b: Scalar, c: Scalar) -> System:
        return System(A=-dsf.expm1(-a) * dsf.rsqrt(b) * c**-2, B=k * v, C=q)

    assert words(gates) == {"q": "real", "k": "real", "v": "real", "a": "≥ 0", "b": "≥ 1", "c": "≥ 1"}

    assert words(sunk) == {"q": "real", "k": "real", "v": "real", "g": "≤ 0", "s": "≥ 0", "t": "real"}


@pytest.mark.parametrize("rule", [dsf.zoh, dsf.bilinear, dsf.euler], ids=lambda f: f.__name__)
@pytest.mark.parametrize("is_complex", [False, True])
def test_rates_of_discretisations_are_negative(rule, is_complex):
    """They were taken for positive: checks drew states that grow, validation refused what is right, layers gave NaN."""

    def bank(x: Value, a: Param[Pair], w: Param[Pair], dt: Scalar, c: Param[Key]) -> System:
        step = rule((a, w) if is_complex else a, 1, dsf.softplus(dt))
        return System(A=step.A, B=step.B * x, C=c * (1 + 0 * w))

    bank = dsf.recurrence(bank)
    assert ranges_of(bank.spec)["a"].high <= 0 and legal_ranges(bank.spec)[0]["a"].high <= 0
    if rule is dsf.zoh and not is_complex:
        assert str(ranges_of(bank.spec)["a"]) == "≤ -0.1" and str(legal_ranges(bank.spec)[0]["a"]) == "< 0"
    a = torch.full((2, 2), -0.3)
    with dsf.validate():
        bank(torch.randn(1, 20, 2, 3), a, -a, torch.zeros(1, 20, 2), torch.ones(2, 4))
    if rule is not dsf.euler or not is_complex:  # whose decays an imaginary part lets grow
        y, _ = dsf.mixers.Layer(bank, 8, n_heads=2, N=4)(torch.randn(1, 500, 8))
        assert y.isfinite().all() and y.abs().max() < 50


def test_a_rate_that_is_too_large_is_refused_with_the_sign_it_needs():
    @dsf.recurrence
    def bank(x: Value, a: Param[Key], c: Param[Key]) -> System:
        step = dsf.zoh(a, 1, 0.1)
        return System(A=step.A, B=step.B * x, C=c)

    words = r"expected a < 0; if it is a logit, give logsigmoid\(a\) or -softplus\(a\)"
    with pytest.raises(dsf.InputError, match=words), dsf.validate():
        bank(torch.randn(1, 9, 1, 2), torch.ones(1, 4), torch.ones(1, 4))


@given(testing.inputs_for(gated_delta))
@settings(max_examples=40)
def test_drawn_inputs_lie_in_their_ranges(inputs):
    assert ((inputs["alpha"] >= 0) & (inputs["alpha"] <= 1)).all()
    assert ((inputs["beta"] >= 0) & (inputs["beta"] <= 2)).all()
    torch.testing.assert_close(inputs["k"].norm(dim=-1), torch.ones_like(inputs["k"][..., 0]))
    y = gated_delta(**inputs)
    assert y.shape[:3] == inputs["q"].shape[:3] and y.isfinite().all()


@dsf.recurrence
def oja(q: Key, k: Key, v: Value, b: Scalar) -> System:
    return System(A=I - b * outer(v, v), B=k * v, C=q)


@given(testing.inputs_for(oja))
@settings(max_examples=20)
def test_values_that_erase_are_of_length_one_over_channels(inputs):
    """Not over heads: their states grew without bound."""
    torch.testing.assert_close(inputs["v"].norm(dim=-1), torch.ones_like(inputs["v"][..., 0]))


@given(st.data())
@settings(max_examples=60)
def test_strategies_draw_what_they_say(data):
    b, t, h, n, p = data.draw(testing.shapes())
    gates, betas = data.draw(testing.gates((b, t, h))), data.draw(testing.betas((b, t, h)))
    assert ((gates >= 0) & (gates <= 1)).all() and ((betas >= 0) & (betas <= 2)).all()
    assert data.draw(testing.keys((b, t, h, n))).norm(dim=-1).sub(1).abs().max() < 1e-12
    bounds = data.draw(testing.packings(t)).tolist()
    assert bounds[0] == 0 and bounds[-1] == t and sorted(bounds) == bounds
    assert h % data.draw(testing.groups(h)) == 0
    assert data.draw(testing.dtypes()) in ("float64", "float32", "bfloat16", "float16")


def test_gates_reach_zero_one_and_both_neighbourhoods():
    ways = [draw_tensor(Range(0, 1), w, [1, 500, 2], Scalar.kind, 0) for w in ("corners", "mixed")]
    for x in ways:
        assert (x == 0).any() and (x == 1).any() and (x == 0.5).any()
    assert ((ways[1] > 0) & (ways[1] < 1e-20)).any() and ((ways[1] < 1) & (ways[1] > 1 - 1e-12)).any()


# ---- the report and the edge ----------------------------------------------------------------------


def test_the_report_is_plain_data_and_a_table():
    report = dsf.check(decayed, laws=("forms", "contract"), **FAST)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["ok"] and data["recurrence"] == "decayed" and data["ranges"]["alpha"] == "in [0, 1]"
    assert {"law", "form", "quantity", "error", "tolerance", "example"} <= set(data["rows"][0])
    text = str(report)
    assert text.startswith("decayed: all laws hold") and "grad alpha" in text and "recurrent" in text


def test_the_same_seed_draws_the_same_examples():
    first, second = (dsf.check(decayed, laws=("forms",), **FAST) for _ in range(2))
    assert [r.example for r in first.rows] == [r.example for r in second.rows]
    assert [r.error for r in first.rows] == [r.error for r in second.rows]


def test_the_edge_refuses_what_it_does_not_know():
    with pytest.raises(dsf.FormError, match="decayed: scalar decay has no fast form; it has naive, recurrent"):
        dsf.check(decayed, forms=("fast",))
    with pytest.raises(dsf.InputError, match="decayed: there is no law 'causal'; laws are forms, finite"):
        dsf.check(decayed, laws=("causal",))
    with pytest.raises(
        dsf.InputError, match="decayed: ranges names `gate`, which is no input; inputs are q, k, v, alpha"
    ):
        dsf.check(decayed, ranges={"gate": (0, 1)})
    with pytest.raises(dsf.InputError, match="the range of `alpha` is empty: low 1, high 0"):
        dsf.check(decayed, ranges={"alpha": (1, 0)})


NO_NUMBERS = [("examples", 0), ("examples", 1.5), ("tokens", 0), ("tokens", "9"), ("seed", 1.5), ("seed", None)]


@pytest.mark.parametrize("name, given", NO_NUMBERS, ids=str)
def test_numbers_that_cannot_be_are_refused(name, given):
    """tokens=0 and seeds that are no integers were reported as broken laws."""
    with pytest.raises(dsf.InputError, match=f"^decayed: {name} is an integer.*, got {given!r}$"):
        dsf.check(decayed, **{**FAST, name: given})


@pytest.mark.parametrize("nothing", [{"laws": ()}, {"forms": ()}, {"laws": ("forms",), "forms": ("naive",)}], ids=str)
def test_where_nothing_is_tested_no_law_is_said_to_hold(nothing):
    with pytest.raises(dsf.InputError, match=r"^decayed: nothing is tested by .* on the forms "):
        dsf.check(decayed, **FAST, **nothing)


def test_seeds_of_any_size_and_single_names_are_taken():
    """A seed beyond 64 bits was reported as broken laws."""
    for seed in (10**30, -(10**30), -5):
        assert dsf.check(decayed, examples=1, tokens=9, seed=seed, laws="forms", dtypes=torch.float64, forms="chunk").ok
    assert fuzz(cases=2, seed=10**30, recurrence=decayed).ok


def test_what_is_no_recurrence_is_refused():
    for thing, hint in (
        ("gla", "got str"),
        (by_hand, "got function"),
        (dsf.mixers.GLA(16), "got GLA; .* layer.recurrence"),
    ):
        with pytest.raises(dsf.InputError, match=f"^dsf.check takes a recurrence, {hint}"):
            dsf.check(thing)
    with pytest.raises(dsf.InputError, match="against is a function of the inputs, got int"):
        dsf.check(decayed, against=3)


def test_import_does_not_load_hypothesis_and_check_says_what_to_install():
    code = """
import sys, dsf
assert "hypothesis" not in sys.modules, "import dsf loads hypothesis"
sys.modules["hypothesis"] = None
from dsf import Key, Value, System, I
@dsf.recurrence
def r(q: Key, k: Key, v: Value) -> System:
    return System(A=I, B=k * v, C=q)
try:
    dsf.check(r)
except dsf.DsfError as error:
    assert "pip install dsf-zoo[test]" in str(error), error
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@dsf.recurrence
def reflection(u: Key, q: Key, k: Key, v: Value) -> System:
    n = dsf.l2norm(u)
    return System(A=I - 2 * outer(n, n), B=k * v, C=q)


@pytest.mark.parametrize("law", ["forms", "split"])
def test_what_a_declaration_loses_to_rounding_is_no_forms_fault(law):
    """A gradient through l2norm of one number is what remains of two that cancel: no order of summation has it."""
    for seed in (0, 3, 7):
        example = Example(tokens=55, cuts=(1,), seed=seed)
        found = testing.errors(reflection, law, "chunk", example)
        assert max(found.values()) < 1e-9


def test_a_wrong_gradient_is_found_whatever_the_condition():
    """The very gradient that cancels, off by a millionth of itself."""

    def wrong(u, q, k, v):
        u = u + (u * 1e-6 - (u * 1e-6).detach())
        return reflection(u, q, k, v, form="recurrent")

    found = testing.errors(reflection, "forms", "against", Example(tokens=55, n=2, p=2), against=wrong)
    assert found["grad u"] > 1e-9 and max(e for name, e in found.items() if name != "grad u") < 1e-9
