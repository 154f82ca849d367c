"""Tile sizes of the fused scan by number of state entries, measured on an H200 (benchmarks/gpu_scan.py).

*By entry* are kernels that process one state entry after the other (entries.py); *light* is a step that computes next
to nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from dsf.kernels.triton.sizes import power

LANES = 32
BLOCK = 16  # with no more state entries, forward passes go by entry only where no entry needs a special function
SKIM = 2  # tiles between the load of a tile and its use in summaries (programs of one warp, one token a tile)
ENOUGH = 4  # warps a processor for summaries by entry, which stop once the state they started from has decayed
CROWD = 16  # most warps a processor that share the entries of summaries by entry; the registers suffice for no more
FEW = 4  # fewest entries for such a program, which repeats the work without a Key axis
SUMMARIES = 32  # warps a processor for other summaries, not all of which run at once
FULL = 6  # one-warp programs a processor from which on time is not cut into segments


Row = tuple[int, int, int, int, int, int, int, int, int]


@dataclass(frozen=True)
class Tile:
    """K tokens by NB state entries by BP channels; V neighbouring channels a thread; warps: of a program.

    M: tokens between two states stored for the adjoint; U: tiles between two states that the adjoint itself stores.
    span: fewest tokens of a segment. busy: warps a processor below which time is cut into segments. registers: most
    that a thread may have (0: no limit). G: runs of K tokens in a vector state's tile, which has no NB. stages: tiles
    in flight, where a state is stored for every tile. skim: tiles between the load of a tile and its use in summaries.
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
        """Tokens between two stored states, which the adjoint processes from the first of them."""
        return max(self.M, self.K * self.G)


# {most state entries: (K, BP, V, warps, M, U, span, busy, registers)}, forward and adjoint. With a Key axis K is 1:
# with longer tiles Triton spreads tokens over lanes, which costs shuffles.
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

# Forward passes by entry: (K, V, M, span, busy, registers).
ENTRIES = (16, 2, 32, 128, 8, 0)
# The adjoint by entry, programs of one warp: (K, M, busy, registers).
BACKWARD = (8, 64, 16, 128)
DEAR = 16  # its M where an entry takes several special functions, since recomputing states repeats them
AHEAD = 4  # entries for which it recomputes states at a time
MOST = 2  # most states an entry in shared memory; more would take too much from the L1
SYSTEM = 1024  # bytes of shared memory that the system reserves for every program
# Summaries by entry of 16-bit inputs stop when this share of a state is left; others stop at zero.
FORGOTTEN = 2.0**-48

# A vector state's tiles in programs of one warp: {whether a step is light: (tokens, tiles in flight)}.
ALONE: dict[bool, tuple[int, int]] = {True: (16, 3), False: (8, 3)}
BUSY = 8  # their Tile.busy; the registers suffice for no more warps
# A vector state's tiles of several runs, where such programs do not fill the GPU, forward and adjoint: (K, G, BP, V,
# warps, stages, busy, registers). G = 32 V warps / BP: runs fill all lanes and warps left by the channels, since Triton
# would otherwise spread the K tokens of a run over lanes. K > 1, and the forward K divides the adjoint's.
Runs = tuple[int, int, int, int, int, int, int, int]
RUNS_FORWARD: dict[bool, Runs] = {True: (8, 4, 64, 2, 4, 3, 0, 128), False: (8, 4, 64, 2, 4, 3, 8, 0)}
RUNS_ADJOINT: dict[bool, Runs] = {True: (8, 4, 64, 2, 4, 3, 8, 128), False: (8, 4, 64, 2, 4, 3, 8, 0)}


def tile(table: dict[int, Row], n: int, p: int) -> Tile:
    """The tile for n state entries and p channels, narrower where there are few channels."""
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


def mixing(adjoint: bool, n: int, p: int, turned: bool) -> Tile:
    """The tile where tokens mix the entries of a channel, of one token each. turned: entries in pairs, whose cosines
    and sines leave the adjoint no registers for states between those in scratch memory."""
    t = tile(ADJOINT if adjoint else FORWARD, max(n, 2), p)
    return replace(t, U=1) if adjoint and turned else t


