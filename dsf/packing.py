"""Packed sequences: cu_seqlens cut into batches of similar length, so that every form handles them unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_KEPT = 16  # ways of packing whose places are remembered: a CUDA graph may not copy them from the host
_places: dict[tuple[tuple[int, ...], torch.device], list[Batch]] = {}


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


def batches(bounds: list[int], device: torch.device) -> list[Batch]:
    """Sequences grouped by ⌈log2 length⌉: at most log2 T batches, and padding never doubles the tokens."""
    if torch.compiler.is_compiling():
        return _batches(bounds, device)
    key = (tuple(bounds), device)
    if key not in _places:
        with torch.inference_mode(False):
            found = _batches(bounds, device)
        if any(type(x) is not Tensor for b in found for x in (b.index, b.order)):
            return found
        while len(_places) >= _KEPT:
            _places.pop(next(iter(_places)))
        _places[key] = found
    return _places[key]


def _batches(bounds: list[int], device: torch.device) -> list[Batch]:
    groups: dict[int, list[int]] = {}
    for row in range(len(bounds) - 1):
        groups.setdefault((bounds[row + 1] - bounds[row] - 1).bit_length(), []).append(row)
    packed = [rows for _, rows in sorted(groups.items())]
    rows = [row for part in packed for row in part]
    order = torch.tensor(sorted(range(len(rows)), key=rows.__getitem__), device=device)
    return [_batch(bounds, part, order, device) for part in packed]


def _batch(bounds: list[int], rows: list[int], order: Tensor, device: torch.device) -> Batch:
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
