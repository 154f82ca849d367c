"""The four exchanges, which give every rank its shards' initial states, and their gradients. Generators of collectives.

Fragment j maps its initial state S to its final state M_j S + F_j. `enter` takes each rank's maps (F, M) and gives the
initial states of its fragments. `leave` takes C, the gradient of an initial state through the fragment's own outputs,
and gives G, the gradient of each fragment's final state: G_j = C_{j+1} + M_{j+1}ᵀ G_{j+1}, with the M's of `enter`.
Only C is sent. Every rank issues the same collectives in both directions, whatever its tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dsf.kernels.affine import Frame, composed, entered, left
from dsf.parallel.collectives import INNER, OUTER, Gather, Hop, Request, Swap
from dsf.parallel.fold import Fold, by_owner
from dsf.parallel.layout import Layout
from dsf.parallel.rank import Rank


class Entered(NamedTuple):
    """For every slot its initial state and the gain m of its final state; kept: tensors for `leave`."""

    starts: list[Tensor]
    after: list[Tensor]
    kept: list[Tensor]


Entering = Generator[Request, Tensor, Entered]
Leaving = Generator[Request, Tensor, list[Tensor]]


class Exchange(Protocol):
    """One exchange."""

    def enter(self, shards: Rank) -> Entering:
        """Forward."""

    def leave(self, shards: Rank, kept: Sequence[Tensor]) -> Leaving:
        """Backward."""


def _slots(shards: Rank) -> range:
    return range(shards.layout.slots)


def _numbers(shards: Rank) -> list[int]:
    return [shards.layout.number(shards.rank, slot) for slot in _slots(shards)]


def _payload(shards: Rank, frame: Frame) -> Tensor:
    """(F, M) of the rank's fragments [slots, B, H, numbers]; where no sequence continues, an empty F, or any."""
    rows = []
    for slot in _slots(shards):
        fragment = shards.fragment(slot)
        f = shards.written(slot) if fragment.goes_on or shards.complete else shards.empty()
        m = None
        if frame.move_numbers:
            needed = fragment.goes_on and not fragment.fresh
            m = shards.move(slot) if needed or shards.mapped else frame.neutral(f, *f.shape[:2])
        rows.append(frame.pack(f, m))
    return _together(rows)


def _own(shards: Rank) -> Tensor:
    """C of the rank's fragments [slots, B, H, N, plain], where no sequence continues from before zeros, or anything."""
    needed = [shards.complete or shards.fragment(s).continued for s in _slots(shards)]
    return _together([shards.adjoint(s, None) if n else shards.nothing() for s, n in enumerate(needed)])


def _together(rows: list[Tensor]) -> Tensor:
    """The rows, stacked; a single one is not copied."""
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)


def _frame(shards: Rank) -> Frame:
    """Shapes of what is sent: no M where there are only two fragments, as none lies between others."""
    return shards.frame if shards.layout.fragments > 2 else shards.frame.without_moves


class AllGather:
    """Every rank gathers all maps and folds them: one round, (W - 1)(f + m) bytes into a rank."""

    def enter(self, shards: Rank) -> Entering:
        """Forward."""
        frame = _frame(shards)
        rows = yield Gather(_payload(shards, frame))
        states, kept = self._fold(shards).forward(rows)
        numbers = _numbers(shards)
        after = [frame.gain_of(states[min(n + 1, len(states) - 1)]) for n in numbers]
        return Entered([states[n] for n in numbers], after, kept)

    def leave(self, shards: Rank, kept: Sequence[Tensor]) -> Leaving:
        """Backward."""
        fold = self._fold(shards)
        found = fold.backward((yield Gather(_own(shards))), kept)
        return [found[n - fold.low] for n in _numbers(shards)]

    @staticmethod
    def _fold(shards: Rank) -> Fold:
        ends = not shards.complete or shards.layout.slots > 1  # such a rank knows where the sequence begins and ends
        return Fold(_frame(shards), shards.layout, shards.fresh, _numbers(shards), ends, shards.complete)


def _dealt(x: Tensor, ranks: int) -> Tensor:
    """[slots, B, H, ...] -> [ranks, slots, B, share, ...]: a share of the heads for every rank, padded to one size."""
    short = -x.shape[2] % ranks
    if short:
        x = torch.cat([x, x.new_zeros(*x.shape[:2], short, *x.shape[3:])], dim=2)
    return x.unflatten(2, (ranks, -1)).movedim(2, 0)


def _joined(x: Tensor, heads: int) -> Tensor:
    """The inverse: [ranks, slots, B, share, ...] -> [slots, B, H, ...]."""
    return x.movedim(0, 2).flatten(2, 3)[:, :, :heads]


def _entered(frame: Frame, found: Tensor, kept: list[Tensor]) -> Entered:
    """found: states of all slots, each with the gain of its final state behind its columns."""
    return Entered([x[..., : frame.total] for x in found], [x[..., frame.total :] for x in found], kept)


