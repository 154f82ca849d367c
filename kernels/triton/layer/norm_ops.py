"""Norm and gate, and norm of a sum, as operators: one launch; backward one, and one for the weight's gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsf.kernels.operators import refuse_second_order
from dsf.kernels.triton.early import early
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.layer import table
from dsf.kernels.triton.layer.norm import norm_backward, norm_forward, sum_weight
from dsf.kernels.triton.operators import operator

WAY_OUT = "the fused norm and gate; ask for backend='torch', which has them"
Options = tuple[int, bool, bool, int, float, torch.dtype]  # group, norm, gate first, activation, eps, of the result


def _flat(x: Tensor) -> Tensor:
    """x [..., D] as [B, T, W] with a contiguous last axis, without a copy if possible ([B, T, H, P]: W = H · P)."""
    if x.dim() == 4:
        x = x.flatten(2)
    elif x.dim() == 2:
        x = x.unsqueeze(0)
    elif x.dim() != 3:
        x = x.reshape(1, -1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _groups(x: Tensor, weight: Tensor | None, size: int, norm: bool) -> tuple[int, int, int]:
    """(numbers of a group, groups of a token that share a weight, weights) for x [B, T, W] with a norm over `size`."""
    width = x.shape[-1]
    if not norm and weight is None:
        size = table.part(width)
        return size, width // size, 1
    ways = 1 if weight is None else weight.numel() // size
    return size, width // (ways * size), ways


def _settings(options: Options, shape: tuple[int, int, int], tile: tuple[int, int, int, int]) -> dict[str, Any]:
    (group, inner, ways), (width, held, warps, _) = shape, tile
    _, norm, first, activation, _, _ = options
    return {
        "inner": inner, "ways": ways, "GROUP": group, "NORM": norm, "FIRST": first, "ACT": activation, "W": width,
        "R": held, "num_warps": warps,
    }  # fmt: skip


def _of(x: Tensor | None) -> tuple[Any, ...]:
    return (None, 0, 0) if x is None else (x, x.stride(0), x.stride(1))


def _forward(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> Tensor:
    out = x.new_empty(x.shape, dtype=options[5])
    _launch(x, gate, weight, out, None, options)
    return out


def _added(x: Tensor, other: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, other.dtype))
    out = x.new_empty(x.shape, dtype=dtype)
    _launch(x, None, weight, out, (*_of(_flat(other)), total), _of_sum(x, eps, dtype))
    return total, out


def _of_sum(x: Tensor, eps: float, dtype: torch.dtype) -> Options:
    return x.shape[-1], True, False, 0, eps, dtype


def _launch(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, out: Tensor, more: tuple[Any, ...] | None, options: Options
) -> None:
    x, gate, weight = _flat(x), None if gate is None else _flat(gate), None if weight is None else weight.contiguous()
    shape = _groups(x, weight, options[0], options[1])
    rows = x.shape[0] * x.shape[1] * shape[1]
    tile = table.norm(shape[0], rows, shape[2], False)
    programs = shape[2] * -(-rows // tile[1])
    launch(
        norm_forward, (programs,), _of(x), _of(gate), weight, out, more, x.shape[1], rows, options[4],
        **_settings(options, shape, tile), **early(x.device, programs),
    )  # fmt: skip


def _room(x: Tensor, gate: Tensor | None, weight: Tensor | None) -> list[Tensor]:
    return [y.new_empty(y.shape) for y in (x, gate, weight) if y is not None]


def _backward(dy: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> list[Tensor]:
    return _pull(dy, None, x, gate, weight, options)


def _again(dy: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> list[Tensor]:
    again = x.new_empty(x.shape, dtype=options[5])
    return [*_pull(dy, None, x, gate, weight, options, again), again]


def _added_backward(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype
) -> list[Tensor]:
    return _pull(dy, dtotal, total, None, weight, _of_sum(total, eps, dtype))


def _pull(
    dy: Tensor, known: Tensor | None, x: Tensor, gate: Tensor | None, weight: Tensor | None, options: Any,
    again: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """The gradients of x (with what is known of it added), gate and weight, those that there are. again: room for the
    result of the forward pass."""
    weight = None if weight is None else weight.contiguous()
    room = _room(x, gate, weight)
    outs = iter(room)
    dx, dgate, dweight = (None if y is None else next(outs) for y in (x, gate, weight))
    x, dy, gate = _flat(x), _flat(dy), None if gate is None else _flat(gate)
    shape = _groups(x, weight, options[0], options[1])
    rows = x.shape[0] * x.shape[1] * shape[1]
    tile = table.norm(shape[0], rows, shape[2], True)
    parts, sums = -(-rows // (tile[1] * tile[3])), None
    if weight is not None:
        sums = x.new_empty(parts, weight.numel(), dtype=torch.float32)
    launch(
        norm_backward, (shape[2] * parts,), *_of(dy), _of(x), _of(gate), weight, (dx, dgate, sums, again),
        None if known is None else _of(_flat(known)), x.shape[1], rows, tile[3], options[4],
        **_settings(options, shape, tile),
    )  # fmt: skip
    if sums is not None:
        size = sums.shape[1]
        block = 32 if size >= 2048 else 8
        launch(sum_weight, (-(-size // block),), sums, dweight, parts, SIZE=size, BR=128, BC=block, num_warps=4)
    return room


class _Differentiable(torch.autograd.Function):
    """The operator with its gradient; faster on the host than the wrapper of torch.library."""

    @staticmethod
    def forward(ctx: Any, options: Options, x: Tensor, gate: Tensor | None, weight: Tensor | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out = gated_norm(x, gate, weight, *options)
        ctx.save_for_backward(x, gate, weight)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        refuse_second_order(WAY_OUT)
        x, gate, weight = ctx.saved_tensors
        found = iter(gated_norm_backward(dy, x, gate, weight, *ctx.options))
        return None, *(None if y is None else next(found) for y in (x, gate, weight))


def _differentiable(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> Any:
    return _Differentiable.apply(options, x, gate, weight)


class _Mapped(torch.autograd.Function):
    """The operator, then a linear map. Its result is not kept: the launch of its gradients writes it once more."""

    @staticmethod
    def forward(
        ctx: Any, options: Options, x: Tensor, gate: Tensor | None, weight: Tensor | None, then: Tensor
    ) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            made = gated_norm(x, gate, weight, *options)
        ctx.save_for_backward(x, gate, weight, then)
        ctx.options = options
        return F.linear(made if made.shape[-1] == then.shape[1] else made.flatten(-2), then)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        refuse_second_order(WAY_OUT)
        x, gate, weight, then = ctx.saved_tensors
        *found, made = gated_norm_again((dy @ then).view(x.shape), x, gate, weight, *ctx.options)
        dthen = dy.flatten(0, -2).T @ made.view(-1, then.shape[1]) if ctx.needs_input_grad[4] else None
        grads = iter(found)
        return None, *(None if y is None else next(grads) for y in (x, gate, weight)), dthen


mapped_norm = _Mapped.apply


class _DifferentiableSum(torch.autograd.Function):
    """The same of the norm of a sum."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, other: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            total, out = added_norm(x, other, weight, eps, dtype)
        ctx.save_for_backward(total, weight)
        ctx.options, ctx.kinds = (eps, dtype), (x.dtype, other.dtype)
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor | None, dy: Tensor | None) -> tuple[Any, ...]:
        refuse_second_order(WAY_OUT)
        total, weight = ctx.saved_tensors
        if dy is None:
            found = [dtotal, None]
        else:
            found = [*added_norm_backward(dy, dtotal, total, weight, *ctx.options), None]
        of_x, of_other = (None if found[0] is None else found[0].to(kind) for kind in ctx.kinds)
        return of_x, of_other, found[1], None, None


