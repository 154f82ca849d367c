"""Powers of matrices times vectors, in tables that double: x, A x, then A² of both, A⁴ of the four, and so on.

Their gradients are written out: autograd would take three times as many operations, each of few numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsf.kernels.affine import in_tf32


class Dense:
    """A as matrices [H, p, N, N] with p in {1, P}.

    What they multiply has their dtype: a vector of more digits would not keep them, as the squares round. Where torch
    may round float32 to tf32, powers are float64: of A¹⁰²⁴ an error of A is a thousand times as large.
    """

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        wide = torch.float64 if in_tf32(matrix) else matrix.dtype
        self.squares = [matrix.flatten(0, 1).to(wide)]  # A, A², A⁴, … as [H p, N, N]; a power needs about log2 of them

    def power(self, x: Tensor, count: int, adjoint: bool = False) -> Tensor:
        """A^count x, or (Aᵀ)^count x. x: [..., H, N, 1 or p]."""
        columns = self._columns(x)
        squares = self._squares(count.bit_length())
        for place, square in enumerate(squares):
            if count >> place & 1:
                columns = (square.mT if adjoint else square) @ columns
        return self._vectors(columns, 1, x).squeeze(0)

    def table(self, x: Tensor, count: int, stride: int, adjoint: bool) -> Tensor:
        """x, A^stride x, A^{2 stride} x, …: [count, ..., H, N, p]. stride: a power of two."""
        first, levels = stride.bit_length() - 1, (count - 1).bit_length()
        squares = self._squares(first + levels)[first:]
        return self._vectors(_table(self._columns(x), count, adjoint, squares), count, x)

    def _squares(self, count: int) -> list[Tensor]:
        """The first `count` of A, A², A⁴, …"""
        more = count - len(self.squares)
        if more > 0:
            plain = torch._C._are_functorch_transforms_active()
            self.squares += _squared(self.squares[-1], more) if plain else _Squares.apply(self.squares[-1], more)
        return self.squares[:count]

    def _columns(self, x: Tensor) -> Tensor:
        """Vectors [..., H, N, 1 or p] as columns of one product a matrix: torch would copy the matrices for each."""
        p = self.matrix.shape[1]
        several = x.reshape(-1, *x.shape[-3:]).to(self.squares[0].dtype)
        if p == 1:
            return several.permute(1, 2, 0, 3).flatten(2)
        return several.expand(-1, -1, -1, p).permute(1, 3, 2, 0).flatten(0, 1)

    def _vectors(self, columns: Tensor, count: int, like: Tensor) -> Tensor:
        """`count` times as many columns as those of `like`, as vectors [count, ..., H, N, p]."""
        heads, p = self.matrix.shape[:2]
        if p == 1:
            found = columns.unflatten(2, (count, -1, like.shape[-1])).permute(2, 3, 0, 1, 4)
        else:
            found = columns.unflatten(2, (count, -1)).unflatten(0, (heads, p)).permute(3, 4, 0, 2, 1)
        return found.reshape(count, *like.shape[:-3], *found.shape[2:]).to(like.dtype)


def _squared(matrix: Tensor, count: int) -> tuple[Tensor, ...]:
    """A², A⁴, …, `count` of them."""
    found = [matrix]
    for _ in range(count):
        found.append(torch.bmm(found[-1], found[-1]))
    return tuple(found[1:])


class _Squares(torch.autograd.Function):
    """`_squared`."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, count: int) -> tuple[Tensor, ...]:
        found = _squared(matrix, count)
        ctx.save_for_backward(matrix, *found[:-1])
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, None]:
        slope = given[-1]
        for x, own in zip(reversed(ctx.saved_tensors), (*reversed(given[:-1]), None), strict=True):
            if slope is None:
                slope = own
                continue
            part = torch.bmm(x.mT, slope) if own is None else torch.baddbmm(own, x.mT, slope)
            slope = torch.baddbmm(part, slope, x.mT)
        return slope, None


def _table(x: Tensor, count: int, adjoint: bool, squares: Sequence[Tensor]) -> Tensor:
    """x [G, N, q], A x, A² x, … [G, N, count q], where A is the first of the squares, each that of the one before."""
    if not squares or torch._C._are_functorch_transforms_active():
        return _doubled(x, count, adjoint, squares)
    return _Table.apply(x, count, adjoint, *squares)


def _doubled(x: Tensor, count: int, adjoint: bool, squares: Sequence[Tensor]) -> Tensor:
    found, width = x, count * x.shape[-1]
    for square in squares:
        more = found[..., : width - found.shape[-1]]
        found = torch.cat([found, torch.bmm(square.mT if adjoint else square, more)], -1)
    return found


class _Table(torch.autograd.Function):
    """`_doubled`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, adjoint: bool, *squares: Tensor) -> Tensor:
        found = _doubled(x, count, adjoint, squares)
        ctx.save_for_backward(found, *squares)
        ctx.width, ctx.adjoint = x.shape[-1], adjoint
        return found

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        (found, *squares), (slope,) = ctx.saved_tensors, given
        slopes = list[Tensor | None]()
        for level in reversed(range(len(squares))):
            square, place = squares[level], ctx.width << level
            known, late = slope[..., :place], slope[..., place:]
            early = found[..., : late.shape[-1]]
            both = (early, late.mT) if ctx.adjoint else (late, early.mT)
            slopes.append(torch.bmm(*both) if ctx.needs_input_grad[3 + level] else None)
            slope = torch.baddbmm(known[..., : late.shape[-1]], square if ctx.adjoint else square.mT, late)
            if late.shape[-1] < place:  # the last columns were not multiplied
                slope = torch.cat([slope, known[..., late.shape[-1] :]], -1)
        return slope, None, None, *reversed(slopes)
