"""DeltaNet: linear attention that overwrites."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import dsf
from dsf import I, Key, Scalar, System, Value, outer
from dsf.mixers._conv import ShortConv, heads_of, split_heads
from dsf.mixers._module import Mixer, Side, Span
from dsf.mixers._norm import GatedRMSNorm, normed

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def deltanet(q: Key, k: Key, v: Value, beta: Scalar) -> System:
    """DeltaNet: erase what is stored at k, write v there.

    Source: Schlag et al. (arXiv 2102.11174), Section 4; Yang et al. (arXiv 2406.06484), Section 2.
    Symbols: k of unit length; beta in (0, 1), or (0, 2) for eigenvalues in [-1, 1] (arXiv 2411.12537).
    Objective: one gradient step of 1/2 |S'k_t - v_t|^2 with rate beta_t.
    """
    return System(A=I - beta * outer(k, k), B=k * (beta * v), C=q)


class DeltaNet(Mixer):
    """The DeltaNet layer: convolution and SiLU on q, k, v; q and k to unit length; RMSNorm a head; o_proj.

    d_state: width of a head of q and k; headdim: of v. None: d_model / n_heads. n_key_heads: heads of q and k, a
    divisor of n_heads; groups of value heads share them. None: n_heads. allow_neg_eigval: beta in (0, 2) instead of
    (0, 1). Queries are scaled by d_state^-0.5. bare: neither convolution nor SiLU.

    The convolution begins with its newest tap near one (blur 0.3). torch's init is a random mixture of four tokens,
    with which the layer learns slower than without a convolution (docs/layers.md).
    """

    recurrence = deltanet
    beside: tuple[str, ...] = ("qkv_proj", "b_proj")
    sigmoid = "b_proj"
    blur: float | None = 0.3
    key_length: float | None = 1.0  # to which keys are brought

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        n_key_heads: int | None = None,
        d_state: int | None = None,
        headdim: int | None = None,
        d_conv: int = 4,
        allow_neg_eigval: bool = False,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        widths = {"d_state": (d_model, d_state), "headdim": (d_model, headdim)}
        n_heads, n, p = self.heads(d_model, n_heads, ("n_key_heads", n_key_heads), **widths)
        keys = self.shared("n_key_heads", n_key_heads, n_heads)
        self.dims = (n_heads, n, p)
        self.split, self.lengths = (keys, n, keys, n, n_heads, p), (n**-0.5, self.key_length, None)
        self.beta_max = 2.0 if allow_neg_eigval else 1.0
        channels = 2 * keys * n + n_heads * p
        self.qkv_proj = nn.Linear(d_model, channels, bias=False)
        self.b_proj = nn.Linear(d_model, n_heads, bias=False)
        pieces = heads_of(self.split, self.lengths)
        self.conv1d = (
            None if bare or not d_conv else ShortConv(channels, d_conv, bias=False, pieces=pieces, blur=self.blur)
        )
        self.o_norm = GatedRMSNorm(p)
        self.o_proj = nn.Linear(n_heads * p, d_model, bias=False)
        self.own_more(d_model, bare)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        """Declare a rank's part of this layer where ranks share its heads (`dsf.parallel.HeadShard`)."""
        to.over_heads(n_key_heads=self.split[0])
        sections = to.heads("split")
        to.rows(self.qkv_proj, *sections)
        to.conv(self.conv1d, *sections)
        to.rows(self.b_proj)
        to.summed(self.o_proj)

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        return self.made_first(x)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        return self._written(u, self.made(side, "b_proj"))

    def _written(self, u: Tensor, b: Tensor) -> dict[str, Tensor]:
        """q, k, v and beta, from what the convolution made of them and the sigmoid of b_proj's output."""
        q, k, v = split_heads(u, self.split, self.lengths)
        return {"q": q, "k": k, "v": v, "beta": b if self.beta_max == 1.0 else self.beta_max * b}

    def readout(self, y: Tensor, side: Side) -> Tensor:
        return normed(self.o_norm, y, None, self.o_proj)
