"""The fused scan: one skeleton for every elementwise system, forward and adjoint.

A program owns `BP` channels of one head and one segment of time. It walks its segment `K` tokens at a time. A tile is
[K, N, BP] with the channels on lanes and tokens and state entries in registers, so the walk inside a tile picks
registers and the sum over N stays inside a thread. A vector state (N = 1) comes in tiles of G runs of K tokens,
[G, K, BP]: each thread walks its run, and an associative scan over the runs joins them. The system itself comes in as
`holes`, functions printed from the spec (dsf.triton.print_scan):

    setup(args, at) -> what depends on Params alone           load(args, at) -> this tile's tokens
    step(tokens, held, at) -> A, B, C, E, D with y = E Σ_n C S + D, each broadcasting to the tile
    fresh(tokens, at) -> which tokens are the first of a packed sequence; None where nothing is packed
    pull(tokens, held, sums, grads, dA, dB, dC, dE, dD, at, sink) -> sums, storing the tokens' gradients
    zeros(NB, BP) -> the Params' sums before the first token
    angle, low(tokens, held, at) -> what mixes the entries of a channel (mixing.py), whose cotangents pull then takes
    finish(args, grads, sums, segment, segments, at): stores the Params' gradients of this program

args, grads: the pointers and strides that the holes use; at: the position of the tile (`At`); sink: the layout
of gradients that programs share (rows for each batch row, and what to add to a token's number). A, B, C, D are in
registers only.

Tokens past the end are loaded as zeros, and what holes compute from zeros may be infinite or NaN. So every value that
is added to those of other tokens is first set to zero there.
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton.structs import Config, derived
from dsf.kernels.triton.tile import take


class At(NamedTuple):
    """The position of a tile: its sequence and head, tokens t0 + t, entries n, channels p, and which of these exist.

    place: number of the block of channels; edge: its first channel.
    """

    batch: Any
    head: Any
    t0: Any
    t: Any
    n: Any
    p: Any
    t_ok: Any
    n_ok: Any
    p_ok: Any
    place: Any
    edge: Any
    T: Any
    H: Any
    P: Any
    N: Any


class Cotangents(NamedTuple):
    """Gradients of y [B, T, H, P] and of packed sequences' final states [sequences, H, N, P]; ends: `packed_ends`.

    dy is None where states are walked instead of cotangents; ends and states are None where nothing is packed.
    """

    dy: Any
    ends: Any
    states: Any


NAMES = (
    "setup", "load", "step", "fresh", "pull", "zeros", "finish", "rate", "kept", "plain", "plain_back", "runs",
    "runs_back", "spread", "whole", "ahead", "parted", "merge", "moved", "passed", "entry", "keys_at", "keys_added",
    "keys_stored", "after", "puts", "blank", "angle", "low",
)  # fmt: skip


class _Asked(Config):
    """What kernels ask of `Holes`."""

    angle: Any
    low: Any

    @derived
    def elementwise(self) -> bool:
        """Whether A acts on each entry alone: tiles of tokens are scanned at once."""
        mixing = (self.angle, self.low)
        return all((x.value if isinstance(x, tl.constexpr) else x) is None for x in mixing)


# The printed functions of a spec, None for those that it does not need.
Holes = make_dataclass("Holes", [(x, Any, None) for x in NAMES], bases=(_Asked,), frozen=True, repr=False)


@dataclass(frozen=True, repr=False)
class Shape(Config):
    """Config fields of scan kernels. A tile: K tokens of NB entries, or G runs of K tokens; BP channels.

    V neighbouring channels share a thread. EVEN: all channels exist. BEFORE: y is of the state before a token's write.
    M: tokens between two states that are saved, U: tiles between two that the adjoint keeps for itself. STAGES, AHEAD:
    tiles whose loads are under way.
    """

    N: int
    K: int
    NB: int
    BP: int
    V: int
    EVEN: bool
    BEFORE: bool
    M: int = 1
    U: int = 1
    G: int = 1
    STAGES: int = 1
    AHEAD: int = 1


@triton.jit
def program(T, H, P, segments, shape: tl.constexpr, BACK: tl.constexpr = False, lane=None):
    """(`At` of the program without tokens, its segment). BACK: the last run of a tile comes first.

    lane: the channels' numbers in their block, or None.
    """
    number = tl.program_id(0)
    blocks = tl.cdiv(P, shape.BP)
    row = (number // (blocks * segments)).to(tl.int64)
    place = (number % blocks).to(tl.int64)
    n = tl.arange(0, shape.NB)[None, :, None]
    if lane is None:
        lane = tl.arange(0, shape.BP)[None, None, :]
    p = tl.multiple_of(place * shape.BP + lane, [1, 1, shape.V])
    p_ok = tl.full((1, 1, shape.BP), True, tl.int1) if shape.EVEN else p < P
    t = numbers(shape.K, shape.G, BACK)
    at = At(row // H, row % H, 0, t, n, p, True, n < shape.N, p_ok, place, place * shape.BP, T, H, P, shape.N)
    return at, (number // blocks) % segments


@triton.jit
def moved(at, t0, t_ok):
    """`at` moved to tokens t0 + t, of which t_ok exist."""
    return At(
        at.batch, at.head, t0, at.t, at.n, at.p, t_ok, at.n_ok, at.p_ok, at.place, at.edge, at.T, at.H, at.P, at.N
    )


@triton.jit
def place_of(at, t0, n, k: tl.constexpr = 0, end=None):
    """`at` for the single token t0 + k and entry n; end: None where the token exists."""
    zero = tl.zeros((1, 1, 1), tl.int32)
    ok = zero == 0
    t = zero.to(tl.int64) + k  # int64, so that its product with a stride is one instruction
    t_ok = ok if end is None else t0 + t < end
    return At(at.batch, at.head, t0, t, n + zero, at.p, t_ok, ok, at.p_ok, at.place, at.edge, at.T, at.H, at.P, at.N)


@triton.jit
def row_of(at):
    """Sequence and head in one number, int64."""
    return at.batch * at.H + at.head


@triton.jit
def state_offset(row, n, at):
    """The offset of entry n of state `row` in [rows, N, P], at a tile's channels."""
    return row * (at.N * at.P) + n * at.P + at.p


