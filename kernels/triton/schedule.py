"""Schedules: what an operator's call allocates, asks of torch and launches, as data.

All of that depends on shapes, strides, dtypes, alignments and options, never on what tensors hold. So the host code of
an operator runs once for each combination of these, on `Slot`s: tensors without memory, known by their position among
the arguments. What it does is a `Schedule`, which prints, tells sizes (the operator's fake kernel), lists the kernels
to compile, and is the text of a Python function that calls run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

ROOM = ("empty_like", "new_empty_strided")  # functions that make memory which nobody has written
ALIGNED = 16  # bytes: what Triton tells pointers apart by


def mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """x with what function makes of each thing in its tuples, NamedTuples and lists, which stay what they are."""
    if isinstance(x, (tuple, list)) and not isinstance(x, Ref):
        found = [mapped(function, y) for y in x]
        return type(x)(*found) if hasattr(x, "_fields") else type(x)(found)
    return function(x)


class Ref(NamedTuple):
    """A tensor: the number of the memory that it lies in, and where it begins there, in elements.

    whole: it is the tensor given or made itself, no view of it. align: of its first byte.
    """

    number: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    whole: bool
    align: int

    def __str__(self) -> str:
        return f"t{self.number}" if self.whole else f"t{self.number}[{self.offset}:].view{list(self.shape)}"

    @property
    def bytes(self) -> int:
        """Of the memory that it spans."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return 0 if 0 in self.shape else (last + 1) * self.dtype.itemsize

    @property
    def sizes(self) -> str:
        """Its name, dtype and shape."""
        return f"{self} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Memory:
    """Memory for a tensor, which nobody has written."""

    made: Ref

    def __str__(self) -> str:
        return f"{self.made.sizes} = memory"


@dataclass(frozen=True)
class Operation:
    """One of torch's functions; made: None where it writes in place."""

    made: Ref | None
    function: Callable[..., Any]
    args: tuple[Any, ...]
    named: Mapping[str, Any]

    def __str__(self) -> str:
        given = [_show(x) for x in self.args] + [f"{name}={_show(x)}" for name, x in self.named.items()]
        made = "" if self.made is None else f"{self.made.sizes} = "
        return f"{made}{self.function.__name__}({', '.join(given)})"


@dataclass(frozen=True)
class Launch:
    """A kernel, on a grid; named: what it is compiled for."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    named: Mapping[str, Any]

    def __str__(self) -> str:
        given, named = ", ".join(map(_show, self.args)), [f"{name}={_show(x)}" for name, x in self.named.items()]
        return f"{self.kernel.__name__}[{', '.join(map(str, self.grid))}]({given}; {', '.join(named)})"


Step = Memory | Operation | Launch
Runner = Callable[[Launch], "tuple[Callable[..., Any], tuple[Any, ...] | None]"]


def _show(x: Any) -> str:
    if isinstance(x, Ref):
        return str(x)
    if isinstance(x, (tuple, list)):
        return f"({', '.join(map(_show, x))})"
    return getattr(x, "__name__", None) or str(x)


@dataclass(frozen=True)
class Schedule:
    """given: the tensors that a call is given, by position; result: what it returns, Refs in tuples and lists."""

    given: tuple[Ref | None, ...]
    steps: tuple[Step, ...]
    result: Any
    device: torch.device

    @functools.cached_property
    def used(self) -> tuple[tuple[Step, tuple[int, ...]], ...]:
        """The steps that something comes of, and the memory that each is the last to use."""
        wanted = {x.number for x in _found(self.result)}
        alive, given = set(wanted), len(self.given)
        found: list[tuple[Step, tuple[int, ...]]] = []
        for step in reversed(self.steps):
            made = None if isinstance(step, Launch) else step.made
            if made is not None and made.number not in wanted:
                continue
            uses: set[int] = set()
            if not isinstance(step, Memory):
                uses = {x.number for x in _found((step.args, *step.named.values()))}
            found.append((step, tuple(sorted(x for x in uses - alive if x >= given))))
            wanted |= uses
            alive |= uses
        return tuple(reversed(found))

    @property
    def peak(self) -> int:
        """The most bytes that it holds at once of what it makes."""
        held: dict[int, int] = {}
        most = 0
        for step, last in self.used:
            made = None if isinstance(step, Launch) else step.made
            if made is not None:
                held[made.number] = made.bytes
            most = max(most, sum(held.values()))
            for number in last:
                held.pop(number)
        return most

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The kernels launched, in order."""
        return tuple(x for x in self.steps if isinstance(x, Launch))

    def __str__(self) -> str:
        given = ", ".join("-" if x is None else x.sizes for x in self.given)
        return "\n".join([f"given {given}", *map(str, self.steps), f"return {_show(self.result)}"])

    def empty(self, like: Tensor) -> Any:
        """Memory of its result's sizes, on the device of `like`: what a fake kernel returns."""

        def room(x: Any) -> Any:
            return like.new_empty_strided(x.shape, x.stride, dtype=x.dtype) if isinstance(x, Ref) else x

        return mapped(room, self.result)

    def function(self, runner: Runner) -> Callable[..., Any]:
        """The call as a function of its tensors. runner: what launches a Launch, and the constants that this takes
        behind addresses; None where it takes tensors."""
        return _Text(self, runner).function()


