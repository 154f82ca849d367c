"""Vision Mamba: two selective state spaces, one in either direction, between one pair of projections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsf import Packing
from dsf.call.backwards import flipped_packing
from dsf.kernels.reversal import joined, reversed_tokens
from dsf.mixers.bidirectional import BothWays, inputs_ahead, run_ahead, run_back
from dsf.mixers.s6 import S6, s6

if TYPE_CHECKING:
    from dsf.parallel import Cuts, World


class VisionMamba(BothWays):
    """The bidirectional block of Vision Mamba.

    Source: Zhu et al. (arXiv 2401.09417), Algorithm 1. Both directions share in_proj, the gate silu(z) and out_proj;
    each has its own convolution, x_proj, dt_proj, A_log and D: `ahead` and `back`, blocks of Mamba (`S6`), the latter
    without projections. Left out: patches, positions, the class token. bare: neither convolution nor z.
    """

    recurrence = s6

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        sizes: dict[str, Any] = {"d_state": d_state, "d_conv": d_conv, "expand": expand, "dt_rank": dt_rank}
        self.ahead, self.back = (
            S6(d_model, **sizes, dt_min=dt_min, dt_max=dt_max, bare=bare, layer_idx=layer_idx) for _ in range(2)
        )
        del self.back.in_proj, self.back.out_proj
        self.to(device=device, dtype=dtype)

    def cut(self, to: Cuts) -> None:
        """Declare a rank's part of this block where ranks share its channels (`dsf.parallel.HeadShard`)."""
        self.ahead.cut(to.inside(self.ahead))
        self.back.cut_between(to.inside(self.back))

    @property
    def dims(self) -> tuple[int, int, int]:
        """Heads, N and P of either direction."""
        return self.ahead.dims

    def ways(self, x: Tensor, cu_seqlens: Tensor | Packing | None = None) -> list[dict[str, Tensor]]:
        """The inputs of `s6` from the first token to the last and, of reversed tokens, back."""
        u, _ = self.ahead.project(x)
        flipped = None if cu_seqlens is None else flipped_packing(cu_seqlens)
        return [inputs_ahead(self.ahead, u, cu_seqlens), inputs_ahead(self.back, reversed_tokens(u), flipped)]

    def mix(self, x: Tensor, cu_seqlens: Tensor | Packing | None, world: World | None) -> Tensor:
        u, side = self.ahead.project(x)
        y = joined(run_ahead(self.ahead, u, cu_seqlens, world), run_back(self.back, u, cu_seqlens, world))
        return self.ahead.readout(y, side)
