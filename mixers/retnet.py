"""RetNet and Lightning attention: linear attention with a fixed decay a head."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import dsf
from dsf import Key, Param, Scalar, System, Value, exp
from dsf.kernels.rotary import angles, rotary
from dsf.mixers._heads import Heads
from dsf.mixers._module import Side, Span

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def retnet(q: Key, k: Key, v: Value, slope: Param[Scalar]) -> System:
    """Retention: every head forgets at its own constant rate.

    Source: Sun et al. (arXiv 2307.08621), equation 6; Lightning attention (arXiv 2401.04658) is the same
    system.
    Symbols: gamma = exp(-slope); RetNet has gamma_h = 1 - 2^(-5-h) and rotates q and k before.
    Objective: one gradient step of -<S'k_t, v_t>, with weight decay on S.
    """
    return System(A=exp(-slope), B=k * v, C=q)


def _slopes(heads: int) -> Tensor:
    """-log(1 - 2^(-5-h)) for every head h."""
    return -torch.log1p(-(2.0 ** (-5.0 - torch.arange(heads))))


class RetNet(Heads):
    """Multi-scale retention: rotated q and k, fixed decays gamma_h = 1 - 2^(-5-h), norm a head, gate silu(g), o_proj.

    Source: Sun et al. (arXiv 2307.08621), Sections 2.1 and 2.2. d_state: width of a head of q and k; None: d_model /
    n_heads. headdim: width of a head of v; None: 2 d_model / n_heads, as in the paper. Keys are scaled by d_state^-0.5.
    The norm is an RMSNorm of each head. rotary_base: of the rotation, 0 for none; the state counts positions. Linear
    maps keep torch's default init. d_conv: taps of a convolution with SiLU; 0, as in the paper: none. bare: neither
    gate nor convolution.
    """

    recurrence = retnet
    positional = True
    slope: Tensor

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        d_state: int | None = None,
        headdim: int | None = None,
        d_conv: int = 0,
        rotary_base: float = 10000.0,
        bias: bool = False,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        n_heads, n, p = self.heads(d_model, n_heads, d_state=(d_model, d_state), headdim=(2 * d_model, headdim))
        gate = None if bare else nn.Linear(d_model, n_heads * p, bias=bias)
        sections = (n_heads, n, n_heads, n, n_heads, p)
        super().__init__(d_model, (n_heads, n, p), sections, 0 if bare else d_conv, gate, bias, layer_idx)
        self.rotary_base = rotary_base
        self.own("slope", _slopes, n_heads, kind="constant")
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        super().cut(to)
        to.own(self, "slope")

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        q, k, v = self.split(u)
        scale = self.dims[1] ** -0.5
        if not self.rotary_base:
            return {"q": q, "k": k * scale, "v": v, "slope": self.slope}
        wide = torch.promote_types(q.dtype, torch.float32)
        cos, sin = angles(span.positions(side[0]), q.shape[-1], self.rotary_base, wide)
        q, k = rotary(q, k, cos, sin, scale)
        return {"q": q, "k": k, "v": v, "slope": self.slope}
