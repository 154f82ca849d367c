"""Kimi delta attention: the delta rule with a decay for each key dimension."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import dsf
from dsf import I, Key, Param, Scalar, System, Value, diag, exp, outer, softplus
from dsf.mixers._heads import Heads, low_rank
from dsf.mixers._module import Side, Span
from dsf.mixers._norm import GatedRMSNorm
from dsf.mixers._own import log_uniform, time_step

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def kda(q: Key, k: Key, v: Value, g: Key, beta: Scalar) -> System:
    """KDA: decay the rows first, then erase along k, then write v.

    Source: Kimi Linear (arXiv 2510.26692), equation 1. Symbols: g <= 0 is the log of the decay alpha, k has
    unit length, beta in (0, 1) is the writing strength. Decay and erasure do not commute here.
    Objective: one gradient step of 1/2 |S'k_t - v_t|^2 with rate beta_t, from S with its rows decayed.
    """
    return System(A=(I - beta * outer(k, k)) @ diag(exp(g)), B=k * (beta * v), C=q)


@dsf.recurrence
def kda_rate(q: Key, k: Key, v: Value, a: Key, beta: Scalar, A_log: Param[Scalar], dt_bias: Param[Key]) -> System:
    """KDA with its decay alpha = exp(-exp(A_log) softplus(a + dt_bias)) computed inside, what the layer runs."""
    alpha = exp(-exp(A_log) * softplus(a + dt_bias))
    return System(A=(I - beta * outer(k, k)) @ diag(alpha), B=k * (beta * v), C=q)


class KDA(Heads):
    """The KDA layer: convolution and SiLU on q, k, v, unit q and k, low-rank decays and gate, o_proj.

    Source: Kimi Linear (arXiv 2510.26692), Section 4. d_state: width of a head of q and k; headdim: of v. None: d_model
    / n_heads. The maps to the decays and to the gate g go through headdim numbers. y passes an RMSNorm of each head and
    is multiplied by sigmoid(g). At start exp(A_log) is uniform in (1, 16), softplus(dt_bias) log-uniform in [1e-3,
    0.1]. Queries are scaled by d_state^-0.5. Linear maps keep torch's default init. bare: neither convolution nor gate.
    """

    recurrence = kda_rate
    beside: tuple[str, ...] = ("in_proj", "b_proj", "f_proj.0", "g_proj.0")
    sigmoid: str | None = "b_proj"
    blur = 0.3  # as DeltaNet's
    A_log: Tensor
    dt_bias: Tensor

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        d_state: int | None = None,
        headdim: int | None = None,
        d_conv: int = 4,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        n_heads, n, p = self.heads(d_model, n_heads, d_state=(d_model, d_state), headdim=(d_model, headdim))
        gate = None if bare else low_rank(d_model, p, n_heads * p, bias=True)
        sections = (n_heads, n, n_heads, n, n_heads, p)
        lengths = (n**-0.5, 1.0, None)
        super().__init__(d_model, (n_heads, n, p), sections, 0 if bare else d_conv, gate, False, layer_idx, lengths)
        self.o_norm = GatedRMSNorm(p, activation="sigmoid")
        self.f_proj = low_rank(d_model, p, n_heads * n, bias=False)
        self.b_proj = nn.Linear(d_model, n_heads, bias=False)
        self.own("A_log", partial(log_uniform, low=1.0, high=16.0), n_heads, kind="rate")
        self.own("dt_bias", time_step, n_heads, n, kind="rate")
        self.own_more(d_model, bare)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        super().cut(to)
        to.rows(self.f_proj)
        to.rows(self.b_proj)
        to.own(self, "A_log", "dt_bias")

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        q, k, v = self.split(u)
        return {
            "q": q,
            "k": k,
            "v": v,
            "a": self.per_head(self.made(side, "f_proj")),
            "beta": self.made(side, "b_proj"),
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
        }
