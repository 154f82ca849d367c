"""The causal short convolution, depthwise: y_t = act(bias + Σ_j w_{K-1-j} x_{t-j}), with its state.

As a dynamical system its state is the last K - 1 inputs of each channel, and its transition shifts them: A is
nilpotent, A^(K-1) = 0. It obeys the laws of every recurrence: a whole sequence, pieces, single tokens and packed
sequences give the same results, with initial and final states.

On a GPU it takes one launch forward and two backward (dsf.kernels.triton.layer), without copies of x; elsewhere torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from dsf.kernels.operators import check_convolution

LARGEST = 8  # most taps of the GPU kernels
KINDS = (torch.float32, torch.bfloat16, torch.float16)  # what the kernels of layers take
TRITON = importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class Piece:
    """Consecutive channels that are returned as a separate tensor.

    width: channels. head: channels of a head, each of which is scaled to Euclidean length `scale` after the activation
    (x · scale / sqrt(sum x² + 1e-6)); 0 for no scaling.
    """

    width: int
    head: int = 0
    scale: float = 1.0


class Fused(NamedTuple):
    """What the kernels take beside x and states: weight [C, K], bias [C]; (SiLU; widths, heads, scales of pieces; how
    many later tokens an output reads)."""

    weight: Tensor
    bias: Tensor | None
    options: tuple[bool, list[int], list[int], list[float], int]


def fused(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, pieces: Sequence[Piece] | None
) -> Fused | None:
    """The call of `short_convolution` as the kernels take it, or None where torch runs it. Raises ValueError, too."""
    pieces = (Piece(x.shape[-1]),) if pieces is None else tuple(pieces)
    _check(x, activation, pieces)
    if not _chosen(x, weight, "auto", pieces):
        return None
    return Fused(weight, bias, (activation == "silu", *_columns(pieces), 0))


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str | None = "silu",
    pieces: Sequence[Piece] | None = None,
    backend: str = "auto",
    ahead: int = 0,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Convolve along time.

    x: [B, T, C], any strides. weight: [C, K] (w_{K-1} meets the newest input); bias: [C]. state: [B, C, K-1], the
    last inputs before x, oldest first; zeros if None. cu_seqlens: int [S+1], boundaries of sequences packed along T, on
    x's device; then B is 1 and states have S rows. activation: "silu" or None. pieces: how the channels are split; all
    in one by default. backend: "triton" (CUDA tensors, 2 to 8 taps, not float64), "torch", or "auto". ahead: how many
    later tokens y_t reads, 0 to K-1: Σ_j w_{K-1-j} x_{t+ahead-j}, zeros after the last; of whole sequences alone.

    Returns one y [B, T, width] for each piece, in x's dtype, and the state after x, [B or S, C, K-1], with `ahead` of
    no sequence, [0, C, K-1]. Raises ValueError for an unknown activation or backend, for pieces that are not the
    channels, for tensors of other sizes, and for `ahead` beside a state or cu_seqlens.
    """
    pieces = (Piece(x.shape[-1]),) if pieces is None else tuple(pieces)
    _check(x, activation, pieces)
    if ahead and (state is not None or cu_seqlens is not None or not 0 < ahead < weight.shape[-1]):
        raise ValueError(
            f"ahead={ahead}: whole sequences without states, from 0 to {weight.shape[-1] - 1} later tokens"
        )
    if _chosen(x, weight, backend, pieces):
        from dsf.kernels.triton.layer.convolution_ops import short_convolution as fused

        ys, final = fused(x, weight, bias, state, cu_seqlens, activation == "silu", *_columns(pieces), ahead)
        return tuple(ys), final
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y, final = _torch(F.pad(wide, (0, 0, 0, ahead)) if ahead else wide, weight, bias, state, cu_seqlens)
    y, final = (y[:, ahead:], final[:0]) if ahead else (y, final)
    y = F.silu(y) if activation == "silu" else y
    parts = [
        l2norm(part.unflatten(-1, (-1, p.head)), p.scale).flatten(-2) if p.head else part
        for part, p in zip(y.split([p.width for p in pieces], -1), pieces, strict=True)
    ]
    return tuple(part.to(x.dtype) for part in parts), final.to(x.dtype)


def short_convolution_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    activation: str | None = "silu",
    pieces: Sequence[Piece] | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[tuple[Tensor, ...], Tensor]:
    """`short_convolution` for one token a sequence, x [B, 1, C]; one small launch where no gradient is needed.

    in_place: the state is overwritten and returned. Raises ValueError where that is impossible: no state, not
    contiguous, of another dtype than x, or part of an autograd graph.
    """
    pieces = (Piece(x.shape[-1]),) if pieces is None else tuple(pieces)
    _check(x, activation, pieces)
    given = [y for y in (x, weight, bias, state) if y is not None]
    grad = torch.is_grad_enabled() and any(y.requires_grad for y in given)
    if in_place and (state is None or grad or not state.is_contiguous() or state.dtype != x.dtype):
        raise ValueError(
            "in_place=True overwrites the state of a short convolution: it needs one that is contiguous, of x's dtype, "
            "and no gradients (torch.no_grad())"
        )
    if grad or not _chosen(x, weight, backend, pieces):
        ys, final = short_convolution(x, weight, bias, state, None, activation, pieces, backend)
        if in_place and state is not None:
            return ys, state.copy_(final)
        return ys, final
    from dsf.kernels.triton.layer import convolution_ops as ops

    options = (activation == "silu", *_columns(pieces))
    if in_place and state is not None:
        y, new = ops.short_convolution_step_in_place(x, weight, bias, state, *options), state
    else:
        y, new = ops.short_convolution_step(x, weight, bias, state, *options)
    return (y,) if len(pieces) == 1 else y.split([p.width for p in pieces], -1), new


