"""RMS norm and gate: y = norm(x) · weight · act(gate), or norm(x · act(gate)) · weight, or the gate alone; or the norm
of x + other, and the sum.

On a GPU it takes one launch forward and two backward (dsf.kernels.triton.layer), without copies of x and gate;
elsewhere torch. Both compute in float32 at least and round once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsf.kernels.convolution import KINDS, asks_for_kernels
from dsf.kernels.product import few, linear, older

LARGEST = 16384  # most numbers of a group in the GPU kernels
ACTIVATIONS = ("silu", "sigmoid", "gelu")  # gelu: by tanh; the kernels know them by their places


def gated_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    gate: Tensor | None = None,
    groups: int = 1,
    gate_first: bool = False,
    activation: str = "silu",
    eps: float = 1e-5,
    backend: str = "auto",
    dtype: torch.dtype | None = None,
    then: Tensor | None = None,
) -> Tensor:
    """x / sqrt(mean x² + eps) · weight over the last axis in `groups` equal parts, gated.

    x, gate: [..., D] with the same shape, any strides; weight: [D]. gate_first: norm(x · act(gate)) as Mamba-2 has it,
    instead of norm(x) · act(gate) (Gated DeltaNet); activation: "silu", "sigmoid" or "gelu" (by tanh). backend:
    "triton" (CUDA tensors, not float64), "torch", or "auto". dtype: of the result, x's by default. Returns a tensor of
    x's shape, contiguous on a GPU.

    then: the weight [out, D] or [out, H · D] of a linear map without bias, of the result's type: what the map makes of
    the result (of the last two axes as one) is returned instead, [..., out]. On a GPU the result is then not kept for
    gradients; the launch that computes those of x and gate makes it once more. For few tokens without gradients one
    launch makes the result and the map (dsf.kernels.product), which may read a Parameter before the launch before has
    ended: that must not write it. Raises ValueError for sizes that do not fit and unknown names.
    """
    if x.shape[-1] % groups or (weight is not None and weight.shape != x.shape[-1:]):
        sizes = "no weight" if weight is None else f"a weight {list(weight.shape)}"
        raise ValueError(f"a norm over {x.shape[-1]} numbers in {groups} groups with {sizes}: sizes do not fit")
    size, dtype = x.shape[-1] // groups, x.dtype if dtype is None else dtype
    if _chosen(x, gate, activation, backend, size):
        return _fused(x, gate, weight, then, size, True, gate_first, ACTIVATIONS.index(activation), eps, dtype)
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if gate is not None and gate_first:
        y = y * activated(gate.to(y.dtype), activation)
    y = F.rms_norm(y.unflatten(-1, (groups, size)), (size,), eps=eps).flatten(-2)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if gate is not None and not gate_first:
        y = y * activated(gate.to(y.dtype), activation)
    return _mapped(y.to(dtype), then)


def added_rms_norm(
    x: Tensor,
    other: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    backend: str = "auto",
    dtype: torch.dtype | None = None,
    then: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(x + other, the RMS norm of that sum over the last axis times weight): a residual stream and what a block reads.

    x, other: [..., D] of the same shape, any strides and types; the sum has the type that torch gives it, and is
    rounded before the norm. weight, eps, backend, dtype (the sum's by default), then, errors: as for `gated_rms_norm`.
    On a GPU one launch, and backward two, which also add the sum's gradient to the norm's.
    """
    if x.shape != other.shape or (weight is not None and weight.shape != x.shape[-1:]):
        sizes = "no weight" if weight is None else f"a weight {list(weight.shape)}"
        raise ValueError(f"a norm of {list(x.shape)} + {list(other.shape)} with {sizes}: sizes do not fit")
    dtype = torch.promote_types(x.dtype, other.dtype) if dtype is None else dtype
    if _chosen(x, other, "silu", backend, x.shape[-1]):
        if then is not None and dtype == then.dtype and few(x, then):
            from dsf.kernels.triton.layer.product import added_row_product

            total, mapped = added_row_product(x, other, then, None, weight, eps, older(then, weight))
            return total, mapped.view(*x.shape[:-1], then.shape[0])
        from dsf.kernels.triton.layer.norm_ops import added_norm

        total, normal = added_norm(x, other, weight, eps, dtype)
        return total, _mapped(normal, then)
    total = x + other
    return total, gated_rms_norm(total, weight, eps=eps, backend="torch", dtype=dtype, then=then)


