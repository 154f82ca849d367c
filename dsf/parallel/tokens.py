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
    moved = [[x.movedim(dim, 1)] for x in xs]
    return [x.movedim(1, dim) for (x,) in gather_all(world, moved, lengths)]


def gather_all(world: World, groups: Sequence[Sequence[Tensor]], lengths: Sequence[int]) -> list[list[Tensor]]:
    """Several whole tensors [B, T, ...] for each rank of this process, by one collective."""
    shapes = [[x.shape for x in group] for group in groups]
    flat = [torch.cat([x.flatten(2) for x in group], dim=2) for group in groups]
    whole = _Gathered.apply(world, tuple(lengths), *flat)
    found = []
    for several, x in zip(shapes, whole, strict=True):
        widths = [int(torch.Size(s[2:]).numel()) for s in several]
        parts = x.split(widths, dim=2)
        found.append(
            [p.unflatten(2, s[2:]) if len(s) > 2 else p.squeeze(2) for p, s in zip(parts, several, strict=True)]
        )
    return found


class _Gathered(torch.autograd.Function):
    """Shards [B, T_r, C] -> whole [B, T, C] in the sequence's order; backward an all-to-all and a sum."""

    @staticmethod
    def forward(ctx: Any, world: World, lengths: tuple[int, ...], *xs: Tensor) -> tuple[Tensor, ...]:
        """Pad to one length, gather, cut."""
        ctx.world, ctx.lengths, ctx.most = world, lengths, max(lengths)

        def steps(x: Tensor) -> Generator[Request, Tensor, Tensor]:
            padded = torch.nn.functional.pad(x, (0, 0, 0, ctx.most - x.shape[1]))
            every = yield Gather(padded)
            return world.whole_of([every[r][:, :n] for r, n in enumerate(lengths)])

        return tuple(world.run([steps(x) for x in xs]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Send every rank the gradients of its own tokens, and sum them there."""
        refuse_second_order("a gather of all ranks' tokens; the layer on one rank has them")
        world, lengths = ctx.world, ctx.lengths

        def steps(rank: int, g: Tensor) -> Generator[Request, Tensor, Tensor]:
            rows = []
            for r, n in enumerate(lengths):
                (part,) = _part(world, r, g, lengths)
                rows.append(torch.nn.functional.pad(part, (0, 0, 0, ctx.most - n)))
            every = yield Swap(torch.stack(rows))
            return every.sum(0)[:, : lengths[rank]]

        return None, None, *world.run([steps(r, g) for r, g in zip(world.here, grads, strict=True)])


def _part(world: World, rank: int, x: Tensor, lengths: Sequence[int]) -> tuple[Tensor]:
    """One rank's tokens of a whole tensor whose shards have these lengths."""
    if world.layout.slots == 2:
        (found,) = world.shard_of(rank, x)
        return (found,)
    return (x.narrow(1, sum(lengths[:rank]), lengths[rank]),)
