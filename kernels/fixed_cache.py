"""Attention's keys and values in memory of fixed size, which a decode step writes to at a place that the device knows.

Nothing moves and no size changes from step to step, so a CUDA graph captures them. A step adds to the biases, writes
its token's key, value and bias, and reads all places: those without a token have a bias of minus infinity.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsf.kernels.attention import LEAST_ROOM, Filled, KVCache, spread_heads
from dsf.kernels.convolution import KINDS, TRITON
from dsf.kernels.operators import listed
from dsf.kernels.scores import Read, grouped_product

WIDEST = 256  # most numbers of a key or value in the kernels


def places_for(tokens: int, window: int | None) -> int:
    """Places of a memory for this many tokens, in whole pieces of LEAST_ROOM, at most a window's."""
    places = -(-max(tokens, 1) // LEAST_ROOM) * LEAST_ROOM
    return places if window is None else min(places, window)


def has_room(cache: KVCache, window: int | None, tokens: int = 1) -> bool:
    """Whether so many tokens more can be written into this cache's memory, in the present inference mode."""
    if cache.filled is None or (cache.k.is_inference() and not torch.is_inference_mode_enabled()):
        return False
    places = cache.k.shape[2]
    return places == window or cache.filled.most + tokens <= places


def fixed(cache: KVCache, places: int, window: int | None) -> KVCache:
    """A copy of the cache in memory of `places`, at least as many as it has now; with a window at most that many."""
    k, v, lengths, bias, angle, filled = cache
    if filled is None:
        used = cache.in_use()[:, None]
        blank = k.new_zeros(()) if bias is None else bias
        bias = blank.masked_fill(~used, -float("inf"))
        k, v = (x.masked_fill(~used.unsqueeze(-1), 0.0) for x in (k, v))  # a weight of 0 would keep a NaN there
        if k.shape[2] == window:
            k, v, bias = (_rolled(x, lengths, -1) for x in (k, v, bias))
    assert bias is not None
    return KVCache(
        _moved(k, places), _moved(v, places), lengths.clone(), _moved(bias, places, -float("inf")),
        None if angle is None else angle.clone(), Filled(k.shape[2] if filled is None else filled.most),
    )  # fmt: skip


def _moved(x: Tensor, places: int, blank: float = 0.0) -> Tensor:
    whole = x.new_full((*x.shape[:2], places, *x.shape[3:]), blank)
    whole[:, :, : x.shape[2]] = x
    return whole


def _rolled(x: Tensor, lengths: Tensor, sign: int) -> Tensor:
    """Rows of a full window [B, ·, W, ...] from the order of tokens to places (sign -1), or back (+1)."""
    places = x.shape[2]
    shift = torch.where(lengths > places, lengths % places, 0)
    index = (torch.arange(places, device=x.device) + sign * shift[:, None]) % places
    index = index[:, None] if x.dim() == 3 else index[:, None, :, None]
    return x.gather(2, index.expand(x.shape))


def in_order(cache: KVCache, decays: bool) -> KVCache:
    """A cache in fixed memory as calls take it: tokens in their order, no places to spare, a bias only with decays.

    Reads the lengths on the host. Its tensors may be parts of that memory.
    """
    k, v, lengths, bias, angle, _ = cache
    places, most = k.shape[2], max(listed(lengths), default=0)
    assert bias is not None
    if most > places:
        k, v, bias = (_rolled(x, lengths, 1) for x in (k, v, bias))
    k, v, bias = (x[:, :, :most] for x in (k, v, bias))
    bias = bias.masked_fill(~cache._replace(k=k).in_use()[:, None], 0.0) if decays else None
    return KVCache(k, v, lengths, bias, angle)


def write(
    cache: KVCache, k: Tensor, v: Tensor, log: Tensor | None, gain: Tensor | None, window: int | None, places: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Write one token more of every row, and count it: (k, v, bias) of the first `places` places.

    k: [B, Hk, 1, N], v: [B, Hv, 1, P]. log, gain: [B, Hb, 1] or None, the logarithms of the token's decay and of the
    factor of what it writes. The device checks that the token lies in these places, and raises an error if not.
    """
    assert cache.bias is not None and cache.filled is not None
    whole = cache.k.shape[2]
    place = cache.lengths % whole if whole == window else cache.lengths
    if log is not None:
        cache.bias.add_(log)
    found = cache.k[:, :, :places], cache.v[:, :, :places], cache.bias[:, :, :places]
    for x, fresh in zip(found, (k, v, gain), strict=True):
        index = place.view(-1, *[1] * (x.dim() - 1)).expand(*x.shape[:2], 1, *x.shape[3:])
        if fresh is None:
            x.scatter_(2, index, 0.0)
        else:
            x.scatter_(2, index, fresh.to(x.dtype).expand(index.shape))
    cache.lengths.add_(1)
    cache.filled.most += 1
    return found


def step(
    cache: KVCache, a: Tensor, k: Tensor, v: Tensor, log: Tensor | None, gain: Tensor | None, scale: float,
    window: int | None, places: int,
) -> Tensor:  # fmt: skip
    """`write` of a token, and `attend` of its queries a [B, H, 1, N]; on a GPU two launches of one operator, which read
    no more places than there are tokens."""
    if not on_kernels(cache, a, k, v):
        k, v, bias = write(cache, k, v, log, gain, window, places)
        a, k, v = (x.to(bias.dtype) for x in (a, k, v))
        return attend(a, k, v, bias, scale)
    from dsf.kernels.triton.attention.step import attention_step

    assert cache.filled is not None and cache.bias is not None
    (batch, heads, _), groups = cache.bias.shape, cache.k.shape[1]
    if log is not None and heads == 1 < groups:  # which one program would write and others read
        cache.bias.add_(log)
        log = None
    log, gain = (None if x is None else x.expand(batch, heads, 1) for x in (log, gain))
    kept = cache.k, cache.v, cache.bias, cache.lengths
    y: Tensor = attention_step(a, k, v, log, gain, *kept, scale, cache.k.shape[2] == window)
    cache.filled.most += 1
    return y


def on_kernels(cache: KVCache, a: Tensor, *given: Tensor) -> bool:
    """Whether the kernels take these queries, key and value."""
    assert cache.bias is not None
    if not (cache.k.is_cuda and TRITON) or torch.compiler.is_compiling() or not cache.k.numel():
        return False
    kinds = {x.dtype for x in (cache.k, cache.v, a, *given)}
    shaped = cache.k.shape[1] == cache.v.shape[1] and max(cache.k.shape[3], cache.v.shape[3]) <= WIDEST
    whole = all(x.is_contiguous() for x in (cache.k, cache.v, cache.bias, cache.lengths))
    biased = cache.bias.shape[1] in (1, cache.k.shape[1], a.shape[1])
    return shaped and whole and biased and len(kinds) == 1 and kinds <= set(KINDS)


def attend(a: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
    """Softmax of scale · ⟨a, k⟩ + bias over all places, times v, by torch's fused attention: [B, H, 1, P].

    a: [B, H, 1, N]; k, v, bias: [B, ·, S, ...] with heads dividing H. The queries that share a key are rows of one
    matrix, so that keys are not copied for them.
    """
    batch, heads = a.shape[:2]
    if k.shape[1] != v.shape[1]:
        k, v = spread_heads(k, heads), spread_heads(v, heads)
    groups = k.shape[1]
    if bias.shape[1] not in (1, groups):
        bias = spread_heads(bias, heads)
    bias = bias.unflatten(1, (bias.shape[1], 1)) if bias.shape[1] in (1, groups) else bias.unflatten(1, (groups, -1))
    rows = a.reshape(batch, groups, heads // groups, a.shape[3])
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=bias, scale=scale).reshape(batch, heads, 1, v.shape[3])


def read(a: Tensor, k: Tensor, v: Tensor, bias: Tensor, exponential: bool, floor: float) -> Read:
    """What `dsf.kernels.scores` computes of one query a head that sees all places with a finite bias."""
    scores, bias = grouped_product(a, k.transpose(-1, -2)), spread_heads(bias, a.shape[1]).unsqueeze(-2)
    if exponential:
        scores = scores + bias
        m = scores.amax(-1).clamp(min=floor)
        w = (scores - m.unsqueeze(-1)).exp()
    else:
        m = bias.amax(-1).clamp(min=floor).expand(scores.shape[:-1])
        w = scores * (bias - m.unsqueeze(-1)).exp()
    return Read(grouped_product(w, v), w.sum(-1), m)
