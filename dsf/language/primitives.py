"""The table of primitives: each one's value, derivative and logarithm.

One row each. `torch` computes it; `grad(node, ct)` gives the cotangent of each operand as expressions (before
the sum over axes an operand does not have); `log(node)` rewrites log(node) without computing node, or is None.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from dsf.language.expr import KEY, REDUCTIONS, Expr, children_first, const, reduction
from dsf.language.functions import (
    N,
    P,
    abs,
    complement,
    cos,
    exp,
    log,
    logsigmoid,
    sigmoid,
    sin,
    tanh,
    tanh_slope,
    where,
)

Cotangents = tuple["Expr | None", ...]


@dataclass(frozen=True)
class Primitive:
    """One row of the table."""

    torch: Callable[..., Tensor]
    grad: Callable[[Expr, Expr], Cotangents]
    log: Callable[[Expr], Expr | None] | None = None


def log_of(x: Expr) -> Expr | None:
    """log x rewritten so that x itself is never computed (exp(u) → u, products → sums), or None.

    None means: x is not a product of exponentials and sigmoids, and may be zero or negative.
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
    """The derivative of minimum and maximum: half to each operand where they are equal, as in torch."""

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
    known = log_of(base)  # log computed from a base near 1 would lose digits
    return slope, ct * x * (log(where(abs(base) > 0, base, 1.0)) if known is None else known)  # 0ʸ is flat, too


def _none(count: int) -> Callable[[Expr, Expr], Cotangents]:
    return lambda x, ct: (None,) * count


def _no_features(*_: Any) -> Any:
    raise NotImplementedError("exponential features are differentiated by the form that uses them")


def _not_printed(*_: Any) -> Any:
    raise NotImplementedError("made by torch before a kernel runs, and differentiated there")


def _shifted(x: Tensor) -> Tensor:
    """x [B, T, ...] delayed by one token, zeros first."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


def _pair(re: Tensor, im: Tensor, keys: int) -> Tensor:
    """re and im [..., 1 or N, p], equal within pairs -> [..., N, p]."""
    even = torch.arange(keys, device=re.device).unsqueeze(-1) % 2 == 0
    return torch.where(even, re, im)


def _quarter_turn(x: Tensor) -> Tensor:
    """[..., N, p] -> [..., N, p]."""
    first, second = x.unflatten(-2, (-1, 2)).unbind(-2)
    return torch.stack([-second, first], dim=-2).flatten(-3, -2)


def _sigmoid_slope(x: Tensor) -> Tensor:
    return _sigmoid(x) * _sigmoid(-x)


def _tanh_slope(x: Tensor) -> Tensor:
    return 4 * _sigmoid_slope(2 * x)


class _Sloped(torch.autograd.Function):
    """value(x) with the derivative slope(x), where torch's own, computed from the value, loses digits near 1.

    slope consists of differentiable operations, so higher derivatives, torch.func and forward mode work.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, value: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> Tensor:
        return value(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, _, ctx.slope = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None, None]:
        return given[0] * ctx.slope(*ctx.saved_tensors), None, None

    @staticmethod
    def jvp(ctx: Any, *along: Any) -> Tensor:
        return along[0] * ctx.slope(*ctx.saved_tensors)


# Torch asks for it at every call, and would look through the source each time: 8 of 20 µs.
setattr(_Sloped.forward, "__signature__", inspect.signature(_Sloped.forward))  # noqa: B010


