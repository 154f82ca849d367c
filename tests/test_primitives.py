"""The table of primitives: derivatives against autograd, logarithms against log, for every row of the table."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

import dsf
from dsf.language.errors import TraceError
from dsf.language.expr import BY_TORCH, COMPARISONS, KEY, REDUCTIONS, VALUE, Expr, children_first, const
from dsf.language.primitives import PRIMITIVES, _Sloped, derivatives, log_of
from dsf.torch.evaluate import Evaluator

N, P = 3, 2
AXES = {name: frozenset(axes) for name, axes in {"s": (), "k": (KEY,), "v": (VALUE,), "kv": (KEY, VALUE)}.items()}
POSITIVE = {"log", "log1p", "sqrt", "rsqrt", "pow", "div"}  # drawn above 0.2
ARITY = {
    **dict.fromkeys(("add", "sub", "mul", "div", "pow", "minimum", "maximum"), 2),
    **dict.fromkeys(COMPARISONS, 2),
    "where": 4,  # two sides of the comparison, two values
}


MADE = {"taylor_features", "prev", "spread", *BY_TORCH} - {"sin", "cos"}  # evaluated by torch alone


def leaf(name: str, axes: frozenset[str]) -> Expr:
    return Expr("input", (), (name, None), axes)


def draw(node: Expr, positive: bool = False) -> Tensor:
    """A value for an input [B, T, H, n, p], its absent axes of size one."""
    x = torch.randn(2, 3, 2, N if KEY in node.axes else 1, P if VALUE in node.axes else 1, dtype=torch.float64)
    return x.abs() + 0.2 if positive else x


def apply(op: str, args: list[Expr]) -> Expr:
    """The primitive on operands: its function in the language, its operator, or the node itself."""
    if op == "where":
        return dsf.where(args[0] > args[1], args[2], args[3])
    if op in REDUCTIONS:
        return getattr(dsf, op)(args[0])
    return Expr(op, tuple(args))


def assert_derivatives_are_autograd(root: Expr, values: dict[Expr, Tensor], cotangent_axes: frozenset[str]) -> None:
    """derivatives() evaluated against torch.autograd.grad of the evaluated root, every leaf at once."""
    leaves = {node: x.requires_grad_() for node, x in values.items()}
    ct = leaf("ct", cotangent_axes)
    evaluate = Evaluator(leaves | {ct: draw(ct)}, N, P)
    y = evaluate(root)
    full = (*evaluate.values[ct].shape[:3], *torch.broadcast_shapes(y.shape[-2:], evaluate.values[ct].shape[-2:]))
    expected = torch.autograd.grad(
        (evaluate.values[ct] * y.expand(full)).sum(), list(leaves.values()), allow_unused=True
    )
    for (node, x), want, found in zip(leaves.items(), expected, derivatives(root, ct, list(leaves)), strict=True):
        assert found.axes <= node.axes
        got = evaluate(found).expand(2, 3, 2, *x.shape[-2:])
        # A result without one of its node's axes is constant along it.
        torch.testing.assert_close(got, torch.zeros_like(x) if want is None else want, rtol=1e-10, atol=1e-10)


def cases() -> list[tuple[str, tuple[str, ...]]]:
    """Every primitive with every combination of its operands' axes."""
    out = []
    for op in PRIMITIVES:
        if op in REDUCTIONS:
            out += [(op, (a,)) for a in AXES if REDUCTIONS[op] in AXES[a]]
        elif op == "where":
            out += [(op, (a, "s", b, c)) for a, b, c in itertools.product(AXES, repeat=3)]
        elif op not in MADE:
            out += [(op, axes) for axes in itertools.product(AXES, repeat=ARITY.get(op, 1))]
    return out


@pytest.mark.parametrize("op", sorted(MADE - {"taylor_features"}))
def test_what_torch_makes_before_kernels_run_has_no_rule(op):
    k = leaf("k", AXES["k"])
    with pytest.raises(NotImplementedError, match="made by torch before a kernel runs"):
        derivatives(Expr(op, (k,)), const(1), [k])


