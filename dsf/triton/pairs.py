"""Turns of pairs of places, written out for printed code, where a lane has one place.

The entry at the other place of a lane's pair is the same expression of inputs that are loaded from there. So nothing
moves between lanes.
"""

from __future__ import annotations

from collections.abc import Collection

from dsf.language.expr import KEY, Expr, children_first, const, rebuild
from dsf.language.functions import cos, sin

OTHER = ".other"  # suffix of an input's name: its entry at the other place of the pair
SIDE = Expr("side", (), (), frozenset({KEY}))  # -1 at the first place of a pair, 1 at the second


class Pairs:
    """Rewrites expressions of one system. equal: inputs whose two entries of a pair are equal."""

    def __init__(self, equal: Collection[Expr] = ()) -> None:
        self.equal = frozenset(equal)
        self.done: dict[Expr, tuple[Expr, Expr]] = {}

    def turned(self, x: Expr, angle: Expr) -> Expr:
        """x [N, ...] with its pairs turned by the angle."""
        if angle is const(0):
            return self.own(x)
        own, other = self._both(x)
        angle = self.own(angle)
        return cos(angle) * own + (SIDE * sin(angle)) * other

    def own(self, x: Expr) -> Expr:
        """x without quarter turns."""
        return self._both(x)[0]

    def _both(self, root: Expr) -> tuple[Expr, Expr]:
        """The root at the lane's place and at the other one of its pair."""
        for node in children_first(root):
            if node not in self.done:
                self.done[node] = self._of(node)
        return self.done[root]

    def _of(self, node: Expr) -> tuple[Expr, Expr]:
        if node.op == "input":
            name, step = node.attrs
            if KEY not in node.axes or node in self.equal:
                return node, node
            name = name.removesuffix(OTHER) if name.endswith(OTHER) else name + OTHER
            return node, Expr("input", (), (name, step), node.axes)
        if not node.args:
            return node, -node if node is SIDE else node
        own, other = (tuple(self.done[x][side] for x in node.args) for side in (0, 1))
        if node.op == "quarter_turn":
            return SIDE * other[0], -SIDE * own[0]
        if node.op == "pair":
            return rebuild(node, own), rebuild(node, other[::-1])
        here = rebuild(node, own)
        return here, rebuild(node, other) if KEY in node.axes else here
