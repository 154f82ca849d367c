"""The attention kernels on a GPU at head sizes that fill no tile."""

import pytest

from dsf.fuzz import Case, Declaration, attempt

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
