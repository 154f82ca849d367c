"""The normal form of a transition: decay plus corrections equals the operator as written, densely."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dsf
from dsf.language.expr import KEY, VALUE, Expr, const
from dsf.language.operator import I, Normal, Operator, diag, normal_form, outer, split_scale, times
from dsf.torch.dense import dense_operator
from dsf.torch.evaluate import Evaluator

N, P = 3, 2


def leaf(name: str, *axes: str) -> Expr:
    return Expr("input", (), (name, None), frozenset(axes))


S, V = leaf("s"), leaf("v", VALUE)
K, R, W = leaf("k", KEY), leaf("r", KEY), leaf("w", KEY, VALUE)
SCALES = st.sampled_from([S, V, dsf.exp(S), const(-1), const(0), const(2.0), S * V])
KEYS = st.sampled_from([K, R, K * R, S * K, W, dsf.sigmoid(K), -R])


def values() -> Evaluator:
    def draw(node: Expr) -> Tensor:
        return torch.randn(1, 2, 1, N if KEY in node.axes else 1, P if VALUE in node.axes else 1, dtype=torch.float64)

    return Evaluator({node: draw(node) for node in (S, V, K, R, W)}, N, P)


def dense(factor: Normal, at: Evaluator) -> Tensor:
    """The matrix of one factor [1, T, 1, P, N, N], straight from decay ⊙ · + Σ scale · left rightᵀ."""
    decay = at(factor.decay).expand(1, 2, 1, N, P)
    total = torch.diag_embed(decay.transpose(-1, -2))
    for c in factor.corrections:
        assert KEY not in c.scale.axes
        left = (at(c.scale) * at(c.left)).expand(1, 2, 1, N, P)
        total = total + torch.einsum("...np,...mp->...pnm", left, at(c.right).expand(1, 2, 1, N, P))
    return total


def assert_normal_form_is(operator: Operator) -> tuple[Normal, ...]:
    at = values()
    factors = normal_form(operator)
    product = torch.eye(N, dtype=torch.float64)
    for factor in factors:  # in the order they act
        product = dense(factor, at) @ product
    written = dense_operator(operator, at, N).expand(1, 2, 1, P, N, N)
    torch.testing.assert_close(product.expand_as(written), written, rtol=1e-10, atol=1e-10)
    return factors


LEAVES = (
    st.just(I)
    | st.builds(diag, KEYS)
    | st.builds(diag, SCALES)
    | st.builds(outer, KEYS, KEYS)
    | st.builds(lambda s, k: s * outer(k, k), SCALES, KEYS)
    | st.builds(lambda s, k: I - s * outer(k, k), SCALES, KEYS)
)


def grow(children: st.SearchStrategy[Operator]) -> st.SearchStrategy[Operator]:
    return (
        st.builds(lambda a, b: a + b, children, children)
        | st.builds(lambda a, b: a - b, children, children)
        | st.builds(lambda a, b: a @ b, children, children)
        | st.builds(lambda s, a: s * a, SCALES, children)
        | st.builds(lambda a: -a, children)
        | st.builds(lambda a, k: k @ a, children, KEYS)
    )


@settings(max_examples=120)
@given(st.recursive(LEAVES, grow, max_leaves=5))
def test_normal_form_equals_the_operator_as_written(operator):
    assert_normal_form_is(operator)


@pytest.mark.parametrize(
    "operator, decay, ranks",
    [
        (I, "1", [0]),
        (diag(S), "s", [0]),
        (S * I, "s", [0]),
        (diag(K) @ diag(R), "k * r", [0]),
        (I - V * outer(K, K), "1", [1]),
        (S * (I - V * outer(K, K)), "s", [1]),
        ((I - V * outer(K, K)) @ diag(R), "r", [1]),
        (diag(R) @ (I - outer(K, K)), "r", [1]),
        (diag(R) + outer(K, R), "r", [1]),
        (outer(K, R), "0", [1]),
        (I - outer(K, K) - outer(R, R), "1", [2]),
        ((I - outer(K, K)) @ (I - outer(R, R)), "1", [1, 1]),
        (S * ((I - outer(K, K)) @ (I - outer(R, R))), "s", [1, 1]),
        (I + (I - outer(K, K)) @ (I - outer(R, R)), "2", [3]),
    ],
)
def test_decay_and_ranks(operator, decay, ranks):
    factors = assert_normal_form_is(operator)
    assert [len(f.corrections) for f in factors] == ranks
    assert str(factors[-1].decay) == decay


def test_a_product_of_corrections_is_several_micro_steps_in_the_order_they_act():
    first, second = I - outer(K, K), I - outer(R, R)
    factors = normal_form(second @ first)
    assert [f.corrections[0].left for f in factors] == [K, R]


def test_scales_leave_the_key_vectors():
    scale, core = split_scale(S * K / V * R)
    assert (str(scale), str(core)) == ("s / v", "k * r")
    assert split_scale(S) == (S, const(1))


def test_times_folds_zero_and_one():
    assert times(const(0), K) is const(0) and times(K, const(0)) is const(0)
    assert times(const(1), K) is K and times(K, const(1)) is K
