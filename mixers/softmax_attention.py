"""Softmax attention: the system with infinitely many states."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import dsf
from dsf import I, Key, N, System, Value, exp_features
from dsf.mixers._module import Mixer, Side, Span

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def softmax_attention(q: Key, k: Key, v: Value) -> System:
    """Softmax attention: never forget, read with the exponential kernel, divide by its sum.

    Source: Vaswani et al. (arXiv 1706.03762), equation 1; as a dynamical system, DSF (arXiv 2405.15731),
    Lemma 1.
    Symbols: <phi(q), phi(k)> = exp(q'k / sqrt N) with phi the monomials of degree p weighted by sqrt(1/p!),
    so the state [inf, P] has no finite form but the KV cache. k, v may have fewer heads (grouped queries,
    arXiv 2305.13245).
    Objective: Nadaraya-Watson regression, min over y of sum_j exp(q'k_j / sqrt N) |v_j - y|^2.
    """
    return System(A=I, B=exp_features(k) * v, C=exp_features(q * N**-0.5), normalize=dsf.ratio)


class SoftmaxAttention(Mixer):
    """Causal multi-head softmax attention without positions; grouped queries with n_kv_heads < n_heads.

    headdim: width of a head of q, k and v (d_model / n_heads unless given). It has no convolution and no
    gate, so `bare` changes nothing. Projections are torch's default init.
    """

    recurrence = softmax_attention

    def __init__(
        self,
        d_model: int,
        n_heads: int = 4,
        n_kv_heads: int | None = None,
        headdim: int | None = None,
        bias: bool = False,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        headdim = self.width(d_model, n_heads, headdim, "headdim")
        self.n_kv_heads = self.shared("n_kv_heads", n_kv_heads, n_heads)
        self.dims = (n_heads, headdim, headdim)
        self.q_proj = nn.Linear(d_model, n_heads * headdim, bias=bias)
        self.k_proj = nn.Linear(d_model, self.n_kv_heads * headdim, bias=bias)
        self.v_proj = nn.Linear(d_model, self.n_kv_heads * headdim, bias=bias)
        self.o_proj = nn.Linear(n_heads * headdim, d_model, bias=bias)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        """Say what a rank has of this layer whose heads are shared (`dsf.parallel.HeadShard`)."""
        heads, n, p = self.dims
        to.count(n_heads=heads, n_kv_heads=self.n_kv_heads)
        to.set(dims=(to.share(heads), n, p), n_kv_heads=to.share(self.n_kv_heads))
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            to.rows(linear)
        to.summed(self.o_proj)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        heads, n, p = self.dims
        return {
            "q": self.q_proj(u).unflatten(-1, (heads, n)),
            "k": self.k_proj(u).unflatten(-1, (self.n_kv_heads, n)),
            "v": self.v_proj(u).unflatten(-1, (self.n_kv_heads, p)),
        }

    def readout(self, y: Tensor, side: Side) -> Tensor:
        return self.o_proj(y.flatten(2))

    def state_size(self, context: int = 0, conv: bool = True) -> int:
        """Numbers in the KV cache after `context` tokens: 2 · context · n_kv_heads · headdim."""
        _, n, p = self.dims
        return context * self.n_kv_heads * (n + p)
