"""Tile sizes of the kernels of a layer, by dtype and size: no autotuning, so a shape always takes the same ones."""

from __future__ import annotations

from dataclasses import dataclass

from dsf.kernels.triton.sizes import power

PROGRAMS = 1056  # that a launch should have at least: eight for each multiprocessor of the GPUs that were tried


@dataclass(frozen=True)
class Tile:
    """channels: a program's; rows: tokens that it walks; block: tokens that are loaded at once; warps."""

    channels: int
    rows: int
    block: int
    warps: int


def convolution(widths: tuple[int, ...], tokens: int, batch: int, size: int, taps: int, backward: bool) -> Tile:
    """Of a short convolution of numbers of `size` bytes, into pieces of these widths.

    A lane holds 16 bytes of a row forwards and 8 backwards, where it has the sums for the weights to keep. A run of
    tokens is as long as leaves enough programs; what it reads beyond its own are K - 1 or 2 (K - 1) rows.
    """
    lane = (8 if backward else 16) // size or 1
    channels = min(128 * lane, power(max(widths)))
    warps = max(1, channels // (32 * lane))
    blocks = sum(-(-w // channels) for w in widths)
    rows, least = (256, 16) if backward else (64, 8)
    while rows > least and blocks * batch * -(-tokens // rows) < PROGRAMS:
        rows //= 2
    return Tile(channels, rows, 8, warps)


def norm(group: int, rows: int, ways: int, backward: bool) -> tuple[int, int, int, int]:
    """Of the gated norm of `rows` groups of numbers for each of `ways` weights: (numbers of a group, rounded up; groups
    of a tile; warps; tiles of a program)."""
    width = power(group)
    tile = max(2048 if backward else 4096, width)
    held = power(min(tile // width, rows))
    warps = max(1, min(16, held * width // (512 if backward else 1024)))
    tiles = -(-rows // held)
    return width, held, warps, max(1, tiles * ways // PROGRAMS) if backward else 1
