"""The attention kernels on a GPU at head sizes that fill no tile."""

import pytest
import torch

import dsf
from dsf import mixers
from dsf.fuzz import Case, Declaration, attempt
from dsf.parallel import Simulated

pytestmark = pytest.mark.gpu
DECAYING = Declaration(
    "own", (("sigmoid(s)", "exp_features(k) * v"),), "exp_features(N**-0.5 * q)", rule="dsf.ratio"
).build()
TURNED = Declaration(
    "own", (("sigmoid(s) * turn(tanh(b))", "exp_features(k) * v"),), "exp_features(N**-0.5 * q)", rule="dsf.ratio"
).build()


@pytest.mark.parametrize("n", [24, 32, 64, 128])
@pytest.mark.parametrize("p", [8, 17, 24])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_few_channels_under_a_turn_on_a_gpu(n, p, dtype):
    """Turned queries and keys come in float32, and ptxas 12.8 assembled kernels that rounded them wrongly."""
    verdict = attempt(TURNED, Case(tokens=150, heads=2, n=n, p=p, dtype=dtype, seed=n + p), "cuda")
    assert verdict.status == "right", verdict


@pytest.mark.parametrize("n", [8, 17, 24, 40, 72, 100, 136])
@pytest.mark.parametrize("p", [3, 8, 17, 24, 40, 100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_uneven_heads_on_a_gpu(n, p, dtype):
    """ptxas 12.8 assembles products of some of these sizes wrongly (dsf.kernels.triton.assembler)."""
    verdict = attempt(DECAYING, Case(tokens=150, heads=2, n=n, p=p, dtype=dtype, seed=n + p), "cuda")
    assert verdict.status == "right", verdict


@pytest.mark.parametrize("layout", ["contiguous", "headtail"])
@pytest.mark.parametrize(
    "bounds", [[0, 600], [0, 100, 100, 513, 600], [0, 4444], [0, 1500, 5600]],
    ids=["whole", "packed", "long", "packed-long"],
)  # fmt: skip
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_over_ranks_on_a_gpu(layout, bounds, kv_heads, dtype):
    """As causal attention of the last tokens, without a mask, of long ones in two parts: at most 1.5 times one GPU's
    error, since the parts are rounded before they are joined."""
    torch.manual_seed(0)
    packing = None if len(bounds) == 2 else dsf.Packing(bounds)
    true = [torch.randn(1, bounds[-1], h, 64, dtype=torch.float64, device="cuda") for h in (4, kv_heads, kv_heads)]

    def run(kind, **more):
        leaves = [x.to(kind).requires_grad_() for x in true]
        y = mixers.softmax_attention(*leaves, cu_seqlens=packing, **more)
        return y, *torch.autograd.grad(y.double().sin().sum(), leaves)

    exact, plain, found = run(torch.float64), run(dtype), run(dtype, parallel=Simulated(2, layout))
    for one, other, expected in zip(found, plain, exact, strict=True):
        error, allowed = ((x.double() - expected).norm() for x in (one, other))
        assert error <= 1.5 * allowed + 1e-6 * expected.norm()


@pytest.mark.parametrize("layout", ["contiguous", "headtail"])
@pytest.mark.parametrize("bounds", [[0, 600], [0, 100, 100, 513, 600], [0, 4444]], ids=["whole", "packed", "long"])
@pytest.mark.parametrize("name", ["fox", "sliding_window_attention", "softmax_one"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_of_attention_over_ranks_on_a_gpu(layout, bounds, name, dtype):
    """At most 1.5 times one GPU's error: gradients of keys and values are rounded on every rank before they are
    summed."""
    torch.manual_seed(0)
    recurrence = mixers.get(name).recurrence
    packing = None if len(bounds) == 2 else dsf.Packing(bounds)
    shapes = {"q": (4, 64), "k": (4, 64), "v": (4, 64)}
    true = [
        torch.randn(1, bounds[-1], *shapes.get(i.name, (4,)), dtype=torch.float64, device="cuda")
        for i in recurrence.spec.inputs
    ]

    def run(kind, **more):
        leaves = [x.to(kind).requires_grad_() for x in true]
        y = recurrence(*leaves, cu_seqlens=packing, **more)
        return y, *torch.autograd.grad(y.double().sin().sum(), leaves)

    exact, plain, found = run(torch.float64), run(dtype), run(dtype, parallel=Simulated(2, layout))
    for one, other, expected in zip(found, plain, exact, strict=True):
        error, allowed = ((x.double() - expected).norm() for x in (one, other))
        assert error <= 1.5 * allowed + 2e-6 * expected.norm()