def l2norm(x: Tensor, scale: float = 1.0, eps: float = 1e-6) -> Tensor:
    """scale · x / sqrt(sum x² + eps) along the last axis, computed in float32 at least. x: [..., N] -> [..., N]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (scale * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps))).to(x.dtype)


def _columns(pieces: tuple[Piece, ...]) -> tuple[list[int], list[int], list[float]]:
    """The pieces' (widths, heads, scales), as the operator takes them."""
    return [p.width for p in pieces], [p.head for p in pieces], [float(p.scale) for p in pieces]


def _check(x: Tensor, activation: str | None, pieces: tuple[Piece, ...]) -> None:
    if activation not in ("silu", None):
        raise ValueError(f"activation is {activation!r}; a short convolution has 'silu' or None")
    widths = [p.width for p in pieces]
    if sum(widths) != x.shape[-1] or any(p.head and p.width % p.head for p in pieces):
        raise ValueError(f"pieces of {widths} channels, in whole heads, do not make the {x.shape[-1]} channels of x")


def asks_for_kernels(backend: str, x: Tensor) -> bool:
    """Whether a call on x asks for Triton kernels. Raises ValueError for an unknown backend."""
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend is {backend!r}; there are 'auto', 'torch' and 'triton'")
    return backend == "triton" or (backend == "auto" and x.is_cuda and TRITON)


def _chosen(x: Tensor, weight: Tensor, backend: str, pieces: tuple[Piece, ...]) -> bool:
    """True for the Triton kernels. Raises where backend='triton' was asked for and they cannot run."""
    taps, heads = weight.shape[-1], {p.head for p in pieces} - {0}
    fits = asks_for_kernels(backend, x) and 2 <= taps <= LARGEST and x.dtype in KINDS and x.numel() > 0
    fits = fits and all(h & (h - 1) == 0 and h <= 512 for h in heads) and len(heads) < 2
    if not fits and backend == "triton":
        raise ValueError(
            f"the fused short convolution takes 2 to {LARGEST} taps, float32, bfloat16 or float16, and heads of one "
            f"power of two; got {taps} taps, {x.dtype}, heads of {sorted(heads)}"
        )
    return fits


def _torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y before its activation [B, T, C], and the state after x."""
    check_convolution(x, weight, bias, state, cu_seqlens)
    (batch, _, channels), past = x.shape, weight.shape[-1] - 1
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = x.new_zeros(sequences, channels, past) if state is None else state.to(x.dtype)
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if cu_seqlens is None:
        padded = torch.cat([state.mT, x], dim=1)
        last = padded[:, padded.shape[1] - past :].mT
        return _convolved(padded, weight, bias), last.clone(memory_format=torch.contiguous_format)
    padded, output, final = _packed(x, state, cu_seqlens.to(x.device, torch.long))
    return _convolved(padded, weight, bias).index_select(1, output), final


def _convolved(padded: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y [B, T, C] of padded [B, K - 1 + T, C]."""
    few = padded.device.type == "cpu" and type(padded) is Tensor and weight.shape[1] <= LARGEST
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if few and not (traced or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()):
        found: Tensor = _Taps.apply(padded, weight, bias)
        return found
    return F.conv1d(padded.mT, weight.unsqueeze(1), bias, groups=weight.shape[0]).mT


class _Taps(torch.autograd.Function):
    """A tap at a time, over channels that lie side by side: a third to two thirds of the time of torch's convolution on
    a CPU, forward and backward."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        taps = weight.shape[1]
        tokens = padded.shape[1] - taps + 1
        y = padded[:, :tokens] * weight[:, 0]
        for j in range(1, taps):
            y.addcmul_(padded[:, j : j + tokens], weight[:, j])
        ctx.save_for_backward(padded if ctx.needs_input_grad[1] else None, weight)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        padded, weight = ctx.saved_tensors
        (batch, tokens, channels), taps = dy.shape, weight.shape[1]
        dx, dw, db = None, None, None
        if ctx.needs_input_grad[0]:
            dx = dy.new_zeros(batch, tokens + taps - 1, channels)
            for j in range(taps):
                dx[:, j : j + tokens].addcmul_(dy, weight[:, j])
        if padded is not None:
            dw = torch.stack([(dy * padded[:, j : j + tokens]).sum((0, 1)) for j in range(taps)], 1)
        if ctx.needs_input_grad[2]:
            db = dy.sum((0, 1))
        return dx, dw, db


def _packed(x: Tensor, state: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(each sequence after its K-1 inputs of state, [1, T + S(K-1), C]; the places of outputs; final states)."""
    tokens, (sequences, channels, past) = x.shape[1], state.shape
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    column = torch.arange(tokens, device=x.device)
    # Sequence s begins at place cu[s] + s(K-1) of the padded row; outputs land K-1 before tokens.
    output = column + (torch.searchsorted(cu_seqlens, column, right=True) - 1) * past
    begin = cu_seqlens[:-1] + torch.arange(sequences, device=x.device) * past
    window = begin.unsqueeze(1) + torch.arange(past, device=x.device)  # [S, K-1]
    padded = x.new_zeros(1, tokens + sequences * past, channels)
    padded = padded.index_copy(1, window.flatten(), state.mT.reshape(1, -1, channels))
    padded = padded.index_copy(1, output + past, x)
    last = padded[0].index_select(0, (window + lengths.unsqueeze(1)).flatten())
    return padded, output, last.view(sequences, past, channels).mT.contiguous()
