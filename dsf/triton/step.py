"""The decode step on the GPU: one token of any system with a finite state, in one launch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsf.call.bind import Bound, Sizes
from dsf.language.derived import derived
from dsf.language.spec import Spec
from dsf.triton.chunk import LARGEST
from dsf.triton.source import Source, name_of


def refusal(spec: Spec, sizes: Sizes, dtype: torch.dtype) -> str | None:
    """Why the decode kernel cannot run this, in the user's words; None when it can."""
    from dsf.kernels.triton.pointwise.step_ops import STEPS
    from dsf.triton.print_step import step_refusal

    if dtype == torch.float64:
        return "GPU kernels compute in float32; float64 inputs run on the torch backend"
    refused = step_refusal(spec)
    if refused is not None:
        return refused
    program = STEPS[program_of(spec)[1]]
    for name, size, held in (("N", sizes.n, True), ("P", sizes.p, program.whole or program.shared)):
        if held and size > LARGEST:
            return f"the decode kernel holds at most {name} = {LARGEST}, got {size}"
    return None


def takes(spec: Spec, sizes: Sizes, dtype: torch.dtype) -> bool:
    """Whether the decode kernel, where a plan has it, runs the declaration as it is, not its frame's plain system."""
    return not spec.is_framed or refusal(spec, sizes, dtype) is None


@derived
def program_of(spec: Spec) -> tuple[Source, str]:
    """The printed decode kernel of a spec and its name in the operators' registry; printed once a process."""
    from dsf.kernels.triton.pointwise.step_ops import STEPS
    from dsf.triton.print_step import emit_step

    source, program = emit_step(spec)
    name = name_of(spec, source, program)
    STEPS[name] = replace(program, functions=source.module())
    return source, name


def names(spec: Spec) -> list[str]:
    """The name of a spec's decode step, if it has one, which this call prints and registers."""
    from dsf.triton.print_step import step_refusal

    return [program_of(spec)[1]] if step_refusal(spec) is None else []


def kernel_of(spec: Spec, sizes: Sizes) -> str:
    """Name of the decode kernel with its tile."""
    from dsf.kernels.triton.pointwise.step_ops import STEPS, tile

    keys, channels, warps = tile(sizes.n, sizes.p, STEPS[program_of(spec)[1]], sizes.batch * sizes.heads)
    return f"decode step ({keys} keys x {channels} channels, {warps} warps)"


def run(spec: Spec, bound: Bound, state: Tensor | None, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """y [B, 1, H, P] and the new state, which overwrites `state` if in_place."""
    from dsf.kernels.triton.pointwise.step_ops import matrix_step, matrix_step_in_place

    _, name = program_of(spec)
    operands = list(bound.tensors.values())
    if in_place and state is not None:
        return matrix_step_in_place(operands, state, name), state
    y, new = matrix_step(operands, state, name)
    return y, new
