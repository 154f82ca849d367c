"""The short causal convolution in front of many recurrences, with its state, and RWKV's of two fixed taps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsf.call.long import long_convolution
from dsf.call.packing import sequence_of
from dsf.kernels.convolution import LARGEST, Fused, Piece, fused, l2norm, short_convolution, short_convolution_step
from dsf.language.errors import InputError
from dsf.mixers._own import fill
from dsf.triton.convolve import on_kernels
from dsf.triton.long import SHORT

LONG = 1024  # tokens from which on convolutions of more taps than the kernels can sum are made by FFT


class ShortConv(nn.Conv1d):
    """Depthwise causal convolution of K = d_conv taps along time, then `activation` (None: none).

    Its state is the last K - 1 inputs of each channel, zeros before a sequence begins. weight is [C, 1, K] and bias
    [C], as in released models.
    pieces: parts of the channels (`heads_of`) that become separate outputs; None: one output of all channels.
    blur: initialise the newest tap near one, the others within blur times torch's bounds; None: all taps as torch does,
      which is a random mixture of the last K inputs.
    """

    def __init__(
        self,
        channels: int,
        d_conv: int = 4,
        bias: bool = True,
        activation: Callable[[Tensor], Tensor] | None = F.silu,
        pieces: Sequence[Piece] | None = None,
        blur: float | None = None,
    ):
        self.blur = blur
        super().__init__(channels, channels, d_conv, groups=channels, bias=bias)
        self.activation = activation
        self.pieces = None if pieces is None else tuple(pieces)

    def reset_parameters(self) -> None:
        """Initialise the taps again, like the constructor."""
        super().reset_parameters()
        if self.blur is not None:
            fill(self.weight, partial(_newest_first, blur=self.blur))

    @property
    def state_size(self) -> int:
        """Numbers kept per sequence."""
        return self.in_channels * (self.kernel_size[0] - 1)

    def forward(  # type: ignore[override]
        self, x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None, in_place: bool = False,
        spread: Callable[[Tensor, Tensor | None], tuple[tuple[Tensor, ...], Tensor]] | None = None,
    ) -> tuple[Any, Tensor]:  # fmt: skip
        """x [B, T, C] -> (y [B, T, C], the new state [B, C, K - 1]).

        y: a tuple of the pieces [B, T, width] if the module has any. cu_seqlens: boundaries [S + 1] of packed
        sequences; then B is 1, and states have S rows. in_place: overwrite the state, for one token of each sequence
        without gradients. spread: a function that convolves x, a rank's tokens, from the state of the whole sequence,
        with `spreads` (dsf.parallel). Raises InputError for an x or a state of other sizes.
        """
        self._check(x, state, cu_seqlens)
        own = self.activation in (None, F.silu)
        activation, weight = "silu" if self.activation is F.silu else None, self.weight.squeeze(1)
        if not own and self.pieces is not None:
            raise InputError("ShortConv: pieces are made after SiLU or no activation at all")
        if spread is not None:
            ys, state = spread(x, state)
        elif x.shape[1] == 1 and cu_seqlens is None:
            ys, state = short_convolution_step(x, weight, self.bias, state, activation, self.pieces, in_place)
        elif in_place:
            raise InputError("ShortConv: in_place=True is for one token a sequence")
        else:
            bounds = None if cu_seqlens is None else cu_seqlens.to(x.device)
            if self._is_long(x, bounds):
                ys, state = self._by_long(x, state)
            else:
                ys, state = short_convolution(x, weight, self.bias, state, bounds, activation, self.pieces)
        if self.pieces is not None:
            return ys, state
        return (ys[0] if own or self.activation is None else self.activation(ys[0])), state

    def _is_long(self, x: Tensor, bounds: Tensor | None) -> bool:
        """Whether `dsf.long_convolution` is faster: for more taps than the short one's kernels take, on a GPU."""
        many = self.kernel_size[0] > LARGEST and (self.kernel_size[0] <= SHORT or x.shape[1] >= LONG)
        return many and bounds is None and self.activation in (None, F.silu) and self.pieces is None and on_kernels(x)

    def _by_long(self, x: Tensor, state: Tensor | None) -> tuple[tuple[Tensor], Tensor]:
        """The convolution by `dsf.long_convolution`: y, and the state after x."""
        past = self.kernel_size[0] - 1
        padded = x if state is None else torch.cat([state.mT.to(x.dtype), x], dim=1)
        taps = self.weight.squeeze(1).flip(-1).T[None]
        y = long_convolution(padded.unsqueeze(2), taps).squeeze(2)[:, padded.shape[1] - x.shape[1] :]
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        y = y if self.activation is None else self.activation(y)
        last = F.pad(padded, (0, 0, max(0, past - padded.shape[1]), 0))
        return (y,), last[:, last.shape[1] - past :].mT.contiguous()

    def spreads(self, x: Tensor) -> Fused | None:
        """What the kernels take for a rank's tokens x [B, T, C], or None where torch convolves them."""
        plain = all(type(t) in (Tensor, nn.Parameter) for t in (x, self.weight))
        if not plain or torch.compiler.is_compiling() or self.activation not in (None, F.silu):
            return None
        activation = "silu" if self.activation is F.silu else None
        return fused(x, self.weight.squeeze(1), self.bias, activation, self.pieces)

    def _check(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> None:
        channels, past = self.in_channels, self.kernel_size[0] - 1
        if x.dim() != 3 or x.shape[2] != channels:
            raise InputError(f"ShortConv: x has shape {list(x.shape)}, expected [B, T, {channels}]")
        if cu_seqlens is not None and x.shape[0] != 1:
            raise InputError(f"ShortConv: cu_seqlens packs sequences along T of one row, and x has {x.shape[0]}")
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if state is not None and state.shape != (rows, channels, past):
            raise InputError(
                f"ShortConv: the state has shape {list(state.shape)}, expected [{rows}, {channels}, {past}]: one row a "
                "sequence, as an earlier call of this module returned it"
            )


class TokenShift(nn.Module):
    """x_t -> x_{t-1}, a short convolution with the two taps (1, 0). Its state is the last token, zeros at first.

    It is called as a `ShortConv` is and has the same attributes. The layer mixes the two tokens.
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
        """x [B, T, C] -> (the token before each [B, T, C], the new state [B, C, 1]). With cu_seqlens [S + 1] B is 1,
        and states have S rows."""
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


def _newest_first(*shape: int, blur: float) -> Tensor:
    taps = torch.empty(shape).uniform_(-1, 1) * (blur * shape[-1] ** -0.5)
    taps[..., -1] += 1
    return taps


def heads_of(sizes: Sequence[int], lengths: Sequence[float | None] = ()) -> tuple[Piece, ...]:
    """The pieces of `ShortConv` that are heads. sizes: H1, D1, H2, D2, … as in `split_heads`. lengths: the norm that
    the heads of each piece get; None: they keep theirs."""
    counts, widths = sizes[::2], sizes[1::2]
    lengths = lengths or [None] * len(counts)
    return tuple(
        Piece(h * d) if length is None else Piece(h * d, d, length)
        for h, d, length in zip(counts, widths, lengths, strict=True)
    )


def split_heads(
    u: Tensor | tuple[Tensor, ...], sizes: Sequence[int], lengths: Sequence[float | None] = ()
) -> tuple[Tensor, ...]:
    """u [B, T, H1·D1 + H2·D2 + …] -> [B, T, H1, D1], [B, T, H2, D2], …

    u: one tensor, or the outputs of a `ShortConv` with these pieces, which has normalised them. sizes: H1, D1, H2, …
    lengths: the Euclidean norm that the heads of each part get; None: they keep theirs.
    """
    counts, widths = sizes[::2], sizes[1::2]
    if isinstance(u, tuple):
        return tuple(x.unflatten(-1, (h, d)) for x, h, d in zip(u, counts, widths, strict=True))
    parts = u.split([h * d for h, d in zip(counts, widths, strict=True)], dim=-1)
    heads = [part.unflatten(-1, (h, d)) for part, h, d in zip(parts, counts, widths, strict=True)]
    if not lengths:
        return tuple(heads)
    return tuple(x if s is None else l2norm(x, s) for x, s in zip(heads, lengths, strict=True))
