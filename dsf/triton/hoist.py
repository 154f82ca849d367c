"""Which parts of a scan are made once a token, by a kernel before it, instead of in every program and thread.

A program of the scan owns some channels of a head. What has no Value axis is the same in all of them, yet each would
compute it, and differentiate it, token by token. A part that is made outside comes in as one more tensor a token
[B, T, H, N] or [B, T, H] in float32: to be loaded, and its gradient summed over channels. So it is worth that only
where enough is computed to make it, or where what it is made of need not come in any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsf.language.derived import derived
from dsf.language.expr import COMPARISONS, KEY, VALUE, Expr, children_first, inputs_of, substitute
from dsf.language.spec import Spec
from dsf.triton.coefficients import Coefficients, coefficients
from dsf.triton.regroup import regroup

ENTRIES = 16  # state entries that a Key vector is taken to have
# In instructions a token and thread, forward; loads and sums over channels count for what they cost beside these.
LOAD = {True: 4 * ENTRIES, False: 14}  # of a tensor a token, with and without a Key axis
LAUNCH = 12  # what the kernel before the scan must spare it
SUM = 48  # of a sum over the Key axis: where one is left, a scan cannot take one state entry after the other
PRICES = dict.fromkeys(("div", "sqrt", "rsqrt", "exp", "log"), 8) | {"sigmoid": 16, "pow": 16, "size": 0}
PRICES |= dict.fromkeys(("expm1", "phi1", "log1p", "tanh", "softplus", "logsigmoid"), 30)


@dataclass(frozen=True)
class Parts:
    """A scan in two: the coefficients of what is left, and what is made before, under the names of inputs.

    passed: inputs that both read. The kernel before the scan hands them over in float32, so that gradients from both
    sides meet before they are rounded.
    """

    left: Coefficients
    made: dict[Expr, Expr]
    passed: tuple[Expr, ...]

    @property
    def given(self) -> list[tuple[Expr, Expr]]:
        """What the scan takes from the kernel before it: its name there, and the expression."""
        return [*self.made.items(), *((x, x) for x in self.passed)]


@derived
def parts(spec: Spec) -> Parts:
    """The scan of a spec without corrections, in its two parts."""
    whole = coefficients(spec)
    timed = {i.name for i in spec.inputs if i.kind.time}
    tokens = frozenset(x for x in inputs_of(*whole.roots) if x.attrs[0] in timed)
    whole = Coefficients(*regroup(whole.roots, set(inputs_of(*whole.roots)) - tokens))
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
    left = Coefficients(*(substitute(r, swap) for r in whole.roots))
    below = {x for x in inputs_of(*chosen) if x in tokens}
    return Parts(left, made, tuple(x for x in inputs_of(*left.roots) if x in below))


class _Choice:
    """Sets of expressions that could be made before the scan, and what is left of it then costs."""

    def __init__(self, roots: tuple[Expr, ...], tokens: frozenset[Expr]) -> None:
        self.roots, self.tokens = roots, tokens
        self.varies: dict[Expr, bool] = {}
        for x in children_first(*roots):
            self.varies[x] = x in tokens or any(self.varies[a] for a in x.args)

    def best(self) -> list[Expr]:
        """What to make: from all that could be, parts are opened as long as that is cheaper."""
        found = frozenset(x for r in self.roots for x in self._below(r))
        cost = self._cost(found)
        improved = True
        while improved:
            improved = False
            for node in sorted(found, key=self._order().index, reverse=True):
                for deeper in (False, True):
                    inside = frozenset(x for a in node.args for x in self._below(a, deeper))
                    other = self._reached((found - {node}) | inside)
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
        """The largest expressions from node on downwards that could be made; scalars: those without a Key axis."""
        if self._fits(node) and not (scalars and KEY in node.axes):
            yield node
        else:
            for a in node.args:
                yield from self._below(a, scalars)

    def _left(self, made: frozenset[Expr]) -> list[Expr]:
        """The nodes that the scan still has, those that are made among them."""
        seen: dict[Expr, None] = {}
        stack = list(self.roots)
        while stack:
            node = stack.pop()
            if node not in seen:
                seen[node] = None
                stack += [] if node in made else node.args
        return list(seen)

    def _reached(self, made: frozenset[Expr]) -> frozenset[Expr]:
        return made & frozenset(self._left(made))

    def _cost(self, made: frozenset[Expr]) -> int:
        """Of all that has no Value axis and comes from tokens."""
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
    """Instructions of one entry."""
    if x.op == "pow" and x.args[1].is_constant and x.args[1].value in range(1, 9):
        return int(x.args[1].value) - 1
    return PRICES.get(x.op, 1)
