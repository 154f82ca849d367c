"""Gated linear attention: a decay for every key dimension."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import dsf
from dsf import Key, System, Value, diag, sigmoid
from dsf.mixers._heads import Heads, low_rank
from dsf.mixers._module import Side, Span

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def gla(q: Key, k: Key, v: Value, g: Key) -> System:
    """GLA: each row of the state has a data-dependent decay.

    Source: Yang et al. (arXiv 2312.06635), Section 4. Symbols: alpha = sigmoid(g)^(1/16), g from a low-rank
    map.
    Objective: one gradient step of -<S'k_t, v_t>, with a weight decay for each row of S.
    """
    return System(A=diag(sigmoid(g) ** (1 / 16)), B=k * v, C=q)


class GLA(Heads):
    """The GLA layer: q, k, v, decays from a map through gate_rank numbers, RMSNorm of each head, gate silu(g), o_proj.

    Source: Yang et al. (arXiv 2312.06635), Sections 4.3 and 4.4. d_state: width of a head of q and k; None: d_model / 2
    / n_heads, as in the paper. headdim: width of a head of v; None: d_model / n_heads. Queries are scaled by
    d_state^-0.5. d_conv: taps of a convolution with SiLU on q, k and v; 0, as in the paper: none. Linear maps keep
    torch's default init. The paper's LayerNorm of each head is an RMSNorm, as in its released code. bare: neither gate
    nor convolution.
    """

    recurrence = gla
    beside = ("in_proj", "g_proj", "gk_proj.0")

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        d_state: int | None = None,
        headdim: int | None = None,
        d_conv: int = 0,
        gate_rank: int = 16,
        bias: bool = False,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        n_heads, n, p = self.heads(d_model, n_heads, d_state=(d_model // 2, d_state), headdim=(d_model, headdim))
        gate = None if bare else nn.Linear(d_model, n_heads * p, bias=bias)
        sections = (n_heads, n, n_heads, n, n_heads, p)
        super().__init__(d_model, (n_heads, n, p), sections, 0 if bare else d_conv, gate, bias, layer_idx)
        self.gk_proj = low_rank(d_model, gate_rank, n_heads * n, bias=True)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        super().cut(to)
        to.rows(self.gk_proj)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        q, k, v = self.split(u)
        return {"q": q * self.dims[1] ** -0.5, "k": k, "v": v, "g": self.per_head(self.made(side, "gk_proj"))}
