"""GPU operators of other projects for these recurrences, on a benchmark's inputs in the layout that each expects.

Conversions to that layout (logarithms of gates, transposes) are done before the clock starts, so they cost the peer
nothing; gradients are taken with respect to the converted inputs.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Inputs = dict[str, Tensor]
Made = tuple[Callable[[], Any], list[Tensor]]  # (the call, the tensors that gradients are taken with respect to)
Make = Callable[[Inputs], Made]
Arguments = Callable[[Inputs], Inputs]
Step = Callable[[Inputs], Callable[[Tensor], Any]]

os.environ.setdefault("FLA_FLASH_QLA", "0")  # fla would otherwise call FlashQLA for its gated delta rule


class Unfit(Exception):
    """The error of a peer that computes a recurrence, but not in this size."""


def leaf(x: Tensor) -> Tensor:
    """A copy of x that gradients are taken with respect to."""
    return x.detach().clone().contiguous().requires_grad_()


def heads_first(x: Tensor) -> Tensor:
    """[B, T, H, ...] -> [B, H, T, ...], as such a copy."""
    return leaf(x.transpose(1, 2))


def fla(path: str, arguments: Arguments) -> Make:
    """An operator of flash-linear-attention; arguments: inputs by its names, from the recurrence's. q is not scaled."""

    def make(x: Inputs) -> Made:
        module, name = path.split(".")
        function = getattr(importlib.import_module(f"fla.ops.{module}"), name)
        given = {name: leaf(t) for name, t in arguments(x).items()}
        extra: dict[str, Any] = {"normalize": False} if module == "linear_attn" else {}
        extra |= {"g_gamma": -x["slope"].detach().float()} if "slope" in x else {}
        return lambda: function(**given, scale=1.0, **extra)[0], list(given.values())

    return make


def plain(x: Inputs, *names: str) -> Inputs:
    """q, k, v and the inputs of these names."""
    return {n: x[n] for n in ("q", "k", "v", *names)}


def rwkv7_arguments(x: Inputs) -> Inputs:
    """The inputs of RWKV-7 under fla's names."""
    rate = math.exp(-0.5)
    return {
        "r": x["r"], "w": -rate * torch.sigmoid(x["w"]), "k": x["k"], "v": x["v"], "a": -x["kappa"],
        "b": torch.sigmoid(x["a"]) * x["kappa"],
    }  # fmt: skip


def comba_arguments(x: Inputs) -> Inputs:
    """The inputs of Comba under fla's names: p are the keys along which is erased."""
    share = torch.sigmoid(x["b"])[:, None]
    return {
        "q": x["q"] - x["d"][:, None] * x["k"], "k": x["k"], "v": x["v"], "p": share * x["k"], "g": x["g"],
        "beta": torch.sigmoid(x["beta"]),
    }  # fmt: skip


def gates(x: Inputs) -> Inputs:
    """Gated DeltaNet 2's gates."""
    return {name: torch.sigmoid(x[name]) for name in "bw"}


def fla_mesa(x: Inputs) -> Made:
    """fla's MesaNet, whose solves take at most 30 steps, too."""
    function = importlib.import_module("fla.ops.mesa_net").chunk_mesa_net
    gates = {"g": F.logsigmoid(x["f"].float()), "beta": x["beta"].float(), "lamb": 0.25 + F.softplus(x["lam"].float())}
    given = {name: leaf(t) for name, t in (plain(x) | gates).items()}
    return lambda: function(**given)[0], list(given.values())


def flash_qla(x: Inputs) -> Made:
    """FlashQLA's gated delta rule."""
    if x["k"].shape[-1] != 128:
        raise Unfit("FlashQLA takes 128 keys and channels")
    function = importlib.import_module("flash_qla").chunk_gated_delta_rule
    given = {n: leaf(t) for n, t in (plain(x) | {"beta": x["beta"].float(), "g": x["alpha"].float().log()}).items()}
    return lambda: function(**given, scale=1.0)[0], list(given.values())


def mlstm_kernels(x: Inputs) -> Made:
    """NX-AI's mLSTM."""
    module = importlib.import_module("mlstm_kernels.torch.chunkwise.triton_xl_chunk.fwbw")
    given = [heads_first(x[n].float() if n in "if" else x[n]) for n in ("q", "k", "v", "i", "f")]
    run = module.mlstm_chunkwise__xl_chunk
    options = {"chunk_size": 256, "autocast_kernel_dtype": torch.bfloat16}
    return lambda: run(*given, **options).transpose(1, 2), given


def mamba_ssm(x: Inputs) -> Made:
    """Mamba-2's scan."""
    function = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    names = ("x", "dt", "b", "c", "D", "dt_bias")
    u, dt, b, c, skip, bias = given = [leaf(x[n] if n != "dt_bias" else x[n].float()) for n in names]
    a = leaf(-x["A_log"].float().exp())
    options = {"chunk_size": 256, "dt_softplus": True}
    return lambda: function(u, dt, a, b, c, D=skip, dt_bias=bias, **options), [*given, a]


def sdpa(x: Inputs) -> Made:
    """torch's fused attention."""
    q, k, v = given = [heads_first(x[n]) for n in "qkv"]
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), given


def log_sigmoid(x: Inputs) -> Tensor:
    """GLA's log decay."""
    return F.logsigmoid(x["g"]) / 16


