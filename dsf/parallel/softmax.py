"""Softmax attention over ranks: its state is the keys and values of earlier tokens, so these are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dsf.call.attention import fused_operands, operands
from dsf.call.bind import Bound, cached_heads, check_cache
from dsf.call.recurrence import Recurrence
from dsf.call.run import timed_inputs
from dsf.kernels.attention import KVCache, extend, fused, softmax_matrix, spread_heads
from dsf.language.errors import InputError
from dsf.parallel.layout import Packing
from dsf.parallel.scores import attend_scores
from dsf.parallel.tokens import gather_all
from dsf.parallel.world import World


def attend(
    recurrence: Recurrence, world: World, shards: Sequence[Bound], cache: KVCache | None, bounds: list[int] | None,
    form: str,
) -> list[tuple[Tensor, KVCache]]:  # fmt: skip
    """(y, the global cache) of this process's ranks: each rank's queries with the gathered keys, masked by position.

    The keys' and values' gradients return to the ranks that hold them; a cache's gradient is the sum over ranks. Shards
    have equal lengths, or world.sizes, or those of the layout for cu_seqlens; others raise InputError.
    """
    spec = recurrence.spec
    tokens = _total(world, shards, bounds, spec.name)
    packing = world.packing([0, tokens] if bounds is None else bounds)
    for rank, bound in zip(world.here, shards, strict=True):
        if bound.sizes.tokens != packing.tokens(rank):
            raise InputError(
                f"{spec.name}: rank {world.called(rank)} of {world.ranks} has {bound.sizes.tokens} tokens, but the "
                f"layout gives it {packing.tokens(rank)} of {tokens}; "
                "give shards of other lengths as Sequence(..., sizes=...)"
            )
        if cache is not None:
            rows = bound.sizes.batch if bounds is None else packing.sequences
            check_cache(spec, cache, rows, bound)
    if spec.turns or not spec.is_plain_softmax:
        found = attend_scores(spec, world, shards, cache, packing, bounds is not None, form)
        return [(y.to(bound.dtype), final) for (y, final), bound in zip(found, shards, strict=True)]
    own = [_operands(recurrence, bound, form) for bound in shards]
    lengths = [packing.tokens(r) for r in range(world.ranks)]
    both = [[k.transpose(1, 2), v.transpose(1, 2)] for _, k, v, _ in own]
    everything = gather_all(world, both, lengths)
    outputs = []
    for rank, bound, (a, _, _, scale), (k, v) in zip(world.here, shards, own, everything, strict=True):
        keys, values = k.transpose(1, 2), v.transpose(1, 2)
        counts = torch.full((keys.shape[0],), tokens, dtype=torch.int64, device=keys.device)
        if bounds is None:
            whole = extend(_to(cache, keys.dtype), keys, values, counts)
            final = whole
        else:
            whole = _beside(_to(cache, keys.dtype), keys, values, counts)
            final = _by_sequence(_to(cache, keys.dtype), keys, values, bounds)
        seen = _seen(packing, rank, cache, whole.k.shape[2], bounds is not None, a.device)
        y = _read(form, a, whole, seen, scale).transpose(1, 2)
        outputs.append((y.to(bound.dtype), final.to(bound.dtype)))
    return outputs


def _total(world: World, shards: Sequence[Bound], bounds: list[int] | None, name: str) -> int:
    """The number of tokens of the whole sequence."""
    if bounds is not None:
        return bounds[-1]
    if world.sizes is not None:
        return sum(world.sizes)
    if len(shards) == world.ranks:
        return sum(b.sizes.tokens for b in shards)
    return shards[0].sizes.tokens * world.ranks


def _operands(recurrence: Recurrence, bound: Bound, form: str) -> tuple[Tensor, Tensor, Tensor, float]:
    """a [B, H, T, N], k [B, Hk, T, N], v [B, Hv, T, P] of C = phi(scale a), B = phi(k) v."""
    spec = recurrence.spec
    if not bound.sizes.tokens:
        sizes, like = bound.sizes, next(iter(bound.tensors.values()))
        k_heads, v_heads = cached_heads(spec, sizes)[0]
        nothing = sum((x.sum() * 0 for x in bound.tensors.values()), like.new_zeros(()))
        a, k, v = (
            like.new_zeros(sizes.batch, heads, 0, width) + nothing
            for heads, width in ((sizes.heads, sizes.keys), (k_heads, sizes.keys), (v_heads, sizes.p))
        )
        if form == "naive":
            return a.double(), k.double(), v.double(), 1.0
        fast = form in ("auto", "chunk") and bound.device.type == "cuda"
        return (a, k, v, 1.0) if fast else (a.to(bound.compute), k.to(bound.compute), v.to(bound.compute), 1.0)
    timed = timed_inputs(spec, bound)
    if form == "naive":
        bound = Bound(bound.tensors, bound.sizes, bound.dtype, torch.float64, bound.device)
    if form in ("auto", "chunk") and bound.device.type == "cuda":
        return fused_operands(spec, bound, timed)
    found = operands(spec, bound, timed)
    return found.a, found.k, found.v, 1.0


def _to(cache: KVCache | None, dtype: torch.dtype) -> KVCache | None:
    return None if cache is None else cache.to(dtype)


def _beside(cache: KVCache | None, k: Tensor, v: Tensor, counts: Tensor) -> KVCache:
    """Packed: one row, the caches of all sequences one after the other, then the tokens."""
    if cache is None:
        return KVCache(k, v, counts)

    def row(x: Tensor) -> Tensor:
        return x.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    return KVCache(torch.cat([row(cache.k), k], dim=2), torch.cat([row(cache.v), v], dim=2), counts)


def _by_sequence(cache: KVCache | None, k: Tensor, v: Tensor, bounds: list[int]) -> KVCache:
    """Packed: the global final cache, one row a sequence, padded to one length."""
    lengths = [b - a for a, b in pairwise(bounds)]
    index = torch.tensor(
        [[min(a + t, max(bounds[-1] - 1, 0)) for t in range(max(lengths))] for a in bounds[:-1]], device=k.device
    )
    counts = torch.tensor(lengths, dtype=torch.int64, device=k.device)

    def rows(x: Tensor) -> Tensor:
        return x[0][:, index].transpose(0, 1)

    return extend(cache, rows(k), rows(v), counts) if cache is not None else KVCache(rows(k), rows(v), counts)


def _seen(
    packing: Packing, rank: int, cache: KVCache | None, places: int, packed: bool, device: torch.device
) -> Tensor:
    """Which keys of the whole row each of this rank's queries reads: bool [B or 1, 1, T, places]."""
    own = torch.tensor(packing.positions(rank), dtype=torch.int64, device=device)
    every = torch.arange(packing.bounds[-1], device=device)
    if not packed:
        start = torch.zeros(1, dtype=torch.int64, device=device) if cache is None else cache.lengths
        last = start[:, None] + own[None]
        return (torch.arange(places, device=device)[None, None] <= last[..., None])[:, None]
    bounds = torch.tensor(packing.bounds, device=device)
    mine, theirs = (torch.searchsorted(bounds[1:], x, right=True) for x in (own, every))
    seen = (mine[:, None] == theirs[None]) & (every[None] <= own[:, None])
    if cache is not None:
        used = torch.arange(cache.k.shape[2], device=device)[None] < cache.lengths[:, None]  # [S, places]
        same = mine[:, None] == torch.arange(packing.sequences, device=device)[None]  # [T, S]
        seen = torch.cat([(same[..., None] & used[None]).flatten(1), seen], dim=1)
    return seen[None, None]


def _read(form: str, a: Tensor, whole: KVCache, seen: Tensor, scale: float) -> Tensor:
    """y [B, H, T, P]."""
    if form in ("auto", "chunk"):
        return fused(a, whole.k, whole.v, seen, scale)
    keys, values = spread_heads(whole.k, a.shape[1]), spread_heads(whole.v, a.shape[1])
    return softmax_matrix(scale * a, keys, seen) @ values
