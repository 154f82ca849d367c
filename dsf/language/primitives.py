"""The table of primitives: how each is computed, its derivative, and its logarithm.

One row a primitive. `torch` computes it; `grad(node, ct)` gives the cotangent of each operand as expressions (before
the sum over axes an operand does not have); `log(node)` rewrites log(node) without computing node, or is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsf.language.errors import TraceError
from dsf.language.expr import (
    COMPARISONS,
    KEY,
    REDUCTIONS,
    VALUE,
    Expr,
    Like,
    as_expr,
    children_first,
    const,
    inputs_of,
    is_paired,
    reduction,
)

Cotangents = tuple["Expr | None", ...]


@dataclass(frozen=True)
class Primitive:
    """One row of the table."""

    torch: Callable[..., Tensor]
    grad: Callable[[Expr, Expr], Cotangents]
    log: Callable[[Expr], Expr | None] | None = None


def _call(op: str, *args: Like) -> Expr:
    return Expr(op, tuple(as_expr(a) for a in args))


def exp(x: Like) -> Expr:
    """e^x."""
    return _call("exp", x)


def log(x: Like) -> Expr:
    """Natural logarithm."""
    return _call("log", x)


def log1p(x: Like) -> Expr:
    """log(1 + x), accurate near 0."""
    return _call("log1p", x)


def expm1(x: Like) -> Expr:
    """e^x - 1, accurate near 0."""
    return _call("expm1", x)


def sqrt(x: Like) -> Expr:
    """Square root."""
    return _call("sqrt", x)


def rsqrt(x: Like) -> Expr:
    """1 / sqrt(x)."""
    return _call("rsqrt", x)


def sigmoid(x: Like) -> Expr:
    """1 / (1 + e^-x)."""
    return _call("sigmoid", x)


def logsigmoid(x: Like) -> Expr:
    """log(sigmoid(x)) without underflow."""
    return _call("logsigmoid", x)


def softplus(x: Like) -> Expr:
    """log(1 + e^x) without overflow."""
    return _call("softplus", x)


def tanh(x: Like) -> Expr:
    """Hyperbolic tangent."""
    return _call("tanh", x)


def silu(x: Like) -> Expr:
    """x · sigmoid(x)."""
    x = as_expr(x)
    return x * sigmoid(x)


def phi1(x: Like) -> Expr:
    """(e^x - 1) / x, and 1 at 0: the φ₁ of exponential integrators."""
    return _call("phi1", x)


def relu(x: Like) -> Expr:
    """max(x, 0); derivative 0 at 0."""
    x = as_expr(x)
    return where(x > 0, x, 0.0)


def elu1(x: Like) -> Expr:
    """elu(x) + 1, the feature map of linear attention (Katharopoulos et al. 2020, eq. 7)."""
    x = as_expr(x)
    return where(x > 0, x + 1.0, exp(minimum(x, 0.0)))


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
    """The angle of the point (x, y), between -π and π; at (0, 0) it has no derivative."""
    return _call("atan2", y, x)


def pair(re: Like, im: Like) -> Expr:
    """Complex numbers along the Key axis: re at the places 2i, im at the places 2i + 1.

    re, im: expressions equal within a pair, of Pair inputs, or without a Key axis. Raises TraceError for others.
    """
    re, im = as_expr(re), as_expr(im)
    for x in (re, im):
        if not is_paired(x):
            raise TraceError(
                f"pair({re}, {im}): `{x}` has an entry a place, a pair is made of one number each; annotate it Pair or "
                "Param[Pair] (N / 2 entries), or make it of Scalars"
            )
    return Expr("pair", (re, im), (), re.axes | im.axes | {KEY})


def quarter_turn(x: Like) -> Expr:
    """Pairs (x, y) of the Key axis become (-y, x): complex numbers times i. Raises TraceError without a Key axis."""
    x = as_expr(x)
    if KEY not in x.axes or x.features is not None:
        raise TraceError(f"quarter_turn({x}) turns pairs of the N places of the Key axis, which its argument lacks")
    return Expr("quarter_turn", (x,))


def minimum(a: Like, b: Like) -> Expr:
    """The smaller; where equal, both share the derivative."""
    return _call("minimum", a, b)


def maximum(a: Like, b: Like) -> Expr:
    """The larger; where equal, both share the derivative."""
    return _call("maximum", a, b)


def where(condition: Any, a: Like, b: Like) -> Expr:
    """a where condition (a comparison such as x > 0) holds, else b. Raises TraceError for any other condition."""
    if not (isinstance(condition, Expr) and condition.op in COMPARISONS):
        raise TraceError(f"where needs a comparison of expressions (>, >=, <, <=) as its condition, got {condition!r}")
    return Expr("where", (condition, as_expr(a), as_expr(b)))


def sum_key(x: Like) -> Expr:
    """Sum over the Key axis. Raises TraceError when x has none."""
    return reduction("sum_key", as_expr(x))


def sum_value(x: Like) -> Expr:
    """Sum over the Value axis. Raises TraceError when x has none."""
    return reduction("sum_value", as_expr(x))


def dot(a: Like, b: Like) -> Expr:
    """⟨a, b⟩, the sum of a·b over the Key axis."""
    return sum_key(as_expr(a) * b)


def l2norm(x: Like, eps: float = 1e-6) -> Expr:
    """x / sqrt(⟨x, x⟩ + eps) over the Key axis."""
    x = as_expr(x)
    return x * rsqrt(dot(x, x) + eps)


def exp_features(x: Like) -> Expr:
    """Infinite features with ⟨φ(a), φ(b)⟩ = exp(⟨a, b⟩): all monomials, degree p weighted 1/√p! (DSF Lemma 1).

    Raises TraceError unless x has the Key axis alone.
    """
    x = _key_vector("exp_features", x)
    return Expr("exp_features", (x,), (), x.axes, "exp")


def taylor_features(x: Like, order: int) -> Expr:
    """The same, cut after degree `order`: N' = Σ_{p ≤ order} N^p finite features.

    Raises TraceError unless x has the Key axis alone and order is an integer of at least 0.
    """
    x = _key_vector("taylor_features", x)
    if type(order) is not int or order < 0:
        raise TraceError(f"taylor_features({x}, {order}): the order must be an integer of at least 0")
    return Expr("taylor_features", (x,), (order,), x.axes, f"taylor{order}")


def prev(x: Like) -> Expr:
    """x of the token before, zero where a sequence begins. A state holds what this takes: the factors of a product.

    Raises TraceError for a number; a recurrence refuses an x of Params alone, which no token changes.
    """
    x = as_expr(x)
    if not inputs_of(x):
        raise TraceError(
            f"prev({x}): a number is the same for every token; prev takes what changes from token to token"
        )
    if x.features is not None:
        raise TraceError(f"prev({x}): features have no previous value; take the features of prev of their argument")
    return Expr("prev", (x,))


def _key_vector(name: str, x: Like) -> Expr:
    x = as_expr(x)
    if x.axes != {KEY} or x.features is not None:
        raise TraceError(f"{name}({x}): features are made of an expression with the Key axis alone and N entries")
    return x


N = Expr("size", (), (KEY,), frozenset())
P = Expr("size", (), (VALUE,), frozenset())


def log_of(x: Expr) -> Expr | None:
    """log x rewritten so that x itself is never computed (exp(u) → u, products → sums), or None.

    None means: x is not a product of exponentials and sigmoids, may be zero or negative, and is used as it is.
    """
    if x.is_constant:
        return const(math.log(x.value)) if x.value > 0 else None
    rule = PRIMITIVES[x.op].log if x.op in PRIMITIVES else None
    return rule(x) if rule else None


def _log_mul(x: Expr) -> Expr | None:
    a, b = (log_of(arg) for arg in x.args)
    return a + b if a is not None and b is not None else None


def _log_div(x: Expr) -> Expr | None:
    a, b = (log_of(arg) for arg in x.args)
    return a - b if a is not None and b is not None else None


def _log_pow(x: Expr) -> Expr | None:
    base = log_of(x.args[0])
    return base * x.args[1] if base is not None else None


def _log_one_minus(x: Expr) -> Expr | None:
    """log(1 - sigmoid(u)) = logsigmoid(-u)."""
    one, s = x.args
    if one.is_constant and one.value == 1 and s.op == "sigmoid":
        return logsigmoid(-s.args[0])
    return None


def _scaled_log(scale: float) -> Callable[[Expr], Expr | None]:
    def rule(x: Expr) -> Expr | None:
        inner = log_of(x.args[0])
        return inner * scale if inner is not None else None

    return rule


def _share(first: Callable[[Expr, Expr], Expr]) -> Callable[[Expr, Expr], Cotangents]:
    """minimum and maximum: half to each operand where they tie, as torch does."""

    def rule(x: Expr, ct: Expr) -> Cotangents:
        a, b = x.args
        wins, loses = first(a, b), first(b, a)
        return where(wins, ct, where(loses, 0.0, ct * 0.5)), where(loses, ct, where(wins, 0.0, ct * 0.5))

    return rule


def _grad_mul(x: Expr, ct: Expr) -> Cotangents:
    a, b = x.args
    return (ct * 2.0 * a, None) if a is b else (ct * b, ct * a)


def _grad_pow(x: Expr, ct: Expr) -> Cotangents:
    base, power = x.args
    if power.is_constant:
        return ct * power * base ** (power - 1) if power.value else None, None
    slope = ct * where(abs(power) > 0, power * base ** (power - 1), 0.0)  # x⁰ is flat, at x = 0 too
    return slope, ct * x * log(where(abs(base) > 0, base, 1.0))  # and so is 0ʸ


def _none(count: int) -> Callable[[Expr, Expr], Cotangents]:
    return lambda x, ct: (None,) * count


def _no_features(*_: Any) -> Any:
    raise NotImplementedError("exponential features are differentiated by the form that uses them")


def _not_printed(*_: Any) -> Any:
    raise NotImplementedError("made by torch before a kernel runs, and differentiated there")


def _shifted(x: Tensor) -> Tensor:
    """[B, T, ...] one token later, zeros first."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


