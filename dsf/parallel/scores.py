"""Attention with biases, turns and windows over ranks: keys, values, decays and angles are gathered and summed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsf.call.attention import after_kernels, finish, scores_options
from dsf.call.bind import Bound
from dsf.call.operands import Operands, kernel_operands, operands
from dsf.call.packing import sequence_of
from dsf.call.run import timed_inputs
from dsf.kernels import scores
from dsf.kernels.attention import KVCache, extend, spread_heads
from dsf.kernels.scores import AWAY, Scores
from dsf.kernels.turns import turn_pairs, whole_turns_left_out
from dsf.language.spec import Spec
from dsf.parallel.layout import Packing, Reads
from dsf.parallel.tokens import gather_all
from dsf.parallel.world import World
from dsf.triton import choose
from dsf.triton.attention import attend

APART = 1 << 40  # how far the positions of packed sequences lie apart


def attend_scores(
    spec: Spec, world: World, shards: Sequence[Bound], cache: KVCache | None, packing: Packing, packed: bool, form: str,
    wanted: bool,
) -> list[tuple[Tensor, KVCache | None]]:  # fmt: skip
    """(y in the computing dtype, the global cache if wanted) of this process's ranks."""
    if form == "naive":
        shards = [replace(b, compute=torch.float64) for b in shards]
    own = [_operands(spec, b) for b in shards]
    several = [[x for x in (o.k, o.v, o.log, o.gain, o.angle) if x is not None] for o in own]
    lengths = [packing.tokens(r) for r in range(world.ranks)]
    every = gather_all(
        world, [[x.transpose(1, 2).to(o.a.dtype) for x in g] for g, o in zip(several, own, strict=True)], lengths
    )
    found = []
    for rank, bound, x, parts in zip(world.here, shards, own, every, strict=True):
        whole = _Whole.of(x, [y.transpose(1, 2) for y in parts], cache, packing, packed)
        at = packing.positions(rank, bound.device)
        final = whole.final(spec, cache, packing).to(bound.dtype) if wanted else None
        if not bound.sizes.tokens:
            found.append((_no_tokens(x, parts), final))
            continue
        read = (scores.blocks if form in ("auto", "chunk") else scores.dense)(whole.scores(spec, x.a, at, cache))
        found.append((finish(spec, x, read), final))
    return found


def takes_kernels(spec: Spec, bound: Bound, form: str, backend: str) -> bool:
    """Whether `attend_pieces` computes a call without a cache: alike on all ranks, however many tokens each has."""
    if spec.turns or spec.rows[0].terms[0].gain is not None or not choose.wanted(backend, bound.device):
        return False
    return choose.refusal(spec, bound.sizes, bound.dtype, form, bound.device, grad=True) is None


def attend_pieces(spec: Spec, world: World, shards: Sequence[Bound], packing: Packing) -> list[Tensor]:
    """y [B, T, H, P] of this process's ranks by the attention kernels, which take a rank's queries of a sequence as the
    last ones of its keys. Keys and values are gathered in the inputs' dtype, log decays in float32."""
    own = [
        kernel_operands(spec, b, timed_inputs(spec, b)) if b.sizes.tokens else (_operands(spec, b).to(b.dtype), 1.0)
        for b in shards
    ]
    lengths = [packing.tokens(r) for r in range(world.ranks)]
    reads = [list(_pieces(packing.reads(rank), spec.system.window)) for rank in world.here]
    reaches = [(min((k.start for _, k in x), default=0), max((k.stop for _, k in x), default=0)) for x in reads]
    both = [[x.k.transpose(1, 2), x.v.transpose(1, 2)] for x, _ in own]
    every = gather_all(world, both, lengths, reaches)
    if own[0][0].log is not None:
        logs = [[x.log.float().transpose(1, 2)] for x, _ in own if x.log is not None]
        logs = gather_all(world, logs, lengths, reaches)
        every = [[*parts, *log] for parts, log in zip(every, logs, strict=True)]
    found = []
    for bound, (x, scale), parts, pairs, (begin, _) in zip(shards, own, every, reads, reaches, strict=True):
        if not pairs:
            found.append(_no_tokens(x, parts))
            continue
        pieces = []
        for queries, keys in pairs:
            k, v, *log = (y[:, keys.start - begin : keys.stop - begin].transpose(1, 2) for y in parts)
            a = x.a[:, :, queries.start : queries.stop]
            pieces.append(attend(a, k, v, log[0] if log else None, scale, spec.system.window))
        y, lse = (torch.cat(several, dim=2) for several in zip(*pieces, strict=True))
        found.append(after_kernels(spec, x, y, lse, bound.compute))
    return found


