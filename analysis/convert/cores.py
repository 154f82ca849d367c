"""The core functions of transformers' recurrent mixers, as dsf recurrences.

A mixer of a modelling file computes its projections, calls one function for the recurrence, and computes the readout.
CORES maps the names of those functions to functions here, which take a `Layer` and the same arguments, convert them to
dsf's layout, run the recurrence and convert the results back. Layouts: b batch, l tokens, h heads, g groups, d
channels, n state rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dsf
from dsf import I, Key, Param, Recurrence, Scalar, System, Value, exp, outer
from dsf.analysis.convert.layer import Layer, trailing_padding
from dsf.mixers import kda, rwkv4


@dsf.recurrence(name="s6")
def s6_core(x: Value, delta: Value, b: Key, c: Key, A: Param[Key, Value], D: Param[Value]) -> System:
    """S6 (arXiv 2312.00752) with step size delta > 0 and A < 0, the arguments of the released kernels."""
    return System(A=exp(A * delta), B=b * (delta * x), C=c, D=D * x)


@dsf.recurrence(name="ssd")
def ssd_core(x: Value, delta: Scalar, b: Key, c: Key, A: Param[Scalar], D: Param[Scalar]) -> System:
    """SSD (arXiv 2405.21060) with step size delta > 0 and A < 0, the arguments of the released kernels."""
    return System(A=exp(A * delta), B=b * (delta * x), C=c, D=D * x)


@dsf.recurrence(name="gated_deltanet")
def gated_deltanet_core(q: Key, k: Key, v: Value, g: Scalar, beta: Scalar) -> System:
    """Gated DeltaNet (arXiv 2412.06464) with the log decay g."""
    return System(A=exp(g) * (I - beta * outer(k, k)), B=k * (beta * v), C=q)


def selective_scan(
    layer: Layer, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    return_last_state: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """S6 over a sequence: hidden_states, dt, z [b, d, l], A [d, n], B, C [b, n, l] -> [b, d, l] (and [b, d, n])."""
    x, delta = hidden_states.mT, _delta(dt.mT, delta_bias, delta_softplus)
    delta = still(layer, delta)
    cached = layer.call.cached
    if cached is not None and cached.dim() == 4:  # Zamba: a call for each head, [b, heads, d, n]
        cached = cached[:, layer.call.runs]
    y, state = _run_s6(layer, x, delta, B.mT, C.mT, A, D, cached)
    y = y.mT.to(hidden_states.dtype)
    y = y if z is None else y * F.silu(z)
    return (y, state) if return_last_state else y


def selective_step(
    layer: Layer, state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False, z: Tensor | None = None,
    **_: Any,
) -> Tensor:  # fmt: skip
    """S6, one token: state [b, d, n] (written in place), hidden_states, dt, z [b, d], B, C [b, n] -> [b, d]."""
    x, delta, b, c = (t.unsqueeze(1) for t in (hidden_states, _delta(dt, dt_bias, dt_softplus), B, C))
    y, final = _run_s6(layer, x, delta, b, c, A, D, state)
    state.copy_(final)
    y = y[:, 0].to(hidden_states.dtype)
    return y if z is None else y * F.silu(z)


def _run_s6(
    layer: Layer, x: Tensor, delta: Tensor, b: Tensor, c: Tensor, A: Tensor, D: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run S6 with all channels in one head: x, delta [b, l, d], b, c [b, l, n], state [b, d, n]."""
    x, delta, b, c = (t.unsqueeze(2) for t in (x, delta, b, c))
    skip = x.new_zeros(1, x.shape[-1]) if D is None else D.unsqueeze(0)
    start = None if state is None else state.mT.unsqueeze(1)
    y, final = layer.run_wide(s6_core, start, x=x, delta=delta, b=b, c=c, A=A.T.unsqueeze(0), D=skip)
    return y.squeeze(2), final.squeeze(1).mT


def still(layer: Layer, gate: Tensor) -> Tensor:
    """gate [b, l, ...] with zeros at padding tokens, which then neither decay nor write the state."""
    pads = layer.padding(gate.shape[1])
    return gate if pads is None else gate.masked_fill(pads.view(*pads.shape, *([1] * (gate.dim() - 2))), 0)


