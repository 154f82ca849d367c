"""Forgetting attention (FoX): softmax attention with a forget gate."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import dsf
from dsf import Expr, Key, N, Scalar, System, Value, exp_features, sigmoid
from dsf.mixers._beside import product_of
from dsf.mixers._conv import TokenShift
from dsf.mixers._module import Mixer, Side, Span
from dsf.mixers._norm import GatedRMSNorm
from dsf.mixers._own import StartLinear, uniform

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def fox(q: Key, k: Key, v: Value, f: Scalar) -> System:
    """Forgetting attention: softmax attention whose state decays by a gate of every token.

    Source: Lin et al. (arXiv 2503.02130), equations 4-6.
    Symbols: sigmoid(f) the forget gate; its logarithms, summed from j + 1 to i, are the bias of score i, j. k, v may
    have fewer heads (grouped queries).
    Objective: Nadaraya-Watson regression, min over y of sum_j (prod_{j < l <= i} f_l) exp(q'k_j / sqrt N) |v_j - y|^2.
    """
    return System(A=sigmoid(f), B=exp_features(k) * v, C=exp_features(q * N**-0.5), normalize=dsf.ratio)


@dsf.tokenwise(by_torch=lambda now, before, share: torch.lerp(now, before, share.to(now.dtype).unsqueeze(-1)))
def mixed(now: Key, before: Key, share: Scalar) -> Expr:
    """A head's numbers and those of the token before, of which it gets a share."""
    return now + (before - now) * share


def _as_torch(rows: int, columns: int) -> Tensor:
    return uniform(rows, columns, bound=columns**-0.5)


class ForgettingAttention(Mixer):
    """The FoX layer: each head has a forget gate, f_proj(x), whose bias begins at 0. There are no positions.

    pro: the paper's "Pro" block. A gate of each head mixes k and v with those of the token before; q, k and y pass an
      RMSNorm of each head; y is then multiplied by sigmoid(g_proj(x)). False, or bare: LLaMA's block, without these.
    headdim: width of a head of q, k and v; None: d_model / n_heads.
    n_kv_heads: heads of k and v, a divisor of n_heads; None: n_heads.
    Linear maps keep torch's default init.
    """

    recurrence = fox
    beside = ("kv_proj", "q_proj", "shift_proj", "g_proj")
    sigmoid = "shift_proj"

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        n_kv_heads: int | None = None,
        headdim: int | None = None,
        pro: bool = True,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        n_heads, headdim = self.heads(d_model, n_heads, ("n_kv_heads", n_kv_heads), headdim=(d_model, headdim))
        self.n_kv_heads = self.shared("n_kv_heads", n_kv_heads, n_heads)
        self.dims = (n_heads, headdim, headdim)
        inner, kept, pro = n_heads * headdim, self.n_kv_heads * headdim, pro and not bare
        self.q_proj = nn.Linear(d_model, inner, bias=False)
        self.kv_proj = nn.Linear(d_model, 2 * kept, bias=False)
        self.f_proj = StartLinear(d_model, n_heads, _as_torch, bias=True)
        self.conv1d = TokenShift(2 * kept) if pro else None
        self.shift_proj = nn.Linear(d_model, 2 * self.n_kv_heads, bias=False) if pro else None
        self.q_norm = GatedRMSNorm(inner, groups=n_heads) if pro else None
        self.k_norm = GatedRMSNorm(kept, groups=self.n_kv_heads) if pro else None
        self.g_proj = nn.Linear(d_model, inner, bias=False) if pro else None
        self.o_norm = GatedRMSNorm(inner, groups=n_heads, activation="sigmoid") if pro else None
        self.o_proj = nn.Linear(inner, d_model, bias=False)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        """Declare a rank's part of this layer where ranks share its heads (`dsf.parallel.HeadShard`)."""
        (heads, n, p), kept = self.dims, self.n_kv_heads
        to.over_heads(n_kv_heads=kept)
        to.set(n_kv_heads=to.share(kept))
        to.rows(self.q_proj)
        to.rows(self.kv_proj, kept * n, kept * p)
        to.rows(self.f_proj)
        to.conv(self.conv1d)
        to.rows(self.shift_proj, kept, kept)
        to.norm(self.q_norm, heads)
        to.norm(self.k_norm, kept)
        to.rows(self.g_proj)
        to.norm(self.o_norm, heads)
        to.summed(self.o_proj)

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        kv, given = self.made_first(x)
        return kv, (kv, *given)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        (kv, *given), (_, n, _) = side, self.dims
        x, q = given[0], self.made(given, "q_proj")
        if self.shift_proj is not None and self.q_norm is not None and self.k_norm is not None:
            heads = kv.unflatten(-1, (-1, n)), u.unflatten(-1, (-1, n))
            k, v = mixed(*heads, self.made(given, "shift_proj")).flatten(2).chunk(2, dim=-1)
            q, k = self.q_norm(q), self.k_norm(k)
        else:
            k, v = kv.chunk(2, dim=-1)
        return {
            **{name: y.unflatten(-1, (-1, n)) for name, y in (("q", q), ("k", k), ("v", v))},
            "f": product_of(x, self.f_proj),
        }

    def readout(self, y: Tensor, side: Side) -> Tensor:
        y = y.flatten(2)
        if self.o_norm is not None and self.g_proj is not None:
            y = self.o_norm(y, self.made(side[1:], "g_proj"))
        return product_of(y, self.o_proj)

    def state_size(self, context: int = 0, conv: bool = True) -> int:
        """The numbers in one sequence's state after `context` tokens: k, v and a bias of each token, and k and v of the
        last token before they were mixed, unless conv=False."""
        heads, n, p = self.dims
        last = self.conv1d.state_size if conv and self.conv1d is not None else 0
        return context * (self.n_kv_heads * (n + p) + heads) + last