@pytest.mark.parametrize("op", [op for op in PRIMITIVES if op not in MADE or op == "taylor_features"])
def test_derivative_rule_of_every_primitive_is_autograd(op):
    if op == "taylor_features":
        with pytest.raises(NotImplementedError):
            derivatives(dsf.taylor_features(leaf("k", AXES["k"]), 2), const(1), [leaf("k", AXES["k"])])
        return
    found = [axes for name, axes in cases() if name == op]
    assert found
    for axes in found:
        args = [leaf(f"x{i}", AXES[a]) for i, a in enumerate(axes)]
        root = apply(op, args)
        if op in COMPARISONS:
            root = dsf.where(root, args[0], args[1])
        values = {a: draw(a, op in POSITIVE) for a in args}
        for ct_axes in {frozenset(), root.axes}:
            assert_derivatives_are_autograd(root, values, ct_axes)


@pytest.mark.parametrize("op", sorted(set(PRIMITIVES) - MADE - set(REDUCTIONS) - COMPARISONS - {"where"}))
def test_a_cotangent_with_more_axes_than_the_root_is_summed(op):
    args = [leaf(f"x{i}", AXES["s"]) for i in range(ARITY.get(op, 1))]
    values = {a: draw(a, op in POSITIVE) for a in args}
    assert_derivatives_are_autograd(apply(op, args), values, AXES["kv"])


