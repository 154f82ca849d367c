"""The range of each input, inferred from the traced expressions, so that checks draw sensible inputs.

The rule: states stay bounded and every expression stays inside its domain. If random real inputs satisfy this (a
decay exp(-softplus(x)), a key l2norm(k)), nothing is demanded. Else the inputs' ranges are narrowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from dsf.call.bind import bind, environment
from dsf.checking.terms import mixture, reached
from dsf.checking.values import INF, PROBE_CHANNELS, REAL, TINY, UNIT, Range, as_range, probe_inputs
from dsf.language.errors import InputError
from dsf.language.expr import KEY, Expr, children_first, const, substitute
from dsf.language.operator import Correction
from dsf.language.spec import Spec
from dsf.language.system import DEN, NUM, ONE
from dsf.torch.evaluate import Evaluator

APART = 0.1  # the least distance from 0 of random denominators and arguments of log


Given = Mapping[str, "Range | tuple[float, float]"]


def ranges_of(spec: Spec, given: Given | None = None) -> dict[str, Range]:
    """A range for every input, by name: the user's, else the one that the expressions demand.

    The demands, in this order:

    * domain: denominators, arguments of log, sqrt, rsqrt and bases of powers other than integers are positive;
      arguments of log1p are above -1; those of phi1, which grows as exp, are at most 0; a part of a complex rate that
      is bounded by 0 and divides is not 0, since the other part may be 0;
    * decay: between -1 and 1 (an input that is a factor of it lies in [0, 1], one whose exponential is, in (-∞, 0];
      the share g of a mixture g · x + (1 - g) · y in [0, 1]);
    * corrections Σ scale · left rightᵀ, R of them: each at most 2/R. left and right have length one, and an input that
      is a factor of scale (DeltaNet's β) lies in [0, 2/R];
    * solves: weights of squares are not negative, the ridge is positive;
    * quotients: what is added to den (a sink's weight) is not negative. Where nothing else keeps den away from 0,
      readout, key and the factors beside it are positive.

    If decays are still larger, and are legal only with one sign of some inputs (a rate as the argument of `zoh`, which
    divides by it, `bilinear` or `euler`), these inputs first get that sign, and all is demanded again.

    Raises InputError for a name that the recurrence does not have, and for an empty range.
    """
    return _infer(spec, given, APART)[0]


def legal_ranges(spec: Spec, given: Given | None = None) -> tuple[dict[str, Range], frozenset[str]]:
    """(the legal ranges of a call's inputs, the names of inputs whose range is sufficient but not necessary).

    As `ranges_of`, but positive inputs may be arbitrarily near 0. A range is not necessary where the demand on one
    expression was divided among several inputs (a + b ≤ 1: a may be larger if b is smaller), so that an input outside
    it need not be wrong.
    """
    return _infer(spec, given, TINY)


def _infer(spec: Spec, given: Given | None, apart: float) -> tuple[dict[str, Range], frozenset[str]]:
    ranges = dict.fromkeys((i.name for i in spec.inputs), REAL)
    fixed = {name: _of_input(spec, name, value) for name, value in (given or {}).items()}
    inference = _Inference(spec, ranges | fixed, frozenset(fixed), apart)
    inference.run()
    if not all(inference.holds(row.normal.decay, -1.0, 1.0) for row in spec.rows):
        inference = _Inference(spec, ranges | fixed, frozenset(fixed), apart)
        inference.signs()
        inference.run()
    return inference.ranges | fixed, frozenset(inference.loose)


def _of_input(spec: Spec, name: str, value: Range | tuple[float, float]) -> Range:
    if name not in {i.name for i in spec.inputs}:
        names = ", ".join(i.name for i in spec.inputs)
        raise InputError(f"{spec.name}: ranges names `{name}`, which is no input; inputs are {names}")
    return as_range(spec.name, name, value)


class _Inference:
    """The narrowing of inputs' ranges by demands on expressions; `probe` tests whether these already hold."""

    def __init__(self, spec: Spec, ranges: dict[str, Range], fixed: frozenset[str], apart: float = APART) -> None:
        self.spec, self.ranges, self.fixed, self.apart = spec, ranges, fixed, apart
        self.evaluator: Evaluator | None = None
        self.sharing = 0  # nested demands that could be divided among inputs in another way
        self.loose: set[str] = set()  # inputs narrowed by such demands

    def run(self) -> None:
        """Make every demand."""
        self.domains()
        for row in self.spec.rows:
            self.demand(row.normal.decay, -1.0, 1.0)
        for row in self.spec.rows:
            for c in row.normal.corrections:
                self.correction(c, 2.0 / len(row.normal.corrections))
        if self.spec.system.solve is not None:
            for _, weight in self.spec.system.solve.squares:
                self.demand(weight, 0.0, INF)
            self.positive(self.spec.system.solve.ridge)
        self.quotient()
        self.off_zero()

    def probe(self, x: Expr) -> Tensor:
        """Values of x on drawn inputs [1, T, 1, n, p]."""
        if self.evaluator is None:
            bound = bind(self.spec, (), probe_inputs(self.spec, self.ranges))
            self.evaluator = Evaluator(environment(self.spec, bound), bound.sizes.keys, PROBE_CHANNELS)
        return self.evaluator(x)

    def holds(self, x: Expr, low: float, high: float) -> bool:
        """True when drawn inputs keep x between low and high."""
        values = self.probe(x)
        return bool(((values >= low - 1e-9) & (values <= high + 1e-9)).all())

    def nodes(self) -> list[Expr]:
        """Every expression that is computed."""
        roots = [self.spec.readout, self.spec.system.D]
        for row in self.spec.rows:
            roots += [row.normal.decay, row.normal.angle, *([] if row.dense is None else [row.dense])]
            roots += [e for c in row.normal.corrections for e in (c.scale, c.left, c.right)]
            roots += [e for t in row.terms for e in (t.key, t.value)]
        return children_first(*roots)

    def signs(self) -> None:
        """Give inputs one sign where no decay is legal with the other one."""
        for decay in [row.normal.decay for row in self.spec.rows]:
            for name in reached(decay, _RULES):
                if name in self.fixed or self.ranges[name] != REAL or self.holds(decay, -1.0, 1.0):
                    continue
                signs = Range(-INF, 0.0), Range(0.0, INF)
                found = [_Inference(self.spec, self.ranges | {name: r}, self.fixed).probe(decay) for r in signs]
                legal = [r for r, x in zip(signs, found, strict=True) if bool((x.abs() <= 1).any())]
                if len(legal) == 1:
                    self._set(name, legal[0])

    def domains(self) -> None:
        for node in self.nodes():
            if node.op == "div":
                self.divisor(node.args[1])
            elif node.op in ("log", "sqrt", "rsqrt"):
                self.positive(node.args[0])
            elif node.op == "log1p":
                with self.shared():  # an input is narrowed to 0 and more, and may be less
                    self.positive(node.args[0], -1.0)
            elif node.op == "phi1":
                self.demand(node.args[0], -INF, 0.0)
            elif node.op == "pow":
                self.powers(*node.args)

    def off_zero(self) -> None:
        """A square of what may be 0 at most or at least leaves 0, where it is added to others and divides (a rate)."""
        for node in self.nodes():
            squares = node.args[1].args if node.op == "div" and node.args[1].op == "add" else ()
            for x in [s.args[0] for s in squares if s.op == "mul" and s.args[0] is s.args[1]]:
                old = self.ranges[x.attrs[0]] if x.op == "input" else REAL
                low, high = (max(b, self.apart) if b == 0 else b for b in (old.low, -old.high))
                with self.shared():
                    if (low, -high) != (old.low, old.high) and not old.unit:
                        self._set(x.attrs[0], Range(low, -high))

    def divisor(self, x: Expr) -> None:
        """Demand x away from 0: below it where it is not above, as a rate of decay."""
        below = bool(self.probe(x).max() <= 0)
        low, high = (-INF, -self.apart) if below else (self.apart, INF)
        given = x.args[0] if x.op == "spread" else x
        if given.op == "input":
            self._narrow(given.attrs[0], low, high)  # drawn numbers do not show whether its bound is 0
        elif below:
            self.demand(x, low, high)
        else:
            self.positive(x)

    def positive(self, x: Expr, least: float = 0.0) -> None:
        """Demand x above `least` by a margin, unless it already is."""
        if self.probe(x).min() <= least:
            self.demand(x, least + self.apart, INF)

    def powers(self, base: Expr, power: Expr) -> None:
        """Demand a base that has this power, and a slope there; even powers are left alone, as a² in a divisor is."""
        if not power.is_constant or (power.value < 1 and power.value % 2):
            with self.shared(power.is_constant and power.value % 1 == 0):  # 1 / x: below 0 as well
                self.positive(base)
        elif power.value % 1 and self.probe(base).min() < 0:  # 0 has a slope, too
            self.demand(base, 0.0, INF)

    def quotient(self) -> None:
        """Positive readout and keys where nothing keeps den from 0; what is added to den is not negative."""
        rule = self.spec.rule
        if rule is None or not any(n.op == "div" for n in children_first(rule)):
            return
        for node in children_first(rule):
            if node.op == "add" and DEN in node.args:
                for added in node.args:
                    self.demand(substitute(added, dict.fromkeys((NUM, DEN, ONE), const(1))), 0.0, INF)
        if any(n.op in ("maximum", "minimum", "add", "sqrt") for n in children_first(rule)):
            return  # the rule keeps den from 0
        if self.spec.features is not None:
            return  # Taylor features can have a positive dot product without positive entries
        assert self.spec.ones is not None
        factors = [e for row in self.spec.ones_rows for t in row.terms for e in (t.key, t.value)]
        with self.shared():
            for factor in [self.spec.readout, *factors]:
                self.positive(factor)

    def correction(self, c: Correction, bound: float) -> None:
        """Demand a correction whose matrix is no larger than `bound`."""
        along = -2 if c.axis == KEY else -1
        size = self.probe(c.scale).abs() * self.probe(c.left).norm(dim=along, keepdim=True)
        if (size * self.probe(c.right).norm(dim=along, keepdim=True)).max() > bound:
            self.short(c.left, c.axis)
            self.short(c.right, c.axis)
            with self.shared(bound < 2):  # several corrections divide the bound of one
                self.demand(c.scale, -bound, bound)

    def short(self, x: Expr, axis: str = KEY) -> None:
        """Demand vectors of length at most one along an axis."""
        if self.probe(x).square().sum(-2 if axis == KEY else -1).max() <= 1 + 1e-6:
            return
        if x.op == "input":
            self._set(x.attrs[0], UNIT)
            return
        parts = [a for a in x.args if axis in a.axes]
        if x.op == "mul" and len(parts) == 2:
            parts = [a for a in parts if not self.holds(a, -1.0, 1.0)] or parts[1:]
        with self.shared(len(parts) > 1):
            for part in parts:
                self.short(part, axis)

    def demand(self, x: Expr, low: float, high: float) -> None:
        """Demand low ≤ x ≤ high."""
        if self.holds(x, low, high):
            return
        if x.op == "input":
            self._narrow(x.attrs[0], low, high)
        elif x.op in _RULES:
            _RULES[x.op](self, x, low, high)

    def mixed(self, a: Expr, b: Expr, low: float, high: float) -> None:
        """Demand a share from 0 to 1, and either part of the mixture from low to high."""
        share, parts = mixture(a, b) or (None, [])
        if share is not None:
            self.demand(share, 0.0, 1.0)
        for part in (part[0] for part in parts if len(part) == 1):
            self.demand(part, low, high)

    def _narrow(self, name: str, low: float, high: float) -> None:
        old = self.ranges[name]
        if low < 0 < old.high and (high == INF or high == -low):
            low = 0.0  # a gate or a rate: positive, as in the papers
        new = Range(max(low, old.low) + 0.0, min(high, old.high) + 0.0)  # + 0.0: no -0
        if not old.unit and new.low < new.high:
            self._set(name, new)

    def _set(self, name: str, new: Range) -> None:
        if name not in self.fixed:
            self.ranges[name] = new
            self.evaluator = None
            if self.sharing:
                self.loose.add(name)

    @contextmanager
    def shared(self, really: bool = True) -> Iterator[None]:
        """Demands made in this context are sufficient, not necessary."""
        self.sharing += really
        yield
        self.sharing -= really


def _scaled(self: _Inference, x: Expr, factor: float, low: float, high: float) -> None:
    """Demand low ≤ factor · x ≤ high."""
    if factor:
        bounds = sorted((low / factor, high / factor))
        self.demand(x, *bounds)


def _mul(self: _Inference, x: Expr, low: float, high: float) -> None:
    a, b = x.args
    for one, other in ((a, b), (b, a)):
        if one.is_constant:
            _scaled(self, other, one.value, low, high)
            return
    if math.isinf(low) or math.isinf(high):
        values = self.probe(a)
        if (values > 0).any() and (values < 0).any():
            a, b = b, a
            values = self.probe(a)
        if (values > 0).any() and (values < 0).any():
            with self.shared():
                self.demand(a, 0.0, INF)
                self.demand(b, low, high)
        else:
            _scaled(self, b, -1.0 if (values < 0).any() else 1.0, low, high)
        return
    limit = max(abs(low), abs(high))
    first, second = (b, a) if self.holds(a, -1.0, 1.0) else (a, b)
    with self.shared(not self.holds(second, -1.0, 1.0)):
        self.demand(first, -limit, limit)
        if not self.holds(x, low, high):
            self.demand(second, 0.0 if low >= 0 else -1.0, 1.0)


def _add(self: _Inference, x: Expr, low: float, high: float, sign: float = 1.0) -> None:
    a, b = x.args
    if b.is_constant:
        self.demand(a, low - sign * b.value, high - sign * b.value)
    elif a.is_constant:
        _scaled(self, b, sign, low - a.value, high - a.value)
        return
    with self.shared():
        if sign > 0 and low <= 0 < high:
            self.mixed(a, b, low, high)
        if not self.holds(x, low, high):
            self.demand(a, low / 2, high / 2)
            _scaled(self, b, sign, low / 2, high / 2)


def _div(self: _Inference, x: Expr, low: float, high: float) -> None:
    a, b = x.args
    smallest = float(self.probe(b).abs().min())
    with self.shared(not b.is_constant):
        _scaled(self, a, 1.0 / smallest if smallest else 0.0, low, high)


def _pow(self: _Inference, x: Expr, low: float, high: float) -> None:
    base, power = x.args
    if not power.is_constant:
        with self.shared():
            self.demand(base, 0.0, 1.0)
            self.demand(power, 0.0, INF)
    elif power.value > 0:
        root = high if math.isinf(high) else max(high, 0.0) ** (1 / power.value)
        self.demand(base, 0.0 if power.value % 2 else -root, root)
    elif 0 < high < INF and power.value:
        self.demand(base, high ** (1 / power.value), INF)


def _every(*places: int) -> Callable[[_Inference, Expr, float, float], None]:
    def rule(self: _Inference, x: Expr, low: float, high: float) -> None:
        with self.shared():
            for place in places:
                self.demand(x.args[place], low, high)

    return rule


def _exp(self: _Inference, x: Expr, low: float, high: float) -> None:
    self.demand(x.args[0], math.log(low) if low > 0 else -INF, math.log(high) if high > 0 else 0.0)


def _sum(self: _Inference, x: Expr, low: float, high: float) -> None:
    if low >= 0:
        with self.shared():
            self.demand(x.args[0], 0.0, INF)


def _same(self: _Inference, x: Expr, low: float, high: float) -> None:
    """Of entries that are given once for a pair, and of the last token's."""
    self.demand(x.args[0], low, high)


def _expm1(self: _Inference, x: Expr, low: float, high: float) -> None:
    self.demand(x.args[0], *(math.log1p(bound) if bound > -1 else -INF for bound in (low, high)))


def _rsqrt(self: _Inference, x: Expr, low: float, high: float) -> None:
    if 0 < high < INF:
        self.demand(x.args[0], high**-2, INF)


def _softplus(self: _Inference, x: Expr, low: float, high: float) -> None:
    self.demand(x.args[0], low if low > 0 else -INF, high)


_RULES: dict[str, Callable[[_Inference, Expr, float, float], None]] = {
    "mul": _mul,
    "add": _add,
    "sub": lambda self, x, low, high: _add(self, x, low, high, sign=-1.0),
    "div": _div,
    "pow": _pow,
    "exp": _exp,
    "expm1": _expm1,
    "log1p": lambda self, x, low, high: self.demand(x.args[0], math.expm1(min(low, 80)), math.expm1(min(high, 80))),
    "rsqrt": _rsqrt,
    "spread": _same,
    "prev": _same,
    "log": lambda self, x, low, high: self.demand(x.args[0], math.exp(min(low, 80)), math.exp(min(high, 80))),
    "sqrt": lambda self, x, low, high: self.demand(x.args[0], max(low, 0.0) ** 2, max(high, 0.0) ** 2),
    "softplus": _softplus,
    "abs": lambda self, x, low, high: self.demand(x.args[0], -high, high),
    "where": _every(1, 2),
    "minimum": _every(0, 1),
    "maximum": _every(0, 1),
    "sum_key": _sum,
    "sum_value": _sum,
}
