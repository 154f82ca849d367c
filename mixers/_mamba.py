"""The block around S6 and Longhorn."""

import math

import torch
from torch import Tensor, nn

from dsf.mixers._conv import ShortConv
from dsf.mixers._layers import undecayed
from dsf.mixers._module import Mixer, Side


class MambaBlock(Mixer):
    """The block of S6 and Longhorn: in_proj to (x, z), convolution, recurrence, gate silu(z), out_proj.

    One head whose value axis is the d_inner = expand · d_model channels. bare: neither convolution nor z.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        bare: bool = False,
    ):
        super().__init__()
        d_inner = expand * d_model
        dt_rank = dt_rank or math.ceil(d_model / 16)
        self.dims = (1, d_state, d_inner)
        self.in_proj = nn.Linear(d_model, d_inner if bare else 2 * d_inner, bias=False)
        self.conv1d = None if bare else ShortConv(d_inner, d_conv)
        self.x_proj = nn.Linear(d_inner, dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(dt_rank, d_inner)
        self.D = undecayed(torch.ones(d_inner))
        self.out_proj = nn.Linear(d_inner, d_model, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        u, *side = self.in_proj(x).split(self.dims[2], dim=-1)
        return u, tuple(side)

    def _low_rank(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u [B, T, d_inner] -> the step before its activation [B, T, 1, d_inner], two [B, T, 1, d_state]."""
        step, first, second = self.x_proj(u).split([self.dt_proj.in_features, self.dims[1], self.dims[1]], dim=-1)
        return self.dt_proj(step).unsqueeze(2), first.unsqueeze(2), second.unsqueeze(2)

    def readout(self, y: Tensor, side: Side) -> Tensor:
        y = y.flatten(2)
        for z in side:
            y = y * nn.functional.silu(z)
        return self.out_proj(y)
