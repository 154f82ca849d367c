"""Softmax attention through transformers' AttentionInterface."""

from __future__ import annotations

import functools
import sys
import weakref
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsf
from dsf import I, Key, Param, Recurrence, Scalar, System, Value, exp, exp_features
from dsf.analysis.convert.layer import Layer, Run
from dsf.kernels.attention import fused, spread_heads
from dsf.mixers import softmax_attention
from dsf.trajectory import Attention

NAME = "dsf"
LAYERS: weakref.WeakKeyDictionary[nn.Module, Layer] = weakref.WeakKeyDictionary()


def register() -> None:
    """Register attn_implementation="dsf" with additive masks, without which sliding windows would be lost."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """query [b, h, t, n], key, value [b, g, s, ·], mask additive or bool [b|1, h|1, t, s] -> ([b, t, h, p], weights).

    Softmax as exponential features, whose state is the model's KV cache. Scores with a softcap are not inner products,
    so they are no exponential features; the model's own function computes them.
    """
    layer = LAYERS.get(module)
    if layer is None or options.get("softcap") is not None:
        own = sys.modules[type(module).__module__].eager_attention_forward
        return own(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    shown = layer.shared.mask(key.shape[2])
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    sink = options.get("s_aux", getattr(module, "sinks", None))
    biases = options.get("position_bias")
    seen, bias = _split_mask(bool(causal), query, key, attention_mask, biases, shown, sink is not None)
    seen = _apart(seen, layer.call.cu_seqlens, query)
    operands = Attention(query * scale, key, value, seen, bias, sink)
    layer.window = options.get("sliding_window") or layer.window
    layer.state, layer.key_heads = (query.shape[1], key.shape[-1], value.shape[-1]), key.shape[1]
    dropped = dropout if module.training else 0.0
    own = _declared_as(operands, options.get("sliding_window"))
    show(layer, own or softmax_attention, operands, bool(causal))
    # Some models (GPT-2) do not pass the caller's wish on, and none the configuration's.
    asked = options.get("output_attentions") or layer.shared.asks("output_attentions")
    if own is not None and not dropped and not asked:
        return _run(own, operands), None
    if sink is None and not dropped and not asked:
        return attend_fused(operands).transpose(1, 2).contiguous(), None
    weights = operands.matrix()
    y = F.dropout(weights, dropped).to(value.dtype) @ spread_heads(value, query.shape[1])
    return y.transpose(1, 2).contiguous(), weights


@functools.cache
def declared(window: int | None, sunk: bool) -> Recurrence:
    """Softmax attention of scaled queries over the last `window` tokens; with `sunk`, a sink s in its denominator."""

    def windowed(q: Key, k: Key, v: Value) -> System:
        return System(A=I, B=exp_features(k) * v, C=exp_features(q), normalize=dsf.ratio, window=window)

    def sinking(q: Key, k: Key, v: Value, s: Param[Scalar]) -> System:
        def rule(num: Any, den: Any, one: Any) -> Any:
            return num / (den + exp(s) * one)

        return System(A=I, B=exp_features(k) * v, C=exp_features(q), normalize=rule, window=window)

    name = "_".join(["windowed"] * (window is not None) + ["sinking"] * sunk)
    return dsf.recurrence(name=f"{name}_attention")(sinking if sunk else windowed)


def _declared_as(operands: Attention, window: int | None) -> Recurrence | None:
    """The declaration that computes these operands without a cache, or None for plain attention.

    Its mask may hide only tokens before a window: padding and packed sequences keep their masks.
    """
    if (window is None and operands.sink is None) or operands.bias is not None or not sees_all(operands, window):
        return None
    return declared(window, operands.sink is not None)


def _run(recurrence: Recurrence, operands: Attention) -> Tensor:
    """y [b, t, h, p] of a declaration on these operands."""
    q, k, v = (x.transpose(1, 2) for x in (operands.a, operands.k, operands.v.to(operands.a.dtype)))
    sink = [] if operands.sink is None else [operands.sink.to(torch.promote_types(q.dtype, torch.float32))]
    y: Tensor = recurrence(q, k.to(q.dtype), v, *sink)
    return y.contiguous()


def attend_fused(operands: Attention) -> Tensor:
    """y [b, h, t, p] of operands without a sink, by torch's attention."""
    if operands.bias is None:
        return fused(operands.a, operands.k, operands.v, operands.seen)
    heads, bias = operands.a.shape[1], operands.bias.to(operands.a.dtype)
    mask = bias if operands.seen is None else bias.masked_fill(~operands.seen, float("-inf"))
    k, v = spread_heads(operands.k, heads), spread_heads(operands.v, heads)
    return F.scaled_dot_product_attention(operands.a, k, v, attn_mask=mask, scale=1.0)


