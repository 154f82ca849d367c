"""The rewriting of a system with turns into the gauge where it has none (dsf.language.frame)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dsf.language.expr import Expr, const
from dsf.language.operator import diag, factors_of, normal_form, outer, split_factors, summands, times
from dsf.language.system import System

if TYPE_CHECKING:
    from dsf.language.frame import Made
    from dsf.language.spec import Spec


class NoGaugeError(Exception):
    """There is no gauge: a decay differs within a pair, or a key cannot be turned."""


def into_gauge(made: Made, system: System) -> tuple[System, tuple[Expr, ...]]:
    """(the system without its turns, every row's angle). Raises NoGaugeError where there is no gauge."""
    plain = made.spec(system)
    return _Gauge(made, plain).system(), tuple(r.normal.angle for r in plain.rows)


@dataclass
class _Gauge:
    """The rewriting of a system with turns into the gauge."""

    made: Made
    spec: Spec

    def system(self) -> System:
        """The system without its turns. Raises NoGaugeError where a decay differs within a pair or a key by channel."""
        spec, steps = self.spec, list[System]()
        written = iter(s.B for s in spec.system.micro_steps)
        ends = self._ends()
        for number, row in enumerate(spec.rows):
            if not self.made.is_paired(row.normal.decay):
                raise NoGaugeError
            a = diag(row.normal.decay)
            for x in row.normal.corrections:
                a = a + x.scale * outer(self.vector(x.left, number), self.vector(x.right, number))
            steps.append(System(A=a, B=self.injection(next(written), number) if number in ends else 0))
        system, last = spec.system, len(spec.rows) - 1
        assert system.C is not None
        c = self.readout(system.C, last if system.read == "after" else -1)
        return replace(
            steps[-1], C=c, D=system.D, read=system.read, normalize=system.normalize, gauge=system.gauge,
            drive=system.drive, earlier=tuple(steps[:-1]),
        )  # fmt: skip

    def _ends(self) -> set[int]:
        """The last rows of the micro-steps, which carry B."""
        place, found = -1, set()
        for step in self.spec.system.micro_steps:
            place += len(normal_form(step.A))
            found.add(place)
        return found

    def injection(self, b: Expr, row: int) -> Expr:
        """B with its keys turned."""
        total: Expr = const(0)
        for sign, part in summands(b):
            if part is const(0):
                continue
            key = self.vector(part, row)
            total = total - key if sign < 0 else total + key
        return total

    def readout(self, c: Expr, row: int) -> Expr:
        """C turned as one vector, or, where it differs by channel, summand by summand."""
        turned = dict(self.made.turned)
        try:
            return self.vector(c, row)
        except NoGaugeError:
            if len(summands(c)) == 1 or self.spec.system.normalize is not None:
                raise
            self.made.turned = turned
            return self.injection(c, row)

    def vector(self, x: Expr, row: int) -> Expr:
        """A product with its Key factors turned, except those equal within a pair. Raises NoGaugeError."""
        loose = [(f, inverse) for f, inverse in factors_of(x) if not self.made.is_paired(f)]
        if self.spec.system.normalize is not None and any(f.op == "exp" for f, _ in loose):
            raise NoGaugeError  # an exponential that the running maximum has to scale
        if len(loose) == 1 and not loose[0][1]:
            return _exchange(x, loose[0][0], self.made.turn(loose[0][0], row))
        rest, others = split_factors(x, lambda f: not self.made.is_paired(f))
        return times(others, self.made.turn(rest, row))


def _exchange(x: Expr, factor: Expr, by: Expr) -> Expr:
    """A product with one of its factors replaced."""
    if x is factor:
        return by
    if x.op == "mul":
        return _exchange(x.args[0], factor, by) * _exchange(x.args[1], factor, by)
    if x.op == "div":
        return _exchange(x.args[0], factor, by) / x.args[1]
    return x
