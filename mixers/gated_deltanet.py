"""Gated DeltaNet: the delta rule with forgetting."""

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

import dsf
from dsf import I, Key, Param, Scalar, System, Value, exp, outer, softplus
from dsf.mixers._beside import side_by_side
from dsf.mixers._module import Side, Span
from dsf.mixers._norm import normed
from dsf.mixers._own import log_uniform, time_step
from dsf.mixers.deltanet import DeltaNet

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def gated_deltanet(q: Key, k: Key, v: Value, alpha: Scalar, beta: Scalar) -> System:
    """Gated DeltaNet: decay the state, erase along k, write v.

    Source: Yang et al. (arXiv 2412.06464), equation 10.
    Symbols: alpha in (0, 1) the decay, beta in (0, 1) or (0, 2) the writing strength, k of unit length.
    Objective: one gradient step of 1/2 |S'k_t - v_t|^2 with rate beta_t, from S decayed by alpha_t (weight
    decay).
    """
    return System(A=alpha * (I - beta * outer(k, k)), B=k * (beta * v), C=q)


@dsf.recurrence
def gated_deltanet_log(
    q: Key, k: Key, v: Value, a: Scalar, beta: Scalar, A_log: Param[Scalar], dt_bias: Param[Scalar]
) -> System:
    """Gated DeltaNet with its decay alpha = exp(-exp(A_log) softplus(a + dt_bias)) computed inside.

    The same system as `gated_deltanet`; what the layer runs, since an alpha near 1 does not survive rounding
    to bfloat16 and its pre-activation `a` does.
    """
    alpha = exp(-exp(A_log) * softplus(a + dt_bias))
    return System(A=alpha * (I - beta * outer(k, k)), B=k * (beta * v), C=q)


class GatedDeltaNet(DeltaNet):
    """The Gated DeltaNet layer: `DeltaNet` (same arguments), a Mamba-2 decay, a gate silu(g) after the norm.

    exp(A_log) uniform in (0, 16), softplus(dt_bias) log-uniform in [1e-3, 0.1] at start. bare: neither
    convolution nor output gate.
    """

    recurrence = gated_deltanet_log
    beside = ("qkv_proj", "b_proj", "a_proj", "g_proj")
    A_log: Tensor
    dt_bias: Tensor

    def own_more(self, d_model: int, bare: bool) -> None:
        n_heads, _, p = self.dims
        self.a_proj = nn.Linear(d_model, n_heads, bias=False)
        self.own("A_log", partial(log_uniform, low=1e-3, high=16.0), n_heads, kind="rate")
        self.own("dt_bias", time_step, n_heads, kind="rate")
        self.g_proj = None if bare else nn.Linear(d_model, n_heads * p, bias=False)

    def cut(self, to: "Cuts") -> None:
        super().cut(to)
        to.rows(self.a_proj)
        to.rows(self.g_proj)
        to.own(self, "A_log", "dt_bias")

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        if len(side) > 1:
            b, a = self.made(side, "b_proj"), self.made(side, "a_proj")
        else:
            b, a = side_by_side(side[0], self.b_proj, self.a_proj)
            b = b.sigmoid()
        return {**self._written(u, b), "a": a, "A_log": self.A_log, "dt_bias": self.dt_bias}

    def readout(self, y: Tensor, side: Side) -> Tensor:
        gate = None if self.g_proj is None else self.made(side, "g_proj").view_as(y)
        return normed(self.o_norm, y, gate, self.o_proj)
