"""A case's tensors: their numbers, rounded to its dtype, and their memory layouts."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsf.call.recurrence import Recurrence, State
from dsf.checking.examples import PREFIX, draw_tensor, generator_of, regimes_of
from dsf.checking.measure import HALF
from dsf.checking.states import rows_of
from dsf.checking.values import Range
from dsf.fuzz.caches import given_type
from dsf.fuzz.case import Case
from dsf.language.annotations import Kind, shape_of

Ranges = Mapping[str, Range]


def numbers(recurrence: Recurrence, ranges: Ranges, case: Case, call: int) -> dict[str, Tensor]:
    """The inputs of a call (numbered from 1), contiguous on the CPU, in the call's dtypes."""
    found: dict[str, Tensor] = {}
    owner = _narrowest(ranges, case)
    order = sorted(recurrence.spec.inputs, key=lambda i: i.name != owner)  # the narrowest aliased input first
    for entry in order:
        name, kind = entry.name, entry.kind
        shared = case.is_one(call) and name in case.alias and name != owner
        if shared and not case.overlap:
            found[name] = found[owner]
            continue
        regime = case.regimes.get(name) or regimes_of(recurrence.spec, name, ranges[name])[0]
        heads = case.groups.get(name, case.heads) if kind.time else case.heads
        shape = list(shape_of(entry, (case.batch, case.tokens), heads, case.n, case.p))
        if shared:  # one token later than the first
            shape[1] = 1
        x = draw_tensor(ranges[owner if shared else name], regime, shape, kind, _seed(case, name, call))
        x = x.to(torch.float32 if case.dtype in HALF and not kind.time else case.torch_dtype)
        if shared:
            x = torch.cat([found[owner][:, 1:], x], dim=1)
        found[name] = _repeated(x, case.layout(name, call), _heads_axis(kind))
    return {i.name: found[i.name] for i in recurrence.spec.inputs}


def _seed(case: Case, name: str, call: int) -> int:
    return zlib.crc32(name.encode()) + 7919 * (case.seed + 1009 * call)


def _narrowest(ranges: Ranges, case: Case) -> str:
    """The aliased input with the narrowest range, whose numbers are legal for the others."""
    return min(case.alias, key=lambda name: ranges[name].is_real, default="")


def _heads_axis(kind: Kind) -> int:
    return 0 if not kind.time else 2 + (kind.steps is not None)


def _repeated(x: Tensor, way: str, heads: int) -> Tensor:
    """x with equal numbers along the axis that an expanded layout expands."""
    axis = _expanded_axis(way, heads, x)
    return x if axis is None else x.narrow(axis, 0, 1).expand_as(x).clone()


def _expanded_axis(way: str, heads: int, x: Tensor) -> int | None:
    axis = {"expanded-batch": 0, "expanded-tokens": 1, "expanded-heads": heads}.get(way)
    return axis if axis is not None and axis < x.dim() else None


def states(recurrence: Recurrence, ranges: Ranges, case: Case) -> list[State | None]:
    """Every call's initial state on the CPU: the final state of a few other tokens."""
    if not case.initial:
        return [None] * case.calls
    inputs: dict[str, Any] = {}
    for entry in recurrence.spec.inputs:
        regime = regimes_of(recurrence.spec, entry.name, ranges[entry.name])[0]
        grouped = recurrence.spec.is_attention and entry.kind.time  # caches have few heads
        few = case.groups.get(entry.name, case.heads) if grouped else case.heads
        shape = list(shape_of(entry, (case.calls * case.rows, PREFIX), few, case.n, case.p))
        inputs[entry.name] = draw_tensor(ranges[entry.name], regime, shape, entry.kind, _seed(case, entry.name, 0))
    with torch.no_grad():
        state = recurrence(**inputs, return_state=True, form="recurrent", backend="torch")[1]
    state = given_type(case, state)
    return [rows_of(state, range(at, at + case.rows)) for at in range(0, case.calls * case.rows, case.rows)]


