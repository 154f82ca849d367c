"""Gated DeltaNet-2: KDA with a gate for what is erased and one for what is written."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

import dsf
from dsf import I, Key, Param, Scalar, System, Value, diag, exp, outer, sigmoid, softplus
from dsf.mixers._module import Side, Span
from dsf.mixers.kda import KDA

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def gated_deltanet2(q: Key, k: Key, v: Value, g: Key, b: Key, w: Value) -> System:
    """Gated DeltaNet-2: decay the rows, erase at k what a gated k reads, write gated values there.

    Source: Hatamizadeh, Choi and Kautz (arXiv 2605.22791), the gated delta rule 2. Symbols: g <= 0 is the log of the
    decay, sigmoid(b) the erase gate, sigmoid(w) the write gate, k has unit length; both gates beta is KDA.
    """
    return System(A=(I - outer(k, sigmoid(b) * k)) @ diag(exp(g)), B=k * (sigmoid(w) * v), C=q)


@dsf.recurrence
def gated_deltanet2_rate(
    q: Key, k: Key, v: Value, a: Key, b: Key, w: Value, A_log: Param[Scalar], dt_bias: Param[Key]
) -> System:
    """The same with its decay exp(-exp(A_log) softplus(a + dt_bias)) computed inside, what the layer runs."""
    alpha = exp(-exp(A_log) * softplus(a + dt_bias))
    return System(A=(I - outer(k, sigmoid(b) * k)) @ diag(alpha), B=k * (sigmoid(w) * v), C=q)


class GatedDeltaNet2(KDA):
    """The Gated DeltaNet-2 layer: `KDA` (same arguments), with an erase gate a key entry and a write gate a channel.

    Source: Hatamizadeh, Choi and Kautz (arXiv 2605.22791). Both gates are the sigmoid of a linear map of x.
    """

    recurrence = gated_deltanet2_rate
    beside = ("in_proj", "b_proj", "w_proj", "f_proj.0", "g_proj.0")
    sigmoid = None

    def own_more(self, d_model: int, bare: bool) -> None:
        heads, n, p = self.dims
        self.b_proj = nn.Linear(d_model, heads * n, bias=False)
        self.w_proj = nn.Linear(d_model, heads * p, bias=False)

    def cut(self, to: "Cuts") -> None:
        super().cut(to)
        to.rows(self.w_proj)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        a, b, w = (self.per_head(self.made(side, name)) for name in ("f_proj", "b_proj", "w_proj"))
        q, k, v = self.split(u)
        return {"q": q, "k": k, "v": v, "a": a, "b": b, "w": w, "A_log": self.A_log, "dt_bias": self.dt_bias}
