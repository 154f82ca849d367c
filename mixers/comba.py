"""Comba: a decay less a weaker erasure, and queries corrected by keys."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import dsf
from dsf import I, Key, N, Param, Scalar, System, Value, exp, outer, sigmoid, softplus
from dsf.mixers._module import Side, Span
from dsf.mixers._own import full
from dsf.mixers.gated_deltanet import GatedDeltaNet

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def comba(q: Key, k: Key, v: Value, g: Scalar, beta: Scalar, b: Param[Scalar], d: Param[Scalar]) -> System:
    """Comba: decay, erase along k what was there before the decay, with a share of the strength of the write.

    Source: Hu et al. (arXiv 2506.02475), Section 3; its released code for the order of decay and erasure. Symbols:
    g <= 0 is the log of the decay alpha, sigmoid(beta) the strength, sigmoid(b) the share, d the output correction.
    """
    strength = sigmoid(beta)
    return System(A=exp(g) * I - strength * sigmoid(b) * outer(k, k), B=k * (strength * v), C=q - d * k)


@dsf.recurrence
def comba_rate(
    q: Key, k: Key, v: Value, a: Scalar, beta: Scalar, A_log: Param[Scalar], dt_bias: Param[Scalar], b: Param[Scalar],
    d: Param[Scalar],
) -> System:  # fmt: skip
    """Comba as the layer runs it: the decay exp(-exp(A_log) softplus(a + dt_bias)) is computed inside, q's scaling and
    the strength before."""
    alpha = exp(-exp(A_log) * softplus(a + dt_bias))
    return System(A=alpha * I - beta * sigmoid(b) * outer(k, k), B=k * (beta * v), C=q - d * N**-0.5 * k)


class Comba(GatedDeltaNet):
    """The Comba layer: `GatedDeltaNet` (same arguments); each head learns a share of the erasure and a correction of q.

    Source: Hu et al. (arXiv 2506.02475), Section 3. The share begins at sigmoid(1), the correction at 0.02, which the
    released code takes for large models.
    """

    recurrence = comba_rate
    b: Tensor
    d: Tensor

    def own_more(self, d_model: int, bare: bool) -> None:
        super().own_more(d_model, bare)
        self.own("b", torch.ones, self.dims[0], kind="vector")
        self.own("d", partial(full, value=0.02), self.dims[0], kind="vector")

    def cut(self, to: "Cuts") -> None:
        super().cut(to)
        to.own(self, "b", "d")

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        return {**super().arguments(u, side, span), "b": self.b, "d": self.d}
