"""Softmax attention, exponential features of N = ∞: its KV cache, and torch's fused attention.

y_i = Σ_{j ≤ i} exp(⟨a_i, k_j⟩) v_j / Σ_{j ≤ i} exp(⟨a_i, k_j⟩)  (Katharopoulos et al. 2020 eq. 3; DSF Lemma 1).
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

from dsf.kernels import last_tokens
from dsf.kernels.turns import turn_pairs

MASK = 1 << 31  # most entries of a mask in one call of torch's attention, whose kernels count them in 32 bits
LEAST_ROOM = 64  # places of a cache that tokens are appended to, and by which those of fixed memory are counted


class Filled:
    """The most tokens that any row of a cache in fixed memory may have, which the host knows without asking the device.

    All caches in the same memory share one Filled, which counts the steps of all of them.
    """

    __slots__ = ("most",)

    def __init__(self, most: int) -> None:
        self.most = most

    def __repr__(self) -> str:
        return f"Filled({self.most})"


class KVCache(NamedTuple):
    """The state of attention: the keys and values of all tokens or, with a window, of the last W.

    k: [B, Hk, S, N], the keys, in S places, in the inputs' dtype.
    v: [B, Hv, S, P], the values, in the inputs' dtype.
    lengths: int64 [B], the number of each row's tokens so far. A row uses its first min(lengths, S) places; the others
      are padding. With a window S is at most W, and the places hold the last tokens. A smaller length takes back a
      row's last tokens. It must not be set with decays or turns, in fixed memory, or where a row has more than W
      tokens: other tensors depend on the tokens taken back, so that outputs would be wrong without an error.
    bias: with decays [B, Hb, S] in the state's dtype, the logarithm of the product of all decays since each token.
    angle: with turns [B, Ha, N/2 or 1] in the state's dtype, the sum of all tokens' angles, in radians, modulo whole
      turns. Each key is stored turned by minus the sum of the angles up to its token.
    filled: None, or a count of tokens for a cache in fixed memory, which steps in place write to. Such a cache always
      has a bias, which is minus infinity at places without a token; without decays it is [B, 1, S] in the inputs' dtype
      and 0 at all other places. With a window, token t then lies at place t modulo S once S is W.

    The state's dtype is float32, or float64 for float64 inputs.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    bias: Tensor | None = None
    angle: Tensor | None = None
    filled: Filled | None = None

    def to(self, dtype: torch.dtype) -> KVCache:
        """The cache with k and v in another dtype; bias and angle keep the state's."""
        # torch.compile of torch 2.8 fails at `_replace` and at `*self[2:]`
        return KVCache(self.k.to(dtype), self.v.to(dtype), self.lengths, self.bias, self.angle, self.filled)

    def numel(self) -> int:
        """The number of numbers in k, v, bias and angle, padding included."""
        return sum(x.numel() for x in (self.k, self.v, self.bias, self.angle) if x is not None)

    def map(self, change: Callable[[Tensor], Tensor]) -> KVCache:
        """The cache with `change` applied to k, v, bias and angle, in this order; lengths stay."""
        k, v, lengths, bias, angle, filled = self
        k, v = change(k), change(v)
        bias, angle = (None if x is None else change(x) for x in (bias, angle))
        return KVCache(k, v, lengths, bias, angle, filled)

    def rows(self, chosen: Tensor) -> KVCache:
        """The cache of some rows. chosen: their numbers, int64 [rows]."""
        k, v, _, bias, angle, filled = self.map(lambda x: x.index_select(0, chosen))
        return KVCache(k, v, self.lengths.index_select(0, chosen), bias, angle, filled)

    def in_use(self) -> Tensor:
        """Whether each place holds a token: bool [B, S]."""
        return torch.arange(self.k.shape[2], device=self.k.device) < self.lengths[:, None]

    def turned(self) -> Tensor:
        """k [B, Hk, S, N] turned by `angle`, which gives the keys of the declaration's state after the last token."""
        if self.angle is None:
            return self.k
        angle = spread_heads(self.angle, self.k.shape[1])[:, :, None, :, None]
        return turn_pairs(self.k.unsqueeze(-1), angle.to(self.k.dtype)).squeeze(-1)


torch.serialization.add_safe_globals([KVCache, Filled])  # which torch.load takes from files of any source


def padded(x: Tensor, places: int) -> Tensor:
    """A cache's k, v or bias, padded with zeros to `places` places."""
    extra = places - x.shape[2]
    return F.pad(x, (0, 0, 0, extra) if x.dim() == 4 else (0, extra))


def joined(caches: Sequence[KVCache]) -> KVCache:
    """The rows of several caches, one after the other, with as many places as the largest has."""
    most = max(c.k.shape[2] for c in caches)

    def both(place: int) -> Tensor | None:
        parts = [c[:5][place] for c in caches]
        if any(x is None for x in parts):
            return None
        return torch.cat([x if place in (2, 4) else padded(x, most) for x in parts if x is not None])

    k, v, lengths = (torch.cat([]) if x is None else x for x in (both(0), both(1), both(2)))
    return KVCache(k, v, lengths, both(3), both(4))


