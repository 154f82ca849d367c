"""Softmax attention over ranks: its state is the keys and values of earlier tokens, so these are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from dsf.call.bind import Bound, check_cache
from dsf.call.operands import fused_operands, operands
from dsf.call.packing import sequence_of
from dsf.call.recurrence import Recurrence
from dsf.call.run import timed_inputs
from dsf.kernels.attention import KVCache, extend, fused, softmax_matrix, spread_heads
from dsf.language.errors import InputError
from dsf.parallel.layout import Packing, Reads
from dsf.parallel.scores import attend_pieces, attend_scores, emptied, one_token, takes_kernels
from dsf.parallel.tokens import gather_all
from dsf.parallel.world import World


@dataclass(frozen=True)
class Route:
    """What calls of one kind have in common, which `World.routes` keeps of those without a cache.

    likes: the calls of this process's ranks, without tensors. bounds: cu_seqlens, or None. wanted: the final cache.
    kernels: whether the attention kernels run where there is no cache.
    """

    recurrence: Recurrence
    packing: Packing
    bounds: list[int] | None
    likes: list[Bound]
    form: str
    wanted: bool
    kernels: bool

    def run(
        self, world: World, shards: Sequence[Sequence[Tensor]], state: object, return_state: bool
    ) -> list[tuple[Tensor, KVCache | None]]:
        """`attend` without a cache. shards: the inputs of each rank, in the order of the declaration."""
        names = self.recurrence._calls.names
        given = [
            Bound(dict(zip(names, tensors, strict=True)), like.sizes, like.dtype, like.compute, like.device)
            for like, tensors in zip(self.likes, shards, strict=True)
        ]
        return self.attend(world, given, None)

    def attend(
        self, world: World, shards: Sequence[Bound], cache: KVCache | None
    ) -> list[tuple[Tensor, KVCache | None]]:
        """(y, the global cache if wanted) of this process's ranks: each rank's queries with the gathered keys.

        A piece of a sequence reads its sequence up to its end, as causal attention of the last tokens: no mask is
        stored. Behind a cache, whose rows differ in length, keys are masked by position. The keys' and values'
        gradients return to the ranks that hold them; a cache's gradient is the sum over ranks.
        """
        spec, packing, form, packed = self.recurrence.spec, self.packing, self.form, self.bounds is not None
        if self.kernels and cache is None:
            several = attend_pieces(spec, world, shards, packing)
            return [(y.to(bound.dtype), None) for y, bound in zip(several, shards, strict=True)]
        if spec.turns or not spec.is_plain_softmax:
            found = attend_scores(spec, world, shards, cache, packing, packed, form, self.wanted)
            return [(y.to(bound.dtype), final) for (y, final), bound in zip(found, shards, strict=True)]
        own = [_operands(self.recurrence, bound, form) for bound in shards]
        lengths = [packing.tokens(r) for r in range(world.ranks)]
        both = [[k.transpose(1, 2), v.transpose(1, 2)] for _, k, v, _ in own]
        reads = [packing.reads(rank) for rank in world.here]
        reaches = None if self.wanted or cache is not None else [_reach(each) for each in reads]
        everything = gather_all(world, both, lengths, reaches)
        outputs = []
        for place, (bound, (a, _, _, scale), (k, v)) in enumerate(zip(shards, own, everything, strict=True)):
            keys, values = k.transpose(1, 2), v.transpose(1, 2)
            old = None if cache is None else cache.to(keys.dtype)
            final = _final(old, keys, values, packing if packed else None).to(bound.dtype) if self.wanted else None
            if old is None:
                begin = 0 if reaches is None else reaches[place][0]
                y = _by_piece(form, a, keys, values, reads[place], begin, scale)
            else:
                whole = _behind(old, keys, values, packed)
                y = _read(form, a, *whole, _seen(packing, world.here[place], old, packed, a.device), scale)
            outputs.append((y.transpose(1, 2).to(bound.dtype), final))
        return outputs


def route_of(
    recurrence: Recurrence, world: World, shards: Sequence[Bound], cache: KVCache | None, bounds: list[int] | None,
    form: str, backend: str, wanted: bool,
) -> Route:  # fmt: skip
    """The route of a call, with its checks. wanted: the final cache.

    Shards have equal lengths, or world.sizes, or those of the layout for cu_seqlens; others raise InputError.
    """
    spec = recurrence.spec
    tokens = _total(world, shards, bounds)
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
    likes = [replace(bound, tensors={}) for bound in shards]
    kernels = not wanted and takes_kernels(spec, shards[0], form, backend)
    return Route(recurrence, packing, bounds, likes, form, wanted, kernels)


def _total(world: World, shards: Sequence[Bound], bounds: list[int] | None) -> int:
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
        *several, scale = _operands(recurrence, one_token(spec, bound), form)
        a, k, v = (emptied(x, bound) for x in several)
        return a, k, v, scale
    timed = timed_inputs(spec, bound)
    if form == "naive":
        bound = Bound(bound.tensors, bound.sizes, bound.dtype, torch.float64, bound.device)
    if form in ("auto", "chunk") and bound.device.type == "cuda":
        return fused_operands(spec, bound, timed)
    found = operands(spec, bound, timed)
    return found.a, found.k, found.v, 1.0


def _behind(cache: KVCache, k: Tensor, v: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    """Keys and values of the caches, then of the tokens; packed: the caches of all sequences one after the other."""

    def row(x: Tensor) -> Tensor:
        return x.transpose(0, 1).flatten(1, 2).unsqueeze(0) if packed else x

    return torch.cat([row(cache.k), k], dim=2), torch.cat([row(cache.v), v], dim=2)


def _final(cache: KVCache | None, k: Tensor, v: Tensor, packing: Packing | None) -> KVCache:
    """The global final cache. packing: of packed sequences."""
    if packing is not None:
        return _by_sequence(cache, k, v, packing)
    return extend(cache, k, v, torch.full((k.shape[0],), k.shape[2], dtype=torch.int64, device=k.device))


def _by_sequence(cache: KVCache | None, k: Tensor, v: Tensor, packing: Packing) -> KVCache:
    """Packed: the global final cache, one row a sequence, padded to one length."""
    edges, longest = packing.edges(k.device), max(b - a for a, b in pairwise(packing.bounds))
    index = edges[:-1, None] + torch.arange(longest, device=k.device)
    index, counts = index.clamp(max=max(packing.bounds[-1] - 1, 0)), edges.diff()

    def rows(x: Tensor) -> Tensor:
        return x[0][:, index].transpose(0, 1)

    return extend(cache, rows(k), rows(v), counts) if cache is not None else KVCache(rows(k), rows(v), counts)


def _seen(packing: Packing, rank: int, cache: KVCache, packed: bool, device: torch.device) -> Tensor:
    """Which keys of the cache and the whole row each of this rank's queries reads: bool [B or 1, 1, T, places]."""
    own, every = packing.positions(rank, device), torch.arange(packing.bounds[-1], device=device)
    held = torch.arange(cache.k.shape[2], device=device) < cache.lengths[:, None]  # [B or S, places of the cache]
    seen = every[None] <= own[:, None]
    if not packed:
        batch, tokens = len(held), len(own)
        parts = [held[:, None].expand(batch, tokens, -1), seen[None].expand(batch, tokens, -1)]
        return torch.cat(parts, dim=2)[:, None]
    bounds = packing.edges(device)
    mine, theirs = (sequence_of(bounds, x) for x in (own, every))
    same = mine[:, None] == torch.arange(packing.sequences, device=device)[None]  # [T, S]
    seen = torch.cat([(same[..., None] & held[None]).flatten(1), seen & (mine[:, None] == theirs[None])], dim=1)
    return seen[None, None]