def _pair(re: Tensor, im: Tensor, keys: int) -> Tensor:
    """re and im [..., 1 or N, p], equal within pairs -> [..., N, p]."""
    even = torch.arange(keys, device=re.device).unsqueeze(-1) % 2 == 0
    return torch.where(even, re, im)


def _quarter_turn(x: Tensor) -> Tensor:
    """[..., N, p] -> [..., N, p]."""
    first, second = x.unflatten(-2, (-1, 2)).unbind(-2)
    return torch.stack([-second, first], dim=-2).flatten(-3, -2)


def _softplus(x: Tensor) -> Tensor:
    """F.softplus turns to the identity at 20, which costs float64 half of its digits there, and torch.compile is told
    other strides of its gradient than it has."""
    return torch.logaddexp(x, x.new_zeros(()))


NEAR, TERMS = 0.3, 14  # |x| up to which phi1 is a series; its rest, and that of its derivative, is below 1e-15


def _phi1(x: Tensor) -> Tensor:
    """Without the cancellation of e^x - 1 near 0, nor that of its derivative."""
    near = x.abs() < NEAR
    small = torch.where(near, x, 0.0)  # far from 0 the series is left out, and must not overflow
    series = torch.ones_like(x)
    for term in range(TERMS, 1, -1):
        series = 1 + small / term * series
    return torch.where(near, series, torch.expm1(x) / torch.where(near, 1.0, x))


