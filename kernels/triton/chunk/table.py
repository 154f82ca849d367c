"""Tile sizes by structure, sizes, dtype and the GPU's limits: a table, never a search in the user's process.

Filled by hand from measurements on an H200; docs/kernels/ keeps the log, benchmarks/gpu_tiles.py measures a row's
neighbours. Chunks of 64 rows, slices of 64 channels, 4 warps and 3 stages were best for most; wider keys or 4-byte
operands need shorter chunks and fewer stages to fit in registers and shared memory, and so does everything on GPUs that
have less of it (checked against what the compiler asks for there, not timed). Slices never have fewer channels than
here, however few there are: with 16 or 32 beside 64 keys, walks of scaled bfloat16 rows were wrong or read beyond their
tensors with Triton 3.6, and narrow ones with one stage, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from dsf.kernels.triton.chunk.precision import PLAIN, Precision, chosen
from dsf.kernels.triton.sizes import padded

SEGMENT_CHUNKS, DELTA_SEGMENT_CHUNKS = 24, 64  # fewest chunks that are worth a segment of their own
PIECES, PIECE_CHUNKS = 4, 8  # of a segment that are summed up at once; fewest chunks that are worth one
STRETCH_CHUNKS, DELTA_STRETCH_CHUNKS = 2048, 1280  # chunks that fill the GPU several times over
SHARED_STRETCHES = 4  # of T, of which the gradients of rows that heads share are kept apart by heads
SHARED, ROOMY = 232_448, 160 * 1024  # bytes of shared memory a program of the H200 may have; what the rows below need
PROCESSORS = 132  # of the H200
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Tiles:
    """One row of the table: sizes of tiles, precision, and Triton's options (warps, pipeline stages, registers).

    chunk: tokens L of a chunk; keys: N padded; precision: dsf.kernels.triton.chunk.precision.
    transform_registers, walk_registers: the most of a thread in a delta rule's transform, and, of decays alone, in the
    sums of pieces of T and where both walks share a launch; with 168 three programs fit a processor.
    Walks. piece: channels of a program; saved_stages: the most stages where states and entries are stored; ahead:
    values are loaded into registers a chunk early, where shared memory has no room for a third stage; late: a chunk's y
    is stored while the next chunk's rows are loaded, so that a walk of two stages does not wait for both in turn. It
    pays where two programs share a processor.
    exact: how products of float32 numbers are made (`tiles.arithmetic`).
    sum_stages: of the sums of pieces of T. prepare_warps: of the preparation where decays differ by key.
    Gradients. gradient_piece: channels of a program; gradient_keys: its keys, where decays differ by key;
    gradient_roles: programs for a chunk (2: one for reads, one for writes); gradient_heads: the most heads with the
    same q and k that one program sums, in a loop of gradient_stages; pair_warps: of the products between rows, where
    decays differ by key; entry_warps, entry_piece: of the gradients of entries, where transitions are diagonal plus
    rank one (None: piece).
    stretches: the most parts of T that the backward pass takes one after the other. Memory then holds the states and
    adjoint states of one part.
    """

    chunk: int
    keys: int
    piece: int
    walk_warps: int
    walk_stages: int
    gradient_piece: int
    gradient_warps: int
    transform_warps: int = 4
    reverse_stages: int = 2
    gradient_roles: int = 1
    transform_registers: int | None = None
    gradient_keys: int = 64
    pair_warps: int = 4
    stretches: int = 1
    walk_registers: int | None = 168
    gradient_heads: int = 8
    gradient_stages: int = 2
    prepare_warps: int = 4
    precision: Precision = PLAIN
    saved_stages: int = 3
    ahead: bool = False
    entry_warps: int = 8
    entry_piece: int | None = None
    late: bool = False
    sum_stages: int = 2
    exact: Literal["ieee", "tf32x3"] = "ieee"


@lru_cache
def limits(device: torch.device) -> tuple[int, int]:
    """(bytes of shared memory that one program may have, processors) of a device; the H200's where there is no GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return SHARED, PROCESSORS
    found = torch.cuda.get_device_properties(device)
    return getattr(found, "shared_memory_per_block_optin", SHARED), found.multi_processor_count


