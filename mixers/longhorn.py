"""Longhorn: the state space model that solves an online regression in closed form."""

from typing import Any

import torch
from torch import Tensor

import dsf
from dsf import I, Key, Param, System, Value, dot, outer, sigmoid
from dsf.mixers._mamba import MambaBlock
from dsf.mixers._module import Side, Span


@dsf.recurrence
def longhorn(q: Key, k: Key, x: Value, beta: Value, D: Param[Value]) -> System:
    """Longhorn: forget along k exactly as much as is written, entry by entry.

    Source: Liu et al. (arXiv 2407.14207), Section 3 and Table 5; the diagonal of `longhorn_exact`'s
    transition.
    Objective: argmin over S of |S - S_{t-1}|^2 + sum_p beta_p (S[:, p]'k_t - x_p)^2, solved exactly.
    Symbols: eps = beta / (1 + beta k'k), beta in (0, 1); q and k are not normalised.
    """
    eps = beta / (1 + beta * dot(k, k))
    return System(A=1 - eps * k**2, B=k * (eps * x), C=q, D=D * x)


@dsf.recurrence
def longhorn_gate(q: Key, k: Key, x: Value, b: Value, D: Param[Value]) -> System:
    """Longhorn with its rate beta = sigmoid(b) computed inside, what the layer runs."""
    beta = sigmoid(b)
    eps = beta / (1 + beta * dot(k, k))
    return System(A=1 - eps * k**2, B=k * (eps * x), C=q, D=D * x)


@dsf.recurrence
def longhorn_exact(q: Key, k: Key, x: Value, beta: Value, D: Param[Value]) -> System:
    """Longhorn before its diagonal approximation: each channel erases along k with its own strength.

    Source: Liu et al. (arXiv 2407.14207), Section 3 (the implicit update). Inputs and objective as
    `longhorn`.
    """
    eps = beta / (1 + beta * dot(k, k))
    return System(A=I - eps * outer(k, k), B=k * (eps * x), C=q, D=D * x)


class Longhorn(MambaBlock):
    """Longhorn in the Mamba block, without Mamba's A_log; arguments as `MambaBlock`.

    exact=True takes `longhorn_exact`, the update before its diagonal approximation.

    beta = sigmoid(low-rank map of x). Linear maps keep torch's default init and D is 1, as in the released
    code (whose `dt_head` is `dt_proj` here).
    """

    recurrence = longhorn_gate

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        exact: bool = False,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(d_model, d_state, d_conv, expand, dt_rank, bare, layer_idx, device, dtype)
        self.recurrence = longhorn_exact if exact else longhorn_gate

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        b, k, q = self._low_rank(u)
        rate = {"beta": b.sigmoid()} if self.recurrence is longhorn_exact else {"b": b}
        return {"q": q, "k": k, "x": u.unsqueeze(2), **rate, "D": self.D[None]}
