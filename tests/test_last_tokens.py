"""Attention of a sequence's last tokens to all of it, in two parts, beside its definition."""

import pytest
import torch
import torch.nn.functional as F

from dsf.kernels import last_tokens
from dsf.kernels.attention import causal, fused, softmax_matrix, spread_heads

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
WIDE = [(torch.float32, 8.0), (torch.bfloat16, 1.5)]  # by how much scores differ: by some thousand, by 86


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """In two parts, however few the tokens."""
    monkeypatch.setattr(last_tokens, "PAIRS", 0)


def drawn(tokens, places, heads, dtype, device="cpu", n=16):
    """a, k, v of which the keys and values have fewer heads, and dy."""
    sizes = (4, tokens), (heads, places), (heads, places)
    leaves = [torch.randn(2, h, t, n, device=device).to(dtype).requires_grad_() for h, t in sizes]
    return leaves, torch.randn(2, 4, tokens, n, device=device).to(dtype)


def worst(found, exact):
    """The largest error of y and of each gradient, per row, head and block of 50 tokens, over the typical block."""
    pairs = zip(found, exact, strict=True)
    off = [[part.square().mean(dim=(2, 3)).max() for part in (x.double() - y).split(50, dim=2)] for x, y in pairs]
    return [float((max(parts) / y.square().mean()).sqrt()) for parts, y in zip(off, exact, strict=True)]


def ran(call, leaves, dy):
    """y and all gradients. call: of a, k and v of as many heads."""
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def by_mask(a, k, v):
    """torch's attention, with a mask."""
    k, v = (spread_heads(x, a.shape[1]) for x in (k, v))
    seen = causal(a.shape[2], k.shape[2], a.device)
    return F.scaled_dot_product_attention(a, k, v, attn_mask=seen, scale=0.3)


def errors(leaves, dy):
    """The worst errors, and torch's with a mask."""
    true = [x.detach().double().requires_grad_() for x in leaves]
    exact = ran(
        lambda a, k, v: softmax_matrix(0.3 * a, spread_heads(k, 4), None) @ spread_heads(v, 4), true, dy.double()
    )
    return [worst(ran(call, leaves, dy), exact) for call in (lambda *x: fused(*x, None, 0.3), by_mask)]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(("tokens", "before"), [(1, 1), (1, 300), (33, 1), (150, 261), (64, 64)])
def test_the_last_tokens_attend_to_all(tokens, before, heads, dtype):
    leaves, dy = drawn(tokens, tokens + before, heads, dtype)
    assert last_tokens.fits(*leaves)
    assert max(errors(leaves, dy)[0]) <= LIMITS[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "before", "n"), [(64, 1024, 64), (333, 1500, 64), (1024, 3072, 128), (777, 1031, 24)]
)
def test_the_last_tokens_attend_to_all_on_a_gpu(tokens, before, n, dtype):
    leaves, dy = drawn(tokens, tokens + before, 2, dtype, "cuda", n)
    assert last_tokens.fits(*leaves) == (torch.cuda.get_device_capability() >= (9, 0))
    assert max(errors(leaves, dy)[0]) <= 2e-2


@pytest.mark.parametrize(
    ("device", "dtype", "size"), [*(("cpu", *x) for x in WIDE), pytest.param("cuda", *WIDE[1], marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("heavy", [slice(None, 1960), slice(1961, None)], ids=["earlier", "own"])
def test_one_part_may_outweigh_the_other(heavy, device, dtype, size):
    """No infinity, and at most twice the error of torch's attention with a mask."""
    leaves, dy = drawn(40, 2000, 4, dtype, device, 64)
    with torch.no_grad():
        leaves[0].add_(size)
        leaves[1].sub_(size)
        leaves[1][:, :, heavy].add_(2 * size)
    for one, other in zip(*errors(leaves, dy), strict=True):
        assert one <= 2 * other


def test_no_mask_is_stored():
    """A mask of 1,024 queries and 2^13 keys has 2^23 places; keys and values are a quarter of that."""
    leaves, _ = drawn(1024, 1 << 13, 2, torch.float32, n=8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fused(*leaves, None).sum().backward()
    most = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < most < 1 << 23


def test_keys_may_be_values():
    (a, k, _), dy = drawn(33, 150, 4, torch.float64)
    exact = softmax_matrix(0.3 * a, k, None) @ k
    found = fused(a, k, k, None, 0.3)
    for one, other in zip(*(torch.autograd.grad(y, (a, k), dy) for y in (found, exact)), strict=True):
        torch.testing.assert_close(one, other)


def test_one_graph_holds_both_parts():
    leaves, dy = drawn(33, 150, 4, torch.float32)
    compiled = torch.compile(lambda *x: fused(*x, None), fullgraph=True, backend="aot_eager")
    for one, other in zip(ran(compiled, leaves, dy), ran(lambda *x: fused(*x, None), leaves, dy), strict=True):
        torch.testing.assert_close(one, other)


def test_few_tokens_on_a_cpu_take_a_mask(monkeypatch):
    monkeypatch.undo()
    a, k = torch.randn(1, 1, 1024, 8), torch.randn(1, 1, 2048, 8)
    assert last_tokens.fits(a, k, k) and not last_tokens.fits(a[:, :, :100], k, k)


def test_a_second_derivative_is_refused():
    leaves, dy = drawn(3, 8, 4, torch.float64)
    with pytest.raises(RuntimeError, match="derivative"):
        torch.autograd.grad(fused(*leaves, None), leaves[0], dy, create_graph=True)


def test_other_operands_run_on_torch_s_public_attention():
    a, k, v = (torch.randn(1, 2, t, n) for t, n in ((5, 16), (9, 16), (9, 8)))
    assert not last_tokens.fits(a, k, v)  # other channels than key entries
    assert not last_tokens.fits(a, k[:, :, :5], k[:, :, :5])  # nothing earlier
    assert not last_tokens.fits(a[:, :, :0], k, k)
    expected = softmax_matrix(a, k, None) @ v
    torch.testing.assert_close(fused(a, k, v, None), expected)


def test_what_torch_is_told_of_its_kernels_is_heeded():
    assert last_tokens._wanted()
    try:
        torch.backends.cuda.enable_cudnn_sdp(False)
        assert not last_tokens._wanted()
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.set_deterministic_debug_mode("error")
        assert not last_tokens._wanted()
        torch.set_deterministic_debug_mode("warn")
        assert last_tokens._wanted()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.set_deterministic_debug_mode("default")