@lru_cache
def tiles(
    n: int, p: int, dtype: torch.dtype, decay: str, delta: bool, device: torch.device = CPU, normal: bool = False,
    precise: bool = False,
) -> Tiles:  # fmt: skip
    """The row of the table for states [n, p], without a GPU that of the H200.

    decay: none, scalar or key, or rank_one: by key, with corrections that are no delta rule; normal: a normaliser is
    computed beside it; precise: as Program has it.
    """
    found, roomy = _row(n, p, dtype, decay, delta, normal), limits(device)[0] >= ROOMY
    found = replace(found, precision=chosen(found.keys, p, dtype, decay, delta, normal, roomy, precise))
    if roomy:
        return found
    if dtype == torch.bfloat16:
        piece = min(64, found.gradient_piece)
        return replace(
            found, chunk=32, walk_stages=2, reverse_stages=2, gradient_piece=piece, gradient_roles=1, sum_stages=2
        )
    if found.keys > 128:
        return replace(found, chunk=16, piece=16, gradient_piece=min(32, found.gradient_piece))
    return replace(found, piece=32, exact="ieee")


def _row(n: int, p: int, dtype: torch.dtype, decay: str, delta: bool, normal: bool) -> Tiles:
    """The row of the H200, but for its precision."""
    keys, narrow, wide = padded(n), 64, 64 if p <= 64 else 128
    if dtype != torch.bfloat16:  # operands have 4 bytes
        if keys > 128:
            return Tiles(32, keys, 32, 8, 2, 64, 8)
        if dtype != torch.float32 or decay in ("key", "rank_one"):  # gradients of decays by key cancel
            return Tiles(32, keys, 32, 4, 2, 64, 8)
        narrow = 32 if p <= 32 or (delta and decay == "scalar") else narrow
        return Tiles(32, keys, narrow, 4, 2, 64, 8, exact="tf32x3")
    if keys > 128:
        if decay in ("key", "rank_one"):
            return Tiles(32, keys, narrow, 8, 2, wide, 8)
        return Tiles(64, keys, narrow, 4, 2, wide, 8, gradient_roles=2, saved_stages=2)
    if decay == "rank_one":
        return Tiles(64, keys, narrow, 8 if keys > 64 else 4, 2, narrow, 8, entry_warps=4, entry_piece=wide)
    stages = 3
    reverse = 2 if delta and decay != "none" and (keys > 64 or decay == "scalar") else stages
    if decay == "scalar" and not delta and keys > 64 and wide <= 64:
        stages = 2  # two programs a processor, of which there are many where one slice holds all channels
    walk = 8 if decay == "key" and delta and keys > 64 else 4
    half = decay == "scalar" and delta and keys == wide == 64
    roles = 2 if half or (keys > 64 and (decay == "scalar" or (delta and decay == "none"))) else 1
    several = (6 if delta else 4 if normal or wide <= 64 else 2) if decay == "scalar" and keys > 64 else 1
    return Tiles(
        64, keys, narrow, walk, stages, wide, 4, reverse_stages=reverse, gradient_roles=roles,
        transform_registers=168, stretches=several, ahead=decay == "key",
        saved_stages=2 if decay == "key" and delta else stages,
        late=decay in ("none", "scalar") and not delta and keys > 64, sum_stages=3,
    )  # fmt: skip


def segments(chunks: int, programs: int, delta: bool, processors: int = PROCESSORS) -> int:
    """Into how many segments to cut T when `programs` alone leave processors idle: no more than fit at once.

    A delta rule's transitions through the segments are walked too, so that fewer than four or short ones do not pay.
    """
    if programs >= 0.7 * processors:
        return 1
    if delta:
        count = min(processors // programs, chunks // DELTA_SEGMENT_CHUNKS)
        return count if count >= 4 else 1
    return max(1, min(2 * processors // programs, chunks // SEGMENT_CHUNKS))


def finer(span: int) -> int:
    """Into how many pieces to cut a segment of `span` chunks, which are summed up at once, before it is walked."""
    return max(1, min(PIECES, span // PIECE_CHUNKS))


def sharing(heads: int, chunks: int, most: int, processors: int = PROCESSORS) -> int:
    """How many of `heads` that share q and k one program takes in turn, of `chunks` in all heads and sequences."""
    count = 1
    while 2 * count <= most and heads % (2 * count) == 0 and chunks >= 8 * count * processors:
        count *= 2
    return count


def stretches(chunks: int, most: int, delta: bool = False) -> int:
    """In how many stretches of T the backward pass uses its adjoint states, of `chunks` in all heads and sequences."""
    return max(1, min(most, chunks // (DELTA_STRETCH_CHUNKS if delta else STRETCH_CHUNKS)))


def lower(chunk: int) -> int:
    """Entries of a lower triangle [chunk, chunk] as the transform writes it: whole blocks of columns (tiles.py)."""
    return chunk // 2 * (chunk + min(16, chunk // 2))
