"""Products of a matrix with few rows: the linear maps of a decoded token, which take as long as their weights are read.

`then` of dsf.kernels.norm makes such a product behind a norm, a gate or a sum. On a GPU each is one launch, which asks
for the weights before the launch that makes x has ended (dsf.kernels.triton.layer.product); elsewhere torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsf.kernels.convolution import KINDS, TRITON

ROWS = 4  # most rows; for more, products by tensor cores are faster
LARGEST = 16384  # most numbers of a row
NARROW = 16  # most rows of a block


def few(x: Tensor, matrix: Tensor) -> bool:
    """Whether x [..., D] or [..., H, D] is what the kernel multiplies with a matrix [out, D] or [out, H · D]: few rows
    of its type, no gradient is wanted, and nothing traces or casts."""
    width = matrix.shape[1]
    if torch.is_grad_enabled() or not 0 < x.numel() <= ROWS * width <= ROWS * LARGEST:
        return False
    if x.shape[-1] != width and x.shape[-2:].numel() != width:
        return False
    fits = x.dtype == matrix.dtype and x.dtype in KINDS and matrix.is_contiguous() and 0 < matrix.numel() < 2**31
    return fits and _left_alone(x, matrix)


def _left_alone(*tensors: Tensor) -> bool:
    """Whether no gradient is wanted, and nothing traces, casts or spreads over ranks what is done to these tensors."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    casts = torch.is_autocast_enabled("cuda" if tensors[0].is_cuda else "cpu")
    return not (casts or any(hasattr(x, "device_mesh") for x in tensors))


def older(*given: Tensor | None) -> bool:
    """Whether a kernel may read all these before the launch before it has ended: parameters of modules, which are not
    what some other launch has just made."""
    return all(x is None or (isinstance(x, nn.Parameter) and x.is_contiguous()) for x in given)


def takes(x: Tensor, matrix: Tensor) -> bool:
    """`few`, on a GPU."""
    return x.is_cuda and TRITON and few(x, matrix)


def multiplies(x: Tensor, matrix: Tensor, bias: Tensor | None = None, backend: str = "auto") -> bool:
    """Whether `linear` takes the kernel."""
    taken = few(x, matrix) if backend == "triton" else backend == "auto" and takes(x, matrix)
    fits = bias is None or (bias.dtype == matrix.dtype and bias.is_contiguous() and bias.shape == matrix.shape[:1])
    return taken and fits and x.shape[-1] == matrix.shape[1]


def linear(
    x: Tensor, matrix: Tensor, backend: str = "auto", ahead: bool = False, bias: Tensor | None = None,
    sigmoid: tuple[int, int] = (0, 0),
) -> Tensor:  # fmt: skip
    """x [..., D] · matrixᵀ + bias for a matrix [out, D], bias [out]: [..., out]. By the kernel sums are in float32,
    rounded once.

    backend: "triton" (few rows, no gradients; also in Triton's interpreter), "torch", or "auto". ahead: the launch
    before this one writes neither matrix nor bias (`older`). sigmoid: the first output that passes one, and the one
    after the last.
    """
    low, high = sigmoid
    if not multiplies(x, matrix, bias, backend):
        y = F.linear(x, matrix, bias)
        return y if low == high else torch.cat([y[..., :low], y[..., low:high].sigmoid(), y[..., high:]], -1)
    from dsf.kernels.triton.layer.product import row_product

    early = ahead and older(matrix, bias)
    found: Tensor = row_product(x, matrix, bias, None, None, matrix.shape[1], False, False, 0, 0.0, early, low, high)
    return found.view(*x.shape[:-1], matrix.shape[0])


def by_blocks(xs: Sequence[Tensor], weights: Sequence[Tensor], backend: str = "auto") -> Tensor:
    """Each x [..., C] times a matrix of its own, whose blocks [C / W, W, W] (outputs first) are its weight: the results
    side by side, [..., C · maps]. By the kernel sums are in float32, rounded once; it has no gradients.

    backend: as for `linear`; "auto" takes the kernel on a GPU for narrow blocks where no gradient is wanted.
    """
    kinds = {y.dtype for y in (*xs, *weights)}
    fits = len(kinds) == 1 and kinds <= set(KINDS) and weights[0].shape[-1] <= NARROW and xs[0].numel() > 0
    wanted = backend == "triton" or (backend == "auto" and xs[0].is_cuda and TRITON)
    if wanted and fits and _left_alone(*xs, *weights):
        from dsf.kernels.triton.layer.product import block_products

        found: Tensor = block_products(list(xs), list(weights))
        return found.view(*xs[0].shape[:-1], -1)
    made = [torch.einsum("...gi,goi->...go", x.unflatten(-1, w.shape[:2]), w) for x, w in zip(xs, weights, strict=True)]
    return torch.cat([y.flatten(-2) for y in made], -1)
