"""`System`, which a recurrence's function returns: S_t = A_t S_{t-1} + B_t, y_t = C_tᵀ S_t + D_t."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from dsf.language.errors import TraceError
from dsf.language.expr import KEY, VALUE, Expr, OperatorBase, as_expr, const, substitute
from dsf.language.operator import Operator, as_operator
from dsf.language.places import note

if TYPE_CHECKING:
    from dsf.language.solve import Solve

Rule = Callable[..., Expr]


@dataclass(frozen=True, eq=False)
class System(OperatorBase):
    """One step of a recurrence, S_t = A S_{t-1} + B and y_t = Cᵀ S_t + D (docs/equations.md lists every mixer's).

    A: the transition, an Operator. A bare expression scales the state entry by entry, a number the whole state.
    B: the injection, with axes {Key, Value} (a product `k * v` is the outer product), or {Value} without a Key axis.
    C: the readout. A Key expression sums over the Key axis; without a Key axis C multiplies entry by entry.
    D: the skip, which is added to y: an expression with a Value axis or without axes.
    read: "after" reads S_t, "before" reads S_{t-1} (RWKV).
    normalize: None, or a function rule(num, den) or rule(num, den, one), whose value is y. num is the output, den the
      output of the same system driven by ones, one is 1. The rule does not change where all three are multiplied by
      the same number, so that the state may be rescaled.
    drive: the input that ones replace in den (all micro-steps of Steps). Needed where B does not have exactly one
      factor that is a bare Value input.
    window: None, or W: y reads only the writes of the last W tokens, as later decays changed them. The state is then
      the keys and values of these tokens (docs/forms.md).
    gauge: a Scalar η; the state of the framework paper's form is S/η. It serves analysis: y does not depend on it.
    solve, unseen, earlier: set by `dsf.learn(by="exact")`, by dsf.language.late and by `compose`, not by declarations.

    Raises TraceError for an A that is no linear operator, a D with a Key axis, a gauge with axes, a drive without
    normalize, and another read, normalize or window. The recurrence checks how the parts fit together.
    """

    A: Any
    B: Any
    C: Any = None
    D: Any = 0
    read: Literal["after", "before"] = "after"
    normalize: Rule | None = None
    gauge: Any = None
    drive: Any = None
    window: int | None = None
    solve: Solve | None = None
    unseen: tuple[Expr, ...] = ()
    earlier: tuple[System, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        try:
            put(self, "A", as_operator(self.A))
        except TraceError as error:
            raise TraceError(f"A is not a linear operator: {error}") from None
        put(self, "B", _expression("B", self.B))
        put(self, "C", None if self.C is None else _expression("C", self.C))
        put(self, "D", _expression("D", self.D))
        if self.read not in ("after", "before"):
            raise TraceError(f'read is "after" or "before", got {self.read!r}')
        if self.normalize is not None and not callable(self.normalize):
            raise TraceError(f"normalize is a rule such as dsf.ratio, called with (num, den), got {self.normalize!r}")
        if self.drive is not None and self.normalize is None:
            raise TraceError(f"drive = {self.drive} says what normalize replaces by ones, but there is no normalize")
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise TraceError(
                f"window = {self.window!r}: a window is a number of tokens, the last ones, so an integer of at least 1"
            )
        if KEY in self.D.axes:
            raise TraceError(
                f"D = {self.D} has a Key axis; the skip is added to y, which has none: contract it with dot"
            )
        if self.gauge is not None:
            put(self, "gauge", _expression("gauge", self.gauge))
            if self.gauge.axes:
                over = " and ".join(axis.title() for axis in (KEY, VALUE) if axis in self.gauge.axes)
                raise TraceError(f"gauge = {self.gauge} must be a Scalar expression, it varies over {over}")

        note(self)

    def misplaced(self) -> str:
        """The error message where a System stands in an expression's place."""
        return (
            "a System is the whole of a recurrence, which its function returns, and no part of an expression; several "
            "writes are a sum in B, several reads a sum in C, several steps of a token compose(first, second), and two "
            "states are two recurrences, whose outputs add"
        )

    def _no_arithmetic(self, other: Any) -> Any:
        raise TraceError(self.misplaced())

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _no_arithmetic
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _no_arithmetic

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self.normalize is not None:  # most rules are lambdas, which cannot be pickled
            state["normalize"] = WrittenRule(rule_of(self.normalize))
        return state

    @property
    def micro_steps(self) -> tuple[System, ...]:
        """The systems of one token, the first to act first."""
        return (*self.earlier, self)


def _expression(name: str, x: Any) -> Expr:
    if isinstance(x, Operator):
        raise TraceError(f"{name} = {x} is an operator; only A is one, the first that System takes: A, B, C")
    try:
        return as_expr(x)
    except TraceError as error:
        raise TraceError(f"{name}: {error}") from None


def compose(*systems: System) -> System:
    """A System of several micro-steps a token, which change the state from left to right.

    Every system's A and B are applied to the state in turn. C, D, read, normalize, drive, gauge and window are the last
    system's; the others are System(A=…, B=…). With Householder steps this is DeltaProduct (arXiv 2502.10297).

    Raises TraceError without systems, for what is no System, where another system than the last has such a part, and
    for several systems of which the last is of `dsf.learn(by="exact")`.
    """
    if not systems:
        raise TraceError("compose() needs at least one System")
    for system in systems:
        if not isinstance(system, System):
            raise TraceError(f"compose takes Systems, got {type(system).__name__}")
    *others, last = systems
    for system in others:
        unread = (system.C, system.normalize, system.gauge, system.window, system.solve)
        if any(x is not None for x in unread) or system.D is not const(0):
            raise TraceError(
                "only the last micro-step is read: leave C, D, normalize, gauge and window out of the others"
            )
        if system.read != "after":
            raise TraceError('only the last micro-step is read: read="before" belongs to it, and means before them all')
    if others and last.solve is not None:
        raise TraceError("by='exact' is a solve over all tokens' losses, not one of several steps of a token")
    flat = tuple(s for system in systems for s in system.micro_steps)
    return replace(last, earlier=flat[:-1])


def ratio(num: Expr, den: Expr) -> Expr:
    """The normalize of linear and softmax attention: num / den."""
    return num / den


# The arguments of normalize; they are no inputs, so inputs may have these names.
NUM = Expr("output", (), ("num", None), frozenset({VALUE}))
DEN = Expr("output", (), ("den", None), frozenset({VALUE}))
ONE = Expr("output", (), ("one", None), frozenset({VALUE}))


def rule_of(rule: Rule) -> Expr:
    """A System's normalize as an expression of num, den and one. Arguments with defaults keep these.

    Raises TraceError unless it has two or three arguments without defaults, which can be given by position.
    """
    asked = [x for x in inspect.signature(rule).parameters.values() if x.default is x.empty]
    if len(asked) not in (2, 3) or any(x.kind not in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD) for x in asked):
        names = ", ".join(map(str, asked))
        raise TraceError(f"normalize takes rule(num, den) or rule(num, den, one), not rule({names})")
    return as_expr(rule(*(NUM, DEN, ONE)[: len(asked)]))


@dataclass(frozen=True)
class WrittenRule:
    """A rule as its expression, in copies and pickles of a System."""

    expr: Expr

    def __call__(self, num: Expr, den: Expr, one: Expr) -> Expr:
        """The expression with these arguments."""
        return substitute(self.expr, {NUM: num, DEN: den, ONE: one})