def cotangents(case: Case, call: int, state: Sequence[int], cached: bool = False) -> tuple[Tensor, Tensor]:
    """dy in the inputs' dtype, and float64 numbers for the final state in its true scale; rounded as the inputs are.

    cached: the state is a cache, which has the inputs' dtype itself, and so has its gradient.
    """
    generator = generator_of(_seed(case, "dy", call))
    dy = torch.randn(case.batch, case.tokens, case.heads, case.p, generator=generator, dtype=torch.float64)
    ds = torch.randn(tuple(state), generator=generator, dtype=torch.float32)
    ds = (ds.to(case.torch_dtype) if cached else ds).double()
    return _repeated(dy.to(case.torch_dtype), case.layouts.get("dy", "plain"), 2), ds


@dataclass
class Memory:
    """Tensors in the memory layouts of a case, with copies of their storages."""

    device: torch.device
    held: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def put(self, x: Tensor, way: str, heads: int) -> Tensor:
        """x on the device in the layout `way`."""
        x = x.to(self.device)
        axis = _expanded_axis(way, heads, x)
        if axis is not None:
            return self._kept(x.narrow(axis, 0, 1).clone()).expand_as(x)
        if way == "offset" or (way in ("late", "transposed") and x.dim() < 2):
            room = self._room(x, (x.numel() + 3,))
            view = room[1 : 1 + x.numel()].view(x.shape)
        elif way == "late":
            view = self._room(x, (x.shape[0], x.shape[1] + 3, *x.shape[2:]))[:, 2 : 2 + x.shape[1]]
        elif way == "padded":
            view = self._room(x, (*x.shape[:-1], x.shape[-1] + 3))[..., : x.shape[-1]]
        elif way == "strided":
            view = self._room(x, (*x.shape, 2))[..., 0]
        elif way == "transposed":
            a, b = (1, 2) if x.dim() > 2 else (0, 1)
            view = self._room(x, tuple(x.transpose(a, b).shape)).transpose(a, b)
        else:
            view = self._room(x, tuple(x.shape))
        view.copy_(x)
        return self._kept(view)

    def fused(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inputs [B, T, ...] as parts of the rows of one tensor."""
        first = next(iter(given.values())).to(self.device)
        widths = [x[0, 0].numel() for x in given.values()]
        room = self._room(first, (*first.shape[:2], sum(widths) + 1))
        views, start = {}, 0
        for (name, x), width in zip(given.items(), widths, strict=True):
            view = room[..., start : start + width].unflatten(-1, x.shape[2:]) if x.dim() > 2 else room[..., start]
            view.copy_(x.to(self.device))
            views[name], start = view, start + width
        self._kept(room)
        return views

    def overlapping(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Two tensors [B, T, ...] in one storage, the second one token later."""
        room = self._kept(torch.cat([first, second[:, -1:]], dim=1).to(self.device))
        return room[:, :-1], room[:, 1:]

    def changed(self) -> bool:
        """True where any of these storages, including the NaN around tensors, has changed."""
        return any(not torch.equal(_bits(now), before) for now, before in self.held)

    def _room(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, float("nan"), dtype=like.dtype, device=self.device)

    def _kept(self, x: Tensor) -> Tensor:
        """x, after copying its whole storage."""
        whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
        self.held.append((whole, _bits(whole).clone()))
        return x


def _bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def given_of(
    recurrence: Recurrence, ranges: Ranges, case: Case, call: int, values: Mapping[str, Tensor], memory: Memory
) -> dict[str, Tensor]:
    """The leaves of a call, by name: the same object for aliased inputs."""
    kinds = {i.name: i.kind for i in recurrence.spec.inputs}
    placed: dict[str, Tensor] = {}
    together = {n: values[n] for n in kinds if case.layout(n, call) == "fused" and kinds[n].time}
    if together:
        placed |= memory.fused(together)
    if case.is_one(call) and case.overlap:
        names = sorted(case.alias, key=lambda name: name != _narrowest(ranges, case))
        placed |= zip(names, memory.overlapping(*(values[n] for n in names)), strict=True)
    leaves: dict[str, Tensor] = {}
    for name, x in values.items():
        if name not in placed:
            placed[name] = memory.put(x, case.layout(name, call), _heads_axis(kinds[name]))
        leaves[name] = placed[name].detach().requires_grad_(bool(case.loss) and name not in case.frozen)
    if case.is_one(call) and not case.overlap:
        leaves |= dict.fromkeys(case.alias, leaves[case.alias[0]])
    return leaves
