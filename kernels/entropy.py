"""Cross entropy of rows of logits with its gradient: on a GPU one launch, which reads the logits twice."""

from __future__ import annotations

import torch
from torch import Tensor

from dsf.kernels.convolution import KINDS, asks_for_kernels


def row_entropies(
    logits: Tensor, targets: Tensor, divisor: Tensor, ignored: int = -100, gradient: bool = True, backend: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """(each row's cross entropy with its target in nats, the gradient of their sum over `divisor` by the logits).

    logits: [R, V]; targets: [R] int64, of which those that are `ignored` have entropy and gradient 0; divisor: [],
    a float. Entropies [R] are float32 at least, the gradient [R, V] has the logits' type, or is None unless asked for.
    backend: "triton" (no float64), "torch", or "auto": Triton on a GPU, not under torch.compile, which fuses by itself.
    With a target outside of the vocabulary Triton's entropy is NaN; torch raises an error. Raises ValueError for sizes
    that do not fit and an unknown backend.
    """
    if logits.dim() != 2 or targets.shape != logits.shape[:1] or divisor.shape:
        given = [list(x.shape) for x in (logits, targets, divisor)]
        raise ValueError(f"entropies of logits, targets and a divisor of shapes {given}: sizes do not fit")
    if launched(logits, backend):
        from dsf.kernels.triton.layer.entropy import entropies

        found = entropies(logits, targets, divisor, ignored, gradient)
        return found[0], found[1] if gradient else None
    logs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    shown, place = (targets != ignored).unsqueeze(1), targets.masked_fill(targets == ignored, 0).unsqueeze(1)
    own = torch.where(shown, -logs.gather(1, place), 0.0).squeeze(1)  # 0 where the logits are not finite, too
    if not gradient:
        return own, None
    slope = logs.exp_().scatter_add_(1, place, -torch.ones_like(place, dtype=logs.dtype))
    slope.masked_fill_(~shown, 0.0)
    return own, torch.mul(slope, 1 / divisor.to(slope.dtype), out=torch.empty_like(logits))  # rounded once


def launched(logits: Tensor, backend: str = "auto") -> bool:
    """True for the Triton kernel. Raises where backend='triton' was asked for and it cannot run."""
    asked, fits = asks_for_kernels(backend, logits), logits.dtype in KINDS
    if backend == "triton" and not fits:
        raise ValueError(f"the fused entropies take float32, bfloat16 or float16, got {logits.dtype}")
    alone = not torch.compiler.is_compiling() and not hasattr(logits, "device_mesh")
    return asked and (backend == "triton" or (fits and logits.numel() > 0 and alone))
