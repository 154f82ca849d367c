"""Expressions: the nodes of a traced recurrence.

An `Expr` is an immutable, hash-consed node: building the same expression twice gives the same object, so identity is
equality, and an expression used twice is stored once. It carries the set of axes it varies over, a subset of
{"key", "value"}; products broadcast by axis name, never by position.
"""

from __future__ import annotations

import math
import operator
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from numbers import Real
from typing import Any, TypeAlias

from dsf.language.errors import TraceError
from dsf.language.instead import OF_NUMPY, counted, foreign, instead_of, no_number

KEY, VALUE = "key", "value"
PAIR = "pair"  # the `features` of a Pair input, one entry for two places of the Key axis, before it is spread
Axes: TypeAlias = frozenset[str]
Number: TypeAlias = int | float
Like: TypeAlias = "Expr | int | float"


class OperatorBase:
    """Base of dsf.operator.Operator, by which expressions recognise operators and leave the arithmetic to them."""

    __slots__ = ()

    def misplaced(self) -> str:
        """The error message where it is used as an expression."""
        return (
            f"an operator on the Key axis (`{self}`) stands where an expression is needed; operators add, scale and "
            "multiply with @, and are the A of a System"
        )


_interned: weakref.WeakValueDictionary[tuple[Any, ...], Expr] = weakref.WeakValueDictionary()
_lock = threading.RLock()  # of _interned; reentrant, as a garbage collection may build expressions


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)  # nobody in the child releases a lock that was held

# Operations that are not elementwise in their arguments' axes.
REDUCTIONS = {"sum_key": KEY, "sum_value": VALUE}
COMPARISONS = frozenset({"gt", "ge", "lt", "le"})
IN_PAIRS = frozenset({"pair", "quarter_turn"})  # operations whose two entries of a pair differ
BY_TORCH = frozenset({"sin", "cos", "atan2", *IN_PAIRS})  # computed by torch before a kernel runs


def _sides(op: str) -> tuple[Callable[[Any, Like], Any], Callable[[Any, Like], Any]]:
    """The methods of a binary operation, with the expression as the left and as the right operand."""
    return lambda self, other: _binary(op, self, other), lambda self, other: _binary(op, other, self)


class Expr:
    """One node of a traced expression.

    op: the primitive's name ("exp", "mul", …), or "const", "size", "input", "output" (an argument of normalize). args:
    its operands. attrs: static data (an input's name and micro-step, a constant's value, an order). axes: those that it
    varies over. features: None for the recurrence's own N entries on the Key axis, else the name of the features there
    ("exp" for infinite ones, "taylor2" …).
    """

    __slots__ = ("__weakref__", "_below", "_inputs", "args", "attrs", "axes", "features", "op")
    _below: tuple[Expr, ...]  # what dsf.torch.evaluate computes first
    _inputs: tuple[Expr, ...]  # those of inputs_of
    op: str
    args: tuple[Expr, ...]
    attrs: tuple[Any, ...]
    axes: Axes
    features: str | None

    def __new__(
        cls, op: str, args: tuple[Expr, ...] = (), attrs: tuple[Any, ...] = (), axes: Axes | None = None,
        features: str | None = None,
    ) -> Expr:  # fmt: skip
        """Return the one node with these parts."""
        if axes is None:
            axes = frozenset[str]().union(*(a.axes for a in args))
        if features is None and KEY in axes and op != "spread":
            features = _common_features(args)
        identity = (op, tuple(map(id, args)), attrs, axes, features)
        found = _interned.get(identity)
        if found is not None:
            return found
        self = object.__new__(cls)
        self.op, self.args, self.attrs, self.axes, self.features = op, args, attrs, axes, features
        with _lock:  # a second thread gets the first one's node
            found = _interned.get(identity)
            if found is None:
                _interned[identity] = found = self
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return Expr, (self.op, self.args, self.attrs, self.axes, self.features)

    def __deepcopy__(self, memo: dict[int, Any]) -> Expr:
        return self

    __add__, __radd__ = _sides("add")
    __sub__, __rsub__ = _sides("sub")
    __mul__, __rmul__ = _sides("mul")
    __truediv__, __rtruediv__ = _sides("div")
    __pow__, __rpow__ = _sides("pow")
    __gt__, __ge__, __lt__, __le__ = (_sides(op)[0] for op in ("gt", "ge", "lt", "le"))

    def __neg__(self) -> Any:
        return _binary("mul", -1.0, self)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int | float):
            raise TraceError(f"`{self} == {other}` is not known while the recurrence is declared; compare with > or <")
        return self is other

    def __bool__(self) -> bool:
        raise TraceError(
            f"a traced expression has no truth value: `{self}` is not known while the recurrence is declared; "
            "use where(condition, a, b), minimum or maximum instead of if"
        )

    def __iter__(self) -> Iterator[Expr]:
        raise TraceError(f"`{self}` cannot be iterated over or unpacked; Steps[...] inputs can")

    def __matmul__(self, other: Any) -> Any:
        return _no_matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _no_matmul(other, self)

    def __getattr__(self, name: str) -> Any:
        if name in Expr.__slots__ or name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"`{show(self, 6)}.{name}`: {instead_of(show(self), name)}")

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise TraceError(foreign("torch", getattr(function, "__name__", str(function))))

    def __array_ufunc__(self, ufunc: Any, _: str, *args: Any, **__: Any) -> Any:
        """A number of NumPy's beside an expression; its functions are refused."""
        if ufunc.__name__ not in OF_NUMPY:
            raise TraceError(foreign("numpy", ufunc.__name__))
        return _binary(OF_NUMPY[ufunc.__name__], *args)

    def _has_no_number(self) -> Any:
        raise TraceError(counted(show(self)))

    __float__ = __int__ = __index__ = __complex__ = __round__ = _has_no_number

    def __len__(self) -> int:
        raise TraceError(f"len({self}): {instead_of(show(self), 'shape')}")

    def __getitem__(self, place: Any) -> Any:
        raise TraceError(f"`{show(self, 6)}[{place!r}]`: an expression has no parts to take; Steps[...] inputs have")

    def __setitem__(self, place: Any, value: Any) -> None:
        self[place]

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


