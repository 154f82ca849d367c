"""Tapes: what a call allocates, asks of torch and launches, written down once and played for calls of the same kind.

All of that depends on shapes, strides, dtypes, alignments, options and on which of the tensors given are one and the
same, never on what tensors hold. The second call of a kind is written down as the text of a Python function without
anything else in it; later calls run that function. On autograd's thread, whose caches are cold, working out sizes and
arguments takes several times as long as launching.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

from dsf.kernels.triton.ahead import compiled
from dsf.kernels.triton.launcher import prove

LARGEST = 4096  # kinds of calls that are remembered; the one that was played longest ago is forgotten first
UNSET = (
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_strided.default, torch.ops.aten.new_empty_strided.default,
)  # fmt: skip
_tapes: OrderedDict[Any, Callable[..., Any] | None] = OrderedDict()
_changing = threading.Lock()


def played(function: Callable[..., Any], tensors: Sequence[Tensor | None], *options: Any) -> Any:
    """function(tensors, *options), from its tape where there is one; options: hashable.

    It returns new tensors, in tuples and lists, and does nothing that depends on what tensors hold.
    """
    kinds = [
        None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15) for x in tensors
    ]  # fmt: skip
    device = torch._C._cuda_getDevice() if torch.cuda.is_initialized() else -1
    key = (function, options, device, same_ones(tensors), *kinds)
    play = _tapes.get(key)
    if play is not None:
        _remember(key, play)
        return play(*tensors)
    if key not in _tapes:  # one call of a kind is not worth writing down
        _remember(key, None)
        prove()
        return compiled(function, tensors, *options)
    with Tape(tensors) as tape:
        found = function(tensors, *options)
    _remember(key, tape.function(found))
    return found


def same_ones(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    """For each tensor the place of the first that is the same object: a tape knows its tensors by identity."""
    numbers = [id(x) for x in tensors]
    return () if len(set(numbers)) == len(numbers) else tuple(map(numbers.index, numbers))


def _remember(key: Any, play: Callable[..., Any] | None) -> None:
    with _changing:
        _tapes[key] = play
        _tapes.move_to_end(key)
        while len(_tapes) > LARGEST:
            _tapes.popitem(last=False)


def forget() -> None:
    """Play no tape any more."""
    with _changing:
        _tapes.clear()


def recording() -> Tape | None:
    """The tape that this thread's call is written on."""
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, Tape) else None


class Tape(TorchDispatchMode):
    """Writes down a call of `tensors`, None among them. Line by line: what it says, and the memory it makes and uses.

    t0, t1, … are the tensors given, then those made; views of them are known by where they lie.
    """

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.lines: list[tuple[str, int | None, set[int]]] = []
        self.known: Any = WeakTensorKeyDictionary()  # tensor: (number, elements from that one's first, is a view)
        self.constants: dict[str, Any] = {"empty": torch.empty_strided}
        self.given = self.count = len(tensors)
        for number, x in enumerate(tensors):
            if x is not None:
                self.known[x] = number, 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one of torch's operators, and write it down."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        uses: set[int] = set()
        if isinstance(out, Tensor) and out in self.known:  # written in place
            self.lines.append((self._call(func, args, kwargs, uses), None, uses))
            return out
        for x in (out,) if isinstance(out, Tensor) else out:
            base = next((a for a in args if isinstance(a, Tensor) and a in self.known and _same_memory(a, x)), None)
            if base is not None:
                number, offset, _ = self.known[base]
                self.known[x] = number, offset + x.storage_offset() - base.storage_offset(), True
                continue
            assert x is out, f"a tape has no place for what {func} returns"
            if func in UNSET:
                text = (
                    f"empty({tuple(x.shape)}, {x.stride()}, dtype={self._name(x.dtype)}, device={self._name(x.device)})"
                )
            else:
                text = self._call(func, args, kwargs, uses)
            self.known[x] = self.count, 0, False
            self.lines.append((f"t{self.count} = {text}", self.count, uses))
            self.count += 1
        return out

    def launch(self, run: Callable[..., Any], args: Sequence[Any], pointers: bool) -> None:
        """Write down run(*args); pointers: tensors are handed over as addresses."""
        uses: set[int] = set()
        values = ", ".join(self._text(x, uses, pointers) for x in args)
        self.lines.append((f"{self._name(run)}({values})", None, uses))

    def paused(self) -> Any:
        """A context in which nothing is written down."""
        return _disable_current_modes()

    def function(self, found: Any) -> Callable[..., Any]:
        """The call as a function of its tensors that returns what `found` stands for."""
        wanted: set[int] = set()
        body = [f"return {self._text(found, wanted)}"]
        alive = set(wanted)
        for text, made, uses in reversed(self.lines):
            if made is not None and made not in wanted:
                continue
            last = sorted(x for x in uses - alive if x >= self.given)
            body += [f"del {', '.join(f't{x}' for x in last)}"] if last else []
            body.append(text)
            wanted |= uses
            alive |= uses
        names = ", ".join(f"t{x}" for x in range(self.given))
        exec("\n    ".join([f"def play({names}):", *reversed(body)]), self.constants)
        play: Callable[..., Any] = self.constants["play"]
        return play

    def _call(self, func: Any, args: Any, kwargs: Any, uses: set[int]) -> str:
        given = [self._text(x, uses) for x in args]
        given += [f"{name}={self._text(x, uses)}" for name, x in kwargs.items()]
        return f"{self._name(func)}({', '.join(given)})"

    def _text(self, x: Any, uses: set[int], pointers: bool = False) -> str:
        """An argument, or a result, as Python text; the memory that it lies in is added to `uses`."""
        if isinstance(x, Tensor):
            if pointers and x.data_ptr() == 0:
                return "0"
            if x not in self.known:  # a tape that held it would hand today's numbers to later calls
                raise AssertionError(f"a tape does not know a tensor of shape {tuple(x.shape)}: it came from elsewhere")
            number, offset, view = self.known[x]
            uses.add(number)
            if pointers:
                return f"t{number}.data_ptr() + {offset * x.element_size()}" if offset else f"t{number}.data_ptr()"
            if not view:
                return f"t{number}"
            start = f"t{number}.storage_offset() + {offset}" if number < self.given else str(offset)
            return f"t{number}.as_strided({tuple(x.shape)}, {x.stride()}, {start})"
        if isinstance(x, (tuple, list)):
            inside = "".join(f"{self._text(y, uses, pointers)}, " for y in x)
            return f"({inside})" if isinstance(x, tuple) else f"[{inside}]"
        return repr(x) if x is None or type(x) in (int, bool) else self._name(x)

    def _name(self, x: Any) -> str:
        """A name for a constant."""
        name = f"c{len(self.constants)}"
        self.constants[name] = x
        return name


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