class Transpose:
    """Each rank folds all fragments for its share of the heads: two all-to-alls, (2 f + m)(W - 1) / W bytes into it.

    Diagonal systems of fewer heads than ranks are dealt entry by entry.
    """

    def enter(self, shards: Rank) -> Entering:
        """Forward."""
        layout, frame = shards.layout, _frame(shards)
        sent = _payload(shards, frame)
        heads = sent.shape[2]
        rows = yield Swap(_dealt(sent, layout.ranks))
        states, kept = self._fold(shards, frame).forward(rows)
        replies = states[: layout.fragments]
        if frame.gain:
            after = [frame.gain_of(s) for s in (*states[1:], states[-1])]
            replies = [torch.cat(each, dim=-1) for each in zip(replies, after, strict=False)]
        return _entered(frame, _joined((yield Swap(by_owner(layout, replies))), heads), kept)

    def leave(self, shards: Rank, kept: Sequence[Tensor]) -> Leaving:
        """Backward."""
        layout, frame = shards.layout, _frame(shards)
        sent = _own(shards)
        heads = sent.shape[2]
        own = yield Swap(_dealt(sent, layout.ranks))
        found = self._fold(shards, frame).backward(own, kept)
        replies = found[: layout.fragments]
        return list(_joined((yield Swap(by_owner(layout, replies))), heads))

    @staticmethod
    def _fold(shards: Rank, frame: Frame) -> Fold:
        fragments = range(shards.layout.fragments)
        return Fold(frame, shards.layout, shards.fresh, fragments, kernels=shards.complete)


class Relay:
    """The state is sent from fragment to fragment, and M is not sent: f bytes, a round for every fragment.

    walk: without M; the ranks run the recurrence one after the other, each from the state that it received.
    """

    def __init__(self, walk: bool = False) -> None:
        self.walk = walk

    def enter(self, shards: Rank) -> Entering:
        """Forward."""
        frame, layout = shards.frame, shards.layout
        slots = {shards.fragment(s).number: s for s in _slots(shards)}
        maps = {}
        if not self.walk:  # before the first hop, so that all ranks do it at once
            for number, slot in slots.items():
                fragment = shards.fragment(slot)
                if fragment.goes_on:
                    maps[number] = shards.written(slot), None if fragment.fresh else shards.move(slot)
        starts = {number: shards.empty() for number in slots}
        after = {number: frame.gain_of(starts[number]) for number in slots}
        for j in range(layout.fragments - 1):
            state = shards.empty()
            if j in slots and shards.fragment(slots[j]).goes_on:
                state = self._out(shards, slots[j], maps.get(j), starts[j])
                after[j] = frame.gain_of(state)
            state = yield from _hop(layout, state, j, j + 1)
            if j + 1 in slots:
                starts[j + 1] = state
        moves = [m for _, m in maps.values() if m is not None]
        kept = [*moves, *(frame.gain_of(starts[n]) for n in slots), *(after[n] for n in slots)]
        return Entered([starts[n] for n in slots], [after[n] for n in slots], kept)

    def _out(self, shards: Rank, slot: int, found: Any, start: Tensor) -> Tensor:
        if self.walk:
            return shards.written(slot) if shards.fragment(slot).fresh else shards.through(slot, start)
        f, m = found
        return f if shards.fragment(slot).fresh else shards.frame.into(m, f, start)

    def leave(self, shards: Rank, kept: Sequence[Tensor]) -> Leaving:
        """Backward."""
        frame, layout, rest = shards.frame, shards.layout, list(kept)
        slots = {shards.fragment(s).number: s for s in _slots(shards)}
        moves: dict[int, Tensor | None] = {}
        for number, slot in slots.items():
            fragment = shards.fragment(slot)
            if fragment.goes_on and not fragment.fresh and not self.walk and frame.move_numbers:
                moves[number] = rest.pop(0)
        before = dict(zip(slots, rest, strict=False))
        after = dict(zip(slots, rest[len(slots) :], strict=False))
        none = shards.nothing()
        own = {}
        if not self.walk:
            own = {n: shards.adjoint(s, None) if shards.fragment(s).continued else none for n, s in slots.items()}
        g = dict.fromkeys(slots, none)
        for j in range(layout.fragments - 1, 0, -1):
            out = none
            if j in slots and shards.fragment(slots[j]).continued:
                through = shards.fragment(slots[j]).goes_on and not shards.fragment(slots[j]).fresh
                if self.walk:
                    out = shards.adjoint(slots[j], g[j] if through else None)
                else:
                    out = own[j] + (frame.back(moves.get(j), g[j], before[j], after[j]) if through else 0)
            out = yield from _hop(layout, out, j, j - 1)
            if j - 1 in slots:
                g[j - 1] = out
        return [g[n] for n in slots]


def _hop(layout: Layout, x: Tensor, source: int, target: int) -> Generator[Request, Tensor, Tensor]:
    """Send x from the rank of fragment `source` to the rank of fragment `target`; nothing where they are the same."""
    (a, _), (b, _) = layout.owner(source), layout.owner(target)
    if a == b:
        return x
    return (yield Hop(x, source=a, target=b))


