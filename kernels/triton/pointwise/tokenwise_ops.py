"""Printed functions of a token's own numbers as custom operators: one launch, and one for all gradients.

They take the name of a registered Prologue of one output, which dsf.triton.print_prologue makes with the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import refuse_second_order
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.pointwise.programs import Pointwise
from dsf.kernels.triton.pointwise.prologue_ops import Prologue, pulled
from dsf.kernels.triton.registry import Registry

TOKENWISE: Registry[Prologue] = Registry("tokenwise")
WAY_OUT = "a function of tokens; ask for backend='torch', which has them"


def _made(operands: Sequence[Tensor], function: str, dtype: torch.dtype) -> Tensor:
    """The function's result [B, T, H, N] or [B, T, H]."""
    known = TOKENWISE[function]
    call, (made,) = Pointwise(known, operands), known.made
    last = [call.n] if made.key else []
    found = call.empty(call.batch, call.tokens, call.heads, *last, dtype=dtype)
    call.tensors[f".{made.name}"] = found
    call.launch("prologue")
    return found


def _pulled(given: Tensor, operands: Sequence[Tensor], function: str, needs: Sequence[bool]) -> list[Tensor]:
    return pulled(TOKENWISE[function], [given], operands, needs)


class _Differentiable(torch.autograd.Function):
    """The operator with its gradient."""

    @staticmethod
    def forward(ctx: Any, function: str, dtype: torch.dtype, *operands: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            found: Tensor = tokenwise(list(operands), function, dtype)
        ctx.save_for_backward(*operands)
        ctx.function, ctx.needs = function, [x.requires_grad for x in operands]
        return found

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Any, ...]:
        refuse_second_order(WAY_OUT)
        found = iter(tokenwise_adjoint(given, list(ctx.saved_tensors), ctx.function, ctx.needs))
        return None, None, *(next(found) if need else None for need in ctx.needs)


def _differentiable(operands: Sequence[Tensor], function: str, dtype: torch.dtype) -> Any:
    return _Differentiable.apply(function, dtype, *operands)


tokenwise = operator("tokenwise(Tensor[] operands, str function, ScalarType dtype) -> Tensor", _made, _differentiable)
tokenwise_adjoint = operator(
    "tokenwise_adjoint(Tensor given, Tensor[] operands, str function, bool[] needs) -> Tensor[]", _pulled
)
