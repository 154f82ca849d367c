"""The chunk kernels alone as a custom operator with a gradient: y and S_T of operands as matrix.py has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsf.kernels.triton.chunk.matrix import _chunk_matrix, _chunk_matrix_backward
from dsf.kernels.triton.operators import LIBRARY, operator


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, decay, source, erase, read, state, heads, log, final, _ = inputs
    ctx.save_for_backward(q, k, v, decay, source, erase, read, state, output[2])
    ctx.heads, ctx.log, ctx.final = heads, log, final
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, final_gradient: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    q, k, v, decay, source, erase, read, state, solve = ctx.saved_tensors
    if dy is None:
        dy = q.new_zeros(*q.shape[:2], ctx.heads, v.shape[-1])
    end = final_gradient if ctx.final else None
    *main, _, first = torch.ops.dsf.chunk_matrix_backward.default(
        dy, end, q, k, v, decay, source, erase, read, state, solve, ctx.heads, ctx.log
    )
    rows = [_sum_groups(x, like) for x, like in zip(main, (q, k, v), strict=False)]
    if decay is not None:
        main[3] = _sum_groups(main[3], decay)
    given = (decay, source, erase, read, state)
    rest = [None if like is None else x for x, like in zip([*main[3:], first], given, strict=True)]
    return (*rows, *rest, None, None, None, None)


def _sum_groups(gradient: Tensor, like: Tensor) -> Tensor:
    """Sum over the heads that share one of `like`'s."""
    shared = gradient.shape[2] // like.shape[2]
    if shared == 1:
        return gradient
    return gradient.unflatten(2, (like.shape[2], shared)).sum(3, dtype=torch.float32).to(like.dtype)


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? source, Tensor? erase, Tensor? read, Tensor? state"
chunk_matrix = operator(
    f"chunk_matrix({_INPUTS}, int heads, bool log, bool final, bool wide) -> (Tensor, Tensor, Tensor)", _chunk_matrix
)
operator(
    f"chunk_matrix_backward(Tensor dy, Tensor? final_gradient, {_INPUTS}, Tensor solve, int heads, bool log) -> "
    f"({', '.join(['Tensor'] * 9)})",
    _chunk_matrix_backward,
)
torch.library.register_autograd("dsf::chunk_matrix", _gradients, setup_context=_setup, lib=LIBRARY)
