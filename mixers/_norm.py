"""The norm and the gate behind many recurrences."""

from __future__ import annotations

from torch import Tensor, nn

from dsf.kernels.norm import gated, gated_rms_norm

__all__ = ["GatedRMSNorm", "gated"]


class GatedRMSNorm(nn.RMSNorm):
    """RMSNorm over the last axis in `groups` equal parts, with an optional gate before or after it.

    Mamba-2 gates first (gate_first=True); Gated DeltaNet norms each head, then gates. activation: the gate's, "silu"
    or "sigmoid". gate None: the plain norm. Computed in float32 at least, rounded once to the dtype of x.
    """

    def __init__(
        self, dim: int, groups: int = 1, gate_first: bool = False, eps: float = 1e-5, activation: str = "silu"
    ):
        super().__init__(dim, eps=eps)
        self.groups = groups
        self.gate_first = gate_first
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """x, gate: [..., dim] -> [..., dim]."""
        eps = 1e-5 if self.eps is None else self.eps
        return gated_rms_norm(x, self.weight, gate, self.groups, self.gate_first, self.activation, eps)
