"""HGRN2: HGRN with an outer-product state."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsf
from dsf import Key, System, Value, diag, sigmoid
from dsf.mixers._heads import Heads
from dsf.mixers._module import Side, Span
from dsf.mixers._norm import GatedRMSNorm, normed
from dsf.mixers.hgrn import bounded_below

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def hgrn2(q: Key, f: Key, i: Value) -> System:
    """HGRN2: HGRN with an outer-product state; the key is 1 - forget gate.

    Source: Qin et al. (arXiv 2404.07904), Section 3. Symbols: f is the pre-activation of the forget gate, q
    the output gate, i the input.
    """
    return System(A=diag(sigmoid(f)), B=sigmoid(-f) * i, C=q)


class HGRN2(Heads):
    """The HGRN2 layer: output gate silu(q), forget gate, input; recurrence; RMSNorm over all heads; o_proj.

    Source: Qin et al. (arXiv 2404.07904), Section 3. d_state: the paper's expansion; headdim: channels of a head. None:
    d_model / n_heads. lower_bound: as in `HGRN`; learning it over the layers is left out. d_conv: taps of a convolution
    with SiLU on q and the input; 0, as in the paper: none. Linear maps keep torch's default init. q is the only gate
    of the output, so bare leaves out the convolution alone.
    """

    recurrence = hgrn2
    beside = ("in_proj", "g_proj", "f_proj")

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        d_state: int | None = None,
        headdim: int | None = None,
        d_conv: int = 0,
        lower_bound: float = 0.0,
        bias: bool = False,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        n_heads, n, p = self.heads(d_model, n_heads, d_state=(d_model, d_state), headdim=(d_model, headdim))
        bounded_below(torch.zeros(()), lower_bound)
        sections = (n_heads, n, n_heads, p)
        super().__init__(d_model, (n_heads, n, p), sections, 0 if bare else d_conv, None, bias, layer_idx)
        self.lower_bound = lower_bound
        self.f_proj = nn.Linear(d_model, n_heads * n, bias=bias)
        self.o_norm = GatedRMSNorm(n_heads * p)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        super().cut(to)
        to.rows(self.f_proj)
        to.norm(self.o_norm)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        q, i = self.split(u)
        f = bounded_below(self.per_head(self.made(side, "f_proj")), self.lower_bound)
        return {"q": F.silu(q), "f": f, "i": i}

    def readout(self, y: Tensor, side: Side) -> Tensor:
        return normed(self.o_norm, y.flatten(2), None, self.o_proj)