def by_entry(p: int) -> Tile:
    """The tile of forward passes by entry."""
    K, V, M, span, busy, registers = ENTRIES
    while V > 1 and LANES * V // 2 >= p:
        V //= 2
    return Tile(K, 1, LANES * V, V, 1, M, 1, span, busy, registers)


def backward(t: Tile, dear: bool = False) -> Tile:
    """The tile of the adjoint by entry, with tokens in registers. dear: an entry takes several special functions."""
    K, M, busy, registers = BACKWARD
    M = DEAR if dear else M
    return replace(t, K=K, NB=1, BP=min(t.BP, LANES), V=1, warps=1, M=M, U=1, busy=busy, registers=registers, skim=1)


def shared_states(t: Tile, n: int, keyed: int, keys: int, device: torch.device) -> int:
    """How many states an entry a program of `backward` keeps in shared memory, with the rest of its rows; 0 for none.

    keyed: how many held values have a Key axis, each with its gradient's sum; keys: inputs with a Key axis alone.
    """
    if n * t.K % t.BP:
        return 0
    room = _shared(device) // t.busy - SYSTEM - 4 * n * keys * t.K
    found = min(room // (4 * n * t.BP) - 1 - 2 * keyed, t.M // t.K, MOST)
    return max(found, 0)


def narrow(t: Tile, light: bool) -> Tile:
    """A vector state's tile in many small programs of one warp, with loads in flight to shared memory.

    A state is stored for every tile, so that the adjoint recomputes none. light: more tokens fit the registers.
    """
    K, stages = ALONE[light]
    return replace(t, K=K, BP=2 * LANES, V=2, warps=1, M=K, U=1, busy=BUSY, stages=stages)


def vector(adjoint: bool, p: int, rows: int, light: bool, device: torch.device) -> Tile:
    """The tile of a vector state, for a call with `rows` states (batch x heads)."""
    t = tile(ADJOINT if adjoint else FORWARD, 1, p)
    alone = narrow(t, light)
    if p < alone.BP:
        return t
    K, G, BP, V, warps, stages, busy, registers = (RUNS_ADJOINT if adjoint else RUNS_FORWARD)[light]
    few = -(-p // BP) * rows * warps * 2 <= BUSY * _processors(device)
    if -(-p // alone.BP) * rows >= FULL * _processors(device) or (few and not light):
        return alone
    if few and not busy:  # more programs instead of segments
        G, BP, warps = 4 * G, BP // 2, 2 * warps
    return Tile(K, 1, BP, V, warps, K, 1, K * G, busy, registers, G, stages)


def segments(tokens: int, programs: int, t: Tile, device: torch.device) -> tuple[int, int]:
    """(number of segments, tokens of each): enough to fill the GPU, multiples of t.chunk, at least t.span tokens."""
    wanted = t.busy * _processors(device) // (programs * t.warps)
    if wanted < 2 or tokens < 2 * t.span:
        return 1, tokens
    span = max(t.span, -(-tokens // wanted))
    span = -(-span // t.chunk) * t.chunk
    return -(-tokens // span), span


def finer(count: int, span: int, programs: int, t: Tile, warps: int, device: torch.device) -> int:
    """Pieces of each segment but one, so that summaries have `warps` warps a processor."""
    wanted = -(-warps * _processors(device) // (programs * (count - 1) * t.warps))
    pieces = 1
    while pieces < wanted and span % (2 * pieces * t.chunk) == 0 and span >= 2 * pieces * t.span:
        pieces *= 2
    return pieces


def shares(n: int, programs: int, device: torch.device) -> int:
    """How many programs of one warp share n entries in summaries by entry, where there are `programs` without sharing.

    Shorter pieces of time would not help, since each piece is walked until the entering state has decayed.
    """
    found = 1
    while n % (2 * found) == 0 and n >= 2 * found * FEW and 2 * found * programs <= CROWD * _processors(device):
        found *= 2
    return found


@functools.cache
def _shared(device: torch.device) -> int:
    """Bytes of shared memory of a processor; those of an H200 without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 228 << 10
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


PROCESSORS = 132  # of an H100 or H200, where these tables were measured


@functools.cache
def _processors(device: torch.device) -> int:
    """Processors of the GPU; 132 without a GPU, 1 for the interpreter on a CPU."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 1 if device.type == "cpu" else PROCESSORS
