"""A loss in the memory S, stored as a polynomial in S.

S is no expression, as it has no value while a loss is declared. A term with S (S itself, S.T @ k, their sums, their
products with expressions) is linear in S until `inner` or `norm2` multiplies two of them. So a loss is quadratic by
construction. Any other term raises TraceError where it is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from dsf.language.errors import TraceError
from dsf.language.expr import KEY, VALUE, Expr, OperatorBase, as_expr, const, show
from dsf.language.functions import sum_key, sum_value


@dataclass(frozen=True)
class Product:
    """number · Π factors; the factors are sorted by their text, so that equal products compare equal."""

    number: float
    factors: tuple[Expr, ...] = ()

    @classmethod
    def of(cls, x: Expr) -> Product:
        """The factors of an expression."""
        if x.is_constant:
            return cls(x.value)
        if x.op == "mul":
            return cls.of(x.args[0]) * cls.of(x.args[1])
        return cls(1.0, (x,))

    def __mul__(self, other: Product) -> Product:
        return Product(self.number * other.number, tuple(sorted((*self.factors, *other.factors), key=show)))

    def scaled(self, number: float) -> Product:
        """number · this product."""
        return Product(number * self.number, self.factors)

    def over(self, other: Product) -> Product | None:
        """The product q with self = q · other, or None where the division leaves a denominator."""
        left = list(self.factors)
        for factor in other.factors:
            if factor not in left:
                return None
            left.remove(factor)
        return Product(self.number / other.number, tuple(left)) if other.number else None

    @property
    def expr(self) -> Expr:
        """The product as an expression."""
        found = const(1)
        for factor in self.factors:
            found = found * factor
        return found if self.number == 1 else self.number * found

    @property
    def axes(self) -> frozenset[str]:
        """The axes that it varies over."""
        return self.expr.axes


def total(products: Iterable[Product]) -> Expr:
    """The sum of products, those with the same factors added up first."""
    found: dict[tuple[Expr, ...], float] = {}
    for p in products:
        found[p.factors] = found.get(p.factors, 0.0) + p.number
    whole = const(0)
    for factors, number in found.items():
        if number:
            whole = whole + Product(number, factors).expr
    return whole


Parts: TypeAlias = "tuple[tuple[Product, Expr | None], ...]"  # of a Linear


class InLoss(OperatorBase):
    """Base of the terms that depend on S."""

    __slots__ = ()
    text: str

    def __repr__(self) -> str:
        return self.text

    def misplaced(self) -> str:
        """The error message where it is used as an expression."""
        return (
            f"`{self}` depends on the memory S, and no function of it is quadratic in S: a loss is made of S.T @ k, "
            "sums, factors without S, norm2 and inner, and goes into dsf.learn"
        )

    def __pow__(self, other: Any) -> Any:
        raise TraceError(f"`({self}) ** {other}`: write norm2({self}), the sum of its squares, which is quadratic in S")

    def __rtruediv__(self, other: Any) -> Any:
        raise TraceError(f"the loss is not quadratic in S: `{other} / ({self})` divides by what depends on S")

    def __bool__(self) -> bool:
        raise TraceError(f"`{self}` has no truth value: S is not known while the recurrence is declared")


@dataclass(frozen=True, eq=False, repr=False)
class Linear(InLoss):
    """A term linear in S: Σ factor ⊙ S, or Σ factor · Sᵀ key; plus rest, without S.

    parts: (factor, key), key None for S itself. text: as the user wrote it.
    """

    text: str
    parts: Parts
    rest: tuple[Product, ...] = ()

    @property
    def is_whole(self) -> bool:
        """True for S itself, with the state's two axes, False for Sᵀ key."""
        return self.parts[0][1] is None

    def _sum(self, other: Any, sign: float, symbol: str) -> Linear:
        text = f"{self} {symbol} {_added(other, symbol)}"
        if isinstance(other, Loss):
            raise TraceError(f"`{text}` adds a number to a vector; write norm2 or inner of the vector")
        if isinstance(other, Linear):
            if other.is_whole is not self.is_whole:
                raise TraceError(f"`{text}` adds what was read of S to S itself")
            parts = tuple((p.scaled(sign), key) for p, key in other.parts)
            return Linear(text, self.parts + parts, self.rest + tuple(p.scaled(sign) for p in other.rest))
        added = Product.of(as_expr(other)).scaled(sign)
        if KEY in added.axes and not self.is_whole:
            raise TraceError(f"`{text}`: S.T @ k has no Key axis any more, but `{other}` has one")
        return Linear(text, self.parts, (*self.rest, added))

    def __add__(self, other: Any) -> Linear:
        return self._sum(other, 1.0, "+")

    def __radd__(self, other: Any) -> Linear:
        return self._sum(other, 1.0, "+")

    def __sub__(self, other: Any) -> Linear:
        return self._sum(other, -1.0, "-")

    def __rsub__(self, other: Any) -> Linear:
        return -self + other

    def __neg__(self) -> Linear:
        return self._times(-1.0, f"-({self})")

    def __mul__(self, other: Any) -> Linear:
        if isinstance(other, InLoss):
            raise TraceError(_degree(self, other))
        return self._times(other, f"({self}) * {_inside(other)}")

    def __rmul__(self, other: Any) -> Linear:
        return self._times(other, f"{_inside(other)} * ({self})")

    def __truediv__(self, other: Any) -> Linear:
        if isinstance(other, InLoss):
            raise TraceError(f"the loss is not quadratic in S: `({self}) / ({other})` divides by what depends on S")
        return self._times(1.0 / as_expr(other), f"({self}) / {_inside(other)}")

    def _times(self, other: Any, text: str) -> Linear:
        factor = Product.of(as_expr(other))
        if KEY in factor.axes and not self.is_whole:
            raise TraceError(f"`{text}`: S.T @ k has no Key axis any more, but `{other}` has one")
        return Linear(text, tuple((factor * p, key) for p, key in self.parts), tuple(factor * p for p in self.rest))