class TwoLevel:
    """For nodes of several ranks: all-to-all within the node, then one map for each share of the heads between nodes.

    Each rank composes the maps of its node's run of fragments, for its share of the heads, into one (two runs with
    headtail), gathers the maps of the other nodes, folds, and sends the states back within its node by a second
    all-to-all. ranks = nodes · inner; the ranks of a node are neighbours.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def _runs(self, layout: Layout, node: int) -> list[list[tuple[int, int, int]]]:
        """For every slot the node's fragments in the sequence's order: (number, rank within the node, slot)."""
        inner = layout.ranks // self.nodes
        found = []
        for slot in range(layout.slots):
            run = [(layout.number(node * inner + i, slot), i, slot) for i in range(inner)]
            found.append(sorted(run))
        return found

    def _outer(self, layout: Layout) -> Layout:
        return Layout(layout.name, self.nodes)

    def _node(self, shards: Rank) -> int:
        return shards.rank // (shards.layout.ranks // self.nodes)

    def enter(self, shards: Rank) -> Entering:
        """Forward."""
        layout, frame = shards.layout, shards.frame
        inner, heads = layout.ranks // self.nodes, shards.empty().shape[1]
        x = yield Swap(_dealt(_payload(shards, frame), inner), INNER)
        runs = self._runs(layout, self._node(shards))
        maps = [[frame.unpack(x[i, s]) for _, i, s in run] for run in runs]
        fresh = [[shards.fresh[n] for n, _, _ in run] for run in runs]
        rows = []
        for run, new in zip(maps, fresh, strict=True):
            f, m = composed(frame, [f for f, _ in run], [m for _, m in run], new)
            rows.append(frame.pack(f, m))
        outer = self._outer(layout)
        fold = Fold(frame, outer, self._fresh_runs(shards), range(outer.fragments))
        states, kept = fold.forward((yield Gather(torch.stack(rows), OUTER)))
        replies: dict[tuple[int, int], Tensor] = {}
        gains = []
        for slot, (run, places, new) in enumerate(zip(maps, runs, fresh, strict=True)):
            first = states[outer.number(self._node(shards), slot)]
            inside = entered(frame, [f for f, _ in run], [m for _, m in run], new, first)
            gains.append(torch.stack([frame.gain_of(s) for s in inside]))
            for (_, i, s), before, after in zip(places, inside, inside[1:], strict=False):
                replies[i, s] = torch.cat([before, frame.gain_of(after)], dim=-1)
        answer = torch.stack([torch.stack([replies[i, s] for s in range(layout.slots)]) for i in range(inner)])
        found = _joined((yield Swap(answer, INNER)), heads)
        inside_moves = [torch.stack([m for _, m in run if m is not None]) for run in maps if frame.move_numbers]
        return _entered(frame, found, [*inside_moves, *gains, *kept])

    def _fresh_runs(self, shards: Rank) -> list[bool]:
        """Whether no state passes through a run, for all runs of all nodes in the sequence's order."""
        layout, found = shards.layout, {}
        for node in range(self.nodes):
            for slot, run in enumerate(self._runs(layout, node)):
                found[self._outer(layout).number(node, slot)] = any(shards.fresh[n] for n, _, _ in run)
        return [found[n] for n in sorted(found)]

    def leave(self, shards: Rank, kept: Sequence[Tensor]) -> Leaving:
        """Backward."""
        layout, frame, slots = shards.layout, shards.frame, shards.layout.slots
        inner, heads, rest = layout.ranks // self.nodes, shards.empty().shape[1], list(kept)
        moves = [list(rest.pop(0)) for _ in range(slots)] if frame.move_numbers else [[None] * inner] * slots
        gains = [list(rest.pop(0)) for _ in range(slots)]
        x = yield Swap(_dealt(_own(shards), inner), INNER)
        runs, outer = self._runs(layout, self._node(shards)), self._outer(layout)
        last = layout.fragments - 1
        fresh = [[shards.fresh[n] or n == last for n, _, _ in run] for run in runs]
        own = [[x[i, s] for _, i, s in run] for run in runs]
        none = torch.zeros_like(own[0][0])
        firsts = [
            left(frame, c, m, new, gain, none)[0] for c, m, new, gain in zip(own, moves, fresh, gains, strict=True)
        ]
        every = yield Gather(torch.stack(firsts), OUTER)
        of_runs = Fold(frame, outer, self._fresh_runs(shards), range(outer.fragments)).backward(every, rest)
        replies: dict[tuple[int, int], Tensor] = {}
        for slot, run in enumerate(runs):
            end = of_runs[outer.number(self._node(shards), slot)]
            found = left(frame, own[slot], moves[slot], fresh[slot], gains[slot], end)
            for (_, i, s), g in zip(run, found[1:], strict=True):
                replies[i, s] = g
        answer = torch.stack([torch.stack([replies[i, s] for s in range(slots)]) for i in range(inner)])
        return list(_joined((yield Swap(answer, INNER)), heads))


def exchange_of(name: str, nodes: int = 1) -> Exchange:
    """The exchange with that name."""
    if name == "two-level":
        return TwoLevel(nodes)
    if name == "gather":
        return AllGather()
    return Transpose() if name == "transpose" else Relay(walk=name == "walk")
