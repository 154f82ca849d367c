"""Softmax attention through transformers' AttentionInterface."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsf.analysis.convert.layer import Layer, Run
from dsf.kernels.attention import fused, spread_heads
from dsf.mixers import softmax_attention
from dsf.trajectory import Attention

NAME = "dsf"
LAYERS: weakref.WeakKeyDictionary[nn.Module, Layer] = weakref.WeakKeyDictionary()


def register() -> None:
    """Make attn_implementation="dsf" known, with additive masks: without them sliding windows would be lost."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """query [b, h, t, n], key, value [b, g, s, ·], mask additive or bool [b|1, h|1, t, s] -> ([b, t, h, p], weights).

    The kernel trick of exponential features: the state is the KV cache that the model keeps. Scores that are not an
    inner product (softcap) are not exponential features and take the model's own way.
    """
    layer = LAYERS.get(module)
    if layer is None or options.get("softcap") is not None:
        own = sys.modules[type(module).__module__].eager_attention_forward
        return own(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    shown = layer.shared.mask(key.shape[2])
    seen, bias = _split_mask(module, query, key, attention_mask, options.get("position_bias"), shown)
    seen = _apart(seen, layer.cu_seqlens, query)
    sink = options.get("s_aux", getattr(module, "sinks", None))
    operands = Attention(query * scale, key, value, seen, bias, sink)
    layer.window = options.get("sliding_window") or layer.window
    layer.state, layer.key_heads = (query.shape[1], key.shape[-1], value.shape[-1]), key.shape[1]
    layer.show(Run(softmax_attention, {}, None, layer.call.get("runs", 0), operands))
    dropped = dropout if module.training else 0.0
    if sink is None and not dropped and not options.get("output_attentions"):
        return _fused(operands).transpose(1, 2).contiguous(), None
    weights = operands.matrix()
    y = F.dropout(weights, dropped).to(value.dtype) @ spread_heads(value, query.shape[1])
    return y.transpose(1, 2).contiguous(), weights


def _fused(operands: Attention) -> Tensor:
    if operands.bias is None:
        return fused(operands.a, operands.k, operands.v, operands.seen)
    heads = operands.a.shape[1]
    mask = operands.bias if operands.seen is None else operands.bias.masked_fill(~operands.seen, float("-inf"))
    k, v = spread_heads(operands.k, heads), spread_heads(operands.v, heads)
    return F.scaled_dot_product_attention(operands.a, k, v, attn_mask=mask, scale=1.0)


def _split_mask(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor | None, shown: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """What each query sees (None: plain causal) and what is added to its scores (None: nothing).

    A row that sees nothing (padding) sees all, as softmax of equal scores does.
    """
    tokens, places = query.shape[2], key.shape[2]
    if mask is None:
        if not getattr(module, "is_causal", True):
            return torch.ones(1, 1, tokens, places, dtype=torch.bool, device=query.device), bias
        plain = tokens == places
        causal = torch.ones(1, 1, tokens, places, dtype=torch.bool, device=query.device).tril(places - tokens)
        return (None if plain else causal), bias
    if mask.shape[-1] < places:  # MiniMax counts the tokens of a layer that has none: its mask lacks the cache
        mask = _with_past(mask, places - mask.shape[-1], shown)
    mask = mask[..., :places]
    if mask.dtype == torch.bool:
        return mask | ~mask.any(-1, keepdim=True), bias
    seen = mask > torch.finfo(mask.dtype).min / 2
    seen = seen | ~seen.any(-1, keepdim=True)
    extra = mask.masked_fill(~seen, 0)
    if bool((extra.clamp(min=torch.finfo(mask.dtype).min / 2) == extra).all()) and bool((extra != 0).any()):
        bias = extra if bias is None else bias + extra
    return seen, bias


def _with_past(mask: Tensor, past: int, shown: Tensor | None) -> Tensor:
    """mask [b|1, h|1, t, s] with `past` columns in front, visible where `shown` [b, past + s] says so (all if None)."""
    see, hide = (True, False) if mask.dtype == torch.bool else (0.0, torch.finfo(mask.dtype).min)
    front = mask.new_full((*mask.shape[:-1], past), see)
    if shown is not None:
        front = front.expand(shown.shape[0], -1, -1, -1).masked_fill(~shown[:, None, None, :past], hide)
        mask = mask.expand(shown.shape[0], -1, -1, -1)
    return torch.cat([front, mask], dim=-1)


def _apart(seen: Tensor | None, cu_seqlens: Tensor | None, query: Tensor) -> Tensor | None:
    """seen without what lies in other sequences of a packed call (not every model looks at the boundaries)."""
    tokens = query.shape[2]
    if cu_seqlens is None or int(cu_seqlens[-1]) != tokens or (seen is not None and seen.shape[-1] != tokens):
        return seen
    index = torch.searchsorted(cu_seqlens[1:], torch.arange(tokens, device=query.device), right=True)
    same = (index[:, None] == index[None]).tril()[None, None]
    return same if seen is None else seen & same