class Memory(Linear):
    """The state S [N, P] of a recurrence, in a loss for `dsf.learn`. S.T @ k reads it at the key k.

    S may also be used whole: `0.5 * lam * norm2(S)` is weight decay, `inner(w * S, S)` weight decay by row or by entry.
    """

    def __init__(self) -> None:
        super().__init__("S", ((Product(1.0), None),))

    @property
    def T(self) -> Transposed:
        """Sᵀ; S.T @ k reads it at the key k."""
        return Transposed()

    def __matmul__(self, other: Any) -> Any:
        raise TraceError(f"`S @ {_inside(other)}` reads S along its Value axis; S.T @ k reads it at a Key")


class Transposed(InLoss):
    """Sᵀ."""

    text = "S.T"

    def __matmul__(self, key: Any) -> Linear:
        key = as_expr(key)
        if key.axes != {KEY}:
            raise TraceError(f"`S.T @ {_inside(key)}` reads S at a Key, but `{key}` varies over {_axes(key)}")
        return Linear(f"S.T @ {_inside(key)}", ((Product(1.0), key),))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError("S.T is read at a key, S.T @ k")


@dataclass(frozen=True)
class Write:
    """The term -⟨S, key ⊗ value⟩ of a loss, by which a step writes value at key; key 1: value has both axes."""

    key: Expr
    value: Product


