"""Which parts of a scan a kernel before it computes once a token, instead of every program and thread of the scan.

A program of the scan handles some channels of a head. An expression without a Value axis is the same for all channels,
yet every program would compute and differentiate it. Computed before the scan, it is one more input, a float32 tensor
[B, T, H, N] or [B, T, H], which the scan has to load and whose gradient it has to sum over channels. That pays only for
expensive expressions, or where the scan then no longer needs the expression's own inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsf.language.derived import derived
from dsf.language.expr import COMPARISONS, KEY, VALUE, Expr, children_first, inputs_of, substitute
from dsf.language.spec import Spec
from dsf.triton.coefficients import Coefficients, coefficients
from dsf.triton.regroup import regroup

ENTRIES = 16  # length that a Key vector is assumed to have
# Costs, in instructions a token and thread of the forward pass; loads and sums count as many as they cost.
LOAD = {True: 4 * ENTRIES, False: 14}  # to load a tensor for a token, with and without a Key axis
LAUNCH = 12  # least saving that justifies a kernel before the scan
SUM = 48  # of a sum over the Key axis: a scan that has one cannot process one state entry after the other
PRICES = dict.fromkeys(("div", "sqrt", "rsqrt", "exp", "log"), 8) | {"sigmoid": 16, "pow": 16, "size": 0}
PRICES |= dict.fromkeys(("expm1", "phi1", "log1p", "tanh", "softplus", "logsigmoid"), 30)


@dataclass(frozen=True)
class Parts:
    """A scan in two parts. left: the coefficients that the scan computes; made: what the kernel before it computes, by
    the names of the scan's new inputs.

    passed: inputs that both read. The kernel before the scan passes them on in float32, so that gradients from both
    are added before they are rounded.
    """

    left: Coefficients
    made: dict[Expr, Expr]
    passed: tuple[Expr, ...]

    @property
    def given(self) -> list[tuple[Expr, Expr]]:
        """(name in the scan, expression) of everything that the scan takes from the kernel before it."""
        return [*self.made.items(), *((x, x) for x in self.passed)]


@derived
def parts(spec: Spec) -> Parts:
    """The two parts of a spec's scan."""
    whole = coefficients(spec)
    timed = {i.name for i in spec.inputs if i.kind.time}
    tokens = frozenset(x for x in inputs_of(*whole.roots) if x.attrs[0] in timed)
    whole = whole.of(regroup(whole.roots, set(inputs_of(*whole.roots)) - tokens))
    if not any(VALUE in x.axes for x in tokens):  # y has the dtype of one that stays as it is
        return Parts(whole, {}, ())
    chosen = _Choice(whole.roots, tokens).best()
    names = {i.name for i in spec.inputs}
    made: dict[Expr, Expr] = {}
    for node in chosen:
        name = f"made{len(made)}"
        while name in names:
            name += "_"
        made[Expr("input", (), (name, None), node.axes)] = node
    swap = {node: symbol for symbol, node in made.items()}
    left = whole.of([substitute(r, swap) for r in whole.roots])
    below = {x for x in inputs_of(*chosen) if x in tokens}
    return Parts(left, made, tuple(x for x in inputs_of(*left.roots) if x in below))


class _Choice:
    """Sets of expressions that could be computed before the scan, and the cost of the rest."""

    def __init__(self, roots: tuple[Expr, ...], tokens: frozenset[Expr]) -> None:
        self.roots, self.tokens = roots, tokens
        self.varies: dict[Expr, bool] = {}
        for x in children_first(*roots):
            self.varies[x] = x in tokens or any(self.varies[a] for a in x.args)

    def best(self) -> list[Expr]:
        """What to compute before the scan: all that is possible, then opened up as long as that is cheaper."""
        found = frozenset(x for r in self.roots for x in self._below(r))
        cost = self._cost(found)
        improved = True
        while improved:
            improved = False
            for node in sorted(found, key=self._order().index, reverse=True):
                for deeper in (False, True):
                    inside = frozenset(x for a in node.args for x in self._below(a, deeper))
                    made = (found - {node}) | inside
                    other = made & frozenset(self._left(made))
                    if self._cost(other) < cost:
                        found, cost, improved = other, self._cost(other), True
                        break
                if improved:
                    break
        spared = self._cost(frozenset()) - cost
        return [x for x in self._order() if x in found] if spared > LAUNCH else []

    def _order(self) -> list[Expr]:
        return children_first(*self.roots)

    def _fits(self, x: Expr) -> bool:
        return self.varies[x] and VALUE not in x.axes and x.op != "input" and x.op not in COMPARISONS

    def _below(self, node: Expr, scalars: bool = False) -> Iterator[Expr]:
        """The largest possible expressions at or below node; scalars: only those without a Key axis."""
        if self._fits(node) and not (scalars and KEY in node.axes):
            yield node
        else:
            for a in node.args:
                yield from self._below(a, scalars)

    def _left(self, made: frozenset[Expr]) -> list[Expr]:
        """The nodes that the scan still has, including its inputs `made`."""
        seen: dict[Expr, None] = {}
        stack = list(self.roots)
        while stack:
            node = stack.pop()
            if node not in seen:
                seen[node] = None
                stack += [] if node in made else node.args
        return list(seen)

    def _cost(self, made: frozenset[Expr]) -> int:
        """Cost of all nodes without a Value axis that depend on tokens."""
        total = 0
        for x in self._left(made):
            if not self.varies[x] or VALUE in x.axes:
                continue
            if x in made or x in self.tokens:
                total += LOAD[KEY in x.axes]
            else:
                many = KEY in x.axes or x.op == "sum_key"
                total += _price(x) * (ENTRIES if many else 1) + (SUM if x.op == "sum_key" else 0)
        return total


def _price(x: Expr) -> int:
    """Instructions for one entry."""
    if x.op == "pow" and x.args[1].is_constant and x.args[1].value in range(1, 9):
        return int(x.args[1].value) - 1
    return PRICES.get(x.op, 1)
