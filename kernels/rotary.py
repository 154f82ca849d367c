"""Rotary positions: pairs of query and key entries turned by angles that depend on the token's position.

On a GPU both take one launch, and backward one (dsf.kernels.triton.layer); elsewhere torch. Computed in float32 at
least, and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsf.kernels.convolution import KINDS, asks_for_kernels

LARGEST = 512  # most pairs of a head in the GPU kernel


def angles(positions: Tensor, width: int, base: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, width // 2] of the angles position · base^(-2i / width), for positions [B, T]."""
    half = width // 2
    rates = base ** (-torch.arange(half, device=positions.device, dtype=dtype) / half)
    angle = positions.to(dtype)[..., None] * rates
    return angle.cos(), angle.sin()


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, scale: float = 1.0, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Entries i and i + n of every head turned against each other by the angle i of its token; keys times `scale`.

    q: [B, T, H, N], k: [B, T, Hk, N], any strides; cos, sin: [B or 1, T, n] of the angles, n = N // 2, without a
    gradient. The last entry of an odd N is not turned. backend: "triton" (CUDA tensors of one type, not float64, N
    even), "torch", or "auto". Returns q and k in their types, contiguous on a GPU.

    Source: Su et al. (arXiv 2104.09864), Section 3.2, with halves of a head as pairs. Raises ValueError for sizes that
    do not fit and an unknown backend.
    """
    n = q.shape[-1] // 2
    same = q.shape[:2] == k.shape[:2] and q.shape[-1] == k.shape[-1]  # not by a set: its hashes make sizes constants
    if not same or cos.shape != sin.shape or cos.shape[1:] != (q.shape[1], n) or len(cos) not in (1, len(q)):
        shapes = [list(x.shape) for x in (q, k, cos, sin)]
        raise ValueError(f"rotary positions of q, k by cos, sin of shapes {shapes}: sizes do not fit")
    if _chosen(q, k, cos, sin, backend):
        from dsf.kernels.triton.layer.rotary import turn_pairs

        return turn_pairs(q, k, cos, sin, scale, False)
    wide = torch.promote_types(q.dtype, torch.float32)
    cos, sin = cos.to(wide).unsqueeze(2), sin.to(wide).unsqueeze(2)
    if q.shape[1] > 1:
        return _turned(q, cos, sin, 1.0), _turned(k, cos, sin, scale)
    # Of a token, calls are what it costs, not copies.
    both = _turned(torch.cat([q.to(wide), k.to(wide) * scale], dim=2), cos, sin, 1.0)
    return both[:, :, : q.shape[2]].to(q.dtype), both[:, :, q.shape[2] :].to(k.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
    n = cos.shape[-1]
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    a, b, *rest = x.to(cos.dtype).split([n, n] + [1] * (x.shape[-1] % 2), dim=-1)
    first, second = torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(a * sin, b, cos)
    return torch.cat([first, second, *(y * scale for y in rest)], dim=-1).to(x.dtype)


def _chosen(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backend: str) -> bool:
    """True for the Triton kernel. Raises where backend='triton' was asked for and it cannot run."""
    fits = asks_for_kernels(backend, q) and q.dtype == k.dtype and q.dtype in KINDS
    fits = fits and cos.dtype == sin.dtype and cos.dtype in KINDS
    fits = fits and not (cos.requires_grad or sin.requires_grad)
    fits = fits and q.numel() > 0 and k.numel() > 0 and q.shape[-1] % 2 == 0 and q.shape[-1] <= 2 * LARGEST
    if not fits and backend == "triton":
        raise ValueError(
            "the fused rotary positions take q and k of one type, float32, bfloat16 or float16, heads of an even width "
            f"of at most {2 * LARGEST}, and angles without a gradient; got {q.dtype}, {k.dtype}, {cos.dtype} and a "
            f"width of {q.shape[-1]}"
        )
    return fits
