"""Hydra: a quasiseparable matrix, which is the state space of Mamba-2 in both directions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsf
from dsf import Key, Packing, Param, Scalar, System, Value, exp, softplus
from dsf.call.frame import Places, shifted
from dsf.call.packing import tensor_of
from dsf.kernels.convolution import short_convolution
from dsf.kernels.reversal import joined, reversed_tokens
from dsf.language.errors import InputError
from dsf.mixers._conv import split_heads
from dsf.mixers._mamba import grouped, whole_group
from dsf.mixers._norm import GatedRMSNorm, normed
from dsf.mixers._own import time_step
from dsf.mixers.bidirectional import BothWays

if TYPE_CHECKING:
    from dsf.parallel import Cuts, World


@dsf.recurrence
def semiseparable(x: Value, dt: Scalar, b: Key, c: Key, A_log: Param[Scalar], dt_bias: Param[Scalar]) -> System:
    """One half of Hydra's matrix: SSD without its skip.

    Source: Hwang et al. (arXiv 2407.09941), Definition 2 and Section 3; discretised as in the released code.
    """
    delta = softplus(dt + dt_bias)
    return System(A=exp(-exp(A_log) * delta), B=b * (delta * x), C=c)


class CentredConv(nn.Conv1d):
    """Depthwise convolution over (K - 1) / 2 tokens before and after each, then SiLU. weight [C, 1, K]; bias [C]."""

    def forward(self, u: Tensor, places: Places | None) -> Tensor:  # type: ignore[override]
        """u: [B, T, C] -> the same shape. places: those of packed sequences, of which none reads another."""
        side, tokens = self.kernel_size[0] // 2, u.shape[1]
        if places is None:
            return short_convolution(u, self.weight.squeeze(1), self.bias, ahead=side)[0][0]
        kind = torch.promote_types(u.dtype, torch.float32)  # rounded once, like a sequence alone
        weight = self.weight[:, 0].to(kind)
        wide, which = F.pad(u.to(kind), (0, 0, side, side)), F.pad(places.which, (side, side), value=-1)
        y = torch.zeros_like(wide) if self.bias is None else self.bias.to(kind).expand(*u.shape)
        for tap in range(2 * side + 1):
            same = (which[tap : tap + tokens] == places.which).view(1, -1, 1)
            y = y + torch.where(same, wide[:, tap : tap + tokens], 0.0) * weight[:, tap]
        return F.silu(y).to(u.dtype)


class Hydra(BothWays):
    """The Hydra block. Constructor, parameter names, shapes and init as the released `Hydra`.

    Source: Hwang et al. (arXiv 2407.09941), Section 4: shift(SS(x)) + flip(shift(SS(flip(x)))) + D x, where SS is
    `semiseparable`, shift moves by one token, and D is fc_D(x) + D, a number a head and token. Both directions share x,
    A_log, dt_bias and the convolution, which is centred; each has its own dt, b and c. Initially: A_log = 0, D = 1,
    Delta log-uniform in [dt_min, dt_max].

    Ranks cannot share its tokens, as the convolution reads later ones. Raises InputError for parallel=, an even d_conv
    and sizes that do not divide.
    """

    recurrence = semiseparable
    A_log: Tensor
    D: Tensor
    dt_bias: Tensor

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        d_conv: int = 7,
        expand: int = 2,
        headdim: int = 64,
        n_groups: int = 1,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        bias: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        d_inner = self.inner(d_model, expand)
        heads = self.inner_heads(d_inner, headdim, n_groups)
        if d_conv % 2 == 0:
            raise InputError(f"Hydra: its convolution is centred, so d_conv must be odd, got {d_conv}")
        self.dims, self.n_groups = (heads, d_state, headdim), n_groups
        each = 2 * n_groups * d_state  # b and c of one direction
        self.widths = [d_inner, d_inner + 2 * each, 2 * heads]  # z, what is convolved, dt of both
        self.split = (heads, headdim, *(n_groups, d_state) * 4)  # x; b, c forward; b, c backward
        self.in_proj = nn.Linear(d_model, sum(self.widths), bias=bias)
        self.conv1d = CentredConv(self.widths[1], self.widths[1], d_conv, groups=self.widths[1], padding=d_conv // 2)
        self.own("dt_bias", partial(time_step, dt_min=dt_min, dt_max=dt_max), heads, kind="rate")
        self.own("A_log", torch.zeros, heads, kind="rate")
        self.own("D", torch.ones, heads, kind="rate")
        self.fc_D = nn.Linear(d_inner, heads, bias=False)
        self.norm = GatedRMSNorm(d_inner)
        self.out_proj = nn.Linear(d_inner, d_model, bias=bias)
        self.to(device=device, dtype=dtype)

    def cut(self, to: Cuts) -> None:
        """Declare a rank's part of this layer where ranks share its heads (`dsf.parallel.HeadShard`).

        Of a single group's b and c each rank computes a part; the parts are gathered.
        """
        heads, (z, _, _) = to.over_heads(), self.widths
        sections = grouped(self, to)
        to.rows(self.in_proj, z, *sections, heads, heads)
        to.conv(self.conv1d, *sections)
        to.own(self, "A_log", "D", "dt_bias")
        to.mixed(self.fc_D, kept=(heads,))
        to.norm(self.norm)
        to.summed(self.out_proj)

    def mix(self, x: Tensor, cu_seqlens: Tensor | Packing | None, world: World | None) -> Tensor:
        if world is not None:
            raise InputError("Hydra: its convolution looks ahead, which is not spread over ranks; call it without them")
        places = _places(x, cu_seqlens)
        z, *ways = self._ways(x, places)
        own: dict[str, Any] = {"A_log": self.A_log, "dt_bias": self.dt_bias}
        ahead, back = (semiseparable(**(own | way), cu_seqlens=cu_seqlens) for way in ways)
        v = ways[0]["x"]
        skip = self.fc_D(v.flatten(2)) + self.D.to(v.dtype)
        if places is None:
            y = joined(ahead, back, v, skip, late=1)
        else:
            ahead, back = (shifted(y, None, places) for y in (ahead, back))
            y = torch.addcmul(ahead + _turned(back, places), v, skip.unsqueeze(-1))
        return normed(self.norm, y.flatten(2), z, self.out_proj)

    def ways(self, x: Tensor, cu_seqlens: Tensor | Packing | None = None) -> list[dict[str, Tensor]]:
        """The inputs of `semiseparable` from the first token to the last and, of reversed tokens, back."""
        _, *both = self._ways(x, _places(x, cu_seqlens))
        return [{**way, "A_log": self.A_log, "dt_bias": self.dt_bias} for way in both]

    def _ways(self, x: Tensor, places: Places | None) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """z, and the inputs of `semiseparable` for each token in one direction and, reversed, in the other."""
        z, u, dt = self.in_proj(x).split(self.widths, dim=-1)
        v, *keys = split_heads(self.conv1d(u, places), self.split)
        b, c, b_back, c_back = whole_group(self, *keys)
        steps = dt.split(self.dims[0], dim=-1)
        back = {"x": v, "dt": steps[1], "b": b_back, "c": c_back}
        return z, {"x": v, "dt": steps[0], "b": b, "c": c}, {name: _turned(t, places) for name, t in back.items()}


def _turned(x: Tensor, places: Places | None) -> Tensor:
    """x [B, T, ...] with every sequence reversed in its place."""
    if places is None:
        return reversed_tokens(x)
    ends = (places.starts + places.ends).index_select(0, places.which)
    return x.index_select(1, ends - torch.arange(x.shape[1], device=x.device))


def _places(x: Tensor, cu_seqlens: Tensor | Packing | None) -> Places | None:
    """The places of packed sequences among the tokens of x."""
    bounds = tensor_of(cu_seqlens, x.device)
    return None if bounds is None else Places.of(bounds, x.shape[1], x.device)
