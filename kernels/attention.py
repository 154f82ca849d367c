"""Exponential features, N = ∞: softmax attention. The state is the KV cache; the kernel trick never builds features.

y_i = Σ_{j ≤ i} exp(⟨a_i, k_j⟩) v_j / Σ_{j ≤ i} exp(⟨a_i, k_j⟩)  (Katharopoulos et al. 2020 eq. 3; DSF Lemma 1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class KVCache(NamedTuple):
    """The state of softmax attention: what has been written so far.

    k: [B, Hk, S, N], v: [B, Hv, S, P] in the inputs' dtype; lengths: [B] int64, tokens in use of each row (the rest is
    padding at the end).
    """

    k: Tensor
    v: Tensor
    lengths: Tensor

    def to(self, dtype: torch.dtype) -> KVCache:
        """The same keys and values in another type."""
        return KVCache(self.k.to(dtype), self.v.to(dtype), self.lengths)

    def numel(self) -> int:
        """Numbers stored."""
        return self.k.numel() + self.v.numel()


def extend(cache: KVCache | None, k: Tensor, v: Tensor, counts: Tensor) -> KVCache:
    """The cache after `counts` [B] of the new keys k [B, Hk, T, N] and values v [B, Hv, T, P]."""
    if cache is None:
        return KVCache(k, v, counts)
    total = cache.k.shape[2] + k.shape[2]
    places = torch.arange(total, device=k.device)
    new = places[None] - cache.lengths[:, None]  # position among the new tokens, negative inside the cache
    source = torch.where(new < 0, places[None], cache.k.shape[2] + new.clamp(min=0))
    source = source.clamp(max=total - 1)[:, None, :, None]

    def put(old: Tensor, fresh: Tensor) -> Tensor:
        both = torch.cat([old, fresh], dim=2)
        return both.gather(2, source.expand(-1, both.shape[1], -1, both.shape[3]))

    lengths = cache.lengths + counts
    keep = int(lengths.max())
    return KVCache(put(cache.k, k)[:, :, :keep], put(cache.v, v)[:, :, :keep], lengths)


def visible(cache: KVCache | None, tokens: int, device: torch.device) -> Tensor | None:
    """Which places of the extended cache each new token sees: bool [B, 1, T, S]; None for plain causal attention."""
    if cache is None:
        return None
    places = torch.arange(cache.k.shape[2] + tokens, device=device)
    last = cache.lengths[:, None] + torch.arange(tokens, device=device)[None]
    return (places[None, None] <= last[..., None])[:, None]


def softmax_matrix(a: Tensor, k: Tensor, seen: Tensor | None) -> Tensor:
    """Phi [B, H, T, S] by definition: exponentials over their sum. a: [B, H, T, N], k: [B, H, S, N]."""
    scores = a @ k.transpose(-1, -2)
    if seen is None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=a.device).tril()
    return scores.masked_fill(~seen, float("-inf")).softmax(-1)


def fused(a: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float = 1.0) -> Tensor:
    """The online softmax (torch's fused attention) of scale · a.

    a: [B, H, T, N], k, v with heads dividing H -> [B, H, T, P].
    """
    grouped = a.shape[1] != k.shape[1] or a.shape[1] != v.shape[1]
    if k.shape[1] != v.shape[1]:
        k, v = spread_heads(k, a.shape[1]), spread_heads(v, a.shape[1])
        grouped = False
    return F.scaled_dot_product_attention(
        a, k, v, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=grouped
    )


def spread_heads(x: Tensor, heads: int) -> Tensor:
    """[B, G, ...] -> [B, H, ...], each group serving H / G consecutive heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def stepwise(a: Tensor, k: Tensor, v: Tensor, cache: KVCache | None) -> Tensor:
    """The recurrent form: token after token against the cache. a: [B, H, T, N] -> y [B, H, T, P]."""
    heads, outputs = a.shape[1], []
    one = torch.ones(a.shape[0], dtype=torch.int64, device=a.device)
    for a_t, k_t, v_t in zip(a.split(1, 2), k.split(1, 2), v.split(1, 2), strict=True):
        seen = visible(cache, 1, a.device)
        cache = extend(cache, k_t, v_t, one)
        keys, values = spread_heads(cache.k, heads), spread_heads(cache.v, heads)
        seen = None if seen is None else seen[..., : keys.shape[2]]
        phi = softmax_matrix(
            a_t, keys, torch.ones_like(keys[:, :1, None, :, 0], dtype=torch.bool) if seen is None else seen
        )
        outputs.append(phi @ values)
    return torch.cat(outputs, dim=2)
