"""Which rank holds which tokens: fragments of the sequence, and the pieces of packed sequences in them."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from dsf.call import packing
from dsf.language.errors import InputError

LAYOUTS = ("contiguous", "headtail")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Layout:
    """How the tokens of a sequence are distributed over W = `ranks` ranks.

    contiguous: rank r holds the r-th run of neighbouring tokens, of any length. headtail: the sequence is cut into 2 W
    runs of equal length, and rank r holds the runs r and 2 W - 1 - r, in this order. This balances the work of causal
    softmax attention. A run is called a fragment; fragments are numbered along the sequence. A rank holds `slots`
    fragments, all ranks together hold `fragments`.
    """

    name: str
    ranks: int
    slots: int = field(init=False, compare=False, repr=False)
    fragments: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        slots = 2 if self.name == "headtail" else 1
        object.__setattr__(self, "slots", slots)
        object.__setattr__(self, "fragments", slots * self.ranks)

    def number(self, rank: int, slot: int) -> int:
        """The number of the fragment in a slot of a rank."""
        return rank if slot == 0 else 2 * self.ranks - 1 - rank

    def owner(self, number: int) -> tuple[int, int]:
        """(rank, slot) of a fragment."""
        return (number, 0) if number < self.ranks else (2 * self.ranks - 1 - number, 1)

    def sizes(self, tokens: int, given: Sequence[int] | None = None) -> list[int]:
        """Tokens of every fragment of a sequence of `tokens`. given: tokens of every rank, where they are not even.

        Raises InputError where the layout cannot hold them.
        """
        if given is not None and sum(given) != tokens:
            raise InputError(f"sizes={tuple(given)} hold {sum(given)} tokens, but the sequence has {tokens}")
        if self.slots == 1:
            share, rest = divmod(tokens, self.ranks)
            return list(given) if given is not None else [share + (r < rest) for r in range(self.ranks)]
        if tokens % self.fragments:
            raise InputError(
                f"layout='headtail' cuts a sequence in {self.fragments} runs of one length; {tokens} tokens do not "
                "divide"
            )
        return [tokens // self.fragments] * self.fragments


@dataclass(frozen=True)
class Fragment:
    """One run of tokens of one rank.

    number: its number along the sequence. begin, end: its first token and the one after its last, counted among the
    rank's. continued, goes_on: whether a sequence that began before it, or one that goes on after it, has tokens in it
    or reaches through it (a fragment may have no tokens). enters, leaves: how many of its first, or last, tokens belong
    to that sequence. entering, leaving: that sequence's number. fresh: no sequence reaches through it from before it to
    after it; without packed sequences this is True for the first fragment alone.
    """

    number: int
    begin: int
    end: int
    enters: int
    leaves: int
    continued: bool
    goes_on: bool
    fresh: bool
    entering: int = 0
    leaving: int = 0


@dataclass(frozen=True)
class Piece:
    """The tokens of one packed sequence within one fragment: one sequence of the rank's own packed call.

    begin, end: counted among the rank's tokens. sequence: its number. slot: the fragment's. continued: it began in an
    earlier fragment; goes_on: it ends in a later one.
    """

    begin: int
    end: int
    sequence: int
    slot: int
    continued: bool
    goes_on: bool


@functools.lru_cache(maxsize=1024)
def plain_fragments(layout: Layout, rank: int, tokens: int) -> tuple[Fragment, ...]:
    """The fragments in a rank's slots."""
    return tuple(plain_fragment(layout, rank, slot, tokens) for slot in range(layout.slots))


def plain_fragment(layout: Layout, rank: int, slot: int, tokens: int) -> Fragment:
    """A fragment of sequences that are not packed. tokens: the rank's number of tokens."""
    number, length = layout.number(rank, slot), tokens // layout.slots
    first, last = number == 0, number == layout.fragments - 1
    begin = slot * length
    return Fragment(
        number, begin, begin + length, 0 if first else length, 0 if last else length, not first, not last, first
    )


@dataclass(frozen=True, eq=False)
class Packing:
    """Packed sequences over fragments. bounds: cu_seqlens; starts: the first token of every fragment, then T.

    Equal ones are one object, which answers each question once (`of`).
    """

    layout: Layout
    bounds: tuple[int, ...]
    starts: tuple[int, ...]

    @staticmethod
    def of(layout: Layout, bounds: Sequence[int], given: Sequence[int] | None = None) -> Packing:
        """The packing of cu_seqlens `bounds`. Raises InputError where the layout cannot hold the tokens."""
        return _packing(layout, tuple(bounds), None if given is None else tuple(given))

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return len(self.bounds) - 1

    def tokens(self, rank: int) -> int:
        """The number of tokens of a rank."""
        numbers = [self.layout.number(rank, slot) for slot in range(self.layout.slots)]
        return sum(self.starts[n + 1] - self.starts[n] for n in numbers)

    def is_fresh(self, number: int) -> bool:
        """Whether no sequence reaches through the fragment from before it to after it."""
        low, high = self.starts[number : number + 2]
        over = self._sequence_over(low)
        return over is None or self.bounds[over + 1] <= high

    def fragment(self, rank: int, slot: int) -> Fragment:
        """A rank's fragment."""
        return _fragment(self, rank, slot)

    def _sequence_over(self, place: int) -> int | None:
        """The sequence that has tokens on both sides of a place."""
        s = _rank_of(place, self.bounds) - 1
        return s if s < self.sequences and self.bounds[s] < place else None

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The pieces of sequences that a rank holds, in the order of its tokens."""
        return _pieces(self, rank)

    def own(self, rank: int) -> packing.Packing:
        """The pieces as packed sequences of the rank's own tokens."""
        return _own(self, rank)

    def ends(self, rank: int) -> list[int]:
        """The sequences that end on a rank; those without tokens count as ending on rank 0."""
        found = [p.sequence for p in self.pieces(rank) if not p.goes_on]
        return found + (self.without_tokens() if rank == 0 else [])

    def without_tokens(self) -> list[int]:
        """Sequences that are empty."""
        return [s for s, (a, b) in enumerate(pairwise(self.bounds)) if a == b]

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """int64 [T of the rank], the place in the packed row of every token of a rank."""
        numbers = [self.layout.number(rank, slot) for slot in range(self.layout.slots)]
        runs = [torch.arange(*self.starts[n : n + 2], dtype=torch.int64, device=device) for n in numbers]
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def edges(self, device: torch.device) -> Tensor:
        """int64 [sequences + 1], the bounds on a device; a CUDA graph that is captured copies nothing from the host."""
        if len(self.bounds) == 2:
            return torch.arange(2, device=device) * self.bounds[-1]
        return boundaries(self.bounds).on(device).long()

    def reads(self, rank: int) -> Reads:
        """What attention reads, for every slot of a rank with tokens: (q, k), places among the rank's tokens and in the
        packed row. The tokens q[i] ... q[i + 1] read k[i] ... k[i + 1]: their own sequence up to the last of them."""
        return _reads(self, rank)


