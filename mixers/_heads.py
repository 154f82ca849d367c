"""The common base of layers with queries, keys and values for every head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from dsf.mixers._conv import ShortConv, heads_of, split_heads
from dsf.mixers._module import Mixer, Side
from dsf.mixers._norm import GatedRMSNorm, normed

if TYPE_CHECKING:
    from dsf.parallel import Cuts


class Heads(Mixer):
    """One input projection, convolution, a recurrence, RMSNorm of each head, a gate silu(g_proj(x)), o_proj.

    sections: heads and widths of in_proj's output, H1, D1, H2, D2, ... (see `split_heads`). d_conv: taps of the
    convolution with SiLU, 0 for none. gate: the module that computes the output gate from x, or None. lengths: the
    Euclidean length of each section's heads, None for unnormalised. blur: of the convolution (`ShortConv`).
    """

    beside: tuple[str, ...] = ("in_proj", "g_proj")
    blur: float | None = None

    def __init__(
        self,
        d_model: int,
        dims: tuple[int, int, int],
        sections: tuple[int, ...],
        d_conv: int = 0,
        gate: nn.Module | None = None,
        bias: bool = False,
        layer_idx: int | None = None,
        lengths: tuple[float | None, ...] = (),
    ):
        super().__init__(layer_idx)
        heads, _, p = self.dims = dims
        self.sections, self.lengths = sections, lengths
        channels = sum(h * d for h, d in zip(sections[::2], sections[1::2], strict=True))
        self.in_proj = nn.Linear(d_model, channels, bias=bias)
        pieces = heads_of(sections, lengths)
        self.conv1d = ShortConv(channels, d_conv, bias=False, pieces=pieces, blur=self.blur) if d_conv else None
        self.g_proj = gate
        self.o_norm = GatedRMSNorm(p)
        self.o_proj = nn.Linear(heads * p, d_model, bias=bias)

    def cut(self, to: Cuts) -> None:
        """Declare a rank's part of this layer where ranks share its heads (`dsf.parallel.HeadShard`)."""
        to.over_heads()
        sections = self.steps_apart(*to.heads("sections"))
        to.rows(self.in_proj, *sections)
        to.conv(self.conv1d, *sections)
        to.rows(self.g_proj)
        to.summed(self.o_proj)

    def steps_apart(self, *sections: int) -> tuple[int, ...]:
        """The sections of in_proj's output, those with several steps' heads split into one for each step."""
        return sections

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        return self.made_first(x)

    def split(self, u: Tensor) -> tuple[Tensor, ...]:
        """The convolution's outputs, or [B, T, C] without one -> the sections, each [B, T, H, D]."""
        return split_heads(u, self.sections, self.lengths)

    def per_head(self, x: Tensor) -> Tensor:
        """[B, T, H·D] -> [B, T, H, D]."""
        return x.unflatten(-1, (self.dims[0], -1))

    def readout(self, y: Tensor, side: Side) -> Tensor:
        gate = None if self.g_proj is None else self.made(side, "g_proj").view_as(y)
        return normed(self.o_norm, y, gate, self.o_proj)


def low_rank(d_in: int, rank: int, d_out: int, bias: bool) -> nn.Sequential:
    """A linear map of this rank: d_in -> rank -> d_out."""
    return nn.Sequential(nn.Linear(d_in, rank, bias=False), nn.Linear(rank, d_out, bias=bias))
