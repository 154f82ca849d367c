"""S6, the selective state space model of Mamba."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import dsf
from dsf import Key, Pair, Param, Scalar, System, Value, diag, exp, softplus, turn
from dsf.language.errors import InputError
from dsf.mixers._mamba import MambaBlock, TimeStep
from dsf.mixers._module import Side, Span
from dsf.mixers._state_space import frequencies, halves


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


@dsf.recurrence
def s6_complex(
    x: Value, dt: Scalar, b: Key, c: Key, A_log: Param[Pair], A_imag: Param[Pair], D: Param[Value]
) -> System:
    """S6 with complex rates: a head is a channel, with N / 2 oscillations that decay and turn by its time step.

    Source: Gu & Dao (arXiv 2312.00752), Section 3.6, with the released code's Euler step for B. Symbols: as in s6;
    A = -exp(A_log) + i A_imag; b and c hold (re, im) and (re, -im) in pairs.
    """
    delta = softplus(dt)
    return System(A=diag(exp(-exp(A_log) * delta)) @ turn(A_imag * delta), B=b * (delta * x), C=c, D=D * x)


def _s4d_real(channels: int, n: int) -> Tensor:
    """log(1..N) for every channel."""
    return torch.arange(1.0, n + 1).log().repeat(channels, 1)


class S6(MambaBlock):
    """The Mamba block. Constructor, parameter names, shapes and init as mamba_ssm's `Mamba`.

    d_state: N. expand: inner channels, in units of d_model. dt_rank: numbers that the map to Delta goes through; None:
    d_model / 16, rounded up. At start A_log = log(1..N) in every channel (S4D-real), D = 1, Delta log-uniform in
    [dt_min, dt_max]. negative: take `s6_negative`. complex: take `s6_complex`, with the rates -1/2 + i pi n (S4D-Lin)
    for n < d_state / 2. bare: neither convolution nor z.
    """

    recurrence = s6
    A_log: Tensor
    A_imag: Tensor

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
        complex: bool = False,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(d_model, d_state, d_conv, expand, dt_rank, bare, layer_idx)
        self.recurrence = s6_complex if complex else s6_negative if negative else s6
        self.complex, d_inner = complex, self.channels
        if complex:
            if negative or d_state % 2:
                raise InputError(
                    "S6: complex=True takes an even d_state, a real and an imaginary part, and no negative"
                )
            self.dims = (d_inner, d_state, 1)
            self.own("A_log", halves, d_inner, d_state // 2, kind="rate")
            self.own("A_imag", partial(frequencies, init="lin"), d_inner, d_state // 2, kind="rate")
        else:
            self.own("A_log", _s4d_real, d_inner, d_state, kind="rate")
        self.dt_proj = TimeStep(self.dt_proj.in_features, d_inner, dt_min, dt_max)
        self.place(device, dtype)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        dt, b, c = self._low_rank(u)
        if self.complex:
            return {
                "x": u.unsqueeze(-1), "dt": dt.squeeze(2), "b": b, "c": c, "A_log": self.A_log, "A_imag": self.A_imag,
                "D": self.D.unsqueeze(-1),
            }  # fmt: skip
        return {"x": u.unsqueeze(2), "dt": dt, "b": b, "c": c, "A_log": self.A_log.T[None], "D": self.D[None]}
