"""Packed sequences: cu_seqlens as the kernels take them, or cut into batches of similar length for every other form."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Made = TypeVar("Made")
_KEPT = 16  # ways of packing whose places are remembered: a CUDA graph may not copy them from the host
Bounds = tuple[int, ...]
_values: dict[int, tuple[weakref.ref[Tensor], int, list[int]]] = {}
_places: dict[tuple[Callable[..., Any], Bounds, torch.device], Any] = {}


@dataclass(frozen=True)
class Batch:
    """Sequences of similar length side by side.

    rows: which sequences, also as a tensor `chosen`; index: [S, T] place of each token in the packed row (padding
    repeats the last one); valid: [S, T] bool, or None when no token is padding; lengths, also as a tensor `counts`;
    order: where every sequence is among the rows of all batches.
    """

    rows: list[int]
    index: Tensor
    valid: Tensor | None
    lengths: list[int]
    chosen: Tensor
    counts: Tensor
    order: Tensor

    def take(self, timed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Per-token tensors [1, T, ...] -> [S, T', ...]."""
        return {name: x[0][self.index] for name, x in timed.items()}


def is_hidden(cu_seqlens: Tensor) -> bool:
    """True where no values are there to be read: in a compiled graph, or while a CUDA graph is captured, whose
    boundaries may differ from replay to replay."""
    if type(cu_seqlens) is not Tensor or torch.compiler.is_compiling():
        return True
    return cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()


def values(cu_seqlens: Tensor) -> list[int]:
    """What it holds, on a GPU read once as long as it holds that: a model's layers share one and wait for it once."""
    if cu_seqlens.device.type == "cpu" or is_hidden(cu_seqlens) or cu_seqlens.is_inference():
        return cast(list[int], cu_seqlens.tolist())
    found = _values.get(id(cu_seqlens))
    if found is None or found[0]() is not cu_seqlens or found[1] != cu_seqlens._version:
        if len(_values) >= _KEPT:
            _values.clear()
        found = _values[id(cu_seqlens)] = weakref.ref(cu_seqlens), cu_seqlens._version, cu_seqlens.tolist()
    return found[2]


def on_device(cu_seqlens: Tensor, bounds: list[int], device: torch.device) -> Tensor:
    """cu_seqlens, whose values are `bounds`, where the kernels read them."""
    if cu_seqlens.device == device:
        return cu_seqlens
    return _remembered(_placed, tuple(bounds), device, lambda x: [x])


def _placed(bounds: Bounds, device: torch.device) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int32).to(device)


def batches(bounds: list[int], device: torch.device) -> list[Batch]:
    """Sequences grouped by ⌈log2 length⌉: at most log2 T batches, and padding never doubles the tokens."""
    return _remembered(_batches, tuple(bounds), device, lambda found: [x for b in found for x in (b.index, b.order)])


def marks(bounds: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers of sequences, from 1, at their first tokens [1, T, 1] and at their last [T], 0 elsewhere; int32."""
    return _remembered(_marks, tuple(bounds), device, list)


def hidden_marks(bounds: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same of boundaries that nobody reads, made on their device; and which sequences have tokens [S]."""
    bounds = bounds.long()
    filled = bounds[1:] > bounds[:-1]
    numbers = torch.arange(1, bounds.shape[0], dtype=torch.int32, device=bounds.device)
    none = torch.zeros(tokens + 1, dtype=torch.int32, device=bounds.device)  # one spare place for those without
    starts = none.index_copy(0, torch.where(filled, bounds[:-1], tokens), numbers)[:tokens]
    ends = none.index_copy(0, torch.where(filled, bounds[1:] - 1, tokens), numbers)[:tokens]
    return starts[None, :, None], ends, filled


def _remembered(
    make: Callable[..., Made], bounds: Bounds, device: torch.device, tensors: Callable[[Made], list[Tensor]]
) -> Made:
    """make(bounds, device), once for each way of packing."""
    if torch.compiler.is_compiling():
        return make(bounds, device)
    key = (make, bounds, device)
    if key not in _places:
        with torch.inference_mode(False):
            found = make(bounds, device)
        if any(type(x) is not Tensor for x in tensors(found)):
            return found
        while len(_places) >= _KEPT:
            _places.pop(next(iter(_places)))
        _places[key] = found
    return cast(Made, _places[key])


def _marks(bounds: Bounds, device: torch.device) -> tuple[Tensor, Tensor]:
    starts, ends = torch.zeros(2, bounds[-1], dtype=torch.int32)
    numbers = torch.arange(1, len(bounds), dtype=torch.int32)
    starts[list(bounds[:-1])] = numbers
    ends[[b - 1 for b in bounds[1:]]] = numbers
    return starts.to(device)[None, :, None], ends.to(device)


def _batches(bounds: Bounds, device: torch.device) -> list[Batch]:
    groups: dict[int, list[int]] = {}
    for row in range(len(bounds) - 1):
        groups.setdefault((bounds[row + 1] - bounds[row] - 1).bit_length(), []).append(row)
    packed = [rows for _, rows in sorted(groups.items())]
    rows = [row for part in packed for row in part]
    order = torch.tensor(sorted(range(len(rows)), key=rows.__getitem__), device=device)
    return [_batch(bounds, part, order, device) for part in packed]


def _batch(bounds: Bounds, rows: list[int], order: Tensor, device: torch.device) -> Batch:
    starts = torch.tensor([bounds[r] for r in rows], device=device)
    lengths = [bounds[r + 1] - bounds[r] for r in rows]
    counts = torch.tensor(lengths, device=device)
    places = torch.arange(max(lengths), device=device)
    index = starts[:, None] + torch.minimum(places, counts[:, None] - 1)
    valid = None if min(lengths) == max(lengths) else places < counts[:, None]
    return Batch(rows, index, valid, lengths, torch.tensor(rows, device=device), counts, order)


def unpack(parts: list[tuple[Batch, Tensor]]) -> Tensor:
    """Outputs [S, T', ...] of every batch back into one packed row [1, T, ...]."""
    pieces: dict[int, Tensor] = {}
    for batch, y in parts:
        for place, row in enumerate(batch.rows):
            pieces[row] = y[place, : batch.lengths[place]]
    return torch.cat([pieces[row] for row in sorted(pieces)], dim=0).unsqueeze(0)


def reorder(parts: list[tuple[Batch, Tensor]]) -> Tensor:
    """States [S, ...] of every batch in the order of the sequences."""
    return torch.cat([state for _, state in parts], dim=0).index_select(0, parts[0][0].order)
