"""Products of a decoded token on a GPU, against float64, and launches that begin before the one before them ends."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from dsf.kernels.attention import Filled, KVCache
from dsf.kernels.convolution import Piece, short_convolution_step
from dsf.kernels.fixed_cache import attend, fixed, step, write
from dsf.kernels.norm import added_rms_norm, gated, gated_rms_norm
from dsf.kernels.product import linear
from dsf.mixers import GatedDeltaNet
from dsf.models import CausalLM, ModelConfig

pytestmark = pytest.mark.gpu

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7}  # of the sum of a product's terms without signs


def drawn(dtype, *shapes):
    return [torch.randn(*shape, device="cuda").to(dtype) for shape in shapes]


def assert_near(found, rows, wide, dtype):
    assert ((found.double() - rows @ wide).abs() <= ROUNDING[dtype] * (rows.abs() @ wide.abs())).all()


@torch.no_grad()
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width, outputs", [(1024, 4128), (2816, 1024), (2048, 32000), (40, 1)])
def test_products_behind_everything(width, outputs, rows, dtype):
    x, gate, weight, matrix = drawn(dtype, (rows, 1, width), (rows, 1, width), (width,), (outputs, width))
    wide = matrix.double().T

    def normal(y):
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * weight.double()

    a, g = x.double(), gate.double()
    silu = g * torch.sigmoid(g)
    for _ in range(3):
        assert_near(linear(x, matrix), a, wide, dtype)
        assert torch.equal(linear(x, nn.Parameter(matrix, False), ahead=True), linear(x, matrix))
        assert_near(gated(x, gate, then=matrix), a * silu, wide, dtype)
        assert_near(gated_rms_norm(x, weight, gate, then=matrix), normal(a) * silu, wide, dtype)
        total, found = added_rms_norm(x, gate, weight, then=matrix)
        assert torch.equal(total, x + gate)
        assert_near(found, normal(total.double()), wide, dtype)


@torch.no_grad()
@pytest.mark.parametrize("graph", [False, True])
def test_no_launch_reads_before_it_is_written(graph):
    """A chain of short launches gives the bits that it gives where each has ended before the next begins."""
    width, pieces = 512, [Piece(256, 64), Piece(256)]
    squares = [nn.Parameter(m / width**0.5, False) for m in drawn(torch.bfloat16, *[(width, width)] * 24)]
    taps, weight = (m.bfloat16() for m in (torch.randn(width, 4, device="cuda"), torch.ones(width, device="cuda")))
    bias = nn.Parameter(torch.randn(width, device="cuda").bfloat16(), False)
    window = torch.randn(1, width, 3, device="cuda").bfloat16()
    token, start = torch.empty(1, 1, width, device="cuda", dtype=torch.bfloat16), torch.randn(width, device="cuda")

    def chain(wait):
        x, state, seen = token, window.clone(), []
        for m in squares:
            y = gated(x, x, then=m)
            wait()
            ys, state = short_convolution_step(y, taps, None, state, None, pieces, True)
            wait()
            late = linear(torch.cat(ys, -1), m, ahead=True, bias=bias)
            wait()
            x, y = added_rms_norm(x, late, weight, then=m)
            wait()
            x = gated_rms_norm(y, weight, x)
            wait()
            seen.append(x)
        return torch.stack(seen), state

    token.copy_(start)
    expected = [y.clone() for y in chain(torch.cuda.synchronize)]
    assert expected[0].isfinite().all()
    run = chain
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            kept = chain(lambda: None)

        def run(_):
            captured.replay()
            return kept

    for _ in range(20):
        token.copy_(start)
        assert all(torch.equal(a, b) for a, b in zip(run(lambda: None), expected, strict=True))


MIXERS = [
    "gated_deltanet",
    "softmax_attention",
    "fox",
    "alibi",
    "sliding_window_attention",
    "s6",
    "ssd",
    "mlstm",
    "rg_lru",
    "rwkv7",
    "mamba3",
    "linear_attention",
    "gla",
    "kda",
    "lru",
]


@torch.no_grad()
@pytest.mark.parametrize("mixer", MIXERS)
def test_models_decode_what_they_say_whole(mixer):
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=97, d_model=128, n_layers=2, mixers=[mixer])
    model = CausalLM(config).cuda().eval()
    ids = torch.randint(0, 97, (2, 24), device="cuda")
    whole = model(ids).logits
    out = model(ids[:, :16])
    state, found = model.reserve(out.state, 24), []
    for t in range(16, 24):
        out = model.step(ids[:, t], state, in_place=True)
        state = out.state
        found.append(out.logits)
    apart = (torch.stack(found, 1) - whole[:, 16:]).abs().amax(-1)
    assert (apart <= 2e-3 * whole[:, 16:].abs().amax(-1)).all(), apart


def test_a_layer_of_one_head_keeps_its_shape():
    layer = GatedDeltaNet(64, n_heads=1).cuda()
    x = torch.randn(2, 9, 64, device="cuda", requires_grad=True)
    y, state = layer(x)
    assert y.shape == x.shape
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()
    with torch.no_grad():
        token, _ = layer.step(x[:, 8], layer(x[:, :8])[1])
    assert (token - y[:, 8]).abs().max() <= 1e-3 * y[:, 8].abs().max()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads, groups, width, window", [(8, 8, 64, None), (8, 2, 128, None), (4, 1, 96, 128)])
def test_attention_of_a_token(heads, groups, width, window, dtype):
    lengths, places = torch.tensor([0, 37, 700, 127], device="cuda"), 1024 if window is None else window
    k, v = drawn(dtype, *[(4, groups, min(700, places), width)] * 2)
    cache = fixed(KVCache(k, v, lengths), places, window)
    exact = cache.map(lambda x: x.double())._replace(lengths=lengths.clone(), filled=Filled(700))
    for _ in range(5):
        a, *own = drawn(dtype, (4, heads, 1, width), (4, groups, 1, width), (4, groups, 1, width))
        found = step(cache, a, *own, None, None, width**-0.5, window, places)
        kept = write(exact, *(x.double() for x in own), None, None, window, places)
        wanted = attend(a.double(), *kept, width**-0.5)
        apart = (found.double() - wanted).abs().amax(-1)
        assert (apart <= (1e-5 if dtype == torch.float32 else 2**-7) * wanted.abs().amax(-1)).all()
        assert torch.equal(cache.lengths, exact.lengths)


FULL = """
import torch
from dsf.kernels.attention import KVCache
from dsf.kernels.fixed_cache import fixed, step
x = torch.randn(1, 1, 64, 16, device="cuda")
cache = fixed(KVCache(x, x, torch.tensor([64], device="cuda")), 64, None)
print(step(cache, *[torch.randn(1, 1, 1, 16, device="cuda")] * 3, None, None, 1.0, None, 64).sum().item())
"""


def test_a_memory_without_room_is_an_error():
    found = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True)
    assert found.returncode != 0
    assert "no room for this token" in found.stderr + found.stdout
