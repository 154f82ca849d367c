"""Custom operators whose host code runs once for each combination of shapes and options, on slots (schedule.py).

For shapes that differ in sizes alone, one schedule with symbols can serve many of them (template.py). Later calls only
run the schedule's function: to compute sizes and arguments again would take several times as long as the launches, most
of all on autograd's thread, whose caches are cold.

torch.compile, autocast, checkpointing and graph capture see plain operators on tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dsf.kernels.recent import Recent
from dsf.kernels.triton.launch import runnable, runner
from dsf.kernels.triton.schedule import ALIGNED, Book, Launch, Schedule
from dsf.kernels.triton.template import Templates, numbers_of, with_numbers
from dsf.kernels.triton.unwritten import Unwritten

LIBRARY = torch.library.Library("dsf", "FRAGMENT")
_functions: Recent[Callable[..., Any]] = Recent(4096)
_templates: Recent[Templates] = Recent(1024)
TENSORS = (Tensor, Unwritten)
_known: dict[Any, Scheduled] = {}
_notes: ContextVar[list[Schedule] | None] = ContextVar("_notes", default=None)


@contextmanager
def noted() -> Iterator[list[Schedule]]:
    """Collects, in order, the schedules of operators that are called on fake tensors inside."""
    found: list[Schedule] = []
    token = _notes.set(found)
    try:
        yield found
    finally:
        _notes.reset(token)


def forget() -> None:
    """Drop all schedules; later calls make new ones."""
    _functions.clear()
    _templates.clear()


class Scheduled:
    """The implementation of an operator: runs `host` once for each kind of call, and its schedule for every call.

    host takes the operator's arguments, with slots in place of tensors, and hashable options. It returns slots, in
    tuples and lists, none of which is an argument. It may depend on torch's matmul precision, but on nothing else.
    results: how many the operator's schema has, if several.
    """

    def __init__(
        self, host: Callable[..., Any], behind: Callable[..., Any] | None = None, results: int | None = None
    ) -> None:
        self.host, self.behind, self.results = host, behind, results

    def __call__(self, *args: Any) -> Any:
        """The operator's result, on the GPU of its first tensor."""
        tensors, kind = _read(args)
        x = next(x for x in tensors if x is not None)
        if not x.is_cuda or x.device.index == torch.cuda.current_device():
            return self._run(args, tensors, kind)
        with torch.cuda.device(x.device):
            return self._run(args, tensors, kind)

    def _run(self, args: tuple[Any, ...], tensors: Sequence[Tensor | None], told: list[Any]) -> Any:
        device = next(x.device for x in tensors if x is not None)
        wanted = self.behind is not None and any(x is not None and x.requires_grad for x in tensors)
        kind = (self.host, device, torch._C._get_float32_matmul_precision(), *told, wanted)
        run = _functions.get(kind)
        if run is None:
            with _disable_current_modes():
                run, lasting = self._found(args, tensors, device, kind)
            if lasting:
                _functions.put(kind, run)
        return run(*tensors)

    def _found(
        self, args: tuple[Any, ...], tensors: Sequence[Tensor | None], device: torch.device, kind: tuple[Any, ...]
    ) -> tuple[Callable[..., Any], bool]:
        """The function of a new kind of call, and whether to keep it. A kind ends with whether to foresee gradients."""
        numbers, options = tuple(numbers_of(args)), _options(kind)
        known = _templates.get(options)
        first = known is None
        if known is None:
            _templates.put(options, known := Templates())
        run = known.function(numbers)
        if run is not None:
            return run, True
        align = [0 if x is None else x.data_ptr() % ALIGNED for x in tensors]

        def host(values: Iterator[Any]) -> Schedule:
            given = with_numbers(args, values)
            return self._made(given, list(_tensors(given)), align, device)

        made = self._made(args, tensors, align, device)
        run, lasting = runnable(made, (lambda: self._behind(args, made, device)) if kind[-1] else None, first)
        if lasting:
            known.learn(numbers, made, host, runner)
        return run, lasting

    def _made(
        self, args: Sequence[Any], tensors: Sequence[Any], align: Sequence[int], device: torch.device
    ) -> Schedule:
        book = Book(tensors, align, device)
        given = iter(book.given)
        found = self.host(*(_replaced(x, given) for x in args))
        if self.results is not None and len(found) != self.results:  # torch would end the process
            raise TypeError(f"{self.host.__name__} returns {len(found)} tensors, its schema has {self.results}")
        return book.schedule(found)

    def _behind(self, args: tuple[Any, ...], made: Schedule, device: torch.device) -> Sequence[Launch]:
        """What the gradients of a call of this schedule will launch, none if none are wanted."""
        assert self.behind is not None
        asked = self.behind(made.empty(torch.empty(0, device="meta")), *args)
        if asked is None:
            return ()
        operator, *given = asked
        tensors = list(_tensors(given))
        align = [0 if x is None else x.data_ptr() % ALIGNED for x in tensors]
        return _known[operator]._made(given, tensors, align, device).launches

    def schedule(self, *args: Any) -> Schedule:
        """The schedule of a call with these arguments, which may be fake tensors."""
        tensors = list(_tensors(args))
        device = next(x.device for x in tensors if x is not None)
        made = self._made(args, tensors, [0] * len(tensors), device)
        notes = _notes.get()
        if notes is not None:
            notes.append(made)
        return made

    def shapes(self, *args: Any) -> Any:
        """Uninitialised tensors of the result's sizes (the fake kernel)."""
        like = next(x for x in _tensors(args) if x is not None)
        return self.schedule(*args).empty(like)


