"""RWKV's token shift: the token before, as a convolution of two fixed taps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsf.call.packing import sequence_of


class TokenShift(nn.Module):
    """x_t -> x_{t-1}: a short convolution of 2 taps, (1, 0). Its state is the last token, zeros before the start.

    Calls and attributes are those of `ShortConv`; the layer mixes the two tokens.
    """

    kernel_size = (2,)

    def __init__(self, channels: int):
        super().__init__()
        self.in_channels = channels

    @property
    def state_size(self) -> int:
        """Numbers kept per sequence."""
        return self.in_channels

    def forward(
        self, x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x: [B, T, C] -> (the tokens before [B, T, C], state [B, C, 1]). With cu_seqlens [S+1] B = 1, S rows."""
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        first = x.new_zeros(rows, x.shape[2]) if state is None else state[..., 0].to(x.dtype)
        if cu_seqlens is None:
            past = torch.cat([first.unsqueeze(1), x], dim=1)
            last = past[:, -1] if x.shape[1] == 1 else x[:, -1].clone()  # a view would keep all of x
            return past[:, :-1], last.unsqueeze(-1)
        bounds = cu_seqlens.to(x.device, torch.long)
        begin, end = bounds[:-1], bounds[1:]
        # One spare place: where a sequence is empty at the end of the row, its first token would be at T.
        shifted = torch.cat([x[:, :1], x], dim=1)
        empty = (begin == end).unsqueeze(1)
        last = torch.where(empty, first, shifted[0].index_select(0, end))
        token = torch.arange(x.shape[1], device=x.device)
        row = sequence_of(bounds, token)
        begins = (token == begin[row]).unsqueeze(1)
        return torch.where(begins, first[row], shifted[0, :-1]).unsqueeze(0), last.unsqueeze(-1)
