"""Decays along the Value axis by chunks, compiled for the GPU, held to float64 per head and per block of 64 tokens."""

import pytest
import torch
from matrix_family import ACROSS, channels_in_steps, fading_channels, given_channels
from test_gpu_matrix import SEGMENT, TOLERANCE, draw, outcome, state_of, worst

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")


def compare(recurrence, given, dtype, **how):
    found = outcome(recurrence, given, dtype, form="chunk", backend="triton", **how)
    expected = outcome(recurrence, given, torch.float64, form="chunk", backend="torch", **how)
    slack = {f"d{i.name}": 10.0 for i in recurrence.spec.inputs if not i.kind.time}  # sums that cancel
    errors = {name: worst(found[name], expected[name]) / slack.get(name, 1.0) for name in found}
    beyond = {name: f"{e:.1e}" for name, e in errors.items() if not e < TOLERANCE[dtype]}
    assert not beyond


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("recurrence", ACROSS, ids=lambda r: r.name)
def test_chunks_equal_float64_forward_and_backward(recurrence, dtype):
    given = draw(recurrence, 200, 64, 64, dtype)
    compare(recurrence, given, dtype, state=state_of(recurrence, 64, 64))


@pytest.mark.parametrize("n, p", [(128, 128), (24, 40), (128, 64), (64, 128), (256, 128), (3, 5), (64, 256), (32, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_tile_size(n, p, dtype):
    compare(given_channels, draw(given_channels, 150, n, p, dtype), dtype, state=state_of(given_channels, n, p))


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127])
def test_any_number_of_tokens(tokens):
    compare(channels_in_steps, draw(channels_in_steps, tokens, 32, 32, torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("strength", [0.02, 1, 8, 60])
@pytest.mark.parametrize("n", [64, 128])
def test_decays_weak_and_strong(n, strength):
    """Chunks that one product holds, and chunks whose channels partly leave its range."""
    given = draw(given_channels, 200, n, n, torch.bfloat16)
    given["g"] = (strength * given["g"]).detach().requires_grad_()
    compare(given_channels, given, torch.bfloat16)


def test_grouped_heads_and_packed_sequences():
    given = draw(given_channels, 300, 64, 64, torch.bfloat16, batch=1, heads=8, groups=2)
    state = state_of(given_channels, 64, 64, batch=4, heads=8)
    compare(given_channels, given, torch.bfloat16, cu_seqlens=torch.tensor([0, 1, 70, 70, 300]), state=state)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_segments_of_long_sequences(dtype):
    given = draw(given_channels, 4 * SEGMENT, 64, 64, dtype, batch=1)
    given["g"] = (given["g"] / 16).detach().requires_grad_()
    compare(given_channels, given, dtype, state=state_of(given_channels, 64, 64, batch=1))


def test_the_future_changes_no_bit_of_the_past_and_runs_are_the_same():
    given = {n: x.detach() for n, x in draw(given_channels, 300, 64, 64, torch.bfloat16).items()}
    y = given_channels(**given, form="chunk", backend="triton")
    assert torch.equal(given_channels(**given, form="chunk", backend="triton"), y)
    later = {n: x.clone() for n, x in given.items()}
    for n in ("q", "k", "v", "s", "o"):
        later[n][:, 131:] *= -1
    later["g"][:, 131:] *= 50
    assert torch.equal(given_channels(**later, form="chunk", backend="triton")[:, :131], y[:, :131])
    runs = [outcome(given_channels, given, torch.bfloat16, form="chunk", backend="triton") for _ in range(2)]
    assert all(torch.equal(x, runs[1][name]) for name, x in runs[0].items())


@pytest.mark.parametrize("n", [64, 128])
def test_bfloat16_errs_little_more_than_float32_rounded_once(n):
    given = draw(fading_channels, 512, n, n, torch.bfloat16)
    exact = outcome(fading_channels, given, torch.float64, form="chunk", backend="torch")
    ours = outcome(fading_channels, given, torch.bfloat16, form="chunk", backend="triton")
    plain = outcome(fading_channels, given, torch.float32, form="recurrent", backend="torch")
    for x in ("y", "dq", "dk", "dv", "da"):
        assert worst(ours[x], exact[x]) < 1.5 * worst(plain[x].bfloat16(), exact[x]), x


def test_compiles_in_full():
    given = {n: x.detach() for n, x in draw(fading_channels, 100, 64, 64, torch.bfloat16).items()}
    leaves = {n: x.clone().requires_grad_() for n, x in given.items()}
    compiled = torch.compile(fading_channels, fullgraph=True)
    y, expected = compiled(**leaves), fading_channels(**given)
    assert torch.equal(y, expected)
    torch.autograd.grad(y.float().sum(), list(leaves.values()))
