"""What the fused scan computes of a token: A, B, C and D as expressions, also for padded and packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsf.language.expr import KEY, Expr, const
from dsf.language.functions import cos, sin, sum_key, where
from dsf.language.operator import NO_TURN, normal_form, split_scale, times
from dsf.language.spec import Spec
from dsf.language.system import System


@dataclass(frozen=True)
class Coefficients:
    """S_t = A ⊙ S_{t-1} + B and y_t = E Σ_n C S + D of one token, its micro-steps combined; E has no Key axis.

    With `angle` or `low`, which mix the entries of a channel, S_t = A ⊙ Z + Σ l (r'Z) + B of Z, the state before with
    its pairs turned. angle: () or (cosine, sine); low: l and r of every correction in turn.
    """

    A: Expr
    B: Expr
    C: Expr
    E: Expr
    D: Expr
    angle: tuple[Expr, ...] = ()
    low: tuple[Expr, ...] = ()

    @property
    def roots(self) -> tuple[Expr, ...]:
        """A, B, C, E, D, and what mixes entries."""
        return self.A, self.B, self.C, self.E, self.D, *self.angle, *self.low

    def of(self, roots: Sequence[Expr]) -> Coefficients:
        """These coefficients with other expressions, in the order of `roots`."""
        a, b, c, e, d, *mixed = roots
        split = len(self.angle)
        return Coefficients(a, b, c, e, d, tuple(mixed[:split]), tuple(mixed[split:]))


def coefficients(spec: Spec) -> Coefficients:
    """The coefficients of a spec that the scan runs: elementwise, or with one row that mixes a channel's entries."""
    a, b = const(1), const(0)
    for step in spec.system.micro_steps:
        decay = _decay(step)
        a = times(decay, a)
        pushed = times(decay, b)
        b = step.B if pushed.is_constant and pushed.value == 0 else pushed + step.B
    e, c = split_scale(spec.readout)
    row = spec.rows[0].normal
    angle = () if row.angle is NO_TURN else (cos(row.angle), sin(row.angle))
    low = tuple(x for one in row.corrections for x in (times(one.scale, one.left), one.right))
    return Coefficients(a, b, c, e, spec.system.D, angle, low)


def masked(one: Coefficients, valid: Expr) -> Coefficients:
    """The coefficients that leave the state unchanged at tokens that are not valid."""

    def held(x: Expr, still: float) -> Expr:
        return where(valid > 0.5, x, still)

    angle = tuple(map(held, one.angle, (1.0, 0.0)))
    low = tuple(held(x, 0.0) for x in one.low)
    return replace(one, A=held(one.A, 1.0), B=held(one.B, 0.0), angle=angle, low=low)


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
