"""Singular values and eigenvalues of many matrices, of which some may have entries that are not finite; the spectral
norm of a diagonal plus a rank-one matrix without forming the matrix, vectorised over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 1 << 20  # numbers in a block of matrices, which fits a cache
SPLIT = 0.487  # where a bracket is cut: the half of a round number may be a pole (d² = 1 below 4), whose count is lost
SWEEPS = 58  # cuts of the bracket: float64 has 53 bits


def norms(d: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Spectral norms of diag(d) + l rᵀ: three tensors [M, N] -> [M], in float64.

    AᵀA = D² + W S Wᵀ with W = [D l, r]: bisection on the number of its eigenvalues above λ, which the inertia of a 2 x
    2 matrix gives (Sylvester's law).
    """
    wide = [x.double() for x in (d, left, right)]
    step = max(1, BLOCK // d.shape[-1])
    parts = [_norms(*(x[i : i + step] for x in wide)) for i in range(0, len(d), step)]
    return torch.cat(parts).to(d.dtype)


def _norms(d: Tensor, left: Tensor, right: Tensor) -> Tensor:
    square, u = d * d, d * left
    c = (left * left).sum(-1)
    low = torch.zeros_like(c)
    high = (d.abs().amax(-1) + c.sqrt() * right.norm(dim=-1)) ** 2
    for _ in range(SWEEPS):
        middle = low + SPLIT * (high - low)
        far = square - middle.unsqueeze(-1)
        far = torch.where(far == 0, 1e-300, far)
        k11 = c - (u * u / far).sum(-1)
        k12 = -1 - (u * right / far).sum(-1)
        k22 = -(right * right / far).sum(-1)
        determinant = k11 * k22 - k12 * k12
        positive = torch.where(determinant < 0, 1, torch.where(k11 + k22 > 0, 2, 0))
        above = (far > 0).sum(-1) + positive - 1 > 0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return ((low + high) / 2).sqrt()


def singular_values(x: Tensor) -> Tensor:
    """Singular values of matrices [..., N, M], largest first; nan where an entry is not finite."""
    return _finite(torch.linalg.svdvals, x)


def spectral_norm(x: Tensor) -> Tensor:
    """The largest singular value of matrices [..., N, M]; nan where an entry is not finite."""
    return singular_values(x)[..., 0]


def general_eigenvalues(x: Tensor) -> Tensor:
    """Complex eigenvalues of matrices [..., N, N]; nan where an entry is not finite."""
    return _finite(torch.linalg.eigvals, x)


def _finite(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function of each matrix, which LAPACK refuses for a whole batch where one number is not finite."""
    whole = x.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    return torch.where(whole.squeeze(-1), function(torch.where(whole, x, 0.0)), math.nan)
