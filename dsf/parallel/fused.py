"""One call over ranks on the GPU kernels: the kernels' own four passes, with the exchanges between them.

A generic rank computes its summary by calls of the recurrence and of those derived from it (dsf.parallel.summary). The
kernels compute it in passes without outputs, and later passes reuse the tensors of earlier ones (dsf.triton.shard).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dsf.call import guard
from dsf.call.bind import Bound
from dsf.call.calls import is_transformed
from dsf.call.plan import Plan
from dsf.call.recurrence import Recurrence
from dsf.kernels.operators import refuse_second_order
from dsf.language.spec import Spec
from dsf.parallel.exchange import Exchange
from dsf.parallel.generic import Job, grouped
from dsf.parallel.layout import Layout, rows_of_slots, tokens_of_rows
from dsf.parallel.rank import Rank, differentiable, no_autocast
from dsf.parallel.summary import Summary, hollow
from dsf.parallel.world import World
from dsf.triton.choose import interpreted
from dsf.triton.shard import Shard, takes


@dataclass
class Fused(Rank):
    """A rank whose passes are kernels; its rows are the slots of every row of the batch.

    shard: the passes for these rows. moves: whether the exchange needs M. keep: whether gradients are wanted. held,
    saved, later: tensors that the passes summary, forward and adjoint keep for later ones. begin: the rows' initial
    states.
    """

    shard: Shard = field(kw_only=True)
    moves: bool = field(kw_only=True, default=False)
    keep: bool = False
    held: list[Tensor] = field(default_factory=list)
    saved: list[Tensor] = field(default_factory=list)
    later: list[Tensor] = field(default_factory=list)
    begin: Tensor | None = None
    _summary: tuple[Tensor, Tensor] | None = None
    _first: Tensor | None = None  # type: ignore[assignment]

    @property
    def complete(self) -> bool:
        """Whether F and C are at hand of all fragments: ranks compute them while they wait for each other's."""
        return self.layout.ranks > 1

    @property
    def mapped(self) -> bool:
        """Whether M is at hand of all fragments."""
        return self.moves

    def _slot(self, rows: Tensor, slot: int) -> Tensor:
        """The rows of one slot, of all rows [B slots, ...]."""
        return rows if self.layout.slots == 1 else rows.unflatten(0, (-1, self.layout.slots))[:, slot]

    def summed(self) -> tuple[Tensor, Tensor]:
        """F and M of all rows, with the initial state in F where the sequence begins.

        Ranks whose summary no other rank needs compute it, too, while they wait for the others: their own later passes
        reuse its tensors.
        """
        if self._summary is None:
            first = None
            if self.initial is not None and any(part.number == 0 for part in self.parts):
                first = self._row_state([self.empty() for _ in self.parts])
            final, move, self.held = self.shard.summary(first, self.moves, self.keep)
            self._summary = final, move
        return self._summary

    def written(self, slot: int) -> Tensor:
        """F."""
        return self._slot(self.summed()[0], slot)

    def move(self, slot: int) -> Tensor | None:
        """M; where the pass does not compute it, as a generic rank."""
        if not self.moves:
            return super().move(slot)
        frame, found = self.frame, self._slot(self.summed()[1], slot)
        return found if frame.kind == "dense" else found[..., : frame.rows, : frame.columns]

    def adjoint(self, slot: int, last: Tensor | None) -> Tensor:
        """C."""
        assert last is None, "the kernels' states are never walked from rank to rank"
        return self._slot(self.pulled(), slot)

    def pulled(self) -> Tensor:
        """C of all rows [B slots, H, N, plain]."""
        if self._first is None:
            assert self.dy is not None
            ends = self.last_rows()
            self._first, self.later = self.shard.adjoint(self.rows_of(self.dy), ends, self.begin, self.saved, self.held)
        return self._first

    def last_rows(self) -> Tensor | None:
        """The gradient of the final state in the rows that end the sequence, zeros elsewhere; no gain columns."""
        if self.dfinal is None or all(part.goes_on for part in self.parts):
            return None
        ends = self.dfinal[..., : self.frame.plain]
        rows = [torch.zeros_like(ends) if part.goes_on else ends for part in self.parts]
        return torch.stack(rows, dim=1).flatten(0, 1).contiguous()

    def of_last(self, g: Several[Tensor], gains: Several[Tensor]) -> Tensor | None:
        """The gradient of the rows' final states; None for the last rank's, of which nothing else is made.

        g: of the fragments' final states. gains: m of the rows' final states, then of the fragments' in the exchange.
        """
        if self.layout.slots == 1 and not self.parts[0].goes_on:
            return self.dfinal
        return self.of_rows(g, gains[1:], gains[0] if gains else g[0])

    def rows_of(self, x: Tensor) -> Tensor:
        """[B, slots L, ...] -> [B slots, L, ...]."""
        return rows_of_slots(x, self.layout.slots)

    def hollow(self) -> Fused:
        """This rank without tensors: what later calls of the kind, and the backward pass, begin with."""
        found = self.begun([])
        found.summary = hollow(self.summary)
        return found

    def begun(self, operands: Several[Tensor], initial: Tensor | None = None) -> Fused:
        """A rank of another call of the kind, with these operands of its passes and no other tensor yet."""
        found = object.__new__(Fused)
        found.__dict__.update(self.__dict__)
        found.shard, found.initial, found.starts, found.dy = self.shard.like(operands), initial, [], None
        found.dfinal = found.begin = found._summary = found._first = None
        found.held, found.saved, found.later = [], [], []
        return found

    def run(self, starts: Several[Tensor]) -> tuple[Tensor, Tensor]:
        """The main pass: (y, the final state of every row), with the tensors of the backward passes if `keep`."""
        alone = self.parts[0].number == 0 and self.initial is None and self.layout.slots == 1
        self.begin = None if alone else self._row_state(starts)
        y, last, self.saved = self.shard.forward(self.begin, self.keep, self.held)
        self.held, self._summary = self.shard.held_back(self.held), None
        return tokens_of_rows(y, self.layout.slots), last


