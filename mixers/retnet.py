"""RetNet and Lightning attention: linear attention with a fixed decay a head."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import dsf
from dsf import Key, Param, Scalar, System, Value, exp
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


def rotated(q: Tensor, k: Tensor, position: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """Turn pairs of entries (j, j + N/2) by position · base^(-2j/N). q, k: [B, T, H, N], position: [B, T].

    The last entry of an odd number stays.
    """
    width, wide = q.shape[-1], torch.promote_types(q.dtype, torch.float32)
    half = width // 2
    turn = base ** (-torch.arange(half, device=q.device, dtype=wide) / half)
    angle = position.to(wide)[..., None, None] * turn
    cos, sin = angle.cos(), angle.sin()

    def turned(x: Tensor) -> Tensor:
        a, b, rest = x.to(wide).split([half, half, width - 2 * half], dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1).to(x.dtype)

    if q.shape[1] > 1:
        return turned(q), turned(k)
    both = turned(torch.cat([q, k], dim=2))  # of a token, launches are what it costs, not the copy
    return both[:, :, : q.shape[2]], both[:, :, q.shape[2] :]


class RetNet(Heads):
    """Multi-scale retention: rotated q and k, fixed decays gamma_h = 1 - 2^(-5-h), norm a head, gate silu(g), o_proj.

    Source: Sun et al. (arXiv 2307.08621), Sections 2.1 and 2.2. d_state: width of a head of q, k (d_model / n_heads
    unless given); headdim: of v (twice that, as in the paper). Keys are scaled by d_state^-0.5. The norm is an
    RMSNorm a head. rotary_base: of the rotation, 0 for none. Positions go on where the state left off. Weights start
    as torch's linear maps. The paper has no convolution: d_conv=4 adds one, with SiLU. bare: no gate, no convolution.
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
        if self.rotary_base:
            position = span.positions(side[0])
            q, k = rotated(q, k, position, self.rotary_base)
        return {"q": q, "k": k * self.dims[1] ** -0.5, "v": v, "slope": self.slope}
