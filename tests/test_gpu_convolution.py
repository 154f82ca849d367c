"""The convolution form on a GPU: impulse responses and whole calls, against steps in float64."""

import copy

import pytest
import torch
from fourier_family import BY_FILTERS, PRINTED, compare, drawn, gated_bank, results

from dsf import long_convolution, mixers
from dsf.kernels.invariant import Diagonal, Invariant, by_kernel
from dsf.triton import convolve

pytestmark = pytest.mark.gpu


def on_gpu(inputs):
    return {name: x.cuda() for name, x in inputs.items()}


def wide(inputs):
    return {name: x.double() for name, x in inputs.items()}


@pytest.mark.parametrize("r", PRINTED, ids=lambda r: r.name)
@pytest.mark.parametrize("tokens", [1, 64, 777])
def test_outputs_and_gradients_are_those_of_the_steps(r, tokens):
    inputs = on_gpu(drawn(r, T=tokens, B=3))
    assert convolve.on_kernels(inputs[next(iter(inputs))])
    expected = results(r, wide(inputs), "recurrent")
    for _ in range(3):
        compare(r, inputs, results(r, inputs, "convolution"), expected, 1e-5)
    with torch.no_grad():
        compare(r, inputs, {"y": r(**inputs, form="convolution")}, {"y": expected["y"]}, 1e-5)


@pytest.mark.parametrize("r", BY_FILTERS, ids=lambda r: r.name)
@pytest.mark.parametrize("tokens", [1, 64, 777])
def test_impulse_responses_by_torch_give_outputs_and_gradients_of_the_steps(r, tokens):
    given = drawn(r, T=tokens, B=3)
    inputs, plain = on_gpu(given), on_gpu(results(r, given, "convolution"))
    expected = results(r, wide(inputs), "recurrent")
    for _ in range(3):
        compare(r, inputs, results(r, inputs, "convolution"), expected, 1e-5, plain)


def test_powers_of_matrices_keep_their_digits_where_torch_multiplies_in_tf32():
    inputs = on_gpu(drawn(mixers.s4, T=2048, H=8, N=64, P=1))
    exact = mixers.s4(**wide(inputs), form="convolution")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        y = mixers.s4(**inputs, form="convolution")
    finally:
        torch.set_float32_matmul_precision(before)
    for head, truth in zip(y.double().unbind(2), exact.unbind(2), strict=True):
        assert (head - truth).norm() <= 2e-3 * truth.norm()


@pytest.mark.parametrize("tokens", [2048, 16_384, 20_001])
def test_a_bank_of_many_channels(tokens):
    for r, sizes in ((mixers.s4d, {"H": 300, "N": 64}), (mixers.s4d_real, {"H": 1, "N": 32, "P": 300})):
        inputs = on_gpu(drawn(r, T=tokens, **sizes))
        expected = results(r, wide(inputs), "convolution")  # torch's, in float64
        plain = results(r, inputs, "convolution", backend="torch")
        compare(r, inputs, results(r, inputs, "convolution"), expected, 1e-5, plain)


