"""S4D, the diagonal state space model: every channel a bank of decaying oscillations that no token changes."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import dsf
from dsf import Key, Pair, Param, Scalar, System, Value, exp, zoh
from dsf.mixers._module import Side, Span
from dsf.mixers._own import normal
from dsf.mixers._state_space import StateSpace, known, paired


@dsf.recurrence
def s4d(x: Value, dt: Param[Scalar], A_log: Param[Pair], A_imag: Param[Pair], C: Param[Key], D: Param[Value]) -> System:
    """S4D: N / 2 complex rates a channel, the same for every token, held at zero order.

    Source: Gu et al. (arXiv 2206.11893), equation 4 and Section 3. Symbols: Delta = exp(dt),
    A = -exp(A_log) + i A_imag; B = 1, since only its product with C reaches the output; C holds (2 Re c, -2 Im c) in
    pairs, for 2 Re(c S).
    """
    step = zoh((-exp(A_log), A_imag), 1, exp(dt))
    return System(A=step.A, B=step.B * x, C=C, D=D * x)


@dsf.recurrence
def s4d_real(x: Value, dt: Param[Value], A_log: Param[Key, Value], C: Param[Key, Value], D: Param[Value]) -> System:
    """S4D with real rates: N decays a channel, the same for every token.

    Source: Gu et al. (arXiv 2206.11893), equation 4 and Section 4.2 (S4D-Real). Symbols: Delta = exp(dt),
    A = -exp(A_log); B = 1, since only its product with C reaches the output.
    """
    step = zoh(-exp(A_log), 1, exp(dt))
    return System(A=step.A, B=step.B * x, C=C, D=D * x)


def _real(channels: int, n: int) -> Tensor:
    """log(1..N) for every channel."""
    return torch.arange(1.0, n + 1).log().repeat(channels, 1)


class S4D(StateSpace):
    """The S4D block: the bank of each channel, GELU, and a linear map with a gated linear unit across channels.

    Source: Gu et al. (arXiv 2206.11893), Sections 4 and 5, names and shapes of the released code. d_state: N, the
    numbers of a channel's state. init of the rates: "lin", -1/2 + i π n; "inv", -1/2 + i N/π (N/(2n+1) - 1); "legs",
    the normal part of HiPPO-LegS; "real", -1 … -N (`s4d_real`, one head of all channels). dt is log-uniform in
    [dt_min, dt_max] at start, C normal, D normal. bare: one linear map in place of GELU and gated linear unit.
    """

    recurrence = s4d
    C: Tensor

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        init: str = "lin",
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(d_model, d_state, dt_min, dt_max, bare, layer_idx)
        if known("S4D", init, ("lin", "inv", "legs", "real")) == "real":
            self.recurrence, self.dims = s4d_real, (1, d_state, d_model)
            self.own("A_log", _real, d_model, d_state, kind="rate")
            self.own("C", partial(normal, std=1.0), d_model, d_state)
        else:
            self.own_rates(init)
            self.own("C", partial(normal, std=0.5**0.5), d_model, d_state // 2, 2)
        self.place(device, dtype)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        if self.recurrence is s4d:
            return {"x": u.unsqueeze(-1), "C": paired(self.C, 2.0), **self.rate_inputs()}
        return {
            "x": u.unsqueeze(2), "dt": self.log_dt[None], "A_log": self.A_log.T[None], "C": self.C.T[None],
            "D": self.D[None],
        }  # fmt: skip
