"""States that take the memory of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsf import KVCache
from dsf.call import decode
from dsf.kernels import attention


def is_cache(x: Any) -> bool:
    """Whether this part of a state is attention's keys and values, which have their own memory."""
    return isinstance(x, KVCache)


def put(held: Any, state: Any) -> Any:
    """A mixer's state copied into the memory of an earlier one of the same shapes, but for what lies there already, and
    attention's caches."""

    def place(old: Any, new: Any) -> Any:
        both = isinstance(old, Tensor) and isinstance(new, Tensor)
        return old.copy_(new) if both and new is not old else new

    return pytree.tree_map(place, held, state, is_leaf=is_cache)


def caches_of(state: Any) -> list[KVCache]:
    """The caches in a mixer's state."""
    return [x for x in pytree.tree_leaves(state, is_leaf=is_cache) if is_cache(x)]


def reserved(mixer: Any, state: Any, tokens: int) -> Any:
    """A mixer's state as steps in place take it without copies: contiguous, a cache with room for so many tokens."""
    own = id(getattr(state, "recurrent", None))

    def made(x: Any) -> Any:
        if isinstance(x, KVCache):
            return decode.reserved(mixer.recurrence.spec, x, tokens) if id(x) == own else x
        return x.contiguous() if isinstance(x, Tensor) else x

    return pytree.tree_map(made, state, is_leaf=is_cache)


def joined(mixer: Any, states: Sequence[Any]) -> Any:
    """The rows of several states of one mixer, one state after the other; keys and values of each in their order."""

    if len({getattr(s, "position", None) is None for s in states}) > 1:
        # Some count tokens, some do not: in those every row has had one, and nothing but a count of 0 matters.
        states = [s if s.position is not None else s._replace(position=_ones(s)) for s in states]

    def together(*parts: Any) -> Any:
        if is_cache(parts[0]):
            return attention.joined([decode.in_order(mixer.recurrence.spec, x) for x in parts])
        return torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]

    return pytree.tree_map(together, *states, is_leaf=is_cache)


def _ones(state: Any) -> Tensor:
    first = next(x for x in pytree.tree_leaves(state) if isinstance(x, Tensor))
    return first.new_ones(len(first), dtype=torch.int64)


def most_of(state: Any) -> int:
    """The most tokens that a row of the caches in a state may hold, as far as the host knows; 0 without caches."""
    return max((c.k.shape[2] if c.filled is None else c.filled.most for c in caches_of(state)), default=0)


def room_of(mixer: Any, state: Any) -> float:
    """How many tokens the caches in a mixer's state have room for: any number without caches, and in a full window."""
    found = float("inf")
    for cache in caches_of(state):
        places = cache.k.shape[2]
        if cache.filled is not None and places != mixer.recurrence.spec.system.window:
            found = min(found, places - cache.filled.most)
    return found


def overwritten(state: Any, tokens: int) -> list[Tensor]:
    """What so many steps in place change of a state: its tensors, but for keys and values with room behind the last."""
    roomy = [c for c in caches_of(state) if c.filled is not None and c.filled.most + tokens <= c.k.shape[2]]
    spared = {id(x) for c in roomy for x in (c.k, c.v)}
    return [x for x in pytree.tree_leaves(state) if isinstance(x, Tensor) and id(x) not in spared]
