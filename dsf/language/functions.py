"""The functions that declarations are written in. Each makes an expression; `primitives` computes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dsf.language.errors import TraceError
from dsf.language.expr import ARITHMETIC, COMPARISONS, KEY, VALUE, Expr, Like, as_expr, inputs_of, is_paired, reduction
from dsf.language.instead import FUNCTIONS
from dsf.language.places import PAIRS, note

N = Expr("size", (), (KEY,), frozenset())
P = Expr("size", (), (VALUE,), frozenset())


NUMBERS: dict[str, Callable[..., float]] = {  # of functions of numbers; those of one raise where they have no value
    **ARITHMETIC,
    **{name: getattr(math, name) for name in ("exp", "expm1", "log", "log1p", "sqrt", "tanh", "sin", "cos", "atan2")},
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "minimum": min,
    "maximum": max,
    "abs": math.fabs,
}


def _call(op: str, *args: Like) -> Expr:
    found = Expr(op, tuple(as_expr(a) for a in args))
    if op in NUMBERS:
        _number_of(found)
    return found


def _number_of(x: Expr, levels: int = 8) -> float | None:
    """The value of an expression of numbers alone, None for any other and for one of more levels. Raises TraceError
    where there is no value."""
    if x.is_constant:
        return x.value
    if x.axes or x.op not in NUMBERS or not levels:
        return None
    numbers = list[float]()
    for a in x.args:
        number = _number_of(a, levels - 1)
        if number is None:
            return None
        numbers.append(number)
    try:
        found = NUMBERS[x.op](*numbers)
    except (ArithmeticError, ValueError):
        found = math.nan
    if isinstance(found, complex) or math.isnan(found) or (math.isinf(found) and all(map(math.isfinite, numbers))):
        raise TraceError(f"`{x}` is not a real number")
    return found


def exp(x: Like) -> Expr:
    """e^x."""
    return _call("exp", x)


def expm1(x: Like) -> Expr:
    """e^x - 1, accurate near 0."""
    return _call("expm1", x)


def phi1(x: Like) -> Expr:
    """(e^x - 1) / x, and 1 at 0: the φ₁ of exponential integrators."""
    return _call("phi1", x)


def elu1(x: Like) -> Expr:
    """elu(x) + 1, the feature map of linear attention (Katharopoulos et al. 2020, equation 7)."""
    x = as_expr(x)
    return where(x > 0, x + 1.0, exp(minimum(x, 0.0)))


def log(x: Like) -> Expr:
    """Natural logarithm."""
    return _call("log", x)


def log1p(x: Like) -> Expr:
    """log(1 + x), accurate near 0."""
    return _call("log1p", x)


def relu(x: Like) -> Expr:
    """max(x, 0); derivative 0 at 0."""
    x = as_expr(x)
    return where(x > 0, x, 0.0)


def sqrt(x: Like) -> Expr:
    """Square root."""
    return _call("sqrt", x)


def rsqrt(x: Like) -> Expr:
    """1 / sqrt(x)."""
    return _call("rsqrt", x)


def silu(x: Like) -> Expr:
    """x · sigmoid(x)."""
    x = as_expr(x)
    return x * sigmoid(x)


def sigmoid(x: Like) -> Expr:
    """1 / (1 + e^-x)."""
    return _call("sigmoid", x)


def complement(x: Like) -> Expr:
    """1 - sigmoid(x) = σ(-x), without cancellation. Kernels compute it and sigmoid(x) from one exponential."""
    return _call("complement", x)


def logsigmoid(x: Like) -> Expr:
    """log(sigmoid(x)) without underflow."""
    return _call("logsigmoid", x)


def minimum(a: Like, b: Like) -> Expr:
    """The smaller of a and b, entry by entry. Where they are equal, each gets half of the derivative."""
    return _call("minimum", a, b)


def maximum(a: Like, b: Like) -> Expr:
    """The larger of a and b, entry by entry. Where they are equal, each gets half of the derivative."""
    return _call("maximum", a, b)


def softplus(x: Like) -> Expr:
    """log(1 + e^x) without overflow."""
    return _call("softplus", x)


def tanh(x: Like) -> Expr:
    """Hyperbolic tangent."""
    return _call("tanh", x)


def tanh_slope(x: Like) -> Expr:
    """The derivative of tanh, 1 - tanh(x)² = 4 σ(2x) σ(-2x), without cancellation."""
    return _call("tanh_slope", x)


def where(condition: Any, a: Like, b: Like) -> Expr:
    """a where the condition holds, else b. Raises TraceError unless the condition is a comparison, such as x > 0."""
    if not (isinstance(condition, Expr) and condition.op in COMPARISONS):
        raise TraceError(f"where needs a comparison of expressions (>, >=, <, <=) as its condition, got {condition!r}")
    return Expr("where", (condition, as_expr(a), as_expr(b)))


def abs(x: Like) -> Expr:
    """|x|; derivative 0 at 0."""
    return _call("abs", x)


def sin(x: Like) -> Expr:
    """Sine, of radians."""
    return _call("sin", x)


def cos(x: Like) -> Expr:
    """Cosine, of radians."""
    return _call("cos", x)


def atan2(y: Like, x: Like) -> Expr:
    """The angle of the point (x, y), in radians from -π to π. At (0, 0) it has no derivative."""
    return _call("atan2", y, x)


def pair(re: Like, im: Like) -> Expr:
    """Complex numbers along the Key axis: re at the places 2i, im at the places 2i + 1.

    re, im: expressions of Pair inputs, which are equal within a pair, or without a Key axis. Raises TraceError for
    others.
    """
    re, im = as_expr(re), as_expr(im)
    for x in (re, im):
        if not is_paired(x):
            raise TraceError(
                f"pair({re}, {im}): `{x}` has an entry a place, a pair is made of one number each; annotate it Pair or "
                "Param[Pair] (N / 2 entries), or make it of Scalars"
            )
    note(PAIRS)
    return Expr("pair", (re, im), (), re.axes | im.axes | {KEY})


def quarter_turn(x: Like) -> Expr:
    """Every pair (x, y) of the Key axis becomes (-y, x), a complex number times i.

    Raises TraceError for an x without a Key axis, and for features.
    """
    x = as_expr(x)
    if KEY not in x.axes or x.features is not None:
        raise TraceError(f"quarter_turn({x}) turns pairs of the N places of the Key axis, which its argument lacks")
    note(PAIRS)
    return Expr("quarter_turn", (x,))


def sum_key(x: Like) -> Expr:
    """The sum over the Key axis. Raises TraceError for an x without a Key axis."""
    return reduction("sum_key", as_expr(x))


def sum_value(x: Like) -> Expr:
    """The sum over the Value axis. Raises TraceError for an x without a Value axis."""
    return reduction("sum_value", as_expr(x))


def dot(a: Like, b: Like) -> Expr:
    """⟨a, b⟩, the sum of a · b over the Key axis.

    Raises TraceError where neither has a Key axis, and where one has a Key axis and the other a Value axis alone.
    """
    a, b = as_expr(a), as_expr(b)
    for x, other in ((a, b), (b, a)):
        if x.axes == {VALUE} and KEY in other.axes:
            raise TraceError(
                f"dot({a}, {b}) sums over the Key axis, but `{x}` has none, it varies over the Value axis; annotate it "
                f"Key, or write {x} * sum_key({other})"
            )
    return sum_key(a * b)


def l2norm(x: Like, eps: float = 1e-6) -> Expr:
    """x / sqrt(⟨x, x⟩ + eps), with the sum over the Key axis. Raises TraceError for an x without a Key axis."""
    x = as_expr(x)
    return x * rsqrt(dot(x, x) + eps)


def exp_features(x: Like) -> Expr:
    """Infinitely many features φ with ⟨φ(a), φ(b)⟩ = exp(⟨a, b⟩): all monomials, those of degree p times 1/√p!.

    Source: DSF (arXiv 2405.15731), Lemma 1. Raises TraceError unless x has the Key axis alone, with N entries.
    """
    x = _key_vector("exp_features", x)
    return Expr("exp_features", (x,), (), x.axes, "exp")


def taylor_features(x: Like, order: int) -> Expr:
    """The features of `exp_features` up to degree `order`: the (N + order choose order) monomials x^α, times 1/√α!.

    Raises TraceError unless x has the Key axis alone, with N entries, and order is an integer of at least 0.
    """
    x = _key_vector("taylor_features", x)
    if type(order) is not int or order < 0:
        raise TraceError(f"taylor_features({x}, {order}): the order must be an integer of at least 0")
    return Expr("taylor_features", (x,), (order,), x.axes, f"taylor{order}")


def _key_vector(name: str, x: Like) -> Expr:
    x = as_expr(x)
    if x.axes != {KEY} or x.features is not None:
        raise TraceError(f"{name}({x}): features are made of an expression with the Key axis alone and N entries")
    return x


def prev(x: Like) -> Expr:
    """x of the token before, zero where a sequence begins. The state holds the values that this needs.

    Raises TraceError for a number and for features. A recurrence refuses an x of Params alone, which no token changes.
    """
    x = as_expr(x)
    if not inputs_of(x):
        raise TraceError(
            f"prev({x}): a number is the same for every token; prev takes what changes from token to token"
        )
    if x.features is not None:
        raise TraceError(f"prev({x}): features have no previous value; take the features of prev of their argument")
    return note(Expr("prev", (x,)))


FUNCTIONS.update(
    name for name, x in list(globals().items()) if getattr(x, "__module__", "") == __name__ and name[0] != "_"
)
