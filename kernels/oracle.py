"""The naive form: dense A_t, token after token, in float64. It defines the result; all forms are compared with it."""

from __future__ import annotations

from contextvars import ContextVar

import torch
from torch import Tensor

# The computing dtype. dsf.fuzz also sets float32, to see which error the definition itself has in that dtype.
oracle_dtype: ContextVar[torch.dtype] = ContextVar("oracle_dtype", default=torch.float64)


def naive(
    a: list[Tensor], b: list[Tensor], c: Tensor, d: Tensor, state: Tensor, read_before: bool, axis: int = -2
) -> tuple[Tensor, Tensor]:
    """S_t = A_t S_{t-1} + B_t for every micro-step in turn; y_t = C_tᵀ S + D_t.

    a: one [B, T, H, P, N, N] a micro-step, an N x N matrix for every channel; b: one [B, T, H, N, P] a micro-step;
    c: [B, T, H, N, P]; d: [B, T, H, P]; state: [B, H, N, P]; axis: that C sums over, -2 for N. Returns y [B, T, H, P]
    and the last state.
    """
    a_rows, b_rows = [x.unbind(1) for x in a], [x.unbind(1) for x in b]  # not x[:, t]: its gradient has all T tokens
    outputs = []
    for t, (c_t, d_t) in enumerate(zip(c.unbind(1), d.unbind(1), strict=True)):
        previous = state
        for a_m, b_m in zip(a_rows, b_rows, strict=True):
            state = torch.einsum("bhpnm,bhmp->bhnp", a_m[t], state) + b_m[t]
        seen = previous if read_before else state
        outputs.append((c_t * seen).sum(axis) + d_t)
    return torch.stack(outputs, dim=1), state
