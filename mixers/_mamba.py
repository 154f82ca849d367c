"""The block around S6 and Longhorn."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsf.mixers._conv import ShortConv
from dsf.mixers._module import Mixer, Side
from dsf.mixers._norm import gated
from dsf.mixers._own import Owner, time_step, uniform


class TimeStep(Owner):
    """The linear map to Mamba's time steps, softplus of its bias log-uniform in [dt_min, dt_max] at start.

    Not an `nn.Linear`, so that initialisation by class (transformers' `_init_weights`) leaves it alone.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, in_features: int, out_features: int, dt_min: float, dt_max: float):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.own("weight", partial(uniform, bound=in_features**-0.5), out_features, in_features)
        self.own("bias", partial(time_step, dt_min=dt_min, dt_max=dt_max), out_features, kind="vector")

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        return nn.functional.linear(x, self.weight, self.bias)


class MambaBlock(Mixer):
    """The block of S6 and Longhorn: in_proj to (x, z), convolution, recurrence, gate silu(z), out_proj.

    One head whose value axis is the d_inner = expand · d_model channels. bare: neither convolution nor z.
    """

    D: Tensor
    dt_proj: nn.Linear | TimeStep

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        d_inner = self.inner(d_model, expand)
        dt_rank = dt_rank or math.ceil(d_model / 16)
        self.dims = (1, d_state, d_inner)
        self.in_proj = nn.Linear(d_model, d_inner if bare else 2 * d_inner, bias=False)
        self.conv1d = None if bare else ShortConv(d_inner, d_conv)
        self.x_proj = nn.Linear(d_inner, dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(dt_rank, d_inner)
        self.own("D", torch.ones, d_inner, kind="rate")
        self.out_proj = nn.Linear(d_inner, d_model, bias=False)
        self.place(device, dtype)

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
            y = gated(y, z)
        return self.out_proj(y)