def _grad_phi1(x: Expr, ct: Expr) -> Cotangents:
    """φ₁ + (1 - φ₁) / x, near 0 the series Σ x^j / (j! (j + 2))."""
    near = abs(x.args[0]) < NEAR
    small = where(near, x.args[0], 0.0)
    series: Expr = const(1 / (math.factorial(TERMS) * (TERMS + 2)))
    for j in range(TERMS - 1, -1, -1):
        series = series * small + 1 / (math.factorial(j) * (j + 2))
    return (ct * where(near, series, x + (1 - x) / where(near, 1.0, x.args[0])),)


def _taylor(x: Tensor, order: int) -> Tensor:
    """x [..., N, 1] -> [..., Σ N^p, 1]: monomials of each degree p, weighted 1/√p!."""
    flat = x.squeeze(-1)
    parts, power = [torch.ones_like(flat[..., :1])], flat[..., :0]
    for p in range(1, order + 1):
        power = flat if p == 1 else (power.unsqueeze(-1) * flat.unsqueeze(-2)).flatten(-2) / p**0.5
        parts.append(power)
    return torch.cat(parts, dim=-1).unsqueeze(-1)


PRIMITIVES: dict[str, Primitive] = {
    "add": Primitive(torch.add, lambda x, ct: (ct, ct)),
    "sub": Primitive(torch.sub, lambda x, ct: (ct, -ct), _log_one_minus),
    "mul": Primitive(torch.mul, _grad_mul, _log_mul),
    "div": Primitive(torch.div, lambda x, ct: (ct / x.args[1], -ct * x / x.args[1]), _log_div),
    "pow": Primitive(torch.pow, _grad_pow, _log_pow),
    "exp": Primitive(torch.exp, lambda x, ct: (ct * x,), lambda x: x.args[0]),
    "log": Primitive(torch.log, lambda x, ct: (ct / x.args[0],)),
    "log1p": Primitive(torch.log1p, lambda x, ct: (ct / (x.args[0] + 1.0),)),
    "expm1": Primitive(torch.expm1, lambda x, ct: (ct * (x + 1.0),)),
    "phi1": Primitive(_phi1, _grad_phi1),
    "sqrt": Primitive(torch.sqrt, lambda x, ct: (ct * 0.5 / x,), _scaled_log(0.5)),
    "rsqrt": Primitive(torch.rsqrt, lambda x, ct: (ct * -0.5 * x * x * x,), _scaled_log(-0.5)),
    "sigmoid": Primitive(torch.sigmoid, lambda x, ct: (ct * x * (1.0 - x),), lambda x: logsigmoid(x.args[0])),
    "logsigmoid": Primitive(F.logsigmoid, lambda x, ct: (ct * sigmoid(-x.args[0]),)),
    "softplus": Primitive(_softplus, lambda x, ct: (ct * sigmoid(x.args[0]),)),
    "tanh": Primitive(torch.tanh, lambda x, ct: (ct * (1.0 - x * x),)),
    "abs": Primitive(torch.abs, lambda x, ct: (where(x.args[0] > 0, ct, where(x.args[0] < 0, -ct, 0.0)),)),
    "minimum": Primitive(torch.minimum, _share(lambda a, b: a < b)),
    "maximum": Primitive(torch.maximum, _share(lambda a, b: a > b)),
    "where": Primitive(torch.where, lambda x, ct: (None, where(x.args[0], ct, 0.0), where(x.args[0], 0.0, ct))),
    "gt": Primitive(torch.gt, _none(2)),
    "ge": Primitive(torch.ge, _none(2)),
    "lt": Primitive(torch.lt, _none(2)),
    "le": Primitive(torch.le, _none(2)),
    "sum_key": Primitive(lambda x: x.sum(-2, keepdim=True), lambda x, ct: (ct,)),
    "sum_value": Primitive(lambda x: x.sum(-1, keepdim=True), lambda x, ct: (ct,)),
    "taylor_features": Primitive(_taylor, _no_features),
    "prev": Primitive(_shifted, _not_printed),
    "sin": Primitive(torch.sin, _not_printed),
    "cos": Primitive(torch.cos, _not_printed),
    "atan2": Primitive(torch.atan2, _not_printed),
    "pair": Primitive(_pair, _not_printed),
    "quarter_turn": Primitive(_quarter_turn, _not_printed),
    "spread": Primitive(lambda x: x.repeat_interleave(2, dim=-2), _not_printed),
}


