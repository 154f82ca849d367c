"""What forward and backward of the chunk kernels allocate, on tensors without memory, beside the best peer."""

import sys

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dsf.mixers import get
from dsf.triton.chunk import program_of

pytest.importorskip("triton")
from dsf.kernels.triton.chunk import operator as mixer_ops

MIB = 2**20


class Watch(TorchDispatchMode):
    """The most bytes that were held at once of what is made inside."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.given = {x.untyped_storage()._cdata for x in given}
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.held = {key: x for key, x in self.held.items() if not x[0].expired()}
        for x in out if isinstance(out, (tuple, list)) else [out]:
            storage = x.untyped_storage()
            if storage._cdata not in self.given:
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.held.values()))
        return out


@pytest.mark.parametrize(
    ("name", "heads", "keys", "values", "tokens", "batch", "most"),
    [
        ("deltanet", 16, 128, 128, 8192, 4, 1857),
        ("deltanet", 32, 64, 64, 8192, 4, 1666),
        ("deltanet", 8, 64, 64, 1024, 8, 104),
        ("gated_deltanet", 16, 128, 128, 8192, 4, 846),
        ("gated_deltanet", 32, 64, 64, 8192, 4, 1678),
        ("gated_deltanet", 8, 64, 64, 1024, 8, 105),
        ("rwkv7", 16, 128, 128, 8192, 4, 3000),
        ("rwkv7", 32, 64, 64, 8192, 4, 3300),
        ("mlstm", 16, 128, 128, 8192, 4, 790),
        ("ssd", 64, 128, 64, 2048, 16, 1140),
        ("ssd", 64, 128, 64, 8192, 4, 1116),
        ("ssd", 64, 128, 64, 32768, 1, 1110),
    ],
)
def test_no_more_memory_than_the_best_peer(name, heads, keys, values, tokens, batch, most, monkeypatch):
    for module in [m for n, m in sys.modules.items() if n.startswith("dsf.kernels.triton.") and hasattr(m, "launch")]:
        monkeypatch.setattr(module, "launch", lambda *_, **__: None)
    monkeypatch.setattr(mixer_ops, "matrix_mixer", lambda *x: mixer_ops._run(*x, True))
    monkeypatch.setattr(mixer_ops, "matrix_mixer_backward", lambda *x: mixer_ops._backward(True, *x))
    spec = get(name).recurrence.spec
    given, like = [], {"dtype": torch.bfloat16, "device": "meta"}
    for i in spec.inputs:
        sizes = [{"key": keys, "value": values}[a] for a in ("key", "value") if a in i.kind.axes]
        shared = name == "ssd" and i.name in ("b", "c")
        lead = [batch, tokens, 1 if shared else heads] if i.kind.time else [heads]
        given.append(torch.empty(*lead, *sizes, **like).requires_grad_())
    dy = torch.empty(batch, tokens, heads, values, **like)
    with Watch([dy, *given]) as watch:
        y = mixer_ops._Differentiable.apply(program_of(spec)[1], None, None, *given)[0]
        torch.autograd.grad(y, given, dy)
    assert watch.peak / MIB < most
