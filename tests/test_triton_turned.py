"""Sums of angles, turned vectors and their gradients on the Triton kernels, interpreted, against float64."""

import math

import pytest
import torch
import triton
import triton.language as tl
from interpreted import interpreted
from turned_family import (
    BOUNDS,
    RECURRENCES,
    compare,
    delta,
    mamba3,
    mamba3_biased,
    one_angle,
    outcome,
    rotary,
    sample,
    spiral,
)

import dsf
from dsf import Key, Pair, System, Value, sigmoid, turn
from dsf.call.bind import bind
from dsf.call.turned import by_kernels, recipe
from dsf.kernels.triton.chunk import matrix as matrix_kernels
from dsf.kernels.triton.turn.kernel import _cos_and_sin
from dsf.kernels.turns import turn_pairs

pytestmark = interpreted


@triton.jit
def sines(x, cos, sin, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    found = _cos_and_sin(tl.load(x + at))
    tl.store(cos + at, found[0])
    tl.store(sin + at, found[1])


EVERY = pytest.mark.parametrize("r", RECURRENCES, ids=lambda r: r.name)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["whole", "packed"])
@pytest.mark.parametrize("started", [False, True], ids=["", "started"])
def test_gradients_equal_the_definition(r, dtype, bounds, started):
    """Of several rows and heads in float32, where there is one call; in bfloat16 the third, of one row."""
    assert recipe(r.spec) is not None
    calls = 3 if dtype == torch.bfloat16 and not bounds else 1
    given = sample(r, B=1 if bounds or calls > 1 else 2)
    options = {"cu_seqlens": torch.tensor(bounds)} if bounds else {}
    rows = len(bounds) - 1 if bounds else 1 if calls > 1 else 2
    start = torch.randn(rows, 2, *r.state_shape(32, 16), generator=torch.Generator().manual_seed(2)).double()
    start = start if started else None
    expected = outcome(r, given, torch.float64, start, form="naive", **options)
    found = outcome(r, given, dtype, start, calls, backend="triton", **options)
    compare(found, expected, 2e-6 if dtype == torch.float32 else 2.5e-2)


@pytest.mark.parametrize("r", [spiral, delta, mamba3_biased], ids=lambda r: r.name)
@pytest.mark.parametrize("count", [2, 3])
def test_stretches_of_time(r, count, monkeypatch):
    monkeypatch.setattr(matrix_kernels, "stretches", lambda *_: count)
    given = sample(r, B=1, T=64 * 5 + 3)
    expected = outcome(r, given, torch.float64, form="chunk", backend="torch")
    compare(outcome(r, given, torch.float32, backend="triton"), expected, 2e-6)


@pytest.mark.parametrize("r", [spiral, delta, one_angle, mamba3_biased], ids=lambda r: r.name)
@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("started", [False, True], ids=["", "started"])
def test_heads_that_share_keys_and_angles(r, keys, started):
    """In a state each head may have keys of its own."""
    given = sample(r, H=4, keys=keys)
    alone = {i.name for i in r.spec.inputs if i.kind.time and not i.kind.axes}
    given = {name: x[:, :, :keys] if name in alone else x for name, x in given.items()}
    start = torch.randn(2, 4, *r.state_shape(32, 16), generator=torch.Generator().manual_seed(2)).double()
    start = start if started else None
    expected = outcome(r, given, torch.float64, start, form="naive")
    compare(outcome(r, given, torch.float32, start, backend="triton"), expected, 2e-6)


