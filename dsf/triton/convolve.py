"""The convolution form on a GPU as one operator forward and one backward (dsf.kernels.triton.fourier)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsf.call.bind import Bound, Sizes
from dsf.language.spec import Spec
from dsf.triton import given, support
from dsf.triton.choose import is_elsewhere
from dsf.triton.source import Source

LARGEST = 2048  # entries of a head's state
Otherwise = Callable[[Bound], tuple[Tensor, Tensor]]


def program_of(spec: Spec) -> tuple[Source, str] | str:
    """As dsf.triton.given.printed, with the impulse response."""
    from dsf.triton.print_convolution import emit_convolution

    return given.printed(spec, emit_convolution)


def on_kernels(x: Tensor) -> bool:
    """True for tensors that this operator takes: on a GPU, not float64, outside of torch.func. A graph of torch.compile
    has torch's FFT, since it cannot trace how kernels are printed."""
    if torch.compiler.is_compiling() or x.dtype == torch.float64 or torch._C._are_functorch_transforms_active():
        return False
    return (x.is_cuda and support.refusal(x.device) is None) or is_elsewhere(x.device)


def kernel_of(spec: Spec, sizes: Sizes, dtype: torch.dtype, device: torch.device, transformed: bool) -> str:
    """What runs the convolution form of calls without an initial state. transformed: inside torch.func."""
    on_gpu = device.type == "cuda" or is_elsewhere(device)
    if not on_gpu or transformed or dtype == torch.float64 or support.refusal(device) is not None:
        return "FFT"
    if _fits(spec, sizes):
        return "FFT between printed kernels"
    what = "printed kernels" if given.takes(spec, sizes) else "kernels, of each drive"
    return f"FFT between {what}; impulse response apart"


def _fits(spec: Spec, sizes: Sizes) -> bool:
    return not sizes.groups and sizes.n <= LARGEST and not isinstance(program_of(spec), str)


def takes(spec: Spec, bound: Bound, state: Tensor | None) -> bool:
    """True for calls that the operator takes: with an initial state such that need no gradients."""
    tensors = list(bound.tensors.values())
    if not on_kernels(tensors[0]) or not _fits(spec, bound.sizes):
        return False
    return state is None or not (torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, state)))


def run(
    spec: Spec, bound: Bound, state: Tensor | None, final: bool, otherwise: Otherwise
) -> tuple[Tensor, Tensor] | None:
    """y [B, T, H, P] in the inputs' dtype and the final state, an empty tensor where it is not wanted.

    None where the operator does not take the call. state: [B, H, N, P] or None. otherwise: the same call without an
    initial state by torch's operators, for second derivatives and the gradient of a final state.
    """
    if not takes(spec, bound, state):
        return None
    from dsf.kernels.triton.fourier.operator import CONVOLUTIONS, convolve

    name = program_of(spec)[1]
    operands = [bound.tensors[role] for role in CONVOLUTIONS[name].roles]
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        y, last = _Convolved.apply(name, bound, final, otherwise, *operands)
        return y, last
    y, last, _ = convolve(operands, state, name, False, final)
    return y, last


class _Convolved(torch.autograd.Function):
    """The operator. Second derivatives, and gradients of the final state, by torch's operators."""

    @staticmethod
    def forward(
        ctx: Any, name: str, bound: Bound, final: bool, otherwise: Otherwise, *operands: Tensor
    ) -> tuple[Tensor, Tensor]:
        from dsf.kernels.triton.fourier.operator import convolve

        y, last, kept = convolve(operands, None, name, True, final)
        ctx.save_for_backward(*operands, *kept)
        ctx.name, ctx.count, ctx.otherwise = name, len(operands), otherwise
        used = {id(x) for x in operands}
        ctx.bound = replace(bound, tensors={n: x for n, x in bound.tensors.items() if id(x) not in used})
        ctx.set_materialize_grads(False)
        if not final:
            ctx.mark_non_differentiable(last)
        return y, last

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        from dsf.kernels.triton.fourier.operator import convolve_backward

        dy, dlast = slopes
        needs = list(ctx.needs_input_grad[4:])
        operands, kept = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        found: Sequence[Tensor | None] = []
        if dlast is not None or torch.is_grad_enabled():
            found = _again(ctx, slopes, operands, needs)
        elif dy is not None:
            found = convolve_backward(dy, operands, kept, ctx.name, needs)
        each = iter(found)
        return None, None, None, None, *(next(each, None) if need else None for need in needs)


def _again(
    ctx: Any, given: Sequence[Tensor | None], operands: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients by torch's operators, which have gradients themselves where these are wanted."""
    from dsf.kernels.triton.fourier.operator import CONVOLUTIONS

    roles, more = CONVOLUTIONS[ctx.name].roles, torch.is_grad_enabled()
    with torch.enable_grad():
        # views: one tensor may be several inputs, each with a gradient of its own
        leaves = {role: x.view_as(x) for role, x in zip(roles, operands, strict=True)}
        made = ctx.otherwise(replace(ctx.bound, tensors={**ctx.bound.tensors, **leaves}))
    pairs = [(x, dx) for x, dx in zip(made, given, strict=True) if dx is not None]
    wanted = [role for role, need in zip(roles, needs, strict=True) if need]
    once = list(dict.fromkeys(wanted))
    slopes = torch.autograd.grad(
        [x for x, _ in pairs], [leaves[x] for x in once], [dx for _, dx in pairs], create_graph=more,
        materialize_grads=True,
    )  # fmt: skip
    found = dict(zip(once, slopes, strict=True))
    return [found.pop(role, None) for role in wanted]  # an input that is there twice has the whole gradient once
