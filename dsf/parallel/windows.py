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

from dsf.kernels.convolution import Fused
from dsf.kernels.operators import refuse_second_order
from dsf.parallel.collectives import Gather, Request
from dsf.parallel.world import Simulated, World


def convolve(world: World, conv: Fused, u: Tensor, state: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor]:
    """(the pieces of this rank's outputs [B, T, width], the state after the sequence [B, C, K - 1]).

    u: this rank's tokens [B, T, C], or all of them for a `Simulated` world; state: before the sequence, or None.
    """
    shards = [world.shard_of(r, u)[0] for r in world.here] if isinstance(world, Simulated) else [u]
    state = None if state is None else state.to(u.dtype)
    *ys, last = _Through.apply(world, conv, conv.weight, conv.bias, state, *shards)
    if not isinstance(world, Simulated):
        return tuple(ys), last
    width = len(ys) // len(shards)
    return tuple(world.whole_of(ys[piece::width]) for piece in range(width)), last


def _rows(x: Tensor, slots: int) -> Tensor:
    """[B, slots L, C] -> [B slots, L, C]."""
    return x if slots == 1 else x.unflatten(1, (slots, -1)).flatten(0, 1)


def _tokens(x: Tensor, slots: int) -> Tensor:
    """The inverse."""
    return x if slots == 1 else x.unflatten(0, (-1, slots)).flatten(1, 2)


class _Through(torch.autograd.Function):
    """The convolution of all ranks of this process: (pieces, rank after rank; the last state)."""

    @staticmethod
    def forward(
        ctx: Any, world: World, conv: Fused, weight: Tensor, bias: Tensor | None, state: Tensor | None, *us: Tensor
    ) -> tuple[Tensor, ...]:
        """Gather the ends of all fragments, then convolve from the windows."""
        from dsf.kernels.triton.layer import windows_ops as ops
        from dsf.kernels.triton.layer.convolution_ops import short_convolution

        slots, past = world.layout.slots, weight.shape[-1] - 1

        def steps(rank: int, x: Tensor) -> Generator[Request, Tensor, tuple[Tensor, ...]]:
            first = state if rank == 0 else None
            every = yield Gather(ops.window_tails(x, first, past, slots, rank == 0))
            starts, last, counts = ops.enter_windows(every, rank)
            if first is not None:  # the window that the gather gave back is zero, the state is the first slot's
                starts.unflatten(0, (-1, slots))[:, 0].copy_(first)
            return starts, last, counts

        with torch._C._AutoDispatchBelowAutograd():
            rows = [_rows(u, slots) for u in us]
            found = world.run([steps(r, x) for r, x in zip(world.here, rows, strict=True)])
            ys = []
            for x, (starts, _, _) in zip(rows, found, strict=True):
                pieces, _ = short_convolution(x, weight, bias, starts, None, *conv.options)
                ys += [_tokens(y, slots) for y in pieces]
        ctx.world, ctx.conv = world, conv
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, bias, *us, *(x for starts, _, counts in found for x in (starts, counts)))
        return (*ys, found[0][1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """The kernels' backward pass, then gather the gradients of all windows."""
        refuse_second_order()
        from dsf.kernels.triton.layer import windows_ops as ops
        from dsf.kernels.triton.layer.convolution_ops import short_convolution_backward

        world, conv, slots = ctx.world, ctx.conv, ctx.world.layout.slots
        weight, bias, *saved = ctx.saved_tensors
        ranks, widths, last = len(world.here), conv.options[1], grads[-1]
        us, kept = saved[:ranks], saved[ranks:]
        found, of_weight, of_bias = [], None, None
        for place, u in enumerate(us):
            given = zip(grads[place * len(widths) :], widths, strict=False)
            dys = [u.new_zeros(*u.shape[:2], width) if dy is None else dy for dy, width in given]
            x, starts = _rows(u, slots), kept[2 * place]
            dx, dweight, *dbias, dstarts = short_convolution_backward(
                [_rows(dy, slots) for dy in dys], None, x, weight, bias, starts, None, *conv.options
            )
            found.append((dx, dstarts, kept[2 * place + 1]))
            of_weight = dweight if of_weight is None else of_weight + dweight
            if dbias:
                of_bias = dbias[0] if of_bias is None else of_bias + dbias[0]
        wanted = ctx.needs_input_grad[4:]
        if not any(wanted):
            return None, None, of_weight, of_bias, None, *(None for _ in us)

        def steps(
            rank: int, dx: Tensor, own: Tensor, counts: Tensor, last: Tensor | None
        ) -> Generator[Request, Tensor, list[Tensor]]:
            every = yield Gather(_sent(own, last, slots))
            return ops.leave_windows(every, counts, own, dx, rank, wanted[0] and rank == 0)

        lasts = [last] + [None] * (ranks - 1)
        asked = [(r, *x, end) for r, x, end in zip(world.here, found, lasts, strict=True)]
        of_state = [x for one in world.run([steps(*x) for x in asked]) for x in one]
        of_us = (_tokens(dx, slots) for dx, _, _ in found)
        return None, None, of_weight, of_bias, of_state[0] if of_state else None, *of_us


def _sent(own: Tensor, last: Tensor | None, slots: int) -> Tensor:
    """Gradients of windows [B slots, C, past], and of the last state [B, C, past], as [slots + 1, B, C, past]."""
    parts: Several[Tensor] = [own] if slots == 1 else own.unflatten(0, (-1, slots)).unbind(1)
    return torch.stack([*parts, torch.zeros_like(parts[0]) if last is None else last])
