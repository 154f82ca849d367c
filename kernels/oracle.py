"""The naive form: dense A_t, token after token, in float64. It defines the result; all forms are compared with it."""

from __future__ import annotations

from contextvars import ContextVar

import torch
from einops import rearrange
from torch import Tensor

AT_ONCE = 64  # tokens whose states are read together

# The computing dtype. dsf.fuzz also sets float32, to see which error the definition itself has in that dtype.
oracle_dtype: ContextVar[torch.dtype] = ContextVar("oracle_dtype", default=torch.float64)


def naive(
    a: list[Tensor], b: list[Tensor], c: Tensor, d: Tensor, state: Tensor, read_before: bool, axis: int = -2
) -> tuple[Tensor, Tensor]:
    """S_t = A_t S_{t-1} + B_t for every micro-step in turn; y_t = C_tᵀ S + D_t.

    a: one [B, T, H, P or 1, N, N] a micro-step, a matrix for every channel or one for all; b: one [B, T, H, N, P] a
    micro-step; c: [B, T, H, N, P]; d: [B, T, H, P]; state: [B, H, N, P]; axis: that C sums over, -2 for N. Returns
    y [B, T, H, P] and the last state.
    """
    batch, heads, _, p = state.shape
    apart = any(x.shape[3] > 1 for x in a)  # each channel's column of the state then has a matrix of its own
    columns = "(b h p) n 1" if apart else "(b h) n p"
    sizes = {"b": batch, "h": heads, "p": p}
    matrices = [rearrange(x.expand(-1, -1, -1, p if apart else 1, -1, -1), "b t h p n m -> t (b h p) n m") for x in a]
    written = [rearrange(x, f"b t h n p -> t {columns}") for x in b]
    # Rows by unbind, not x[t], whose gradient has all T tokens.
    moves, writes = ([x.unbind(0) for x in xs] for xs in (matrices, written))
    state = rearrange(state, f"b h n p -> {columns}")
    outputs = []
    for begin in range(0, c.shape[1], AT_ONCE):
        now, seen = slice(begin, begin + AT_ONCE), []
        for t in range(c.shape[1])[now]:
            previous = state
            for a_rows, b_rows in zip(moves, writes, strict=True):
                state = torch.baddbmm(b_rows[t], a_rows[t], state)
            seen.append(previous if read_before else state)
        states = rearrange(torch.stack(seen), f"t {columns} -> b t h n p", **sizes)
        outputs.append((c[:, now] * states).sum(axis) + d[:, now])
    return torch.cat(outputs, dim=1), rearrange(state, f"{columns} -> b h n p", **sizes)