@dataclass(frozen=True, eq=False, repr=False)
class Loss(InLoss):
    """½ Σ weight (Sᵀ key)² + ½ ⟨ridge ⊙ S, S⟩ - ⟨S, writes⟩; terms without S are dropped.

    squares: (key, weight), weights without a Key axis. text: as the user wrote it.
    """

    text: str
    squares: tuple[tuple[Expr, Product], ...] = ()
    ridge: tuple[Product, ...] = ()
    writes: tuple[Write, ...] = ()

    def _scaled(self, factor: Any, text: str) -> Loss:
        if isinstance(factor, InLoss):
            raise TraceError(_degree(self, factor))
        weight = Product.of(as_expr(factor))
        if weight.axes:
            raise TraceError(
                f"`{text}`: a loss is a number, but `{factor}` varies over {_axes(weight.expr)}; weigh what is "
                f"squared instead, inner({factor} * x, x)"
            )
        return Loss(
            text, tuple((k, weight * p) for k, p in self.squares), tuple(weight * p for p in self.ridge),
            tuple(Write(w.key, weight * w.value) for w in self.writes),
        )  # fmt: skip

    def __mul__(self, other: Any) -> Loss:
        return self._scaled(other, f"({self}) * {_inside(other)}")

    def __rmul__(self, other: Any) -> Loss:
        return self._scaled(other, f"{_inside(other)} * {self}")

    def __truediv__(self, other: Any) -> Loss:
        if isinstance(other, InLoss):
            raise TraceError(f"the loss is not quadratic in S: `({self}) / ({other})` divides by what depends on S")
        return self._scaled(1.0 / as_expr(other), f"({self}) / {_inside(other)}")

    def __neg__(self) -> Loss:
        return self._scaled(-1.0, f"-({self})")

    def _sum(self, other: Any, text: str) -> Loss:
        if isinstance(other, Linear):
            raise TraceError(f"`{text}` adds a vector to a number; write norm2 or inner of `{other}`")
        if not isinstance(other, Loss):
            if as_expr(other).axes:
                raise TraceError(f"`{text}`: a loss is a number, but `{other}` varies over {_axes(as_expr(other))}")
            return self
        return Loss(text, self.squares + other.squares, self.ridge + other.ridge, self.writes + other.writes)

    def __add__(self, other: Any) -> Loss:
        return self._sum(other, f"{self} + {_added(other, '+')}")

    def __radd__(self, other: Any) -> Loss:
        return self._sum(other, f"{_inside(other)} + {self}")

    def __sub__(self, other: Any) -> Loss:
        text = f"{self} - {_added(other, '-')}"
        return self._sum(-other if isinstance(other, Loss) else other, text)

    def __rsub__(self, other: Any) -> Loss:
        return -self + other

    def __pow__(self, other: Any) -> Any:
        raise TraceError(f"the loss is not quadratic in S: `({self}) ** {other}` is of degree 4 or a root")


def inner(a: Any, b: Any) -> Any:
    """Σ a · b over all axes: a loss if a or b depends on a `Memory`, else an expression.

    `-inner(S.T @ k, v)` is the loss of Hebb's rule, `0.5 * inner(beta * e, e)` a square with a weight for each channel.
    Raises TraceError where the product would have a degree above 2 in S, and where the axes do not match.
    """
    text = f"inner({a}, {b})"
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Loss | Transposed):
            degree = _degree(x, y) if isinstance(x, Loss) and isinstance(y, InLoss) else f"`{x}` is no vector"
            raise TraceError(f"{text}: {degree}")
    if isinstance(a, Linear) and isinstance(b, Linear):
        if a.is_whole is not b.is_whole:
            raise TraceError(f"`{text}` multiplies what was read of S with S itself")
        return _square(text, a, b)
    if isinstance(b, Linear):
        a, b = b, a
    b = as_expr(b)
    if not isinstance(a, Linear):
        a = as_expr(a) * b
        a = sum_key(a) if KEY in a.axes else a
        return sum_value(a) if VALUE in a.axes else a
    if KEY in b.axes and not a.is_whole:
        raise TraceError(f"`{text}`: S.T @ k has no Key axis any more, but `{b}` has one")
    return Loss(text, writes=tuple(_write(factor.scaled(-1.0) * Product.of(b), key) for factor, key in a.parts))


def norm2(x: Any) -> Any:
    """Σ x² over all axes, inner(x, x): `0.5 * norm2(S.T @ k - v)` is the delta rule's loss. Raises as `inner`."""
    found = inner(x, x)
    return Loss(f"norm2({x})", found.squares, found.ridge, found.writes) if isinstance(found, Loss) else found


