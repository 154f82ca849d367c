"""`long_convolution`: a time-invariant filter of any length, without a state of fixed size (Hyena)."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from dsf.call import packing
from dsf.call.bind import FLOATS
from dsf.call.packing import Packing
from dsf.kernels.invariant import causal
from dsf.language.errors import FormError, InputError
from dsf.triton import long as on_gpu
from dsf.triton.convolve import on_kernels

NAME = "long_convolution"
REFUSED = (
    "a filter with numbers of its own for every lag has no state of fixed size: a token is read from all before it, so "
    "there is nothing to step, to carry over or to cut; it has naive and convolution. Filters that are sums of "
    "exponentials have a state (dsf.mixers.s4d)"
)


def long_convolution(
    x: Tensor,
    h: Tensor,
    gate: Tensor | None = None,
    D: Tensor | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    form: str = "auto",
    return_state: bool = False,
) -> Tensor:
    """y_t = gate_t (Σ_{s ≤ t} h_{t-s} x_s + D x_t), a gated convolution along time: [B, T, H, P] in x's dtype.

    x: [B, T, H, P], floating point.
    h: [H, L, P], the filter at lags of 0 to L - 1 tokens. It is 0 at longer lags. L may exceed T.
    gate: [B, T, H, P] in x's dtype; None for 1.
    D: [H, P]; None for 0.
    cu_seqlens: boundaries [S + 1] of sequences packed along T, or a dsf.Packing. B is then 1.
    form: "convolution" (by FFT), "naive" (the definition, in float64) or "auto".
    return_state: must be False, since a filter has no state of fixed size.

    Source: Hyena (arXiv 2302.10866), Section 3. Raises InputError for tensors that do not fit, FormError for other
    forms and for return_state=True.
    """
    _check(x, h, gate, D)
    if return_state or form in ("recurrent", "scan", "chunk", "kernel"):
        asked = "a final state was asked for" if return_state else f"there is no {form} form"
        raise FormError(f"{NAME}: {asked}: {REFUSED}")
    if form not in ("auto", "naive", "convolution"):
        raise FormError(f"{NAME}: there is no form {form!r}; forms are naive, convolution and auto")
    if cu_seqlens is None and form != "naive" and on_kernels(x):
        return on_gpu.run(x, h, gate, D, lambda x, h, gate, D: _by_torch(x, h, gate, D, None, form))
    return _by_torch(x, h, gate, D, cu_seqlens, form)


def _by_torch(
    x: Tensor, h: Tensor, gate: Tensor | None, D: Tensor | None, cu_seqlens: Tensor | Packing | None, form: str
) -> Tensor:
    wide = torch.float64 if form == "naive" else torch.promote_types(x.dtype, torch.float32)
    rows, taps = x.to(wide), h.to(wide)
    run = _direct if form == "naive" else _fft
    if cu_seqlens is None:
        y = run(rows, taps)
    else:
        if x.shape[0] != 1:
            raise InputError(f"{NAME}: cu_seqlens packs sequences into one row, expected B = 1, got B = {x.shape[0]}")
        bounds = packing.values(cu_seqlens)
        packing.check_bounds(NAME, bounds, x.shape[1])
        batches = packing.batches(bounds, x.device)
        y = packing.unpack([(batch, run(batch.take({"x": rows})["x"], taps)) for batch in batches])
    if D is not None:
        y = y + D.to(wide) * rows
    return (y if gate is None else y * gate.to(wide)).to(x.dtype)


def _fft(x: Tensor, h: Tensor) -> Tensor:
    """By FFT: x [B, T, H, P], h [H, L, P] -> [B, T, H, P]. Padding after a sequence does not change it."""
    y = causal(rearrange(x, "b t h p -> b h p t"), rearrange(_taps(h, x.shape[1]), "h l p -> h p l"))
    return rearrange(y, "b h p t -> b t h p")


def _direct(x: Tensor, h: Tensor) -> Tensor:
    """The convolution by its triangular matrix."""
    tokens = x.shape[1]
    place = torch.arange(tokens, device=x.device)
    lag = place[:, None] - place
    matrix = torch.where((lag >= 0)[None, :, :, None], _taps(h, tokens)[:, lag.clamp(min=0)], 0.0)  # [H, T, S, P]
    return torch.einsum("htsp,bshp->bthp", matrix, x)


def _taps(h: Tensor, tokens: int) -> Tensor:
    """The filter at lags 0 … T-1: [H, T, P]."""
    return torch.nn.functional.pad(h[:, :tokens], (0, 0, 0, max(0, tokens - h.shape[1])))


def _check(x: Tensor, h: Tensor, gate: Tensor | None, D: Tensor | None) -> None:
    if x.dim() != 4 or x.dtype not in FLOATS or 0 in x.shape:
        raise InputError(f"{NAME}: `x` must be floating point [B, T, H, P], got {x.dtype} {list(x.shape)}")
    _, _, heads, p = x.shape
    if h.dim() != 3 or (h.shape[0], h.shape[2]) != (heads, p) or not h.shape[1]:
        raise InputError(f"{NAME}: `h` has shape {list(h.shape)}, expected [H, L, P] = [{heads}, L, {p}]")
    if gate is not None and (gate.shape != x.shape or gate.dtype != x.dtype):
        raise InputError(
            f"{NAME}: `gate` is {gate.dtype} {list(gate.shape)}, expected as `x` {x.dtype} {list(x.shape)}"
        )
    if D is not None and D.shape != (heads, p):
        raise InputError(f"{NAME}: `D` has shape {list(D.shape)}, expected [H, P] = [{heads}, {p}]")
    for name, other in (("h", h), ("gate", gate), ("D", D)):
        if other is not None and other.device != x.device:
            raise InputError(f"{NAME}: `{name}` is on {other.device}, but `x` is on {x.device}")
