"""Products with decays by key between all rows of a chunk, one lag at a time, without a tensor [L, L, N]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsf.kernels.operators import broadcast_shape, reduce_to, refuse_second_order


def _lagged(decay: Tensor) -> list[Tensor]:
    """D_d [..., L - d, N] for d = 0 … L - 1: row i - d of it is a_i … a_{i-d+1}, of decays a [..., L, N]."""
    length = decay.shape[-2]
    found = [torch.ones_like(decay)]
    for d in range(1, length):
        found.append(found[-1].narrow(-2, 1, length - d) * decay.narrow(-2, 1, length - d))
    return found


class _Lagged:
    """The form Σ w[i, r, j, g] y[i, r] · (D[i, j] ⊙ x[j, g]) over i ≥ j, D[i, j] = a_i … a_{j+1}, one lag at a time.

    decay a: [..., L, N]; w: [..., L, R, L, G]; y: [..., L, R, N]; x: [..., L, G, N].
    """

    def __init__(self, decay: Tensor) -> None:
        self.decay, self.products, self.length = decay, _lagged(decay), decay.shape[-2]

    def _lead(self, *shapes: torch.Size) -> tuple[int, ...]:
        """The broadcast leading axes of these and of the decays."""
        return broadcast_shape(*shapes, self.decay.shape[:-2])

    def read(self, w: Tensor, x: Tensor) -> Tensor:
        """The gradient by y: Σ_j w[i, r, j, g] D[i, j] ⊙ x[j, g]."""
        out = x.new_zeros(*self._lead(w.shape[:-4], x.shape[:-3]), *w.shape[-4:-2], x.shape[-1])
        for d, product in enumerate(self.products):
            whole = _combine(_lag(w, d), x.narrow(-3, 0, self.length - d))
            out.narrow(-3, d, self.length - d).addcmul_(product.unsqueeze(-2), whole)
        return out

    def weigh(self, y: Tensor, x: Tensor) -> Tensor:
        """The gradient by w, lower triangular: y[i, r] · (D[i, j] ⊙ x[j, g])."""
        lead, length = self._lead(y.shape[:-3], x.shape[:-3]), self.length
        out = x.new_zeros(*lead, length, y.shape[-2], length, x.shape[-2])
        for d, product in enumerate(self.products):
            seen = y.narrow(-3, d, length - d) * product.unsqueeze(-2)
            _lag(out, d).copy_(_contract(seen, x.narrow(-3, 0, length - d)))
        return out

    def gradients(self, w: Tensor, y: Tensor, x: Tensor, in_w: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients by decay, by w (in_w) or y, and by x."""
        length, dx = self.length, torch.zeros_like(x)
        other = torch.zeros_like(w) if in_w else torch.zeros_like(y)
        da, carried = torch.zeros_like(self.decay), None
        for d in range(length - 1, -1, -1):
            product, weight = self.products[d].unsqueeze(-2), _lag(w, d)
            early, late = x.narrow(-3, 0, length - d), y.narrow(-3, d, length - d)
            whole, seen = _combine(weight, early), late * product
            if in_w:
                own = _lag(other, d)
                own.copy_(reduce_to(_contract(seen, early), own.shape))
            else:
                _add_product(other.narrow(-3, d, length - d), product, whole)
            _add(dx.narrow(-3, 0, length - d), weight.transpose(-1, -2), seen)
            if d == 0:
                break
            direct = late * whole
            direct = direct.squeeze(-2) if direct.shape[-2] == 1 else direct.sum(-2)
            if carried is not None:  # the gradient of the next lag's product, of which this one is a factor
                direct.narrow(-2, 1, length - d - 1).addcmul_(carried, self.decay.narrow(-2, 1, length - d - 1))
            before = self.products[d - 1].narrow(-2, 1, length - d)
            _add_product(da.narrow(-2, 1, length - d), direct, before)
            carried = direct
        return da, other, dx


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a b, summed over axes that out lacks."""
    if (*map(max, a.shape, b.shape),) == out.shape:  # broadcast_shapes takes longer than the product
        out.addcmul_(a, b)
    else:
        out.add_(reduce_to(a * b, out.shape))


def _add(out: Tensor, w: Tensor, x: Tensor) -> None:
    """out += Σ_g w[..., r, g] x[..., g, n], summed over axes that out lacks."""
    if w.shape[-1] == 1:
        _add_product(out, w, x)
    else:
        out.add_(reduce_to(_combine(w, x), out.shape))


def _lag(w: Tensor, d: int) -> Tensor:
    """w[i, r, i - d, g] for i ≥ d, a view: [..., L, R, L, G] -> [..., L - d, R, G]."""
    return w.diagonal(-d, -4, -2).movedim(-1, -3)


def _combine(w: Tensor, x: Tensor) -> Tensor:
    """Σ_g w[..., r, g] x[..., g, n]."""
    return w * x if w.shape[-1] == 1 else (w.unsqueeze(-1) * x.unsqueeze(-3)).sum(-2)


def _contract(y: Tensor, x: Tensor) -> Tensor:
    """Σ_n y[..., r, n] x[..., g, n]."""
    return (y.unsqueeze(-2) * x.unsqueeze(-3)).sum(-1)


class _Half(torch.autograd.Function):
    """A gradient of the form; its own gradients are the other ones.

    forward saves (decay, w, x) or (decay, y, x), and sets in_w for w.
    """

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the arguments of forward."""
        refuse_second_order()
        decay, given, x = ctx.saved_tensors
        w, y = (given, cotangents[0]) if ctx.in_w else (cotangents[0], given)
        return _Lagged(decay).gradients(w, y, x, ctx.in_w)


class LaggedRead(_Half):
    """_Lagged.read of (decay, w, x)."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, w: Tensor, x: Tensor) -> Tensor:
        """Shapes as in _Lagged -> [..., L, R, N]."""
        ctx.save_for_backward(decay, w, x)
        ctx.in_w = True
        return _Lagged(decay).read(w, x)


class LaggedWeights(_Half):
    """_Lagged.weigh of (decay, y, x)."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, y: Tensor, x: Tensor) -> Tensor:
        """Shapes as in _Lagged -> [..., L, R, L, G]."""
        ctx.save_for_backward(decay, y, x)
        ctx.in_w = False
        return _Lagged(decay).weigh(y, x)
