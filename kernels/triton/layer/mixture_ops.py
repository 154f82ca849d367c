"""Mixtures of tokens as an operator: one launch; backward one, and one that sums the gradients of the shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import refuse_second_order
from dsf.kernels.triton.launch import launch, strided
from dsf.kernels.triton.layer import table
from dsf.kernels.triton.layer.mixture import mix_backward, mix_forward
from dsf.kernels.triton.layer.norm import sum_weight
from dsf.kernels.triton.operators import operator

WAY_OUT = "the fused mixtures of tokens; ask for backend='torch', which has them"


def _settings(x: Tensor, count: int, backward: bool) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid and the compile-time constants."""
    rows, channels = x.shape[0] * x.shape[1], x.shape[2]
    held, block, warps = table.mixture(rows, channels, backward)
    grid = -(-rows // held), -(-channels // block)
    return grid, {"C": channels, "COUNT": count, "R": held, "BC": block, "num_warps": warps}


def _forward(x: Tensor, other: Tensor, shares: Sequence[Tensor], more: Tensor | None) -> list[Tensor]:
    dtype = torch.promote_types(x.dtype, shares[0].dtype)
    outs = [x.new_empty(x.shape, dtype=dtype) for _ in shares]
    grid, settings = _settings(x, len(outs), False)
    given, added = tuple(s.contiguous() for s in shares), None if more is None else strided(more)
    launch(
        mix_forward, grid, strided(x), strided(other), given, added, tuple(outs), x.shape[1],
        x.shape[0] * x.shape[1], **settings,
    )  # fmt: skip
    return outs


def _backward(
    dys: Sequence[Tensor], x: Tensor, other: Tensor, shares: Sequence[Tensor], more: Tensor | None
) -> list[Tensor]:
    """The gradients of x and other, of the shares [shares, C], and of `more` where there is one."""
    count, channels = len(shares), x.shape[2]
    dx, dother = x.new_empty(x.shape), other.new_empty(other.shape)
    dshares, dmore = shares[0].new_empty(count, channels), None if more is None else more.new_empty(more.shape)
    grid, settings = _settings(x, count, True)
    sums = x.new_empty(grid[0], count * channels, dtype=torch.float32)
    given, added = tuple(s.contiguous() for s in shares), None if more is None else strided(more)
    launch(
        mix_backward, grid, tuple(dy.contiguous() for dy in dys), strided(x), strided(other), given, added,
        (dx, dother, dmore, sums), x.shape[1], x.shape[0] * x.shape[1], **settings,
    )  # fmt: skip
    block = 32 if sums.shape[1] >= 2048 else 8
    launch(
        sum_weight, (-(-sums.shape[1] // block),), sums, dshares, grid[0], SIZE=sums.shape[1], BR=128, BC=block,
        num_warps=4,
    )  # fmt: skip
    return [dx, dother, dshares] if dmore is None else [dx, dother, dshares, dmore]


class _Differentiable(torch.autograd.Function):
    """The operator with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, more: Tensor | None, *shares: Tensor) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            found = mix_tokens(x, other, list(shares), more)
        ctx.save_for_backward(x, other, more, *shares)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        refuse_second_order(WAY_OUT)
        x, other, more, *shares = ctx.saved_tensors
        dx, dother, dshares, *dmore = mix_tokens_backward(list(dys), x, other, shares, more)
        return dx, dother, *(dmore or [None]), *dshares.unbind()


def _differentiable(x: Tensor, other: Tensor, shares: Sequence[Tensor], more: Tensor | None) -> Any:
    return list(_Differentiable.apply(x, other, more, *shares))


_GIVEN = "Tensor x, Tensor other, Tensor[] shares, Tensor? more"
mix_tokens = operator(f"mix_tokens({_GIVEN}) -> Tensor[]", _forward, _differentiable)
mix_tokens_backward = operator(f"mix_tokens_backward(Tensor[] dys, {_GIVEN}) -> Tensor[]", _backward)