SLOPES = {  # derivatives of the saturating ones, by formulas that lose no digits in float64
    "sigmoid": lambda x: 0.5 / (1 + x.cosh()),
    "tanh": lambda x: x.cosh() ** -2,
    "softplus": lambda x: 1 / (1 + (-x).exp()),
    "logsigmoid": lambda x: 1 / (1 + x.exp()),
    "expm1": torch.exp,
    "phi1": lambda x: (1 + x.exp() * (x - 1)) / x**2,
    "exp": torch.exp,
    "elu1": lambda x: x.clamp(max=0).exp(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SLOPES)
def test_slopes_keep_their_digits_where_functions_saturate(name: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-40, 40, 20_000, dtype=dtype).view(1, -1, 1, 1, 1).requires_grad_()
    node, far = leaf("x", AXES["s"]), x.detach().abs() > 0.5
    evaluate = Evaluator({node: x}, 1, 1)
    root = getattr(dsf, name)(node)
    want = SLOPES[name](x.detach().double())
    by_torch = torch.autograd.grad(evaluate(root).sum(), x)[0]
    by_rule = evaluate(derivatives(root, const(1), [node])[0]).detach().expand_as(x)
    for found in (by_torch, by_rule):
        error = (found - want).abs() / want
        assert float(error[far if name == "phi1" else ...].max()) < (1e-6 if dtype is torch.float32 else 1e-13)


def test_a_power_of_a_number_near_1_has_the_digits_of_its_logarithm() -> None:
    x, y = (leaf(name, AXES["s"]) for name in "xy")
    values = {x: torch.tensor(12.0).view(1, 1, 1, 1, 1), y: torch.tensor(2.5).view(1, 1, 1, 1, 1)}
    found = Evaluator(values, 1, 1)(derivatives(dsf.sigmoid(x) ** y, const(1), [y])[0])
    log = -math.log1p(math.exp(-12.0))
    assert abs(float(found) / (math.exp(2.5 * log) * log) - 1) < 1e-6


@pytest.mark.parametrize("function", [dsf.sigmoid, dsf.tanh, dsf.expm1, dsf.softplus], ids=lambda f: f.__name__)
def test_higher_derivatives_of_saturating_functions(function: Callable[[Expr], Expr]) -> None:
    node = leaf("x", AXES["s"])
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def evaluate(x: Tensor) -> Tensor:
        return Evaluator({node: x.view(1, -1, 1, 1, 1)}, 1, 1)(function(node)).flatten()

    assert torch.autograd.gradcheck(evaluate, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(evaluate, x)


UNARY = (dsf.exp, dsf.tanh, dsf.sigmoid, dsf.softplus, dsf.logsigmoid, dsf.silu, dsf.relu, dsf.elu1, dsf.abs, dsf.expm1)
BINARY = (
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    lambda a, b: a / (1 + b * b),
    lambda a, b: (1 + a * a) ** dsf.tanh(b),
    dsf.minimum,
    dsf.maximum,
    lambda a, b: dsf.where(a > b, b, a * b),
)
POSITIVE_UNARY = (dsf.log, dsf.log1p, dsf.sqrt, dsf.rsqrt)


@st.composite
def dags(draw_: st.DrawFn) -> Expr:
    """Random expressions with shared parts, reductions and constants; bounded, so that nothing overflows."""
    nodes = [leaf(name, axes) for name, axes in AXES.items()]
    for _ in range(draw_(st.integers(1, 7))):
        pick = st.sampled_from(nodes)
        kind = draw_(st.sampled_from(["unary", "binary", "positive", "number", "sum"]))
        a = draw_(pick)
        if kind == "unary":
            made = draw_(st.sampled_from(UNARY))(dsf.tanh(a))
        elif kind == "positive":
            made = draw_(st.sampled_from(POSITIVE_UNARY))(1 + a * a)
        elif kind == "number":
            made = dsf.tanh(a) * draw_(st.sampled_from([-1.5, 0.0, 0.5, 1.0])) + draw_(st.sampled_from([-1.0, 2.0]))
        elif kind == "sum":
            have = [op for op, axis in REDUCTIONS.items() if axis in a.axes]
            made = getattr(dsf, draw_(st.sampled_from(have)))(a) if have else a * dsf.N / dsf.P
        else:
            made = draw_(st.sampled_from(BINARY))(a, draw_(pick))
        nodes.append(dsf.tanh(made) if kind != "sum" else made / 4)
    return nodes[-1]


@settings(max_examples=120)
@given(dags(), st.sampled_from(list(AXES.values())))
def test_derivatives_of_random_expressions_are_autograd(root, ct_axes):
    values = {node: draw(node) for node in children_first(root) if node.op == "input"}
    assert_derivatives_are_autograd(root, values, ct_axes)


def test_derivative_with_respect_to_an_inner_node_and_to_nothing():
    k, v = leaf("k", AXES["k"]), leaf("v", AXES["v"])
    inner = dsf.exp(k)
    d_inner, d_unused = derivatives(dsf.sum_key(inner * inner), const(1), [inner, v])
    values = Evaluator({k: draw(k)}, N, P)
    torch.testing.assert_close(values(d_inner), 2 * values(inner))
    assert d_unused is const(0)


@pytest.mark.parametrize(
    "f, x", [(lambda x: x**2, 0.0), (dsf.abs, 0.0), (dsf.relu, 0.0), (lambda x: 0.0**x, 2.0), (lambda x: x**0, 0.0)]
)
def test_derivatives_are_finite_where_torch_s_are(f, x):
    s = leaf("s", AXES["s"])
    at = torch.full((1, 1, 1, 1, 1), x, dtype=torch.float64, requires_grad=True)
    values = Evaluator({s: at}, N, P)
    (want,) = torch.autograd.grad(values(f(s)).sum(), at)
    (found,) = derivatives(f(s), const(1), [s])
    assert values(found).item() == want.item()


@pytest.mark.parametrize("x", [-800.0, -30.0, -1e-12, 0.0, 1e-12, 19.0, 21.0, 39.0, 41.0, 800.0])
def test_softplus_keeps_the_digits_of_float64(x):
    s = leaf("s", AXES["s"])
    got = Evaluator({s: torch.full((1, 1, 1, 1, 1), x, dtype=torch.float64)}, N, P)(dsf.softplus(s)).item()
    want = x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))
    assert got == pytest.approx(want, rel=1e-15)


S, K, V = leaf("s", AXES["s"]), leaf("k", AXES["k"]), leaf("v", AXES["v"])
LOGS = {
    "exp": dsf.exp(K),
    "sigmoid": dsf.sigmoid(S),
    "one minus a sigmoid": 1 - dsf.sigmoid(S),
    "product": dsf.exp(S) * dsf.sigmoid(K),
    "quotient": dsf.sigmoid(K) / dsf.exp(S),
    "power": dsf.sigmoid(K) ** 0.0625,
    "power of a power": (dsf.exp(K) ** S) ** 2,
    "square root": dsf.sqrt(dsf.exp(K) * 3),
    "reciprocal root": dsf.rsqrt(dsf.sigmoid(K)),
    "constant": const(0.9),
    "one": const(1),
    "paper": dsf.exp(-dsf.exp(K) * dsf.softplus(V)),
}
NO_LOGS = {
    "input": K,
    "sum": dsf.exp(K) + 1,
    "difference": 2 - dsf.sigmoid(K),
    "product with an input": dsf.exp(K) * V,
    "negative": -dsf.exp(K),
    "zero": const(0),
    "choice": dsf.where(S > 0, 0.0, dsf.exp(S)),
    "tanh": dsf.tanh(K),
    "reduction": dsf.sum_key(dsf.exp(K)),
}


