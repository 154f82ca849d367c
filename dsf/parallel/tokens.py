"""Gathering of token tensors that every rank needs whole; backward, the gradients are summed on the owning rank."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsf.kernels.operators import refuse_second_order
from dsf.parallel.collectives import Gather, Request, Swap

if TYPE_CHECKING:
    from dsf.parallel.world import World


def gather_tokens(world: World, xs: Sequence[Tensor], lengths: Sequence[int], dim: int = 1) -> list[Tensor]:
    """The whole tensor from the shards, for each rank of this process. lengths: tokens of every rank."""
    if xs[0].dim() == 1:
        return [x.squeeze(0) for x in gather_tokens(world, [x.unsqueeze(0) for x in xs], lengths)]
    moved = [[x.movedim(dim, 1)] for x in xs]
    return [x.movedim(1, dim) for (x,) in gather_all(world, moved, lengths)]


def gather_all(
    world: World,
    groups: Sequence[Sequence[Tensor]],
    lengths: Sequence[int],
    reaches: Sequence[tuple[int, int]] | None = None,
) -> list[list[Tensor]]:
    """Several whole tensors [B, T, ...] for each rank of this process, by one collective.

    reaches: (first, last) of the tokens that each rank wants of the whole, for others than all.
    """
    count = len(groups[0])
    wanted = tuple(reaches or ((0, sum(lengths)),) * len(groups))
    found = _Gathered.apply(world, tuple(lengths), wanted, count, *(x for group in groups for x in group))
    return [list(found[place : place + count]) for place in range(0, len(found), count)]


class _Gathered(torch.autograd.Function):
    """Shards [B, T_r, ...] -> whole [B, T, ...] in the sequence's order; backward an all-to-all and a sum."""

    @staticmethod
    def forward(
        ctx: Any, world: World, lengths: tuple[int, ...], reaches: tuple[tuple[int, int], ...], count: int, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        """Pad to one length, gather, cut. xs: `count` tensors of each rank of this process, for one collective."""
        ctx.world, ctx.lengths, ctx.reaches, ctx.count = world, lengths, reaches, count
        ctx.tails = [x.shape[2:] for x in xs[:count]]

        def steps(*parts: Tensor) -> Generator[Request, Tensor, Tensor]:
            every = yield Gather(_grown(_beside(parts), max(lengths)))
            return _joined(world, every, lengths)

        found: list[Tensor] = []
        groups = [xs[place : place + count] for place in range(0, len(xs), count)]
        for whole, (first, last) in zip(world.run([steps(*group) for group in groups]), reaches, strict=True):
            found += _apart(whole[:, first:last] if last - first < whole.shape[1] else whole, ctx.tails)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Send every rank the gradients of its own tokens, and sum them there."""
        refuse_second_order("a gather of all ranks' tokens; the layer on one rank has them")
        world, lengths, count = ctx.world, ctx.lengths, ctx.count

        def steps(rank: int, reach: tuple[int, int], *parts: Tensor) -> Generator[Request, Tensor, Tensor]:
            g, (first, last), total = _beside(parts), reach, sum(lengths)
            if last - first < total:
                g = torch.nn.functional.pad(g, (0, 0, first, total - last))
            every = yield Swap(_dealt(world, g, lengths))
            return every.sum(0)[:, : lengths[rank]]

        groups = [grads[place : place + count] for place in range(0, len(grads), count)]
        asked = zip(world.here, ctx.reaches, groups, strict=True)
        found = world.run([steps(rank, reach, *group) for rank, reach, group in asked])
        return None, None, None, None, *(x for own in found for x in _apart(own, ctx.tails))


def _beside(parts: Sequence[Tensor]) -> Tensor:
    """[B, T, C] of tensors [B, T, ...], one beside the other."""
    flat = [x.flatten(2) if x.dim() > 2 else x.unsqueeze(2) for x in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=2)


def _apart(x: Tensor, tails: Sequence[torch.Size]) -> list[Tensor]:
    """The inverse of `_beside`. tails: each tensor's sizes behind B and T."""
    parts = [x] if len(tails) == 1 else x.split([tail.numel() for tail in tails], dim=2)
    return [p.unflatten(2, tail) if len(tail) else p.squeeze(2) for p, tail in zip(parts, tails, strict=True)]


def _grown(x: Tensor, tokens: int) -> Tensor:
    """x [B, T, C] with zeros behind its tokens, up to so many."""
    return x if x.shape[1] == tokens else torch.nn.functional.pad(x, (0, 0, 0, tokens - x.shape[1]))


def _is_even(world: World, lengths: Sequence[int]) -> bool:
    """Whether the sequence is the ranks' tokens, equally many, one rank's behind the other's."""
    return world.layout.slots == 1 and min(lengths) == max(lengths)


def _joined(world: World, every: Tensor, lengths: Sequence[int]) -> Tensor:
    """The whole [B, T, C] from all ranks' [ranks, B, most tokens, C]."""
    if _is_even(world, lengths):
        return every.transpose(0, 1).flatten(1, 2)
    return world.whole_of([every[r][:, :n] for r, n in enumerate(lengths)])


def _dealt(world: World, x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The inverse of `_joined`, zeros behind the tokens of a rank."""
    if _is_even(world, lengths):
        return x.unflatten(1, (len(lengths), lengths[0])).transpose(0, 1)
    if world.layout.slots == 2:
        return torch.stack([world.shard_of(r, x)[0] for r in range(len(lengths))])
    return torch.stack([_grown(part, max(lengths)) for part in x.split(list(lengths), dim=1)])
