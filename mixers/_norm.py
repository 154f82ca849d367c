"""The norm and the gate behind many recurrences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsf import Expr, N, dot, rsqrt, sum_key
from dsf.kernels.norm import activated, gated, gated_rms_norm
from dsf.mixers._beside import hooked, weight_for

if TYPE_CHECKING:
    from dsf.parallel.shares import Shares

__all__ = ["GatedRMSNorm", "LayerNorm", "gated", "layer_norm", "normed"]


class GatedRMSNorm(nn.RMSNorm):
    """RMSNorm of `groups` equal parts of the last axis, with an optional gate before it or after it.

    gate_first: multiply by the gate before the norm, as Mamba-2 does; False: after it, as Gated DeltaNet does.
    activation: of the gate, "silu" or "sigmoid". Computed in at least float32, and rounded once to the dtype of x.
    """

    def __init__(
        self, dim: int, groups: int = 1, gate_first: bool = False, eps: float = 1e-5, activation: str = "silu"
    ):
        super().__init__(dim, eps=eps)
        self.groups = groups
        self.gate_first = gate_first
        self.activation = activation
        self.shares: Shares | None = None  # the ranks that share the channels of one group

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """x and gate [..., dim] -> [..., dim]. gate: None for no gate."""
        if self.shares is not None:
            return self._shared(x, gate, 1e-5 if self.eps is None else self.eps, self.shares)
        return self.fused(x, gate)

    def fused(self, x: Tensor, gate: Tensor | None, then: Tensor | None = None) -> Tensor:
        """The norm and the gate; then: the weight of a linear map that follows, or None."""
        eps = 1e-5 if self.eps is None else self.eps
        how = (self.groups, self.gate_first, self.activation, eps)
        return gated_rms_norm(x, self.weight, gate, *how, then=then)

    def _shared(self, x: Tensor, gate: Tensor | None, eps: float, shares: Shares) -> Tensor:
        """The norm over all ranks' channels; x, gate and weight are this rank's part."""
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        if gate is not None and self.gate_first:
            y = y * activated(gate.to(y.dtype), self.activation)
        mean = shares.sum(y.square().sum(-1, keepdim=True)) / (shares.ranks * y.shape[-1])
        y = y * torch.rsqrt(mean + eps) * self.weight.to(y.dtype)
        if gate is not None and not self.gate_first:
            y = y * activated(gate.to(y.dtype), self.activation)
        return y.to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm. On a CPU it is computed in float32 at least: there torch adds up gradients of half-precision
    weights and biases in their own dtype, so that the sum of a bfloat16 bias over 4,000 tokens is off by a half."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim] -> the same shape and dtype."""
        if not x.is_cpu or x.dtype.itemsize >= 4:
            return super().forward(x)
        weight, bias = (None if p is None else p.float() for p in (self.weight, self.bias))
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


def layer_norm(y: Expr, eps: float = 1e-5) -> Expr:
    """LayerNorm of each head without weight and bias, as an expression for `dsf.tokenwise`."""
    centred = y - sum_key(y) / N
    return centred * rsqrt(dot(centred, centred) / N + eps)


def normed(norm: nn.Module, y: Tensor, gate: Tensor | None, then: nn.Module) -> Tensor:
    """then(norm(y, gate)), for y [B, T, H, P] or [B, T, channels]; `then` gets all heads as one row.

    If both are plain modules, a GPU's backward pass computes the norm's result again, so that it need not be kept.
    """
    if type(norm) is GatedRMSNorm and norm.shares is None and not hooked(norm):
        weight = weight_for(then, y)
        if weight is not None:
            return norm.fused(y, gate, weight).flatten(2)  # one head is an axis of its own there
    return then(norm(y, gate).flatten(2))
