"""Mixers without a replaceable core function: their forward is written again around `Layer.run`.

FORWARDS maps class names to functions of (layer, module, *arguments) that return what the module's forward returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsf import Recurrence
from dsf.analysis.convert.alibi import bloom, mpt
from dsf.analysis.convert.cores import still
from dsf.analysis.convert.fir import convolve
from dsf.analysis.convert.layer import Layer, ModelCall, Run, boundaries, trailing_padding
from dsf.call.packing import Packing
from dsf.mixers import Hydra, Mixer, VisionMamba, alibi, mlstm, retnet, rg_lru
from dsf.mixers.models.states import sequences_of


def lightning(
    layer: Layer, module: Any, hidden_states: Tensor, position_embeddings: Any = None,
    attention_mask: Tensor | None = None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """MiniMax's lightning attention: RetNet with the layer's slopes, SiLU on q, k and v, then norm and gate."""
    tokens = hidden_states.shape[1]
    qkv = module.act_fn(module.qkv_proj(hidden_states))
    q, k, v = qkv.unflatten(-1, (module.num_attention_heads, 3 * module.head_dim)).split(module.head_dim, dim=-1)
    pads = layer.padding(tokens)
    slope = module.slope_rate.flatten()
    k = still(layer, k)
    cache = layer.call.cache
    start = None if cache is None else cache.get_linear_cache(module.layer_idx)
    y, final = layer.run_wide(retnet, start, q=q, k=k, v=v, slope=slope)
    if pads is not None and cache is not None:
        trailing = trailing_padding(pads)  # a constant decay cannot be switched off: undo it
        final = final * (slope * trailing[:, None])[..., None, None].exp().to(final.dtype)
    y = module.norm(y.flatten(2).to(hidden_states.dtype))
    y = module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * y)
    if cache is not None:
        cache.set_linear_cache(module.layer_idx, final.to(v.dtype))
    return y, final


def griffin(
    layer: Layer, module: Any, input_states: Tensor, position_ids: Tensor, attention_mask: Any = None,
    use_cache: bool = True, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """RecurrentGemma's recurrent block: convolution, RG-LRU, gate. The state stays in the module, as in the original.

    The convolution continues from its last inputs in calls of any length, and stops at resets.
    """
    batch, tokens = input_states.shape[:2]
    gate = module.act_fn(module.linear_y(input_states))
    x = module.linear_x(input_states).mT
    past = module.conv1d_width - 1
    before = module.conv1d_state
    if not use_cache or before is None or before.shape[0] != batch:
        before = x.new_zeros(batch, x.shape[1], past)
        module.rg_lru.recurrent_states = None
    reset = (position_ids == 0).expand(batch, -1)
    pads = layer.padding(tokens)
    if pads is not None:
        x = x.masked_fill(pads.unsqueeze(1), 0)
        reset = reset & ~pads
    columns = torch.cat([before.to(x.dtype), x], dim=-1)
    segments = F.pad(reset.long().cumsum(-1), (past, 0))
    y = convolve(columns, module.conv_1d.weight[:, 0], module.conv_1d.bias, segments)[..., past:].mT
    y, state = _rg_lru(layer, module.rg_lru, y, reset, pads)
    if use_cache:
        trailing = torch.zeros(batch, dtype=torch.long, device=x.device)
        if pads is not None:
            trailing = trailing_padding(pads)
        places = (columns.shape[-1] - trailing)[:, None] - past + torch.arange(past, device=x.device)
        module.conv1d_state = columns.gather(-1, places[:, None].expand(-1, x.shape[1], -1))
        module.rg_lru.recurrent_states = state
    else:
        module.conv1d_state = None
    return module.linear_out(y.to(gate.dtype) * gate), None


def _rg_lru(layer: Layer, module: Any, x: Tensor, reset: Tensor, pads: Tensor | None) -> tuple[Tensor, Tensor]:
    """The RG-LRU of x [b, l, w]; returns y and the state [b, w]."""
    heads, width = module.num_attention_heads, module.block_width
    x = x.unflatten(-1, (heads, width))

    def pre(weight: Tensor, bias: Tensor) -> Tensor:
        return torch.einsum("blhw,hwo->blho", x, weight) + bias

    r = pre(module.recurrent_gate_weight, module.recurrent_gate_bias)
    i = pre(module.input_gate_weight, module.input_gate_bias)
    if pads is not None:  # a gate this low leaves neither decay nor input
        closed = pads[..., None, None]
        r, i, x = r.masked_fill(closed, -1e4), i.masked_fill(closed, -1e4), x.masked_fill(closed, 0)
    start = module.recurrent_states
    start = None if start is None else start.unflatten(-1, (heads, width)).unsqueeze(2)
    y, final = layer.run_wide(
        rg_lru, start, x=x, r=r, i=i, reset=reset.unsqueeze(-1).to(x.dtype),
        Lambda=module.recurrent_param.unflatten(0, (heads, width)),
    )  # fmt: skip
    return y.flatten(2), final.flatten(1)


def xlstm(
    layer: Layer, module: Any, query: Tensor, key: Tensor, value: Tensor, igate: Tensor, fgate: Tensor,
    c_initial: Tensor | None = None, n_initial: Tensor | None = None, m_initial: Tensor | None = None,
    return_last_states: bool | None = None, mode: str | None = None,
) -> Any:  # fmt: skip
    """The backend of xLSTM's mLSTM: query, key [b, h, l, n], value [b, h, l, p], gates [b, h, l]; states C, n, m as it
    keeps them.

    The original adds eps, in the scale of its running maximum, to the denominator of the quotient; the system does not.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    i, f = igate.mT, fgate.mT
    pads = layer.padding(q.shape[1])
    if pads is not None:
        i, f = i.masked_fill(pads.unsqueeze(-1), -1e4), f.masked_fill(pads.unsqueeze(-1), 1e4)
    start = None
    if c_initial is not None and n_initial is not None and m_initial is not None:
        wide = torch.promote_types(c_initial.dtype, torch.float32)
        top = m_initial.reshape(*n_initial.shape[:2], 1, 1).expand(*n_initial.shape, 1)
        start = torch.cat([c_initial.to(wide), n_initial.unsqueeze(-1).to(wide), top.to(wide)], dim=-1)
    y, final = layer.run_wide(mlstm, start, q=q, k=k, v=v, i=i, f=f)
    y = y.transpose(1, 2).to(value.dtype)
    p = value.shape[-1]
    last = module.config.return_last_states if return_last_states is None else return_last_states
    if "inference" in (mode or module.config.mode) or last:
        return y, (final[..., :p], final[..., p], final[:, :, 0, p + 1].unsqueeze(-1))
    return y


