"""The block around S6 and Longhorn."""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dsf.kernels.product import linear
from dsf.mixers._beside import product_of
from dsf.mixers._conv import ShortConv
from dsf.mixers._module import Mixer, Side
from dsf.mixers._norm import gated
from dsf.mixers._own import Owner, time_step, uniform

if TYPE_CHECKING:
    from dsf.parallel import Cuts


class TimeStep(Owner):
    """The linear map to Mamba's time steps; softplus of its initial bias is log-uniform in [dt_min, dt_max].

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
        return linear(x, self.weight, bias=self.bias)


class MambaBlock(Mixer):
    """The block of S6 and Longhorn: in_proj to (x, z), convolution, recurrence, gate silu(z), out_proj.

    It has d_inner = expand · d_model channels. They are the Value axis of one head, unless a subclass makes each
    channel a head. dt_rank: numbers that the map to the time steps goes through; None: d_model / 16, rounded up. bare:
    neither convolution nor z.
    """

    beside = ("in_proj",)
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
        self.conv1d = None if bare or not d_conv else ShortConv(d_inner, d_conv)
        self.x_proj = nn.Linear(d_inner, dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(dt_rank, d_inner)
        self.own("D", torch.ones, d_inner, kind="rate")
        self.out_proj = nn.Linear(d_inner, d_model, bias=False)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        """Declare a rank's part of this layer where ranks share its channels (`dsf.parallel.HeadShard`)."""
        channels = self.channels
        self.cut_between(to)
        to.rows(self.in_proj, *[channels] * (self.in_proj.out_features // channels))
        to.summed(self.out_proj)

    def cut_between(self, to: "Cuts") -> None:
        """`cut` without the projections in and out."""
        to.over_channels()
        to.conv(self.conv1d)
        to.mixed(self.x_proj)
        to.rows(self.dt_proj)
        to.own(self, *self.starts)

    @property
    def channels(self) -> int:
        """The number of this rank's channels; d_inner without ranks."""
        heads, _, p = self.dims
        return heads * p

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        u, *side = self.first_map(x, self.in_proj).split(self.channels, dim=-1)
        return u, tuple(side)

    def _low_rank(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u [B, T, d_inner] -> the step before its activation [B, T, 1, d_inner], two [B, T, 1, d_state]."""
        step, first, second = product_of(u, self.x_proj).split(
            [self.dt_proj.in_features, self.dims[1], self.dims[1]], dim=-1
        )
        return product_of(step, self.dt_proj).unsqueeze(2), first.unsqueeze(2), second.unsqueeze(2)

    def readout(self, y: Tensor, side: Side) -> Tensor:
        y = y.flatten(2)
        for z in side:
            y = gated(y, z)
        return product_of(y, self.out_proj)


def grouped(layer: Any, to: "Cuts") -> tuple[int, ...]:
    """The sections x, b, c, ... of `layer.split`; a rank gets whole groups, or a part of a single group, and its part
    of every width.

    A group has one b, c, ... a token, or several, each of which is a section.
    """
    heads, p, rows, n, *_ = layer.split
    groups, keys = layer.n_groups, len(layer.split) // 2 - 1
    each = rows // groups
    to.set(widths=[to.share(width) for width in layer.widths])
    if groups == 1 and to.ranks > 1:
        to.count(d_state=n)
        to.set(split=(to.share(heads), p, *(each, to.share(n)) * keys))
    else:
        to.count(n_groups=groups)
        to.set(n_groups=to.share(groups), split=(to.share(heads), p, *(each * to.share(groups), n) * keys))
    return heads * p, *[groups * n] * (keys * each)


def whole_group(layer: Any, *keys: Tensor) -> tuple[Tensor, ...]:
    """b, c, ... [B, T, groups, N], gathered where each rank holds a part of a single group."""
    if layer.shares is None or layer.n_groups > 1 or keys[0].shape[-1] >= layer.dims[1]:
        return keys
    return layer.shares.gather(*keys)
