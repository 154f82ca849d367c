"""Reversed copies of sequences, and sums of what both directions made: ahead_{t-l} + back_{T-1-t-l} + gain_t x_t.

On a GPU one launch each way (dsf.kernels.triton.layer), since torch's flip takes almost three times as long as a copy;
elsewhere torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsf.kernels.convolution import KINDS, asks_for_kernels

LEAST = 1 << 20  # bytes; of fewer the host's time counts, of which torch's flip takes less


def reversed_tokens(x: Tensor, backend: str = "auto") -> Tensor:
    """x [B, T, ...] from the last token to the first, as a copy. Differentiable any number of times.

    backend: "triton" (CUDA tensors of float32, bfloat16 or float16), "torch", or "auto", which takes torch for less
    than 1 MiB and under torch.func's transforms. Raises ValueError for another one, and for what Triton cannot take.
    """
    if _chosen(backend, x, least=LEAST):
        from dsf.kernels.triton.layer.reversal import reverse

        return reverse(x)
    return x.flip(1)


def joined(
    ahead: Tensor, back: Tensor, x: Tensor | None = None, gain: Tensor | None = None, late: int = 0,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
    """ahead of the token `late` tokens before, plus back of reversed tokens, equally late, plus gain · x.

    ahead, back: [B, T, ...] of one shape, back from the last token to the first; both count as zero where there is no
    such token. x: of their shape [B, T, H, P], with gain [B, T, H], or None for both. late: from 0 to T. backend: as
    for `reversed_tokens`; "triton" needs all in one type. Returns a tensor of ahead's shape; a GPU's is rounded once.
    Raises ValueError for sizes that do not fit.
    """
    fits = ahead.shape == back.shape and ahead.dim() > 2 and (x is None) == (gain is None)
    if x is not None and gain is not None:
        fits = fits and x.dim() == 4 and x.shape == ahead.shape and gain.shape == x.shape[:3]
    if not fits or not 0 <= late <= ahead.shape[1]:
        given = [None if y is None else list(y.shape) for y in (ahead, back, x, gain)]
        raise ValueError(f"a sum of both directions of shapes {given}, {late} tokens late: sizes do not fit")
    if _chosen(backend, *(y for y in (ahead, back, x, gain) if y is not None)):
        from dsf.kernels.triton.layer.reversal import join

        return join(ahead, back, x, gain, late)
    total = _later(ahead, late) + _later(back, late).flip(1)
    return total if x is None or gain is None else torch.addcmul(total, x, gain.unsqueeze(-1))


def _later(x: Tensor, by: int) -> Tensor:
    return F.pad(x, (*(0, 0) * (x.dim() - 2), by, -by)) if by else x


def _chosen(backend: str, *given: Tensor, least: int = 0) -> bool:
    """True for the Triton kernels. least: bytes from which on "auto" takes them."""
    x, kinds = given[0], {y.dtype for y in given}
    fits = asks_for_kernels(backend, x) and kinds <= set(KINDS) and len(kinds) == 1 and x.dim() > 2 and x.numel() > 0
    if backend == "triton" and not fits:
        raise ValueError(
            f"the kernels of reversed tokens take [B, T, ...] of one type, float32, bfloat16 or float16; got "
            f"{[(list(y.shape), y.dtype) for y in given]}"
        )
    if backend == "auto":
        fits = fits and x.numel() * x.element_size() >= least
        fits = fits and (torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active())
    return fits
