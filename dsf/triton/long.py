"""The long convolution on a GPU.

By transforms it is one operator forward and one backward (dsf.kernels.triton.fourier.filters), with a short filter and
nothing else it is sums (dsf.kernels.triton.layer.depthwise).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from dsf.kernels.invariant import in_time

Otherwise = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
TITLE = "long_convolution"
SHORT = 128  # taps up to which sums take less time than transforms


@functools.cache
def program_of(gated: bool, skipped: bool) -> str:
    """The name in the operators' registry of a convolution with or without a gate and a skip, which is printed once."""
    from dsf.kernels.triton.fourier.operator import CONVOLUTIONS
    from dsf.triton.print_convolution import emit_filter

    source, known = emit_filter(gated, skipped)
    name = f"{TITLE}-{int(gated)}-{int(skipped)}"
    CONVOLUTIONS[name] = replace(known, functions=source.module())
    return name


def names() -> list[str]:
    """The names of all programs, which this call prints and registers."""
    return [program_of(gated, skipped) for gated in (False, True) for skipped in (False, True)]


def run(x: Tensor, h: Tensor, gate: Tensor | None, D: Tensor | None, otherwise: Otherwise) -> Tensor:
    """gate (x * h + D x) [B, T, H, P] in x's dtype. otherwise: the same by torch, for second derivatives."""
    from dsf.kernels.triton.fourier.operator import CONVOLUTIONS

    if gate is None and D is None and h.shape[1] <= SHORT:
        return _by_sums(x, h)
    name, known = program_of(gate is not None, D is not None), {"x": x, "gate": gate, "D": D}
    given = {role: z for role in CONVOLUTIONS[name].roles if (z := known[role]) is not None}
    roles = list(given)

    def by_torch(h: Tensor, *operands: Tensor) -> Tensor:
        mine = dict(zip(roles, operands, strict=True))
        return otherwise(mine["x"], h, mine.get("gate"), mine.get("D"))

    return by_transforms(list(given.values()), h, name, by_torch)


def alone(x: Tensor, h: Tensor) -> Tensor:
    """As dsf.kernels.invariant.in_time: x [B, T, H, p] and h [H, p, T] -> [B, T, H, P or 1]."""
    p = max(x.shape[-1], h.shape[1])
    return by_transforms([x.expand(-1, -1, -1, p)], h.mT.expand(-1, -1, p), program_of(False, False), _alone_by_torch)


def _alone_by_torch(h: Tensor, x: Tensor) -> Tensor:
    return in_time(x, h.mT)


def by_transforms(operands: Sequence[Tensor], h: Tensor, name: str, otherwise: Callable[..., Tensor]) -> Tensor:
    """What a registered program makes of its operands and of the filter h [H, L, P], [B, T, H, P] in their dtype.

    otherwise(h, *operands): the same by torch, for second derivatives.
    """
    from dsf.kernels.triton.fourier.filters import filtered

    programs = [name, program_of(False, False)]
    if torch.is_grad_enabled() and any(z.requires_grad for z in (h, *operands)):
        return _Filtered.apply(otherwise, programs, h, *operands)
    y, _ = filtered(list(operands), h, programs, False)
    return y


def _by_sums(x: Tensor, h: Tensor) -> Tensor:
    """x * h, each token's sum on its own."""
    from dsf.kernels.triton.layer.depthwise import depthwise_convolution

    taps = rearrange(h[:, : x.shape[1]].flip(1), "h k p -> k (h p)")
    y: Tensor = depthwise_convolution(x.flatten(2), taps, False)
    return y.view(x.shape)


class _Filtered(torch.autograd.Function):
    """The operator; its second derivative by torch's operators."""

    @staticmethod
    def forward(
        ctx: Any, otherwise: Callable[..., Tensor], programs: list[str], h: Tensor, *operands: Tensor
    ) -> Tensor:
        from dsf.kernels.triton.fourier.filters import filtered

        y, kept = filtered(list(operands), h, programs, True)
        ctx.save_for_backward(h, *operands, *kept)
        ctx.otherwise, ctx.programs, ctx.count = otherwise, programs, len(operands)
        return y

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        from dsf.kernels.triton.fourier.filters import filtered_backward

        (h, *rest), (dy,) = ctx.saved_tensors, given
        operands, kept = rest[: ctx.count], rest[ctx.count :]
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            leaves = [z.view_as(z) for z in (h, *operands)]  # one tensor may be several inputs
            y = ctx.otherwise(*leaves)
            wanted = [z for z, need in zip(leaves, needs, strict=True) if need]
            found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True, materialize_grads=True))
        else:
            made = filtered_backward(dy, operands, h, kept, ctx.programs, [*needs[1:], needs[0]])
            found = iter([*made[-1:], *made[:-1]] if needs[0] else made)
        return None, None, *(next(found) if need else None for need in needs)
