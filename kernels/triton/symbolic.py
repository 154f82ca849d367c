"""Whole numbers that stand for others: what is made of them and asked of them is written down.

Host code that runs on such numbers decides as it would with their values, and every decision becomes a condition. So
what it does is what it would do with all other values that meet the conditions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

MADE: dict[str, Callable[[Any, Any], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
}  # fmt: skip
ASKED: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
IDLE = {("+", 0), ("-", 0), ("*", 1), ("//", 1)}  # on the right side


class Sheet:
    """Lines of Python by which numbers follow from some, whose names are `given`; and the conditions on the way."""

    def __init__(self, values: Sequence[int]) -> None:
        self.given = [Size(self, f"s{i}", x) for i, x in enumerate(values)]
        self.lines: list[tuple[bool, str]] = []  # is it a condition, and its text
        self._made: dict[str, Size] = {}
        self._asked: set[str] = set()

    def make(self, sign: str, left: Any, right: Any) -> Any:
        """left sign right."""
        if not isinstance(left, (int, Size)) or not isinstance(right, (int, Size)):
            return NotImplemented
        if not isinstance(right, Size) and (sign, right) in IDLE:
            return left
        text = f"{left} {sign} {right}"
        found = self._made.get(text)
        if found is None:
            found = self._made[text] = Size(self, f"n{len(self._made)}", MADE[sign](_value(left), _value(right)))
            self.lines.append((False, f"{found} = {text}"))
        return found

    def ask(self, sign: str, left: Size, right: Any) -> Any:
        """Whether left sign right, which is as it is from now on."""
        if not isinstance(right, (int, float, Size)):
            return NotImplemented
        answer = ASKED[sign](left.value, right.value if isinstance(right, Size) else right)
        text = f"{left} {sign} {right}" if answer else f"not {left} {sign} {right}"
        if text not in self._asked:
            self._asked.add(text)
            self.lines.append((True, text))
        return answer

    def text(self) -> list[str]:
        """The lines, which return None where a condition is not met."""
        return [f"if not ({text}): return None" if asked else text for asked, text in self.lines]

    def values(self, given: Sequence[int]) -> dict[str, int]:
        """All its numbers by name, for others in the place of those given; conditions are not looked at."""
        found = {str(name): x for name, x in zip(self.given, given, strict=True)}
        for asked, text in self.lines:
            if not asked:
                exec(text, {}, found)
        return found


def _value(x: Any) -> int:
    return x.value if isinstance(x, Size) else int(x)


class Size:
    """A number of a Sheet. Where Python wants a number that it can count with, its value becomes a condition.

    It has no hash: what remembers results by arguments would keep symbols for calls that know nothing of them.
    """

    __slots__ = ("_name", "sheet", "value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, sheet: Sheet, name: str, value: int) -> None:
        self.sheet, self._name, self.value = sheet, name, value

    def __repr__(self) -> str:
        return self._name

    def __index__(self) -> int:
        self.sheet.ask("==", self, self.value)
        return self.value

    def __bool__(self) -> bool:
        return bool(self.sheet.ask("!=", self, 0))

    def __neg__(self) -> Any:
        return self.sheet.make("-", 0, self)

    def __int__(self) -> int:
        return self.__index__()

    def __float__(self) -> float:
        return float(self.__index__())

    def __truediv__(self, other: Any) -> Any:
        return float(self) / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / float(self)


def _define(name: str, sign: str, kind: str, swapped: bool = False) -> None:
    def method(self: Size, other: Any) -> Any:
        left, right = (other, self) if swapped else (self, other)
        return getattr(self.sheet, kind)(sign, left, right)

    setattr(Size, name, method)


for _sign, _function in (*MADE.items(), *ASKED.items()):
    _name = _function.__name__
    _define(f"__{_name}__", _sign, "make" if _sign in MADE else "ask")
    if _sign in MADE:
        _define(f"__r{_name}__", _sign, "make", True)
