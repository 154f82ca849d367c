"""Two steps of the chunk form with explicit backward passes: the triangular system and the scan over chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import reduce_to, refuse_second_order, returned

BASE = 8  # rows of a diagonal block that uses forward substitution


def unit_lower_inverse(system: Tensor) -> Tensor:
    """(I - M)^-1 for strictly lower triangular M [..., L, L], by blocks.

    From the inverses of the diagonal blocks, X21 = X22 M21 X11: a third of the work of a dense inverse, all in matrix
    products. The smallest blocks use forward substitution like LAPACK, without powers of M, which overflow when keys
    repeat and β is near 2.
    """
    length = system.shape[-1]
    if length <= BASE:
        eye = torch.eye(length, dtype=system.dtype, device=system.device)
        return torch.linalg.solve_triangular(eye - system, eye, upper=False, unitriangular=True)
    half = (length + 1) // 2 if length < 2 * BASE else BASE * ((length // BASE + 1) // 2)
    if 2 * half == length:  # both halves in one batch
        blocks = torch.stack([system[..., :half, :half], system[..., half:, half:]], dim=-3)
        top, bottom = unit_lower_inverse(blocks).unbind(-3)
    else:
        top = unit_lower_inverse(system[..., :half, :half])
        bottom = unit_lower_inverse(system[..., half:, half:])
    out = system.new_zeros(system.shape)
    out[..., :half, :half] = top
    out[..., half:, half:] = bottom
    out[..., half:, :half] = bottom @ (system[..., half:, :half] @ top)
    return out


def _dot(x: Tensor, y: Tensor, n: int) -> Tensor:
    """The sum of x · y over P, [..., N, 1], or over N and P, [..., 1, 1], when n = 1."""
    x, y = (z.unsqueeze(-2) if n > 1 else z.flatten(-2)[..., None, None, :] for z in (x, y))
    return (x @ y.transpose(-1, -2)).squeeze(-1)


def add_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x + a b for x [..., L, P], a [..., L, K], b [..., K, P], without a tensor for the product."""
    a, b = (y.expand(*x.shape[:-2], -1, -1).flatten(0, -3) for y in (a, b))
    return torch.baddbmm(x.flatten(0, -3), a, b).view_as(x)


class UnitLowerSolve(torch.autograd.Function):
    """X = (I - M)^-1 R for two right-hand sides."""

    @staticmethod
    def forward(ctx: Any, system: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """system M: [..., L, L] strictly lower triangular; R: [..., L, K] each. Returns X [..., L, K] of each."""
        # Repeated keys with β near 2 give alternating sums, whose rounding errors reach every later chunk.
        inverse = unit_lower_inverse(system.double()).to(system.dtype)
        solved = inverse @ first, inverse @ second
        ctx.save_for_backward(inverse, *solved)
        return solved

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dR = (I - M)^-T dX;  dM = Σ dR Xᵀ below the diagonal."""
        refuse_second_order()  # the saved inverse would count as a constant
        inverse, *solved = ctx.saved_tensors
        first, second = (inverse.transpose(-1, -2) @ x for x in cotangents)
        system = (first @ solved[0].transpose(-1, -2)).add_(second @ solved[1].transpose(-1, -2))
        return system.tril_(-1), first, second


class Walk(torch.autograd.Function):
    """S ← total ⊙ S + endsᵀ (known + weight S) from chunk to chunk."""

    @staticmethod
    def forward(
        ctx: Any, total: Tensor, ends: Tensor, known: Tensor, weight: Tensor | None, initial: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """total [B|1, H|1, C|1, n, 1], ends [B, H, C, K, N], known [B, H, C, K, P], weight [B, H, C, K, N] or None.

        Returns the first state of every chunk [B, H, C, N, P], entries known + weight S [B, H, C, K, P] and the final
        state [B, H, N, P].
        """
        count = known.shape[2]
        totals = total.expand(-1, -1, count, -1, -1)
        starts = initial.new_empty(*initial.shape[:2], count, *initial.shape[2:])
        starts[:, :, 0] = initial
        places = [*starts.unbind(2), torch.empty_like(initial)]
        entries = known.view_as(known) if weight is None else torch.empty_like(known)
        writes = ends.transpose(-1, -2) @ known if weight is None else None
        for c in range(count):
            state, following = places[c : c + 2]
            if writes is not None:
                torch.addcmul(writes[:, :, c], totals[:, :, c], state, out=following)
                continue
            assert weight is not None
            entry = entries[:, :, c]
            torch.add(known[:, :, c], weight[:, :, c] @ state, out=entry)
            torch.addcmul(ends[:, :, c].transpose(-1, -2) @ entry, totals[:, :, c], state, out=following)
        ctx.save_for_backward(total, ends, entries, weight, starts)
        return starts, entries, returned(places[-1])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """The adjoint, from the last chunk: with G the gradient of a chunk's last state, dE = dentries + ends G."""
        total, ends, entries, weight, starts = ctx.saved_tensors
        dstarts, dentries, state = cotangents
        count = starts.shape[2]
        totals = total.expand(-1, -1, count, -1, -1)
        lasts = torch.empty_like(starts)  # G of every chunk
        if weight is not None:
            dentries = dentries.clone()
        for c in range(count - 1, -1, -1):  # without out=, so that this pass can be differentiated again
            lasts[:, :, c] = state
            before = torch.addcmul(dstarts[:, :, c], totals[:, :, c], state)
            if weight is not None:
                dentry = dentries[:, :, c]
                dentry += ends[:, :, c] @ state
                before += weight[:, :, c].transpose(-1, -2) @ dentry
            state = before
        if weight is None:
            dentries = add_product(dentries, ends, lasts)
        dtotal = reduce_to(_dot(lasts, starts, total.shape[-2]), total.shape)
        dends = entries @ lasts.transpose(-1, -2)
        dweight = None if weight is None else dentries @ starts.transpose(-1, -2)
        return dtotal, dends, dentries, dweight, state