def show(layer: Layer, recurrence: Recurrence, operands: Attention, causal: bool = True) -> None:
    """Pass a run of attention to the recorders, without places of a static cache that no token has filled yet."""
    tokens, places = operands.a.shape[2], operands.k.shape[2]
    if layer.listeners and causal and operands.seen is not None and tokens < places:
        last = operands.seen[:, :, -1]  # the newest query sees itself; one of padding sees all
        filled = max(tokens, places - int(last.flip(-1).int().argmax(-1).max()))
        seen, bias = (None if x is None else x[..., :filled] for x in (operands.seen, operands.bias))
        operands = replace(operands, k=operands.k[:, :, :filled], v=operands.v[:, :, :filled], seen=seen, bias=bias)
    layer.show(Run(recurrence, {}, None, layer.call.runs, operands))


def sees(layer: Layer, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
    """What each query of a causal attention sees [b|1, h|1, t, s], None for all tokens until its own."""
    seen, _ = _split_mask(True, query, key, mask, None, layer.shared.mask(key.shape[2]))
    return _apart(seen, layer.call.cu_seqlens, query)


def sees_all(operands: Attention, window: int | None = None) -> bool:
    """Whether each query sees the last `window` tokens until its own, None for all, of keys that are all the call's."""
    tokens, places = operands.a.shape[2], operands.k.shape[2]
    if tokens != places:
        return False
    if operands.seen is None:
        return window is None or window >= tokens
    age = torch.arange(tokens, device=operands.a.device)
    age = age[:, None] - age
    band = (age >= 0) & (age < (tokens if window is None else window))
    return bool((operands.seen == band).all())


def _split_mask(
    causal: bool, query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor | None, shown: Tensor | None,
    sunk: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """(what each query sees, None for plain causal attention; what is added to its scores, None for nothing).

    A row that sees nothing (padding) sees everything, as softmax of equal scores does. With a sink (`sunk`), which then
    takes the whole row, it sees nothing: later layers may mix rows without a mask (DeepSeek-V4's compressed keys).
    """
    tokens, places = query.shape[2], key.shape[2]
    if mask is None:
        if not causal:
            return torch.ones(1, 1, tokens, places, dtype=torch.bool, device=query.device), bias
        plain = tokens == places
        triangle = torch.ones(1, 1, tokens, places, dtype=torch.bool, device=query.device).tril(places - tokens)
        return (None if plain else triangle), bias
    if (
        mask.shape[-1] < places
    ):  # MiniMax takes the cache's length from a layer without keys, so its mask lacks the cached tokens
        mask = _with_past(mask, places - mask.shape[-1], shown)
    mask = mask[..., :places]
    if mask.dtype == torch.bool:
        return mask if sunk else mask | ~mask.any(-1, keepdim=True), bias
    shows = mask > torch.finfo(mask.dtype).min / 2
    extra = mask.masked_fill(~shows, 0)  # also in rows of padding, whose other rows' biases count
    if bool((extra != 0).any()):
        bias = extra if bias is None else bias + extra
    return shows if sunk else shows | ~shows.any(-1, keepdim=True), bias


def _with_past(mask: Tensor, past: int, shown: Tensor | None) -> Tensor:
    """mask [b|1, h|1, t, s] with `past` columns in front, visible where `shown` [b, past + s] is True; all visible
    for None.
    """
    see, hide = (True, False) if mask.dtype == torch.bool else (0.0, torch.finfo(mask.dtype).min)
    front = mask.new_full((*mask.shape[:-1], past), see)
    if shown is not None:
        front = front.expand(shown.shape[0], -1, -1, -1).masked_fill(~shown[:, None, None, :past], hide)
        mask = mask.expand(shown.shape[0], -1, -1, -1)
    return torch.cat([front, mask], dim=-1)


def _apart(seen: Tensor | None, cu_seqlens: Tensor | None, query: Tensor) -> Tensor | None:
    """seen, with the other sequences of a packed call hidden; some models ignore the boundaries."""
    tokens = query.shape[2]
    if cu_seqlens is None or int(cu_seqlens[-1]) != tokens or (seen is not None and seen.shape[-1] != tokens):
        return seen
    index = torch.searchsorted(cu_seqlens[1:], torch.arange(tokens, device=query.device), right=True)
    same = (index[:, None] == index[None]).tril()[None, None]
    return same if seen is None else seen & same
