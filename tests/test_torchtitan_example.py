"""docs/examples/torchtitan_gated_deltanet.py: the kernel alone, and in torchtitan's place of it."""

import dataclasses
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

from dsf import mixers

PATH = Path(__file__).resolve().parents[1] / "docs" / "examples" / "torchtitan_gated_deltanet.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("torchtitan_example", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def drawn(*lead):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, *lead, 2, 8, generator=generator, dtype=torch.float64)
    v = torch.randn(*lead, 4, 6, generator=generator, dtype=torch.float64)
    g, beta = torch.rand(2, *lead, 4, generator=generator, dtype=torch.float64)
    return q, k, v, -g, beta


def reference(q, k, v, g, beta):
    """One row by the published mixer, heads repeated, every step outside."""
    q, k = ((x / (x.square().sum(-1, True) + 1e-6).sqrt()).repeat_interleave(2, dim=1)[None] for x in (q, k))
    return mixers.gated_deltanet(q * 8**-0.5, k, v[None], g.exp()[None], beta[None], form="recurrent")[0]


def test_packed_tokens_are_those_of_each_sequence(example):
    x = drawn(19)
    y = example.gated_delta(*x, cu_seqlens=torch.tensor([0, 7, 19]), cu_seqlens_cpu=None)
    parts = [reference(*(t[a:b] for t in x)) for a, b in ((0, 7), (7, 19))]
    torch.testing.assert_close(y, torch.cat(parts), rtol=0, atol=1e-10)


def test_rows_side_by_side(example):
    x = drawn(2, 11)
    y = example.gated_delta(*x)
    expected = torch.stack([reference(*(t[row] for t in x)) for row in (0, 1)])
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)


def test_our_kernel_takes_the_place_of_theirs(example, monkeypatch):
    """On stand-ins of what it uses of torchtitan: a module with a Config, a tree of them, a registry."""

    class GatedDeltaKernel(torch.nn.Module):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config:
            backend: str = "fla"

    class Model:
        def __init__(self, layers):
            self.layers = layers

        def traverse(self, kind):
            for place, layer in enumerate(self.layers):
                if isinstance(layer.kernel, kind):
                    yield f"layers.{place}.kernel", layer.kernel, layer, "kernel"

    layers = [types.SimpleNamespace(kernel=x) for x in (GatedDeltaKernel.Config(backend="other"), object())]
    package = types.ModuleType("torchtitan.models.qwen3_5")
    package.model_registry = lambda flavor: types.SimpleNamespace(model=Model(layers if flavor == "hybrid" else []))
    module = types.ModuleType("torchtitan.models.qwen3_5.model")
    module.GatedDeltaKernel = GatedDeltaKernel
    for name in ("torchtitan", "torchtitan.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)

    spec = example.model_spec("hybrid")
    made = spec.model.layers[0].kernel
    assert type(made).__qualname__.startswith("kernel_class") and made.backend == "other"
    x = drawn(5)
    ours = example.kernel_class()
    torch.testing.assert_close(ours().forward(*x, cu_seqlens=None), example.gated_delta(*x))
    with pytest.raises(RuntimeError, match="has no Gated DeltaNet layer"):
        example.model_spec("dense")