def derivatives(root: Expr, cotangent: Expr, wrt: list[Expr], late: str | None = None) -> list[Expr]:
    """Reverse-mode derivative by the table: gradient of Σ cotangent·root in each node of `wrt`, as expressions.

    Each result has no axis that its node lacks (sums over the others are inserted); an axis it lacks itself is one
    over which it is constant. 0 where root does not depend on the node.
    late: an axis summed over only in the results (the derivative is linear), one sum a node instead of one a path.
    """
    order = children_first(root)
    for op, axis in REDUCTIONS.items():
        if axis in cotangent.axes and axis not in root.axes:
            cotangent = reduction(op, cotangent)
    adjoint: dict[Expr, Expr] = {root: cotangent}
    for node in reversed(order):
        if node not in adjoint or not node.args:
            continue
        for arg, ct in zip(node.args, PRIMITIVES[node.op].grad(node, adjoint[node]), strict=True):
            if ct is None or arg.is_constant:
                continue
            for op, axis in REDUCTIONS.items():
                if axis == late:
                    continue
                if axis in ct.axes and axis not in arg.axes:
                    ct = reduction(op, ct)
                elif axis in node.axes and axis not in arg.axes and axis not in ct.axes:
                    ct = ct * (N if axis == KEY else P)  # a constant cotangent, summed
            adjoint[arg] = adjoint[arg] + ct if arg in adjoint else ct
    found = [adjoint.get(node, const(0)) for node in wrt]
    for op, axis in REDUCTIONS.items():
        if axis == late:
            found = [reduction(op, x) if axis in x.axes - n.axes else x for x, n in zip(found, wrt, strict=True)]
    return found