def _rows_of(bound: Bound, timed: set[str], slots: int) -> Bound:
    """A call's inputs with the slots as rows of the batch."""
    if slots == 1:
        return bound
    tensors = {n: rows_of_slots(x, slots) if n in timed else x for n, x in bound.tensors.items()}
    sizes = replace(bound.sizes, batch=bound.sizes.batch * slots, tokens=bound.sizes.tokens // slots)
    return Bound(tensors, sizes, bound.dtype, bound.compute, bound.device)


class Through(torch.autograd.Function):
    """The passes of all ranks of this process. Inputs: job, the initial state, operands rank after rank."""

    @staticmethod
    def forward(
        ctx: Any, job: Any, hollows: list[Fused], state: Tensor | None, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """(y of every rank, then, with return_state, the global final states on every rank)."""
        out, groups = _passes(job, True)
        ctx.counts = [[len(part) for part in group] for group in groups]
        ctx.save_for_backward(*(x for group in groups for part in group for x in part))
        ctx.job, ctx.has_state = job.again(hollows), state is not None
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """The pass for C, the exchange, and the kernels' backward pass."""
        refuse_second_order()
        job = ctx.job
        groups = grouped(ctx.saved_tensors, ctx.counts)
        count = len(job.ranks)
        dfinals = grads[count:] if job.return_state else [None] * count
        ranks = []
        for rank, (operands, begin, saved, held, *_), dy in zip(job.ranks, groups, grads, strict=False):
            mine = rank.begun(operands)
            mine.begin, mine.saved, mine.held, mine.dy = begin[0] if begin else None, saved, held, dy
            ranks.append(mine)
        out: list[Tensor | None] = []
        of_state: Tensor | None = None
        needs = list(ctx.needs_input_grad[3:])
        with no_autocast(grads[0]), torch._C._AutoDispatchBelowAutograd():
            for rank in ranks if job.world.ranks > 1 and not job.return_state else ():
                rank.pulled()
            kept = [kept for *_, kept, _ in groups]
            found = job.world.run([job.leaving(*each) for each in zip(ranks, kept, dfinals, strict=True)])
            for rank, g, (*_, gains) in zip(ranks, found, groups, strict=True):
                own, needs = needs[: len(rank.shard.operands)], needs[len(rank.shard.operands) :]
                dlast = rank.of_last(g, gains)
                dy = rank.rows_of(rank.dy)
                pulled, first = rank.shard.backward(dy, dlast, rank.begin, rank.saved, own, rank.later)
                out += pulled
                if ctx.has_state:
                    begun = _of_initial(rank, first)
                    of_state = begun if of_state is None else of_state + begun
        return None, None, of_state, *out


def _passes(job: Any, keep: bool) -> tuple[tuple[Tensor, ...], list[list[Several[Tensor]]]]:
    """Summary, exchange and main pass: (y of every rank, then, with return_state, the global final states; for every
    rank what the backward pass needs, if `keep`)."""
    ranks: list[Fused] = job.ranks
    for rank in ranks:
        rank.keep = keep
    with torch._C._AutoDispatchBelowAutograd():
        for rank in ranks if job.world.ranks > 1 else ():
            rank.summed()
        entered = job.world.run([job.exchange.enter(rank) for rank in ranks])
        passes = [rank.run(e.starts) for rank, e in zip(ranks, entered, strict=True)]
        groups: list[list[Several[Tensor]]] = []
        for rank, e, (_, last) in zip(ranks, entered, passes, strict=True) if keep else ():
            begin = [] if rank.begin is None else [rank.begin]
            gains: list[Tensor] = []
            if rank.frame.gain:
                gains = [rank.frame.gain_of(last).clone(), *e.after]  # a copy, which does not keep `last` alive
            groups.append([rank.shard.operands, begin, rank.saved, rank.held, e.kept, gains])
        finals = job.finals([last for _, last in passes]) if job.return_state else []
    return (*(y for y, _ in passes), *finals), groups


def _of_initial(rank: Fused, first: Tensor) -> Tensor:
    """The gradient of the call's initial state [B, H, N, columns], from the gradients of all rows' initial states."""
    for slot, part in enumerate(rank.parts):
        if part.number == 0:
            return rank._slot(first, slot)
    return torch.zeros_like(rank.empty())


# -- the call


def fits(spec: Spec, bound: Bound, plan: Plan) -> bool:
    """Whether the kernels' passes take a rank's call: eager calls outside dsf.validate, which needs generic ranks."""
    eager = all(type(x) in (Tensor, torch.nn.Parameter) for x in bound.tensors.values())
    return eager and takes(spec, bound, plan) and not (guard.ON and guard.current() is not None)


def rank_of(number: int, layout: Layout, summary: Summary, initial: Tensor | None) -> Fused:
    """One rank. initial: the global initial state, detached."""
    spec = summary.recurrence.spec
    bound = _rows_of(summary.bound, {i.name for i in spec.inputs if i.kind.time}, layout.slots)
    shard = Shard.of(spec, bound)
    moves = layout.fragments > 2 and shard.multiplies(summary.frame)
    return Fused(number, layout, summary, None, initial, shard=shard, moves=moves)


def run(job: Any, hollows: list[Fused], state: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    """(y, the global final state or None) of every rank of this process. hollows: the ranks without tensors."""
    operands = [x for rank in job.ranks for x in rank.shard.operands]
    if differentiable(operands if state is None else [*operands, state]):
        out = Through.apply(job, hollows, state, *operands)
    else:
        out, _ = _passes(job, False)
    count = len(job.ranks)
    return list(zip(out[:count], out[count:] if job.return_state else [None] * count, strict=True))


@dataclass(frozen=True)
class Route:
    """What calls of one kind have in common, which `World.routes` keeps: the ranks of this process without tensors."""

    exchange: Exchange
    hollows: list[Fused]

    def run(
        self, world: World, shards: Several[Several[Tensor]], state: Tensor | None, return_state: bool
    ) -> list[tuple[Tensor, Tensor | None]]:
        """`run` of a call. shards: the inputs of each rank, in the order of the declaration."""
        found, initial = [], None if state is None else state.detach()
        for one, inputs in zip(self.hollows, shards, strict=True):
            tensors = inputs
            if one.shard.scans or one.layout.slots > 1:
                spec, bound = one.summary.recurrence.spec, one.summary_of(inputs).bound
                timed = {i.name for i in spec.inputs if i.kind.time} if one.layout.slots > 1 else set()
                tensors = Shard.of(spec, _rows_of(bound, timed, one.layout.slots)).operands
            found.append(one.begun(tensors, initial))
            if one.frame.gain and not one.moves and one.layout.fragments > 2:  # whose M is computed from the inputs
                found[-1].summary = one.summary_of(inputs)
        return run(Job(world, self.exchange, found, return_state), self.hollows, state)


def kind_of(
    recurrence: Recurrence, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: Any, options: tuple[Any, ...]
) -> tuple[Any, tuple[Tensor, ...]]:
    """(The key of a call in `World.routes`: what its checks, plan and exchange depend on; its inputs in order).

    The key is None for other than plain tensors, inside of transformations and under dsf.validate.
    """
    calls = recurrence._calls
    tensors = calls._ordered(calls.names, args, kwargs)
    if tensors is None or guard.ON or is_transformed(()):
        return None, ()
    each: list[Any] = []
    for x in tensors if state is None else (*tensors, state):
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return None, ()
        each += (x.shape, x.dtype, x.device, x.requires_grad)
    return (calls, torch.is_grad_enabled(), interpreted(), state is None, options, *each), tensors
