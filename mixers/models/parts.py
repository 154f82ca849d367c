"""The parts of a model around a mixer: RMS norm, SwiGLU, cross entropy.

On CUDA they run liger-kernel's kernels where it is installed, else the norm and the gate of this package's layers.
Under torch.compile, which fuses by itself, and on a CPU they are torch's.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dsf import Packing
from dsf.call.calls import is_transformed
from dsf.kernels.entropy import launched, row_entropies
from dsf.kernels.norm import added_norm_and_maps, added_rms_norm, gated, gated_rms_norm
from dsf.kernels.operators import refuse_second_order
from dsf.kernels.product import few
from dsf.language.errors import InputError
from dsf.mixers._beside import Made, hooked, lay, outputs, parts_of, weight_for, whole_of

if TYPE_CHECKING:
    from dsf.parallel import Cuts

LIGER_NORM = ("rms_norm", "LigerRMSNormFunction")
IGNORED = -100  # the label of tokens without a target
PIECE = 1 << 28  # bytes of float32 logits that are in memory at once


@functools.cache
def _liger(module: str, name: str) -> Any:
    """A function of liger-kernel, or None where it is not installed."""
    try:
        return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)
    except (ImportError, AttributeError):
        return None


def _fuses(*tensors: Tensor) -> bool:
    """Whether a kernel is launched for these: on a GPU, whole, and not under torch.compile, which fuses by itself."""
    return not torch.compiler.is_compiling() and all(x.is_cuda and not hasattr(x, "device_mesh") for x in tensors)


def _kernel(module: str, name: str, x: Tensor) -> Any:
    """A kernel of liger-kernel for x, or None where nothing is launched or it is not installed."""
    return _liger(module, name) if _fuses(x) else None


class RMSNorm(nn.RMSNorm):
    """torch's RMS norm over the last axis. On CUDA it is one launch, which writes the dtype that matrix products take
    under autocast, and which can also add another tensor to x first."""

    def __init__(self, width: int, eps: float):
        super().__init__(width, eps=eps)

    def cut(self, to: Cuts) -> None:
        """Declare the norm whole on every rank."""
        to.whole()

    def forward(self, x: Tensor, other: Tensor | None = None, then: Tensor | None = None) -> Any:
        """The norm of x [..., width], in autocast's dtype under autocast.

        other: of x's shape. With it: (x + other, the norm of this sum). then: the weight of a linear map; with it the
        norm's output after that map takes the norm's place.
        """
        dtype = self._result(x)
        if other is not None:
            assert self.eps is not None
            return added_rms_norm(x, other, self.weight, self.eps, dtype=self._result(x, other), then=then)
        kernel = _kernel(*LIGER_NORM, x)
        if kernel is not None:
            # offset 0, float32 as Llama's, not in place (the gradient of x may be needed elsewhere)
            return kernel.apply(x, self.weight, self.eps, 0.0, "llama", False).to(dtype)
        if _fuses(x, self.weight):
            assert self.eps is not None
            return gated_rms_norm(x, self.weight, eps=self.eps, dtype=dtype)
        return super().forward(x).to(dtype)

    def _result(self, *given: Tensor) -> torch.dtype:
        kind = given[0].device.type
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return functools.reduce(torch.promote_types, (x.dtype for x in given), self.weight.dtype)

    def added(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """(x + other, the norm of this sum): one launch on CUDA, except with liger-kernel or hooks on the norm."""
        if self.sums(x, other):
            return self(x, other)
        total = x + other
        return total, self(total)

    def added_ahead(
        self, x: Tensor, other: Tensor, layer: Any
    ) -> tuple[Tensor, Tensor, Made | None]:  # fmt: skip
        """(x + other, its norm, the outputs of the layer's first maps of the norm). The last is None unless one launch
        computes all of it for a token on CUDA (`dsf.mixers._beside.handing`)."""
        token = x.shape[-2] == 1 and not torch.is_grad_enabled() and not hooked(self)
        first = getattr(layer, "first_ahead", None) if token else None
        found = first(x) if first is not None and self.sums(x, other) else None
        if found is None or not few(x, found[1]) or self._result(x, other) != x.dtype:
            return (*self.added(x, other), None)
        maps, matrix, bias, sigmoid = found
        known = {"bias": bias, "sigmoid": sigmoid, "eps": self.eps, "ahead": True}
        total, normal, made = added_norm_and_maps(x, other, self.weight, matrix, **known)
        return total, normal, Made(maps, parts_of(made, maps))

    def sums(self, *given: Tensor) -> bool:
        """Whether `added` of these tensors is one launch."""
        alone = not (self._forward_hooks or self._forward_pre_hooks) and _kernel(*LIGER_NORM, given[0]) is None
        return alone and _fuses(*given, self.weight)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases. Source: Shazeer (arXiv 2002.05202)."""

    def __init__(self, d_model: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(d_model, hidden, bias=False)
        self.up_proj = nn.Linear(d_model, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, d_model, bias=False)
        lay(self.maps_beside())

    def maps_beside(self) -> list[nn.Module]:
        """The maps of x."""
        return [self.gate_proj, self.up_proj]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """torch's `_apply`; the weights that a token passes at once stay beside each other."""
        super()._apply(fn, recurse)
        lay(self.maps_beside())
        return self

    def cut(self, to: Cuts) -> None:
        """Declare a rank's part of the hidden channels (`dsf.parallel.HeadShard`)."""
        to.rows(self.gate_proj)
        to.rows(self.up_proj)
        to.summed(self.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., d_model] -> [..., d_model]."""
        found = outputs(x, self.maps_beside())
        return self._down(*((self.gate_proj(x), self.up_proj(x)) if found is None else found))

    def after(self, norm: RMSNorm, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """(x + other, the MLP's output for the norm of this sum). On a GPU one launch computes a decoded token's sum,
        norm, gate and up projection."""
        maps = self.maps_beside()
        whole = None if hooked(self) or not norm.sums(x, other) else whole_of(x, maps)
        if whole is None:
            x, y = norm.added(x, other)
            return x, self(y)
        x, made = norm(x, other, whole)
        return x, self._down(*parts_of(made, maps))

    def _down(self, gate: Tensor, up: Tensor) -> Tensor:
        kernel = _kernel("swiglu", "LigerSiLUMulFunction", gate)
        if kernel is not None:
            return self.down_proj(kernel.apply(gate, up))
        if not _fuses(gate, up):
            return self.down_proj(F.silu(gate) * up)
        down = weight_for(self.down_proj, gate)
        return self.down_proj(gated(up, gate)) if down is None else gated(up, gate, then=down)


def check_range(name: str, ids: Tensor, embedding: nn.Module, ignored: int | None = None) -> None:
    """Raise InputError for token ids outside the vocabulary; on a CPU alone, as reading them elsewhere waits for the
    device. ignored: a number that is allowed, too."""
    size = getattr(embedding, "num_embeddings", None)
    plain = type(ids) is Tensor and ids.device.type == "cpu" and ids.numel() > 0
    if size is None or not plain or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return
    if _get_current_dispatch_mode() is not None or is_transformed((ids,)):  # tracers, which see no numbers
        return
    low, high = (ids if ignored is None else torch.where(ids == ignored, 0, ids)).aminmax()
    for found in (int(low), int(high)):
        if not 0 <= found < size:
            raise InputError(f"{name} has the token {found}, and the vocabulary is 0 to {size - 1}")


def check_labels(labels: Tensor | None, shape: torch.Size, embedding: nn.Module) -> None:
    """Raise InputError for labels that are no integers, of another shape than ids, or outside the vocabulary."""
    if labels is not None and labels.shape != shape:
        raise InputError(f"labels: expected the shape of ids, {tuple(shape)}, got {tuple(labels.shape)}")
    if labels is not None and (labels.is_floating_point() or labels.dtype == torch.bool):
        raise InputError(f"labels: expected integers [B, T], got {labels.dtype}")
    if labels is not None:
        check_range("labels", labels, embedding, IGNORED)


def check_ids(ids: Tensor, labels: Tensor | None, embedding: nn.Module) -> None:
    """`check_range` of ids, and `check_labels` beside them."""
    check_range("ids", ids, embedding)
    check_labels(labels, ids.shape, embedding)


def next_labels(labels: Tensor, cu_seqlens: Tensor | Packing | None = None) -> Tensor:
    """Each token's target, int64 [B, T]: the next label of labels [B, T], and -100 for the last token of a sequence.

    cu_seqlens: boundaries [S + 1] of sequences packed along T, or a dsf.Packing; then B is 1.
    """
    after = F.pad(labels[:, 1:].long(), (0, 1), value=IGNORED)
    if isinstance(cu_seqlens, Packing):
        cu_seqlens = cu_seqlens.on(labels.device)
    if cu_seqlens is None or cu_seqlens.shape[0] <= 2:
        return after
    last = cu_seqlens[1:-1].to(after.device, torch.long) - 1
    # Empty sequences at the front have no last token; their index wraps around to one that is ignored anyway.
    return after.index_fill(1, last % after.shape[1], IGNORED)


def cross_entropy(logits: Tensor, targets: Tensor, count: Any = None) -> Tensor:
    """The mean cross entropy in nats over targets other than -100; 0 if there are none. logits: [B, T, V]. targets:
    [B, T].

    count: what the sum is divided by in place of their number, such as that of several batches whose gradients add up.
    """
    counted = (targets != IGNORED).sum().clamp(min=1) if count is None else count
    if launched(logits) and not is_transformed((logits,)):
        number = counted if isinstance(counted, Tensor) else logits.new_full((), counted, dtype=torch.float32)
        divisor = number.to(logits.device, torch.float32).reshape(())
        return _MeanEntropy.apply(logits.flatten(0, 1), targets.flatten(), divisor)
    return _total_entropy(logits.flatten(0, 1), targets.flatten()) / counted


def _total_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of rows' cross entropies, by torch."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="sum")


class _MeanEntropy(torch.autograd.Function):
    """That sum over a divisor, by a kernel: nothing but the logits is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, divisor: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets, divisor)
        return row_entropies(logits, targets, divisor, IGNORED, False)[0].sum() / divisor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        logits, targets, divisor = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return row_entropies(logits, targets, divisor / grad, IGNORED)[1], None, None
        loss = _total_entropy(logits, targets) / divisor  # of which there are second derivatives
        return torch.autograd.grad(loss, logits, grad, create_graph=True)[0], None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, count: Any = None) -> Tensor:
    """`cross_entropy` of hidden @ weight.T, computed for a piece of the tokens at a time.

    hidden: [B, T, D]. weight: [V, D]. targets: [B, T]. count: as in `cross_entropy`. The logits of all tokens are never
    in memory together, so the forward pass also computes the gradients. There are no second derivatives.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        lower = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(lower), weight.to(lower)
    kernel = _kernel("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction", hidden)
    if kernel is not None:
        found = kernel.apply(hidden.flatten(0, 1), weight, targets.flatten())
        loss: Tensor = found[0] if isinstance(found, tuple) else found
    else:
        loss = _Pieces.apply(hidden.flatten(0, 1), weight, targets.flatten())
    return loss if count is None else loss * (targets != IGNORED).sum().clamp(min=1) / count


class _Pieces(torch.autograd.Function):
    """Cross entropy of a linear map and its gradients, both computed in the forward pass.

    There nobody knows yet by what GradScaler multiplies the loss so that gradients keep their digits in float16. So in
    float16 the backward pass divides them by a power of two near the number of targets, `unit`, and sums over tokens
    are of few and small terms.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        needed, half = ctx.needs_input_grad, hidden.dtype == torch.float16
        counted = (targets != IGNORED).sum().clamp(min=1).float()
        total = torch.zeros((), device=hidden.device, dtype=torch.promote_types(hidden.dtype, torch.float32))
        d_hidden = torch.empty_like(hidden) if needed[0] else None
        d_weight = torch.zeros(weight.shape, device=weight.device, dtype=total.dtype) if needed[1] else None
        rows = max(1, PIECE // (4 * weight.shape[0]))
        rows, share = (min(rows, 4096), 1 / 64) if half else (rows, 1.0)
        unit = counted.log2().floor().exp2() if half else torch.ones_like(counted)
        with torch.autocast(hidden.device.type, enabled=False):
            for piece in range(int(-(-hidden.shape[0] // rows))):  # in a compiled graph a constant, the tokens are none
                begin = piece * rows
                part, target = hidden[begin : begin + rows], targets[begin : begin + rows]
                own, slope = row_entropies(part @ weight.T, target, counted / unit, IGNORED, any(needed[:2]))
                total += own.sum()
                if slope is not None and d_hidden is not None:
                    torch.matmul(slope, weight, out=d_hidden[begin : begin + rows])
                if slope is not None and d_weight is not None:
                    d_weight += slope.T @ (part * share if half else part)
        kept = (d_hidden, d_weight if d_weight is None or half else d_weight.to(weight.dtype))
        ctx.save_for_backward(*kept, unit)
        ctx.share, ctx.kind = share, weight.dtype
        return total / counted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        refuse_second_order("linear_cross_entropy; cross_entropy of the logits (fused_loss=False) has them")
        d_hidden, d_weight, unit = ctx.saved_tensors
        factor = grad.reshape(1) / unit
        return (
            None if d_hidden is None else _times(d_hidden, factor, d_hidden.dtype),
            None if d_weight is None else _times(d_weight, factor / ctx.share, ctx.kind),
            None,
        )


def _times(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x times a factor [1] of a wider type, rounded once."""
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))
