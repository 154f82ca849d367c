"""MesaNet: least squares over all tokens so far, solved at every read-out."""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import dsf
from dsf import Key, Memory, Param, Scalar, System, Value, learn, norm2, sigmoid, softplus
from dsf.mixers._beside import product_of
from dsf.mixers._heads import Heads
from dsf.mixers._module import Side, Span
from dsf.mixers._own import full

if TYPE_CHECKING:
    from dsf.parallel import Cuts

FLOOR = 0.25  # of the ridge, as in the paper's released code
S = Memory()


@dsf.recurrence
def mesanet(q: Key, k: Key, v: Value, f: Scalar, beta: Scalar, lam: Param[Key]) -> System:
    """MesaNet: y = G'(H + diag(ridge))^-1 q, with G and H the decayed sums of beta k v' and beta k k'.

    Source: von Oswald et al. (arXiv 2506.05233), equations 5 to 8. Symbols: sigmoid(f) the decay gamma, beta in (0, 1)
    the writing strength, 0.25 + softplus(lam) the ridge Lambda; q and k of unit length.
    Objective: S_t is the least of sum_j (prod_{j < l <= t} gamma_l) beta_j 1/2 |S'k_j - v_j|^2 + 1/2 <ridge S, S>.
    """
    ridge = FLOOR + softplus(lam)
    return learn(0.5 * norm2(S.T @ k - v), by="exact", rate=beta, decay=sigmoid(f), ridge=ridge, C=q)


class MesaNet(Heads):
    """The MesaNet layer: convolution and SiLU on q and k, both to unit length; v as it is; RMSNorm a head; o_proj.

    Source: von Oswald et al. (arXiv 2506.05233), Section 4 and the released code. d_state: width of a head of q and k;
    headdim: of v. None: d_model / n_heads. gate: multiply the normed heads by silu(g_proj(x)), which the paper leaves
    out. The ridge begins at 1. Linear maps keep torch's default init. bare: neither convolution nor SiLU.
    """

    recurrence = mesanet
    beside = ("in_proj", "g_proj", "v_proj")
    blur = 0.3  # as DeltaNet's
    lam: Tensor

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        d_state: int | None = None,
        headdim: int | None = None,
        d_conv: int = 4,
        gate: bool = False,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        n_heads, n, p = self.heads(d_model, n_heads, d_state=(d_model, d_state), headdim=(d_model, headdim))
        g = nn.Linear(d_model, n_heads * p, bias=False) if gate and not bare else None
        sections, lengths = (n_heads, n, n_heads, n), (1.0, 1.0)
        super().__init__(d_model, (n_heads, n, p), sections, 0 if bare else d_conv, g, False, layer_idx, lengths)
        self.v_proj = nn.Linear(d_model, n_heads * p, bias=False)
        self.a_proj, self.b_proj = nn.Linear(d_model, n_heads), nn.Linear(d_model, n_heads)
        start = math.log(math.expm1(1.0 - FLOOR))
        self.own("lam", partial(full, value=start), n_heads, n, kind="rate")
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        super().cut(to)
        for linear in (self.v_proj, self.a_proj, self.b_proj):
            to.rows(linear)
        to.own(self, "lam")

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        x, (q, k), v = side[0], self.split(u), self.made(side, "v_proj")
        v, f, beta = self.per_head(v), product_of(x, self.a_proj), product_of(x, self.b_proj).sigmoid()
        return {"q": q, "k": k, "v": v, "f": f, "beta": beta, "lam": self.lam}
