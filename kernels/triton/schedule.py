"""Schedules: the allocations, torch operations and launches of an operator's call, as data.

These depend on shapes, strides, dtypes, alignments and options, never on the contents of tensors. So the host code of
an operator runs once for each combination, on `Slot`s: tensors without memory, identified by their position among the
arguments. A `Book` records what it does as a `Schedule`. That can be printed, gives the sizes of the results (the
operator's fake kernel) and the kernels to compile, and is turned into the function that later calls run (player.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dsf.kernels.triton.symbolic import Size
from dsf.kernels.triton.unwritten import Unwritten, evaluate, result

ROOM = ("empty_like", "new_empty_strided")  # functions that allocate uninitialised memory
ALIGNED = 16  # bytes: Triton specialises kernels for pointers that are multiples of it


def mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """x with function applied to the leaves of its tuples, NamedTuples and lists, whose types are kept."""
    if isinstance(x, (tuple, list)) and not isinstance(x, Ref):
        found = [mapped(function, y) for y in x]
        return type(x)(*found) if hasattr(x, "_fields") else type(x)(found)
    return function(x)


class Ref(NamedTuple):
    """A tensor: the number of its memory, and its offset there, in elements.

    whole: it is that tensor itself, not a view. align: 0 if its first byte is a multiple of ALIGNED, else the size of
    an element.
    """

    number: int
    offset: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    whole: bool
    align: int

    def __str__(self) -> str:
        return f"t{self.number}" if self.whole else f"t{self.number}[{self.offset}:].view{list(self.shape)}"

    @property
    def span(self) -> int:
        """Elements of memory from its first to its last element."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return 0 if 0 in self.shape else last + 1

    @property
    def bytes(self) -> int:
        """Bytes of memory from its first to its last element."""
        return self.span * self.dtype.itemsize

    @property
    def sizes(self) -> str:
        """Its name, dtype and shape."""
        return f"{self} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Memory:
    """The allocation of an uninitialised tensor."""

    made: Ref

    def __str__(self) -> str:
        return f"{self.made.sizes} = memory"


@dataclass(frozen=True)
class Operation:
    """A call of a torch function; made: its result, None where it writes in place."""

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
    """A launch of a kernel on a grid; named: its compile-time constants."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    named: Mapping[str, Any]

    def __str__(self) -> str:
        given, named = ", ".join(map(_show, self.args)), [f"{name}={_show(x)}" for name, x in self.named.items()]
        return f"{self.kernel.__name__}[{', '.join(map(str, self.grid))}]({given}; {', '.join(named)})"


Step = Memory | Operation | Launch


def _show(x: Any) -> str:
    if isinstance(x, Ref):
        return str(x)
    if isinstance(x, (tuple, list)):
        return f"({', '.join(map(_show, x))})"
    return getattr(x, "__name__", None) or str(x)


@dataclass(frozen=True)
class Schedule:
    """given: the call's tensors, by position; steps: in order; result: Refs in tuples and lists."""

    given: tuple[Ref | None, ...]
    steps: tuple[Step, ...]
    result: Any
    device: torch.device

    @functools.cached_property
    def used(self) -> tuple[tuple[Step, tuple[int, ...]], ...]:
        """The steps, without those whose results are unused, each with the memory that it is the last to use."""
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
        """The most bytes of its own allocations that are alive at once."""
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
        """The launches, in order."""
        return tuple(x for x in self.steps if isinstance(x, Launch))

    def __str__(self) -> str:
        given = ", ".join("-" if x is None else x.sizes for x in self.given)
        return "\n".join([f"given {given}", *map(str, self.steps), f"return {_show(self.result)}"])

    def empty(self, like: Tensor) -> Any:
        """Uninitialised tensors of the result's sizes, on the device of `like`: the result of a fake kernel."""

        def room(x: Any) -> Any:
            if not isinstance(x, Ref):
                return x
            if x.whole:
                return like.new_empty_strided(x.shape, x.stride, dtype=x.dtype)
            return like.new_empty(x.offset + x.span, dtype=x.dtype).as_strided(x.shape, x.stride, x.offset)

        return mapped(room, self.result)


