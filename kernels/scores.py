"""Attention with biases, turns, windows and any quotient: outputs by scores of queries and the keys that they see.

w_ij = exp(⟨a_i, k_j⟩ + late_i + early_j), or, without exponential features, ⟨a_i, k_j⟩ e^(late_i + early_j);
num_i = Σ_j w_ij v_j and total_i = Σ_j w_ij over the keys j ≤ i of the last W tokens. The weights of a row are divided
by e^(m_i), m_i the largest exponent (arXiv 1805.02867). m is only a scale and has no gradient, so functions of num,
total and e^(-m) must not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsf.kernels.attention import KVCache, spread_heads
from dsf.kernels.operators import refuse_second_order
from dsf.kernels.turns import turn_pairs

NUMBERS = 1 << 20  # scores that a block of queries may have (4 MiB): caches hold them, and blocks stay large
FLOOR = -60.0  # least m where a rule uses e^{-m}, so that float32 can hold e^{-m} e^{sink} with e^{sink} up to 10^12
AWAY = 1 << 60  # position of an unused place: later than any token


class Read(NamedTuple):
    """num [B, H, T, P], total [B, H, T] and m [B, H, T]."""

    num: Tensor
    total: Tensor
    m: Tensor


@dataclass(frozen=True)
class Scores:
    """One call's operands.

    a: [B, H, T, N], k: [B, Hk, S, N], v: [B, Hv, S, P], with the cache's places before the new tokens. place: [B or 1,
    S] int64, positions of keys relative to the first query. late: [B, Hb, T], early: [B, Hb, S] in float64 (their sums
    cancel), or None. exponential: whether weights are exponentials of scores. floor: least m. at: [T] int64, positions
    of the queries (of a rank's tokens), for which all S places are visited; None for 0 … T - 1.
    """

    a: Tensor
    k: Tensor
    v: Tensor
    place: Tensor
    late: Tensor | None = None
    early: Tensor | None = None
    window: int | None = None
    exponential: bool = True
    floor: float = -float("inf")
    at: Tensor | None = None

    @property
    def before(self) -> int:
        """Places of the cache."""
        return self.k.shape[2] - self.a.shape[2]

    def seen(self, begin: int, end: int, keys: slice) -> Tensor:
        """Which keys each query of begin … end sees: bool [B or 1, 1, ·, ·]."""
        at = torch.arange(begin, end, device=self.place.device) if self.at is None else self.at[begin:end]
        age = at[:, None] - self.place[:, None, keys]
        found = age >= 0
        return (found if self.window is None else found & (age < self.window)).unsqueeze(1)

    def bias(self, begin: int, end: int, keys: slice) -> Tensor | None:
        """late + early of these queries and keys, [B, H, ·, ·]: added in float64, which keeps near tokens apart."""
        if self.late is None or self.early is None:
            return None
        total = self.late[:, :, begin:end].unsqueeze(-1) + self.early[:, :, keys].unsqueeze(-2)
        return spread_heads(total.to(self.a.dtype), self.a.shape[1])

    def span(self, begin: int, end: int) -> slice:
        """Places that may be seen by queries begin … end."""
        if self.at is not None:
            return slice(0, self.k.shape[2])
        if self.window is None or begin + 1 < self.window:
            return slice(0, self.before + end)
        return slice(self.before + max(begin - self.window + 1, 0), self.before + end)

    def block(self) -> int:
        """The number of queries of a block."""
        batch, heads, tokens, _ = self.a.shape
        keys = self.k.shape[2] if self.window is None or self.at is not None else min(self.k.shape[2], 2 * self.window)
        most = max(16, NUMBERS // (batch * heads * keys))
        return min(tokens, most, 128 if self.window is None else max(32, min(256, self.window)))


def place_of(cache: KVCache | None, tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Positions of the cache's places and of the new tokens, [B or 1, S]."""
    new = torch.arange(tokens, device=device)[None]
    if cache is None:
        return new
    held = cache.lengths if window is None else cache.lengths.clamp(max=window)
    index = torch.arange(cache.k.shape[2], device=device)[None]
    old = torch.where(index < held[:, None], index - held[:, None], AWAY)
    return torch.cat([old, new.expand(old.shape[0], -1)], dim=1)


def place_behind(cache: KVCache, tokens: int) -> Tensor:
    """`place_of` where each row's new tokens follow its last used place, not the cache's last place: [B, S]."""
    held = cache.lengths.clamp(max=cache.k.shape[2])[:, None]
    index = torch.arange(cache.k.shape[2] + tokens, device=held.device)
    return torch.where(index < held + tokens, index - held, AWAY)


def _weights(
    x: Scores, begin: int, end: int, keys: slice, m: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """w [B, H, ·, ·] of queries begin … end in scale e^{-m}, its derivative by the scores if that differs from w, and m
    [B, H, ·]."""
    scores = grouped_product(x.a[:, :, begin:end], x.k[:, :, keys].transpose(-1, -2))
    bias, seen = x.bias(begin, end, keys), x.seen(begin, end, keys)
    if x.exponential:
        scores = (scores if bias is None else scores + bias).masked_fill(~seen, -float("inf"))
        if m is None:
            m = scores.detach().amax(-1).clamp(min=x.floor)
        return (scores - m.unsqueeze(-1)).exp(), None, m
    if bias is None:
        m = scores.new_zeros(()).expand(scores.shape[:-1])
        return scores.masked_fill(~seen, 0.0), seen.to(scores.dtype), m
    bias = bias.masked_fill(~seen, -float("inf"))
    if m is None:
        m = bias.detach().amax(-1).clamp(min=x.floor).expand(scores.shape[:-1])
    gain = (bias - m.unsqueeze(-1)).exp()
    return scores * gain, gain, m


def grouped_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, [B, H, T, ·] by [B, G, ·, ·], each of G serving H / G consecutive heads: b is not copied for them."""
    heads, groups = a.shape[1], b.shape[1]
    if heads == groups:
        return a @ b
    rows = a.reshape(a.shape[0], groups, heads // groups * a.shape[2], a.shape[3])
    return (rows @ b).reshape(*a.shape[:3], b.shape[3])


def dense(x: Scores) -> Read:
    """The kernel form: one matrix of weights."""
    tokens = x.a.shape[2]
    w, _, m = _weights(x, 0, tokens, slice(0, x.k.shape[2]))
    return Read(grouped_product(w, x.v), w.sum(-1), m)


def stepwise(x: Scores) -> Read:
    """The recurrent form: one token after the other with the places that it sees."""
    return _in_blocks(x, 1)


def _in_blocks(x: Scores, size: int) -> Read:
    """Blocks of this many queries, one after the other, each with the places that it sees."""
    found, tokens = [], x.a.shape[2]
    for begin in begins(tokens, size):
        end = min(begin + size, tokens)
        keys = x.span(begin, end)
        w, _, m = _weights(x, begin, end, keys)
        found.append((grouped_product(w, x.v[:, :, keys]), w.sum(-1), m))
    return Read(*(torch.cat(parts, dim=2) for parts in zip(*found, strict=True)))


def begins(tokens: int, size: int) -> list[int]:
    """The first query of every block. A graph of torch.compile has their number as a constant, not the tokens, as
    `range` over them would have."""
    return [size * i for i in range(int(-(-tokens // size)))]


def blocks(x: Scores) -> Read:
    """The chunk form: blocks of queries against the keys that they see, weights computed again in the backward pass."""
    return Read(*_Blocks.apply(x, x.a, x.k, x.v, x.late, x.early))


class _Blocks(torch.autograd.Function):
    """num, total, m, with memory for the weights of one block at a time."""

    @staticmethod
    def forward(ctx: Any, x: Scores, *_: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        num, total, m = _in_blocks(x, x.block())
        ctx.options = (x.window, x.exponential, x.floor)
        ctx.save_for_backward(x.a, x.k, x.v, x.place, x.late, x.early, m, x.at)
        ctx.mark_non_differentiable(m)
        return num, total, m

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        a, k, v, place, late, early, m, at = ctx.saved_tensors
        window, exponential, floor = ctx.options
        x = Scores(a, k, v, place, late, early, window, exponential, floor, at)
        dnum, dtotal = grads[:2]
        da, dk, dv = (torch.zeros_like(y) for y in (a, k, v))
        dlate, dearly = (None if y is None else torch.zeros_like(y) for y in (late, early))
        heads, size = a.shape[1], x.block()
        for begin in begins(a.shape[2], size):
            end = min(begin + size, a.shape[2])
            rows, keys = slice(begin, end), x.span(begin, end)
            w, gain, _ = _weights(x, begin, end, keys, m[:, :, rows])
            up = dnum[:, :, rows]
            dw = up @ spread_heads(v[:, :, keys], heads).transpose(-1, -2) + dtotal[:, :, rows].unsqueeze(-1)
            dv[:, :, keys] += _gather_heads(w.transpose(-1, -2) @ up, v.shape[1])
            dbias = w * dw
            ds = dbias if gain is None else gain * dw
            da[:, :, rows] = ds @ spread_heads(k[:, :, keys], heads)
            dk[:, :, keys] += _gather_heads(ds.transpose(-1, -2) @ a[:, :, rows], k.shape[1])
            if dlate is not None and dearly is not None:  # what a decay takes from both cancels, but for their rounding
                dlate[:, :, rows] = _gather_heads(dbias.sum(-1, dtype=dlate.dtype), dlate.shape[1])
                dearly[:, :, keys] += _gather_heads(dbias.sum(-2, dtype=dlate.dtype), dearly.shape[1])
        return None, da, dk, dv, dlate, dearly


def _gather_heads(x: Tensor, heads: int) -> Tensor:
    """The adjoint of spread_heads: [B, H, ...] -> [B, heads, ...]."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)


@dataclass(frozen=True)
class Definition:
    """The oracle's operands, in float64, before any sums over tokens or turns.

    a: [B, H, T, N], k: [B, Hk, T, N], v: [B, Hv, T, P]. decay: [B, Hb, T]. gain: [B, Hb, T], a factor of what is
    written. angle: [B, Ha, T, N/2 or 1] or None.
    """

    a: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    gain: Tensor
    angle: Tensor | None
    window: int | None
    exponential: bool


def definition(x: Definition, cache: KVCache | None) -> Read:
    """The naive form: every token turns and decays all that is held, adds its own, forgets what left the window, reads.

    The weights of one read have their own scale: e^{-m} with m the largest score.
    """
    heads, tokens = x.a.shape[1], x.a.shape[2]
    k, v, share, birth = _held(x, cache)
    found = []
    for t in range(tokens):
        if x.angle is not None:
            angle = spread_heads(x.angle[:, :, t], heads)[:, :, None, :, None]
            k = turn_pairs(k.unsqueeze(-1), angle).squeeze(-1)
        decay = spread_heads(x.decay[:, :, t : t + 1], heads)
        k = torch.cat([k, spread_heads(x.k[:, :, t : t + 1], heads)], dim=2)
        v = torch.cat([v, spread_heads(x.v[:, :, t : t + 1], heads)], dim=2)
        share = torch.cat([share * decay, spread_heads(x.gain[:, :, t : t + 1], heads)], dim=2)
        birth = torch.cat([birth, birth.new_full((birth.shape[0], 1), t)], dim=1)
        live = share if x.window is None else share * (birth > t - x.window).unsqueeze(1)
        scores = (k @ x.a[:, :, t].unsqueeze(-1)).squeeze(-1)
        m = scores.new_zeros(scores.shape[:2])
        if x.exponential:
            m = scores.detach().masked_fill(live == 0, -float("inf")).amax(-1)
            scores = (scores - m.unsqueeze(-1)).masked_fill(live == 0, -float("inf")).exp()
        w = live * scores
        found.append(((w.unsqueeze(-2) @ v).squeeze(-2), w.sum(-1), m))
    num, total, m = (torch.stack(parts, dim=2) for parts in zip(*found, strict=True))
    return Read(num, total, m)


def _held(x: Definition, cache: KVCache | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, what is left of each [B, H, S] and the tokens that wrote them [B, S], before the first token."""
    batch, heads = x.a.shape[:2]
    if cache is None:
        k, v = spread_heads(x.k[:, :, :0], heads), spread_heads(x.v[:, :, :0], heads)
        return k, v, k.new_zeros(batch, heads, 0), torch.zeros(batch, 0, dtype=torch.int64, device=k.device)
    birth = place_of(cache, 0, x.window, x.a.device)
    k, v = spread_heads(cache.turned().to(x.a.dtype), heads), spread_heads(cache.v.to(x.a.dtype), heads)
    share = torch.ones_like(k[..., 0]) if cache.bias is None else spread_heads(cache.bias.to(k.dtype).exp(), heads)
    held = (birth < 0).unsqueeze(1)
    return k, v, torch.where(held, share, 0.0), birth
