"""The convolution form on a GPU as one operator forward and one backward (dsf.kernels.triton.fourier)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsf.call.bind import Bound
from dsf.language.derived import derived
from dsf.language.invariant import Still, invariant
from dsf.language.spec import Spec
from dsf.triton import support
from dsf.triton.choose import is_elsewhere
from dsf.triton.source import Source, name_of

LARGEST = 2048  # entries of a head's state


@derived
def program_of(spec: Spec) -> tuple[Source, str] | str:
    """The printed file of a time-invariant spec and its name in the operators' registry, or why there is none."""
    from dsf.kernels.triton.fourier.operator import CONVOLUTIONS
    from dsf.triton.print_convolution import emit_convolution
    from dsf.triton.print_impulse import Unprintable

    still = invariant(spec)
    if not isinstance(still, Still):
        return still
    try:
        source, known = emit_convolution(spec, still)
    except Unprintable as error:
        return str(error)
    name = name_of(spec, source, known)
    CONVOLUTIONS[name] = replace(known, functions=source.module())
    return source, name


def names(spec: Spec) -> list[str]:
    """The name of a spec's program, if it has one, which this call prints and registers."""
    found = program_of(spec)
    return [] if isinstance(found, str) else [found[1]]


def on_kernels(x: Tensor) -> bool:
    """True for tensors that this operator takes: on a GPU, not float64, outside of torch.func."""
    if x.dtype == torch.float64 or torch._C._are_functorch_transforms_active():
        return False
    return (x.is_cuda and support.refusal(x.device) is None) or is_elsewhere(x.device)


def run(spec: Spec, bound: Bound, otherwise: Callable[[Bound], Tensor]) -> Tensor | None:
    """y [B, T, H, P] in the inputs' dtype of one batch without states; None where the operator does not take the call.

    otherwise: the same call by torch's operators, for second derivatives.
    """
    sizes, x = bound.sizes, next(iter(bound.tensors.values()))
    if sizes.groups or sizes.n > LARGEST or not on_kernels(x):
        return None
    found = program_of(spec)
    if isinstance(found, str):
        return None
    from dsf.kernels.triton.fourier.operator import CONVOLUTIONS, convolve

    name = found[1]
    operands = [bound.tensors[role] for role in CONVOLUTIONS[name].roles]
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        y: Tensor = _Convolved.apply(name, bound, otherwise, *operands)
        return y
    y, _ = convolve(operands, name, False)
    return y


class _Convolved(torch.autograd.Function):
    """The operator; its second derivative by torch's operators."""

    @staticmethod
    def forward(ctx: Any, name: str, bound: Bound, otherwise: Callable[[Bound], Tensor], *operands: Tensor) -> Tensor:
        from dsf.kernels.triton.fourier.operator import convolve

        y, kept = convolve(operands, name, True)
        ctx.save_for_backward(*operands, *kept)
        ctx.name, ctx.count, ctx.otherwise = name, len(operands), otherwise
        used = {id(x) for x in operands}
        ctx.bound = replace(bound, tensors={n: x for n, x in bound.tensors.items() if id(x) not in used})
        found: Tensor = y
        return found

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        from dsf.kernels.triton.fourier.operator import convolve_backward

        (dy,) = given
        needs = list(ctx.needs_input_grad[3:])
        operands, kept = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        if torch.is_grad_enabled():
            found = iter(_again(ctx, dy, operands, needs))
        else:
            found = iter(convolve_backward(dy, operands, kept, ctx.name, needs))
        return None, None, None, *(next(found) if need else None for need in needs)


def _again(ctx: Any, dy: Tensor, operands: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """Gradients that have gradients."""
    from dsf.kernels.triton.fourier.operator import CONVOLUTIONS

    roles = CONVOLUTIONS[ctx.name].roles
    # views: one tensor may be several inputs, each with a gradient of its own
    given = {role: x.view_as(x) for role, x in zip(roles, operands, strict=True)}
    y = ctx.otherwise(replace(ctx.bound, tensors={**ctx.bound.tensors, **given}))
    wanted = [role for role, need in zip(roles, needs, strict=True) if need]
    once = list(dict.fromkeys(wanted))
    found = dict(zip(once, torch.autograd.grad(y, [given[x] for x in once], dy, create_graph=True), strict=True))
    return [found.pop(role, None) for role in wanted]  # an input that is there twice has the whole gradient once
