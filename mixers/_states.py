"""States that take the memory of earlier ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from dsf import KVCache


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