def _no_matmul(a: Any, b: Any) -> Any:
    if isinstance(a, OperatorBase) or isinstance(b, OperatorBase):
        return NotImplemented  # left to the operator's method
    raise TraceError(
        f"({a}) @ ({b}): @ multiplies operators; of expressions, dot(a, b) is the inner product over the Key axis and "
        "k * v of a Key and a Value the outer one"
    )


def const(number: Number) -> Expr:
    """A literal number."""
    return Expr("const", (), (float(number),), frozenset())


def as_expr(x: Any) -> Expr:
    """An expression, or a number as a constant. Raises TraceError for anything else."""
    if isinstance(x, Expr):
        if x.op in COMPARISONS:
            raise TraceError(f"the comparison `{x}` has no number as its value; use where({x}, a, b)")
        return x
    if isinstance(x, Real) and not math.isnan(x):
        return const(float(x))
    if isinstance(x, OperatorBase):
        raise TraceError(x.misplaced())
    raise TraceError(no_number(x))


def _common_features(args: tuple[Expr, ...]) -> str | None:
    kinds = {a.features for a in args if KEY in a.axes}
    if len(kinds) > 1:
        names = " and ".join(sorted(k or "N" for k in kinds))
        raise TraceError(f"Key axes of different sizes meet: {names}; map both sides with the same features")
    return kinds.pop() if kinds else None


ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {  # for numbers and for tensors
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "pow": operator.pow,
}  # fmt: skip


def _binary(op: str, a: Any, b: Any) -> Any:
    """A node of arithmetic or comparison, with constant folding so that printed expressions stay readable."""
    if isinstance(a, OperatorBase) or isinstance(b, OperatorBase):
        return NotImplemented  # an operator on either side takes over
    a, b = as_expr(a), as_expr(b)
    if a.is_constant and b.is_constant and op in ARITHMETIC:
        return const(_fold(op, a.value, b.value))
    if op == "div" and b is const(0):
        raise TraceError(f"`{a} / 0` is not a real number, whatever `{a}` is")
    if op in ("add", "sub") and b.is_constant and b.value == 0:
        return a
    if op == "add" and a.is_constant and a.value == 0:
        return b
    if op in ("mul", "div", "pow") and b.is_constant and b.value == 1:
        return a
    if op == "mul" and a.is_constant and a.value == 1:
        return b
    return Expr(op, (a, b))


def _fold(op: str, a: float, b: float) -> float:
    try:
        folded = ARITHMETIC[op](a, b)
    except ArithmeticError:
        folded = math.nan
    if isinstance(folded, complex) or (math.isfinite(a) and math.isfinite(b) and not math.isfinite(folded)):
        raise TraceError(f"{a:g} {_SYMBOLS[op]} {b:g} is not a real number")
    return float(folded)