def _sloped(x: Tensor, value: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> Tensor:
    """value(x); nothing is kept for a derivative that nobody can ask for, as in the backward pass of another."""
    kept = x.requires_grad and torch.is_grad_enabled()
    if not (kept or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()):
        return value(x)
    return _Sloped.apply(x, value, slope)


def _sigmoid(x: Tensor) -> Tensor:
    return _sloped(x, torch.sigmoid, _sigmoid_slope)


def _tanh(x: Tensor) -> Tensor:
    return _sloped(x, torch.tanh, _tanh_slope)


def _expm1(x: Tensor) -> Tensor:
    return _sloped(x, torch.expm1, torch.exp)


def _softplus(x: Tensor) -> Tensor:
    """softplus. F.softplus switches to the identity at 20, which costs float64 half of its digits there, and it reports
    wrong strides of its gradient to torch.compile."""
    return torch.logaddexp(x, x.new_zeros(()))


NEAR, TERMS = 1.0, 18  # |x| up to which phi1 is a series; its rest, and that of its derivative, is below 1e-15


def _phi1(x: Tensor) -> Tensor:
    """(e^x - 1) / x without cancellation near 0, in the value and in its derivative."""
    near = x.abs() < NEAR
    small = torch.where(near, x, 0.0)  # far from 0 the series is not used, and must not overflow
    series = torch.ones_like(x)
    for term in range(TERMS, 1, -1):
        series = 1 + small / term * series
    return torch.where(near, series, _expm1(x) / torch.where(near, 1.0, x))


def _grad_phi1(x: Expr, ct: Expr) -> Cotangents:
    """The derivative (eˣ - φ₁) / x, near 0 by the series Σ x^j / (j! (j + 2))."""
    near = abs(x.args[0]) < NEAR
    small = where(near, x.args[0], 0.0)
    series: Expr = const(1 / (math.factorial(TERMS) * (TERMS + 2)))
    for j in range(TERMS - 1, -1, -1):
        series = series * small + 1 / (math.factorial(j) * (j + 2))
    return (ct * where(near, series, (exp(x.args[0]) - x) / where(near, 1.0, x.args[0])),)


def _taylor(x: Tensor, order: int) -> Tensor:
    """x [..., N, 1] -> [..., C(N + order, order), 1]: the monomials x^α of each degree, each once, weighted 1/√α!.

    The monomials of a degree are ordered by their first entry i, then by its exponent.
    """
    entries = x.squeeze(-1).split(1, dim=-1)
    powers = [torch.ones_like(entries[0])]
    own = [[(0, powers[0][..., :0])] for _ in entries]  # for every first entry: (its exponent, monomials)
    for p in range(1, order + 1):
        below, behind, grown = powers[-1], 0, []
        for entry, parts in zip(entries, own, strict=True):
            behind += sum(part.shape[-1] for _, part in parts)
            first = entry * (below if p == 1 else below[..., behind:])
            grown.append([(1, first)] + [(a + 1, part * entry / (a + 1) ** 0.5) for a, part in parts if a])
        own = grown
        powers.append(torch.cat([part for parts in own for _, part in parts], dim=-1))
    return torch.cat(powers, dim=-1).unsqueeze(-1)


PRIMITIVES: dict[str, Primitive] = {
    "add": Primitive(torch.add, lambda x, ct: (ct, ct)),
    "sub": Primitive(torch.sub, lambda x, ct: (ct, -ct), _log_one_minus),
    "mul": Primitive(torch.mul, _grad_mul, _log_mul),
    "div": Primitive(torch.div, lambda x, ct: (ct / x.args[1], -ct * x / x.args[1]), _log_div),
    "pow": Primitive(torch.pow, _grad_pow, _log_pow),
    "exp": Primitive(torch.exp, lambda x, ct: (ct * x,), lambda x: x.args[0]),
    "log": Primitive(torch.log, lambda x, ct: (ct / x.args[0],)),
    "log1p": Primitive(torch.log1p, lambda x, ct: (ct / (x.args[0] + 1.0),)),
    "expm1": Primitive(_expm1, lambda x, ct: (ct * exp(x.args[0]),)),
    "phi1": Primitive(_phi1, _grad_phi1),
    "sqrt": Primitive(torch.sqrt, lambda x, ct: (ct * 0.5 / x,), _scaled_log(0.5)),
    "rsqrt": Primitive(torch.rsqrt, lambda x, ct: (ct * -0.5 * x * x * x,), _scaled_log(-0.5)),
    "sigmoid": Primitive(_sigmoid, lambda x, ct: (ct * x * complement(x.args[0]),), lambda x: logsigmoid(x.args[0])),
    "complement": Primitive(lambda x: _sigmoid(-x), lambda x, ct: (-ct * x * sigmoid(x.args[0]),)),
    "logsigmoid": Primitive(F.logsigmoid, lambda x, ct: (ct * sigmoid(-x.args[0]),)),
    "softplus": Primitive(_softplus, lambda x, ct: (ct * sigmoid(x.args[0]),)),
    "tanh": Primitive(_tanh, lambda x, ct: (ct * tanh_slope(x.args[0]),)),
    "tanh_slope": Primitive(_tanh_slope, lambda x, ct: (ct * -2.0 * x * tanh(x.args[0]),)),
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
    "sin": Primitive(torch.sin, lambda x, ct: (ct * cos(x.args[0]),)),
    "cos": Primitive(torch.cos, lambda x, ct: (-ct * sin(x.args[0]),)),
    "atan2": Primitive(torch.atan2, _not_printed),
    "pair": Primitive(_pair, _not_printed),
    "quarter_turn": Primitive(_quarter_turn, _not_printed),
    "spread": Primitive(lambda x: x.repeat_interleave(2, dim=-2), _not_printed),
}


BY_TORCH_ALONE = frozenset(op for op, row in PRIMITIVES.items() if row.grad is _not_printed)  # no kernel computes them


def derivatives(root: Expr, cotangent: Expr, wrt: list[Expr], late: str | None = None) -> list[Expr]:
    """Reverse-mode derivative by the table: gradient of Σ cotangent·root in each node of `wrt`, as expressions.

    A result is summed over the axes that its node lacks; it is constant over an axis that it lacks itself. 0 where root
    does not depend on the node. late: an axis that is summed over only in the results, for one sum a node.
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
                    ct = ct * (N if axis == KEY else P)  # the sum of a constant cotangent
            adjoint[arg] = adjoint[arg] + ct if arg in adjoint else ct
    found = [adjoint.get(node, const(0)) for node in wrt]
    for op, axis in REDUCTIONS.items():
        if axis == late:
            found = [reduction(op, x) if axis in x.axes - n.axes else x for x, n in zip(found, wrt, strict=True)]
    return found