def added_norm_and_maps(
    x: Tensor, other: Tensor, weight: Tensor | None, matrix: Tensor, bias: Tensor | None = None,
    sigmoid: tuple[int, int] = (0, 0), eps: float = 1e-5, backend: str = "auto", ahead: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(x + other, the norm of that, what a linear map makes of the norm), for few tokens on a GPU by one launch.

    The first two as by `added_rms_norm`, of the sum's type; matrix, bias, sigmoid, ahead: as for
    `dsf.kernels.product.linear`.
    """
    chosen = _chosen(x, other, "silu", backend, x.shape[-1])
    kind = torch.promote_types(x.dtype, other.dtype)
    fits = kind == matrix.dtype and few(x, matrix)
    fits = fits and (bias is None or (bias.dtype == matrix.dtype and bias.shape == matrix.shape[:1]))
    if not (chosen and fits):
        total, normal = added_rms_norm(x, other, weight, eps, backend)
        return total, normal, linear(normal, matrix, backend, ahead, bias, sigmoid)
    from dsf.kernels.triton.layer.product import added_row_product

    bias = None if bias is None else bias.contiguous()
    early = ahead and older(matrix, weight, bias)
    total, made, normal = added_row_product(x, other, matrix, bias, weight, eps, early, True, *sigmoid)
    return total, normal, made.view(*x.shape[:-1], matrix.shape[0])


def gated(
    x: Tensor, gate: Tensor, activation: str = "silu", backend: str = "auto", then: Tensor | None = None
) -> Tensor:
    """x · act(gate), for x and gate [..., D] of the same shape, any strides; otherwise as `gated_rms_norm`."""
    if _chosen(x, gate, activation, backend, 1):
        return _fused(x, gate, None, then, x.shape[-1], False, False, ACTIVATIONS.index(activation), 0.0, x.dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    return _mapped((x.to(wide) * activated(gate.to(wide), activation)).to(x.dtype), then)


def _fused(x: Tensor, gate: Tensor | None, weight: Tensor | None, then: Tensor | None, *options: Any) -> Tensor:
    if then is not None and options[-1] == then.dtype and few(x, then):
        from dsf.kernels.triton.layer.product import row_product

        found: Tensor = row_product(x, then, None, gate, weight, *options[:-1], older(then, weight))
        return found.view(*x.shape[: -1 if x.shape[-1] == then.shape[1] else -2], then.shape[0])
    from dsf.kernels.triton.layer.norm_ops import gated_norm, mapped_norm

    given = (x, gate, weight)
    return gated_norm(*given, *options) if then is None else mapped_norm(options, *given, then)


def _mapped(y: Tensor, then: Tensor | None) -> Tensor:
    if then is None:
        return y
    return F.linear(y if y.shape[-1] == then.shape[1] else y.flatten(-2), then)


def activated(gate: Tensor, activation: str) -> Tensor:
    """act(gate), one of ACTIVATIONS."""
    if activation == "gelu":
        return F.gelu(gate, approximate="tanh")
    return F.silu(gate) if activation == "silu" else torch.sigmoid(gate)


def _chosen(x: Tensor, gate: Tensor | None, activation: str, backend: str, size: int) -> bool:
    """True for the Triton kernels. Raises where backend='triton' was asked for and they cannot run."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; gates have 'silu', 'sigmoid' or 'gelu'")
    if gate is not None and gate.shape != x.shape:
        raise ValueError(f"a gate {list(gate.shape)} for numbers {list(x.shape)}: shapes must be the same")
    kinds = [x.dtype] if gate is None else [x.dtype, gate.dtype]
    fits = asks_for_kernels(backend, x) and size <= LARGEST and x.numel() > 0 and all(k in KINDS for k in kinds)
    if not fits and backend == "triton":
        raise ValueError(
            f"the fused norm takes float32, bfloat16 or float16 and groups of at most {LARGEST}; got {kinds}, {size}"
        )
    return fits
