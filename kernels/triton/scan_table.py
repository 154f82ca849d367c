"""Tile sizes of the fused scan: a table by state entries, filled from measurements (benchmarks/gpu_scan.py)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

LANES = 32


@dataclass(frozen=True)
class Tile:
    """K tokens by NB state entries by BP channels; V channels a thread; the warps of a program; M, SPAN: below.

    M: tokens between two states saved for the adjoint. SPAN: fewest tokens worth a segment of their own.
    """

    K: int
    NB: int
    BP: int
    V: int
    warps: int
    M: int
    SPAN: int


# State entries up to -> (K, BP, V, warps, M, SPAN), forward and adjoint. With a Key axis K is 1: longer tiles make
# Triton spread tokens over lanes, which costs shuffles.
FORWARD = {
    1: (4, 256, 2, 4, 64, 64),
    16: (1, 64, 1, 1, 16, 128),
    32: (1, 32, 1, 2, 16, 128),
    64: (1, 32, 1, 4, 32, 128),
    128: (1, 32, 1, 8, 32, 128),
    256: (1, 32, 1, 16, 32, 128),
}
ADJOINT = {
    1: (2, 256, 2, 4, 64, 64),
    16: (1, 64, 1, 1, 16, 128),
    32: (1, 32, 1, 2, 16, 128),
    64: (1, 32, 1, 4, 32, 128),
    128: (1, 32, 1, 8, 32, 128),
    256: (1, 32, 1, 16, 32, 128),
}
LARGEST = max(FORWARD)


def tile(table: dict[int, tuple[int, int, int, int, int, int]], n: int) -> Tile:
    """The row of the table for n state entries."""
    padded = 1 << (n - 1).bit_length()
    K, BP, V, warps, M, span = table[min(size for size in table if size >= padded)]
    return Tile(K, padded, BP, V, warps, M, span)


def segments(tokens: int, programs: int, t: Tile, device: torch.device) -> tuple[int, int]:
    """(how many, tokens each): as many as fill the GPU, each a multiple of M and at least SPAN tokens."""
    wanted = -(-_warps(device) // (programs * t.warps))
    if wanted < 2 or tokens < 2 * t.SPAN:
        return 1, tokens
    span = max(t.SPAN, -(-tokens // wanted))
    span = -(-span // t.M) * t.M
    return -(-tokens // span), span


@functools.cache
def _warps(device: torch.device) -> int:
    """Warps that keep the device busy: four a scheduler."""
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return 16 * count
