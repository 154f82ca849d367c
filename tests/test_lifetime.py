"""What follows from a declaration lives and dies with it, and is the same for all of its copies."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import dsf
from dsf import Key, Pair, Param, Scalar, System, Value
from dsf.call import calls
from dsf.language.derived import by_digest, derived, digest, interned


def delta(name="delta", scale=1.0):
    @dsf.recurrence(name=name)
    def declared(q: Key, k: Key, v: Value, b: Scalar) -> System:
        return System(A=dsf.I - scale * b * dsf.outer(k, k), B=k * (b * v), C=q)

    return declared


def hadamard(name="hadamard"):
    @dsf.recurrence(name=name)
    def declared(x: Value, dt: Value, b: Key, c: Key, a: Param[Key, Value]) -> System:
        return System(A=dsf.exp(-dsf.exp(a) * dsf.softplus(dt)), B=b * x, C=c)

    return declared


def gained(name="gained"):
    @dsf.recurrence(name=name)
    def declared(q: Key, k: Key, v: Value, i: Scalar, f: Scalar) -> System:
        return System(
            A=dsf.sigmoid(f), B=dsf.exp(i) * k * v, C=q, normalize=lambda n, d, one: n / dsf.maximum(dsf.abs(d), one)
        )

    return declared


def softmax(name="softmax_dropped"):  # equal declarations of other tests are one with it
    @dsf.recurrence(name=name)
    def declared(q: Key, k: Key, v: Value) -> System:
        return System(A=dsf.I, B=dsf.exp_features(k) * v, C=dsf.exp_features(q), normalize=dsf.ratio)

    return declared


def turned(name="turned"):
    @dsf.recurrence(name=name)
    def declared(q: Key, k: Key, v: Value, a: Scalar, t: Pair) -> System:
        return System(A=dsf.sigmoid(a) * dsf.turn(t), B=k * v + dsf.prev(k * v), C=q)

    return declared


DECLARED = [delta, hadamard, gained, softmax, turned]
EACH = pytest.mark.parametrize("declare", DECLARED, ids=lambda f: f.__name__)


def inputs(recurrence, tokens=11):
    n = recurrence.spec.keys_of(3)
    sizes = {"N": n, "N/2": n // 2, "P": 2, "H": 2, "B": 1, "T": tokens}
    return {i.name: 0.3 * torch.randn([sizes[a] for a in i.kind.layout()]) for i in recurrence.spec.inputs}


def use(recurrence):
    """All that a recurrence is asked for, in every form."""
    given = {n: x.requires_grad_() for n, x in inputs(recurrence).items()}
    for form in ("auto", *recurrence.forms):
        recurrence(**given, form=form).sum().backward()
    bounds = torch.tensor([0, 4, 11])
    y, state = recurrence(**given, cu_seqlens=bounds, return_state=True)
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    one = {n: x[:, 0].detach() if n in timed else x.detach() for n, x in given.items()}
    _, state = recurrence.step(None, **one)
    recurrence.step(state, **one)
    str(recurrence.plan(**{n: x.detach() for n, x in given.items()}))
    recurrence.trajectory(**{n: x.detach() for n, x in given.items()})


def is_freed(recurrence_of, work):
    recurrence = recurrence_of()
    work(recurrence)
    alive = weakref.ref(recurrence.spec)
    del recurrence
    gc.collect()
    return alive() is None


@EACH
def test_a_dropped_recurrence_is_freed(declare):
    assert is_freed(declare, use)


def test_a_checked_recurrence_is_freed():
    def check(recurrence):
        dsf.check(
            recurrence, examples=1, tokens=20, laws=("forms", "packed"), dtypes=(torch.float64,)
        ).raise_if_failed()

    assert is_freed(delta, check)


def test_a_copied_and_pickled_recurrence_is_freed():
    def pass_on(recurrence):
        use(pickle.loads(pickle.dumps(copy.deepcopy(recurrence))))

    assert is_freed(gained, pass_on)


@EACH
def test_copies_share_what_was_worked_out(declare, monkeypatch):
    recurrence = declare()
    given = inputs(recurrence)
    first = recurrence(**given)
    monkeypatch.setattr(calls, "make_plan", None)
    for copied in (copy.copy(recurrence), copy.deepcopy(recurrence), pickle.loads(pickle.dumps(recurrence)), declare()):
        assert copied.spec is recurrence.spec
        assert torch.equal(copied(**given), first)


@EACH
def test_equal_declarations_are_one_spec_and_others_are_not(declare):
    first, again, other = declare(), declare(), declare(name="other")
    assert first.spec is again.spec and first.spec is not other.spec
    assert digest(first.spec) == digest(again.spec) != digest(other.spec)
    assert by_digest(digest(first.spec)) is first.spec


def test_a_constant_tells_declarations_apart():
    assert digest(delta(scale=1.0).spec) != digest(delta(scale=2.0).spec)


@pytest.mark.parametrize(
    "change", [{"read": "before"}, {"D": 1.0}, {"normalize": dsf.ratio}, {"gauge": dsf.Expr("input", (), ("b", None))}]
)
def test_all_of_a_system_tells_declarations_apart(change):
    def declare(**more):
        @dsf.recurrence(name="system")
        def declared(q: Key, k: Key, v: Value, b: Scalar) -> System:
            return System(A=dsf.sigmoid(b), B=k * v, C=q, **more)

        return digest(declared.spec)

    assert declare() != declare(**change)


def test_what_is_kept_is_worked_out_once():
    worked = []

    @derived
    def doubled(spec, number):
        worked.append(number)
        return 2 * number

    spec = delta().spec
    assert [doubled(spec, 2), doubled(spec, 2), doubled(interned(spec), 3)] == [4, 4, 6]
    assert worked == [2, 3]


def test_calls_that_are_remembered_go_one_by_one(monkeypatch):
    monkeypatch.setattr(calls, "LARGEST", 3)
    recurrence = delta("few")
    given = {t: inputs(recurrence, t) for t in range(1, 6)}
    for t in given:
        recurrence(**given[t])
    assert len(recurrence._calls.kept.kept) == 3
    made = []
    plan = calls.make_plan
    monkeypatch.setattr(calls, "make_plan", lambda *how: made.append(how) or plan(*how))
    for t in (5, 4, 3):
        recurrence(**given[t])
    assert not made
