"""Mixtures of every token with another (RWKV's with the token before), channel by channel: several at once.

On a GPU all of them take one launch, and backward two (dsf.kernels.triton.layer); elsewhere torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsf.kernels.convolution import KINDS, asks_for_kernels

LARGEST = 8  # most mixtures of the GPU kernels


def token_mixtures(
    x: Tensor, other: Tensor, shares: Sequence[Tensor], more: Tensor | None = None, backend: str = "auto"
) -> tuple[Tensor, ...]:
    """x + (other - x) · share, one result for each of the shares.

    x, other: [B, T, C], any strides; shares: [C] each, all of one type. more: [shares, B, T, C], what each token adds
    to the shares. backend: "triton" (CUDA tensors, x, other and more of one type, not float64, at most 8 shares),
    "torch", or "auto". Results [B, T, C] have the type that torch gives a product of x and a share; a GPU's are rounded
    once. Raises ValueError for sizes that do not fit and an unknown backend.
    """
    fits = x.dim() == 3 and other.shape == x.shape and all(s.shape == x.shape[2:] for s in shares)
    if not fits or (more is not None and more.shape != (len(shares), *x.shape)):
        given = [list(y.shape) for y in (x, other, *shares, *([] if more is None else [more]))]
        raise ValueError(f"mixtures of x, other by shares of shapes {given}: sizes do not fit")
    if _chosen(x, other, shares, more, backend):
        from dsf.kernels.triton.layer.mixture import mix_tokens

        return tuple(mix_tokens(x, other, list(shares), more))
    if shares:  # float32 shares make float32 results, for which half precision is too few digits
        kind = torch.promote_types(x.dtype, shares[0].dtype)
        x, other = x.to(kind), other.to(kind)
    change = other - x
    if more is None:
        return tuple(torch.addcmul(x, change, share) for share in shares)
    return tuple(torch.addcmul(x, change, share + m) for share, m in zip(shares, more, strict=True))


def _chosen(x: Tensor, other: Tensor, shares: Sequence[Tensor], more: Tensor | None, backend: str) -> bool:
    """True for the Triton kernels. Raises where backend='triton' was asked for and they cannot run."""
    kinds = {s.dtype for s in shares}
    fits = (
        asks_for_kernels(backend, x) and x.dtype == other.dtype and len(kinds) == 1 and {x.dtype, *kinds} <= set(KINDS)
    )
    fits = fits and len(shares) <= LARGEST and x.numel() > 0 and (more is None or more.dtype == x.dtype)
    if not fits and backend == "triton":
        raise ValueError(
            f"the fused mixtures take x, other and more of one type and 1 to {LARGEST} shares of one type, float32, "
            f"bfloat16 or float16; got {x.dtype}, {other.dtype} and {len(shares)} of {sorted(map(str, kinds))}"
        )
    return fits
