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

import torch

from dsf.kernels.triton.sizes import power

SEGMENT_CHUNKS, DELTA_SEGMENT_CHUNKS = 24, 64  # fewest chunks that are worth a segment of their own
PIECES, PIECE_CHUNKS = 4, 8  # of a segment that are summed up at once; fewest chunks that are worth one
STRETCH_CHUNKS, DELTA_STRETCH_CHUNKS = 2048, 1280  # chunks that fill the GPU several times over
SHARED_STRETCHES = 4  # of T, of which the gradients of rows that heads share are kept apart by heads
SHARED, ROOMY = 232_448, 160 * 1024  # bytes of shared memory a program of the H200 may have; what the rows below need
PROCESSORS = 132  # of the H200
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Tiles:
    """chunk: rows L; keys: padded N; piece: channels a program; the rest are Triton's launch options.

    gradient_roles: programs that share a chunk's gradients; gradient_keys: keys at a time, where decays differ by key;
    transform_registers: three programs a processor at 168; stretches: of T, of which one's states and adjoint states
    are kept, normal_stretches: where there is a normaliser;
    walk_registers: of a thread, so that three programs of both walks without outputs fit a processor, of decays alone;
    walk_terms: bfloat16 terms of the rows that decays or strengths scale before they are written into states, with the
    delta rule of e, its adjoint and scores, too; state_terms: of a delta rule's states, right sides and their inverse;
    key_terms, where decays differ by key: bfloat16 terms of scores and of the kept e and its adjoint (delta rules), or
    of the rows that are written into states and of the states that are read (no delta rule). With 2, products between
    rows of gradients are in tf32; where transitions are diagonal plus rank one, all products between rows are, and
    their results are kept in two terms or in float16;
    read_terms: there, of e as it is read; wide_states: states are kept in float32 for the backward pass;
    half_states: in float16, three binary digits more than bfloat16 in as many bytes (decays alone: where there is a
    normaliser);
    saved_stages: at most, of the forward walk when it leaves states and entries;
    ahead: walks keep a chunk's values in registers from one chunk before, which shared memory has no third place for;
    pair_warps: of the products between a chunk's rows, for its gradients; entry_warps, entry_piece: of the gradients of
    entries where transitions are diagonal plus rank one; gradient_heads: at most, that share q and k and one chunk's
    programs, whose loads are gradient_stages apart;
    late: a chunk's y is stored while the next one's rows are on their way, which 2 stages ask for at a chunk's end,
    where there are programs enough for two a processor;
    fine: of a delta rule with scalar decays whose walk_terms are 1, two of what errs most: of scores, of e as y reads
    it and as it is kept, of the products between rows of gradients and of rows that the backward pass writes into
    states; dv and ds are made of e's adjoint before it is rounded;
    score_terms: of decays alone, of the products between a chunk's rows, normal_terms: where there is a normaliser;
    sum_stages: of sums of pieces of T.
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
    normal_stretches: int = 1
    walk_registers: int | None = 168
    gradient_heads: int = 8
    gradient_stages: int = 2
    prepare_warps: int = 4
    walk_terms: int = 1
    key_terms: int = 1
    read_terms: int = 1
    wide_states: bool = False
    half_states: bool = False
    saved_stages: int = 3
    ahead: bool = False
    state_terms: int = 1
    entry_warps: int = 8
    entry_piece: int | None = None
    late: bool = False
    sum_stages: int = 2
    score_terms: int = 1
    normal_terms: int = 1
    fine: bool = False


def padded(size: int) -> int:
    """The power of two, at least 16, that holds `size`."""
    return max(16, power(size))


@lru_cache
def limits(device: torch.device) -> tuple[int, int]:
    """(bytes of shared memory that one program may have, processors) of a device; the H200's where there is no GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return SHARED, PROCESSORS
    found = torch.cuda.get_device_properties(device)
    return getattr(found, "shared_memory_per_block_optin", SHARED), found.multi_processor_count


@lru_cache
def tiles(n: int, p: int, dtype: torch.dtype, decay: str, delta: bool, device: torch.device = CPU) -> Tiles:
    """The row of the table for states [n, p]; decay: none, scalar or key, or rank_one: key with corrections."""
    found = _row(n, p, dtype, decay, delta)
    if limits(device)[0] >= ROOMY:
        return found
    if dtype == torch.bfloat16:
        piece = min(64, found.gradient_piece)
        return replace(
            found, chunk=32, walk_stages=2, reverse_stages=2, gradient_piece=piece, gradient_roles=1,
            walk_terms=1 if delta else found.walk_terms, state_terms=1, fine=False, half_states=False,
            sum_stages=2,
        )  # fmt: skip
    if found.keys > 128:
        return replace(found, chunk=16, piece=16, gradient_piece=min(32, found.gradient_piece))
    return found


def _row(n: int, p: int, dtype: torch.dtype, decay: str, delta: bool) -> Tiles:
    keys, narrow, wide = padded(n), 64, 64 if p <= 64 else 128
    if dtype != torch.bfloat16:  # operands are multiplied in float32, or tf32
        return Tiles(32, keys, 32, 4 if keys <= 128 else 8, 2, 64, 8)
    if keys > 128:
        return Tiles(32, keys, narrow, 8, 2, wide, 8)
    if decay == "rank_one":
        return Tiles(
            64, keys, narrow, 8 if keys > 64 else 4, 2, narrow, 8, entry_warps=4, entry_piece=wide, key_terms=2,
        )  # fmt: skip
    stages = 3
    reverse = 2 if delta and decay != "none" and (keys > 64 or decay == "scalar") else stages
    if decay == "scalar" and not delta and keys > 64 and wide <= 64:
        stages = 2  # two programs a processor, of which there are many where one slice holds all channels
    walk = 8 if decay == "key" and delta and keys > 64 else 4
    exact = decay == "key"
    twice = delta and (decay == "none" or (decay == "scalar" and keys == wide == 64))
    half = twice and decay == "scalar"
    roles = 2 if half or (keys > 64 and (decay == "scalar" or (delta and decay == "none"))) else 1
    several = (6 if delta else 4 if wide <= 64 else 2) if decay == "scalar" and keys > 64 else 1
    return Tiles(
        64, keys, narrow, walk, stages, wide, 4, reverse_stages=reverse, gradient_roles=roles,
        transform_registers=168, stretches=several, normal_stretches=4 if decay == "scalar" and keys > 64 else 1,
        walk_terms=2 if twice or not delta else 1, state_terms=2 if twice and decay == "none" else 1,
        key_terms=2 if exact else 1, read_terms=2 if exact and keys <= 64 else 1, wide_states=exact and not delta,
        ahead=exact,
        saved_stages=2 if exact and delta else stages,
        late=decay in ("none", "scalar") and not delta and keys > 64, sum_stages=3,
        score_terms=2 if decay == "scalar" and wide <= 64 < keys else 1, normal_terms=2,
        fine=decay == "scalar" and delta and keys > 64, half_states=not delta or half,
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


def score_terms(found: Tiles) -> int:
    """Terms of a delta rule's scores as y has them, where decays do not differ by key."""
    return 2 if found.fine else found.walk_terms


def lower(chunk: int) -> int:
    """Entries of a lower triangle [chunk, chunk] as the transform writes it: whole blocks of columns (tiles.py)."""
    return chunk // 2 * (chunk + min(16, chunk // 2))


def pitch(found: Tiles, scored: bool) -> int:
    """Entries a chunk of what the transform writes."""
    return lower(found.chunk) * (found.state_terms + (score_terms(found) if scored else 0))