@pytest.mark.parametrize("r", [spiral, mamba3_biased], ids=lambda r: r.name)
@pytest.mark.parametrize("n", [16, 24, 80])
def test_sizes_that_fill_no_tile(r, n):
    given = sample(r, T=70, N=n, P=20)
    expected = outcome(r, given, torch.float64, form="naive")
    compare(outcome(r, given, torch.float32, backend="triton"), expected, 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_turns_of_many_tokens_stay_exact(dtype):
    """The same angle at every token, whose rounding errors would add up."""
    given = sample(rotary, B=1, T=8192, H=1, N=16, P=16)
    given["w"] = torch.full_like(given["w"], 1.0)
    given["k"][:, 1:] = 0
    given["q"][:] = turn_pairs(given["k"][:, 0, 0, :, None], torch.tensor([[8191 + 0.25 * math.pi]]))[..., 0]
    expected = rotary(**given, form="chunk", backend="torch")[:, -1]
    given = {name: x.to(dtype) for name, x in given.items()}
    found = rotary(**given, backend="triton")[:, -1].double()
    assert (found - expected).norm() / expected.norm() < (1e-6 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("top", [6.3, 70.0, 1e4])
def test_sines_are_as_exact_as_float32(top):
    x = torch.rand(4096, generator=torch.Generator().manual_seed(0)) * top
    cos, sin = torch.empty_like(x), torch.empty_like(x)
    sines[(1,)](x, cos, sin, COUNT=4096)
    assert (cos - x.double().cos()).abs().max() < 1e-7
    assert (sin - x.double().sin()).abs().max() < 1e-7


@pytest.mark.parametrize("r", [one_angle, delta], ids=lambda r: r.name)
def test_every_length_in_turn(r):
    """Short ones, and lengths that the launches of another one are made for again."""
    for tokens in (1, 2, 63, 64, 65, 200, 131, 1):
        given = sample(r, T=tokens, seed=tokens)
        expected = outcome(r, given, torch.float64, form="naive")
        found = outcome(r, given, torch.float32, form="chunk", backend="triton")
        for name, want in expected.items():
            assert (found[name].double() - want).norm() < 2e-6 * want.norm() + 1e-6, (tokens, name)


def test_aliased_vectors():
    given = sample(spiral)
    given["k"] = given["q"]

    def run(dtype, **how):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in given.items() if name != "k"}
        y = spiral(**leaves, k=leaves["q"], **how)
        g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        grads = torch.autograd.grad((y.double() * g).sum(), list(leaves.values()))
        return {"y": y} | dict(zip(leaves, grads, strict=True))

    expected = run(torch.float64, form="naive")
    for _ in range(3):
        compare(run(torch.float32, backend="triton"), expected, 2e-6)


def test_what_is_not_finite_stays_in_its_sequence():
    given = sample(mamba3, B=1)
    bounds = torch.tensor(BOUNDS)
    expected = outcome(mamba3, given, torch.float32, cu_seqlens=bounds, backend="triton")
    for name in ("angle", "dt", "b", "c", "x"):
        spoiled = given | {name: given[name].clone()}
        spoiled[name][:, 20:25] = float("nan")
        found = outcome(mamba3, spoiled, torch.float32, cu_seqlens=bounds, backend="triton")
        for part in ("y", "x", "dt", "angle", "b", "c"):
            for other in (slice(0, 18), slice(130, 147)):
                assert torch.equal(found[part][:, other], expected[part][:, other]), (name, part)


@dsf.recurrence
def by_key(q: Key, k: Key, v: Value, g: Pair, t: Pair) -> System:
    return System(A=dsf.diag(sigmoid(g)) @ turn(t), B=k * v, C=q)


@dsf.recurrence
def as_a_quotient(q: Key, k: Key, v: Value, t: Pair) -> System:
    return System(A=turn(t), B=k * v, C=q, normalize=dsf.ratio)


@pytest.mark.parametrize("r", [by_key, as_a_quotient], ids=lambda r: r.name)
def test_others_keep_their_turns_by_torch(r):
    """Their kernels do not know what turning a state would change; gradients of angles need float32."""
    assert recipe(r.spec) is None
    given = {name: x.bfloat16().requires_grad_() for name, x in sample(r).items()}
    y = r(**given, backend="triton")
    assert torch.isfinite(y).all() and y.dtype == torch.bfloat16


def test_turned_calls_run_in_their_own_dtype():
    given = {name: x.bfloat16().requires_grad_() for name, x in sample(mamba3).items()}
    plan = mamba3.plan(**given, backend="triton")
    bound = bind(mamba3.spec, (), given)
    assert by_kernels(mamba3.spec, bound, plan, False)
    assert not by_kernels(mamba3.spec, bound, mamba3.plan(**given, backend="torch"), False)
    assert not by_kernels(mamba3.spec, bound, plan, True)
