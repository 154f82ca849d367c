"""The norm and the gate behind many recurrences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dsf.kernels.norm import activated, gated, gated_rms_norm

if TYPE_CHECKING:
    from dsf.parallel.shares import Shares

__all__ = ["GatedRMSNorm", "gated"]


class GatedRMSNorm(nn.RMSNorm):
    """RMSNorm over the last axis in `groups` equal parts, with an optional gate before or after it.

    Mamba-2 gates first (gate_first=True); Gated DeltaNet norms each head, then gates. activation: the gate's, "silu"
    or "sigmoid". gate None: no gate. Computed in at least float32, and rounded once to the dtype of x.
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
        """x, gate: [..., dim] -> [..., dim]."""
        eps = 1e-5 if self.eps is None else self.eps
        if self.shares is not None:
            return self._shared(x, gate, eps, self.shares)
        return gated_rms_norm(x, self.weight, gate, self.groups, self.gate_first, self.activation, eps)

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
