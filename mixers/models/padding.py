"""Padded and packed batches: boundaries from masks and positions, removal and restoring of padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsf.language.errors import InputError
from dsf.mixers.models.parts import IGNORED


@dataclass(frozen=True)
class Unpadded:
    """Which places of a batch [B, T] hold tokens, and the sequences that these belong to.

    where: int64, the places with tokens among all B · T; None: all. cu_seqlens: boundaries [S + 1] of the sequences of
    the packed tokens. begun: whether every sequence's last place has a token, so that padding on the left has ended.
    """

    where: Tensor | None
    cu_seqlens: Tensor
    begun: bool

    @property
    def empty(self) -> bool:
        """Whether all places are padding."""
        return self.where is not None and not len(self.where)

    def pack(self, x: Tensor) -> Tensor:
        """x [B, T, ...] -> its tokens [1, tokens, ...]."""
        rows = x.flatten(0, 1)
        return (rows if self.where is None else rows[self.where]).unsqueeze(0)

    def unpack(self, y: Tensor, shape: torch.Size) -> Tensor:
        """y [1, tokens, D] -> [B, T, D], with zeros at padding. shape: (B, T, ...)."""
        if self.where is None:
            return y[0].unflatten(0, tuple(shape[:2]))
        filled = y.new_zeros(shape[0] * shape[1], y.shape[-1]).index_copy(0, self.where, y[0])
        return filled.unflatten(0, tuple(shape[:2]))


def unpadded(
    attention_mask: Any, batch: int, tokens: int, layer: Any = None, position_ids: Tensor | None = None
) -> Unpadded | None:
    """The `Unpadded` places of a call on [B, T]; None if every row is one sequence without padding.

    attention_mask: [B, earlier tokens + T], 0 for padding. layer: the first mixer's `Kept` state, if the sequences go
    on from one. position_ids: without such a state, a position 0 begins a sequence of its own (`beginnings`).

    It waits for the device, to read the number of tokens. For one token of sequences that have begun it only reads
    masks on a CPU, since generation passes no padding then. Raises InputError for other shapes, and for sequences that
    have no token and do not go on from a state.
    """
    real = real_tokens(attention_mask, batch, tokens, layer)
    begins = None if layer is not None else beginnings(position_ids, real, batch, tokens)
    where = None if real is None else real.flatten().nonzero().squeeze(1)
    if real is None:
        if begins is None:
            return None
        real = torch.ones_like(begins)
    lengths = real.sum(1)
    if layer is None and not bool(lengths.all()):
        none = int((lengths == 0).nonzero()[0])
        raise InputError(f"attention_mask: sequence {none} has no token; leave it out")
    bounds = F.pad(lengths.cumsum(0), (1, 0))
    if begins is not None:
        inside = (begins.flatten() if where is None else begins.flatten()[where]).nonzero().squeeze(1)
        bounds = torch.cat([bounds, inside]).sort().values
    return Unpadded(where, bounds, bool(real[:, -1].all()))


def real_tokens(attention_mask: Any, batch: int, tokens: int, layer: Any = None) -> Tensor | None:
    """bool [B, T], True for the tokens of a call that are no padding; None: all of them. Arguments as of `unpadded`."""
    if isinstance(attention_mask, dict):  # generate() makes one for each type of layer
        attention_mask = attention_mask.get("linear_attention", next(iter(attention_mask.values()), None))
    if attention_mask is None:
        return None
    waits = torch.compiler.is_compiling() or attention_mask.device.type != "cpu"
    if waits and tokens == 1 and layer is not None and layer.begun:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < tokens:
        raise InputError(
            f"attention_mask: expected 0 and 1 of shape [{batch}, past + {tokens}], got {tuple(attention_mask.shape)}"
        )
    real = attention_mask[:, attention_mask.shape[1] - tokens :] != 0
    return None if bool(real.all()) else real


def beginnings(position_ids: Tensor | None, real: Tensor | None, batch: int, tokens: int) -> Tensor | None:
    """bool [B, T], True for tokens at position 0 behind another token of their row, which begin a packed sequence; None
    without any.

    position_ids: [1 or B, T]. Collators that pack without cu_seqlens mark texts by positions alone, and to ignore these
    would leak one text into the next. real: bool [B, T], the tokens that are no padding; None: all.
    """
    begins = _at_zero(position_ids, batch, tokens)
    if begins is None:
        return None
    if real is not None:
        begins = begins & real & (real.cumsum(1) > 1)
    else:
        begins = torch.cat([torch.zeros_like(begins[:, :1]), begins[:, 1:]], 1)
    return begins if bool(begins.any()) else None


def _at_zero(position_ids: Tensor | None, batch: int, tokens: int) -> Tensor | None:
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape not in ((1, tokens), (batch, tokens)):
        return None
    return (position_ids == 0).expand(batch, -1)


def predicted(labels: Tensor, attention_mask: Any, position_ids: Tensor | None = None) -> Tensor:
    """Labels [B, T] with -100 where the place before cannot predict them: it is padding, or of another sequence, as
    position_ids tell. It does not wait for the device."""
    batch, tokens = labels.shape
    begins = _at_zero(position_ids, batch, tokens)
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        real = attention_mask[:, attention_mask.shape[1] - tokens :] != 0
        behind = ~F.pad(real[:, :-1], (1, 0), value=True)
        begins = behind if begins is None else behind | (begins & real)
    return labels if begins is None else labels.masked_fill(begins, IGNORED)
