"""Expressions: one object an expression, axes by name, and text that reads back as the expression."""

import copy
import gc
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dsf
from dsf.language import expr as module
from dsf.language.errors import TraceError
from dsf.language.expr import KEY, VALUE, Expr, children_first, const, inputs_of, show, substitute
from dsf.language.operator import I, Operator, diag, outer


def leaf(name: str, *axes: str) -> Expr:
    return Expr("input", (), (name, None), frozenset(axes))


S, K, V, W = leaf("s"), leaf("k", KEY), leaf("v", VALUE), leaf("w", KEY, VALUE)
STEPS = tuple(Expr("input", (), ("b", step), frozenset()) for step in range(2))
NAMES = {"s": S, "k": K, "v": V, "w": W, "b": STEPS} | {
    name: getattr(dsf, name)
    for name in (
        "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "sigmoid", "logsigmoid", "softplus", "tanh", "abs", "minimum",
        "maximum", "where", "sum_key", "sum_value", "taylor_features", "exp_features", "N", "P", "I", "diag", "outer",
    )
}  # fmt: skip


def test_equal_expressions_are_one_object():
    assert dsf.exp(K) * V is dsf.exp(K) * V
    assert K * V is not V * K
    assert const(1) is const(1.0)
    assert leaf("k") is not K, "axes are part of what an expression is"
    assert STEPS[0] is not STEPS[1]


def test_copies_and_pickles_are_the_same_object():
    expr = dsf.exp(K * V) * STEPS[1]
    for same in (copy.copy(expr), copy.deepcopy(expr), pickle.loads(pickle.dumps(expr))):
        assert same is expr


def test_forgotten_expressions_are_freed():
    gc.collect()
    before = len(module._interned)
    made = [dsf.exp(S * float(i + 2)) for i in range(50)]
    assert len(module._interned) >= before + 100
    del made
    gc.collect()
    assert len(module._interned) <= before + 1


@pytest.mark.parametrize(
    "expr, axes",
    [
        (S, ""), (S + 1, ""), (K * V, "kv"), (K * S, "k"), (S * V, "v"), (W + S, "kv"), (dsf.dot(K, K), ""),
        (dsf.sum_key(W), "v"), (dsf.sum_value(W), "k"), (dsf.where(K > 0, V, S), "kv"), (dsf.l2norm(K), "k"),
        (dsf.N * 1.0, ""), (dsf.exp(W) / V, "kv"),
    ],
)  # fmt: skip
def test_axes_join_by_name(expr, axes):
    assert expr.axes == {{"k": KEY, "v": VALUE}[a] for a in axes}


def test_numbers_are_folded_and_neutral_elements_vanish():
    assert (const(2) + 3) is const(5)
    assert (2 * const(3)) is const(6)
    assert const(2) ** 3 is const(8)
    for same in (S + 0, 0 + S, S - 0, S * 1, 1 * S, S / 1, S**1):
        assert same is S
    assert (0 * K).axes == {KEY}, "a product keeps its axes"


@pytest.mark.parametrize(
    "fold", [lambda: const(1) / 0, lambda: const(-8) ** 0.5, lambda: const(10.0) ** 400, lambda: const(1e300) * 1e300]
)
def test_constants_that_are_no_numbers_are_refused(fold):
    with pytest.raises(TraceError, match="is not a real number"):
        fold()


@pytest.mark.parametrize(
    "expr, text",
    [
        (-dsf.exp(K) * V, "-exp(k) * v"),
        (1 - S * K**2, "1 - s * k ** 2"),
        ((1 - S) * K, "(1 - s) * k"),
        (S - (K - V), "s - (k - v)"),
        (S - K - V, "s - k - v"),
        (S + (K + V), "s + (k + v)"),
        (S / (K * V), "s / (k * v)"),
        (S / K / V, "s / k / v"),
        ((S**K) ** V, "(s ** k) ** v"),
        (S ** (K**V), "s ** k ** v"),
        (S**-2, "s ** -2"),
        ((-S) ** 2, "(-s) ** 2"),
        (-(S**2), "-s ** 2"),
        (const(-2) ** S, "(-2) ** s"),
        (-(S * K), "-(s * k)"),
        (S * -2, "s * -2"),
        (dsf.where(S > 0, K, 0.1), "where(s > 0, k, 0.1)"),
        (S + 0.123456789012345, "s + 0.123456789012345"),
        (S + 1e-6, "s + 1e-06"),
        (dsf.minimum(S, float("inf")), "minimum(s, float('inf'))"),
        (S * dsf.N, "s * N"),
        (STEPS[1] * S, "b[1] * s"),
        (dsf.taylor_features(K, 2), "taylor_features(k, 2)"),
        (dsf.dot(K, K), "dot(k, k)"),
        (dsf.sum_key(2 * K), "sum_key(2 * k)"),
        (dsf.l2norm(K), "l2norm(k)"),
        (2 * dsf.l2norm(K + 1, 1e-3) * V, "2 * l2norm(k + 1, 0.001) * v"),
        (dsf.rsqrt(S) * K, "rsqrt(s) * k"),
    ],
)
def test_expressions_print_as_they_are_written(expr, text):
    assert str(expr) == text


