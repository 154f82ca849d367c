"""Turned vectors and the gradients of angles on a GPU, against float64, per head and block of tokens."""

import pytest
import torch
from step_family import FRAMED, decode
from turned_family import RECURRENCES, delta, mamba3, mamba3_biased, outcome, rotary, sample, spiral

from dsf import mixers

pytestmark = pytest.mark.gpu
EVERY = pytest.mark.parametrize("r", RECURRENCES, ids=lambda r: r.name)
STEPPED = [*FRAMED, spiral, delta, mamba3, mamba3_biased, mixers.s5, mixers.s4d]
BOUNDS = [0, 0, 700, 701, 701, 1500, 2085]
ALLOWED = {torch.float32: 5e-6, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def errors(found, expected, block=256):
    """The largest error of a head and block of tokens, over that block's typical size in the head."""
    out = {}
    for name, want in expected.items():
        error = found[name].double() - want
        if want.dim() < 4 or want.shape[1] < 2 * block:
            out[name] = float(error.norm() / want.norm()) / (1 if want.dim() > 2 else 2)
            continue
        count = want.shape[1] // block
        apart = [x[:, : count * block].unflatten(1, (count, block)).square().mean((0, 2, -1)) for x in (error, want)]
        out[name] = float((apart[0] / apart[1].mean(0, keepdim=True)).max().sqrt())
    return out


def on_gpu(r, **sizes):
    return {name: x.cuda() for name, x in sample(r, **sizes).items()}


@EVERY
@pytest.mark.parametrize("dtype", list(ALLOWED), ids=str)
@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["whole", "packed"])
@pytest.mark.parametrize("started", [False, True], ids=["", "started"])
def test_gradients_equal_float64(r, dtype, bounds, started):
    given = on_gpu(r, B=1 if bounds else 2, T=2085, N=64, P=64)
    options = {"cu_seqlens": torch.tensor(bounds, device="cuda")} if bounds else {}
    start = None
    if started:
        start = torch.randn(len(bounds) - 1 if bounds else 2, 2, *r.state_shape(64, 64), device="cuda")
    expected = outcome(r, given, torch.float64, start, form="chunk", backend="torch", **options)
    found = outcome(r, given, dtype, start, 3, backend="triton", **options)
    for name, error in errors(found, expected).items():
        if torch.isfinite(expected[name].to(dtype)).all():  # rotary forgets nothing: its sums leave float16's range
            assert error < ALLOWED[dtype], (name, error)


@pytest.mark.parametrize("r", [spiral, delta, mamba3_biased], ids=lambda r: r.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stretches_and_segments_of_long_sequences(r, dtype):
    """Of few heads, whose segments run in parallel, and of many, whose gradients are made one stretch at a time."""
    for sizes in ({"B": 1, "T": 30_001, "H": 1}, {"B": 2, "T": 8_192, "H": 32}):
        given = on_gpu(r, N=64, P=64, **sizes)
        expected = outcome(r, given, torch.float64, form="chunk", backend="torch")
        found = outcome(r, given, dtype, backend="triton")
        for name, error in errors(found, expected).items():
            assert error < ALLOWED[dtype], (name, error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_errors_do_not_grow_with_the_tokens(dtype):
    """The gradient of an angle sums slopes of all later tokens."""
    first, last = [], []
    for tokens in (1024, 16_384):
        given = on_gpu(spiral, B=1, T=tokens, H=2, N=64, P=64)
        expected = outcome(spiral, given, torch.float64, form="chunk", backend="torch")
        found = outcome(spiral, given, dtype, backend="triton")
        (first if tokens == 1024 else last).append(errors(found, expected)["t"])
    assert last[0] < 1.5 * first[0]


@pytest.mark.parametrize("r", [mamba3_biased, rotary], ids=lambda r: r.name)
def test_a_captured_call_runs_again(r):
    given = {name: x.bfloat16().requires_grad_() for name, x in on_gpu(r, T=300, N=64, P=64).items()}

    def step():
        return torch.autograd.grad(r(**given, backend="triton").float().square().sum(), list(given.values()))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            expected = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


def test_a_compiled_call_is_the_eager_one():
    given = {name: x.bfloat16().requires_grad_() for name, x in on_gpu(mamba3, T=300, N=64, P=64).items()}
    compiled = torch.compile(mamba3, fullgraph=True)
    results = []
    for call in (mamba3, compiled, compiled):
        y = call(**given)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), list(given.values()))])
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert (got.double() - want.double()).norm() < 2e-2 * want.double().norm()


@pytest.mark.parametrize("in_place", [False, True], ids=["", "in place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n, p", [(24, 40), (128, 64), (64, 200), (2, 2)])
@pytest.mark.parametrize(
    "r", [*FRAMED, spiral, delta, mamba3, mamba3_biased, mixers.s5, mixers.s4d], ids=lambda r: r.name
)
def test_tokens_one_by_one(r, n, p, dtype, in_place):
    """Every head and token of six steps, and the last state."""
    heads = 4 if n > 2 else 6001  # of which a program takes eight
    given = {name: x.to(dtype) for name, x in on_gpu(r, B=3, T=6, H=heads, N=n, P=p).items()}
    y, state = decode(r, given, in_place=in_place)
    expected, last = r(**{name: x.double() for name, x in given.items()}, return_state=True, form="naive")
    scale = expected.abs().amax((1, 3), keepdim=True).clamp(min=1e-3)
    assert ((y.double() - expected).abs() / scale).max() < (2e-5 if dtype == torch.float32 else 1e-2)
    if not r.spec.inner.is_stabilised:
        assert torch.equal(state.double() == 0, last == 0)  # no garbage where no previous value ends
        assert ((state.double() - last).abs().amax((2, 3)) / last.abs().amax((2, 3))).max() < 2e-5