def _no_tokens(x: Operands, parts: Sequence[Tensor]) -> Tensor:
    """y of a rank without tokens, which depends on what was gathered, so that the rank sends gradients, too."""
    nothing = sum((y.sum() for y in parts), x.a.sum())
    return nothing + x.a.new_zeros(x.a.shape[0], 0, x.a.shape[1], x.v.shape[3])


def _pieces(reads: Reads, window: int | None) -> Iterator[tuple[range, range]]:
    """(queries, the keys that one of them sees or that lie between) of every piece of a sequence on a rank."""
    for queries, keys in reads:
        for q, (begin, end) in zip(pairwise(queries), pairwise(keys), strict=True):
            yield range(*q), range(begin if window is None else max(begin, end - (q[1] - q[0]) - window + 1), end)


def _operands(spec: Spec, bound: Bound) -> Operands:
    """A rank's operands, also of a shard without tokens."""
    if bound.sizes.tokens:
        return operands(spec, bound, timed_inputs(spec, bound))
    like = one_token(spec, bound)
    found = operands(spec, like, timed_inputs(spec, like))
    parts: dict[str, Any] = {name: getattr(found, name) for name in ("a", "k", "v", "log", "gain", "angle")}
    parts = {name: None if x is None else emptied(x, bound) for name, x in parts.items()}
    return replace(found, **parts)


def one_token(spec: Spec, bound: Bound) -> Bound:
    """A call without tokens with one of zeros, which has other ranks' shapes and wishes for gradients."""
    timed = {i.name for i in spec.inputs if i.kind.time}
    some = {n: pad(x, (*[0, 0] * (x.dim() - 2), 0, 1)) if n in timed else x for n, x in bound.tensors.items()}
    return replace(bound, tensors=some, sizes=replace(bound.sizes, tokens=1))


def emptied(x: Tensor, bound: Bound) -> Tensor:
    """x [B, heads, 1, ...] without its token. It wants a gradient where x does, as on the other ranks, since all of
    them exchange it; no number of the token's is read."""
    found = x.detach()[:, :, :0]
    if not x.requires_grad:
        return found
    leaves = [y.sum().to(x.dtype) for y in bound.tensors.values() if y.requires_grad]
    return found + torch.stack(leaves).sum() * 0