def _delta(dt: Tensor, bias: Tensor | None, activate: bool) -> Tensor:
    """The step size: softplus(dt + bias)."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if activate else dt


def chunk_scan(
    layer: Layer, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int = 0,
    D: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False,
    **_: Any,
) -> Any:  # fmt: skip
    """SSD over tokens: hidden_states [b, l, h, d], dt [b, l, h], A, D [h], B, C [b, l, g, n], states [b, h, d, n]."""
    delta = still(layer, _delta(dt, dt_bias, dt_softplus).clamp(*dt_limit))
    skip = A.new_zeros(A.shape) if D is None else D
    start = None if initial_states is None else initial_states.mT
    y, final = layer.run_wide(ssd_core, start, x=hidden_states, delta=delta, b=B, c=C, A=A, D=skip)
    return (y.contiguous(), final.mT.contiguous()) if return_final_states else y.contiguous()


def ssd_step(
    layer: Layer, state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False, z: Tensor | None = None,
    **_: Any,
) -> Tensor:  # fmt: skip
    """SSD, one token: state [b, h, d, n] (written in place), hidden_states [b, h, d]; dt, A, D, dt_bias expanded
    over channels. The step size is clamped as for a whole sequence; the original does not clamp it.
    """
    y, final = chunk_scan(
        layer, hidden_states.unsqueeze(1), dt[..., 0].unsqueeze(1), A[:, 0, 0], B.unsqueeze(1), C.unsqueeze(1),
        D=None if D is None else D[:, 0], dt_bias=None if dt_bias is None else dt_bias[:, 0], initial_states=state,
        dt_softplus=dt_softplus, dt_limit=getattr(layer.module, "time_step_limit", (0.0, float("inf"))),
        return_final_states=True,
    )  # fmt: skip
    state.copy_(final)
    y = y[:, 0].to(hidden_states.dtype)
    return y if z is None else y * F.silu(z)


def gated_delta_rule(
    recurrence: Recurrence, layer: Layer, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    *_: Any, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gated DeltaNet or KDA: query, key [b, l, groups, n], value [b, l, h, d], beta [b, l, h].

    g: the log decay, [b, l, h] or, for KDA, [b, l, h, n].
    """
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    q, k = query.to(wide), key.to(wide)
    if options.get("use_qk_l2norm_in_kernel"):
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    scale = options.get("scale")
    q = q * (key.shape[-1] ** -0.5 if scale is None else scale)
    state = options.get("initial_state")
    g, beta = still(layer, g), still(layer, beta)
    y, final = layer.run_wide(recurrence, state, q=q, k=k, v=value.to(wide), g=g.to(wide), beta=beta.to(wide))
    return y.to(query.dtype), final if options.get("output_final_state") else None


def wkv(
    layer: Layer, time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, state: Any = None,
    return_state: bool = False,
) -> tuple[Tensor, Any]:  # fmt: skip
    """RWKV-4: key, value [b, l, d], state (num, den, max) [b, d] each, num and den in the scale e^max."""
    start = None
    if state is not None:
        start = torch.stack([s.to(torch.promote_types(key.dtype, torch.float32)) for s in state], dim=1)
        start = start.flatten(1)[:, None, None]  # columns of S, of the normaliser, of the running maximum
    pads = layer.padding(key.shape[1])
    key = key if pads is None else key.masked_fill(pads.unsqueeze(-1), -1e4)  # e^k = 0: nothing is written
    y, final = layer.run_wide(
        rwkv4, start, k=key.unsqueeze(2), v=value.unsqueeze(2), w=time_decay.unsqueeze(0), u=time_first.unsqueeze(0)
    )
    kept = list(final[:, 0, 0].chunk(3, dim=-1)) if return_state or state is not None else None
    if kept is not None and pads is not None:  # a constant decay cannot be switched off: undo it
        kept[2] = kept[2] + time_decay.exp() * trailing_padding(pads)[:, None]
    return y.squeeze(2).to(key.dtype), kept


def not_fused(layer: Layer, *_: Any, **__: Any) -> None:
    """Replacement of a kernel that runs a whole mixer: None makes the caller compute the parts one by one."""
    return None


@dataclass(frozen=True)
class Core:
    """One kind of core: its name in reports, its recurrence, and the replacement of each of the original functions
    by name.
    """

    kind: str
    recurrence: Recurrence
    functions: dict[str, Callable[..., Any]]


CORES: list[Core] = [
    Core("S6", s6_core, {
        "mamba_selective_scan": selective_scan,
        "mamba_selective_state_update": selective_step,
        "mamba_inner_fn": not_fused,
    }),
    Core("SSD", ssd_core, {
        "mamba2_chunk_scan": chunk_scan,
        "mamba2_selective_state_update": ssd_step,
        "mamba2_split_conv1d_scan_combined": not_fused,
    }),
    Core("Gated DeltaNet", gated_deltanet_core, {
        "torch_chunk_gated_delta_rule": partial(gated_delta_rule, gated_deltanet_core),
        "torch_recurrent_gated_delta_rule": partial(gated_delta_rule, gated_deltanet_core),
    }),
    Core("KDA", kda, {
        "chunk_kimi_delta_attention": partial(gated_delta_rule, kda),
        "recurrent_kimi_delta_attention": partial(gated_delta_rule, kda),
    }),
    Core("WKV-4", rwkv4, {"rwkv_linear_attention": wkv}),
]  # fmt: skip