class _Text:
    """Writes a schedule as a Python function. Its numbers are names, so that those of other sizes are the same text."""

    def __init__(self, schedule: Schedule, runner: Runner) -> None:
        self.schedule, self.runner = schedule, runner
        self.constants: dict[str, Any] = {"empty": torch.empty_strided, "device": schedule.device}

    def function(self) -> Callable[..., Any]:
        """The function."""
        names = ", ".join(f"t{x}" for x in range(len(self.schedule.given)))
        body = [f"def play({names}):"]
        for step, last in self.schedule.used:
            body.append(self._line(step))
            body += [f"del {', '.join(f't{x}' for x in last)}"] if last else []
        body.append(f"return {self._text(self.schedule.result)}")
        exec(_compiled("\n    ".join(body)), self.constants)
        play: Callable[..., Any] = self.constants["play"]
        return play

    def _line(self, step: Step) -> str:
        if isinstance(step, Launch):
            run, constants = self.runner(step)
            args = (*step.args, *(constants or ()))
            values = ", ".join(self._text(x, constants is not None) for x in args)
            return f"{self._name(run)}({values})"
        if isinstance(step, Memory):
            x = step.made
            sizes = f"{self._name(tuple(x.shape))}, {self._name(x.stride)}"
            return f"t{x.number} = empty({sizes}, dtype={self._name(x.dtype)}, device=device)"
        given = [self._text(x) for x in step.args]
        given += [f"{name}={self._text(x)}" for name, x in step.named.items()]
        call = f"{self._name(step.function)}({', '.join(given)})"
        return call if step.made is None else f"t{step.made.number} = {call}"

    def _text(self, x: Any, pointers: bool = False) -> str:
        """An argument, or a result."""
        if isinstance(x, Ref):
            if pointers:
                at = f"t{x.number}.data_ptr()"
                return f"{at} + {self._name(x.offset * x.dtype.itemsize)}" if x.offset else at
            if x.whole:
                return f"t{x.number}"
            start = self._name(x.offset)
            if x.number < len(self.schedule.given):
                start = f"t{x.number}.storage_offset() + {start}"
            return f"t{x.number}.as_strided({self._name(tuple(x.shape))}, {self._name(x.stride)}, {start})"
        if isinstance(x, (tuple, list)):
            inside = "".join(f"{self._text(y, pointers)}, " for y in x)
            if hasattr(x, "_fields") and not pointers:  # what launches by addresses asks for no names
                return f"{self._name(type(x))}({inside})"
            return f"({inside})" if isinstance(x, tuple) else f"[{inside}]"
        return repr(x) if x is None or x is True or x is False else self._name(x)

    def _name(self, x: Any) -> str:
        """A name for a constant."""
        name = f"c{len(self.constants)}"
        self.constants[name] = x
        return name


@functools.lru_cache(maxsize=512)
def _compiled(text: str) -> CodeType:
    return compile(text, "<schedule>", "exec")


class Slot:
    """A tensor that a schedule knows: torch's functions and methods of it find sizes, and are written down.

    What it holds cannot be asked. meta: a tensor of its sizes on torch's meta device, whose memory stands for its own.
    """

    __slots__ = ("_ref", "book", "dtype", "meta", "number", "shape", "stride", "whole")

    def __init__(self, book: Book, number: int, meta: Tensor, whole: bool) -> None:
        self.book, self.number, self.meta, self.whole = book, number, meta, whole
        self.shape, self.dtype, self.stride = meta.shape, meta.dtype, meta.stride
        self._ref: Ref | None = None

    @property
    def device(self) -> torch.device:
        """Where the call's tensors are."""
        return self.book.device

    @property
    def ref(self) -> Ref:
        """What a schedule says of it."""
        if self._ref is None:
            x, align = self.meta, self.book.align[self.number]
            offset: Any = x.storage_offset()
            if isinstance(offset, int):
                align = (align + offset * x.dtype.itemsize) % ALIGNED
            self._ref = Ref(self.number, offset, tuple(x.shape), x.stride(), x.dtype, self.whole, align)
        return self._ref

    @property
    def is_cuda(self) -> bool:
        """Whether the call's tensors are on a GPU."""
        return self.book.device.type == "cuda"

    def new_empty(self, *shape: Any, dtype: torch.dtype | None = None) -> Slot:
        """Memory for a tensor, contiguous, as torch makes it."""
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], (int, torch.SymInt)) else shape
        return self.book.memory(torch.empty(sizes, dtype=dtype or self.dtype, device="meta"))

    def dim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    def __bool__(self) -> bool:
        raise TypeError("what a tensor holds is not known where a schedule is made")

    def __getattr__(self, name: str) -> Any:
        found = getattr(Tensor, name)
        if callable(found):
            return functools.partial(self.book.apply, found, self)
        found = getattr(self.meta, name)  # a property: a view, or a number
        return self.book.seen(found, (self,)) if isinstance(found, Tensor) else found

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch's functions of tensors some of which are slots."""
        kwargs = kwargs or {}
        book = next(x.book for x in tree_leaves((args, kwargs)) if isinstance(x, Slot))
        return book.apply(function, *args, **kwargs)


