"""Calls that differ in sizes alone: one schedule with symbolic sizes for many of them.

At the second such call the numbers that changed (a length, strides that depend on it, a number of sequences) become
symbols, and host code runs once more. Its schedule holds for all sizes that meet the recorded conditions; for these the
function of a call only takes some arithmetic.
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
MOST = 32  # templates that are made at most
_log = logging.getLogger(__name__)


def _each(x: Any, change: Callable[[Any], Any]) -> Any:
    """A step's parts with `change` applied to symbolic numbers and Refs."""

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
    """A Ref with a symbolic offset, with the alignment of its first byte; others as they are."""
    offset: Any = x.offset if isinstance(x, Ref) else 0
    if not isinstance(offset, Size):
        return x
    size = x.dtype.itemsize
    return x._replace(align=size if (x.align + offset * size) % ALIGNED else 0)


def _value(x: Any) -> Any:
    return int(x) if isinstance(x, Size) else x


class Template:
    """A schedule for all sizes that meet its conditions."""

    def __init__(
        self, numbers: Sequence[int], groups: Sequence[Sequence[int]], host: Callable[[Iterator[Any]], Schedule],
        runner: Runner,
    ) -> None:  # fmt: skip
        """numbers: of the call from which it is made; groups: indices of numbers that share one symbol each."""
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
        """The function of a call of these sizes; None where the template does not hold."""
        if any(numbers[i] != x for i, x in self._fixed) or any(numbers[a] != numbers[b] for a, b in self._same):
            return None
        return self._make(*[numbers[i] for i in self._open])

    def schedule(self, numbers: Sequence[int]) -> Schedule:
        """The schedule of a call of these sizes; conditions are not checked."""
        values = self._sheet.values([numbers[i] for i in self._open])
        return _over(self.written, lambda x: values[str(x)] if isinstance(x, Size) else x)


class Templates:
    """The templates of one operator for one combination of options, dtypes, alignments and numbers of axes."""

    def __init__(self) -> None:
        self.left = MOST  # templates that may still be made
        self.last: tuple[int, ...] = ()
        self.open: set[int] = set()  # indices of numbers that have changed
        self.templates: list[Template] = []

    def function(self, numbers: tuple[int, ...]) -> Function | None:
        """The function of a call of these sizes; None where no template holds."""
        for template in self.templates:
            found = template.function(numbers)
            if found is not None:
                return found
        return None

    def learn(
        self, numbers: tuple[int, ...], made: Schedule, host: Callable[[Iterator[Any]], Schedule], runner: Runner
    ) -> None:
        """Make a template from a call's numbers and schedule. host: makes a schedule from other numbers."""
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
        except Exception as error:  # unknown for symbols: schedules of single sizes remain
            _log.debug("no schedule for other sizes: %s", error, exc_info=True)
        self.left = 0


def numbers_of(args: Iterable[Any]) -> Iterator[int]:
    """All sizes, strides and integers among an operator's arguments, in order."""
    for x in args:
        if isinstance(x, Tensor):
            yield from x.shape
            yield from x.stride()
        elif type(x) is int:
            yield x
        elif type(x) in (list, tuple) and x and isinstance(x[0], Tensor):
            yield from numbers_of(x)


def with_numbers(args: Iterable[Any], numbers: Iterator[Any]) -> list[Any]:
    """The operator's arguments with these numbers in place of their own."""
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
