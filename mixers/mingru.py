"""minGRU: the GRU whose gate does not see its state."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import dsf
from dsf import System, Value, sigmoid, where
from dsf.mixers._beside import product_of
from dsf.mixers._conv import ShortConv
from dsf.mixers._module import Mixer, Side, Span

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def mingru(z: Value, h: Value) -> System:
    """minGRU: move from the old state to a candidate by a gate.

    Source: Feng et al. (arXiv 2410.01201), Section 3.1. Symbols: z is the pre-activation of the update gate,
    h the candidate state.
    """
    return System(A=sigmoid(-z), B=sigmoid(z) * h, C=1)


@dsf.recurrence
def mingru_positive(z: Value, h: Value) -> System:
    """minGRU with candidates above zero, as where the paper computes with logarithms.

    Source: Feng et al. (arXiv 2410.01201), Appendix B. Symbols: z is the pre-activation of the update gate, h that of
    the candidate g(h) = h + 1/2 for h >= 0, sigmoid(h) below.
    """
    return System(A=sigmoid(-z), B=sigmoid(z) * where(h >= 0, h + 0.5, sigmoid(h)), C=1)


class MinGRU(Mixer):
    """The minGRU layer: convolution, gate and candidate, recurrence, down-projection.

    Source: Feng et al. (arXiv 2410.01201), Section 3.1 and Appendices B and C. One head of expand · d_model channels.
    positive: take `mingru_positive`, else `mingru`. d_conv: taps of the convolution, which the paper's language models
    have, without activation; 0: none. Linear maps keep torch's default init. bare: no convolution.
    """

    recurrence = mingru

    def __init__(
        self,
        d_model: int,
        expand: float = 2,
        d_conv: int = 4,
        positive: bool = True,
        bias: bool = True,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        d_inner = self.inner(d_model, expand)
        self.dims = (1, 1, d_inner)
        if positive:
            self.recurrence = mingru_positive
        self.conv1d = ShortConv(d_model, d_conv, activation=None) if d_conv and not bare else None
        self.in_proj = nn.Linear(d_model, 2 * d_inner, bias=bias)
        self.out_proj = nn.Linear(d_inner, d_model, bias=bias)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        """Declare a rank's part of this layer where ranks share its channels (`dsf.parallel.HeadShard`)."""
        channels = to.over_channels()
        to.rows(self.in_proj, channels, channels)
        to.summed(self.out_proj)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        z, h = self.first_map(u, self.in_proj).unsqueeze(2).chunk(2, dim=-1)
        return {"z": z, "h": h}

    def readout(self, y: Tensor, side: Side) -> Tensor:
        return product_of(y.flatten(2), self.out_proj)
