"""The common parts of RWKV layers: token shift, its mixing coefficients, initial values by depth."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dsf import Expr
from dsf.kernels.mixture import token_mixtures
from dsf.language.errors import InputError
from dsf.mixers._conv import TokenShift
from dsf.mixers._module import Mixer, Side
from dsf.mixers._norm import layer_norm

EPS = 64e-5  # of the norm of each head, as in the released training code


class TimeMix(Mixer):
    """Base of the RWKV layers: the input of every projection is its own mixture of a token and the one before.

    Initial values depend on the layer's place in the model, layer_idx of n_layers, which is the middle if either is
    None. bare: no token shift, and no coefficients for it.
    """

    def __init__(self, d_model: int, n_layers: int | None, bare: bool, layer_idx: int | None):
        super().__init__(layer_idx)
        index = 0 if layer_idx is None else layer_idx
        if n_layers is not None and not 0 <= index < n_layers:
            raise InputError(f"{type(self).__name__}: layer_idx is {layer_idx}, but n_layers {n_layers}")
        known = layer_idx is not None and n_layers is not None
        # The layer's depth, from 0 to 1 and from 1 to almost 0, by the names of the released training code.
        self.depth = index / max(n_layers - 1, 1) if known and n_layers is not None else 0.5
        self.height = 1 - index / n_layers if known and n_layers is not None else 0.5
        self.conv1d = None if bare else TokenShift(d_model)

    def mix(self, name: str, d_model: int, power: float, more: float = 0.0, rest: bool = True) -> None:
        """Register the coefficients (c / d_model)^power + more of channels c; with rest, 1 minus these."""
        if self.conv1d is not None:
            self.own(name, partial(_ladder, power=power, more=more, rest=rest), d_model, kind="vector")

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        return x, (x,)

    def mixtures(
        self, names: Sequence[str], x: Tensor, other: Tensor, more: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """For each name x + coefficients · (other - x), or x itself without a token shift. more [names, B, T, d_model]:
        what each token adds to the coefficients."""
        if self.conv1d is None:
            return (x,) * len(names)
        return token_mixtures(x, other, [getattr(self, name) for name in names], more)


def _ladder(size: int, power: float, more: float, rest: bool) -> Tensor:
    mixed = (torch.arange(size) / size) ** power + more
    return 1 - mixed if rest else mixed


def ramp(*shape: int, low: float, range_: float, power: float) -> Tensor:
    """low + range_ · x^power for x from 0 to 1 over all entries."""
    size = torch.Size(shape).numel()
    return (low + range_ * (torch.arange(size) / max(size - 1, 1)) ** power).reshape(shape)


def zigzag(size: int) -> Tensor:
    """0, 1, -1, 0, 1, -1, ..., which tells neighbouring channels apart."""
    return (torch.arange(size) + 1) % 3 - 1.0


def group_norm(y: Expr, weight: Expr, bias: Expr) -> Expr:
    """LayerNorm of each head, then weight and bias of each channel, as an expression."""
    return layer_norm(y, EPS) * weight + bias


def group_norm_by_torch(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same of tensors [B, T, H, N], [H, N]."""
    return torch.nn.functional.layer_norm(y, y.shape[-1:], eps=EPS) * weight + bias
