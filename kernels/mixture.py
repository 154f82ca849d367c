"""Mixtures of every token with another (RWKV's with the token before), channel by channel: several at once.

On a GPU all of them take one launch, and backward two (dsf.kernels.triton.layer); elsewhere torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsf.kernels.convolution import TRITON

LARGEST = 8  # most mixtures of the GPU kernels


def token_mixtures(x: Tensor, other: Tensor, shares: Sequence[Tensor], backend: str = "auto") -> tuple[Tensor, ...]:
    """x + (other - x) · share, one result for each of the shares.

    x, other: [B, T, C], any strides; shares: [C] each, all of one type. backend: "triton" (CUDA tensors, x and other of
    one type, not float64, at most 8 shares), "torch", or "auto". Results [B, T, C] have the type that torch gives a
    product of x and a share; a GPU's are rounded once. Raises ValueError for sizes that do not fit and an unknown
    backend.
    """
    if x.dim() != 3 or other.shape != x.shape or any(s.shape != x.shape[2:] for s in shares):
        given = [list(y.shape) for y in (x, other, *shares)]
        raise ValueError(f"mixtures of x, other by shares of shapes {given}: sizes do not fit")
    if _chosen(x, other, shares, backend):
        from dsf.kernels.triton.layer.mixture_ops import mix_tokens

        return tuple(mix_tokens(x, other, list(shares)))
    change = other - x
    return tuple(torch.addcmul(x, change, share) for share in shares)


def _chosen(x: Tensor, other: Tensor, shares: Sequence[Tensor], backend: str) -> bool:
    """True for the Triton kernels. Raises where backend='triton' was asked for and they cannot run."""
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend is {backend!r}; there are 'auto', 'torch' and 'triton'")
    if backend == "torch" or (backend == "auto" and not (x.is_cuda and TRITON)):
        return False
    kinds, fused = {s.dtype for s in shares}, (torch.float32, torch.bfloat16, torch.float16)
    fits = x.dtype == other.dtype and len(kinds) == 1 and {x.dtype, *kinds} <= set(fused)
    fits = fits and len(shares) <= LARGEST and x.numel() > 0
    if not fits and backend == "triton":
        raise ValueError(
            f"the fused mixtures take x and other of one type and 1 to {LARGEST} shares of one type, float32, bfloat16 "
            f"or float16; got {x.dtype}, {other.dtype} and {len(shares)} of {sorted(map(str, kinds))}"
        )
    return fits