def _read(args: tuple[Any, ...]) -> tuple[list[Tensor | None], list[Any]]:
    """(the tensors among an operator's arguments, None for absent ones; the kind of the call).

    The kind has shape, strides, dtype and alignment of each tensor, the length of each list of tensors, and the
    options.
    """
    tensors: list[Tensor | None] = []
    kind: list[Any] = []
    for x in args:
        if isinstance(x, Tensor):
            tensors.append(x)
            kind.append((x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNED))
        elif type(x) is list or type(x) is tuple:
            if x and isinstance(x[0], Tensor):
                tensors += x
                kind.append((len(x),))
                kind += [(y.shape, y.stride(), y.dtype, y.data_ptr() % ALIGNED) for y in x]
            else:
                kind.append(tuple(x))
        else:
            kind.append(x)
            if x is None:
                tensors.append(None)
    return tensors, kind


def _options(kind: Sequence[Any]) -> tuple[Any, ...]:
    """A kind without sizes, strides and integers: number of axes, dtype and alignment of each tensor, and options."""
    return tuple(
        (len(x[0]), *x[2:]) if type(x) is tuple and x and type(x[0]) is torch.Size else int if type(x) is int else x
        for x in kind
    )


def _tensors(args: Sequence[Any]) -> Iterator[Any]:
    """The tensors among an operator's arguments, None for absent ones."""
    for x in args:
        if x is None or isinstance(x, TENSORS):
            yield x
        elif type(x) in (list, tuple):
            yield from (y for y in x if isinstance(y, TENSORS))


def _replaced(x: Any, slots: Any) -> Any:
    """An argument with slots in place of tensors."""
    if x is None or isinstance(x, TENSORS):
        return next(slots)
    if type(x) in (list, tuple):
        return [next(slots) for _ in x] if x and isinstance(x[0], TENSORS) else tuple(x)
    return x


def operator(
    schema: str, host: Callable[..., Any], differentiable: Callable[..., Any] | None = None,
    behind: Callable[..., Any] | None = None,
) -> Any:  # fmt: skip
    """Define the operator dsf::schema, implemented by Scheduled(host).

    differentiable: is called instead, on the same arguments, where a gradient is wanted.
    behind: (the result without memory, *arguments) -> the operator that its gradients will call and its arguments, or
    None where none are wanted. Its kernels are compiled beside the operator's own; nothing else depends on it.
    """
    name, several = schema.split("(")[0], torch._C.parse_schema(f"dsf::{schema}").returns
    scheduled = Scheduled(host, behind, len(several) if len(several) > 1 else None)
    LIBRARY.define(schema)
    LIBRARY.impl(name, scheduled, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsf::{name}", scheduled.shapes, lib=LIBRARY)
    found = getattr(torch.ops.dsf, name).default
    _known[found] = scheduled

    def autograd(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in _tensors(args)):
            assert differentiable is not None
            return differentiable(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return found(*args)

    if differentiable is not None:
        LIBRARY.impl(name, autograd, "Autograd")
    return found


def schedule_of(operator: Any, *args: Any) -> Schedule:
    """The schedule of a call of one of this package's operators, on tensors that may be fake."""
    return _known[operator].schedule(*args)
