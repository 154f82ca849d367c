"""Tile sizes of the fused scan: a table by state entries, filled from measurements (benchmarks/gpu_scan.py)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from dsf.kernels.triton.sizes import power

LANES = 32
BLOCK = 16  # state entries up to which forward passes by entry pay only where no entry needs a function
SKIM = 2  # tiles between loading one and its use in summaries (of one warp, a token a tile)
ENOUGH = 4  # warps a processor for summaries by entry, each of which stops when the state it started from is forgotten
CROWD = 16  # most warps a processor that share entries in summaries by entry: all that registers leave room for
FEW = 4  # entries that it takes to be worth a program, which computes again what has no Key axis
SUMMARIES = 32  # the same of other summaries, some of them after others
FULL = 6  # one-warp programs a processor that need no segments beside them


Row = tuple[int, int, int, int, int, int, int, int, int]


@dataclass(frozen=True)
class Tile:
    """K tokens by NB state entries by BP channels; V neighbouring channels a thread; the warps of a program.

    M: tokens between two states saved for the adjoint, U: tiles between two that it keeps for itself. span: fewest
    tokens worth a segment of their own. busy: warps a processor is to have before time is cut into segments.
    registers: most that a thread may take (0: as many as it likes). A vector state's tile has G runs of K tokens
    instead of NB state entries. stages: tiles whose loads are under way, where a state is saved for every tile. skim:
    tiles between loading one and its use in summaries.
    """

    K: int
    NB: int
    BP: int
    V: int
    warps: int
    M: int
    U: int
    span: int
    busy: int
    registers: int
    G: int = 1
    stages: int = 1
    skim: int = 1

    @property
    def chunk(self) -> int:
        """Tokens that the adjoint takes from the states saved at one time."""
        return max(self.M, self.K * self.G)


# State entries up to -> (K, BP, V, warps, M, U, span, busy, registers), forward and adjoint. With a Key axis K is 1:
# longer tiles make Triton spread tokens over lanes, which costs shuffles.
FORWARD: dict[int, Row] = {
    1: (4, 512, 4, 4, 64, 1, 64, 32, 0),
    16: (1, 32, 1, 1, 32, 1, 128, 16, 128),
    32: (1, 32, 1, 2, 32, 1, 128, 16, 128),
    64: (1, 32, 1, 4, 32, 1, 128, 16, 128),
    128: (1, 32, 1, 8, 32, 1, 128, 16, 128),
    256: (1, 32, 1, 16, 32, 1, 128, 16, 128),
}
ADJOINT: dict[int, Row] = {
    1: (4, 512, 4, 4, 64, 1, 64, 16, 0),
    16: (1, 32, 1, 1, 16, 2, 128, 8, 0),
    32: (1, 32, 1, 2, 32, 2, 128, 8, 0),
    64: (1, 32, 1, 4, 32, 2, 128, 8, 0),
    128: (1, 32, 1, 8, 32, 2, 128, 8, 0),
    256: (1, 32, 1, 16, 32, 1, 128, 8, 0),
}

# Forward passes that take one state entry after the other: (K, V, M, span, busy, registers).
ENTRIES = (16, 2, 32, 128, 8, 0)
# The adjoint where no entry waits for another's: (K, M, busy, registers), a program of one warp.
BACKWARD = (8, 64, 16, 128)
DEAR = 16  # its M where an entry takes several functions, which a walk to the states computes again
AHEAD = 4  # entries that its walk to the states takes at a time
MOST = 2  # states an entry that it keeps in shared memory: more leave the L1 less
SYSTEM = 1024  # bytes of shared memory that every program takes besides its own
# What is left of a state at which summaries by entry of 16-bit inputs take it for forgotten. Others wait for zero.
FORGOTTEN = 2.0**-48

# A vector state's tiles in programs of one warp: (tokens, tiles of them under way), by whether a step computes next to
# nothing.
ALONE: dict[bool, tuple[int, int]] = {True: (16, 3), False: (8, 3)}
BUSY = 8  # their warps a processor, as `Tile.busy`: registers leave no room for more
# Its tiles of several runs where sequences alone do not fill the GPU so, forward and adjoint: (K, G, BP, V, warps,
# stages, busy, registers). G = 32 V warps / BP: runs take all lanes and warps that channels leave, or Triton would
# spread the K tokens of a run over lanes. K > 1, and the forward K divides the adjoint's.
Runs = tuple[int, int, int, int, int, int, int, int]
RUNS_FORWARD: dict[bool, Runs] = {True: (8, 4, 64, 2, 4, 3, 0, 128), False: (8, 4, 64, 2, 4, 3, 8, 0)}
RUNS_ADJOINT: dict[bool, Runs] = {True: (8, 4, 64, 2, 4, 3, 8, 128), False: (8, 4, 64, 2, 4, 3, 8, 0)}


def tile(table: dict[int, Row], n: int, p: int) -> Tile:
    """The row of the table for n state entries, made narrower where there are few channels."""
    padded = power(n)
    K, BP, V, warps, M, U, span, busy, registers = table[min(size for size in table if size >= padded)]
    while BP > LANES and BP // 2 >= p:
        BP //= 2
        if warps > 1:
            warps //= 2
        else:
            V = max(V // 2, 1)
    skim = SKIM if warps == 1 and padded > 1 else 1
    return Tile(K, padded, BP, V, warps, M, U, span, busy, registers, skim=skim)


def by_entry(p: int) -> Tile:
    """The tile of forward passes that take K tokens for one state entry after the other."""
    K, V, M, span, busy, registers = ENTRIES
    while V > 1 and LANES * V // 2 >= p:
        V //= 2
    return Tile(K, 1, LANES * V, V, 1, M, 1, span, busy, registers)


def backward(t: Tile, dear: bool = False) -> Tile:
    """A tile of the adjoint that takes single state entries one after the other, tokens in registers.

    dear: an entry takes several functions.
    """
    K, M, busy, registers = BACKWARD
    M = DEAR if dear else M
    return replace(t, K=K, NB=1, BP=min(t.BP, LANES), V=1, warps=1, M=M, U=1, busy=busy, registers=registers, skim=1)


def shared_states(t: Tile, n: int, keyed: int, keys: int, device: torch.device) -> int:
    """States an entry that a program of `backward` keeps in shared memory, with all that its rows have else.

    0 where there is no room. keyed: sums for Params, and numbers made of them; keys: inputs of a Key axis alone.
    """
    if n * t.K % t.BP:
        return 0
    room = _shared(device) // t.busy - SYSTEM - 4 * n * keys * t.K
    found = min(room // (4 * n * t.BP) - 1 - 2 * keyed, t.M // t.K, MOST)
    return max(found, 0)


def narrow(t: Tile, light: bool) -> Tile:
    """A vector state's tile in programs of one warp: many small ones, whose tokens wait in shared memory.

    A state is saved for every tile, so that the adjoint walks none again. light: the step computes next to nothing, so
    that more tokens fit the registers.
    """
    K, stages = ALONE[light]
    return replace(t, K=K, BP=2 * LANES, V=2, warps=1, M=K, U=1, busy=BUSY, stages=stages)


def vector(adjoint: bool, p: int, rows: int, light: bool, device: torch.device) -> Tile:
    """The tile of a vector state, of a call with `rows` states side by side."""
    t = tile(ADJOINT if adjoint else FORWARD, 1, p)
    alone = narrow(t, light)
    if p < alone.BP:
        return t
    K, G, BP, V, warps, stages, busy, registers = (RUNS_ADJOINT if adjoint else RUNS_FORWARD)[light]
    few = -(-p // BP) * rows * warps * 2 <= BUSY * _processors(device)
    if -(-p // alone.BP) * rows >= FULL * _processors(device) or (few and not light):
        return alone
    if few and not busy:  # more programs, rather than segments
        G, BP, warps = 4 * G, BP // 2, 2 * warps
    return Tile(K, 1, BP, V, warps, K, 1, K * G, busy, registers, G, stages)


def segments(tokens: int, programs: int, t: Tile, device: torch.device) -> tuple[int, int]:
    """(how many, tokens each): as many as keep the GPU busy, each a multiple of M and at least `span` tokens."""
    wanted = t.busy * _processors(device) // (programs * t.warps)
    if wanted < 2 or tokens < 2 * t.span:
        return 1, tokens
    span = max(t.span, -(-tokens // wanted))
    span = -(-span // t.chunk) * t.chunk
    return -(-tokens // span), span


def finer(count: int, span: int, programs: int, t: Tile, warps: int, device: torch.device) -> int:
    """Into how many pieces each of all but one segments is cut: so that summaries have these warps a processor."""
    wanted = -(-warps * _processors(device) // (programs * (count - 1) * t.warps))
    pieces = 1
    while pieces < wanted and span % (2 * pieces * t.chunk) == 0 and span >= 2 * pieces * t.span:
        pieces *= 2
    return pieces


def shares(n: int, programs: int, device: torch.device) -> int:
    """How many programs of one warp share the n entries of what `programs` of them would do, in summaries by entry.

    Pieces of time are no way to have more of them: each walks until what entered is forgotten.
    """
    found = 1
    while n % (2 * found) == 0 and n >= 2 * found * FEW and 2 * found * programs <= CROWD * _processors(device):
        found *= 2
    return found


@functools.cache
def _shared(device: torch.device) -> int:
    """Bytes of shared memory a processor (without a GPU, as if on an H200)."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 228 << 10
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


PROCESSORS = 132  # of an H100 or H200, where these tables were measured


@functools.cache
def _processors(device: torch.device) -> int:
    """Of the GPU, or of an H200 where there is none; one where the interpreter runs, on the CPU."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 1 if device.type == "cpu" else PROCESSORS