def rwkv_shift(call: ModelCall, module: Any, hidden: Tensor, state: Any, slot: int) -> Tensor:
    """RWKV's token shift: the predecessor of every token, [b, l, d], also in calls of one token for several sequences.

    Padding is neither a predecessor nor the last token kept in the state.
    """
    tokens = hidden.shape[1]
    pads = call.padding(tokens)
    hidden = hidden if pads is None else hidden.masked_fill(pads.unsqueeze(-1), 0)
    shifted = module.time_shift(hidden)
    bounds = boundaries(call.arguments)
    if bounds is not None:
        shifted[:, bounds[1:-1].long()] = 0  # the first token of a packed sequence has no predecessor
    if state is not None:
        shifted[:, 0] = state[slot][:, :, module.layer_id]
        last = torch.full((len(hidden),), tokens - 1, device=hidden.device)
        last = last if pads is None else last - trailing_padding(pads)
        rows = torch.arange(len(hidden), device=hidden.device)
        state[slot][:, :, module.layer_id] = hidden[rows, last]
    return shifted


def rwkv_key_value(
    call: ModelCall, module: Any, hidden: Tensor, state: Any = None
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """RwkvSelfAttention.extract_key_value; the original mixes sequences of a batch in calls of one token."""
    shifted = rwkv_shift(call, module, hidden, state, 1)

    def mix(rate: Tensor) -> Tensor:
        return hidden * rate + shifted * (1 - rate)

    key, value = module.key(mix(module.time_mix_key)), module.value(mix(module.time_mix_value))
    return torch.sigmoid(module.receptance(mix(module.time_mix_receptance))), key, value, state


def rwkv_feed_forward(call: ModelCall, module: Any, hidden: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    """RwkvFeedForward.forward; the original mixes sequences of a batch in calls of one token."""
    shifted = rwkv_shift(call, module, hidden, state, 0)
    key = hidden * module.time_mix_key + shifted * (1 - module.time_mix_key)
    receptance = hidden * module.time_mix_receptance + shifted * (1 - module.time_mix_receptance)
    value = module.value(torch.square(torch.relu(module.key(key))))
    return torch.sigmoid(module.receptance(receptance)) * value, state


def declared(
    layer: Layer, module: Mixer, x: Tensor, state: Any = None, cu_seqlens: Tensor | None = None, *,
    attention_mask: Tensor | None = None, use_cache: bool = True, parallel: Any = None, reverse: bool = False,
    **tokens: Tensor,
) -> Any:  # fmt: skip
    """A layer of dsf.mixers: it runs its own recurrence unchanged; its inputs are shown to recorders."""
    options: dict[str, Any] = {"attention_mask": attention_mask, "use_cache": use_cache, "parallel": parallel, **tokens}
    layer.call.backward = layer.call.backward or reverse
    y, after = type(module).forward(module, x, state, cu_seqlens, reverse=reverse, **options)
    layer.state = module.dims
    if layer.listeners and not reverse:  # a layer runs backwards by another call, of reversed tokens
        recurrent = None if state is None else state.recurrent
        with torch.no_grad():
            inputs = module.inputs(x, state, cu_seqlens, **tokens)
        back, packed = layer.call.backward, _packs(cu_seqlens)
        layer.show(Run(module.recurrence, inputs, recurrent, layer.call.runs, backward=back, packed=packed))
    return y, after


def both_ways(
    layer: Layer, module: Hydra | VisionMamba, x: Tensor, state: None = None, cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """A layer of one recurrence in both directions: it runs unchanged, and recorders see a run of each."""
    y = type(module).forward(module, x, state, cu_seqlens, **options)
    layer.state, layer.parts = module.dims, 2
    if layer.listeners:
        with torch.no_grad():
            ways = module.ways(x, cu_seqlens)
        for inputs, backward in zip(ways, (False, True), strict=True):
            packed = _packs(cu_seqlens)
            layer.show(Run(module.recurrence, inputs, None, layer.call.runs, backward=backward, packed=packed))
    return y


def _packs(cu_seqlens: Tensor | Packing | None) -> bool:
    """Whether these are the boundaries of more than one sequence."""
    return cu_seqlens is not None and sequences_of(cu_seqlens) > 1


@dataclass(frozen=True)
class Forward:
    """A mixer class with a replaced forward: its name in reports, its recurrence, the new forward, the differences
    from the original.
    """

    kind: str
    recurrence: Recurrence
    forward: Callable[..., Any]
    notes: tuple[str, ...] = ()


FORWARDS: dict[str | type[nn.Module], Forward] = {
    "BloomAttention": Forward("softmax", alibi, bloom),
    "MptAttention": Forward("softmax", alibi, mpt),
    "MiniMaxLightningAttention": Forward(
        "Lightning", retnet, lightning, ("cached calls of several tokens go on; the original raises an error",)
    ),
    "RecurrentGemmaRecurrentBlock": Forward(
        "RG-LRU", rg_lru, griffin,
        ("the convolution keeps its past in calls of several tokens and does not see across resets",),
    ),
    "xLSTMBackend": Forward(
        "mLSTM", mlstm, xlstm, ("the original adds eps to the quotient's denominator, in the scale of its maximum",)
    ),
}  # fmt: skip

# Methods with a defect outside any core function: (class name, method) -> replacement of (call, module, …).
METHODS: dict[tuple[str, str], Callable[..., Any]] = {
    ("RwkvSelfAttention", "extract_key_value"): rwkv_key_value,
    ("RwkvFeedForward", "forward"): rwkv_feed_forward,
}
