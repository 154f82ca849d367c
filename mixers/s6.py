"""S6, the selective state space model of Mamba."""

import math

import torch
from torch import Tensor, nn

import dsf
from dsf import Key, Param, System, Value, exp, softplus
from dsf.mixers._conv import ShortConv
from dsf.mixers._layers import log_uniform_dt_bias, undecayed
from dsf.mixers._module import Mixer, Side, Span


@dsf.recurrence
def s6(x: Value, dt: Value, b: Key, c: Key, A_log: Param[Key, Value], D: Param[Value]) -> System:
    """S6 (Mamba): every channel has N decays of its own, all driven by its time step.

    Source: Gu & Dao (arXiv 2312.00752), equation 2 and Algorithm 2, with the released code's Euler step for B
    (not zero-order hold). Symbols: dt is the pre-activation of Delta, its bias included; A = -exp(A_log) < 0.
    """
    delta = softplus(dt)
    return System(A=exp(-exp(A_log) * delta), B=b * (delta * x), C=c, D=D * x)


@dsf.recurrence
def s6_negative(x: Value, dt: Value, b: Key, c: Key, A_log: Param[Key, Value], D: Param[Value]) -> System:
    """S6 with eigenvalues in [-1, 1], which solves parity.

    Source: Grazzi et al. (arXiv 2411.12537): 2 exp(Delta A) - 1 in place of exp(Delta A). Inputs as `s6`.
    """
    delta = softplus(dt)
    return System(A=2 * exp(-exp(A_log) * delta) - 1, B=b * (delta * x), C=c, D=D * x)


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

    def _project(self, x: Tensor) -> tuple[Tensor, Side]:
        u, *side = self.in_proj(x).split(self.dims[2], dim=-1)
        return u, tuple(side)

    def _low_rank(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u [B, T, d_inner] -> the step before its activation [B, T, 1, d_inner], two [B, T, 1, d_state]."""
        step, first, second = self.x_proj(u).split([self.dt_proj.in_features, self.dims[1], self.dims[1]], dim=-1)
        return self.dt_proj(step).unsqueeze(2), first.unsqueeze(2), second.unsqueeze(2)

    def _readout(self, y: Tensor, side: Side) -> Tensor:
        y = y.flatten(2)
        for z in side:
            y = y * nn.functional.silu(z)
        return self.out_proj(y)


class S6(MambaBlock):
    """The Mamba block. Constructor, parameter names, shapes and init as mamba_ssm's `Mamba`.

    A_log = log(1..N) in every channel (S4D-real), D = 1, Delta log-uniform in [dt_min, dt_max] at start.
    negative=True takes `s6_negative`.
    """

    recurrence = s6

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        negative: bool = False,
        bare: bool = False,
    ):
        super().__init__(d_model, d_state, d_conv, expand, dt_rank, bare)
        self.recurrence = s6_negative if negative else s6
        d_inner = self.dims[2]
        self.A_log = undecayed(torch.arange(1.0, d_state + 1).log().repeat(d_inner, 1))
        bound = self.dt_proj.in_features**-0.5
        nn.init.uniform_(self.dt_proj.weight, -bound, bound)
        with torch.no_grad():
            self.dt_proj.bias.copy_(log_uniform_dt_bias(d_inner, dt_min, dt_max))

    def _arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        dt, b, c = self._low_rank(u)
        return {"x": u.unsqueeze(2), "dt": dt, "b": b, "c": c, "A_log": self.A_log.T[None], "D": self.D[None]}
