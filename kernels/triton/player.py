"""Turns schedules into Python functions of a call's tensors, which later calls of the same sizes run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from dsf.kernels.triton.schedule import Launch, Memory, Ref, Schedule, Step
from dsf.kernels.triton.symbolic import Sheet, Size

# Launch -> (grid -> function that launches it; its constants if it takes addresses, None if it takes tensors).
Runner = Callable[[Launch], "tuple[Callable[[tuple[int, ...]], Callable[..., Any]], tuple[Any, ...] | None]"]


def function(schedule: Schedule, runner: Runner) -> Callable[..., Any]:
    """The schedule as a function of the call's tensors."""
    return maker(schedule, runner)()


def maker(schedule: Schedule, runner: Runner, sheet: Sheet | None = None) -> Callable[..., Any]:
    """A function (numbers of the sheet) -> `function` for these, or None where they do not meet its conditions."""
    return _Text(schedule, runner).maker(sheet)


class _Text:
    """Writes a schedule as a Python function. Numbers are names, so that other sizes give the same text."""

    def __init__(self, schedule: Schedule, runner: Runner) -> None:
        self.schedule, self.runner = schedule, runner
        self.constants: dict[str, Any] = {"empty": torch.empty_strided, "device": schedule.device}
        self.found: dict[str, str] = {}  # text of an expression of symbols -> its name

    def maker(self, sheet: Sheet | None) -> Callable[..., Any]:
        """The compiled maker of the function."""
        body = []
        for step, last in self.schedule.used:
            body.append(self._line(step))
            body += [f"del {', '.join(f't{x}' for x in last)}"] if last else []
        body.append(f"return {self._text(self.schedule.result)}")
        names = ", ".join(f"t{x}" for x in range(len(self.schedule.given)))
        lines = [] if sheet is None else sheet.text()
        lines += [f"{name} = {text}" for text, name in self.found.items()]
        lines += [f"def play({names}):", *(f"    {x}" for x in body), "return play"]
        given = "" if sheet is None else ", ".join(map(str, sheet.given))
        exec(_compiled("\n    ".join([f"def make({given}):", *lines])), self.constants)
        return self.constants["make"]

    def _line(self, step: Step) -> str:
        if isinstance(step, Launch):
            run, constants = self.runner(step)
            if any(isinstance(x, Size) for x in step.grid):
                start = self._worked_out(f"{self._name(run)}({self._text(step.grid)})")
            else:
                start = self._name(run(step.grid))
            args = (*step.args, *(constants or ()))
            return f"{start}({', '.join(self._text(x, constants is not None) for x in args)})"
        if isinstance(step, Memory):
            x = step.made
            sizes = f"{self._numbers(x.shape)}, {self._numbers(x.stride)}"
            return f"t{x.number} = empty({sizes}, dtype={self._name(x.dtype)}, device=device)"
        given = [self._text(x) for x in step.args]
        given += [f"{name}={self._text(x)}" for name, x in step.named.items()]
        call = f"{self._name(step.function)}({', '.join(given)})"
        return call if step.made is None else f"t{step.made.number} = {call}"

    def _text(self, x: Any, pointers: bool = False) -> str:
        """The text of an argument or a result; pointers: of its address."""
        if isinstance(x, Ref):
            if pointers:
                at = f"t{x.number}.data_ptr()"
                return f"{at} + {self._name(x.offset * x.dtype.itemsize)}" if x.offset else at
            if x.whole:
                return f"t{x.number}"
            start = self._name(x.offset)
            if x.number < len(self.schedule.given):
                start = f"t{x.number}.storage_offset() + {start}"
            return f"t{x.number}.as_strided({self._numbers(x.shape)}, {self._numbers(x.stride)}, {start})"
        if isinstance(x, (tuple, list)):
            inside = "".join(f"{self._text(y, pointers)}, " for y in x)
            if hasattr(x, "_fields") and not pointers:  # the private launcher takes plain tuples
                return f"{self._name(type(x))}({inside})"
            return f"({inside})" if isinstance(x, tuple) else f"[{inside}]"
        if isinstance(x, slice):
            return f"slice({self._text(x.start)}, {self._text(x.stop)}, {self._text(x.step)})"
        return repr(x) if x is None or x is True or x is False else self._name(x)

    def _numbers(self, x: tuple[Any, ...]) -> str:
        """A name for a shape or for strides."""
        return self._worked_out(self._text(x)) if any(isinstance(y, Size) for y in x) else self._name(tuple(x))

    def _name(self, x: Any) -> str:
        """A name for a constant; the text of a symbol."""
        if isinstance(x, Size):
            return str(x)
        name = f"c{len(self.constants)}"
        self.constants[name] = x
        return name

    def _worked_out(self, text: str) -> str:
        """A name for an expression that is computed once the symbols have values."""
        return self.found.setdefault(text, f"f{len(self.found)}")


@functools.lru_cache(maxsize=512)
def _compiled(text: str) -> CodeType:
    return compile(text, "<schedule>", "exec")
