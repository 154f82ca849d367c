"""Short causal convolutions: the mixer of some models (LFM), and the first part of many mixers."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dsf
from dsf import Key, Param, Recurrence, System, Value, outer
from dsf.analysis.convert.layer import Layer, Run, trailing_padding


@lru_cache
def fir(taps: int) -> Recurrence:
    """A convolution of K = `taps` taps as a system: the state holds the last K - 1 inputs, a nilpotent shift.

    Inputs: x Value; past Param[Key, Value], the weights of x_{t-1} … x_{t-K+1}; now Param[Value], that of x_t;
    e0 … e{K-2} Param[Key], the unit vectors of the state's rows (see `unit_rows`). Bias and activation stay outside.
    """
    if taps < 2:
        raise ValueError(f"a convolution of {taps} taps has no state")
    rows = taps - 1

    def step(**given: Any) -> System:
        e = [given[f"e{i}"] for i in range(rows)]
        shift: Any = 0
        for i in range(rows - 1):
            move = outer(e[i + 1], e[i])
            shift = move if i == 0 else shift + move
        return System(A=shift, B=e[0] * given["x"], C=given["past"], D=given["now"] * given["x"], read="before")

    kinds = {"x": Value, "past": Param[Key, Value], "now": Param[Value], **{f"e{i}": Param[Key] for i in range(rows)}}
    named = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, annotation=k) for n, k in kinds.items()]
    step.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return dsf.recurrence(name="fir")(step)


def fir_inputs(x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """The inputs of fir(K) from x [B, T, C] and a depthwise kernel weight [C, K] in torch's order, oldest tap first."""
    flipped = weight.flip(-1).to(x.dtype)
    eye = torch.eye(weight.shape[-1] - 1, dtype=x.dtype, device=x.device)
    rows = {f"e{i}": eye[i : i + 1] for i in range(len(eye))}
    return {"x": x.unsqueeze(2), "past": flipped[:, 1:].T.unsqueeze(0), "now": flipped[:, :1].T, **rows}


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None) -> Tensor:
    """Causal depthwise convolution of x [B, C, L], weight [C, K]; inputs of other segments [B, L] count as zero."""
    taps = weight.shape[-1]
    if segments is None:
        return F.conv1d(F.pad(x, (taps - 1, 0)), weight.unsqueeze(1), bias, groups=x.shape[1])
    out = torch.zeros_like(x) if bias is None else bias[:, None].expand_as(x).clone()
    for lag in range(taps):
        shifted = F.pad(x, (lag, 0))[..., : x.shape[-1]]
        same = F.pad(segments, (lag, 0), value=-1)[..., : x.shape[-1]] == segments
        out = out + weight[:, taps - 1 - lag, None] * shifted * same.unsqueeze(1)
    return out


def causal_conv(
    layer: Layer, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
    **_: Any,
) -> Tensor:  # fmt: skip
    """transformers' causal_conv1d_fn: hidden_states [b, d, L], cached tokens first, then the call's.

    Unlike the original it separates packed sequences, and keeps padding out of the outputs and the cache.
    """
    tokens = _new_tokens(layer, hidden_states)
    context = hidden_states.shape[-1] - tokens
    x, segments = hidden_states.to(weight.dtype), None
    pads = layer.padding(tokens)
    if pads is not None:
        x = x.masked_fill(F.pad(pads, (context, 0)).unsqueeze(1), 0)
        _keep_last(layer, x, pads, context)
    if layer.call.cu_seqlens is not None:
        index = torch.searchsorted(layer.call.cu_seqlens[1:], torch.arange(tokens, device=x.device), right=True)
        segments = F.pad(index, (context, 0))[None].expand(x.shape[0], -1)
    if layer.kind == "FIR":
        _show(layer, x, weight, context)
    y = convolve(x, weight, bias, segments)
    return (y if activation is None else _activation(activation)(y)).to(hidden_states.dtype)


def causal_conv_step(
    layer: Layer, hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """transformers' causal_conv1d_update: tokens [b, d, L] after conv_state [b, d, K], which is shifted in place."""
    x = torch.cat([conv_state, hidden_states], dim=-1).to(weight.dtype)
    conv_state.copy_(x[..., -conv_state.shape[-1] :])
    if layer.kind == "FIR":
        _show(layer, x, weight, conv_state.shape[-1])
    y = convolve(x, weight, bias, None)[..., -hidden_states.shape[-1] :]
    return (y if activation is None else _activation(activation)(y)).to(hidden_states.dtype)


def _new_tokens(layer: Layer, hidden_states: Tensor) -> int:
    """The number of columns that are this call's tokens; columns before them come from a cache."""
    given = layer.call.arguments
    own = given.get("hidden_states", given.get("input_states"))
    return hidden_states.shape[-1] if own is None else own.shape[1]


def _keep_last(layer: Layer, x: Tensor, pads: Tensor, context: int) -> None:
    """Write the last inputs before trailing padding into the cache; the original would write the padding."""
    index, cache = getattr(layer.module, "layer_idx", None), layer.call.cache
    trailing = trailing_padding(pads)
    if cache is None or index is None or not bool(trailing.any()):
        return
    kept = cache.layers[index].conv_states[
        getattr(layer.module, "conv_idx", 0)
    ]  # inkling has several convolutions a layer
    width = kept.shape[-1]
    padded = F.pad(x, (width, 0))
    last = padded.shape[-1] - trailing
    places = last[:, None] - width + torch.arange(width, device=x.device)
    kept.copy_(padded.gather(-1, places[:, None].expand(-1, x.shape[1], -1)))


def _show(layer: Layer, x: Tensor, weight: Tensor, context: int) -> None:
    """Show the convolution to recorders as a system whose state is the columns before the new tokens."""
    taps = weight.shape[-1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    columns = F.pad(x, (max(0, taps - 1 - context), 0)).to(wide)
    new = x.shape[-1] - context
    start = columns[..., columns.shape[-1] - new - (taps - 1) : columns.shape[-1] - new].flip(-1).mT.unsqueeze(1)
    layer.state = (1, taps - 1, x.shape[1])
    inputs = fir_inputs(columns[..., columns.shape[-1] - new :].mT, weight.to(wide))
    packed, pads = layer.call.cu_seqlens is not None, layer.padding(new)
    layer.show(Run(fir(taps), inputs, start if context else None, layer.call.runs, packed=packed, padding=pads))


def _activation(name: str) -> Any:
    from transformers.activations import ACT2FN

    return ACT2FN[name]