@dataclass(frozen=True)
class _Whole:
    """All ranks' tokens: k turned back, late and early within each sequence, the summed angle; bounds: cu_seqlens."""

    k: Tensor
    v: Tensor
    late: Tensor | None
    early: Tensor | None
    angle: Tensor | None
    bounds: Tensor
    packed: bool

    @staticmethod
    def of(x: Operands, parts: list[Tensor], cache: KVCache | None, packing: Packing, packed: bool) -> _Whole:
        """From gathered parts: sums over each sequence, from its first token in the call."""
        rest = iter(parts)
        k, v = next(rest), next(rest)
        bounds = packing.edges(k.device)
        row = sequence_of(bounds, torch.arange(k.shape[2], device=k.device))
        before = bounds[row]
        log, gain, angle = (None if y is None else next(rest).double() for y in (x.log, x.gain, x.angle))

        def summed(y: Tensor) -> Tensor:
            total = torch.cat([torch.zeros_like(y[:, :, :1]), y.cumsum(2)], dim=2)
            return total[:, :, 1:] - total.index_select(2, before)

        late = None if log is None else summed(log)
        early = None if late is None else -late if gain is None else gain - late
        if angle is not None:
            angle = summed(angle)
            if cache is not None and cache.angle is not None:
                start = cache.angle.double()
                angle = angle + (start[row].transpose(0, 1)[None] if packed else start.unsqueeze(2))
            back = spread_heads(-whole_turns_left_out(angle, k.dtype), k.shape[1])
            k = turn_pairs(k.unsqueeze(-1), back.unsqueeze(-1)).squeeze(-1)
        return _Whole(k, v, late, early, angle, bounds, packed)

    def scores(self, spec: Spec, a: Tensor, at: Tensor, cache: KVCache | None) -> Scores:
        """The scores of a rank's queries a, at these places of the sequence, with all keys."""
        if self.angle is not None:
            back = -whole_turns_left_out(self.angle.index_select(2, at), a.dtype)
            a = turn_pairs(a.unsqueeze(-1), spread_heads(back, a.shape[1]).unsqueeze(-1)).squeeze(-1)
        every = torch.arange(self.k.shape[2], device=a.device)
        row = sequence_of(self.bounds, every)
        place = (every + APART * row)[None] if self.packed else every[None]
        late = None if self.late is None else self.late.index_select(2, at)
        k, v, early = self.k, self.v, self.early
        query = place[0].index_select(0, at)
        if cache is not None:
            place = torch.cat(
                [self._held(cache, spec.system.window), place.expand(1 if self.packed else a.shape[0], -1)], 1
            )
            k, v = (torch.cat([self._row(old.to(new.dtype)), new], 2) for old, new in ((cache.k, k), (cache.v, v)))
            if early is not None and cache.bias is not None:
                early = torch.cat([self._row(cache.bias.double()), early], dim=2)
        window = spec.system.window or (APART // 2 if self.packed else None)
        return Scores(a, k, v, place, late, early, window, *scores_options(spec), query)

    def _row(self, x: Tensor) -> Tensor:
        """A cache's tensor as it stands before the tokens: packed, all rows one after the other."""
        return x.transpose(0, 1).flatten(1, 2).unsqueeze(0) if self.packed else x

    def _held(self, cache: KVCache, window: int | None) -> Tensor:
        """The positions of the cache's entries, AWAY for unused ones."""
        held = cache.lengths if window is None else cache.lengths.clamp(max=window)
        index = torch.arange(cache.k.shape[2], device=held.device)[None]
        place = index - held[:, None]
        if self.packed:
            rows = torch.arange(len(held), device=held.device)
            place = place + (self.bounds[:-1] + APART * rows)[:, None]
        place = torch.where(index < held[:, None], place, AWAY)
        return place.flatten()[None] if self.packed else place

    def final(self, spec: Spec, cache: KVCache | None, packing: Packing) -> KVCache:
        """The cache after all tokens, a row a sequence."""
        parts: tuple[Tensor | None, ...] = (self.k, self.v, self.late, self.early, self.angle)
        counts = (self.bounds[1:] - self.bounds[:-1]) if self.packed else self.bounds[1:].expand(self.k.shape[0])
        if self.packed:
            longest = max(b - a for a, b in pairwise(packing.bounds))
            index = self.bounds[:-1, None] + torch.arange(longest, device=self.k.device)
            index = index.clamp(max=max(self.k.shape[2] - 1, 0))
            parts = tuple(None if x is None else x[0][:, index].transpose(0, 1) for x in parts)
        k, v, late, early, angle = parts
        assert k is not None and v is not None
        some, last = counts > 0, (counts - 1).clamp(min=0)
        bias = left = ends = None
        if late is not None and early is not None:
            left = late.gather(2, last[:, None, None].expand(-1, late.shape[1], 1)).squeeze(-1)
            left = torch.where(some[:, None], left, 0.0)
            bias, left = (early + left.unsqueeze(-1)).to(k.dtype), left.to(k.dtype)
        if angle is not None:
            place = last[:, None, None, None].expand(-1, angle.shape[1], 1, angle.shape[3])
            ends = whole_turns_left_out(angle.gather(2, place).squeeze(2), k.dtype)
            old = torch.zeros_like(ends) if cache is None or cache.angle is None else cache.angle.to(ends.dtype)
            ends = torch.where(some[:, None, None], ends, old)
        cache = None if cache is None else cache.to(k.dtype)
        return extend(cache, k, v, counts.to(torch.int64), bias, left, ends, spec.system.window)
