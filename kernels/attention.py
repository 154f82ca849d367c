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
    """How many tokens a row of a cache in fixed memory may have, known to the host without asking the device; one for
    all caches that came of one memory, whose steps it counts together."""

    __slots__ = ("most",)

    def __init__(self, most: int) -> None:
        self.most = most

    def __repr__(self) -> str:
        return f"Filled({self.most})"


class KVCache(NamedTuple):
    """The state of attention: keys and values of all tokens or, with a window, of the last W.

    k: [B, Hk, S, N], v: [B, Hv, S, P] in the inputs' dtype. lengths: [B] int64, tokens so far; a row uses its first
    min(lengths, S) places, the rest is padding (with a window S is at most W, and the places hold the last tokens).
    Smaller lengths take a row's last tokens back, but not with decays or in fixed memory, where biases depend on them.
    bias: with decays, [B, Hb, S] in the state's dtype, the logarithm of each token's decay since. angle: with turns,
    [B, Ha, N/2 or 1] in the state's dtype, the sum of all angles modulo whole turns; each k is stored turned by minus
    the sum of the angles up to its token.

    filled: None, or for a cache in fixed memory (`fixed`), which steps in place write to. Such a cache always has a
    bias, minus infinity where no token lies, without decays [B, 1, S] of zeros else. With a window S ends at W places;
    then token t lies at place t modulo W.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    bias: Tensor | None = None
    angle: Tensor | None = None
    filled: Filled | None = None

    def to(self, dtype: torch.dtype) -> KVCache:
        """The cache with another dtype."""
        # torch.compile of torch 2.8 fails at `_replace` and at `*self[2:]`
        return KVCache(self.k.to(dtype), self.v.to(dtype), self.lengths, self.bias, self.angle, self.filled)

    def numel(self) -> int:
        """How many numbers are stored."""
        return sum(x.numel() for x in (self.k, self.v, self.bias, self.angle) if x is not None)

    def map(self, change: Callable[[Tensor], Tensor]) -> KVCache:
        """`change` applied to every floating point tensor, in their order; lengths stay."""
        k, v, lengths, bias, angle, filled = self
        k, v = change(k), change(v)
        bias, angle = (None if x is None else change(x) for x in (bias, angle))
        return KVCache(k, v, lengths, bias, angle, filled)

    def rows(self, chosen: Tensor) -> KVCache:
        """Some rows, by their numbers."""
        k, v, _, bias, angle, filled = self.map(lambda x: x.index_select(0, chosen))
        return KVCache(k, v, self.lengths.index_select(0, chosen), bias, angle, filled)

    def in_use(self) -> Tensor:
        """Whether each place holds a token: bool [B, S]."""
        return torch.arange(self.k.shape[2], device=self.k.device) < self.lengths[:, None]

    def turned(self) -> Tensor:
        """k turned by the last token's angle: the keys in the declaration's state."""
        if self.angle is None:
            return self.k
        angle = spread_heads(self.angle, self.k.shape[1])[:, :, None, :, None]
        return turn_pairs(self.k.unsqueeze(-1), angle.to(self.k.dtype)).squeeze(-1)


torch.serialization.add_safe_globals([KVCache, Filled])  # which torch.load takes from files of any source


def padded(x: Tensor, places: int) -> Tensor:
    """A cache's k, v or bias padded to `places` places."""
    extra = places - x.shape[2]
    return F.pad(x, (0, 0, 0, extra) if x.dim() == 4 else (0, extra))


def joined(caches: Sequence[KVCache]) -> KVCache:
    """The rows of several caches, one after the other, padded to one length."""
    most = max(c.k.shape[2] for c in caches)

    def both(place: int) -> Tensor | None:
        parts = [c[:5][place] for c in caches]
        if any(x is None for x in parts):
            return None
        return torch.cat([x if place in (2, 4) else padded(x, most) for x in parts if x is not None])

    k, v, lengths = (torch.cat([]) if x is None else x for x in (both(0), both(1), both(2)))
    return KVCache(k, v, lengths, both(3), both(4))


