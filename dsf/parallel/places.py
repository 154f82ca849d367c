"""The places of a rank's tokens: where sequences begin among them, and the position of each in its sequence."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsf.call.calls import allowing
from dsf.call.packing import sequence_of
from dsf.parallel.agree import check_tokens
from dsf.parallel.collectives import Gather, Request
from dsf.parallel.layout import host_bounds
from dsf.parallel.world import Simulated, World, world_of


class Places(NamedTuple):
    """The tokens of one rank.

    begins: the places among them at which sequences begin. place: int64 [T], the number of tokens of the same
    sequence before each within the call; row: int64 [T], its sequence, or None where sequences are not packed; total:
    int64 [], the tokens of all ranks. The last three are None unless the places are counted.
    """

    begins: list[int]
    place: Tensor | None = None
    row: Tensor | None = None
    total: Tensor | None = None

    def positions(self, before: Tensor | None) -> Tensor:
        """int64 [1 or B, T]: each token's position in its sequence. before: [rows], the tokens of earlier calls."""
        assert self.place is not None
        if before is None:
            return self.place.unsqueeze(0)
        moved = before.unsqueeze(1) if self.row is None else before[self.row].unsqueeze(0)
        return self.place + moved


def places_of(world: World, x: Tensor, cu_seqlens: Any, counted: bool) -> Places | None:
    """The places of x [B, T, ...], this rank's tokens. None for a `Simulated` world, whose calls hold all of them.

    cu_seqlens: of the global sequences. counted: with place, row and total, for one collective where the ranks' numbers
    of tokens do not follow from the layout. Raises InputError for a number of tokens that does not fit the layout.
    """
    if isinstance(world, Simulated):
        return None
    bounds = host_bounds("layer", cu_seqlens)
    (rank,), tokens, device = world.here, x.shape[1], x.device
    check_tokens("layer", world, rank, x.shape[0], tokens, bounds)
    if bounds is None:
        earlier = rank if world.sizes is None else sum(world.sizes[:rank])
        begins = [] if earlier or not tokens else [0]
        return Places(begins, *_counted(world, rank, tokens, device)) if counted else Places(begins)
    packing = world.packing(bounds)
    pieces = packing.pieces(rank)
    begins = [p.begin for p in pieces if not p.continued]
    if not counted:
        return Places(begins)
    edges, own = packing.edges(device), packing.positions(rank, device)
    row = sequence_of(edges, own)
    return Places(begins, own - edges[row], row, edges[-1])


def _counted(world: World, rank: int, tokens: int, device: torch.device) -> tuple[Tensor, None, Tensor]:
    """place, row and total of sequences that are not packed."""
    layout, column = world.layout, torch.arange(tokens, device=device)
    if layout.slots > 1:  # runs of one length
        run = tokens // layout.slots
        parts = [column[:run] + layout.number(rank, slot) * run for slot in range(layout.slots)]
        return torch.cat(parts), None, torch.full((), layout.fragments * run, device=device)
    if world.sizes is not None:
        begin, total = sum(world.sizes[:rank]), sum(world.sizes)
        return column + begin, None, torch.full((), total, device=device)

    own = torch.full((1,), tokens, dtype=torch.int64, device=device)
    every = _lengths(world, own)
    place = column + every[:rank].sum()
    if torch.compiler.is_compiling():  # the first rank has no use for what it hears, and the others wait for it
        place = torch.ops.dsf.after(place, [every])
    return place, None, every.sum()


def _lengths(world: World, own: Tensor) -> Tensor:
    """Every rank's tokens [ranks, 1], in a compiled graph by one node of it: dynamo does not follow generators."""
    if torch.compiler.is_dynamo_compiling():
        _allow()
        return lengths_in_graph(world.key, own)

    def steps() -> Generator[Request, Tensor, Tensor]:
        return (yield Gather(own))

    (every,) = world.run([steps()])
    return every


def lengths_in_graph(world: str, own: Tensor) -> Tensor:
    """The same in the world of that key."""
    return _lengths(world_of(world), own)


_allow = allowing(lengths_in_graph)
