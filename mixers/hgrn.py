"""HGRN: a gated recurrence whose input gate is what the forget gate leaves."""

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsf
from dsf import System, Value, sigmoid
from dsf.language.errors import InputError
from dsf.mixers._conv import ShortConv
from dsf.mixers._module import Mixer, Side, Span
from dsf.mixers._norm import GatedRMSNorm, normed

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def hgrn(f: Value, i: Value) -> System:
    """HGRN, its real form: one number a channel.

    Source: Qin et al. (arXiv 2311.04823), Section 3. Symbols: f is the pre-activation of the forget gate, i
    the input; the layer's lower bound on the gate and its output gate stay outside.
    """
    return System(A=sigmoid(f), B=sigmoid(-f) * i, C=1)


def bounded_below(f: Tensor, bound: float) -> Tensor:
    """The pre-activation g with sigmoid(g) = bound + (1 - bound) sigmoid(f)."""
    if not 0 <= bound < 1:
        raise InputError(f"lower_bound is {bound}; a forget gate's lower bound lies in [0, 1)")
    if not bound:
        return f
    low = math.log(bound)
    return F.softplus(f - low) + (low - math.log1p(-bound))  # log(e^f + bound) - log(1 - bound)


class HGRN(Mixer):
    """The HGRN layer: forget gate and silu input from x, recurrence, RMSNorm, gate silu(g), o_proj.

    Source: Qin et al. (arXiv 2311.04823), Section 3.2, without its complex phase. One head of expand · d_model
    channels. lower_bound: of this layer's forget gates, in [0, 1). The paper learns bounds that grow from layer to
    layer, jointly for a whole model; that is left out. d_conv: taps of a convolution before gates and input; 0, as in
    the paper: none. Linear maps keep torch's default init. bare: neither output gate nor convolution.
    """

    recurrence = hgrn
    beside = ("in_proj", "g_proj")

    def __init__(
        self,
        d_model: int,
        expand: float = 1,
        d_conv: int = 0,
        lower_bound: float = 0.0,
        bias: bool = False,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        d_inner = self.inner(d_model, expand)
        bounded_below(torch.zeros(()), lower_bound)
        self.dims, self.lower_bound = (1, 1, d_inner), lower_bound
        self.in_proj = nn.Linear(d_model, 2 * d_inner, bias=bias)
        self.conv1d = ShortConv(2 * d_inner, d_conv, activation=None) if d_conv and not bare else None
        self.g_proj = None if bare else nn.Linear(d_model, d_inner, bias=bias)
        self.o_norm = GatedRMSNorm(d_inner)
        self.o_proj = nn.Linear(d_inner, d_model, bias=bias)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        """Declare a rank's part of this layer where ranks share its channels (`dsf.parallel.HeadShard`)."""
        channels = to.over_channels()
        to.rows(self.in_proj, channels, channels)
        to.conv(self.conv1d, channels, channels)
        to.rows(self.g_proj)
        to.norm(self.o_norm)
        to.summed(self.o_proj)

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        u, given = self.made_first(x)
        return u, () if self.g_proj is None else (self.made(given, "g_proj"),)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        f, i = u.unsqueeze(2).chunk(2, dim=-1)
        return {"f": bounded_below(f, self.lower_bound), "i": F.silu(i)}

    def readout(self, y: Tensor, side: Side) -> Tensor:
        return normed(self.o_norm, y.flatten(2), side[0] if side else None, self.o_proj)
