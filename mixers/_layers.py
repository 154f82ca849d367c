"""Small pieces that several mixers share: norms, decay-rate initialisation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


def undecayed(start: Tensor) -> nn.Parameter:
    """A parameter that weight decay must leave alone, marked the way training code for Mamba looks for."""
    parameter = nn.Parameter(start)
    parameter._no_weight_decay = True  # type: ignore[attr-defined]
    return parameter


def log_uniform_dt_bias(size: int, dt_min: float = 1e-3, dt_max: float = 0.1, floor: float = 1e-4) -> Tensor:
    """A bias b [size] with softplus(b) log-uniform in [dt_min, dt_max] (the time-step init of Mamba)."""
    dt = torch.exp(torch.rand(size) * math.log(dt_max / dt_min) + math.log(dt_min)).clamp(min=floor)
    return inverse_softplus(dt)


def inverse_softplus(y: Tensor) -> Tensor:
    """x with softplus(x) = y, for y > 0; stable for small y."""
    return y + torch.log(-torch.expm1(-y))


def split_heads(x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Split [B, T, H1·D1 + H2·D2 + …] into [B, T, H1, D1], [B, T, H2, D2], … sizes: H1, D1, H2, D2, …"""
    heads, widths = sizes[::2], sizes[1::2]
    parts = x.split([h * d for h, d in zip(heads, widths, strict=True)], dim=-1)
    return tuple(part.unflatten(-1, (h, d)) for part, h, d in zip(parts, heads, widths, strict=True))