def _of_operators(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)
    return lambda self, *args: self.book.apply(function, self, *args)


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "pow", "matmul", "neg", "getitem", "setitem", "lt", "le",
    "gt", "ge", "eq", "ne", "and", "or", "invert",
):  # fmt: skip
    setattr(Slot, f"__{_name}__", _of_operators(f"__{_name}__"))
Slot.__hash__ = object.__hash__  # type: ignore[method-assign]


class Book:
    """Where a schedule is written while host code runs on slots."""

    def __init__(self, tensors: Sequence[Tensor | None], align: Sequence[int]) -> None:
        """tensors: given, known by position; align: of their first bytes."""
        self.device = next(x.device for x in tensors if x is not None)
        self.steps: list[Step] = []
        self.align = list(align)
        self.given: list[Slot | None] = []
        for number, x in enumerate(tensors):
            like = x
            if x is not None:
                like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            self.given.append(None if like is None else Slot(self, number, like, True))

    def schedule(self, result: Any) -> Schedule:
        """All that was written, for a call that returns `result`."""
        given = tuple(None if x is None else x.ref for x in self.given)
        self.given = []  # which know this book, and would all wait for the garbage collector
        return Schedule(given, tuple(self.steps), _refs(result), self.device)

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Write down kernel[grid](*args, **named)."""
        self.steps.append(Launch(kernel, grid, _refs(args), named))

    def apply(self, function: Any, *args: Any, **named: Any) -> Any:
        """Write down one of torch's functions, and find the sizes of what it returns."""
        out = function(*_metas(args), **{name: _metas(x) for name, x in named.items()})
        title = function.__name__
        if "out" in named or title == "__setitem__" or (title[-1] == "_" and title[-2] != "_"):
            self.steps.append(Operation(None, function, _refs(args), {name: _refs(x) for name, x in named.items()}))
            return named.get("out", args[0])
        if isinstance(out, (tuple, list)) and out and isinstance(out[0], Tensor):
            found = [self.seen(x, args) for x in out]
            assert all(x is not None for x in found), f"a schedule has no place for what {title} returns"
            return type(out)(found)
        if not isinstance(out, Tensor):
            return out
        slot = self.seen(out, args)
        if slot is not None:
            return slot
        if title in ROOM:
            return self.memory(out)
        slot = self._made(out)
        named = {name: _refs(x) for name, x in named.items()}
        self.steps.append(Operation(slot.ref, function, _refs(args), named))
        return slot

    def memory(self, like: Tensor) -> Slot:
        """Write down that there is memory for a tensor like this one."""
        slot = self._made(like)
        self.steps.append(Memory(slot.ref))
        return slot

    def _made(self, like: Tensor) -> Slot:
        self.align.append(0)
        return Slot(self, len(self.align) - 1, like, True)

    def seen(self, out: Tensor, args: Any) -> Slot | None:
        """What a function returns that it was given, or a view of that."""
        storage = out.untyped_storage()._cdata
        for x in _slots(args):
            if out is x.meta:
                return x
            if storage == x.meta.untyped_storage()._cdata:
                return Slot(self, x.number, out, False)
        return None


def _found(x: Any) -> Iterator[Ref]:
    if isinstance(x, Ref):
        yield x
    elif isinstance(x, (tuple, list)):
        for y in x:
            yield from _found(y)


def _slots(args: Any) -> Iterator[Slot]:
    for x in args:
        if isinstance(x, Slot):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from _slots(x)


def _metas(x: Any) -> Any:
    return mapped(_meta, x)


def _meta(x: Any) -> Any:
    assert not isinstance(x, Tensor), f"a schedule does not know a tensor of shape {tuple(x.shape)}: it is no argument"
    return x.meta if isinstance(x, Slot) else x


def _refs(x: Any) -> Any:
    return mapped(lambda y: y.ref if isinstance(y, Slot) else y, x)


def book_of(args: Any) -> Book:
    """Where the schedule of the call is written that these arguments belong to."""
    return next(_slots(args)).book
