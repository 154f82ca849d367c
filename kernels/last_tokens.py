"""Causal attention of the last T of S tokens, by torch's kernels for all earlier keys and for T own ones.

A query's weights are the softmax of both sets of keys together: with z the logarithm of a set's sum of exponentials,
y = y_own + sigmoid(z_earlier - z_own) (y_earlier - y_own), and each set's backward pass, given y and the common
z = log(exp z_earlier + exp z_own), finds its part of the gradients (Rabe & Staats 2021, arXiv:2112.05682; Liu et al.
2023, ring attention, arXiv:2310.01889). Torch has neither z nor that backward pass in public, hence its aten operators.
Its public causal attention of fewer queries than keys runs on a slower kernel than that of as many (docs/parallel.md),
and stores a mask on a CPU.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsf.kernels.operators import refuse_second_order, returned

PAIRS = 1 << 20  # on a CPU, fewest queries times keys: for fewer, a mask is as fast or faster
# On a GPU: cuDNN has no backward pass for single queries, and for few tokens a second launch costs what it gains.
FEWEST, EARLIER = 64, 1024  # tokens, earlier keys


class _Part(NamedTuple):
    """Attention to one set of keys. y: [B, H, T, P], z: [B, H, T], kept: what else its backward pass reads."""

    y: Tensor
    z: Tensor
    kept: tuple[Any, ...]


def fits(a: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attend` takes these operands. a: [B, H, T, N], k: [B, H, S, N], v: [B, H, S, P]."""
    tokens, places, width = a.shape[2], k.shape[2], a.shape[3]
    if not 0 < tokens < places or width != v.shape[3] or not a.numel():
        return False
    if a.device.type == "cpu":
        return tokens * places >= PAIRS
    enough = tokens >= FEWEST and places - tokens >= EARLIER
    return enough and a.dtype.itemsize == 2 and width % 8 == 0 and width <= 128 and _has_cudnn(a)


def _has_cudnn(a: Tensor) -> bool:
    """Whether torch's cuDNN attention runs here: a CUDA GPU from Hopper on, and no graph that is being traced."""
    return type(a) is Tensor and a.is_cuda and torch.version.cuda is not None and _wanted() and _supported(a.device)


def _wanted() -> bool:
    """Torch's own rule: cuDNN's attention is not switched off, and gradients need not be the same bits every time."""
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.backends.cuda.cudnn_sdp_enabled() and not strict


@functools.cache
def _supported(device: torch.device) -> bool:
    known = hasattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward")
    if not known or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    x = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    given = torch.backends.cuda.SDPAParams(x, x, x, None, 0.0, False, False)
    return torch.backends.cuda.can_use_cudnn_attention(given)


def attend(a: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """y [B, H, T, P] of operands that `fits` took; differentiable once."""
    return _Attention.apply(a, k, v, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        before = k.shape[2] - a.shape[2]
        earlier = _part(a, k[:, :, :before], v[:, :, :before], False, scale)
        own = _part(a, k[:, :, before:], v[:, :, before:], True, scale)
        share = (earlier.z - own.z).sigmoid().unsqueeze(-1)
        y = torch.lerp(own.y.to(share.dtype), earlier.y.to(share.dtype), share).to(own.y.dtype)
        ctx.save_for_backward(a, k, v, y, torch.logaddexp(earlier.z, own.z))
        ctx.scale, ctx.earlier, ctx.own = scale, earlier.kept, own.kept
        return returned(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        refuse_second_order("torch's fused attention")
        a, k, v, y, z = ctx.saved_tensors
        before = k.shape[2] - a.shape[2]
        cut = (slice(None, before), ctx.earlier, False), (slice(before, None), ctx.own, True)
        parts = [_back(dy, a, k[:, :, at], v[:, :, at], _Part(y, z, kept), own, ctx.scale) for at, kept, own in cut]
        (da, *_), (own_da, *_) = parts
        dk, dv = (torch.cat([part[i] for part in parts], dim=2) for i in (1, 2))
        return da.add_(own_da), dk, dv, None


def _part(a: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> _Part:
    if a.device.type == "cpu":
        y, z = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(a, k, v, 0.0, causal, scale=scale)
        return _Part(y, z, ())
    y, z, *kept = torch.ops.aten._scaled_dot_product_cudnn_attention(a, k, v, None, True, 0.0, causal, scale=scale)
    return _Part(y, z.reshape(y.shape[:3]), (z.shape, *kept[:6]))


def _back(
    dy: Tensor, a: Tensor, k: Tensor, v: Tensor, part: _Part, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a, and of these keys and values. part: the y and z of all keys, what this set kept."""
    y, z, kept = part
    if a.device.type == "cpu":
        back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return back(dy, a, k, v, y, z, 0.0, causal, scale=scale)
    shape, begins, key_begins, tokens, places, seed, offset = kept
    back = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    return back(
        dy, a, k, v, y, z.view(shape), seed, offset, None, begins, key_begins, tokens, places, 0.0, causal, scale=scale
    )
