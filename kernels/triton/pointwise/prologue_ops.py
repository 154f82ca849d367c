"""The kernel before the fused scan and its adjoint, as custom operators of one launch each.

They take the name of a registered Prologue, which dsf.triton.print_prologue makes with the kernels' source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import refuse_second_order
from dsf.kernels.triton.operators import LIBRARY, operator
from dsf.kernels.triton.pointwise.programs import Access, Made, Pointwise, gathered
from dsf.kernels.triton.registry import Registry


@dataclass(frozen=True)
class Prologue:
    """What the operators know of a spec. inputs: those read; made: the outputs; accesses: of each printed function."""

    inputs: tuple[Access, ...]
    made: tuple[Made, ...]
    accesses: Mapping[str, tuple[Access, ...]]
    functions: Any = field(default=None, compare=False)


PROLOGUES: Registry[Prologue] = Registry("prologue")


def _room(call: Pointwise, m: Made) -> Tensor:
    """Memory for an output: [B, T, H, N], or [B, T, H] contiguous in time."""
    heads = call.heads_of(m.of)
    if m.key:
        return call.empty(call.batch, call.tokens, heads, call.n)
    return call.empty(call.batch, heads, call.tokens).movedim(1, -1)


def _make(operands: Sequence[Tensor], prologue: str) -> list[Tensor]:
    """The scan's inputs that are computed from these operands, float32 [B, T, H, N] or [B, T, H] each."""
    known = PROLOGUES[prologue]
    call = Pointwise(known, operands)
    made = [_room(call, m) for m in known.made]
    call.tensors |= {f".{m.name}": x for m, x in zip(known.made, made, strict=True)}
    call.launch("prologue")
    return made


def pulled(known: Prologue, given: Sequence[Tensor], operands: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """Gradients of the operands that need one, in order, from the gradients `given` of all outputs."""
    call = Pointwise(known, operands)
    call.tensors |= {f".d{m.name}": x for m, x in zip(known.made, given, strict=True)}
    wanted = [(a, x) for a, x, need in zip(known.inputs, operands, needs, strict=True) if need]
    call.tensors |= {f".grad_{a.role}": None for a in known.inputs}
    call.tensors |= {f".grad_{a.role}": call.room(a, x) for a, x in wanted}
    call.launch("adjoint")
    return [gathered(a, call.need(f".grad_{a.role}"), x) for a, x in wanted]


def _pull(given: Sequence[Tensor], operands: Sequence[Tensor], prologue: str, needs: Sequence[bool]) -> list[Tensor]:
    return pulled(PROLOGUES[prologue], given, operands, needs)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    operands, ctx.prologue = inputs
    ctx.save_for_backward(*operands)
    ctx.needs = [x.requires_grad for x in operands]
    ctx.made = [x.shape for x in output]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, given: Sequence[Tensor | None]) -> Any:
    refuse_second_order()
    operands = ctx.saved_tensors
    pairs = zip(given, ctx.made, strict=True)
    whole = [operands[0].new_zeros(s, dtype=torch.float32) if x is None else x for x, s in pairs]
    found = iter(scan_prologue_adjoint(whole, list(operands), ctx.prologue, ctx.needs))
    return [next(found) if need else None for need in ctx.needs], None


scan_prologue = operator("scan_prologue(Tensor[] operands, str prologue) -> Tensor[]", _make)
scan_prologue_adjoint = operator(
    "scan_prologue_adjoint(Tensor[] given, Tensor[] operands, str prologue, bool[] needs) -> Tensor[]", _pull
)
torch.library.register_autograd("dsf::scan_prologue", _backward, setup_context=_setup, lib=LIBRARY)
