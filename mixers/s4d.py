"""S4D, the diagonal state space model: every channel a bank of decays that no token changes."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsf
from dsf import Key, Param, System, Value, exp, zoh
from dsf.language.errors import InputError
from dsf.mixers._module import Mixer, Side, Span
from dsf.mixers._own import normal


@dsf.recurrence
def s4d_real(x: Value, dt: Param[Value], A_log: Param[Key, Value], C: Param[Key, Value], D: Param[Value]) -> System:
    """S4D with real rates: N decays a channel, the same for every token.

    Source: Gu et al. (arXiv 2206.11893), equation 4 and Section 4.2 (S4D-Real). Symbols: Delta = exp(dt),
    A = -exp(A_log); B = 1, since only its product with C reaches the output.
    """
    step = zoh(-exp(A_log), 1, exp(dt))
    return System(A=step.A, B=step.B * x, C=C, D=D * x)


def log_steps(*shape: int, low: float, high: float) -> Tensor:
    """Logarithms of steps, uniform between those of low and high."""
    return torch.empty(shape).uniform_(math.log(low), math.log(high))


def _real(channels: int, n: int) -> Tensor:
    """log(1..N) for every channel."""
    return torch.arange(1.0, n + 1).log().repeat(channels, 1)


class S4D(Mixer):
    """The S4D block: the bank of each channel, GELU, and a linear map with a gated linear unit across channels.

    Source: Gu et al. (arXiv 2206.11893), Sections 4 and 5, with the released code's block. d_state: N, rates of a
    channel. init: "real", rates -1 … -N (S4D-Real). dt is log-uniform in [dt_min, dt_max] at start, C normal, D normal.
    bare: neither GELU nor unit, one linear map.
    """

    recurrence = s4d_real
    log_dt: Tensor
    A_log: Tensor
    C: Tensor
    D: Tensor

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        init: str = "real",
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        if init != "real":
            raise InputError(f"S4D: init is {init!r}; there is 'real'")
        self.dims, self.bare = (1, d_state, d_model), bare
        self.own("log_dt", partial(log_steps, low=dt_min, high=dt_max), d_model, kind="rate")
        self.own("A_log", _real, d_model, d_state, kind="rate")
        self.own("C", partial(normal, std=1.0), d_model, d_state)
        self.own("D", partial(normal, std=1.0), d_model, kind="rate")
        self.output_linear = nn.Linear(d_model, d_model if bare else 2 * d_model)
        self.place(device, dtype)

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        return x, ()

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        return {
            "x": u.unsqueeze(2), "dt": self.log_dt[None], "A_log": self.A_log.T[None], "C": self.C.T[None],
            "D": self.D[None],
        }  # fmt: skip

    def readout(self, y: Tensor, side: Side) -> Tensor:
        y = y.flatten(2)
        return self.output_linear(y) if self.bare else F.glu(self.output_linear(F.gelu(y)), dim=-1)
