"""The short convolution over ranks on the GPU kernels: one autograd function around the kernels and two collectives.

The maps and what ranks send are those of dsf.parallel.halo. Only the kernels' own gradient of u is changed in place,
so that no second tensor of u's size is made for its last K - 1 tokens.
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Several
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.convolution import TRITON, Fused
from dsf.kernels.operators import refuse_second_order
from dsf.parallel.collectives import Gather, Request
from dsf.parallel.layout import rows_of_slots, tokens_of_rows
from dsf.parallel.rank import differentiable
from dsf.parallel.world import Simulated, World


def convolve(world: World, conv: Fused, u: Tensor, state: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor]:
    """(the pieces of this rank's outputs [B, T, width], the state after the sequence [B, C, K - 1]).

    u: this rank's tokens [B, T, C], or all of them for a `Simulated` world; state: before the sequence, or None.
    """
    shards = [world.shard_of(r, u)[0] for r in world.here] if isinstance(world, Simulated) else [u]
    state = None if state is None else state.to(u.dtype)
    leaves = [x for x in (conv.weight, conv.bias, state, *shards) if x is not None]
    if differentiable(leaves):
        *ys, last = _Through.apply(world, conv, conv.weight, conv.bias, state, *shards)
    else:
        ys, last, _ = _run(world, conv, state, shards)
    if not isinstance(world, Simulated):
        return tuple(ys), last
    width = len(ys) // len(shards)
    return tuple(world.whole_of(ys[piece::width]) for piece in range(width)), last


def takes(every: Tensor) -> bool:
    """Whether kernels fold what all ranks sent, for another convolution than theirs (dsf.parallel.halo)."""
    plain = type(every) is Tensor and every.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return plain and every.is_cuda and TRITON and every.numel() > 0


def entered(every: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """(the windows before a rank's slots [slots, B, past, C], the one after the last fragment [B, past, C], counts)."""
    from dsf.kernels.triton.layer import windows

    starts, last, counts = windows.enter(every, rank)
    return starts.unflatten(0, (-1, every.shape[1])).permute(1, 0, 3, 2), last.transpose(1, 2), counts


def left(every: Tensor, counts: Tensor, rank: int) -> Tensor:
    """The gradient of what a rank sent [slots, B, past + 1, C], from all windows' [ranks, slots + 1, B, C, past]."""
    from dsf.kernels.triton.layer import windows

    _, slots, batch, channels, past = every.shape
    found = every.new_zeros(batch * (slots - 1), past, channels)
    windows.leave(every, counts, every, found, rank, False)
    return torch.nn.functional.pad(found.unflatten(0, (batch, slots - 1)).transpose(0, 1), (0, 0, 0, 1))


def _run(
    world: World, conv: Fused, state: Tensor | None, us: Several[Tensor]
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Gather the ends of all fragments, then convolve from the windows: (pieces, rank after rank; the last state; the
    windows and the lengths of fragments, rank after rank)."""
    from dsf.kernels.triton.layer import windows
    from dsf.kernels.triton.layer.convolution_ops import short_convolution

    slots, past = world.layout.slots, conv.weight.shape[-1] - 1

    def steps(rank: int, x: Tensor) -> Generator[Request, Tensor, tuple[Tensor, ...]]:
        first = state if rank == 0 else None
        every = yield Gather(windows.tails(x, first, past, slots, rank == 0))
        starts, last, counts = windows.enter(every, rank)
        if first is not None:  # the window before the first fragment is zero, as the state is no fragment's
            starts.unflatten(0, (-1, slots))[:, 0].copy_(first)
        return starts, last, counts

    with torch._C._AutoDispatchBelowAutograd():
        rows = [rows_of_slots(u, slots) for u in us]
        found = world.run([steps(r, x) for r, x in zip(world.here, rows, strict=True)])
        ys = []
        for x, (starts, _, _) in zip(rows, found, strict=True):
            pieces, _ = short_convolution(x, conv.weight, conv.bias, starts, None, *conv.options)
            ys += [tokens_of_rows(y, slots) for y in pieces]
    return ys, found[0][1], [x for starts, _, counts in found for x in (starts, counts)]


class _Through(torch.autograd.Function):
    """The convolution of all ranks of this process: (pieces, rank after rank; the last state)."""

    @staticmethod
    def forward(
        ctx: Any, world: World, conv: Fused, weight: Tensor, bias: Tensor | None, state: Tensor | None, *us: Tensor
    ) -> tuple[Tensor, ...]:
        """`_run`."""
        ys, last, kept = _run(world, conv, state, us)
        ctx.world, ctx.options = world, conv.options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, bias, *us, *kept)
        return (*ys, last)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """The kernels' backward pass, then gather the gradients of all windows."""
        refuse_second_order()
        weight, bias, *saved = ctx.saved_tensors
        world, slots, widths = ctx.world, ctx.world.layout.slots, ctx.options[1]
        ranks, wanted = len(world.here), ctx.needs_input_grad[4:]
        us, starts, counts = saved[:ranks], saved[ranks::2], saved[ranks + 1 :: 2]
        with torch._C._AutoDispatchBelowAutograd():
            found = []
            for place, (u, begin) in enumerate(zip(us, starts, strict=True)):
                dys = grads[place * len(widths) : (place + 1) * len(widths)]
                found.append(_pulled(u, dys, weight, bias, begin, ctx.options, slots))
            of_weight, of_bias = (_sum([one[part] for one in found]) for part in (1, 2))
            if not any(wanted):
                return None, None, of_weight, of_bias, None, *(None for _ in us)
            lasts = [grads[-1]] + [None] * (ranks - 1)
            asked = zip(world.here, found, counts, lasts, strict=True)
            states = world.run([_leaving(*each, slots, wanted[0]) for each in asked])
            of_us = [tokens_of_rows(dx, slots) for dx, *_ in found]
        return None, None, of_weight, of_bias, next((x for one in states for x in one), None), *of_us


def _pulled(
    u: Tensor,
    dys: Several[Tensor | None],
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor,
    options: Any,
    slots: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The gradients of a rank's tokens [B slots, L, C], weight, bias and windows, through its own outputs."""
    from dsf.kernels.triton.layer.convolution_ops import short_convolution_backward

    given = zip(dys, options[1], strict=True)
    rows = [rows_of_slots(u.new_zeros(*u.shape[:2], width) if dy is None else dy, slots) for dy, width in given]
    found = short_convolution_backward(rows, None, rows_of_slots(u, slots), weight, bias, starts, None, *options)
    return found[0], found[1], None if bias is None else found[2], found[-1]


def _leaving(
    rank: int, found: tuple[Any, ...], counts: Tensor, last: Tensor | None, slots: int, stateful: bool
) -> Generator[Request, Tensor, list[Tensor]]:
    """Add to the gradient of a rank's tokens, in place, that of later windows. Returns that of the state, if any."""
    from dsf.kernels.triton.layer import windows

    dx, _, _, own = found
    every = yield Gather(_sent(own, last, slots))
    return windows.leave(every, counts, own, dx, rank, stateful and rank == 0)


def _sum(xs: Several[Tensor | None]) -> Tensor | None:
    """The sum over the ranks of this process."""
    total = xs[0]
    for x in xs[1:]:
        total = None if total is None or x is None else total + x
    return total


def _sent(own: Tensor, last: Tensor | None, slots: int) -> Tensor:
    """Gradients of windows [B slots, C, past], and of the last state [B, C, past], as [slots + 1, B, C, past]."""
    parts: Several[Tensor] = [own] if slots == 1 else own.unflatten(0, (-1, slots)).unbind(1)
    return torch.stack([*parts, torch.zeros_like(parts[0]) if last is None else last])
