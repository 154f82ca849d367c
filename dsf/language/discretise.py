"""Discretisations: dS/dt = a S + b x in continuous time as A and B of a System. Each has a rule for x within a step.

A rate a is an expression, which acts entry by entry, or a pair (re, im) of expressions, a complex rate. With a complex
rate the places 2i and 2i + 1 of the Key axis are real and imaginary part of a complex state, A turns such pairs, and b
is a complex factor. The step is any expression: of Params for equal time steps (S4D), of inputs of tokens for steps
that depend on data (S6, Mamba-3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from dsf.language.errors import TraceError
from dsf.language.expr import KEY, Expr, Like, as_expr, const, is_paired, show
from dsf.language.functions import atan2, cos, dot, exp, expm1, pair, quarter_turn, sin, sqrt
from dsf.language.operator import diag, outer, turn

Rate = Any  # an expression, or a pair (re, im) of expressions


class Discrete(NamedTuple):
    """A discretised system: its A, and the factor B of its input x, for System(A=A, B=B * x, ...)."""

    A: Any
    B: Expr


def zoh(a: Rate, b: Like, step: Like) -> Discrete:
    """Zero-order hold: the exact solution for an input that is constant during a step.

    A = e^{a δ}, B = (e^{a δ} - 1) / a · b, with e^x - 1 computed without cancellation.
    a: the rate or (re, im), not 0; negative where the state decays (`-exp(A_log)`).
    b: the factor of the input. With a complex rate: a number, or a Key expression of complex numbers in pairs.
    step: δ, positive, in the time unit of 1 / a.
    Source: S4D (arXiv 2206.11893), equation 4; Mamba (arXiv 2312.00752), equation 4.
    Raises TraceError for complex rates that differ within a pair, and beside a complex rate for a b with one number for
    each pair, which could mean b or b + b i.
    """
    step = as_expr(step)
    if not isinstance(a, tuple):
        a = as_expr(a)
        return Discrete(exp(a * step), _times(_minus(expm1(a * step)) / _minus(a), as_expr(b)))
    re, im = map(as_expr, a)
    growth, angle = expm1(re * step), im * step
    half = sin(angle * 0.5)
    gained = Complex(growth * cos(angle) - 2 * half * half, (growth + 1) * sin(angle))  # e^{a δ} - 1
    return Discrete(_turned(exp(re * step), angle), (gained / Complex(re, im)).times(b))


def bilinear(a: Rate, b: Like, step: Like, minus: tuple[Like, Like] | None = None) -> Discrete:
    """The bilinear transform (Tustin, the trapezoidal rule): A = (1 + a δ/2) / (1 - a δ/2), B = δ / (1 - a δ/2) · b.

    It maps the left half plane into the unit circle: |A| < 1 for every negative a, and A < 0 where a δ < -2.
    a, b, step: as in `zoh`, but a may be 0.
    minus: Key expressions (p, q), for the rate diag(a) - p qᵀ (S4's diagonal plus rank one). Woodbury's identity gives
      its inverse exactly.
    Source: S4 (arXiv 2111.00396), equation 3 and Appendix C.2. Raises TraceError as `zoh` does.
    """
    step = as_expr(step)
    half = step * 0.5
    angle: Expr = const(0)
    if isinstance(a, tuple):
        re, im = (as_expr(x) * half for x in a)
        above, below = Complex(1 + re, im), Complex(1 + _minus(re), _minus(im))
        radius, angle = sqrt(above.square / below.square), atan2(im, above.re) + atan2(im, below.re)
    else:
        rate = _minus(as_expr(a)) * half
        above, below = Complex(1 - rate), Complex(1 + rate)
        radius = above.re / below.re
    if minus is None:
        return Discrete(_turned(radius, angle), (Complex(step) / below).times(b))
    inverse = Complex(const(1)) / below
    p, q = map(as_expr, minus)
    for x in (p, q):
        if isinstance(a, tuple) and KEY not in x.axes:
            raise TraceError(
                f"minus=(p, q) are Key vectors of complex numbers in pairs, but `{show(x)}` has no Key axis"
            )
    left, right, written = inverse.times(p), inverse.conjugate.times(q), inverse.times(b)
    gain = step / (1 + half * dot(q, left))
    if angle is not const(0):  # left rightᵀ = left (R right)ᵀ R
        right = cos(angle) * right + sin(angle) * quarter_turn(right)
    core = diag(radius) - gain * outer(left, right)
    transition = core if angle is const(0) else core @ turn(angle)
    return Discrete(transition, step * written - (gain * half * dot(q, written)) * left)


def euler(a: Rate, b: Like, step: Like) -> Discrete:
    """Euler's forward step: A = 1 + a δ, B = δ b. States decay only where |1 + a δ| < 1. Arguments as those of `zoh`.

    a may be 0. Raises TraceError as `zoh` does.
    """
    step = as_expr(step)
    if not isinstance(a, tuple):
        return Discrete(1 + as_expr(a) * step, _times(step, as_expr(b)))
    there = Complex(1 + as_expr(a[0]) * step, as_expr(a[1]) * step)
    assert there.im is not None
    return Discrete(_turned(sqrt(there.square), atan2(there.im, there.re)), Complex(step, const(0)).times(b))


@dataclass(frozen=True)
class Complex:
    """re + i im, of expressions that are equal within a pair. im None: a real number, any expression."""

    re: Expr
    im: Expr | None = None

    @property
    def square(self) -> Expr:
        """|z|²."""
        return self.re * self.re if self.im is None else self.re * self.re + self.im * self.im

    @property
    def conjugate(self) -> Complex:
        """re - i im."""
        return self if self.im is None else Complex(self.re, _minus(self.im))

    def __truediv__(self, other: Complex) -> Complex:
        if other.im is None:
            return Complex(self.re / other.re, None if self.im is None else self.im / other.re)
        if self.im is None:
            return Complex(self.re * other.re / other.square, _minus(other.im) * self.re / other.square)
        re = self.re * other.re + self.im * other.im
        return Complex(re / other.square, (self.im * other.re - self.re * other.im) / other.square)

    def times(self, x: Like) -> Expr:
        """z · x. For a complex z, x holds complex numbers in pairs, or is a real number without a Key axis."""
        x = as_expr(x)
        if self.im is None:
            return _times(self.re, x)
        if KEY not in x.axes:
            return _times(pair(self.re, self.im), x)
        if is_paired(x):
            given = show(x)
            raise TraceError(
                f"`{given}` is one number a pair, but complex rates take complex numbers in pairs: write "
                f"pair({given}, 0) where it is a real number, pair(re, im) for two parts"
            )
        if self.im is const(0):
            return _times(self.re, x)
        return self.re * x + self.im * quarter_turn(x)


def _turned(radius: Expr, angle: Expr) -> Any:
    """The operator that scales by radius and turns by angle."""
    return diag(radius) if angle is const(0) else diag(radius) @ turn(angle)


def _minus(x: Expr) -> Expr:
    """-x; where x is itself a negation, its operand, so that positive denominators print without signs."""
    if x.op == "mul" and x.args[0] is const(-1):
        return x.args[1]
    if x.op == "mul" and x.args[0].op == "mul" and x.args[0].args[0] is const(-1):
        return x.args[0].args[1] * x.args[1]
    return -x


def _times(a: Expr, b: Expr) -> Expr:
    return a if b is const(1) else a * b
