"""Operators on an axis of the state: I, diag(a), outer(a, b), their sums, scalings and products, and the normal form.

The tree stays as the user wrote it (the oracle evaluates it as dense matrices), and is rewritten once into
`Normal`: a decay plus rank-one corrections, A = decay ⊙ · + Σ left rightᵀ, a product of several for micro-steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dsf.language.errors import TraceError
from dsf.language.expr import KEY, VALUE, Expr, Like, OperatorBase, as_expr, const, is_paired, show
from dsf.language.functions import dot, sum_value
from dsf.language.places import PAIRS, note


@dataclass(frozen=True, eq=False)
class Operator(OperatorBase):
    """A linear operator on states, as the user wrote it. `I`, `diag`, `outer` and `turn` make operators.

    Operators can be added, multiplied by expressions that do not vary over their axis (*), and by each other (@).
    kind: "identity", "diag" (expr scales the state entry by entry), "outer" (left rightᵀ), "turn" (rotates pairs of key
      entries by expr), "sum", "scale" (expr · parts[0]) or "product" (parts[0] @ parts[1] @ …).
    """

    kind: str
    parts: tuple[Operator, ...] = ()
    exprs: tuple[Expr, ...] = ()

    @property
    def all_exprs(self) -> tuple[Expr, ...]:
        """Every expression in the tree."""
        return (*self.exprs, *(x for part in self.parts for x in part.all_exprs))

    def __add__(self, other: Any) -> Operator:
        return Operator("sum", (self, as_operator(other)))

    def __radd__(self, other: Any) -> Operator:
        return as_operator(other) + self

    def __sub__(self, other: Any) -> Operator:
        return self + (-1.0) * as_operator(other)

    def __rsub__(self, other: Any) -> Operator:
        return as_operator(other) - self

    def __mul__(self, other: Like) -> Operator:
        return _scale(other, self)

    def __rmul__(self, other: Like) -> Operator:
        return _scale(other, self)

    def __neg__(self) -> Operator:
        return _scale(-1.0, self)

    def __truediv__(self, other: Like) -> Operator:
        return _scale(1.0 / as_expr(other), self)

    def __matmul__(self, other: Any) -> Operator:
        return Operator("product", (self, as_operator(other)))

    def __rmatmul__(self, other: Any) -> Operator:
        return Operator("product", (as_operator(other), self))

    def __repr__(self) -> str:
        return show(self.exprs[0]) if self.kind == "diag" else self._show(0)  # a bare decay is written A=decay

    def _show(self, outer: int) -> str:
        """Its text as Python source; outer as in dsf.language.expr.show (1 for sums, 2 for products and scalings)."""
        if self.kind == "identity":
            return "I"
        if self.kind in ("diag", "outer", "turn"):
            return f"{self.kind}({', '.join(map(show, self.exprs))})"
        if self.kind == "scale":
            factor, scaled = self.exprs[0], self.parts[0]._show(3)
            text = f"-{scaled}" if factor is const(-1) else f"{show(factor, 2)} * {scaled}"
            return f"({text})" if outer > 2 else text
        first, *rest = self.parts
        if self.kind == "product":
            text = " @ ".join([first._show(2), *(p._show(3) for p in rest)])
            return f"({text})" if outer > 2 else text
        text = first._show(1)
        for part in rest:
            negative = part.kind == "scale" and part.exprs[0] is const(-1)
            text += f" - {part.parts[0]._show(2)}" if negative else f" + {part._show(2)}"
        return f"({text})" if outer > 1 else text


I = Operator("identity")
NO_TURN = const(0)


def diag(a: Like) -> Operator:
    """The operator that scales the state entry by entry. A Key expression scales rows, a {Key, Value} one entries."""
    return Operator("diag", (), (as_expr(a),))


def outer(a: Like, b: Like) -> Operator:
    """The operator a bᵀ on the Key axis, S -> a bᵀ S. Of two Value expressions the one on the Value axis, S -> S b aᵀ.

    Raises TraceError unless both a and b have a Key axis, or both a Value axis alone.
    """
    a, b = as_expr(a), as_expr(b)
    if a.axes != {VALUE} or b.axes != {VALUE}:
        for x in (a, b):
            if KEY not in x.axes:
                raise TraceError(
                    f"outer({a}, {b}) needs two Key expressions, but `{x}` has no Key axis; of two Value expressions "
                    "it acts on the Value axis"
                )
    return Operator("outer", (), (a, b))


def turn(theta: Like) -> Operator:
    """The operator that rotates the pairs (2i, 2i + 1) of key entries by theta radians.

    (x, y) becomes (x cos θ - y sin θ, x sin θ + y cos θ), so a · turn(θ) has the eigenvalues a e^{±iθ}. turn(0) is I.
    theta: an expression without axes, which is one angle for all pairs, or of Pair inputs, an angle for each pair.
    Raises TraceError for other angles.
    """
    theta = as_expr(theta)
    if theta is const(0):
        return I
    if VALUE in theta.axes:
        raise TraceError(f"turn({theta}) turns places of the Key axis; an angle cannot differ by channel")
    if not is_paired(theta):
        raise TraceError(
            f"turn({theta}): two neighbouring places turn by one angle, but `{theta}` has an entry a place; annotate "
            "the angles Pair or Param[Pair] (N / 2 entries), or make them of Scalars"
        )
    note(PAIRS)
    return Operator("turn", (), (note(theta),))


def as_operator(x: Any) -> Operator:
    """An operator as it is; an expression or a number as the operator that scales by it. Raises TraceError."""
    return x if isinstance(x, Operator) else diag(x)


def _scale(factor: Any, operator: Operator) -> Operator:
    if isinstance(factor, Operator):
        raise TraceError(f"operators multiply with @, not *: {factor._show(3)} * {operator._show(3)}")
    expr = as_expr(factor)
    if KEY in expr.axes and operator.kind == "turn" and is_paired(expr):
        return diag(expr) @ operator  # a scale equal within each pair commutes with a turn
    axis = VALUE if _acts_on_values(operator) else KEY
    if axis in expr.axes:
        raise TraceError(
            f"`{expr}` has a {axis.title()} axis: write diag({expr}) @ {operator._show(3)} or {operator._show(3)} @ "
            f"diag({expr}), because scaling rows and scaling columns differ"
        )
    return Operator("scale", (operator,), (expr,))


def _acts_on_values(operator: Operator) -> bool:
    """True where it contains an outer product on the Value axis."""
    own = operator.kind == "outer" and KEY not in operator.exprs[0].axes
    return own or any(map(_acts_on_values, operator.parts))


@dataclass(frozen=True)
class Correction:
    """scale · left rightᵀ. scale does not vary over the axis that the correction acts on."""

    scale: Expr
    left: Expr
    right: Expr

    @property
    def axis(self) -> str:
        """KEY or VALUE."""
        return KEY if KEY in self.left.axes else VALUE


@dataclass(frozen=True)
class Normal:
    """One factor of the normal form: A = (decay ⊙ · + Σ corrections) after a turn by `angle` (0 for none)."""

    decay: Expr
    corrections: tuple[Correction, ...] = ()
    angle: Expr = NO_TURN


def normal_form(operator: Operator) -> tuple[Normal, ...]:
    """The factors of A, the first to act first. A sum or a scaling is one factor, a product may be several."""
    if operator.kind == "identity":
        return (Normal(const(1)),)
    if operator.kind == "diag":
        return (Normal(operator.exprs[0]),)
    if operator.kind == "turn":
        return (Normal(const(1), (), operator.exprs[0]),)
    if operator.kind == "outer":
        left, right = operator.exprs
        axis = KEY if KEY in left.axes else VALUE
        scale_l, core_l = split_scale(left, axis)
        scale_r, core_r = split_scale(right, axis)
        return (Normal(const(0), (Correction(scale_l * scale_r, core_l, core_r),)),)
    if operator.kind == "scale":
        factors = normal_form(operator.parts[0])
        return (*factors[:-1], _scaled(operator.exprs[0], factors[-1]))
    if operator.kind == "sum":
        return (_sum([_single(normal_form(p)) for p in operator.parts]),)
    merged: list[Normal] = []
    for part in reversed(operator.parts):
        for factor in normal_form(part):
            if merged and (not merged[-1].corrections or not factor.corrections) and _pass(factor.angle, merged[-1]):
                merged[-1] = _product(factor, merged[-1])
            else:
                merged.append(factor)
    return tuple(merged)


def _single(factors: tuple[Normal, ...]) -> Normal:
    """A product of factors multiplied out to one, for a product inside a sum; the ranks add."""
    out = factors[0]
    for later in factors[1:]:
        if not _pass(later.angle, out):
            raise TraceError(
                f"turn({later.angle}) acts after an operator that it does not commute with, inside a sum; multiply the "
                "product out, or turn first: (…) @ turn(…)"
            )
        out = _product(later, out)
    return out


def _pass(angle: Expr, earlier: Normal) -> bool:
    """True where a turn commutes with the factor `earlier`."""
    return angle is const(0) or (not earlier.corrections and is_paired(earlier.decay))


def _scaled(s: Expr, n: Normal) -> Normal:
    scaled = tuple(Correction(times(s, c.scale), c.left, c.right) for c in n.corrections)
    return Normal(times(s, n.decay), scaled, n.angle)


def _sum(parts: list[Normal]) -> Normal:
    decay = parts[0].decay
    if any(p.angle is not parts[0].angle for p in parts):
        angle = next(p.angle for p in parts if p.angle is not const(0))
        raise TraceError(
            f"turn({angle}) is in one term of a sum and not in the others, which is no turn of the state; write the "
            f"sum as a product, (…) @ turn({angle})"
        )
    for p in parts[1:]:
        decay = decay + p.decay
    return Normal(decay, tuple(c for p in parts for c in p.corrections), parts[0].angle)


def _product(later: Normal, earlier: Normal) -> Normal:
    """(D2 + L2 R2ᵀ)(D1 + L1 R1ᵀ) = D2 D1 + D2 L1 R1ᵀ + L2 (D1 R2)ᵀ + L2 (R2ᵀ L1) R1ᵀ."""
    corrections = [_rows(later.decay, c) for c in earlier.corrections]
    corrections += [_columns(earlier.decay, c) for c in later.corrections]
    for c2 in later.corrections:
        for c1 in earlier.corrections:
            if c1.axis != c2.axis:
                raise TraceError(
                    f"outer({c2.left}, {c2.right}) and outer({c1.left}, {c1.right}) act on two axes of the state; A "
                    "acts on one of the two"
                )
            scale = times(times(c2.scale, c1.scale), inner_product(c2.right, c1.left, c1.axis))
            corrections.append(Correction(scale, c2.left, c1.right))
    angle = earlier.angle + later.angle  # the caller checked that a later turn commutes with `earlier`
    return Normal(times(later.decay, earlier.decay), tuple(corrections), angle)


def inner_product(a: Expr, b: Expr, axis: str) -> Expr:
    """The sum of a · b along an axis."""
    return dot(a, b) if axis == KEY else sum_value(a * b)


def _rows(decay: Expr, c: Correction) -> Correction:
    if c.axis not in decay.axes:
        return Correction(times(decay, c.scale), c.left, c.right)
    return Correction(c.scale, decay * c.left, c.right)


def _columns(decay: Expr, c: Correction) -> Correction:
    if c.axis not in decay.axes:
        return Correction(times(decay, c.scale), c.left, c.right)
    return Correction(c.scale, c.left, decay * c.right)


def times(a: Expr, b: Expr) -> Expr:
    """a · b with products by 0 folded, even where an axis is lost (a decay of exactly 0 is allowed here)."""
    zero = const(0)
    return zero if a is zero or b is zero else a * b


def split_scale(x: Expr, axis: str = KEY) -> tuple[Expr, Expr]:
    """(scale, core) with x = scale · core: the factors without the axis, and those with it (1 for none)."""
    core, scale = split_factors(x, lambda factor: axis in factor.axes)
    return scale, core


def split_factors(x: Expr, wanted: Callable[[Expr], bool]) -> tuple[Expr, Expr]:
    """The products of x's wanted factors and of its other factors (1 for none)."""
    found: dict[bool, list[tuple[Expr, bool]]] = {True: [], False: []}
    for factor in factors_of(x):
        found[wanted(factor[0])].append(factor)
    return product_of(found[True]), product_of(found[False])


