"""The short convolution in front of a recurrence, over ranks: windows of K - 1 tokens that reach into other ranks.

A window of the last K - 1 tokens is a linear state: c new tokens shift it by c and are appended. So a shard is a map
w -> shift(w, c) + tail, and maps compose, also of shards with fewer than K - 1 tokens. Gradients go through the
transposed maps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from dsf.call.calls import allowing
from dsf.kernels.convolution import Fused
from dsf.kernels.operators import refuse_second_order
from dsf.language.errors import InputError
from dsf.parallel import windows as on_kernels
from dsf.parallel.collectives import Gather, Request, Sum
from dsf.parallel.layout import (
    Fragment,
    Layout,
    Packing,
    Piece,
    host_bounds,
    plain_fragment,
    rows_of_slots,
    tokens_of_rows,
)
from dsf.parallel.world import Simulated, World, world_of

Convolution = Callable[[Tensor, "Tensor | None", "Tensor | None"], "tuple[Any, Tensor]"]


def convolve(
    conv: Convolution, past: int, u: Tensor, state: Tensor | None, cu_seqlens: Any, world: World, wanted: bool = True
) -> tuple[Any, Tensor | None]:
    """conv(u, state, cu_seqlens) of the global sequences: (this rank's outputs [B, T, C], the global final state).

    wanted: the final state, which costs packed sequences a collective; None for it where it is not.

    conv: causal, with a state [B or sequences, C, past] of its last `past` inputs, zeros where None is given; its
    outputs may be a tuple of tensors [B, T, ...]. u: this rank's tokens [B, T, C], or all of them for a `Simulated`
    world. state, cu_seqlens: of the global sequences; cu_seqlens a tensor, a dsf.Packing or None. Raises InputError.
    """
    if not past:
        return _by_token(conv, u, state)
    bounds = host_bounds("convolution", cu_seqlens)
    packing = None if bounds is None else world.packing(bounds)
    kernels = _on_kernels(conv, u, world) if packing is None else None
    if kernels is not None:
        run: Any = conv
        return run(u, state, spread=functools.partial(on_kernels.convolve, world, kernels))
    shards = [world.shard_of(r, u)[0] for r in world.here] if isinstance(world, Simulated) else [u]
    ranks = [_Windows(r, world.layout, packing, x, state, past) for r, x in zip(world.here, shards, strict=True)]
    found = list(_exchanged(True, world, past, *(rank.tails() for rank in ranks)))
    windows, ends = found[: len(ranks)], found[len(ranks) :]
    outputs = [rank.run(conv, w, wanted) for rank, w in zip(ranks, windows, strict=True)]
    ys = [y if isinstance(y, tuple) else (y,) for y, _ in outputs]
    if packing is not None and not wanted:
        ends = []
    elif packing is not None:
        count, width = len(ranks), len(ys[0])
        shared = _exchanged(False, world, count * width, *(x for y in ys for x in y), *(ended for _, ended in outputs))
        ys = [tuple(shared[r * width : (r + 1) * width]) for r in range(count)]
        ends = list(shared[count * width :])
    else:
        ends = [x.transpose(1, 2) for x in ends]
    whole = tuple(world.whole_of(parts) for parts in zip(*ys, strict=True)) if isinstance(world, Simulated) else ys[0]
    y = whole if isinstance(outputs[0][0], tuple) else whole[0]
    if not ends:
        return y, None
    return y, ends[0] if len(ends) == 1 else torch.stack(ends).mean(0)


def _on_kernels(conv: Any, u: Tensor, world: World) -> Fused | None:
    """What the kernels of a short convolution take, or None where it runs as it is."""
    if not hasattr(conv, "spreads"):
        return None
    if isinstance(world, Simulated) and 0 in (world.sizes or world.layout.sizes(u.shape[1])):
        return None
    return conv.spreads(u)


def _by_token(conv: Convolution, u: Tensor, state: Tensor | None) -> tuple[Any, Tensor]:
    """A convolution of one tap, which reads no other token: its state is empty, so nothing is exchanged."""
    y, found = _mapped(conv, u, None, None)
    return y, found if state is None else state


def _mapped(conv: Convolution, x: Tensor, start: Tensor | None, bounds: Tensor | None) -> tuple[Any, Tensor]:
    """conv; for a shard without tokens outputs of length 0, which still depend on `start` in the graph."""
    if x.shape[1]:
        return conv(x, start, bounds)
    y, state = conv(x.new_zeros(x.shape[0], 1, x.shape[2]), start, None)
    return _each(lambda part: part[:, :0], y), state


def _each(function: Callable[[Tensor], Tensor], y: Any) -> Any:
    """The function of a tensor, or of every tensor of a tuple."""
    return tuple(function(part) for part in y) if isinstance(y, tuple) else function(y)


class _Windows:
    """One rank's tokens u [B, T, C], its fragments, and the windows at their starts."""

    def __init__(
        self, rank: int, layout: Layout, packing: Packing | None, u: Tensor, state: Tensor | None, past: int
    ) -> None:
        self.rank, self.layout, self.packing, self.u, self.past = rank, layout, packing, u, past
        tokens = u.shape[1]
        if packing is not None and packing.tokens(rank) != tokens:
            raise InputError(f"rank {rank} has {tokens} tokens, but the layout gives it {packing.tokens(rank)}")
        slots = range(layout.slots)
        self.parts: list[Fragment] = [
            plain_fragment(layout, rank, s, tokens) if packing is None else packing.fragment(rank, s) for s in slots
        ]
        self.pieces: Sequence[Piece] = () if packing is None else packing.pieces(rank)
        rows = u.shape[0] if packing is None else packing.sequences
        if state is not None and tuple(state.shape) != (rows, u.shape[2], past):
            raise InputError(
                f"the convolution's state has shape {list(state.shape)}, expected {[rows, u.shape[2], past]}"
            )
        self.state = None if state is None else state.to(u.dtype).transpose(1, 2)  # [B or sequences, past, C]

    def first(self, sequence: int) -> Tensor:
        """The window before a sequence's first token [B, past, C]: its given state or zeros."""
        if self.state is None:
            return self.u.new_zeros(self.u.shape[0], self.past, self.u.shape[2])
        return self.state if self.packing is None else self.state[sequence : sequence + 1]

    def _zeros(self) -> Tensor:
        """An empty window, which wants a gradient where the state does: on all ranks, as all exchange it."""
        zeros = torch.zeros_like(self.first(0))
        return zeros if self.state is None else zeros + self.state[:0].sum()

    def after(self, window: Tensor, begin: int, end: int) -> Tensor:
        """The window after this rank's tokens begin ... end, from the window before them."""
        return torch.cat([window, self.u[:, max(begin, end - self.past) : end]], dim=1)[:, -self.past :]

    def tails(self) -> Tensor:
        """The map of every slot's fragment [slots, B, past + 1, C]: tail, then one row with the shift c."""
        found = []
        for part in self.parts:
            start = self.first(part.leaving) if part.fresh else self._zeros()
            shift = self.past if part.fresh else min(part.leaves, self.past)
            written = self.after(start, part.end - part.leaves, part.end)  # of no token, too: gradients are exchanged
            if self.packing is None:  # also for the last fragment, whose window is the final state
                shift = self.past if part.fresh else min(part.end - part.begin, self.past)
                written = self.after(start, part.begin, part.end)
            count = torch.full_like(written[:, :1], float(shift))
            found.append(torch.cat([written, count], dim=1))
        return torch.stack(found)

    def run(self, conv: Convolution, windows: Tensor, wanted: bool) -> tuple[Any, Tensor]:
        """This rank's outputs, and packed, if wanted: the final states of the sequences that end here, else zeros.

        windows: [slots, B, past, C], zeros before the sequence's first token; every rank's outputs depend on them, so
        that every rank takes part in the backward collective.
        """
        if self.packing is not None:
            return self._run_packed(conv, self.packing, windows, wanted)
        rows = [
            self.first(0) + w if part.number == 0 else w for part, w in zip(self.parts, windows.unbind(0), strict=True)
        ]
        start = torch.stack(rows, dim=1).flatten(0, 1)
        slots = self.layout.slots
        y, _ = _mapped(conv, rows_of_slots(self.u, slots), start.transpose(1, 2), None)
        return _each(lambda part: tokens_of_rows(part, slots), y), self.u

    def _run_packed(self, conv: Convolution, packing: Packing, windows: Tensor, wanted: bool) -> tuple[Any, Tensor]:
        rows = [windows[p.slot] if p.continued else self.first(p.sequence) for p in self.pieces]
        bounds = packing.own(self.rank).on(self.u.device) if rows else None
        start = torch.cat(rows) if rows else torch.zeros_like(windows[0])
        if not any(p.continued for p in self.pieces):  # no number of the windows is read, and yet their gradient
            start = start + windows[..., :0].sum()
        y, lasts = _mapped(conv, self.u, start.transpose(1, 2), bounds)
        if not wanted:
            return y, lasts
        without = packing.without_tokens() if self.rank == 0 else []
        spare = [self.first(s).transpose(1, 2) for s in without]
        keep = [row for row, piece in enumerate(self.pieces) if not piece.goes_on]
        ended = self.u.new_zeros(packing.sequences, self.u.shape[2], self.past)
        if keep or spare:
            places = torch.tensor(packing.ends(self.rank), device=ended.device)
            ended = ended.index_copy(0, places, torch.cat([lasts[keep], *spare]))
        return y, ended


def _shifted(x: Tensor, count: Tensor, back: bool = False) -> Tensor:
    """x [B, past, C] shifted by count (a tensor of one number) places towards index 0; back: the transpose."""
    past = x.shape[1]
    place = torch.arange(past, device=x.device) + (-count if back else count).long()
    inside = (place >= 0) & (place < past)
    return x.index_select(1, place.clamp(0, past - 1)).masked_fill(~inside[:, None], 0)


def _ordered(layout: Layout, every: Tensor) -> list[Tensor]:
    return [every[layout.owner(n)] for n in range(layout.fragments)]


def _exchanged(entering: bool, world: World, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`_Enter`, or else `_Shared`, in a compiled graph as one node: dynamo does not follow generators."""
    if torch.compiler.is_dynamo_compiling():
        _allow()
        return exchange_in_graph(entering, world.key, number, *tensors)
    return (_Enter if entering else _Shared).apply(world, number, *tensors)


def exchange_in_graph(entering: bool, world: str, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The same in the world of that key."""
    return _exchanged(entering, world_of(world), number, *tensors)


_allow = allowing(exchange_in_graph)


class _Enter(torch.autograd.Function):
    """Maps of all fragments -> the window before each [slots, B, past, C], and after the last [B, past, C]."""

    @staticmethod
    def forward(ctx: Any, world: World, past: int, *tails: Tensor) -> tuple[Tensor, ...]:
        """Gather the maps, fold them."""
        layout = world.layout

        def steps(rank: int, x: Tensor) -> Generator[Request, Tensor, tuple[Tensor, Tensor, Tensor]]:
            every = yield Gather(x)
            if on_kernels.takes(every):
                return on_kernels.entered(every, rank)
            maps = _ordered(layout, every)
            windows = [torch.zeros_like(maps[0][:, :past])]
            for m in maps:
                windows.append(_shifted(windows[-1], m[0, past, 0]) + m[:, :past])
            own = torch.stack([windows[layout.number(rank, s)] for s in range(layout.slots)])
            return own, windows[-1], torch.stack([m[0, past, 0] for m in maps])

        found = world.run([steps(r, x) for r, x in zip(world.here, tails, strict=True)])
        ctx.world, ctx.past = world, past
        ctx.save_for_backward(*(counts for _, _, counts in found))
        return (*(own for own, _, _ in found), *(last for _, last, _ in found))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gather the gradients, fold them in reverse with the transposed shifts."""
        refuse_second_order()
        world, layout = ctx.world, ctx.world.layout
        here = len(world.here)

        def steps(rank: int, own: Tensor, last: Tensor, counts: Tensor) -> Generator[Request, Tensor, Tensor]:
            sent = torch.cat([own, last.unsqueeze(0)]).transpose(2, 3)  # as dsf.parallel.windows sends them
            every = yield Gather(sent)
            if counts.dtype == torch.int32:  # found by the kernels
                return on_kernels.left(every, counts, rank)
            every = every.transpose(3, 4)
            each = _ordered(layout, every)
            g, found = every[:, -1].sum(0), {}
            for n in range(layout.fragments - 1, -1, -1):
                found[n] = g
                g = each[n] + _shifted(g, counts[n], back=True)
            mine = torch.stack([found[layout.number(rank, s)] for s in range(layout.slots)])
            return torch.cat([mine, torch.zeros_like(mine[:, :, :1])], dim=2)

        asked = zip(world.here, grads[:here], grads[here:], ctx.saved_tensors, strict=True)
        return None, None, *world.run([steps(*x) for x in asked])


class _Shared(torch.autograd.Function):
    """Identity on the outputs; of the other tensors the sum over ranks, on every rank."""

    @staticmethod
    def forward(ctx: Any, world: World, here: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """(outputs, sums). here: how many of the tensors are outputs."""
        ctx.world, ctx.here = world, here
        sums = world.run([_sum(x) for x in tensors[here:]])
        return (*(y.view_as(y) for y in tensors[:here]), *sums)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """The outputs' gradients unchanged; the sums' gradients, summed over ranks."""
        refuse_second_order()
        here = ctx.here
        return None, None, *grads[:here], *ctx.world.run([_sum(x) for x in grads[here:]])


def _sum(x: Tensor) -> Generator[Request, Tensor, Tensor]:
    return (yield Sum(x))
