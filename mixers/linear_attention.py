"""Linear attention, normalised and not."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import dsf
from dsf import I, Key, System, Value, elu1
from dsf.mixers._beside import product_of
from dsf.mixers._module import Mixer, Side, Span

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def linear_attention(q: Key, k: Key, v: Value) -> System:
    """Linear attention: never forget, read with positive features, divide by their sum.

    Source: Katharopoulos et al. (arXiv 2006.16236), equations 10-12; DSF (arXiv 2405.15731), equation 15.
    Symbols: phi = psi = elu + 1; eta_t = phi(q_t)' sum_j psi(k_j) is the same system driven by ones.
    Objective: one gradient step of -<S' psi(k_t), v_t>.
    """
    return System(A=I, B=elu1(k) * v, C=elu1(q), normalize=dsf.ratio)


@dsf.recurrence
def unnormalized_linear_attention(q: Key, k: Key, v: Value) -> System:
    """Linear attention as recent libraries mean it: identity features and no quotient.

    Source: Schlag et al. (arXiv 2102.11174), "fast weights"; eta = 1 and phi = psi = identity in DSF's
    equation 15.
    Objective: one gradient step of -<S' k_t, v_t>.
    """
    return System(A=I, B=k * v, C=q)


class LinearAttention(Mixer):
    """Multi-head linear attention.

    d_state: width of a head of q and k; headdim: of v. None: d_model / n_heads.
    normalized: False takes `unnormalized_linear_attention`, with q scaled by d_state^-0.5 as in other libraries.
    bias: of all projections; the DSF authors' code has them. bare: changes nothing, as there is neither convolution nor
      gate.
    """

    recurrence = linear_attention
    beside = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        d_state: int | None = None,
        headdim: int | None = None,
        normalized: bool = True,
        bias: bool = True,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        n_heads, n, p = self.heads(d_model, n_heads, d_state=(d_model, d_state), headdim=(d_model, headdim))
        self.dims = (n_heads, n, p)
        self.scale = 1.0 if normalized else n**-0.5
        self.recurrence = linear_attention if normalized else unnormalized_linear_attention
        self.q_proj = nn.Linear(d_model, n_heads * n, bias=bias)
        self.k_proj = nn.Linear(d_model, n_heads * n, bias=bias)
        self.v_proj = nn.Linear(d_model, n_heads * p, bias=bias)
        self.o_proj = nn.Linear(n_heads * p, d_model, bias=bias)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        """Declare a rank's part of this layer where ranks share its heads (`dsf.parallel.HeadShard`)."""
        to.over_heads()
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            to.rows(linear)
        to.summed(self.o_proj)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        heads, n, p = self.dims
        q, given = self.made_first(u)
        return {
            "q": q.unflatten(-1, (heads, n)) * self.scale,
            "k": self.made(given, "k_proj").unflatten(-1, (heads, n)),
            "v": self.made(given, "v_proj").unflatten(-1, (heads, p)),
        }

    def readout(self, y: Tensor, side: Side) -> Tensor:
        return product_of(y.flatten(2), self.o_proj)
