"""Expressions: what a recurrence is made of, traced once.

An `Expr` is an immutable, hash-consed node: building the same expression twice gives the same object, so identity is
equality and a directed acyclic graph costs what it prints. It carries the set of axes it varies over, a subset of
{"key", "value"}; products broadcast by axis name, never by position.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, TypeAlias

from dsf.errors import TraceError

KEY, VALUE = "key", "value"
Axes: TypeAlias = frozenset[str]
Number: TypeAlias = int | float
Like: TypeAlias = "Expr | int | float"

_interned: weakref.WeakValueDictionary[tuple[Any, ...], Expr] = weakref.WeakValueDictionary()

# Operations that are not elementwise in their arguments' axes.
REDUCTIONS = {"sum_key": KEY, "sum_value": VALUE}
COMPARISONS = ("gt", "ge", "lt", "le")


class Expr:
    """One node of a traced expression.

    op: the primitive's name ("input", "const", "size", "exp", "mul", …). args: its operands. attrs: static facts
    (an input's name and micro-step, a constant's value, an order). axes: what it varies over. features: None, or what
    its Key axis holds ("exp" for infinite features, "taylor2" …) instead of the recurrence's own N entries.
    """

    __slots__ = ("__weakref__", "args", "attrs", "axes", "features", "op")
    op: str
    args: tuple[Expr, ...]
    attrs: tuple[Any, ...]
    axes: Axes
    features: str | None

    def __new__(
        cls,
        op: str,
        args: tuple[Expr, ...] = (),
        attrs: tuple[Any, ...] = (),
        axes: Axes | None = None,
        features: str | None = None,
    ) -> Expr:
        """Return the one node with these parts."""
        if axes is None:
            axes = frozenset[str]().union(*(a.axes for a in args))
        if features is None:
            features = _common_features(args)
        identity = (op, tuple(map(id, args)), attrs, axes, features)
        found = _interned.get(identity)
        if found is not None:
            return found
        self = object.__new__(cls)
        self.op, self.args, self.attrs, self.axes, self.features = op, args, attrs, axes, features
        _interned[identity] = self
        return self

    def __add__(self, other: Like) -> Any:
        return _binary("add", self, other)

    def __radd__(self, other: Like) -> Any:
        return _binary("add", other, self)

    def __sub__(self, other: Like) -> Any:
        return _binary("sub", self, other)

    def __rsub__(self, other: Like) -> Any:
        return _binary("sub", other, self)

    def __mul__(self, other: Like) -> Any:
        return _binary("mul", self, other)

    def __rmul__(self, other: Like) -> Any:
        return _binary("mul", other, self)

    def __truediv__(self, other: Like) -> Any:
        return _binary("div", self, other)

    def __rtruediv__(self, other: Like) -> Any:
        return _binary("div", other, self)

    def __pow__(self, other: Like) -> Any:
        return _binary("pow", self, other)

    def __rpow__(self, other: Like) -> Any:
        return _binary("pow", other, self)

    def __neg__(self) -> Expr:
        return _binary("mul", -1.0, self)

    def __gt__(self, other: Like) -> Any:
        return _binary("gt", self, other)

    def __ge__(self, other: Like) -> Any:
        return _binary("ge", self, other)

    def __lt__(self, other: Like) -> Any:
        return _binary("lt", self, other)

    def __le__(self, other: Like) -> Any:
        return _binary("le", self, other)

    def __bool__(self) -> bool:
        raise TraceError(
            f"a traced expression has no truth value: `{self}` is not known while the recurrence is declared; "
            "use where(condition, a, b), minimum or maximum instead of if"
        )

    def __iter__(self) -> Iterator[Expr]:
        raise TraceError(f"`{self}` cannot be iterated over or unpacked; Steps[...] inputs can")

    def __repr__(self) -> str:
        return show(self)

    @property
    def is_constant(self) -> bool:
        """True for a literal number."""
        return self.op == "const"

    @property
    def value(self) -> float:
        """The number of a literal."""
        assert self.op == "const"
        return float(self.attrs[0])


def const(number: Number) -> Expr:
    """A literal number."""
    return Expr("const", (), (float(number),), frozenset())


def as_expr(x: Any) -> Expr:
    """Numbers become constants; everything that is not an expression is refused."""
    if isinstance(x, Expr):
        return x
    if isinstance(x, int | float):
        return const(x)
    if type(x).__name__ == "Operator":
        raise TraceError(
            f"an operator on the Key axis (`{x}`) stands where an expression is needed; operators add, scale and "
            "multiply with @, and are the A of a System"
        )
    raise TraceError(f"expected an expression or a number, got {type(x).__name__}: {x!r}")


def _common_features(args: tuple[Expr, ...]) -> str | None:
    kinds = {a.features for a in args if KEY in a.axes}
    if len(kinds) > 1:
        names = " and ".join(sorted(k or "N" for k in kinds))
        raise TraceError(f"Key axes of different sizes meet: {names}; map both sides with the same features")
    return kinds.pop() if kinds else None


_FOLD = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": lambda a, b: a**b,
}


def _binary(op: str, a: Any, b: Any) -> Any:
    """Arithmetic with the constant folding that keeps printed expressions readable."""
    from dsf.operator import Operator  # an operator on either side takes over

    if isinstance(a, Operator) or isinstance(b, Operator):
        return NotImplemented
    a, b = as_expr(a), as_expr(b)
    if a.is_constant and b.is_constant and op in _FOLD and not (op == "div" and b.value == 0):
        return const(_FOLD[op](a.value, b.value))
    if op in ("add", "sub") and b.is_constant and b.value == 0:
        return a
    if op == "add" and a.is_constant and a.value == 0:
        return b
    if op in ("mul", "div", "pow") and b.is_constant and b.value == 1:
        return a
    if op == "mul" and a.is_constant and a.value == 1:
        return b
    return Expr(op, (a, b))


def children_first(*roots: Expr) -> list[Expr]:
    """Every node reachable from roots, each after its operands."""
    seen: set[int] = set()
    out: list[Expr] = []
    stack: list[tuple[Expr, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            out.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args))
    return out


def substitute(root: Expr, replacements: dict[Expr, Expr]) -> Expr:
    """root with nodes replaced; rebuilt bottom-up, axes inferred anew."""
    done: dict[Expr, Expr] = {}
    for node in children_first(root):
        if node in replacements:
            done[node] = replacements[node]
        elif not node.args:
            done[node] = node
        else:
            done[node] = rebuild(node, tuple(done[a] for a in node.args))
    return done[root]


def rebuild(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """The same operation on other operands."""
    if args == node.args:
        return node
    if node.op in _FOLD or node.op in COMPARISONS:
        return _binary(node.op, *args)
    if node.op in REDUCTIONS:
        return reduction(node.op, args[0])
    fixed = node.axes if node.op in ("exp_features", "taylor_features") else None
    return Expr(node.op, args, node.attrs, fixed, node.features if fixed else None)


def reduction(op: str, x: Expr) -> Expr:
    """sum over one axis; a Key read where none exists is an error."""
    axis = REDUCTIONS[op]
    if axis not in x.axes:
        raise TraceError(f"{op}({x}) sums over the {axis.title()} axis, but its argument does not vary over it")
    features = None if axis == KEY else x.features
    return Expr(op, (x,), (), x.axes - {axis}, features)


def inputs_of(*roots: Expr) -> list[Expr]:
    """The distinct input nodes below roots."""
    return [n for n in children_first(*roots) if n.op == "input"]


_SYMBOLS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "pow": "**",
    "gt": ">",
    "ge": ">=",
    "lt": "<",
    "le": "<=",
}
_PRECEDENCE = {"gt": 0, "ge": 0, "lt": 0, "le": 0, "add": 1, "sub": 1, "mul": 2, "div": 2, "pow": 3}


def show(node: Expr, outer: int = -1) -> str:
    """The expression as the user would write it."""
    if node.op == "input":
        name, step = node.attrs
        return name if step is None else f"{name}[{step}]"
    if node.op == "const":
        return f"{node.value:g}"
    if node.op == "size":
        return "N" if node.attrs[0] == KEY else "P"
    if node.op in _SYMBOLS:
        level = _PRECEDENCE[node.op]
        left, right = (show(a, level + (i and node.op != "add")) for i, a in enumerate(node.args))
        text = f"{left} {_SYMBOLS[node.op]} {right}"
        return f"({text})" if level < outer else text
    parts = [show(a) for a in node.args] + [f"{a}" for a in node.attrs]
    return f"{node.op}({', '.join(parts)})"
