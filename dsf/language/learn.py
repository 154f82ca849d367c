"""`dsf.learn`: a System from a loss in its state and a rule that minimises it step by step."""

from __future__ import annotations

from typing import Any, Literal, cast

from dsf.language.errors import TraceError
from dsf.language.expr import KEY, VALUE, Expr, as_expr, const
from dsf.language.functions import dot, exp, phi1
from dsf.language.memory import Linear, Loss, Product, total
from dsf.language.operator import I, Operator, as_operator, diag, outer, times
from dsf.language.solve import Solve
from dsf.language.system import Rule, System

STEPS = 30  # of conjugate gradients, as in arXiv 2506.05233
RULES = ("hebb", "gradient", "implicit", "flow", "exact")
By = Literal["hebb", "gradient", "implicit", "flow", "exact"]
Squares = list[tuple[Expr, Expr, list[Product]]]  # (key, rate · weight, the weight's products)


def learn(
    loss: Any,
    by: By | str,
    C: Any = None,
    *,
    rate: Any = 1,
    decay: Any = None,
    ridge: Any = None,
    steps: int = STEPS,
    D: Any = 0,
    read: Literal["after", "before"] = "after",
    normalize: Rule | None = None,
    drive: Any = None,
    gauge: Any = None,
) -> System:
    """The System that takes one step on a loss for every token, from the last state after its decay, S' = decay S.

    loss: a quadratic in a `Memory` S, so its gradient is H S - R (docs/objective.md).
    by: the name of the step,

        hebb      S = S' + rate R, with the gradient at S = 0
        gradient  S = S' - rate (H S' - R)
        implicit  the S that minimises loss + |S - S'|² / (2 rate): (1 + rate H)⁻¹ (S' + rate R), by Sherman-Morrison
        flow      the value at s = rate of the solution of dS/ds = R - H S that is S' at s = 0

        exact     no step: every read-out takes the S that minimises Σ (decays since) rate · loss + ½⟨ridge S, S⟩, where
                  Σ is over all tokens so far. y = Gᵀ (H + ridge)⁻¹ C has two states: G, the decayed sum of what the
                  losses write, and H, that of key keyᵀ of their squares

    rate: a number or an expression without a Key axis.
    decay: any A, or None for no decay; for "exact" a Scalar.
    ridge: of "exact" alone: positive, a Key or a Scalar.
    steps: of "exact" alone: the number of conjugate gradient steps in float32, in forms that solve for all tokens at
      once (docs/objective.md).
    C, D, read, normalize, drive, gauge: as in System. "exact" takes neither normalize nor drive nor gauge.

    Raises TraceError for a loss that is not a quadratic in S, for another `by`, for arguments that the step does not
    take, and for a step that has no closed form.
    """
    _check(loss, by)
    rate = as_expr(rate)
    if KEY in rate.axes:
        raise TraceError(
            f"rate = {rate} has a Key axis; a step's rate is a Scalar or a Value. Rows of their own rates are another "
            "metric: scale the key, or decay rows by decay="
        )
    step = _Step(loss, rate)
    if by == "exact":
        if any(x is not None for x in (normalize, drive, gauge)):
            raise TraceError("by='exact': the solve is the normalisation; leave normalize, drive and gauge out")
        return step.exact(C, D, decay, read, ridge, steps)
    if ridge is not None:
        raise TraceError(f"ridge = {ridge} is of by='exact'; by='{by}' has it as 0.5 * ridge * norm2(S) in the loss")
    if steps != STEPS:
        raise TraceError(f"steps = {steps!r} is of by='exact'; by='{by}' takes one step a token, in closed form")
    A, B = {"hebb": step.hebb, "gradient": step.gradient, "implicit": step.implicit, "flow": step.flow}[by]()
    if decay is not None:
        A = _after(A, as_operator(decay))
    return System(A=A, B=B, C=C, D=D, read=read, normalize=normalize, drive=drive, gauge=gauge)


def _check(loss: Any, by: Any) -> None:
    if by not in RULES:
        raise TraceError(f"by={by!r}: a loss is lowered by {', '.join(RULES)}")
    if isinstance(loss, Linear):
        raise TraceError(f"the loss `{loss}` is a vector; write norm2({loss}), or inner({loss}, v) with some v")
    if not isinstance(loss, Loss):
        raise TraceError(
            f"the loss `{loss}` does not depend on S: write it with S = dsf.Memory(), as norm2(S.T @ k - v)"
        )


