"""Attention on the Triton kernels: which calls they can run, and the call itself."""

from __future__ import annotations

import torch
from torch import Tensor

from dsf.call.bind import Sizes
from dsf.kernels.attention import spread_heads
from dsf.kernels.fixed_cache import WIDEST
from dsf.language.spec import Spec


def refusal(spec: Spec, sizes: Sizes, dtype: torch.dtype) -> str | None:
    """Why the attention kernels cannot run this call, in the user's words; None when they can."""
    if spec.is_plain_softmax:
        return "plain softmax attention is torch's fused attention"
    if not spec.is_softmax:
        return "the attention kernels take exponential features; a window of a finite state runs on torch"
    if dtype == torch.float64:
        return "the kernels compute in float32 and the inputs are float64"
    if max(sizes.keys, sizes.p) > WIDEST:
        return f"the attention kernels take N and P up to {WIDEST}, got N = {sizes.keys} and P = {sizes.p}"
    return None


def kernel_of(sizes: Sizes, dtype: torch.dtype) -> tuple[str, int]:
    """Name of the kernel with its tiles, and queries a tile."""
    from dsf.kernels.triton.attention.operator import tiles

    found = tiles(sizes.keys, sizes.p, dtype, "forward")
    return f"attention by tiles ({found['R']} queries x {found['C']} keys, {found['num_warps']} warps)", found["R"]


def attend(
    a: Tensor, k: Tensor, v: Tensor, log: Tensor | None, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """y [B, H, T, P] in v's dtype and lse [B, H, T].

    a: [B, H, T, N], k, v: [B, ·, T, ·]. log: [B, Hb, T], log decays, or None.
    """
    from dsf.kernels.triton.attention.operator import attention

    log = None if log is None else spread_heads(log, a.shape[1])
    y, lse, _ = attention(a.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), log, scale, window or 0)
    return y.transpose(1, 2), lse