Reads = tuple[tuple[list[int], list[int]], ...]


def _kept(function: Callable[..., Made]) -> Callable[..., Made]:
    """The function, with its results kept; dynamo, which would warn of the cache, traces it."""
    cached = functools.lru_cache(maxsize=1024)(function)

    @functools.wraps(function)
    def found(*args: Any) -> Made:
        return (function if torch.compiler.is_dynamo_compiling() else cached)(*args)

    return found


def _rank_of(place: int, bounds: tuple[int, ...]) -> int:
    """How many of the bounds are at most `place`; dynamo does not look into it, as it cannot trace bisect."""
    return bisect_right(bounds, place)


_rank_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does


@_kept
def _packing(layout: Layout, bounds: tuple[int, ...], given: tuple[int, ...] | None) -> Packing:
    return Packing(layout, bounds, (0, *accumulate(layout.sizes(bounds[-1], given))))


@_kept
def _fragment(row: Packing, rank: int, slot: int) -> Fragment:
    number = row.layout.number(rank, slot)
    low, high = row.starts[number : number + 2]
    begin = sum(row.starts[n + 1] - row.starts[n] for n in (row.layout.number(rank, s) for s in range(slot)))
    place = begin - low  # what turns a place in the packed row into one among the rank's tokens
    entering, leaving = row._sequence_over(low), row._sequence_over(high)
    enters = 0 if entering is None else min(high, row.bounds[entering + 1]) - low
    leaves = 0 if leaving is None else high - max(low, row.bounds[leaving])
    return Fragment(
        number, begin, high + place, enters, leaves, entering is not None, leaving is not None,
        row.is_fresh(number), entering or 0, leaving or 0,
    )  # fmt: skip


@_kept
def _pieces(row: Packing, rank: int) -> tuple[Piece, ...]:
    found = []
    for slot in range(row.layout.slots):
        fragment = _fragment(row, rank, slot)
        low, high = row.starts[fragment.number : fragment.number + 2]
        for s, (a, b) in enumerate(pairwise(row.bounds)):
            first, last = max(a, low), min(b, high)
            if first < last:
                place = fragment.begin - low
                found.append(Piece(first + place, last + place, s, slot, a < low, b > high))
    return tuple(found)


@_kept
def _own(row: Packing, rank: int) -> packing.Packing:
    return packing.Packing([0, *(p.end for p in _pieces(row, rank))])


@_kept
def boundaries(bounds: tuple[int, ...]) -> packing.Packing:
    """The dsf.Packing of these boundaries, the same object every time."""
    return packing.Packing(bounds)


@_kept
def _reads(row: Packing, rank: int) -> Reads:
    found = []
    for slot in range(row.layout.slots):
        pieces = [p for p in _pieces(row, rank) if p.slot == slot]
        if pieces:
            fragment = _fragment(row, rank, slot)
            last = fragment.end - fragment.begin + row.starts[fragment.number]
            queries = [*(p.begin for p in pieces), fragment.end]
            found.append((queries, [*(row.bounds[p.sequence] for p in pieces), last]))
    return tuple(found)


def host_bounds(name: str, cu_seqlens: Any) -> list[int] | None:
    """cu_seqlens of the global sequences, as a list on the host, or None. name: the caller's, for errors."""
    if cu_seqlens is None:
        return None
    if isinstance(cu_seqlens, packing.Packing):
        return packing.values(cu_seqlens)
    packing.check_row(name, cu_seqlens, 1)
    if packing.is_hidden(cu_seqlens):
        raise InputError(
            f"{name}: parallel= cuts packed sequences on the host, so cu_seqlens cannot be a tensor of a compiled "
            "or captured graph: give a dsf.Packing"
        )
    bounds = packing.values(cu_seqlens)
    if len(bounds) < 2 or bounds[0] != 0 or any(b < a for a, b in pairwise(bounds)):
        raise InputError(f"{name}: cu_seqlens of the global sequences must begin with 0 and not fall, got {bounds}")
    return bounds


def rows_of_slots(x: Tensor, slots: int) -> Tensor:
    """A rank's tokens with its slots as rows of the batch: [B, slots L, ...] -> [B slots, L, ...]."""
    return x if slots == 1 else x.unflatten(1, (slots, x.shape[1] // slots)).flatten(0, 1)


def tokens_of_rows(x: Tensor, slots: int) -> Tensor:
    """The inverse of `rows_of_slots`."""
    return x if slots == 1 else x.unflatten(0, (x.shape[0] // slots, slots)).flatten(1, 2)
