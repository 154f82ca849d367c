"""Padded and packed batches: boundaries from masks and positions, removal and restoring of padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsf.language.errors import InputError


@dataclass(frozen=True)
class Unpadded:
    """The places of the tokens of a padded batch.

    where: their places among all B · T, int64. cu_seqlens: [B + 1] boundaries of the packed tokens.
    """

    where: Tensor
    cu_seqlens: Tensor

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [1, tokens, ...]."""
        return x.flatten(0, 1)[self.where].unsqueeze(0)

    def unpack(self, y: Tensor, shape: torch.Size) -> Tensor:
        """[1, tokens, D] -> [B, T, D], zeros where padding is. shape: (B, T)."""
        filled = y.new_zeros(shape[0] * shape[1], y.shape[-1]).index_copy(0, self.where, y[0])
        return filled.unflatten(0, tuple(shape[:2]))


def unpadded(attention_mask: Any, batch: int, tokens: int) -> Unpadded | None:
    """The unpadded tokens of a call's B · T by a mask [B, past + T]; None where nothing is padding.

    Waits for the device once, to read the number of tokens. A mask of one token is ignored, as generation passes no
    padding then. Raises InputError for other shapes and for sequences without a token.
    """
    if isinstance(attention_mask, dict):  # generate() makes one for each type of layer
        attention_mask = attention_mask.get("linear_attention", next(iter(attention_mask.values()), None))
    if attention_mask is None or tokens == 1:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < tokens:
        raise InputError(
            f"attention_mask: expected 0 and 1 of shape [{batch}, past + {tokens}], got {tuple(attention_mask.shape)}"
        )
    mask = attention_mask[:, attention_mask.shape[1] - tokens :] != 0
    if bool(mask.all()):
        return None
    lengths = mask.sum(1)
    if not bool(lengths.all()):
        raise InputError(f"attention_mask: sequence {int((lengths == 0).nonzero()[0])} has no token")
    return Unpadded(mask.flatten().nonzero().squeeze(1), F.pad(lengths.cumsum(0), (1, 0)))


def restarts(position_ids: Tensor | None, tokens: int) -> Tensor | None:
    """Boundaries [S + 1] of sequences packed in one row, from positions [1, T] that begin again at 0; None without any.

    Collators that pack without cu_seqlens mark the texts only by positions; ignoring these would leak one text into the
    next.
    """
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape != (1, tokens):
        return None
    starts = (position_ids[0] == 0).nonzero().squeeze(1)
    if starts.numel() < 2 or int(starts[0]) != 0:
        return None
    return torch.cat([starts, starts.new_tensor([tokens])])
