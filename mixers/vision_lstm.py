"""Vision-LSTM: blocks of mLSTM that run forward and backward in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsf import Packing
from dsf.mixers._norm import LayerNorm
from dsf.mixers.bidirectional import BothWays
from dsf.mixers.mlstm import MLSTM

if TYPE_CHECKING:
    from dsf.parallel import World


class VisionLSTM(BothWays):
    """Two neighbouring blocks of Vision-LSTM, the first forward, the second backward, without common parameters.

    Source: Alkin et al. (arXiv 2406.04303), Section 3 and Figure 1. Each block is x + MLSTM(LayerNorm(x)), so the
    module contains norms and residuals, and y replaces x. Left out: patches, positions, and the later
    two-dimensional convolution in place of the causal one. Arguments are those of `MLSTM`.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        expand: float = 2,
        d_conv: int = 4,
        qkv_block: int = 4,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        self.ahead_norm, self.back_norm = LayerNorm(d_model, bias=False), LayerNorm(d_model, bias=False)
        own = d_model, n_heads, expand, d_conv, qkv_block, bare
        self.ahead, self.back = MLSTM(*own), MLSTM(*own)
        self.to(device=device, dtype=dtype)

    def mix(self, x: Tensor, cu_seqlens: Tensor | Packing | None, world: World | None) -> Tensor:
        how: dict[str, Any] = {"cu_seqlens": cu_seqlens, "use_cache": False, "parallel": world}
        x = x + self.ahead(self.ahead_norm(x), **how)[0]
        return x + self.back(self.back_norm(x), **how, reverse=True)[0]
