"""Softmax attention with ALiBi's biases (Bloom, MPT): the decay of a declaration, which the models add to scores."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsf.analysis.convert.layer import Layer
from dsf.analysis.convert.softmax import attend_fused, sees, sees_all, show
from dsf.mixers import alibi
from dsf.mixers.softmax_attention import alibi_slopes
from dsf.trajectory import Attention


def bloom(layer: Layer, module: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
    """BloomAttention: positions count the tokens that are no padding; the residual is added behind its last map."""
    given = layer.call.arguments
    x = given["hidden_states"]
    q, k, v = (
        part.transpose(1, 2) for part in module.query_key_value(x).unflatten(-1, (-1, 3, module.head_dim)).unbind(3)
    )
    if layer.call.cache is not None:
        k, v = layer.call.cache.update(k, v, module.layer_idx)
    seen = sees(layer, q, k, given.get("attention_mask"))
    shown = layer.shared.mask(k.shape[2])
    places = torch.arange(k.shape[2], device=x.device)[None] if shown is None else (shown.cumsum(-1) - 1) * shown
    dropout = module.attention_dropout.p if module.training else 0.0
    y, weights = _attend(layer, q * module.inv_norm_factor, k, v, seen, alibi_slopes(module.num_heads), places, dropout)
    slices = module.pretraining_tp > 1 and module.slow_but_exact  # which leaves the bias out
    y = F.linear(y, module.dense.weight) if slices else module.dense(y)
    return given["residual"] + F.dropout(y, module.hidden_dropout, module.training), weights


def mpt(layer: Layer, module: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
    """MptAttention: positions count the places of the cache; True in its mask hides a key."""
    given = layer.call.arguments
    x, bias, mask = given["hidden_states"], given["position_bias"], given.get("attention_mask")
    qkv = module.Wqkv(x)
    qkv = qkv.clamp(-module.clip_qkv, module.clip_qkv) if module.clip_qkv else qkv
    q, k, v = (part.transpose(1, 2) for part in qkv.unflatten(-1, (3, module.n_heads, -1)).unbind(2))
    if layer.call.cache is not None:
        k, v = layer.call.cache.update(k, v, module.layer_idx)
    seen = sees(layer, q, k, None if mask is None else ~mask)
    slopes = -bias[:, 0, -2:][:, 0]  # of the place before the last, which has 0
    places = torch.arange(k.shape[2], device=x.device)[None]
    dropout = module.attn_dropout_p if module.training else 0.0
    y, weights = _attend(layer, q * module.softmax_scale, k, v, seen, slopes, places, dropout)
    return module.out_proj(y), weights


def _attend(
    layer: Layer, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, slopes: Tensor, places: Tensor, dropout: float
) -> tuple[Tensor, Tensor | None]:
    """(y [b, t, h p], weights or None where nobody asks for them) of scaled queries q [b, h, t, n].

    slopes: [h]. places: [b|1, s], the position of every key, of which ALiBi takes differences.
    """
    tokens = q.shape[2]
    slopes = slopes.to(q.device, torch.promote_types(q.dtype, torch.float32))
    own = places[:, -tokens:]
    bias = slopes[:, None, None] * (places[:, None, None, :] - own[:, None, :, None])
    decay = slopes.neg().exp().expand(len(q), tokens, -1)
    operands = Attention(q, k, v, seen, bias, None, decay)
    layer.state, layer.key_heads = (q.shape[1], k.shape[-1], v.shape[-1]), k.shape[1]
    show(layer, alibi, operands)
    asked = layer.shared.asks("output_attentions")
    if sees_all(operands) and not dropout and not asked:
        q, k, v = (x.transpose(1, 2) for x in (q * q.shape[-1] ** 0.5, k, v))
        y: Tensor = alibi(q, k, v, slopes)
        return y.flatten(2), None
    if not dropout and not asked:
        return attend_fused(operands).transpose(1, 2).flatten(2), None
    weights = operands.matrix()
    y = F.dropout(weights, dropout).to(v.dtype) @ v
    return y.transpose(1, 2).flatten(2), weights.to(v.dtype)