class Slot:
    """A tensor without contents: torch functions and methods of it are recorded, and give results of the right sizes.

    Asking for its truth value raises TypeError. meta: a tensor of its sizes on torch's meta device; views of the slot
    have views of it.
    """

    __slots__ = ("_ref", "book", "dtype", "meta", "number", "shape", "stride", "whole")

    def __init__(self, book: Book, number: int, meta: Any, whole: bool) -> None:
        self.book, self.number, self.meta, self.whole = book, number, meta, whole
        self.shape, self.dtype, self.stride = meta.shape, meta.dtype, meta.stride
        self._ref: Ref | None = None

    @property
    def device(self) -> torch.device:
        """The device of the call's tensors."""
        return self.book.device

    @property
    def ref(self) -> Ref:
        """The Ref that stands for it in the schedule."""
        if self._ref is None:
            x, align = self.meta, self.book.align[self.number]
            offset: Any = x.storage_offset()
            if isinstance(offset, int):
                align = x.dtype.itemsize if (align + offset * x.dtype.itemsize) % ALIGNED else 0
            self._ref = Ref(self.number, offset, tuple(x.shape), x.stride(), x.dtype, self.whole, align)
        return self._ref

    @property
    def is_cuda(self) -> bool:
        """Whether the call's tensors are on a GPU."""
        return self.book.device.type == "cuda"

    def new_empty(self, *shape: Any, dtype: torch.dtype | None = None) -> Slot:
        """Record the allocation of a contiguous tensor, as torch's new_empty."""
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], (int, torch.SymInt, Size)) else shape
        return self.book.memory(self.book.blank(sizes, dtype or self.dtype))

    def dim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def __bool__(self) -> bool:
        raise TypeError("what a tensor holds is not known where a schedule is made")

    def __getattr__(self, name: str) -> Any:
        found = getattr(Tensor, name)
        if callable(found):
            return functools.partial(self.book.apply, found, self)
        found = getattr(self.meta, name)  # a property: a view, or a number
        return self.book.seen(found, (self,)) if isinstance(found, (Tensor, Unwritten)) else found

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a torch function with slots among its arguments."""
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
    """Records a schedule while host code runs on slots."""

    def __init__(self, tensors: Sequence[Any], align: Sequence[int], device: torch.device) -> None:
        """tensors: the call's, by position, Unwritten for symbolic sizes; align: of their first bytes."""
        self.device = device
        self.steps: list[Step] = []
        self.align = list(align)
        self.given: list[Slot | None] = []
        self.symbolic = any(isinstance(x, Unwritten) for x in tensors)
        for number, x in enumerate(tensors):
            like = x
            if isinstance(x, Tensor):
                like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            self.given.append(None if like is None else Slot(self, number, like, True))

    def schedule(self, result: Any) -> Schedule:
        """The Schedule of all that was recorded, for a call that returns `result`."""
        given = tuple(None if x is None else x.ref for x in self.given)
        self.given = []  # breaks reference cycles, which only the garbage collector would free
        return Schedule(given, tuple(self.steps), _refs(result), self.device)

    def blank(self, shape: Any, dtype: torch.dtype) -> Any:
        """A new tensor without memory."""
        return Unwritten(shape, None, dtype) if self.symbolic else torch.empty(shape, dtype=dtype, device="meta")

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Record kernel[grid](*args, **named)."""
        self.steps.append(Launch(kernel, grid, _refs(args), named))

    def apply(self, function: Any, *args: Any, **named: Any) -> Any:
        """Record a call of a torch function. Returns its result as slots."""
        title = function.__name__
        if "out" in named or title == "__setitem__" or (title[-1] == "_" and title[-2] != "_"):
            self.steps.append(Operation(None, function, _refs(args), {name: _refs(x) for name, x in named.items()}))
            return named.get("out", args[0])
        metas, others = _metas(args), {name: _metas(x) for name, x in named.items()}
        out = (evaluate if self.symbolic else result)(function, metas, others)
        if isinstance(out, (tuple, list)) and out and isinstance(out[0], (Tensor, Unwritten)):
            found = [self.seen(x, args) for x in out]
            assert all(x is not None for x in found), f"a schedule has no place for what {title} returns"
            return type(out)(found)
        if not isinstance(out, (Tensor, Unwritten)):
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

    def memory(self, like: Any) -> Slot:
        """Record the allocation of a tensor like this one."""
        slot = self._made(like)
        self.steps.append(Memory(slot.ref))
        return slot

    def _made(self, like: Any) -> Slot:
        self.align.append(0)
        return Slot(self, len(self.align) - 1, like, True)

    def seen(self, out: Any, args: Any) -> Slot | None:
        """The slot of `out` where that is one of the arguments or a view of one; else None."""
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
    """The Book of the slots among these arguments."""
    return next(_slots(args)).book
