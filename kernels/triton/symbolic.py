"""Symbolic integers: arithmetic with them is recorded, and every comparison becomes a condition.

Host code that runs on such numbers takes the decisions that it takes for their present values. Its results therefore
hold for all other values that meet the recorded conditions.
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
IDLE = {("+", 0), ("-", 0), ("*", 1), ("//", 1)}  # operations that change nothing, with their right side


class Sheet:
    """Lines of Python that compute numbers from the inputs `given`, and the conditions on these."""

    def __init__(self, values: Sequence[int]) -> None:
        self.given = [Size(self, f"s{i}", x) for i, x in enumerate(values)]
        self.lines: list[tuple[bool, str]] = []  # (whether it is a condition, text)
        self._made: dict[str, Size] = {}
        self._asked: set[str] = set()

    def make(self, sign: str, left: Any, right: Any) -> Any:
        """The Size `left sign right`."""
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
        """The truth of `left sign right`, which becomes a condition."""
        if not isinstance(right, (int, float, Size)):
            return NotImplemented
        answer = ASKED[sign](left.value, right.value if isinstance(right, Size) else right)
        text = f"{left} {sign} {right}" if answer else f"not {left} {sign} {right}"
        if text not in self._asked:
            self._asked.add(text)
            self.lines.append((True, text))
        return answer

    def text(self) -> list[str]:
        """The lines; they return None where a condition is not met."""
        return [f"if not ({text}): return None" if asked else text for asked, text in self.lines]

    def values(self, given: Sequence[int]) -> dict[str, int]:
        """All numbers by name, for other values of the inputs; conditions are not checked."""
        found = {str(name): x for name, x in zip(self.given, given, strict=True)}
        for asked, text in self.lines:
            if not asked:
                exec(text, {}, found)
        return found


def _value(x: Any) -> int:
    return x.value if isinstance(x, Size) else int(x)


class Size:
    """A symbolic number of a Sheet. Where Python needs a real integer, its present value becomes a condition.

    It has no hash, so that no cache keeps symbols for later calls.
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