def is_batched(lengths: Tensor) -> bool:
    """Whether torch.func.vmap maps over a cache's lengths, so that the host cannot read them."""
    return torch._C._are_functorch_transforms_active() and torch._C._functorch.is_batchedtensor(lengths)


def extend(
    cache: KVCache | None, k: Tensor, v: Tensor, counts: Tensor, bias: Tensor | None = None,
    left: Tensor | None = None, angle: Tensor | None = None, window: int | None = None,
) -> KVCache:  # fmt: skip
    """The cache after T new tokens, of which row b has the first counts[b]. k: [B, Hk, T, N], v: [B, Hv, T, P].

    bias: [B, Hb, T], the biases of the new tokens. left: [B, Hb], what the new tokens add to the biases in the cache.
    angle: [B, Ha, ·], the cache's angle after the new tokens. window: W, the number of tokens that are kept; None: all.
    """
    before = 0 if cache is None else cache.k.shape[2]
    if cache is None and (window is None or k.shape[2] <= window):
        return KVCache(k, v, counts, bias, angle)
    old = cache or KVCache(k[:, :, :0], v[:, :, :0], torch.zeros_like(counts), None if bias is None else bias[:, :, :0])
    total = before + k.shape[2]
    held = old.lengths if window is None else old.lengths.clamp(max=window)
    known = window is None and not is_batched(held)
    keep = int((held + counts).max()) if known else min(total, window or total)
    place = torch.arange(keep, device=k.device) + (held + counts - keep).clamp(min=0)[:, None]
    new = place - held[:, None]  # position among the new tokens, negative inside the cache
    source = torch.where(new < 0, place, before + new.clamp(min=0)).clamp(max=total - 1)

    def put(old: Tensor, fresh: Tensor) -> Tensor:
        both = torch.cat([old, fresh], dim=2)
        index = source[:, None].expand(-1, both.shape[1], -1)
        return both.gather(2, index if both.dim() == 3 else index.unsqueeze(-1).expand(*index.shape, both.shape[3]))

    lengths = old.lengths + counts
    if bias is not None and old.bias is not None:
        bias = put(old.bias if left is None else old.bias + left.unsqueeze(-1), bias)
    return KVCache(put(old.k, k), put(old.v, v), lengths, bias, angle)


class _Room(NamedTuple):
    """The memory that a cache's k and v are parts of, with free places behind them.

    begin: the place in this memory of the cache's first token. even: whether all places of every row are known to hold
    tokens. lengths: those of the cache that was written here last.
    """

    k: Tensor
    v: Tensor
    begin: int = 0
    even: bool = False
    lengths: Tensor | None = None

    def continues(self, cache: KVCache, new: int) -> bool:
        """Whether `new` tokens fit behind this cache, and torch lets its memory be written to (inference mode)."""
        end = self.begin + cache.k.shape[2]
        v = self.v[:, :, self.begin : end]
        stale = self.k.is_inference() and not torch.is_inference_mode_enabled()
        fits = not stale and end + new <= self.k.shape[2] and v.data_ptr() == cache.v.data_ptr()
        return fits and self.counts(cache)

    def counts(self, cache: KVCache) -> bool:
        """Whether the cache's lengths are those of its memory, and nobody has written to them. After smaller lengths,
        which take tokens back, new tokens would overwrite those of caches that were kept. Tensors made in inference
        mode do not count writes; for them no write is assumed."""
        same = self.lengths is cache.lengths
        return same and (cache.lengths.is_inference() or cache.lengths._version == 0)


# The room of a cache, by its k. Only the latest cache of a room is here: an older one that is extended gets another.
_ROOMS: MutableMapping[Tensor, _Room] = WeakTensorKeyDictionary()


def append(cache: KVCache, k: Tensor, v: Tensor, window: int | None = None) -> tuple[KVCache, Tensor, Tensor] | None:
    """`extend` where every row gets all T new tokens and nothing needs a gradient.

    Returns (the new cache without bias and angle, k, v): k and v are those of all S + T places that the new tokens may
    read, in the new tokens' dtype, each row's new tokens behind its own. Only the new tokens are copied, and nothing
    waits for the device, while the cache is the latest in its memory and that has room. Else it moves to memory of
    twice its size. With a window the cache moves on in this memory by T places, and about every W tokens to another.
    The old cache does not change. Returns None where `extend` is as fast: for more new tokens than the window has, and
    where some rows have filled the window and others have not.
    """
    held, new = cache.k.shape[2], k.shape[2]
    room, total = _ROOMS.pop(cache.k, None), held + new  # taken in one step: of two threads, one has it
    even = room is not None and room.even and room.counts(cache)
    if window is not None and total > window and not even:
        even = new <= window and bool((cache.lengths >= held).all())
        if not even:
            return None
    if room is None or not room.continues(cache, new):
        places = max(LEAST_ROOM, 2 * total)
        room_k, room_v = (x.new_zeros(*x.shape[:2], places, x.shape[3]) for x in (cache.k, cache.v))
        room = _Room(room_k, room_v)
        room.k[:, :, :held], room.v[:, :, :held] = cache.k, cache.v
    found = [x[:, :, room.begin : room.begin + total] for x in room[:2]]
    for whole, fresh in zip(found, (k, v), strict=True):
        write_behind(whole, fresh.to(whole.dtype), cache)
    gone = 0 if window is None else max(total - window, 0)
    after = KVCache(found[0][:, :, gone:], found[1][:, :, gone:], cache.lengths + new)
    _ROOMS[after.k] = room._replace(begin=room.begin + gone, even=even, lengths=after.lengths)
    if k.dtype != cache.k.dtype:  # the new tokens see themselves as they came
        found = [write_behind(x.to(y.dtype), y, cache) for x, y in zip(found, (k, v), strict=True)]
    return after, found[0], found[1]


