"""The long convolution on a GPU.

By transforms it is one operator forward and one backward (dsf.kernels.triton.fourier.filters), with a short filter and
nothing else it is sums (dsf.kernels.triton.layer.depthwise).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

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
    from dsf.kernels.triton.fourier.filters import filtered

    if gate is None and D is None and h.shape[1] <= SHORT:
        return _by_sums(x, h)
    given = [z for z in (gate, D, h) if z is not None]
    if torch.is_grad_enabled() and any(z.requires_grad for z in (x, *given)):
        y: Tensor = _Filtered.apply(otherwise, x, h, gate, D)
        return y
    y, _ = filtered(_operands(x, gate, D), h, _programs(gate, D), False)
    return y


def _by_sums(x: Tensor, h: Tensor) -> Tensor:
    """x * h, each token's sum on its own."""
    from dsf.kernels.triton.layer.depthwise_ops import depthwise_convolution

    taps = rearrange(h[:, : x.shape[1]].flip(1), "h k p -> k (h p)")
    y: Tensor = depthwise_convolution(x.flatten(2), taps, False)
    return y.view(x.shape)


def _operands(x: Tensor, gate: Tensor | None, D: Tensor | None) -> list[Tensor]:
    from dsf.kernels.triton.fourier.operator import CONVOLUTIONS

    known = {"x": x, "gate": gate, "D": D}
    found = [known[role] for role in CONVOLUTIONS[_programs(gate, D)[0]].roles]
    return [z for z in found if z is not None]


def _programs(gate: Tensor | None, D: Tensor | None) -> list[str]:
    return [program_of(gate is not None, D is not None), program_of(False, False)]


class _Filtered(torch.autograd.Function):
    """The operator; its second derivative by torch's operators."""

    @staticmethod
    def forward(ctx: Any, otherwise: Otherwise, x: Tensor, h: Tensor, gate: Tensor | None, D: Tensor | None) -> Tensor:
        from dsf.kernels.triton.fourier.filters import filtered

        y, kept = filtered(_operands(x, gate, D), h, _programs(gate, D), True)
        ctx.save_for_backward(x, h, gate, D, *kept)
        ctx.otherwise = otherwise
        found: Tensor = y
        return found

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        from dsf.kernels.triton.fourier.filters import filtered_backward
        from dsf.kernels.triton.fourier.operator import CONVOLUTIONS

        (x, h, gate, D, *kept), (dy,) = ctx.saved_tensors, given
        needs = dict(zip(("x", "h", "gate", "D"), ctx.needs_input_grad[1:], strict=True))
        if torch.is_grad_enabled():
            leaves = [None if z is None else z.view_as(z) for z in (x, h, gate, D)]  # one tensor may be several inputs
            y = ctx.otherwise(*leaves)
            wanted = [z for z, need in zip(leaves, needs.values(), strict=True) if need and z is not None]
            found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
            return None, *(next(found) if need else None for need in needs.values())
        programs = _programs(gate, D)
        roles = [*CONVOLUTIONS[programs[0]].roles, "h"]
        asked = [needs[role] for role in roles]
        slopes = iter(filtered_backward(dy, _operands(x, gate, D), h, kept, programs, asked))
        by_role = {role: next(slopes) for role, need in zip(roles, asked, strict=True) if need}
        return None, *(by_role.get(role) for role in needs)