def children_first(*roots: Expr) -> list[Expr]:
    """Every node reachable from roots, each after its operands."""
    seen: set[int] = set()  # set[int]() is more than the compiler of torch 2.11 follows
    out: list[Expr] = []
    stack = [(r, False) for r in reversed(roots)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            out.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack += [(node, True), *((a, False) for a in reversed(node.args))]
    return out


def rewritten(root: Expr, change: Callable[[Expr, tuple[Expr, ...]], Expr | None]) -> Expr:
    """root rebuilt bottom-up: change(node, its new operands) in place of a node, or for None its own operation."""
    done: dict[Expr, Expr] = {}
    for node in children_first(root):
        args = tuple(done[a] for a in node.args)
        found = change(node, args)
        done[node] = rebuild(node, args) if found is None else found
    return done[root]


def substitute(root: Expr, replacements: dict[Expr, Expr]) -> Expr:
    """root with nodes replaced; rebuilt bottom-up, axes inferred anew."""
    return rewritten(root, lambda node, _: replacements.get(node))


def rebuild(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """The node's operation on other operands."""
    if args == node.args:
        return node
    if node.op in ARITHMETIC or node.op in COMPARISONS:
        return _binary(node.op, *args)
    if node.op in REDUCTIONS:
        axis = REDUCTIONS[node.op]
        if axis not in args[0].axes:  # as where ones replace an input
            return _binary("mul", args[0], Expr("size", (), (axis,), frozenset()))
        return reduction(node.op, args[0])
    if node.op == "pair":
        return Expr("pair", args, (), args[0].axes | args[1].axes | {KEY})
    fixed = node.axes if node.op in ("exp_features", "taylor_features") else None
    return Expr(node.op, args, node.attrs, fixed, node.features if fixed else None)


def symbol_of(name: str, step: int | None, axes: Axes, pair: bool = False) -> Expr:
    """An input's node; a Pair input is spread, its one entry a pair repeated for both places."""
    if not pair:
        return Expr("input", (), (name, step), axes)
    return Expr("spread", (Expr("input", (), (name, step), axes, PAIR),))


def is_paired(x: Expr, equal: Collection[Expr] = ()) -> bool:
    """True where the entries 2i and 2i + 1 of the Key axis are equal, as in `equal`, or x has no Key axis."""
    if KEY not in x.axes or x.op == "spread" or x in equal:
        return True
    if x.op in IN_PAIRS:
        return False
    return bool(x.args) and x.features is None and all(is_paired(a, equal) for a in x.args)


def reduction(op: str, x: Expr) -> Expr:
    """The sum over one axis. Raises TraceError where x does not have it."""
    axis = REDUCTIONS[op]
    if axis not in x.axes:
        other = "; it varies over the Value axis: annotate it Key, or take sum_value" if VALUE in x.axes else ""
        raise TraceError(f"{op}({x}) sums over the {axis.title()} axis, but its argument does not vary over it{other}")
    return Expr(op, (x,), (), x.axes - {axis})


def inputs_of(*roots: Expr) -> list[Expr]:
    """The distinct input nodes below roots; kept on each root, as every call asks for them."""
    for root in roots:
        if not hasattr(root, "_inputs"):
            root._inputs = tuple(x for x in children_first(*root.args) if x.op == "input")
    return list(dict.fromkeys(x for root in roots for x in (root._inputs if root.op != "input" else (root,))))


_SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}
# Python's precedences: op -> (own, the least that a left and a right operand needs without parentheses).
_UNARY = 3
_PRECEDENCE = {
    **dict.fromkeys(COMPARISONS, (0, 1, 1)),
    **dict.fromkeys(("add", "sub"), (1, 1, 2)),
    **dict.fromkeys(("mul", "div"), (2, 2, 3)),
    "pow": (4, 5, _UNARY),
}


def show(node: Expr, outer: int = 0) -> str:
    """The expression as Python source: evaluating the text gives the node back.

    outer: the precedence of the surrounding operation (0 for none); expressions that bind less get parentheses.
    """
    if node.op in ("input", "output"):
        name, step = node.attrs
        return name if step is None else f"{name}[{step}]"
    if node.op == "spread":
        return show(node.args[0], outer)
    if node.op == "const":
        return _parenthesise(_number(node.value), _UNARY if node.value < 0 else outer, outer)
    if node.op == "size":
        return "N" if node.attrs[0] == KEY else "P"
    if node.op == "mul" and node.args[0].is_constant and node.args[0].value == -1:
        return _parenthesise(f"-{show(node.args[1], _UNARY)}", _UNARY, outer)
    if _is_unit(node):
        x, eps = node.args[0], node.args[1].args[0].args[1].value
        return f"l2norm({show(x)})" if eps == 1e-6 else f"l2norm({show(x)}, {_number(eps)})"
    if _is_dot(node):
        return f"dot({', '.join(map(show, node.args[0].args))})"
    if node.op in _SYMBOLS:
        level, left, right = _PRECEDENCE[node.op]
        text = f"{show(node.args[0], left)} {_SYMBOLS[node.op]} {show(node.args[1], right)}"
        return _parenthesise(text, level, outer)
    parts = [show(a) for a in node.args] + [f"{a}" for a in node.attrs]
    return f"{node.op}({', '.join(parts)})"


def _is_dot(node: Expr) -> bool:
    """True for a node made by `dot`."""
    inside = node.args[0] if node.op == "sum_key" else None
    return inside is not None and inside.op == "mul" and all(KEY in a.axes for a in inside.args)


def _is_unit(node: Expr) -> bool:
    """True for a node made by `l2norm`: x * rsqrt(dot(x, x) + eps)."""
    if node.op != "mul" or node.args[1].op != "rsqrt":
        return False
    inside = node.args[1].args[0]
    if inside.op != "add" or not inside.args[1].is_constant or not _is_dot(inside.args[0]):
        return False
    return all(x is node.args[0] for x in inside.args[0].args[0].args)


def _parenthesise(text: str, level: int, outer: int) -> str:
    return f"({text})" if level < outer else text


def _number(value: float) -> str:
    if not math.isfinite(value):
        return f"float('{value}')"
    return repr(int(value)) if value.is_integer() and abs(value) < 1e16 else repr(value)
