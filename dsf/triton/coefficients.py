"""The elementwise form of a spec: A, B, C and D of one token as expressions, also for padded and packed sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsf.language.expr import KEY, Expr, const
from dsf.language.functions import sum_key, where
from dsf.language.operator import normal_form, split_scale, times
from dsf.language.spec import Spec
from dsf.language.system import System


@dataclass(frozen=True)
class Coefficients:
    """S_t = A ⊙ S_{t-1} + B and y_t = E Σ_n C S + D of one token, its micro-steps combined; E has no Key axis."""

    A: Expr
    B: Expr
    C: Expr
    E: Expr
    D: Expr

    @property
    def roots(self) -> tuple[Expr, ...]:
        """A, B, C, E, D."""
        return self.A, self.B, self.C, self.E, self.D


def coefficients(spec: Spec) -> Coefficients:
    """The elementwise form of a spec without corrections."""
    a, b = const(1), const(0)
    for step in spec.system.micro_steps:
        decay = _decay(step)
        a = times(decay, a)
        pushed = times(decay, b)
        b = step.B if pushed.is_constant and pushed.value == 0 else pushed + step.B
    e, c = split_scale(spec.readout)
    return Coefficients(a, b, c, e, spec.system.D)


def masked(one: Coefficients, valid: Expr) -> Coefficients:
    """The coefficients that leave the state unchanged at tokens that are not valid."""
    return replace(one, A=where(valid > 0.5, one.A, 1.0), B=where(valid > 0.5, one.B, 0.0))


def packed(one: Coefficients, before: bool, initial: Expr | None = None) -> Coefficients:
    """The coefficients for a state that is zero before the first token of every sequence, where it should be `initial`.

    initial: None for a zero state; its value at other tokens is zero. The kernels replace the state by zero (the hole
    `fresh`): a decay of zero would not do, since 0 · NaN is NaN, and a sequence that is not finite would reach others.
    """
    if initial is None:
        return one
    seen = times(one.C, initial)
    seen = times(one.E, sum_key(seen) if KEY in seen.axes else seen)
    return replace(one, B=one.B + times(one.A, initial), D=one.D + seen if before else one.D)


def _decay(step: System) -> Expr:
    total = const(1)
    for factor in normal_form(step.A):
        total = times(factor.decay, total)
    return total