def _behind(
    made: Any, x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any
) -> tuple[Any, ...] | None:  # fmt: skip
    """The likeliest call of gradients: gates and norms of heads stand before a linear map. None where x has none."""
    if not x.requires_grad:
        return None
    mapped = gate is not None or options[0] < x.shape[-1] or x.dim() == 4
    return gated_norm_again if mapped else gated_norm_backward, made, x, gate, weight, *options


def _behind_sum(made: Any, x: Tensor, other: Tensor, *rest: Any) -> tuple[Any, ...] | None:
    """The same of a sum that something else reads, too, as the next block does."""
    total, out = made
    return (added_norm_backward, out, total, total, *rest) if x.requires_grad or other.requires_grad else None


_GIVEN = (
    "Tensor x, Tensor? gate, Tensor? weight, int group, bool norm, bool gate_first, int activation, float eps, "
    "ScalarType dtype"
)
gated_norm = operator(f"gated_norm({_GIVEN}) -> Tensor", _forward, _differentiable, _behind)
gated_norm_backward = operator(f"gated_norm_backward(Tensor dy, {_GIVEN}) -> Tensor[]", _backward)
gated_norm_again = operator(f"gated_norm_again(Tensor dy, {_GIVEN}) -> Tensor[]", _again)
_LAST = "Tensor? weight, float eps, ScalarType dtype"
_SUM = f"added_norm(Tensor x, Tensor other, {_LAST}) -> (Tensor, Tensor)"
added_norm = operator(_SUM, _added, _DifferentiableSum.apply, _behind_sum)
added_norm_backward = operator(
    f"added_norm_backward(Tensor dy, Tensor? dtotal, Tensor total, {_LAST}) -> Tensor[]", _added_backward
)
