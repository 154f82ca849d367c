"""Tile sizes of the kernels of a layer, by dtype and size: no autotuning, so a shape always takes the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsf.kernels.triton.sizes import power

LANES = 32  # of a warp
FEW = 16  # programs of a launch that takes as long as one of them
TAPS = 8  # whose gradients a program of depthwise_gradient sums
SOME = 128  # programs that leave next to no multiprocessor of an H100 or H200 without one
PLAIN = 1024  # numbers of a group that nothing else decides
PROGRAMS = 1056  # fewest programs of a launch: eight for each multiprocessor of an H100 or H200


@dataclass(frozen=True)
class Tile:
    """channels and rows (tokens) of a program; block: tokens that are loaded together; warps."""

    channels: int
    rows: int
    block: int
    warps: int


def convolution(widths: tuple[int, ...], tokens: int, batch: int, size: int, taps: int, backward: bool) -> Tile:
    """The tile of a short convolution of numbers of `size` bytes, with pieces of these widths.

    A lane holds 16 bytes of a row forward, and 8 backward, where it also holds the sums for the weights. A run of
    tokens is as long as possible with enough programs; it reads K - 1 (backward 2 (K - 1)) further rows.
    """
    lane = (8 if backward else 16) // size or 1
    channels = min(128 * lane, power(max(widths)))
    warps = max(1, channels // (32 * lane))
    blocks = sum(-(-w // channels) for w in widths)
    rows, least = (256, 16) if backward else (64, 8)
    while rows > least and blocks * batch * -(-tokens // rows) < PROGRAMS:
        rows //= 2
    return Tile(channels, rows, 8, warps)


def convolution_step(widths: tuple[int, ...], heads: tuple[int, ...]) -> tuple[int, int]:
    """(channels, warps) of a program of the convolution of one token: a channel a lane, so that no lane needs what
    another one has loaded of taps and states."""
    channels = max(LANES, min(256, power(max(widths))), *heads)
    return channels, channels // LANES


def depthwise(channels: int, size: int) -> Tile:
    """The tile of a convolution of many taps, of numbers of `size` bytes: rows of 128 bytes, runs of `block` tokens."""
    return Tile(min(128 // size, power(channels)), 128, 8, 4)


def depthwise_gradient(shape: Sequence[int], size: int, taps: int) -> Tile:
    """That of the gradient of the taps, x of this shape: 8 runs of `block` tokens, shorter where programs are few."""
    width, run = min(128 // size, power(shape[-1])), 128
    programs = -(-taps // TAPS) * -(-shape[-1] // width) * shape[0]
    while run > TAPS and programs * -(-shape[1] // (8 * run)) < PROGRAMS:
        run //= 2
    return Tile(width, 8 * run, run, 4)


def norm(group: int, rows: int, ways: int, backward: bool) -> tuple[int, int, int, int]:
    """Of the gated norm of `rows` groups of numbers for each of `ways` weights: (numbers of a group, rounded up; groups
    of a tile; warps; tiles of a program)."""
    width = power(group)
    tile = max(2048 if backward else 4096, width)
    held = power(min(tile // width, rows))
    tiles = -(-rows // held)
    lanes = 512 if backward else 1024 if tiles * ways > FEW else 128  # numbers of a warp: many, or soon done
    warps = max(1, min(16, held * width // lanes))
    return width, held, warps, max(1, tiles * ways // PROGRAMS) if backward else 1


@dataclass(frozen=True)
class Heads:
    """Of the rotary kernel: pairs of a head, rounded up; tokens and heads of a program; warps."""

    width: int
    rows: int
    heads: int
    warps: int


def rotary(half: int, rows: int) -> Heads:
    """Of `rows` tokens with heads of `half` pairs: 1,024 pairs of a head at once, 8 a lane."""
    width = power(half)
    held = power(min(max(1, 1024 // width), rows))
    return Heads(width, held, 4, max(1, min(4, held * width // 256)))


def mixture(rows: int, channels: int, backward: bool) -> tuple[int, int, int]:
    """Of mixtures of `rows` tokens: (tokens and channels of a program; warps). Backward a program leaves a row of sums,
    so it has more tokens."""
    held, block = power(min(64 if backward else 4, rows)), power(min(32 if backward else 512, channels))
    return held, block, max(1, min(4, held * block // 512))


def part(width: int) -> int:
    """Channels of a group where any that divide `width` would do."""
    return next(p for p in (PLAIN, 512, 256, 128, 64, 32, 16, 8, width) if width % p == 0)


def reversal(group: int, rows: int) -> tuple[int, int, int]:
    """Of sums of both directions: (channels of a group, rounded up; groups of a program; warps)."""
    width = power(group)
    held = power(min(max(1, 4096 // width), rows))
    return width, held, max(1, min(4, held * width // 256))


def product(outputs: int, width: int) -> tuple[int, int]:
    """Of a product of few rows with a matrix [outputs, ·] of this padded width: (outputs of a program, warps), by
    measurements on an H200 (docs/kernels/decode.md). No two lanes have the same number of a row, since lanes that have
    may round a sum differently."""
    block = 8192 // width if width <= 1024 else max(1, min(4, 32768 // width))
    while block > 1 and outputs < SOME * block:
        block //= 2
    return block, min(4 if block * width <= 8192 else 8, width // LANES)
