"""Discretisations: S' = a S + b x in continuous time, its input held or joined for a step, as A and B of a System.

The step is any expression: a Param where time is even (S4D), one of tokens where data decide (S6, Mamba-3).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsf.language.expr import Expr, Like, as_expr, const
from dsf.language.primitives import exp, expm1


class Discrete(NamedTuple):
    """A and the factor B of the input: System(A=A, B=B * x, ...)."""

    A: Any
    B: Expr


def zoh(a: Like, b: Like, step: Like) -> Discrete:
    """Zero-order hold: the exact solution for an input that is constant during a step.

    A = e^{a δ}, B = (e^{a δ} - 1) / a · b, with e^x - 1 computed without cancellation. a: the rate, negative where the
    state decays (`-exp(A_log)`), and not 0; b: what the input is multiplied by; step: δ, positive. They are expressions
    of any axes, which act entry by entry. Source: S4D (arXiv 2206.11893), equation 4; Mamba (arXiv 2312.00752), 4.
    """
    a, b, step = as_expr(a), as_expr(b), as_expr(step)
    return Discrete(exp(a * step), _times(_minus(expm1(a * step)) / _minus(a), b))


def bilinear(a: Like, b: Like, step: Like) -> Discrete:
    """The bilinear transform (Tustin, the trapezoid on a): A = (1 + a δ/2) / (1 - a δ/2), B = δ / (1 - a δ/2) · b.

    It maps the left half plane into the unit circle: |A| < 1 for every negative a, and A < 0 where a δ < -2.
    Arguments as those of `zoh`; a may be 0. Source: S4 (arXiv 2111.00396), equation 3.
    """
    a, b, step = as_expr(a), as_expr(b), as_expr(step)
    half = _minus(a) * (step * 0.5)
    return Discrete((1 - half) / (1 + half), _times(step / (1 + half), b))


def euler(a: Like, b: Like, step: Like) -> Discrete:
    """Euler's forward step: A = 1 + a δ, B = δ b. It decays only while -2 < a δ < 0. Arguments as those of `zoh`."""
    a, b, step = as_expr(a), as_expr(b), as_expr(step)
    return Discrete(1 + a * step, _times(step, b))


def _minus(x: Expr) -> Expr:
    """-x, or what is behind a minus: denominators that are positive are written so."""
    if x.op == "mul" and x.args[0] is const(-1):
        return x.args[1]
    found: Expr = -x
    return found


def _times(a: Expr, b: Expr) -> Expr:
    found: Expr = a if b is const(1) else a * b
    return found
