"""Writes that the next token makes (dsf.language.late): which declarations, and that nothing changes by it."""

import pytest
import torch
from test_turns import sample
from turned_family import two_products

import dsf
from dsf import I, Key, Scalar, System, Value, compose, diag, outer, prev, sigmoid, turn
from dsf.call.frame import frame_for
from dsf.language.late import late
from dsf.mixers import mamba3, mamba3_mimo_of
from dsf.mixers.mamba3 import mamba3_biased


@dsf.recurrence
def plain(q: Key, k: Key, v: Value, a: Scalar, w: Scalar) -> System:
    return compose(System(A=I, B=prev(k * v) * w), System(A=sigmoid(a), B=v * k, C=q))


@dsf.recurrence
def by_key(q: Key, k: Key, v: Value, f: Key, w: Scalar) -> System:
    """Decays by key, and a product that is declared the other way round."""
    before = System(A=I, B=w * prev(v * k))
    return compose(before, System(A=diag(sigmoid(f)), B=(1 - w) * k * v, C=q, D=w * v))


@dsf.recurrence
def elementwise(q: Key, k: Key, v: Value, f: Key, g: Value, w: Scalar) -> System:
    before = System(A=I, B=prev(k * v) * w)
    return compose(before, System(A=sigmoid(f) * sigmoid(g), B=k * v, C=q))


@dsf.recurrence
def turned_by_one(q: Key, k: Key, v: Value, a: Scalar, t: Scalar, w: Scalar) -> System:
    return compose(System(A=I, B=w * prev(k * v)), System(A=sigmoid(a) * turn(t), B=k * v / (1 + w * w), C=q))


@dsf.recurrence
def of_a_sum(q: Key, k: Key, l: Key, v: Value, a: Scalar, w: Scalar) -> System:
    return compose(System(A=I, B=w * prev((k + l) * v)), System(A=sigmoid(a), B=(k + l) * v, C=q))


@dsf.recurrence
def gated(q: Key, p: Key, k: Key, v: Value, u: Value, a: Scalar, w: Scalar) -> System:
    before = System(A=I, B=w * prev(k * v))
    return compose(before, System(A=sigmoid(a), B=k * v, C=(q * u + p) * sigmoid(u), D=u * v))


MOVED = [
    plain,
    by_key,
    elementwise,
    turned_by_one,
    of_a_sum,
    mamba3,
    mamba3_biased,
    two_products,
    mamba3_mimo_of(2),
    gated,
]
EVERY = pytest.mark.parametrize("r", MOVED, ids=lambda r: r.name)


@EVERY
def test_a_token_has_fewer_rows(r):
    frame = late(r.spec)
    assert len(frame.spec.rows) == 1 < len(r.spec.frame.spec.rows)
    assert frame.leaves == r.spec.frame.leaves  # states of one form go on in another
    plan = r.plan(**sample(r, T=64))
    assert plan.form == "chunk"
    assert frame_for(r.spec, plan) is frame


def outcome(r, given, form, start=None, **options):
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    leaves |= {} if start is None else {"initial_state": start.clone().requires_grad_()}
    y, state = r(**leaves, return_state=True, form=form, **options)
    g = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=g, dtype=x.dtype)).sum() for x in (y, state))
    return [y, state, *torch.autograd.grad(loss, list(leaves.values()))]


@EVERY
@pytest.mark.parametrize("form", ["scan", "chunk", "kernel"])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("bounds", [None, [0, 0, 1, 20, 20, 37]])
def test_the_forms_are_the_definition(r, form, started, bounds):
    given = sample(r, B=1 if bounds else 2, T=37)
    options = {"cu_seqlens": torch.tensor(bounds)} if bounds else {}
    rows = len(bounds) - 1 if bounds else 2
    start = torch.randn(rows, 2, *r.state_shape(6, 4), dtype=torch.float64) if started else None
    expected, found = (outcome(r, given, x, start, **options) for x in ("naive", form))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@EVERY
def test_a_state_goes_from_form_to_form(r):
    given = sample(r, T=24)
    timed = {i.name for i in r.spec.inputs if i.kind.time}
    expected, last = r(**given, return_state=True, form="naive")
    state, outputs = None, []
    for form, part in (("chunk", slice(0, 11)), ("recurrent", slice(11, 14)), ("scan", slice(14, 24))):
        here = {name: x[:, part] if name in timed else x for name, x in given.items()}
        y, state = r(**here, initial_state=state, return_state=True, form=form)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state, last, rtol=1e-9, atol=1e-9)


def test_what_comes_later_changes_no_bit_of_an_earlier_token():
    given = sample(mamba3, T=30)
    expected = mamba3(**given, form="chunk")
    for name in ("x", "dt", "lam", "b", "c", "angle"):
        other = {n: x.clone() for n, x in given.items()}
        other[name][:, 17:] *= 1e6
        assert torch.equal(mamba3(**other, form="chunk")[:, :17], expected[:, :17])


def declared(a=sigmoid, b=None, scale=None, read="after", again=None):
    """A recurrence with two writes of a token, changed in one place."""

    @dsf.recurrence(name="declared")
    def one(q: Key, k: Key, v: Value, f: Scalar, w: Scalar, g: Key) -> System:
        written = prev(k * v) if again is None else again(k * v, g)
        before = System(A=I, B=(w if scale is None else scale(w, g)) * written)
        own = k * v if b is None else b(k * v, g, v)
        return compose(
            before,
            System(A=a(f) if a is sigmoid else a(f, g), B=own, C=q, D=dsf.dot(g, g), read=read),
        )

    return one


@pytest.mark.parametrize(
    "changed",
    [
        {"a": lambda f, g: I - sigmoid(f) * outer(g, g)},
        {"b": lambda x, g, v: x + g * v},
        {"b": lambda x, g, v: g * v},
        {"b": lambda x, g, v: prev(x)},
        {"scale": lambda w, g: w * g},
        {"scale": lambda w, g: prev(w)},
        {"again": lambda x, g: prev(prev(x))},
        {"again": lambda x, g: x},
        {"read": "before"},
    ],
    ids=[
        "correction",
        "two writes",
        "another write",
        "late itself",
        "by key",
        "delayed",
        "two",
        "now",
        "before",
    ],
)
def test_other_declarations_stay_as_they_are(changed):
    assert late(declared().spec) is not None
    assert late(declared(**changed).spec) is None