class _Step:
    """A (without the decay) and B of one step on a loss."""

    def __init__(self, loss: Loss, rate: Expr) -> None:
        self.loss, self.rate = loss, rate
        found: dict[Expr, list[Product]] = {}
        for key, weight in loss.squares:
            found.setdefault(key, []).append(weight)
        self.squares: Squares = []
        for key, weights in found.items():
            whole = total(weights)
            if whole is not const(0):
                self.squares.append((key, times(rate, whole), _merged(weights)))
        self.ridge = total(loss.ridge)

    @property
    def shrink(self) -> Expr:
        """rate · ridge."""
        return times(self.rate, self.ridge)

    def writes(self, strength: Expr, along: Expr | None = None, weights: list[Product] | None = None) -> Expr:
        """rate · R, the injection, as an expression.

        along, weights: key and weight of the loss's only square. Writes at that key get `strength`, the correction's
        factor, so that the compiler recognises a delta rule.
        """
        whole = const(0)
        for key, products in self._by_key().items():
            value = total(products)
            if key is along and weights is not None and len(weights) == 1:
                own = [p.over(weights[0]) for p in products]
                if all(p is not None for p in own):
                    whole = whole + key * times(strength, total(cast(list[Product], own)))
                    continue
            whole = whole + _at(key, times(self.rate, value))
        return whole

    def _by_key(self) -> dict[Expr, list[Product]]:
        found: dict[Expr, list[Product]] = {}
        for w in self.loss.writes:
            found.setdefault(w.key, []).append(w.value)
        return found

    def hebb(self) -> tuple[Operator, Expr]:
        """A step along the gradient at S = 0."""
        return I, self.writes(self.rate)

    def gradient(self) -> tuple[Operator, Expr]:
        """One explicit gradient step."""
        a = I if self.ridge is const(0) else diag(1 - self.shrink)
        for key, strength, _ in self.squares:
            a = a - _scaled(strength, outer(key, key))
        if len(self.squares) == 1:
            key, strength, weights = self.squares[0]
            return a, self.writes(strength, key, weights)
        return a, self.writes(self.rate)

    def implicit(self) -> tuple[Operator, Expr]:
        """(m + Σ g k kᵀ)⁻¹ with m = 1 + rate · ridge, one square after the other by Sherman-Morrison."""
        m = 1 + self.shrink
        if self.squares and m.axes >= {KEY, VALUE}:
            raise TraceError(
                f"by='implicit': `{m}` differs by entry of S, and `{self.loss}` also has squares of S.T @ "
                f"{self.squares[0][0]}; no rank-one solve holds both, give the first a Key or a Value axis alone"
            )
        if len(self.squares) == 1 and KEY not in m.axes:
            key, g, weights = self.squares[0]
            strength = g / (m + g * dot(key, key))
            a = I - _scaled(strength, outer(key, key))
            rest = [k for k in self._by_key() if k is not key]
            if not rest and len(weights) == 1 and all(w.value.over(weights[0]) for w in self.loss.writes):
                return _scaled(1 / m, a), self.writes(strength, key, weights)
        inverse = _Inverse(m)
        # Those of negative weight last: until then a sum is larger than the whole, and so as positive.
        for key, g, _ in sorted(self.squares, key=lambda square: any(w.number < 0 for w in square[2])):
            inverse.add(key, g)
        b = const(0)
        for key, products in self._by_key().items():
            b = b + inverse(key) * times(self.rate, total(products))
        return inverse.operator, b

    def flow(self) -> tuple[Operator, Expr]:
        """A = exp(-rate H) and B = ∫ exp(-s H) R ds for s from 0 to rate. Raises TraceError without a closed form."""
        shrink = self.shrink
        if not self.squares:
            if self.ridge is const(0):
                return I, self.writes(self.rate)
            b = const(0)
            for key, products in self._by_key().items():
                b = b + _at(key, times(self.rate, total(products)) * phi1(-shrink))
            return diag(exp(-shrink)), b
        key, g, weights = self.squares[0]
        others = [k for k in (*(k for k, _, _ in self.squares), *self._by_key()) if k is not key]
        if others or KEY in shrink.axes:
            second = f"S.T @ {others[0]}" if others else f"`{self.ridge}` on the rows of S"
            raise TraceError(
                f"by='flow': the flow of `{self.loss}` along {key} and along {second} together has no closed form; "
                "take them one after the other, dsf.compose(dsf.learn(...), dsf.learn(...)), or by='implicit'"
            )
        turned = g * dot(key, key)
        a = I - _scaled(g * phi1(-turned), outer(key, key))
        own = self._by_key().get(key, [])
        if self.ridge is const(0) and len(weights) == 1 and all(p.over(weights[0]) for p in own):
            return a, self.writes(g * phi1(-turned), key, weights)
        if self.ridge is not const(0):
            a = _scaled(exp(-shrink), a)
        return a, key * (times(self.rate, total(own)) * phi1(-(shrink + turned)))

    def exact(self, C: Any, D: Any, decay: Any, read: Literal["after", "before"], ridge: Any, steps: Any) -> System:
        """The whole System with its two states, G and the H that a readout solves with. Raises TraceError."""
        transition = I if decay is None else as_operator(decay)
        if transition is not I and (transition.kind != "diag" or transition.exprs[0].axes):
            raise TraceError(f"by='exact': decay = {transition} has to weight whole losses of earlier tokens: a Scalar")
        if ridge is None:
            raise TraceError("by='exact' needs ridge=, positive: without it the first tokens' losses leave S open")
        if type(steps) is not int or steps < 1:
            raise TraceError(f"steps = {steps!r} is how many steps of conjugate gradients are taken, at least 1")
        if self.ridge is not const(0) or not self.squares:
            how = "give its weight on S once, as ridge=" if self.squares else "it has no square of S.T @ k"
            raise TraceError(f"by='exact': the loss `{self.loss}` is summed over tokens; {how}")
        ridge = as_expr(ridge)
        if ridge.is_constant and not ridge.value > 0:  # forms would answer differently, some of them without an error
            raise TraceError(f"by='exact': ridge = {ridge} must be positive, or the first tokens' losses leave S open")
        for key, strength, _ in self.squares:
            for axis, x in ((VALUE, key * strength), (VALUE, ridge), (KEY, strength)):
                if axis in x.axes:
                    raise TraceError(f"by='exact': `{x}` has a {axis.title()} axis; one solve serves all channels")
        squares = tuple((key, strength) for key, strength, _ in self.squares)
        return System(A=transition, B=self.writes(self.rate), C=C, D=D, read=read, solve=Solve(squares, ridge, steps))