@pytest.mark.parametrize("name", LOGS)
def test_log_of_is_the_logarithm(name):
    values = Evaluator({node: draw(node) for node in (S, K, V)}, N, P)
    rewritten = log_of(LOGS[name])
    assert rewritten is not None and not any(node.op == "log" for node in children_first(rewritten))
    torch.testing.assert_close(values(rewritten), values(LOGS[name]).log(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("expr, at, want", [(dsf.exp(S), -1000.0, -1000.0), (dsf.sigmoid(S), -500.0, -500.0),
                                            (dsf.exp(S) * dsf.sigmoid(S), -900.0, -1800.0),
                                            (1 - dsf.sigmoid(S), 600.0, -600.0)])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_of_stays_finite_where_the_expression_underflows(expr, at, want, dtype):
    values = Evaluator({S: torch.full((1, 1, 1, 1, 1), at, dtype=dtype)}, N, P)
    assert values(log_of(expr)).item() == want
    assert values(expr).item() < 1e-200


@pytest.mark.parametrize("name", NO_LOGS)
def test_what_is_no_product_of_exponentials_and_sigmoids_has_no_log(name):
    assert log_of(NO_LOGS[name]) is None


def test_features_multiply_to_the_truncated_exponential():
    q, k = leaf("q", AXES["k"]), leaf("k", AXES["k"])
    values = Evaluator({q: draw(q), k: draw(k)}, N, P)
    scores = (values(q) * values(k)).sum(-2, keepdim=True)
    for order in range(4):
        got = values(dsf.dot(dsf.taylor_features(q, order), dsf.taylor_features(k, order)))
        want = sum(scores**p / math.factorial(p) for p in range(order + 1))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrong", [S, V, K * V, dsf.taylor_features(K, 1)])
def test_features_are_made_of_key_vectors_alone(wrong):
    for make in (dsf.exp_features, lambda x: dsf.taylor_features(x, 2)):
        with pytest.raises(TraceError, match="features are made of an expression with the Key axis alone"):
            make(wrong)


@pytest.mark.parametrize("order", [-1, 1.5, "2", True])
def test_orders_are_integers_of_at_least_zero(order):
    with pytest.raises(TraceError, match="the order must be an integer of at least 0"):
        dsf.taylor_features(K, order)


@pytest.mark.parametrize("condition", [True, 1.0, S, S * 2])
def test_where_takes_comparisons(condition):
    with pytest.raises(TraceError, match="where needs a comparison"):
        dsf.where(condition, K, V)


@pytest.mark.parametrize("function", [dsf.sigmoid, dsf.tanh, dsf.expm1], ids=lambda f: f.__name__)
def test_derivatives_that_nobody_can_ask_for_take_no_graph(
    function: Callable[[Expr], Expr], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch.func and forward mode ask for without a graph is exact where functions saturate, too."""
    node = leaf("x", AXES["s"])
    x = torch.tensor([-30.0, -1.0, 1.0, 12.0], dtype=torch.float64)

    def evaluate(x: Tensor) -> Tensor:
        return Evaluator({node: x.view(1, -1, 1, 1, 1)}, 1, 1)(function(node)).flatten()

    leaf_of_graph = x.clone().requires_grad_()
    assert evaluate(leaf_of_graph).grad_fn is not None
    with torch.no_grad():
        with monkeypatch.context() as changed:
            changed.setattr(_Sloped, "apply", None)
            assert evaluate(leaf_of_graph).equal(evaluate(x))
        want = SLOPES[function.__name__](x)
        along = torch.func.jvp(evaluate, (x,), (torch.ones_like(x),))[1]
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(evaluate(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    side_by_side = torch.func.grad(lambda x: torch.func.vmap(evaluate)(x).sum())(x)
    for found in (along, dual, side_by_side):
        torch.testing.assert_close(found, want, rtol=1e-13, atol=0)
