"""States of the adversary's cases, tensors or attention's caches: as numbers, and in the types of calls."""

from __future__ import annotations

import torch
from torch import Tensor

from dsf.call.recurrence import Recurrence, State
from dsf.checking.examples import PREFIX
from dsf.checking.states import changed
from dsf.fuzz.case import Case
from dsf.kernels.attention import KVCache, padded

WRONG = 1e30  # for every token by which a cache's count of tokens is wrong


def as_numbers(recurrence: Recurrence, case: Case, state: State, calls: int = 1) -> Tensor:
    """The state of `calls` calls in float64 and its true scale: [rows, H, N, columns]; for a cache [rows, 1, numbers].

    A cache's numbers are those of the used places, as many as any row may use; other places are padding.
    """
    if isinstance(state, Tensor):
        return recurrence.true_state(state.double(), case.p)
    counts = torch.tensor([n + PREFIX * case.initial for n in case.lengths or (case.tokens,) * case.batch] * calls)
    window = recurrence.spec.system.window
    places = int((counts if window is None else counts.clamp(max=window)).max())
    off = (state.lengths.cpu() - counts).abs().double() * WRONG
    used = state.in_use()[:, None]
    parts = [x.double() * used[..., None] for x in (state.k, state.v)]
    parts += [] if state.bias is None else [(state.bias.double() * used).exp() * used]
    kept = [padded(x, places)[:, :, :places].flatten(1) for x in parts]
    kept += [] if state.angle is None else [f(state.angle.double()).flatten(1) for f in (torch.cos, torch.sin)]
    return torch.cat([*kept, off.to(state.k.device)[:, None]], dim=1).unsqueeze(1)


def start_dtype(case: Case) -> torch.dtype:
    """The dtype of states."""
    return torch.float64 if case.dtype == "float64" else torch.float32


def given_type(case: Case, state: State) -> State:
    """A float64 state in the dtypes of a call's initial state; keys and values get the inputs' dtype."""
    found = changed(state, lambda x: x.to(start_dtype(case)))
    return found.to(case.torch_dtype) if isinstance(found, KVCache) else found
