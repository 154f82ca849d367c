"""The annotations of a recurrence's parameters: the axes that an input varies over."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias

from dsf.language.errors import TraceError
from dsf.language.expr import KEY, VALUE, Axes, Expr

# Names of Recurrence.__call__'s own options.
RESERVED = frozenset(
    {"initial_state", "cu_seqlens", "return_state", "form", "backend", "parallel", "reverse", "in_place"}
)


@dataclass(frozen=True)
class Kind:
    """What an annotation says of an input. axes: {Key, Value} or some of them.

    time: False for a Param, which has no token axis. steps: the number of micro-steps of Steps[...], else None.
    pair: True where the Key axis has one entry for each pair of places, N / 2 in all.
    """

    axes: Axes
    time: bool = True
    steps: int | None = None
    pair: bool = False

    def __str__(self) -> str:
        titles = {KEY: "Pair" if self.pair else "Key", VALUE: "Value"}
        names = ", ".join(titles[a] for a in (KEY, VALUE) if a in self.axes) or "Scalar"
        if self.steps is not None:
            return f"Steps[{names}, {self.steps}]"
        return names if self.time else f"Param[{names}]"

    def layout(self, one_token: bool = False) -> tuple[str, ...]:
        """The names of the tensor's axes, such as ("B", "T", "H", "N"). one_token: without T, as in Recurrence.step."""
        lead = ("B", "T") if self.time else ()
        steps = ("n",) if self.steps is not None else ()
        last = tuple({KEY: "N/2" if self.pair else "N", VALUE: "P"}[a] for a in (KEY, VALUE) if a in self.axes)
        return tuple(x for x in (*lead, *steps, "H", *last) if not (one_token and x == "T"))


if TYPE_CHECKING:
    from typing import Annotated as Steps  # a tuple of Expr; no type can be written Steps[Key, 2]

    from typing_extensions import TypeVarTuple, Unpack

    Axis = TypeVarTuple("Axis")
    Key: TypeAlias = Expr
    Pair: TypeAlias = Expr
    Value: TypeAlias = Expr
    Scalar: TypeAlias = Expr

    class Param(Expr, Generic[Unpack[Axis]]):
        """An expression of an input without the token axis."""
else:

    class _Marker:
        kind: Kind

    class Key(_Marker):
        """An input with N numbers (the Key axis) for every token and head: [B, T, H, N]."""

        kind = Kind(frozenset({KEY}))

    class Pair(_Marker):
        """An input with a number for each pair (2i, 2i + 1) of key entries, for every token and head: [B, T, H, N/2].

        In expressions it is a Key whose entries 2i and 2i + 1 are equal, as angles for dsf.turn have to be.
        """

        kind = Kind(frozenset({KEY}), pair=True)

    class Value(_Marker):
        """An input with P numbers, the channels (the Value axis), for every token and head: [B, T, H, P]."""

        kind = Kind(frozenset({VALUE}))

    class Scalar(_Marker):
        """An input with one number for every token and head: [B, T, H]."""

        kind = Kind(frozenset())

    class Param:
        """An input without tokens: Param[Scalar] is [H], Param[Key] [H, N], Param[Key, Value] [H, N, P].

        Raises TraceError for anything but Key, Pair, Value and Scalar, and for Pair beside another.
        """

        def __class_getitem__(cls, items: Any) -> Kind:
            items = items if isinstance(items, tuple) else (items,)
            return Kind(_axes_of(items, "Param"), time=False, pair=_is_pair(items))

    class Steps:
        """An input with n values a token, one for each micro-step: Steps[Key, n] is [B, T, n, H, N].

        In the function the parameter is a tuple of n expressions. Raises TraceError as Param does, and for an n that is
        no integer of at least 1.
        """

        def __class_getitem__(cls, items: Any) -> Kind:
            *marks, count = items if isinstance(items, tuple) else (items,)
            if not marks or type(count) is not int or count < 1:
                raise TraceError(
                    f"Steps takes axes and a positive number of micro-steps, as in Steps[Key, 2]; got {items}"
                )
            return Kind(_axes_of(tuple(marks), "Steps"), steps=count, pair=_is_pair(tuple(marks)))


@dataclass(frozen=True)
class Input:
    """A named input and its kind."""

    name: str
    kind: Kind


def shape_of(entry: Input, lead: tuple[int, ...], heads: int, n: int, p: int) -> tuple[int, ...]:
    """Shape of an input: [*lead, (steps,) H, ·], or [H, ·] of a Param."""
    sides = [size for axis, size in ((KEY, n // 2 if entry.kind.pair else n), (VALUE, p)) if axis in entry.kind.axes]
    if not entry.kind.time:
        return (heads, *sides)
    return (*lead, *((entry.kind.steps,) if entry.kind.steps else ()), heads, *sides)


def _axes_of(items: tuple[Any, ...], where: str) -> Axes:
    for item in items:
        if not (isinstance(item, type) and hasattr(item, "kind")):
            raise TraceError(f"{where}[...] takes Key, Pair, Value or Scalar; got {item!r}")
    if _is_pair(items) and len(items) > 1:
        raise TraceError(f"{where}[...] takes Pair alone, not beside another axis")
    return frozenset().union(*(item.kind.axes for item in items))


def _is_pair(items: tuple[Any, ...]) -> bool:
    return any(item.kind.pair for item in items)


def kinds_of(function: Callable[..., Any]) -> dict[str, Kind]:
    """The kind of every parameter, in order. Raises TraceError for a missing or another annotation, *args or **kwargs,
    a default, and the names of a call's options (RESERVED)."""
    if not inspect.isfunction(function):
        raise TraceError(f"a recurrence is declared by a function that returns a System, got {function!r}")
    names = {"Key": Key, "Pair": Pair, "Value": Value, "Scalar": Scalar, "Param": Param, "Steps": Steps}
    closure = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
    scope = {**names, **function.__globals__, **closure}
    kinds: dict[str, Kind] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TraceError(f"{function.__name__}: *{name} is not possible, a recurrence names its inputs")
        if name in RESERVED:
            raise TraceError(f"{function.__name__}: no input can be called `{name}`, calls have an option of that name")
        if parameter.default is not parameter.empty:
            raise TraceError(
                f"{function.__name__}: input `{name}` has a default; inputs are tensors, given at every call"
            )
        mark = parameter.annotation
        if isinstance(mark, str):
            mark = _resolve(function, name, mark, scope)
        kind = mark if isinstance(mark, Kind) else getattr(mark, "kind", None)
        if not isinstance(kind, Kind):
            raise TraceError(
                f"{function.__name__}: input `{name}` needs an annotation saying its axes "
                f"(Key, Pair, Value, Scalar, Param[...] or Steps[...]), got {_describe(parameter.annotation)}"
            )
        kinds[name] = kind
    return kinds


def _resolve(function: Callable[..., Any], name: str, text: str, scope: dict[str, Any]) -> Any:
    try:
        return eval(text, scope)  # annotations are source text under `from __future__ import annotations`
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(f"{function.__name__}: the annotation `{text}` of input `{name}` fails: {error}") from error


def _describe(annotation: Any) -> str:
    return "none" if annotation is inspect.Parameter.empty else repr(annotation)