def _square(text: str, a: Linear, b: Linear) -> Loss:
    """The loss Σ a · b of two linear terms: its quadratic part as squares and ridge, its linear part as writes."""
    firsts, seconds = _gathered(a.parts), _gathered(b.parts)
    writes = [_write(factor.scaled(-1.0) * rest, key) for parts, y in ((firsts, b), (seconds, a))
              for factor, key in parts for rest in y.rest]  # fmt: skip
    ridge: list[Product] = []
    squares: list[tuple[Expr, Product]] = []
    for left, k in firsts:
        for right, other in seconds:
            weight = left * right
            if k is None or other is None:
                ridge.append(weight.scaled(2.0))
            elif k is other:
                squares.append((k, weight.scaled(2.0)))
            else:  # k lᵀ + l kᵀ = ½ (k + l)(k + l)ᵀ - ½ (k - l)(k - l)ᵀ
                first, second = sorted((k, other), key=show)
                squares += [(first + second, weight.scaled(0.5)), (first - second, weight.scaled(-0.5))]
    return Loss(text, tuple(squares), tuple(ridge), tuple(writes))


def _gathered(parts: Parts) -> Parts:
    """Reads whose factors differ by Scalars as one read: f · Sᵀk + g · Sᵀl is Sᵀ(f k + g l), whose square is one.

    Else it would be squares of k, l, k + l and k - l, some of negative weight, whose sum may lose all digits.
    """
    groups: dict[tuple[Expr, ...], dict[Expr, list[Product]]] = {}
    for factor, key in parts:
        if key is None:
            return parts
        wide = tuple(f for f in factor.factors if f.axes)
        scale = Product(factor.number, tuple(f for f in factor.factors if not f.axes))
        groups.setdefault(wide, {}).setdefault(key, []).append(scale)
    found: list[tuple[Product, Expr | None]] = []
    for wide, keys in groups.items():
        if len(keys) == 1:
            found += [(scale * Product(1.0, wide), key) for key, scales in keys.items() for scale in scales]
            continue
        whole = const(0)
        for key, scales in keys.items():
            weight = total(scales)
            if weight is not const(0):
                whole = whole + (key if weight is const(1) else weight * key)
        if whole is not const(0):
            found.append((Product(1.0, wide), whole))
    return tuple(found)


def _write(value: Product, key: Expr | None) -> Write:
    """The `Write` of -⟨S, key ⊗ value⟩. key None: the key is the product of value's factors with a Key axis."""
    if key is not None:
        return Write(key, value)
    own = Product(1.0, tuple(f for f in value.factors if KEY in f.axes))
    rest = Product(value.number, tuple(f for f in value.factors if KEY not in f.axes))
    return Write(own.expr, rest)


def _degree(a: InLoss, b: InLoss) -> str:
    if isinstance(a, Linear) and isinstance(b, Linear):
        return f"`({a}) * ({b})` is a vector of squares; sum it: inner({a}, {b})"
    degree = sum(1 if isinstance(x, Linear) else 2 for x in (a, b))
    return f"the loss is not quadratic in S: `({a}) * ({b})` is of degree {degree}"


def _axes(x: Expr) -> str:
    return " and ".join(axis.title() for axis in (KEY, VALUE) if axis in x.axes) or "no axis"


def _added(x: Any, symbol: str) -> str:
    """The text of x as the second operand of + or -."""
    if isinstance(x, Expr):
        return show(x, 1 if symbol == "+" else 2)
    loose = isinstance(x, InLoss) and (symbol == "+" or " " not in x.text.partition("(")[0])
    return x.text if loose else _inside(x)


def _inside(x: Any) -> str:
    """The text of x as an operand, in parentheses where needed."""
    if isinstance(x, Expr):
        return show(x, 3)
    return f"({x})" if isinstance(x, InLoss) else (f"{x:g}" if isinstance(x, int | float) else str(x))
