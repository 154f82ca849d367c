"""Reversed copies and sums of both directions as operators: one launch each, backward too."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import refuse_second_order
from dsf.kernels.triton.launch import launch, strided
from dsf.kernels.triton.layer import table
from dsf.kernels.triton.layer.reversal import join_backward as join_gradients
from dsf.kernels.triton.layer.reversal import join_forward
from dsf.kernels.triton.operators import operator

WAY_OUT = "the fused sum of both directions; ask for backend='torch', which has them"
NONE = (None, 0, 0)


def _of(x: Tensor | None) -> tuple[Any, ...]:
    """(x [B, T, ·] with a contiguous last axis, strides of batch and time)."""
    return NONE if x is None else strided(x.flatten(2))


def _settings(like: Tensor, grouped: bool, late: int) -> tuple[int, int, dict[str, Any]]:
    """(programs, rows, the compile-time constants). grouped: a row is a head, else as many channels as fit."""
    width = math.prod(like.shape[2:])
    group = like.shape[-1] if grouped else table.part(width)
    rows = like.shape[0] * like.shape[1] * (width // group)
    padded, held, warps = table.reversal(group, rows)
    settings = {"inner": width // group, "GROUP": group, "LATE": late, "W": padded, "R": held, "num_warps": warps}
    return -(-rows // held), rows, settings


def _reverse(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    programs, rows, settings = _settings(x, False, 0)
    launch(join_forward, (programs,), NONE, _of(x), NONE, NONE, out, x.shape[1], rows, **settings)
    return out


def _join(ahead: Tensor, back: Tensor, x: Tensor | None, gain: Tensor | None, late: int) -> Tensor:
    out = ahead.new_empty(ahead.shape)
    programs, rows, settings = _settings(ahead, x is not None, late)
    given = (_of(ahead), _of(back), _of(x), _of(gain))
    launch(join_forward, (programs,), *given, out, ahead.shape[1], rows, **settings)
    return out


def _pulled(dy: Tensor, x: Tensor | None, gain: Tensor | None, late: int) -> list[Tensor]:
    """The gradients of back, of ahead where it was late, and of x and gain where there are any."""
    dback, dahead = dy.new_empty(dy.shape), dy.new_empty(dy.shape) if late else None
    dx, dgain = (None if y is None else y.new_empty(y.shape) for y in (x, gain))
    programs, rows, settings = _settings(dy, x is not None, late)
    launch(
        join_gradients, (programs,), _of(dy), _of(x), _of(gain), (dahead, dback, dx, dgain), dy.shape[1], rows,
        **settings,
    )  # fmt: skip
    return [y for y in (dback, dahead, dx, dgain) if y is not None]


class _Reversed(torch.autograd.Function):
    """The reversed copy, whose gradient is one, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            found: Tensor = reverse(x)
        return found

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return reverse(dy)


class _Joined(torch.autograd.Function):
    """The operator with its gradient."""

    @staticmethod
    def forward(ctx: Any, ahead: Tensor, back: Tensor, x: Tensor | None, gain: Tensor | None, late: int) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            found: Tensor = join(ahead, back, x, gain, late)
        ctx.save_for_backward(x, gain)
        ctx.late = late
        return found

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        refuse_second_order(WAY_OUT)
        x, gain = ctx.saved_tensors
        dback, *found = join_backward(dy, x, gain, ctx.late)
        rest = iter(found)
        return next(rest) if ctx.late else dy, dback, *(None if y is None else next(rest) for y in (x, gain)), None


_GIVEN = "Tensor? x, Tensor? gain, int late"
reverse = operator("reverse_tokens(Tensor x) -> Tensor", _reverse, _Reversed.apply)
join = operator(f"join(Tensor ahead, Tensor back, {_GIVEN}) -> Tensor", _join, _Joined.apply)
join_backward = operator(f"join_backward(Tensor dy, {_GIVEN}) -> Tensor[]", _pulled)
