"""Turns, previous values, sums of products and of readouts on the Triton kernels, interpreted, against float64."""

import pytest
import torch
from interpreted import interpreted
from test_turns import rotary, sample, spiral, turned_kda, two_tokens

import dsf
from dsf import I, Key, Scalar, System, Value, diag, outer, sigmoid
from dsf.mixers import mamba3, mamba3_mimo_of

pytestmark = interpreted


@dsf.recurrence
def erased_and_added(q: Key, k: Key, l: Key, v: Value, w: Value, a: Scalar, b: Scalar) -> System:
    """A delta rule and a write beside it: the correction erases the second product of the sum."""
    decay = sigmoid(a) * (I - sigmoid(b) * outer(k, k))
    return System(A=decay, B=l * w - k * (sigmoid(b) * v), C=q, read="before")


@dsf.recurrence
def read_twice(q: Key, l: Key, k: Key, v: Value, o: Value, a: Scalar, b: Scalar) -> System:
    """A delta rule that is read in two ways, one through a gate of the channels."""
    decay = sigmoid(a) * (I - sigmoid(b) * outer(k, k))
    return System(A=decay, B=k * (sigmoid(b) * v), C=q - sigmoid(o) * l, D=sigmoid(a) * v)


@dsf.recurrence
def oja(q: Key, k: Key, v: Value, g: Value, b: Scalar, o: Value) -> System:
    """A delta rule with keys and values exchanged, read by keys through a gate of the channels."""
    return System(A=(I - sigmoid(b) * outer(v, v)) @ diag(sigmoid(g)), B=sigmoid(b) * k * v, C=q * sigmoid(o), D=b * v)


@dsf.recurrence
def two_ways_of_oja(q: Key, l: Key, k: Key, v: Value, o: Value, b: Scalar) -> System:
    """The same without a decay, erased along another value, before it writes, and read in two ways."""
    return System(A=I - sigmoid(b) * outer(v, sigmoid(o) * v), B=k * v, C=q + o * l, read="before")


@dsf.recurrence
def based(q: Key, k: Key, v: Value, a: Scalar) -> System:
    """Taylor features of both, forgotten slowly, as a quotient."""
    keys, queries = dsf.taylor_features(k, 2), dsf.taylor_features(q * dsf.N**-0.5, 2)
    return System(A=sigmoid(a), B=keys * v, C=queries, normalize=lambda num, den, one: num / (den + one))


LINES = [
    rotary,
    spiral,
    turned_kda,
    two_tokens,
    mamba3,
    mamba3_mimo_of(2),
    erased_and_added,
    read_twice,
    oja,
    two_ways_of_oja,
    based,
]
EVERY = pytest.mark.parametrize("r", LINES, ids=lambda r: r.name)


def outcome(r, given, dtype, **options):
    """y, the state, and the gradients of a fixed functional of both, from a random state."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in given.items()}
    rows = options.pop("rows", 1)
    g = torch.Generator().manual_seed(1)
    start = torch.randn(rows, 2, *r.state_shape(8, 4), generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    y, state = r(**leaves, initial_state=start, return_state=True, **options)
    weights = [torch.randn(x.shape, generator=g, dtype=torch.float64) for x in (y, state)]
    loss = (y.double() * weights[0]).sum() + (state.double() * weights[1]).sum()
    return [y, state, *torch.autograd.grad(loss, [start, *leaves.values()])]


@EVERY
@pytest.mark.parametrize("packed", [False, True])
def test_kernels_equal_the_oracle(r, packed):
    given = sample(r, B=1, T=35, N=8)
    options = {"cu_seqlens": torch.tensor([0, 1, 20, 35]), "rows": 3} if packed else {}
    plan = r.plan(**{name: x.float() for name, x in given.items()}, backend="triton")
    assert (plan.form, plan.backend) == ("chunk", "triton")
    expected = outcome(r, given, torch.float64, form="naive", **options)
    found = outcome(r, given, torch.float32, backend="triton", **options)
    for name, got, want in zip(["y", "state", "initial_state", *given], found, expected, strict=True):
        error = (got.double() - want).norm() / want.norm().clamp(min=1e-3)
        assert error < 2e-5, (name, error)


@pytest.mark.parametrize("r", [r for r in LINES if r is not based], ids=lambda r: r.name)
def test_the_decode_kernel_steps(r):
    given = {name: x.float() for name, x in sample(r, B=2, T=4, N=8).items()}
    timed = {i.name for i in r.spec.inputs if i.kind.time}
    token = {name: x[:, -1] if name in timed else x for name, x in given.items()}
    before = {name: x[:, :-1] if name in timed else x for name, x in given.items()}
    state = r(**before, return_state=True, backend="torch")[1].contiguous()
    with torch.no_grad():
        expected = r.step(state, **token, backend="torch")
        found = r.step(state, **token, backend="triton")
        y, kept = r.step(state, **token, backend="triton", in_place=True)
    assert kept is state
    for got, want in zip((*found, y, kept), (*expected, *expected), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
