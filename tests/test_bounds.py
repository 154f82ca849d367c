"""What is known of an expression's values before any input is seen, and what the GPU kernels conclude from it."""

import math

import pytest
import torch

import dsf
from dsf import I, Key, System, Value, diag, exp, outer, sigmoid
from dsf.language.bounds import bounds
from dsf.language.expr import KEY
from dsf.language.functions import abs, logsigmoid, maximum, minimum, softplus, tanh
from dsf.mixers import get
from dsf.torch.evaluate import Evaluator

x = dsf.language.expr.Expr("input", (), ("x", None), frozenset({KEY}))
CASES = [
    (-0.6 * sigmoid(x), -0.6, 0.0),
    (2 - tanh(x), 1.0, 3.0),
    (tanh(x) * tanh(x) + sigmoid(x), -1.0, 2.0),
    (minimum(exp(x), 4.0), 0.0, 4.0),
    (maximum(logsigmoid(x), -5.0), -5.0, 0.0),
    (-softplus(x), -math.inf, 0.0),
    (abs(x) + 1, 1.0, math.inf),
    (x, -math.inf, math.inf),
]


@pytest.mark.parametrize("expr, low, high", CASES, ids=lambda e: str(e))
def test_bounds_hold_for_any_input(expr, low, high):
    assert bounds(expr) == (low, high)
    values = Evaluator({x: torch.linspace(-30, 30, 601, dtype=torch.float64).view(1, 1, 1, -1, 1)}, 601, 1)(expr)
    assert low <= values.min() and values.max() <= high


@dsf.recurrence
def elsewhere(q: Key, k: Key, v: Value, e: Key, g: Key) -> System:
    """A delta rule that erases along another key than the one it writes."""
    return System(A=diag(exp(g)) @ (I - outer(e, e)), B=k * v, C=q)


def test_corrections_are_delta_rules_only_along_the_key_that_is_written():
    pytest.importorskip("triton")
    from dsf.triton.operands import operands_of

    rwkv7, other = operands_of(get("rwkv7").recurrence.spec), operands_of(elsewhere.spec)
    assert rwkv7.lefts and other.lefts and rwkv7.erases is None and other.erases is None
    assert rwkv7.floor == -math.exp(-0.5) and other.floor == -math.inf
    for name in ("deltanet", "kda", "gated_delta_product"):
        found = operands_of(get(name).recurrence.spec)
        assert found.erases and not found.lefts
