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

    where: their places among all B · T, int64. cu_seqlens: [B + 1] boundaries of the packed tokens. begun: whether
    every sequence's last place has a token, so that padding on the left has ended.
    """

    where: Tensor
    cu_seqlens: Tensor
    begun: bool

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [1, tokens, ...]."""
        return x.flatten(0, 1)[self.where].unsqueeze(0)

    def unpack(self, y: Tensor, shape: torch.Size) -> Tensor:
        """[1, tokens, D] -> [B, T, D], zeros where padding is. shape: (B, T)."""
        filled = y.new_zeros(shape[0] * shape[1], y.shape[-1]).index_copy(0, self.where, y[0])
        return filled.unflatten(0, tuple(shape[:2]))


def unpadded(attention_mask: Any, batch: int, tokens: int, layer: Any = None) -> Unpadded | None:
    """The unpadded tokens of a call's B · T by a mask [B, past + T]; None where nothing is padding.

    Waits for the device, to read the number of tokens; not for one token of sequences that have begun, as generation
    passes no padding then. layer: the `Kept` state of the first of the mixers, if the sequences go on from one. Raises
    InputError for other shapes, and for sequences without a token that do not go on.
    """
    if isinstance(attention_mask, dict):  # generate() makes one for each type of layer
        attention_mask = attention_mask.get("linear_attention", next(iter(attention_mask.values()), None))
    if attention_mask is None or (tokens == 1 and layer is not None and layer.begun):
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < tokens:
        raise InputError(
            f"attention_mask: expected 0 and 1 of shape [{batch}, past + {tokens}], got {tuple(attention_mask.shape)}"
        )
    mask = attention_mask[:, attention_mask.shape[1] - tokens :] != 0
    if bool(mask.all()):
        return None
    lengths, where = mask.sum(1), mask.flatten().nonzero().squeeze(1)
    if layer is None and not bool(lengths.all()):
        none = int((lengths == 0).nonzero()[0])
        raise InputError(f"attention_mask: sequence {none} has no token; leave it out")
    return Unpadded(where, F.pad(lengths.cumsum(0), (1, 0)), bool(mask[:, -1].all()))


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