class _Inverse:
    """(m + Σ g k kᵀ)⁻¹ = 1/m - Σ s u uᵀ, on Key vectors and as an operator."""

    def __init__(self, m: Expr) -> None:
        self.m = m
        self.terms: list[tuple[Expr, Expr]] = []

    def __call__(self, x: Expr) -> Expr:
        found = x if self.m is const(1) else x / self.m
        for s, u in self.terms:
            found = found - s * dot(u, x) * u
        return found

    def add(self, key: Expr, g: Expr) -> None:
        """Add g key keyᵀ inside the inverse."""
        if VALUE in self.m.axes or any(VALUE in s.axes for s, _ in self.terms):
            raise TraceError(
                f"by='implicit': channels of S differ, so that {key} would be solved for with a vector a channel; give "
                "weights of several squares no Value axis"
            )
        u = self(key)
        self.terms.append((g / (1 + g * dot(key, u)), u))

    @property
    def operator(self) -> Operator:
        """The inverse as an operator for A."""
        found = I if self.m is const(1) else diag(1 / self.m)
        for s, u in self.terms:
            found = found - _scaled(s, outer(u, u))
        return found


def _merged(weights: list[Product]) -> list[Product]:
    """The products, those with the same factors added up."""
    found: dict[tuple[Expr, ...], float] = {}
    for w in weights:
        found[w.factors] = found.get(w.factors, 0.0) + w.number
    return [Product(number, factors) for factors, number in found.items() if number]


def _at(key: Expr, value: Expr) -> Expr:
    """key ⊗ value, where key 1 leaves the value."""
    return value if key is const(1) else key * value


def _scaled(factor: Expr, a: Operator) -> Operator:
    return a if factor is const(1) else factor * a


def _after(a: Operator, decay: Operator) -> Operator:
    """a after the decay, as a user would write it."""
    if a is I:
        return decay
    if decay.kind == "diag" and KEY not in decay.exprs[0].axes:
        return decay.exprs[0] * a
    return a @ decay