# who: package to find, {recurrence: operator}
PEERS: dict[str, tuple[str, dict[str, Make]]] = {
    "fla": ("fla", {
        "unnormalized_linear_attention": fla("linear_attn.chunk_linear_attn", plain),
        "scalar_decay": fla("simple_gla.chunk_simple_gla", lambda x: plain(x, "g")),
        "retnet": fla("simple_gla.chunk_simple_gla", plain),
        "deltanet": fla("delta_rule.chunk_delta_rule", lambda x: plain(x, "beta")),
        "gated_deltanet": fla(
            "gated_delta_rule.chunk_gated_delta_rule", lambda x: plain(x, "beta") | {"g": x["alpha"].log()}
        ),
        "gla": fla("gla.chunk_gla", lambda x: plain(x) | {"g": log_sigmoid(x)}),
        "kda": fla("kda.chunk_kda", lambda x: plain(x, "g", "beta")),
        "rwkv7": fla("rwkv7.chunk_rwkv7", rwkv7_arguments),
        "comba": fla("comba.chunk_comba", comba_arguments), "mesanet": fla_mesa,
        "gated_deltanet2": fla("gdn2.chunk_gdn2", lambda x: plain(x, "g") | gates(x)),
    }),
    "FlashQLA": ("flash_qla", {"gated_deltanet": flash_qla}),
    "mlstm_kernels": ("mlstm_kernels", {"mlstm": mlstm_kernels}),
    "mamba_ssm": ("mamba_ssm", {"ssd": mamba_ssm}),
    "torch SDPA": ("torch", {"softmax_attention": sdpa}),
}  # fmt: skip


def peers_of(recurrence: str) -> list[str]:
    """Names of the peers present that compute a recurrence."""
    return [who for who, (package, table) in PEERS.items() if recurrence in table and importlib.util.find_spec(package)]


def operator(who: str, recurrence: str, x: Inputs) -> Made:
    """(call, leaves) of a peer on the inputs of a recurrence. Raises what the peer raises on import."""
    return PEERS[who][1][recurrence](x)


def token(x: Inputs, *names: str) -> Inputs:
    """One token, with a time axis of length one."""
    return {n: x[n].detach().unsqueeze(1) for n in names}


def fla_step(path: str, arguments: Arguments) -> Step:
    """fla's recurrent operator on one token; it returns a new state."""

    def make(x: Inputs) -> Callable[[Tensor], Any]:
        module, name = path.split(".")
        function = getattr(importlib.import_module(f"fla.ops.{module}"), name)
        given = {name: t.contiguous() for name, t in arguments(x).items()}
        extra: dict[str, Any] = {"normalize": False} if module == "linear_attn" else {}
        extra |= {"g_gamma": -x["slope"].float()} if "slope" in x else {}
        return lambda state: function(**given, scale=1.0, initial_state=state, output_final_state=True, **extra)

    return make


def mlstm_step(x: Inputs) -> Callable[[Tensor], Any]:
    """NX-AI's mLSTM, one token."""
    step = importlib.import_module("mlstm_kernels.torch.recurrent.triton_step").mlstm_recurrent_step__triton
    q, k, v, i, f = (x[n] for n in ("q", "k", "v", "i", "f"))
    norm, top = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(i[..., None], dtype=torch.float32)
    return lambda state: step(q, k, v, i[..., None], f[..., None], state, norm, top)


def mamba_step(x: Inputs) -> Callable[[Tensor], Any]:
    """Mamba-2, one token."""
    update = importlib.import_module("mamba_ssm.ops.triton.selective_state_update").selective_state_update
    u, heads, p, n = x["x"], *x["x"].shape[1:], x["b"].shape[-1]
    dt, bias, skip = (t[..., None].expand(*t.shape, p) for t in (x["dt"], x["dt_bias"], x["D"]))
    a = -x["A_log"].float().exp()[:, None, None].expand(heads, p, n)
    return lambda state: update(state.view(-1, heads, p, n), u, dt, a, x["b"], x["c"], skip, None, bias, True)


def decoded(x: Inputs) -> Inputs:
    """q, k, v of one token."""
    return token(x, "q", "k", "v")


# recurrence: (who, step of a state [B, H, N, P])
STEPS: dict[str, tuple[str, Step]] = {
    "unnormalized_linear_attention": ("fla", fla_step("linear_attn.fused_recurrent_linear_attn", decoded)),
    "retnet": ("fla", fla_step("simple_gla.fused_recurrent_simple_gla", decoded)),
    "gla": ("fla", fla_step("gla.fused_recurrent_gla", lambda x: decoded(x) | {"gk": log_sigmoid(x).unsqueeze(1)})),
    "gated_deltanet": ("fla", fla_step(
        "gated_delta_rule.fused_recurrent_gated_delta_rule",
        lambda x: decoded(x) | token(x, "beta") | {"g": x["alpha"].log().unsqueeze(1)},
    )),
    "kda": ("fla", fla_step("kda.fused_recurrent_kda", lambda x: decoded(x) | token(x, "g", "beta"))),
    "rwkv7": ("fla", fla_step(
        "rwkv7.fused_recurrent_rwkv7", lambda x: {n: t.unsqueeze(1) for n, t in rwkv7_arguments(x).items()}
    )),
    "mlstm": ("mlstm_kernels", mlstm_step),
    "ssd": ("mamba_ssm", mamba_step),
}  # fmt: skip


def step_of(recurrence: str) -> tuple[str, Step | None]:
    """(who, make) of the peer that decodes a recurrence, make None where it is not present."""
    who, make = STEPS.get(recurrence, ("", None))
    present = make is not None and importlib.util.find_spec(PEERS[who][0]) is not None
    return who, make if present else None
