"""Eigenvalues of a diagonal plus a symmetric rank-one matrix without forming it, vectorised over matrices and roots."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1 << 19  # numbers in a block: fewer cost more calls, more do not fit the cache
PASSES = 3  # steps on all roots of a block before converged ones are removed
ROUNDS = 60  # rounds of PASSES at most; from PATIENCE on one step a round halves the bracket, so that all cases end
PATIENCE = 8
ACCURACY = 1e-13  # tolerance of a root, in units of the spectrum's extent
APART = 1e-11  # entries of d nearer than this count as one
SMALLEST = 1e-12  # |z_i| below count as this: moves eigenvalues by its square at most


class _Roots(NamedTuple):
    """Roots that have not converged, [M, R] each, R roots of each of M matrices; places are relative to the nearest
    pole.

    matrix [M]: index of the matrix. pole, near: index of the nearest pole, and its z². far: place of the pole on the
    other side (for the last root, which has none, that of the last pole but one). side: -1 for the last root, else 1.
    at, low, high: the estimate and its bracket. place: index in the result.
    """

    matrix: Tensor
    pole: Tensor
    near: Tensor
    far: Tensor
    side: Tensor
    at: Tensor
    low: Tensor
    high: Tensor
    place: Tensor


def eigenvalues_of_update(d: Tensor, weights: Tensor) -> Tensor:
    """Eigenvalues of diag(d) + z zᵀ with z² = weights ≥ 0, two tensors [M, N] -> [M, N], ascending, to 1e-10 of their
    extent.

    Roots of the secular equation 1 + Σ z_i²/(d_i - λ) = 0: one between neighbouring entries of d, and one above them
    all (Golub 1973). Each step interpolates with the two poles around the root (Li, LAPACK working note 89: the nearer
    pole exactly, all others as one pole on the other side), inside a bracket. Equal entries are one pole with the sum
    of their weights. Computed in float64; the results have d's dtype.
    """
    if d.shape[-1] == 1:
        return d + weights
    order = d.double().sort(-1)
    low, weights = order.values[:, :1], weights.double().gather(-1, order.indices)
    total = weights.sum(-1, keepdim=True)
    extent = torch.maximum(order.values[:, -1:] - low, total)
    extent = torch.where(extent > 0, extent, 1.0)
    poles = (order.values - low) / extent
    again = torch.nn.functional.pad(poles.diff(dim=-1) <= APART, (1, 0))  # the same pole as the one before
    index = torch.arange(d.shape[-1], device=d.device).expand_as(poles)
    first = torch.where(again, 0, index).cummax(-1).values
    summed = torch.zeros_like(poles).scatter_add(-1, first, weights / extent).sqrt()
    z = torch.where(again, 0.0, summed.clamp(min=SMALLEST))
    found = _solve(poles.gather(-1, first), z, first, total / extent)
    return (found * extent + low).to(d.dtype)


def _solve(poles: Tensor, z: Tensor, first: Tensor, total: Tensor) -> Tensor:
    """The roots [M, N], in units of the extent."""
    count, n = poles.shape
    step = max(1, BLOCK // (n * n))
    room = torch.empty(step * n * n, dtype=poles.dtype, device=poles.device)  # a new tensor would double the cost
    origins, found, left = torch.empty_like(poles), torch.empty_like(poles), []
    for i in range(0, count, step):
        part = slice(i, i + step)
        roots = _start(poles[part], z[part], first[part], total[part], i, room)
        origins[part] = poles[part].gather(1, roots.pole)
        left.append(_advance(poles, z, roots, found, room))
    for turn in range(ROUNDS):
        rest = _Roots(*(torch.cat(parts) for parts in zip(*left, strict=True)))
        if not len(rest.matrix):
            break
        blocks = zip(*(x.split(step * n) for x in rest), strict=True)
        left = [_advance(poles, z, _Roots(*b), found, room, halve=turn >= PATIENCE) for b in blocks]
    return origins + found


def _start(poles: Tensor, z: Tensor, first: Tensor, total: Tensor, offset: int, room: Tensor) -> _Roots:
    """First estimates. The sign of the secular function half-way between two poles tells which pole is nearer."""
    count, n = poles.shape
    half = torch.cat([poles.diff(dim=-1), total], dim=-1) / 2
    last = (torch.arange(n, device=poles.device) == n - 1).expand(count, n)
    terms = room[: count * n * n].view(count, n, n)
    torch.sub(poles.unsqueeze(1), (poles + half).unsqueeze(-1), out=terms)
    value = 1 + _dot(torch.div(z.unsqueeze(1), terms, out=terms), z)
    above = (value <= 0) & ~last  # the right pole is the nearer one
    index = torch.arange(n, device=poles.device)
    pole = first.gather(1, index + above.long())
    beside = torch.where(last, (first - 1).clamp(min=0), index + (~above & ~last).long())
    other = first.gather(1, beside)
    near, rest = z.gather(1, pole) ** 2, z.gather(1, other) ** 2
    far = poles.gather(1, other) - poles.gather(1, pole)
    far = torch.where(far == 0, -1.0, far)  # all poles coincide: any place will do
    middle = torch.where(above, -half, half)
    low = torch.where(above, -half, torch.where(value < 0, half, 0.0))  # beyond half-way: the last root only
    high = torch.where(above, 0.0, torch.where(value < 0, 2 * half, half))
    side = torch.where(last, -1.0, 1.0).to(poles.dtype)
    estimate = _two_poles(value + near / middle - rest / (far - middle), near, rest, far, side)
    place = torch.arange(offset * n, (offset + count) * n, device=poles.device).view(count, n)
    matrix = torch.arange(offset, offset + count, device=poles.device)
    return _Roots(matrix, pole, near, far, side, _within(estimate, low, high), low, high, place)


def _advance(poles: Tensor, z: Tensor, roots: _Roots, found: Tensor, room: Tensor, halve: bool = False) -> _Roots:
    """Take PASSES steps; write the estimates into found, and return the roots that need more, one a row."""
    those, own = poles[roots.matrix], z[roots.matrix]
    origin, pole = those.gather(1, roots.pole).unsqueeze(-1), roots.pole.unsqueeze(-1)
    terms = room[: roots.at.numel() * own.shape[-1]].view(*roots.at.shape, -1)
    at, low, high = roots.at, roots.low, roots.high
    for step in range(PASSES):
        torch.sub(those.unsqueeze(1), origin, out=terms).sub_(at.unsqueeze(-1))
        torch.div(own.unsqueeze(1), terms, out=terms).scatter_(-1, pole, 0)  # all poles but the nearest
        rest = 1 + _dot(terms, own)
        slope = torch.linalg.vector_norm(terms, dim=-1) ** 2
        value, apart = rest - roots.near / at, roots.far - at
        low, high = torch.where(value <= 0, at, low), torch.where(value >= 0, at, high)
        estimate = _two_poles(rest - apart * slope, roots.near, slope * apart**2, roots.far, roots.side)
        after = (low + high) / 2 if halve and step == 0 else _within(estimate, low, high)
        moved, at = (after - at).abs(), after
    found.view(-1)[roots.place] = at
    open_ = moved**2 > ACCURACY * torch.minimum(roots.far.abs(), at.abs())  # convergence is quadratic
    open_ &= (moved > ACCURACY) & (high - low > ACCURACY)
    where = open_.nonzero(as_tuple=True)
    now = roots._replace(at=at, low=low, high=high, matrix=roots.matrix.unsqueeze(-1).expand_as(at))
    rows = _Roots(*(x[where].unsqueeze(-1) for x in now))
    return rows._replace(matrix=rows.matrix.squeeze(-1))


def _dot(terms: Tensor, z: Tensor) -> Tensor:
    """[M, R, N] times [M, N] -> [M, R]; where R = 1 a matrix product would be slower."""
    return (terms * z.unsqueeze(1)).sum(-1) if terms.shape[1] == 1 else (terms @ z.unsqueeze(1).mT).squeeze(-1)


def _two_poles(rest: Tensor, near: Tensor, other: Tensor, far: Tensor, side: Tensor) -> Tensor:
    """The zero of rest - near/x + other/(far - x): between 0 and far, or where side < 0 beyond 0 on the side away
    from far.
    """
    linear = rest * far + near + other
    root = side * (linear**2 - 4 * rest * near * far).clamp(min=0).sqrt()
    return torch.where(side * linear <= 0, (linear - root) / (2 * rest), 2 * near * far / (linear + root))


def _within(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """x, or the middle of its bracket where x is outside by more than rounding errors."""
    inside = x.clamp(min=low, max=high)
    return torch.where((x - inside).abs() <= 1e-6 * inside.abs(), inside, (low + high) / 2)
