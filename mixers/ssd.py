"""SSD, the state space model of Mamba-2."""

import math
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import dsf
from dsf import Key, Param, Recurrence, Scalar, System, Value, exp, maximum, minimum, softplus
from dsf.language.errors import InputError
from dsf.mixers._conv import ShortConv, heads_of, split_heads
from dsf.mixers._mamba import grouped, whole_group
from dsf.mixers._module import Mixer, Side, Span
from dsf.mixers._norm import GatedRMSNorm, normed
from dsf.mixers._own import log_uniform, time_step

if TYPE_CHECKING:
    from dsf.parallel import Cuts

NO_LIMIT = (0.0, math.inf)


@lru_cache
def ssd_with(dt_limit: tuple[float, float] = NO_LIMIT) -> Recurrence:
    """The SSD recurrence with its time step clamped to dt_limit."""

    @dsf.recurrence
    def ssd(
        x: Value, dt: Scalar, b: Key, c: Key, A_log: Param[Scalar], D: Param[Scalar], dt_bias: Param[Scalar]
    ) -> System:
        """SSD (Mamba-2): one decay a head, set by its time step.

        Source: Dao & Gu (arXiv 2405.21060), Section 2; discretised as in the released code (Euler for B).
        Symbols: dt is the pre-activation of Delta without its bias; a = -exp(A_log) < 0; b, c are shared by a
        group of heads.
        Objective: one gradient step of -<S' b_t, Delta_t x_t>, with weight decay on S.
        """
        delta = softplus(dt + dt_bias)
        if dt_limit != NO_LIMIT:
            delta = minimum(maximum(delta, dt_limit[0]), dt_limit[1])
        return System(A=exp(-exp(A_log) * delta), B=b * (delta * x), C=c, D=D * x)

    return ssd


ssd = ssd_with()


class SSD(Mixer):
    """The Mamba-2 block. Constructor, parameter names, shapes and init as mamba_ssm's `Mamba2`.

    There are expand · d_model inner channels, headdim in each head. The heads form n_groups groups; each shares one b
    and one c. At start A = -exp(A_log) is uniform in [-16, -1], D = 1, Delta log-uniform in [dt_min, dt_max]. dt_limit:
    the range that Delta is clamped to. After the recurrence come the gate silu(z), an RMSNorm of each group and
    out_proj. bare: neither convolution nor z. Raises InputError for sizes that do not divide.
    """

    recurrence = ssd
    beside = ("in_proj",)
    A_log: Tensor
    D: Tensor
    dt_bias: Tensor

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        expand: int = 2,
        headdim: int = 64,
        n_groups: int = 1,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        dt_limit: tuple[float, float] = NO_LIMIT,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        d_inner = self.inner(d_model, expand)
        heads = self.inner_heads(d_inner, headdim, n_groups)
        self.recurrence = ssd_with(_limits(dt_limit))
        self.dims = (heads, d_state, headdim)
        self.n_groups = n_groups
        channels = d_inner + 2 * n_groups * d_state
        self.widths = [0 if bare else d_inner, channels, heads]  # z, what is convolved (x, b, c), dt
        self.in_proj = nn.Linear(d_model, sum(self.widths), bias=False)
        self.split = (heads, headdim, n_groups, d_state, n_groups, d_state)  # x, b, c
        self.conv1d = None if bare or not d_conv else ShortConv(channels, d_conv, pieces=heads_of(self.split))
        self.own("dt_bias", partial(time_step, dt_min=dt_min, dt_max=dt_max), heads, kind="rate")
        self.own("A_log", partial(log_uniform, low=1.0, high=16.0), heads, kind="rate")
        self.own("D", torch.ones, heads, kind="rate")
        self.norm = GatedRMSNorm(d_inner, groups=n_groups, gate_first=True)
        self.out_proj = nn.Linear(d_inner, d_model, bias=False)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        """Declare a rank's part of this layer where ranks share its heads (`dsf.parallel.HeadShard`).

        Of a single group's b and c each rank computes a part; the parts are gathered.
        """
        to.over_heads()
        sections = grouped(self, to)
        z, _, dt = self.widths
        to.rows(self.in_proj, *([z] if z else []), *sections, dt)
        to.conv(self.conv1d, *sections)
        to.own(self, "A_log", "D", "dt_bias")
        to.norm(self.norm, self.n_groups)
        to.summed(self.out_proj)

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        z, u, dt = self.first_map(x, self.in_proj).split(self.widths, dim=-1)
        return u, (dt, z)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        x, b, c = split_heads(u, self.split)
        b, c = whole_group(self, b, c)
        return {"x": x, "dt": side[0], "b": b, "c": c, "A_log": self.A_log, "D": self.D, "dt_bias": self.dt_bias}

    def readout(self, y: Tensor, side: Side) -> Tensor:
        z = side[1]
        return normed(self.norm, y.flatten(2), z if z.shape[-1] else None, self.out_proj)


def _limits(given: Any) -> tuple[float, float]:
    """The two numbers, of a list too, as a configuration in JSON has it. Raises InputError."""
    try:
        low, high = map(float, given)
    except (TypeError, ValueError):
        low = high = math.nan
    if not 0 <= low < high:
        raise InputError(f"SSD: dt_limit is {given!r}, expected two numbers from 0, the lower first")
    return low, high