def _reach(reads: Reads) -> tuple[int, int]:
    """The first and the last (exclusive) token that any of a rank's queries reads."""
    return min((keys[0] for _, keys in reads), default=0), max((keys[-1] for _, keys in reads), default=0)


def _by_piece(form: str, a: Tensor, k: Tensor, v: Tensor, reads: Reads, begin: int, scale: float) -> Tensor:
    """y [B, H, T, P] of queries without a cache. k and v begin with the token `begin`; reads: those of the rank."""
    found: list[Tensor] = []
    for queries, keys in reads:
        places = [place - begin for place in keys]
        cut = zip(_cut(a, queries), _cut(k, places), _cut(v, places), strict=True)
        found += (_read(form, *each, None, scale) for each in cut)
    if not found:  # no tokens; the gradients of the keys are still exchanged
        return a @ spread_heads(k, a.shape[1]).mT @ spread_heads(v, a.shape[1])
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def _cut(x: Tensor, places: list[int]) -> Sequence[Tensor]:
    """The tokens of x [B, H, T, ...] from each place to the next."""
    if len(places) == 2:
        return [x if places == [0, x.shape[2]] else x[:, :, places[0] : places[1]]]
    return x.split([b - a for a, b in pairwise([0, *places, x.shape[2]])], dim=2)[1:-1]


def _read(form: str, a: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """y [B, H, T, P]."""
    if form in ("auto", "chunk"):
        return fused(a, k, v, seen, scale)
    keys, values = spread_heads(k, a.shape[1]), spread_heads(v, a.shape[1])
    return softmax_matrix(scale * a, keys, seen) @ values