def is_batched(lengths: Tensor) -> bool:
    """Whether torch.func.vmap hides a cache's lengths."""
    return torch._C._are_functorch_transforms_active() and torch._C._functorch.is_batchedtensor(lengths)


def extend(
    cache: KVCache | None, k: Tensor, v: Tensor, counts: Tensor, bias: Tensor | None = None,
    left: Tensor | None = None, angle: Tensor | None = None, window: int | None = None,
) -> KVCache:  # fmt: skip
    """The cache after `counts` [B] of the new keys k [B, Hk, T, N] and values v [B, Hv, T, P].

    bias: [B, Hb, T] of the new tokens; left: [B, Hb], what they add to the biases in the cache; angle: [B, Ha, ·] after
    them. window: W, the number of tokens that are kept, or None.
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
    """Memory behind a cache's k and v, with places to spare at the end.

    begin: where the cache's first place lies; even: whether every row is known to fill all its places; lengths: the
    cache's, which its places hold.
    """

    k: Tensor
    v: Tensor
    begin: int = 0
    even: bool = False
    lengths: Tensor | None = None

    def continues(self, cache: KVCache, new: int) -> bool:
        """Whether `new` tokens fit after this cache, and its memory may be written to in the present inference mode."""
        end = self.begin + cache.k.shape[2]
        v = self.v[:, :, self.begin : end]
        stale = self.k.is_inference() and not torch.is_inference_mode_enabled()
        fits = not stale and end + new <= self.k.shape[2] and v.data_ptr() == cache.v.data_ptr()
        return fits and self.counts(cache)

    def counts(self, cache: KVCache) -> bool:
        """Whether the cache's lengths are those of its memory, and nobody has written to them. With smaller ones, which
        take tokens back, new tokens would lie where caches that were kept hold theirs. In inference mode, whose tensors
        do not count writes, nobody is taken to write."""
        same = self.lengths is cache.lengths
        return same and (cache.lengths.is_inference() or cache.lengths._version == 0)


# By the keys of the latest cache in it, and of none before: who extends an older one gets memory of its own.
_ROOMS: MutableMapping[Tensor, _Room] = WeakTensorKeyDictionary()


def append(cache: KVCache, k: Tensor, v: Tensor, window: int | None = None) -> tuple[KVCache, Tensor, Tensor] | None:
    """`extend` for as many new tokens of every row, without gradients: (that cache, without bias and angle, and k and v
    of all S + T places that the new tokens may see, in their dtype, each row's new ones behind its own).

    Nothing is copied but the new tokens, and nothing waited for, while the cache is the latest in its memory and that
    has room; else it moves to memory of twice its size. A window's cache moves on by the new tokens in that memory, and
    W tokens later to another. A cache stays what it is when it is appended to. None where nothing is to be gained: for
    more new tokens than a window has, and where some rows have filled their window and others have not.
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
    """Whether `append` made this cache, from one whose lengths were checked, and nobody has written to its lengths.

    Does not wait for the device.
    """
    room = _ROOMS.get(cache.k)
    return room is not None and room.counts(cache)


def write_behind(whole: Tensor, fresh: Tensor, cache: KVCache) -> Tensor:
    """Write T new tokens of every row behind those that the cache holds. whole: [B, ·, S + T, ·], or without the last
    axis as biases are; fresh: the same of T places."""
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

    seen: which places each query reads; None: a's are the last T of S tokens.
    """
    scores = a @ k.transpose(-1, -2)
    if seen is None:
        seen = causal(a.shape[2], k.shape[2], a.device)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1)


def fused(a: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float = 1.0) -> Tensor:
    """The online softmax (torch's fused attention) of scale · a.

    a: [B, H, T, N], k, v with heads dividing H -> [B, H, T, P]. seen: as of `softmax_matrix`.
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
    """`causal` as torch's kernels on a GPU know it, without memory; graphs cannot hold it."""
    from torch.nn.attention.bias import causal_lower_right  # this import takes seconds

    return causal_lower_right(tokens, places)


def spread_heads(x: Tensor, heads: int) -> Tensor:
    """[B, G, ...] -> [B, H, ...], each group serving H / G consecutive heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
