"""Solves with decayed sums of outer products, (H_t + Λ) x_t = q_t for every token t: directly, or by products H x."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import refuse_second_order

Product = Callable[[Tensor], Tensor]


def by_elimination(matrices: Tensor, x: Tensor) -> Tensor:
    """matrices⁻¹ x for invertible matrices [..., N, N] and x [..., N]."""
    return torch.linalg.solve(matrices, x.unsqueeze(-1)).squeeze(-1)


def by_cholesky(matrices: Tensor, x: Tensor) -> Tensor:
    """matrices⁻¹ x for symmetric positive matrices; NaN for others, without a check that waits for the GPU."""
    factor, wrong = torch.linalg.cholesky_ex(matrices)
    factor = torch.where(wrong[..., None, None] == 0, factor, torch.nan)
    return torch.cholesky_solve(x.unsqueeze(-1), factor).squeeze(-1)


def solved_in_turn(
    decay: Tensor, keys: Tensor, weighted: Tensor, ridge: Tensor, query: Tensor, state: Tensor, before: bool,
    solve: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One token after the other, H_t = decay_t H_{t-1} + Σ_r key_r weighted_rᵀ: x [B, T, H, N] and the last H.

    decay: [B, T, H]; keys, weighted: [B, T, H, R, N]; ridge, query: [B, T, H, N]; state: [B, H, N, N]. before: x_t of
    H_{t-1}.
    """
    found = []
    rows = [x.unbind(1) for x in (decay, keys, weighted, ridge, query)]
    for a, k, w, diagonal, q in zip(*rows, strict=True):
        previous, state = state, a[..., None, None] * state + k.mT @ w
        found.append(solve((previous if before else state) + torch.diag_embed(diagonal), q))
    return torch.stack(found, dim=1), state


def conjugate_gradients(product: Product, diagonal: Tensor, query: Tensor, steps: int, exactly: bool = False) -> Tensor:
    """x of product(x) = query, of a symmetric positive product, from query / diagonal on (arXiv 2506.05233, section 3).

    diagonal: the product's. exactly: iterates to convergence in the last digit, at most 10 N steps or `steps`. A token
    that has converged is not changed further, so that its solution does not depend on the steps that others need.
    """
    x = query / diagonal
    rest = query - product(x)
    direction, size = rest, _square(rest)
    enough = torch.finfo(query.dtype).eps ** 2 * _square(query)
    for _ in range(max(steps, 10 * query.shape[-1]) if exactly else steps):
        ongoing = size > enough
        if exactly and not bool(ongoing.any()):
            break
        moved = product(direction)
        curve = (direction * moved).sum(-1, keepdim=True)
        length = torch.where(ongoing & (curve > 0), size / curve, 0.0)
        x, rest = x + length * direction, rest - length * moved
        size, last = _square(rest), size
        direction = rest + torch.where(last > 0, size / last, 0.0) * direction
    return x


def _square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True)


class Implicit(torch.autograd.Function):
    """Zero, with the gradient of the solution of a symmetric system by `rest`.

    rest: right side minus product(x), for an x without gradient. solve: (right side, *tensors) -> solution.
    """

    @staticmethod
    def forward(ctx: Any, rest: Tensor, solve: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """tensors: further arguments of `solve`, which must not change until backward."""
        ctx.solve = solve
        ctx.save_for_backward(*tensors)
        return torch.zeros_like(rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """The same solve, with the gradient as the right side."""
        refuse_second_order()
        (grad,) = grads
        tensors = ctx.saved_tensors
        return ctx.solve(grad, *tensors), None, *(None for _ in tensors)
