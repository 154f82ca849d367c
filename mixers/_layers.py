"""Small pieces that several mixers share: norms, splitting into heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsf.mixers._own import Start, fill


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum x² + eps) along the last axis, computed in float32 at least. x: [..., N] -> [..., N]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


class GatedRMSNorm(nn.RMSNorm):
    """RMSNorm over the last axis in `groups` equal parts, with an optional SiLU gate before or after it.

    Mamba-2 gates first (gate_first=True); Gated DeltaNet norms each head, then gates. gate None: the plain
    norm.
    """

    def __init__(self, dim: int, groups: int = 1, gate_first: bool = False, eps: float = 1e-5):
        super().__init__(dim, eps=eps)
        self.groups = groups
        self.gate_first = gate_first

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """x, gate: [..., dim] -> [..., dim]."""
        if gate is not None and self.gate_first:
            x = x * F.silu(gate)
        parts = x.unflatten(-1, (self.groups, -1))
        x = F.rms_norm(parts, parts.shape[-1:], eps=self.eps).flatten(-2) * self.weight
        return x if gate is None or self.gate_first else x * F.silu(gate)


def split_heads(x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Split [B, T, H1·D1 + H2·D2 + …] into [B, T, H1, D1], [B, T, H2, D2], … sizes: H1, D1, H2, D2, …"""
    heads, widths = sizes[::2], sizes[1::2]
    parts = x.split([h * d for h, d in zip(heads, widths, strict=True)], dim=-1)
    return tuple(part.unflatten(-1, (h, d)) for part, h, d in zip(parts, heads, widths, strict=True))


class StartLinear(nn.Linear):
    """A linear map whose weight begins as start(out_features, in_features), and its bias as zeros."""

    def __init__(self, in_features: int, out_features: int, start: Start, bias: bool = False):
        self.start = start
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weight again; the bias is zero."""
        fill(self.weight, self.start)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
