"""Decays along the Value axis by chunks of the transposed state, in Triton's interpreter, against the float64 oracle."""

from dataclasses import replace

import mixer_inputs
import pytest
import torch
from interpreted import interpreted
from mixer_inputs import sample
from test_triton_rounding import TIMES, ratios
from test_triton_sums import blocks, outcome

import dsf
from dsf import Key, Param, Scalar, System, Value, compose, exp, sigmoid, softplus
from dsf.fuzz import Case, attempt
from dsf.kernels.triton.chunk import matrix as matrix_kernels

pytestmark = interpreted
CHUNK = 16


@dsf.recurrence
def fading_channels(q: Key, k: Key, v: Value, a: Value) -> System:
    """One decay a channel."""
    return System(A=sigmoid(a), B=k * v, C=q)


@dsf.recurrence
def given_channels(q: Key, k: Key, v: Value, g: Value, s: Scalar, o: Value, d: Param[Value]) -> System:
    """Given logarithms, a strength of either sign, gated channels and a skip."""
    return System(A=exp(g), B=k * (s * v), C=q * sigmoid(o), D=d * v)


@dsf.recurrence
def late_channels(q: Key, k: Key, v: Value, a: Value, w: Param[Key]) -> System:
    """A read before the update, with computed keys and readouts, under decays without bound."""
    return System(A=exp(-softplus(a)), B=sigmoid(k) * v, C=w * q, read="before")


@dsf.recurrence
def twice_written(q: Key, k: Key, l: Key, v: Value, x: Value, a: Value) -> System:
    """Two products in B: micro-steps of the kernels."""
    return System(A=sigmoid(a), B=k * v + l * x, C=q)


@dsf.recurrence
def channels_in_steps(q: Key, k: Key, v: Value, a: Value, b: Scalar) -> System:
    """Two micro-steps, a decay by channel and one of all, read before the update; a readout of two gated parts."""
    first = System(A=sigmoid(a) * sigmoid(b), B=k * v)
    return compose(first, System(A=sigmoid(b), B=q * v, C=q + sigmoid(a) * k, read="before"))


ALL = [fading_channels, given_channels, late_channels, twice_written, channels_in_steps]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Chunks of 16 rows and blocks of 16 keys, so that a few tokens cross several; bfloat16 keeps its tiles."""
    table = matrix_kernels.tiles
    small = {"chunk": CHUNK, "piece": 16, "gradient_piece": 16, "gradient_keys": 16}
    monkeypatch.setattr(
        matrix_kernels, "tiles",
        lambda *key: table(*key) if torch.bfloat16 in key else replace(table(*key), **small),
    )  # fmt: skip


def assert_same(found, expected, tolerance=2e-5, block=8):
    """By head and block of tokens; a block of little counts as if it had a tenth of the largest."""
    for name, b in expected.items():
        error, size = (found[name].double() - b).detach(), b.detach()
        if name not in ("final", "state") and b.dim() > 2 and b.shape[1] > block:  # [B, T, H, ·]
            error, size = (blocks(x, block, b.dim() > 3) for x in (error, size))
        elif b.dim() > 3:
            error, size = (x.flatten(2).norm(dim=-1) for x in (error, size))
        else:
            error, size = error.abs(), size.abs()
        worst = float((error / size.clamp(min=0.1 * float(size.max()) + 1e-3)).max())
        assert worst < tolerance, (name, worst)


def state_of(rows=2, n=3, p=4):
    return torch.randn(rows, 2, n, p, dtype=torch.float64)


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("recurrence", ALL, ids=lambda r: r.name)
def test_decays_by_channel_equal_the_oracle(recurrence, tokens):
    given = sample(recurrence, tokens=tokens)
    state = state_of()
    found = outcome(recurrence, given, state, torch.float32, form="chunk", backend="triton")
    assert_same(found, outcome(recurrence, given, state, torch.float64, form="naive"))