@pytest.mark.parametrize("r", [mixers.s4d, mixers.h3, mixers.lru], ids=lambda r: r.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precisions_are_rounded_once(r, dtype):
    inputs = on_gpu(drawn(r, T=500, dtype=dtype))
    compare(r, inputs, results(r, inputs, "convolution"), results(r, wide(inputs), "recurrent"), 2.0**-7)


def test_states_packed_sequences_and_reversed_ones():
    for r in (mixers.s4d, mixers.lru, gated_bank):
        inputs = on_gpu(drawn(r, B=1, T=300))
        state = r(**wide(inputs), return_state=True, form="recurrent")[1]
        for options in (
            {"initial_state": state}, {"cu_seqlens": torch.tensor([0, 7, 7, 300], device="cuda")}, {"reverse": True},
            {"return_state": True},
        ):  # fmt: skip
            narrow = {name: x.float() if name == "initial_state" else x for name, x in options.items()}
            got = r(**inputs, **narrow, form="convolution")
            expected = r(**wide(inputs), **options, form="recurrent")
            pairs = zip(got, expected, strict=True) if "return_state" in options else [(got, expected)]
            for a, b in pairs:
                assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("length", [1, 100, 5000])
def test_impulse_responses_and_gradients(turned, length):
    g = torch.Generator().manual_seed(length)
    c, b = (torch.randn(3, 40, p, generator=g, dtype=torch.float64).cuda() for p in (1, 2))
    log = -0.1 * torch.rand(3, 20 if turned else 40, 1, generator=g, dtype=torch.float64).cuda()
    angle = torch.randn(3, 20, 1, generator=g, dtype=torch.float64).cuda() if turned else None
    leaves = [x.requires_grad_() for x in (c, b, log, angle) if x is not None]
    step = Diagonal(log.repeat_interleave(2, dim=1) if turned else log, True, angle)
    dh = torch.randn(3, 2, length, generator=g, dtype=torch.float64).cuda()
    truth = Invariant(step, c, (b,)).products(b, length, torch.float64)[..., :length]
    h = by_kernel(step, c, b, length)
    for a, x in ((h, truth), *zip(*(torch.autograd.grad(y, leaves, dh.to(y)) for y in (h, truth)), strict=True)):
        for head, exact in zip(a.double(), x, strict=True):
            assert (head - exact).norm() <= 3e-6 * exact.norm()


def test_a_captured_graph_and_a_compiled_function_give_the_same():
    inputs = on_gpu(drawn(mixers.s4d, T=200))
    expected = mixers.s4d(**inputs, form="convolution")
    compiled = torch.compile(lambda **x: mixers.s4d(**x, form="convolution"))
    torch.testing.assert_close(compiled(**inputs), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mixers.s4d(**inputs, form="convolution")
    inputs["x"].mul_(2)
    graph.replay()
    torch.testing.assert_close(y, mixers.s4d(**inputs, form="convolution"))


@pytest.mark.parametrize("tokens, length", [(1, 3), (700, 700), (4096, 100), (500, 2000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_long_convolution(tokens, length, dtype):
    torch.manual_seed(0)
    x, gate = torch.randn(2, 2, tokens, 3, 70, device="cuda").to(dtype)
    h, D = torch.randn(3, length, 70, device="cuda") / length**0.5, torch.randn(3, 70, device="cuda")
    found = []
    for leaves in ([x, h, gate, D], [z.double() for z in (x, h, gate, D)]):
        leaves = [z.detach().requires_grad_() for z in leaves]
        y = long_convolution(*leaves)
        weights = torch.linspace(-1, 1, y.numel(), device="cuda").cos().bfloat16().to(y).view_as(y)
        found.append([y, *torch.autograd.grad((y * weights).sum(), leaves)])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= (1e-5 if dtype == torch.float32 else 2.0**-8) * b.norm()


@pytest.mark.parametrize("tokens, taps", [(30, 64), (1023, 64), (5000, 64), (1100, 9), (1023, 200), (1100, 200)])
def test_short_convolutions_of_many_taps(tokens, taps):
    """By sums; of more than 128 taps by torch, and by transforms from 1,024 tokens on."""
    torch.manual_seed(0)
    conv = mixers.H3(48, d_conv=taps).conv1d.cuda().bfloat16()
    x, state = torch.randn(2, tokens, 48).cuda().bfloat16(), torch.randn(2, 48, taps - 1).cuda().bfloat16()
    found = []
    for module, dtype in ((conv, torch.bfloat16), (copy.deepcopy(conv).double(), torch.float64)):
        leaves = [x.to(dtype).requires_grad_(), state.to(dtype).requires_grad_(), *module.parameters()]
        y, last = module(*leaves[:2])
        weights = torch.linspace(-1, 1, y.numel(), device="cuda").cos().bfloat16().to(dtype).view_as(y)
        found.append([y, last, *torch.autograd.grad((y * weights).sum(), leaves)])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 2.0**-7 * b.norm()
