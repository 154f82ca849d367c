"""A call over ranks by public calls of the recurrence: summary, exchange, main pass, and the same backward.

On the Triton kernels dsf.parallel.fused uses the kernels' own passes instead.
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from dsf.call import guard
from dsf.kernels.operators import refuse_second_order
from dsf.parallel.collectives import Request, Sum, tied
from dsf.parallel.exchange import Exchange
from dsf.parallel.rank import Rank, differentiable, no_autocast
from dsf.parallel.world import World


@dataclass
class Job:
    """One call on the ranks of this process."""

    world: World
    exchange: Exchange
    ranks: Several[Rank]
    return_state: bool

    def enter(self) -> list[Any]:
        """Run the exchange forward: one `Entered` for every rank."""
        with torch.no_grad(), guard.unwatched():
            known = [x for rank in self.ranks for x in rank.summary.bound.tensors.values()]
            return self.world.run([self.exchange.enter(rank) for rank in self.ranks], known)

    def finals(self, lasts: Several[Tensor]) -> list[Tensor]:
        """The global final states, on every rank."""
        return self.world.run([_sum(r.ended(x)) for r, x in zip(self.ranks, lasts, strict=True)])

    def leave(self, kept: Several[Several[Tensor]], dfinals: Several[Tensor | None]) -> list[list[Tensor]]:
        """Run the exchange backward: every rank's G, one tensor a slot. The ranks hold dy and starts."""
        with guard.unwatched():
            return self.world.run([self.leaving(r, k, d) for r, k, d in zip(self.ranks, kept, dfinals, strict=True)])

    def again(self, ranks: Several[Rank]) -> Job:
        """This job with other rank objects, which hold the tensors of the backward pass."""
        return Job(self.world, self.exchange, ranks, self.return_state)

    def leaving(
        self, rank: Rank, kept: Several[Tensor], dfinal: Tensor | None
    ) -> Generator[Request, Tensor, list[Tensor]]:
        """The exchange backward of one rank."""
        if dfinal is not None:
            rank.dfinal = yield Sum(dfinal)
        return (yield from self.exchange.leave(rank, kept))


def _sum(x: Tensor) -> Generator[Request, Tensor, Tensor]:
    return (yield Sum(x))


class Leave(torch.autograd.Function):
    """Identity on the outputs; backward exchanges the gradients of states (see the module).

    state: the initial one, or None; where it alone wants a gradient, the outputs of ranks that do not read it do, too.
    Tensors for every rank of this process: y, last; then starts, after and kept of `Entered`; then the inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, job: Job, counts: list[list[int]], state: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """(y of every rank, then, with return_state, the global final states on every rank)."""
        groups = grouped(tensors, counts)
        ctx.counts = counts
        lasts = [g[0][1] for g in groups]
        gains = [rank.frame.gain_of(last) for rank, last in zip(job.ranks, lasts, strict=True)]
        saved = [x for (_, starts, after, kept, given) in groups for x in (*starts, *after, *kept, *given)]
        ctx.save_for_backward(*gains, *saved, *([] if state is None else [state]))
        ys = [g[0][0].view_as(g[0][0]) for g in groups]
        finals = job.finals(lasts) if job.return_state else []
        ys = [tied(y, finals) for y in ys]
        ctx.job = job.again([rank.hollow() for rank in job.ranks])
        return (*ys, *finals)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients: dy for y, G for `last`, none for the inputs, which are only saved here."""
        refuse_second_order()
        job: Job = ctx.job
        count = len(job.ranks)
        every = ctx.saved_tensors  # read once: activation checkpointing allows a single access
        gains, saved = every[:count], list(every[count:])
        dys = grads[:count]
        dfinals: Several[Tensor | None] = [None] * count
        if job.return_state:  # zeros where nobody asks for the state: a traced graph would sum them in its forward part
            dfinals = [tied(d, [dy]) for d, dy in zip(grads[count:], dys, strict=True)]
        of_state = torch.zeros_like(saved[-1]) if ctx.needs_input_grad[2] else None  # rows that read it add theirs
        groups = grouped(saved, [c[1:] for c in ctx.counts])
        ranks = []
        for rank, (starts, _, _, given), dy in zip(job.ranks, groups, dys, strict=True):
            mine = rank.begun(given)
            mine.starts, mine.dy = list(starts), dy
            ranks.append(mine)
        with no_autocast(dys[0]):
            found = job.again(ranks).leave([kept for _, _, kept, _ in groups], dfinals)
        out: list[Tensor | None] = []
        for rank, g, (_, after, _, given), gain, dy, counts in zip(
            ranks, found, groups, gains, dys, ctx.counts, strict=True
        ):
            out += [dy, rank.of_rows(g, after, gain)]
            out += [None] * sum(counts[1:4])
            empty = not rank.summary.sizes.tokens  # a rank without tokens returns gradients of zero, not None
            out += [torch.zeros_like(x) if empty else None for x in given]
        return None, None, of_state, *out


def grouped(tensors: Several[Tensor], counts: Several[Several[int]]) -> list[list[list[Tensor]]]:
    """Split the flat list into one list a rank of lists of these lengths."""
    rest = iter(tensors)
    return [[list(islice(rest, count)) for count in several] for several in counts]


def run(job: Job, state: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    """(y, the global final state or None) of every rank of this process. state: the initial one, with its graph."""
    ranks = job.ranks
    entered = job.enter()
    for rank in ranks:
        rank.initial = state  # from here on the initial state with its graph
    passes = [rank.main(e.starts) for rank, e in zip(ranks, entered, strict=True)]
    leaves = [x for r in ranks for x in r.summary.bound.tensors.values()] + ([] if state is None else [state])
    if not differentiable(leaves):
        if not job.return_state:
            return [(y, None) for y, _ in passes]
        ended = job.finals([last for _, last in passes])
        return [(tied(y, ended), final) for (y, _), final in zip(passes, ended, strict=True)]
    groups: list[list[Several[Tensor]]] = []
    for rank, e, passed in zip(ranks, entered, passes, strict=True):
        groups.append([passed, e.starts, e.after, e.kept, list(rank.summary.bound.tensors.values())])
        rank.initial = None
    counts = [[len(part) for part in group] for group in groups]
    out = Leave.apply(job, counts, state, *(x for group in groups for part in group for x in part))
    count = len(ranks)
    finals = out[count:] if job.return_state else [None] * count
    return list(zip(out[:count], finals, strict=True))


@dataclass(frozen=True)
class Route:
    """What calls of one kind have in common, which `World.routes` keeps: the ranks of this process without tensors."""

    exchange: Exchange
    hollows: list[Rank]

    def run(
        self, world: World, shards: Several[Several[Tensor]], state: Tensor | None, return_state: bool
    ) -> list[tuple[Tensor, Tensor | None]]:
        """`run` of a call. shards: the inputs of each rank, in the order of the declaration."""
        initial = None if state is None else state.detach()
        ranks = [one.begun(tensors, initial) for one, tensors in zip(self.hollows, shards, strict=True)]
        return run(Job(world, self.exchange, ranks, return_state), state)
