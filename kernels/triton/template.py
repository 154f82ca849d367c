"""Calls that differ in sizes alone: host code run once on symbolic sizes, and functions made of what it wrote down.

From the second such call on, the numbers that changed (a length, strides that follow it, a count of sequences) are
symbols. What host code writes down then holds for all sizes that meet its conditions, and for these a call's
function takes some arithmetic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from dsf.kernels.triton.player import Runner, maker
from dsf.kernels.triton.schedule import ALIGNED, Launch, Ref, Schedule, mapped
from dsf.kernels.triton.symbolic import Sheet, Size
from dsf.kernels.triton.unwritten import Unwritten

Function = Callable[..., Any]
MOST = 32  # templates that are kept
_log = logging.getLogger(__name__)


def _each(x: Any, change: Callable[[Any], Any]) -> Any:
    """What a step is made of, with its symbolic numbers and Refs changed."""

    def changed(y: Any) -> Any:
        if isinstance(y, Ref):
            return change(Ref(*(mapped(change, z) for z in y)))
        if isinstance(y, slice):
            return slice(change(y.start), change(y.stop), change(y.step))
        return {name: _each(z, change) for name, z in y.items()} if isinstance(y, dict) else change(y)

    return mapped(changed, x)


def _over(schedule: Schedule, change: Callable[[Any], Any]) -> Schedule:
    steps = [replace(x, **{name: _each(y, change) for name, y in vars(x).items()}) for x in schedule.steps]
    return Schedule(_each(schedule.given, change), tuple(steps), _each(schedule.result, change), schedule.device)


def _aligned(x: Any) -> Any:
    """A view of a tensor with the alignment of its first byte."""
    offset: Any = x.offset if isinstance(x, Ref) else 0
    if not isinstance(offset, Size):
        return x
    size = x.dtype.itemsize
    return x._replace(align=size if (x.align + offset * size) % ALIGNED else 0)


def _value(x: Any) -> Any:
    return int(x) if isinstance(x, Size) else x


class Template:
    """A schedule for all sizes that meet some conditions."""

    def __init__(
        self, numbers: Sequence[int], groups: Sequence[Sequence[int]], host: Callable[[Iterator[Any]], Schedule],
        runner: Runner,
    ) -> None:  # fmt: skip
        """numbers: of a call that it is made of; groups: those of them that one symbol each stands for."""
        self._sheet = Sheet([numbers[x[0]] for x in groups])
        given: list[Any] = list(numbers)
        for group, symbol in zip(groups, self._sheet.given, strict=True):
            for i in group:
                given[i] = symbol
        self._open = [x[0] for x in groups]
        self._same = [(group[0], other) for group in groups for other in group[1:]]
        self._fixed = [(i, x) for i, x in enumerate(given) if not isinstance(x, Size)]
        made = _over(host(iter(given)), _aligned)
        steps = [replace(x, named=_each(x.named, _value)) if isinstance(x, Launch) else x for x in made.steps]
        self.written = replace(made, steps=tuple(steps))
        self._make = maker(self.written, runner, self._sheet)

    def function(self, numbers: Sequence[int]) -> Function | None:
        """Of a call of these sizes; None where it does not hold."""
        if any(numbers[i] != x for i, x in self._fixed) or any(numbers[a] != numbers[b] for a, b in self._same):
            return None
        found: Function | None = self._make(*[numbers[i] for i in self._open])
        return found

    def schedule(self, numbers: Sequence[int]) -> Schedule:
        """The same as data, whether it holds there or not."""
        values = self._sheet.values([numbers[i] for i in self._open])
        return _over(self.written, lambda x: values[str(x)] if isinstance(x, Size) else x)


class Templates:
    """Calls of one operator with the same options, dtypes, alignments and axes, whatever their sizes."""

    def __init__(self) -> None:
        self.left = MOST  # templates that may yet be tried
        self.last: tuple[int, ...] = ()
        self.open: set[int] = set()  # which numbers have changed
        self.templates: list[Template] = []

    def function(self, numbers: tuple[int, ...]) -> Function | None:
        """Of a call of these sizes, where a template holds for them."""
        for template in self.templates:
            found = template.function(numbers)
            if found is not None:
                return found
        return None

    def learn(
        self, numbers: tuple[int, ...], made: Schedule, host: Callable[[Iterator[Any]], Schedule], runner: Runner
    ) -> None:
        """Remember what was made for these sizes. host: makes the same of numbers in their places."""
        last, self.last = self.last or numbers, numbers
        self.open = self.open | {i for i, pair in enumerate(zip(last, numbers, strict=True)) if pair[0] != pair[1]}
        groups: dict[tuple[int, int], list[int]] = {}
        for i in sorted(self.open):
            groups.setdefault((last[i], numbers[i]), []).append(i)
        if not self.left or not groups:
            return
        self.left -= 1
        try:
            template = Template(numbers, list(groups.values()), host, runner)
            if template.schedule(numbers) == made:
                self.templates.append(template)
                return
            _log.debug("symbols make another schedule than numbers do")
        except Exception as error:  # what of symbolic sizes cannot be said; a schedule of one size is as good
            _log.debug("no schedule for other sizes: %s", error, exc_info=True)
        self.left = 0


def numbers_of(args: Iterable[Any]) -> Iterator[int]:
    """An operator's sizes, strides and whole numbers, in order."""
    for x in args:
        if isinstance(x, Tensor):
            yield from x.shape
            yield from x.stride()
        elif type(x) is int:
            yield x
        elif type(x) in (list, tuple) and x and isinstance(x[0], Tensor):
            yield from numbers_of(x)


def with_numbers(args: Iterable[Any], numbers: Iterator[Any]) -> list[Any]:
    """The operator's arguments with these numbers in the place of their own."""
    found: list[Any] = []
    for x in args:
        if isinstance(x, Tensor):
            shape, strides = ([next(numbers) for _ in range(x.dim())] for _ in range(2))
            x = Unwritten(shape, strides, x.dtype)
        elif type(x) is int:
            x = next(numbers)
        elif type(x) in (list, tuple) and x and isinstance(x[0], Tensor):
            x = with_numbers(x, numbers)
        found.append(x)
    return found