def is_appended(cache: KVCache) -> bool:
    """Whether `append` made this cache and nobody has written to its lengths, so that they need no check.

    Does not wait for the device.
    """
    room = _ROOMS.get(cache.k)
    return room is not None and room.counts(cache)


def write_behind(whole: Tensor, fresh: Tensor, cache: KVCache) -> Tensor:
    """Write T new tokens of every row behind those that the cache holds. whole: [B, ·, S + T, ·], or of biases
    [B, ·, S + T]; fresh: the same with T places."""
    place = cache.lengths.clamp(max=cache.k.shape[2])[:, None]
    if fresh.shape[2] > 1:
        place = place + torch.arange(fresh.shape[2], device=fresh.device)
    place = place[:, None] if fresh.dim() == 3 else place[:, None, :, None]
    return whole.scatter_(2, place.expand(fresh.shape), fresh)


def visible(cache: KVCache | None, tokens: int, device: torch.device) -> Tensor | None:
    """Which places of the extended cache each new token sees: bool [B, 1, T, S]; None for plain causal attention."""
    if cache is None:
        return None
    places = torch.arange(cache.k.shape[2] + tokens, device=device)
    last = cache.lengths[:, None]
    if tokens > 1:
        last = last + torch.arange(tokens, device=device)
    return (places[None, None] <= last[..., None])[:, None]


def causal(tokens: int, places: int, device: torch.device) -> Tensor:
    """Which of `places` tokens each of the last `tokens` of them sees: bool [T, S]."""
    return torch.ones(tokens, places, dtype=torch.bool, device=device).tril(places - tokens)


def softmax_matrix(a: Tensor, k: Tensor, seen: Tensor | None) -> Tensor:
    """Phi [B, H, T, S] by definition: exponentials over their sum. a: [B, H, T, N], k: [B, H, S, N].

    seen: bool, which places each query reads; None: the queries are those of the last T of S tokens.
    """
    scores = a @ k.transpose(-1, -2)
    if seen is None:
        seen = causal(a.shape[2], k.shape[2], a.device)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1)


def fused(a: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float = 1.0) -> Tensor:
    """Softmax attention of the queries scale · a, by torch's fused attention: [B, H, T, P].

    a: [B, H, T, N]. k: [B, Hk, S, N], v: [B, Hv, S, P]; Hk and Hv divide H. seen: as of `softmax_matrix`.
    """
    if forward_ad._current_level >= 0:  # torch's has no forward-mode derivative
        k, v = (spread_heads(x, a.shape[1]) for x in (k, v))
        return softmax_matrix(scale * a, k, seen) @ v
    tokens, places = a.shape[2], k.shape[2]
    stored = seen is not None
    if seen is None and tokens != places:
        if last_tokens.fits(a, k, v):
            return last_tokens.attend(a, spread_heads(k, a.shape[1]), spread_heads(v, a.shape[1]), scale)
        stored = not (a.is_cuda and type(a) is Tensor)
        seen = causal(tokens, places, a.device) if stored else _unstored(tokens, places)
    if seen is not None and stored and tokens * places > MASK:
        rows = max(1, MASK // places)
        parts = zip(a.split(rows, dim=2), seen.split(rows, dim=-2), strict=True)
        return torch.cat([fused(part, k, v, mask, scale) for part, mask in parts], dim=2)
    grouped = a.shape[1] != k.shape[1] or a.shape[1] != v.shape[1]
    if k.shape[1] != v.shape[1] or (grouped and seen is not None and not stored and a.dtype.itemsize > 2):
        k, v = spread_heads(k, a.shape[1]), spread_heads(v, a.shape[1])
        grouped = False
    return F.scaled_dot_product_attention(
        a, k, v, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=grouped
    )


def _unstored(tokens: int, places: int) -> Tensor:
    """`causal` as an object that torch's GPU kernels know, without memory. A graph of torch.compile cannot hold it."""
    from torch.nn.attention.bias import causal_lower_right  # this import takes seconds

    return causal_lower_right(tokens, places)


def spread_heads(x: Tensor, heads: int) -> Tensor:
    """[B, G, ...] -> [B, H, ...]: each of G heads repeated for H / G consecutive heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
