"""Calls of every family of kernels, for tests that make them on another thread or stream than the first."""

import importlib
from pathlib import Path

import torch

import dsf
from dsf import Key, System, Value, sigmoid
from dsf.mixers import get

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
LAYERS = (
    "layer-norm",
    "layer-convolution",
    "layer-products",
    "attention-tokens",
    "impulse-responses",
    "time-invariant",
    "long-convolution",
    "many-taps",
    "steps-in-place",
    "steps-of-pairs",
)


@dsf.recurrence
def fading_channels(q: Key, k: Key, v: Value, a: Value) -> System:
    """By chunks of the transposed state."""
    return System(A=sigmoid(a), B=k * v, C=q)


RECURRENCES = {
    "value decay, chunks": (fading_channels, "chunk", 32, 64), "scan by entry": (get("s6").recurrence, "auto", 4, 8),
    "scan of a vector": (get("qlstm").recurrence, "auto", 1, 8), "bias": (get("fox").recurrence, "auto", 16, 16),
    "window": (get("sliding_window_attention").recurrence, "auto", 16, 16),
    "delta": (get("gated_deltanet").recurrence, "auto", 16, 16), "key decay": (get("gla").recurrence, "auto", 16, 16),
}  # fmt: skip
NAMES = [*LAYERS, *RECURRENCES]


def call_of(name, monkeypatch, device):
    """(calls, inputs) of a name: the calls give results by name."""
    if name in LAYERS:
        monkeypatch.syspath_prepend(BENCHMARKS)
        torch.manual_seed(0)
        calls, inputs = importlib.import_module("sanitize_layers").LAYERS[name]("float32")
        return calls, [x.to(device) for x in inputs]
    recurrence, form, n, p = RECURRENCES[name]
    generator, inputs, sizes = torch.Generator().manual_seed(0), [], {"key": n, "value": p}
    for i in recurrence.spec.inputs:
        shape = [*((1, 40) if i.kind.time else ()), 2, *(sizes[x] for x in ("key", "value") if x in i.kind.axes)]
        x = torch.randn(shape, generator=generator)
        bounded = i.name in ("alpha", "beta", "g")
        x = -x.abs() if i.name == "g" else x.sigmoid() if bounded else x / n**0.5 if "key" in i.kind.axes else x
        inputs.append(x.to(device, torch.bfloat16 if i.kind.time else torch.float32))
    return lambda *x: {"y": recurrence(*x, form=form, backend="triton")}, inputs


def results(calls, inputs):
    """The results of calls and the gradients of their inputs, by name."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    found = calls(*leaves)
    seen = [y.double().square().sum() for y in found.values() if y.requires_grad]  # none of steps in place
    slopes = torch.autograd.grad(sum(seen), leaves, allow_unused=True) if seen else []
    gradients = {f"gradient {i}": x for i, x in enumerate(slopes) if x is not None}
    return {name: y.detach() for name, y in found.items()} | gradients


def assert_same(found, expected):
    assert found.keys() == expected.keys() and len(found) > 1
    for name, x in expected.items():
        assert torch.isfinite(x).all() and torch.equal(found[name], x), name
