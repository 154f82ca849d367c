"""Packed sequences: cu_seqlens cut into batches of similar length, so that every form handles them unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Sequences of similar length side by side.

    rows: which sequences; index: [S, T] place of each token in the packed row (padding repeats the last one);
    valid: [S, T] bool, or None when no token is padding.
    """

    rows: list[int]
    index: Tensor
    valid: Tensor | None
    lengths: list[int]

    def take(self, timed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Per-token tensors [1, T, ...] -> [S, T', ...]."""
        return {name: x[0][self.index] for name, x in timed.items()}


def batches(bounds: list[int], device: torch.device) -> list[Batch]:
    """Sequences grouped by ⌈log2 length⌉: at most log2 T batches, and padding never doubles the tokens."""
    groups: dict[int, list[int]] = {}
    for row in range(len(bounds) - 1):
        groups.setdefault((bounds[row + 1] - bounds[row] - 1).bit_length(), []).append(row)
    return [_batch(bounds, rows, device) for _, rows in sorted(groups.items())]


def _batch(bounds: list[int], rows: list[int], device: torch.device) -> Batch:
    starts = torch.tensor([bounds[r] for r in rows], device=device)
    lengths = [bounds[r + 1] - bounds[r] for r in rows]
    counts = torch.tensor(lengths, device=device)
    places = torch.arange(max(lengths), device=device)
    index = starts[:, None] + torch.minimum(places, counts[:, None] - 1)
    valid = None if min(lengths) == max(lengths) else places < counts[:, None]
    return Batch(rows, index, valid, lengths)


def unpack(parts: list[tuple[Batch, Tensor]]) -> Tensor:
    """Outputs [S, T', ...] of every batch back into one packed row [1, T, ...]."""
    pieces: dict[int, Tensor] = {}
    for batch, y in parts:
        for place, row in enumerate(batch.rows):
            pieces[row] = y[place, : batch.lengths[place]]
    return torch.cat([pieces[row] for row in sorted(pieces)], dim=0).unsqueeze(0)


def reorder(parts: list[tuple[Batch, Tensor]]) -> Tensor:
    """States [S, ...] of every batch in the order of the sequences."""
    rows = [row for batch, _ in parts for row in batch.rows]
    order = torch.tensor(sorted(range(len(rows)), key=rows.__getitem__), device=parts[0][1].device)
    return torch.cat([state for _, state in parts], dim=0).index_select(0, order)