@pytest.mark.parametrize(
    "operator, text",
    [
        (S * (I - V * outer(K, K)), "s * (I - v * outer(k, k))"),
        ((I - S * outer(K, K)) @ diag(K), "(I - s * outer(k, k)) @ diag(k)"),
        (diag(K) + outer(K, -K), "diag(k) + outer(k, -k)"),
        (-outer(K, K) + I, "-outer(k, k) + I"),
        (I - (I - outer(K, K)), "I - (I - outer(k, k))"),
        (-(I + I), "-(I + I)"),
        (I / S, "1 / s * I"),
        (I + I @ I @ (I @ I), "I + I @ I @ (I @ I)"),
        (2 * (S * I), "2 * (s * I)"),
        (K + I, "diag(k) + I"),
        (1 - S * I, "diag(1) - s * I"),
    ],
)
def test_operators_print_as_they_are_written_and_read_back(operator, text):
    assert str(operator) == text
    assert str(eval(text, NAMES)) == text


UNARY = st.sampled_from([dsf.exp, dsf.sigmoid, dsf.abs, dsf.tanh, lambda x: -x])
BINARY = st.sampled_from(
    [
        lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b, lambda a, b: a**b,
        dsf.minimum, dsf.maximum, lambda a, b: dsf.where(a + S > b, a, b), lambda a, b: dsf.where(a + K <= b, b, a),
    ]
)  # fmt: skip
LEAVES = (
    st.sampled_from([S, K, V, W, *STEPS, dsf.N, dsf.P]) | st.floats(-9, 9).map(const) | st.integers(-9, 9).map(const)
)


def grow(children):
    return st.builds(lambda f, x: f(x), UNARY, children) | st.builds(_try, BINARY, children, children)


def _try(f, a, b):
    try:
        return f(a, b)
    except TraceError:  # a constant that is no number, such as 1 / 0
        return a


@settings(max_examples=200)
@given(st.recursive(LEAVES, grow, max_leaves=12))
def test_every_expression_reads_back_as_itself(expr):
    back = eval(show(expr), NAMES)
    assert (const(back) if isinstance(back, int | float) else back) is expr


def test_substitution_rebuilds_and_infers_axes_anew():
    expr = dsf.exp(S * V) * V * dsf.taylor_features(K, 2)
    assert substitute(expr, {V: const(1)}) is dsf.exp(S) * dsf.taylor_features(K, 2)
    assert substitute(expr, {V: const(1)}).axes == {KEY}
    assert substitute(expr, {}) is expr
    assert substitute(dsf.where(S > 0, K, V), {S: STEPS[0]}) is dsf.where(STEPS[0] > 0, K, V)
    assert substitute(dsf.sum_key(W), {W: K * V}) is dsf.sum_key(K * V)


def test_a_sum_over_an_axis_that_was_replaced_is_a_number_of_equal_terms():
    assert substitute(dsf.sum_value(V * S), {V: const(1)}) is S * dsf.P
    assert substitute(dsf.sum_key(K), {K: const(2)}) is 2 * dsf.N


def test_children_come_before_their_parents_and_once():
    shared = dsf.exp(K)
    order = children_first(shared * V + shared, shared)
    assert len(order) == len(set(order))
    for place, node in enumerate(order):
        assert all(order.index(a) < place for a in node.args)
    assert inputs_of(shared * V) == [K, V]


def test_deep_expressions_are_walked_without_recursion():
    x: Expr = S
    for _ in range(5000):
        x = dsf.tanh(x)
    assert len(children_first(x)) == 5001


def test_features_belong_to_the_key_axis():
    phi = dsf.taylor_features(K, 2)
    assert phi.features == (phi * V).features == "taylor2"
    assert dsf.dot(phi, phi).features is None, "summed over, the features are gone"
    assert K.features is None
    with pytest.raises(TraceError, match="Key axes of different sizes meet: N and taylor2"):
        phi * K
    with pytest.raises(TraceError, match="taylor1 and taylor2"):
        dsf.dot(phi, dsf.taylor_features(K, 1))


@pytest.mark.parametrize(
    "wrong, text",
    [
        (lambda: bool(S > 0), r"a traced expression has no truth value: `s > 0` .* use where"),
        (lambda: 1 if S else 2, "has no truth value"),
        (lambda: S == 0, "compare with > or <"),
        (lambda: (S > 0) * K, "the comparison `s > 0` has no number as its value"),
        (lambda: dsf.exp(S > 0), "the comparison `s > 0` has no number"),
        (lambda: [*K], "cannot be iterated over or unpacked; Steps"),
        (lambda: S + "x", "expected an expression or a number, got str: 'x'"),
        (lambda: S + float("nan"), "expected an expression or a number, got float: nan"),
        (lambda: dsf.exp(None), "expected an expression or a number, got NoneType"),
        (lambda: dsf.exp(outer(K, K)), r"an operator on the Key axis \(`outer\(k, k\)`\) stands where"),
        (lambda: dsf.sum_key(V), r"sum_key\(v\) sums over the Key axis, but its argument does not vary over it"),
        (lambda: dsf.sum_value(S), "sums over the Value axis"),
        (lambda: dsf.dot(V, S), "sums over the Key axis"),
        (lambda: dsf.l2norm(V), "sums over the Key axis"),
        (lambda: outer(K, V), r"outer\(k, v\) needs two Key expressions, but `v` has no Key axis"),
        (lambda: K * I, r"`k` has a Key axis: write diag\(k\) @ I or I @ diag\(k\)"),
        (lambda: outer(K, K) * (I + I), r"operators multiply with @, not \*: \(I \+ I\) \* outer\(k, k\)"),
    ],
)
def test_what_has_no_meaning_is_refused(wrong, text):
    with pytest.raises(TraceError, match=text):
        wrong()


def test_expressions_stand_on_either_side_of_operators():
    for made in (S * I, I * S, I + S, S + I, S - I, I - K, K @ I, I @ K):
        assert isinstance(made, Operator)
