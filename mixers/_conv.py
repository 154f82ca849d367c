"""The short causal convolution in front of many recurrences, with its state."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ShortConv(nn.Conv1d):
    """Depthwise causal convolution of K taps along time, then `activation` (SiLU by default, None for none).

    As a dynamical system: K-1 numbers a channel, a nilpotent shift. Its state is the last K-1 inputs, zeros
    before the start. weight is [C, 1, K] and bias [C], as in every released model that has one.
    """

    def __init__(
        self,
        channels: int,
        d_conv: int = 4,
        bias: bool = True,
        activation: Callable[[Tensor], Tensor] | None = F.silu,
    ):
        super().__init__(channels, channels, d_conv, groups=channels, bias=bias)
        self.activation = activation

    @property
    def state_size(self) -> int:
        """Numbers kept per sequence."""
        return self.in_channels * (self.kernel_size[0] - 1)

    def forward(  # type: ignore[override]
        self, x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x: [B, T, C] -> (y [B, T, C], state [B, C, K-1]). With cu_seqlens [S+1] B = 1, state has S rows."""
        x = x.transpose(1, 2)
        sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        past = self.kernel_size[0] - 1
        if state is None:
            state = x.new_zeros(sequences, self.in_channels, past)
        if cu_seqlens is None:
            padded = torch.cat([state.to(x.dtype), x], dim=2)
            y, state = super().forward(padded), padded[..., padded.shape[2] - past :]
        else:
            y, state = self._packed(x, state.to(x.dtype), cu_seqlens.to(x.device, torch.long))
        y = y.transpose(1, 2)
        return (y if self.activation is None else self.activation(y)), state

    def _packed(self, x: Tensor, state: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Give each sequence its own K-1 columns of past, convolve once, keep the columns of tokens."""
        tokens, (sequences, channels, past) = x.shape[2], state.shape
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        column = torch.arange(tokens, device=x.device)
        # Sequence s begins at column cu[s] + s(K-1) of the padded row; outputs land K-1 before tokens.
        output = column + torch.searchsorted(cu_seqlens[1:], column, right=True) * past
        begin = cu_seqlens[:-1] + torch.arange(sequences, device=x.device) * past
        window = begin.unsqueeze(1) + torch.arange(past, device=x.device)  # [S, K-1]
        padded = x.new_zeros(1, channels, tokens + sequences * past)
        padded = padded.index_copy(2, window.flatten(), state.transpose(0, 1).reshape(1, channels, -1))
        padded = padded.index_copy(2, output + past, x)
        last = padded[0].index_select(1, (window + lengths.unsqueeze(1)).flatten())
        return super().forward(padded)[..., output], last.unflatten(1, (sequences, past)).transpose(0, 1)