@triton.jit
def saved_offset(t0, n, at, M: tl.constexpr):
    """The offset of entry n of the state before token t0, a multiple of M, in [B, H, ⌈T/M⌉, N, P]."""
    return state_offset(row_of(at) * tl.cdiv(at.T, M) + t0 // M, n, at)


@triton.jit
def packed_ends(ends, at):
    """(offsets of final states in [sequences, H, N, P], whether a token is its sequence's last).

    ends: [T], a sequence's number from 1 at its last token, 0 elsewhere.
    """
    number = tl.load(ends + at.t0 + at.t, mask=at.t_ok, other=0)
    return state_offset((number.to(tl.int64) - 1) * at.H + at.head, at.n, at), number > 0


@triton.jit
def given_offset(at):
    """The offset of y of token t0 and a head in [B, T, H, P]."""
    return ((at.batch * at.T + at.t0) * at.H + at.head) * at.P


@triton.jit
def firsts(K: tl.constexpr, G: tl.constexpr, BACK: tl.constexpr = False):
    """The first tokens of the tile's runs, [G, 1, 1], with BACK the last run's first."""
    g = tl.arange(0, G)[:, None, None]
    return (G - 1 - g if BACK else g) * K


@triton.jit
def numbers(K: tl.constexpr, G: tl.constexpr, BACK: tl.constexpr = False):
    """The tile's tokens in order, [K, 1, 1] or run after run [G, K, 1], with BACK the last run first."""
    if G == 1:
        t = tl.arange(0, K)[:, None, None]
    else:
        t = firsts(K, G, BACK) + tl.arange(0, K)[None, :, None]
    return t


@triton.jit
def turns(K: tl.constexpr, G: tl.constexpr):
    """The tokens of a thread along their axis: [K, 1, 1], or [1, K, 1] for runs."""
    return tl.arange(0, K)[:, None, None] if G == 1 else tl.arange(0, K)[None, :, None]


@triton.jit
def fill(x, shape: tl.constexpr, NB: tl.constexpr):
    """x as a full tile of NB entries, [K, NB, BP], or [G, K, BP]."""
    if shape.G == 1:
        found = tl.broadcast_to(x, (shape.K, NB, shape.BP))
    else:
        found = tl.broadcast_to(x, (shape.G, shape.K, shape.BP))
    return found


@triton.jit
def blend(a, b, t_ok, shape: tl.constexpr, MASKED: tl.constexpr):
    """A and B as full tiles; MASKED: tokens past the end leave the state unchanged."""
    a = fill(a, shape, shape.NB)
    b = fill(b, shape, shape.NB)
    if MASKED:
        a = tl.where(t_ok, a, 1.0)
        b = tl.where(t_ok, b, 0.0)
    return a, b


@triton.jit
def entered(state, tokens, at, holes: tl.constexpr):
    """The state before a token, or the cotangent of it: zero before the first token of a packed sequence.

    Multiplied by a zero instead, a NaN or infinity of the sequence before (the cotangent: behind) would stay.
    """
    if holes.fresh is not None:
        state = tl.where(holes.fresh(tokens, at), 0.0, state)
    return state


@triton.jit
def first_tokens(tokens, at, like, holes: tl.constexpr):
    """1 for the first tokens of packed sequences, else 0, in the shape of a full tile; None where nothing is packed."""
    found = None
    if holes.fresh is not None:
        found = tl.broadcast_to(tl.where(holes.fresh(tokens, at), 1.0, 0.0), like.shape)
    return found


@triton.jit
def cleared(state, fresh, t, k: tl.constexpr, AXIS: tl.constexpr = 0):
    """`entered` for token k of a tile; fresh: of `first_tokens`."""
    if fresh is not None:
        state = tl.where(take(fresh, t, k, AXIS) > 0.5, 0.0, state)
    return state


@triton.jit
def joint(keep, state, add, PACKED: tl.constexpr):
    """keep state + add. PACKED: a zero, as a sequence that begins gives it, also takes a NaN or infinity."""
    found = keep * state + add
    if PACKED:
        found = tl.where(keep == 0.0, add, found)
    return found


@triton.jit
def link(keep, add, kept, added, later_keep, later_add, later_kept, later_added):
    """Composition of two ranges of runs: s -> keep s + add over the whole range, kept s + added before its last run."""
    return (
        keep * later_keep,
        later_keep * add + later_add,
        keep * later_kept,
        later_kept * add + later_added,
    )


@triton.jit
def link_packed(keep, add, kept, added, later_keep, later_add, later_kept, later_added):
    """`link` of runs in which packed sequences may begin, whose states are `joint`."""
    return (
        keep * later_keep,
        tl.where(later_keep == 0.0, later_add, later_keep * add + later_add),
        keep * later_kept,
        tl.where(later_kept == 0.0, later_added, later_kept * add + later_added),
    )


@triton.jit
def join(keep, add, G: tl.constexpr, PACKED: tl.constexpr):
    """The states before all runs but the first, and after the last, for runs s -> keep s + add [G, 1, BP].

    `add` of the first run includes the state before it.
    """
    one = tl.full(add.shape, 1.0, tl.float32)
    if PACKED:
        keep, add, kept, added = tl.associative_scan((keep, add, one, one - 1.0), 0, link_packed)
    else:
        keep, add, kept, added = tl.associative_scan((keep, add, one, one - 1.0), 0, link)
    g = tl.arange(0, G)[:, None, None]
    return added, tl.sum(tl.where(g == G - 1, add, -0.0), 0, keep_dims=True)


@triton.jit
def walk(a, b, fresh, state, K: tl.constexpr, G: tl.constexpr):
    """States before and after every token of a tile, and the last one.

    state: before the tile, or before every run [G, 1, BP], and then no last one is returned. fresh: of `first_tokens`.
    """
    t = turns(K, G)
    last = state
    if G > state.shape[0]:
        first = tl.arange(0, G)[:, None, None] == 0
        add = tl.where(first, state, 0.0)
        keep = tl.full(add.shape, 1.0, tl.float32)
        for k in tl.static_range(K):
            add = take(a, t, k, 1) * cleared(add, fresh, t, k, 1) + take(b, t, k, 1)
            keep = cleared(keep * take(a, t, k, 1), fresh, t, k, 1)
        entering, last = join(keep, add, G, fresh is not None)
        state = tl.where(first, state, entering)
    AXIS: tl.constexpr = 0 if G == 1 else 1
    before = a
    after = a
    for k in tl.static_range(K):
        state = cleared(state, fresh, t, k, AXIS)
        before = tl.where(t == k, state, before)
        state = take(a, t, k, AXIS) * state + take(b, t, k, AXIS)
        after = tl.where(t == k, state, after)
    if G == 1:
        last = state
    return before, after, last


@triton.jit
def last_state(a, b, fresh, state, K: tl.constexpr):
    """The state after a tile without runs."""
    t = turns(K, 1)
    for k in tl.static_range(K):
        state = take(a, t, k) * cleared(state, fresh, t, k) + take(b, t, k)
    return state