def factors_of(x: Expr) -> list[tuple[Expr, bool]]:
    """The factors of a product or quotient, each with True where it is a divisor."""
    if x.op == "mul":
        return factors_of(x.args[0]) + factors_of(x.args[1])
    if x.op == "div":
        return factors_of(x.args[0]) + [(f, not inverse) for f, inverse in factors_of(x.args[1])]
    return [(x, False)]


def product_of(factors: Iterable[tuple[Expr, bool]], first: float = 1) -> Expr:
    """first times the factors, as `factors_of` gives them."""
    out: Expr = const(first)
    for factor, inverse in factors:
        out = out / factor if inverse else times(out, factor)
    return out


def quotient(x: Expr, by: Expr, first: float = 1) -> Expr | None:
    """first · x / by, where every factor of `by` is one of x; else None."""
    left = factors_of(x)
    for factor in factors_of(by) if by is not const(1) else []:
        if factor not in left:
            return None
        left.remove(factor)
    return product_of(left, first)


def summands(x: Expr, sign: float = 1.0) -> list[tuple[float, Expr]]:
    """The terms of a sum or difference, each with its sign."""
    if x.op == "add":
        return summands(x.args[0], sign) + summands(x.args[1], sign)
    if x.op == "sub":
        return summands(x.args[0], sign) + summands(x.args[1], -sign)
    return [(sign, x)]
