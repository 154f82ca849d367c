"""Time-invariant systems whose impulse response torch computes, between printed kernels around torch's FFTs.

Their tokens take the operator of long convolutions (dsf.triton.long): one forward and one backward, with gradients of
the impulse response too. Where one input drives the state, its drive, the gate and D are printed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from dsf.call.bind import Bound, Sizes, named_axes
from dsf.kernels.invariant import in_time
from dsf.language.derived import derived
from dsf.language.expr import const, symbol_of
from dsf.language.invariant import Still, invariant
from dsf.language.spec import Spec
from dsf.torch.evaluate import Evaluator
from dsf.triton import long
from dsf.triton.source import Source, name_of


@derived
def printed(spec: Spec, emit: Callable[[Spec, Still], tuple[Source, Any]]) -> tuple[Source, str] | str:
    """The printed file of a time-invariant spec and its name in the operators' registry, or why there is none.

    emit: of print_convolution, what prints it.
    """
    from dsf.kernels.triton.fourier.operator import CONVOLUTIONS
    from dsf.triton.print_impulse import Unprintable

    still = invariant(spec)
    if not isinstance(still, Still):
        return still
    try:
        source, known = emit(spec, still)
    except Unprintable as error:
        return str(error)
    name = name_of(spec, source, known)
    CONVOLUTIONS[name] = replace(known, functions=source.module())
    return source, name


def program_of(spec: Spec) -> tuple[Source, str] | str:
    """As `printed`, of what is around the FFTs alone."""
    from dsf.triton.print_convolution import emit_given

    return printed(spec, emit_given)


def takes(spec: Spec, sizes: Sizes) -> bool:
    """True for calls, without an initial state, whose drive, gate and D are printed."""
    return not sizes.groups and not isinstance(program_of(spec), str)


def run(spec: Spec, still: Still, bound: Bound, timed: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """y [B, T, H, P] in the inputs' dtype of a call that `takes` allows.

    h: [H, p, T], the impulse response, p in {1, P}. timed: the inputs with a token axis.
    """
    from dsf.kernels.triton.fourier.operator import CONVOLUTIONS

    name, (keys, p, compute) = program_of(spec)[1], (bound.sizes.keys, bound.sizes.p, bound.compute)
    roles = CONVOLUTIONS[name].roles
    kinds = {i.name: i.kind for i in still.of.inputs}

    def by_torch(h: Tensor, *operands: Tensor) -> Tensor:
        env = {}
        for role, x in zip(roles, operands, strict=True):
            heads = x.shape[2] if kinds[role].time else x.shape[0]
            env[symbol_of(role, None, kinds[role].axes)] = named_axes(kinds[role], x.to(compute), heads)
        values = Evaluator(env, keys, p)
        (drive,) = {x.moving for _, drives in still.steps for x in drives}
        return read(still, values, in_time(values(drive).squeeze(-2), h.mT)).to(dtype)

    operands = [timed.get(role, bound.tensors[role]) for role in roles]
    dtype = next(x.dtype for role, x in zip(reversed(roles), reversed(operands), strict=True) if kinds[role].time)
    return long.by_transforms(operands, h.mT.expand(-1, -1, p), name, by_torch)


def read(still: Still, values: Evaluator, y: Tensor) -> Tensor:
    """gate · y + D [B, T, H, P] of y [B, T, H, P] that is read from the state."""
    if still.gate is not const(1):
        y = y * values(still.gate).squeeze(-2)
    if still.of.system.D is not const(0):
        y = y + values(still.of.system.D).squeeze(-2)
    return y
