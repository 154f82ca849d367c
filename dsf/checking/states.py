"""States of examples, tensors or attention's caches: changed, by rows, and one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsf.call.recurrence import State
from dsf.kernels.attention import KVCache, joined


def changed(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`change` applied to every floating point tensor of a state; None for None."""
    if isinstance(state, KVCache):
        return state.map(change)
    return None if state is None else change(state)


def rows_of(state: Any, chosen: Sequence[int]) -> Any:
    """Some rows of a state; None for None."""
    if state is None:
        return None
    device = state.k.device if isinstance(state, KVCache) else state.device
    index = torch.tensor(chosen, dtype=torch.int64, device=device)
    return state.rows(index) if isinstance(state, KVCache) else state.index_select(0, index)


def stacked(states: Sequence[State | None]) -> State:
    """The rows of several states, one after the other; None is the state of a sequence without initial state and
    without tokens."""
    some = next(s for s in states if s is not None)
    if isinstance(some, KVCache):
        blank: Any = some.map(torch.zeros_like)._replace(lengths=torch.zeros_like(some.lengths))
    else:
        blank = torch.zeros_like(some)
    every: list[Any] = [blank if s is None else s for s in states]
    return joined(every) if isinstance(some, KVCache) else torch.cat(every)
