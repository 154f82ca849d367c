"""The long convolution as one operator, in Triton's interpreter, against its definition in float64."""

import copy

import pytest
import torch
from interpreted import interpreted

import dsf
from dsf import mixers
from dsf.call import long
from dsf.kernels.triton.fourier.operator import CONVOLUTIONS
from dsf.mixers import _conv
from dsf.triton import long as on_gpu

pytestmark = interpreted


@pytest.fixture(autouse=True)
def on_kernels(monkeypatch):
    monkeypatch.setattr(long, "on_kernels", lambda x: x.dtype != torch.float64)


def drawn(batch, tokens, heads, length, p, dtype=torch.float32):
    """x, h, gate and D."""
    x, gate = torch.randn(2, batch, tokens, heads, p).to(dtype)
    return [x, torch.randn(heads, length, p), gate, torch.randn(heads, p)]


def results(leaves, gated, skipped, form):
    """y and the gradients of what is given."""
    x, h, gate, D = leaves = [None if z is None else z.detach().requires_grad_() for z in leaves]
    y = dsf.long_convolution(x, h, gate if gated else None, D if skipped else None, form=form)
    used = [z for z, now in zip(leaves, (True, True, gated, skipped), strict=True) if now]
    weights = torch.linspace(-1, 1, y.numel()).cos().bfloat16().to(y).view_as(y)
    return [y, *torch.autograd.grad((y * weights).sum(), used)]


@pytest.mark.parametrize("tokens, length", [(11, 11), (11, 4), (11, 30), (1, 3), (131, 131), (300, 20), (70, 1)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("skipped", [False, True])
def test_it_is_the_sum_over_lags_with_all_gradients(tokens, length, gated, skipped, counting):
    leaves = drawn(2, tokens, 3, length, 5)
    calls = counting(on_gpu, "run")
    got = results(leaves, gated, skipped, "auto")
    assert calls[0]
    for a, b in zip(got, results([z.double() for z in leaves], gated, skipped, "naive"), strict=True):
        heads = [z.double().unbind(2 if z.dim() == 4 else 0) for z in (a, b)]
        assert all((head - exact).norm() <= 2e-6 * exact.norm() for head, exact in zip(*heads, strict=True))
    with torch.no_grad():
        x, h, gate, D = leaves
        assert torch.equal(dsf.long_convolution(x, h, gate if gated else None, D if skipped else None), got[0])


@pytest.mark.parametrize("more", [True, False])
def test_half_precisions_are_rounded_once(more):
    leaves = drawn(1, 70, 2, 70, 3, torch.bfloat16)
    got, expected = results(leaves, more, more, "auto"), results([z.double() for z in leaves], more, more, "naive")
    assert [z.dtype for z in got[1:]] == [z.dtype for z in leaves[: len(got) - 1]] and got[0].dtype == torch.bfloat16
    assert all((a - b).norm() <= 2.0**-8 * b.norm() for a, b in zip(got, expected, strict=True))


def test_a_short_filter_is_summed_to_the_last_token_alike():
    """No token's error depends on later ones, as it does by transforms; x is a slice of a wider tensor."""
    x, h = torch.randn(2, 200, 40), torch.randn(1, 64, 24)
    x[:, 120:] *= 1e6
    exact = dsf.long_convolution(x[..., 8:32].unsqueeze(2).double(), h.double(), form="naive")
    for _ in range(3):
        y = dsf.long_convolution(x[..., 8:32].unsqueeze(2), h)
        for block, truth in zip(y.split(40, 1), exact.split(40, 1), strict=True):
            assert (block - truth).abs().max() <= 1e-5 * truth.abs().max()


def test_transforms_err_as_those_of_torch(monkeypatch):
    """In each block of tokens or taps, over all channels, of which there are enough for an error's root mean square."""
    leaves, found = drawn(2, 200, 40, 200, 5)[:2], []
    exact = results([*(z.double() for z in leaves), None, None], False, False, "auto")
    for kernels in (True, False):
        monkeypatch.setattr(long, "on_kernels", lambda x, now=kernels: now and x.dtype != torch.float64)
        got = results([*leaves, None, None], False, False, "auto")
        errors = [(a.double() - b).split(50, 1) for a, b in zip(got, exact, strict=True)]
        found.append(torch.tensor([block.detach().square().mean().sqrt() for blocks in errors for block in blocks]))
    assert (found[0] <= 1.1 * found[1]).all()


@pytest.mark.parametrize("tokens", [3, 41])
@pytest.mark.parametrize("activation", [None, torch.nn.functional.silu])
def test_short_convolutions_of_many_taps_sum_in_half_precision(tokens, activation, monkeypatch, counting):
    """With a bias and from a state; also of fewer tokens than taps. y is rounded before the bias, and before SiLU."""
    monkeypatch.setattr(_conv, "on_kernels", lambda x: x.dtype != torch.float64)
    conv, calls = _conv.ShortConv(7, 20, activation=activation).bfloat16(), counting(on_gpu, "_by_sums")
    x, state, found = torch.randn(2, tokens, 7).bfloat16(), torch.randn(2, 7, 19).bfloat16(), []
    for module, dtype in ((conv, torch.bfloat16), (copy.deepcopy(conv).double(), torch.float64)):
        leaves = [x.to(dtype).requires_grad_(), state.to(dtype).requires_grad_(), *module.parameters()]
        y, last = module(*leaves[:2])
        weights = torch.linspace(-1, 1, y.numel()).cos().bfloat16().to(dtype).view_as(y)
        found.append([y, last, *torch.autograd.grad((y * weights).sum(), leaves)])
    assert calls[0] == 1
    for a, b in zip(*found, strict=True):
        assert a.dtype == torch.bfloat16 and (a - b).norm() <= 2.0**-7 * b.norm()


def test_sums_have_derivatives_of_their_gradients():
    """Also where one tensor is the input and, of one channel and all its tokens, the filter."""
    x, h = torch.randn(2, 20, 3, 5), torch.randn(3, 12, 5)
    found = []
    for dtype in (torch.float32, torch.float64):
        x, h = (z.detach().to(dtype).requires_grad_() for z in (x, h))
        own = x[:1, :, :1, :1]
        y = dsf.long_convolution(x, h).square().sum() + dsf.long_convolution(own, own[0].transpose(0, 1)).sum()
        again = torch.autograd.grad(y, [x, h], create_graph=True)
        found.append([*again, *torch.autograd.grad(sum(z.square().sum() for z in again), [x, h])])
    assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(*found, strict=True))


def test_one_tensor_as_several_inputs_and_second_derivatives():
    x, h, _, D = drawn(2, 20, 3, 20, 5)
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [z.to(dtype).requires_grad_() for z in (x, h, D)]
        y = dsf.long_convolution(leaves[0], leaves[1], leaves[0], leaves[2])
        first = torch.autograd.grad(y.square().sum(), leaves, retain_graph=True)
        again = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        found.append([*first, *again, *torch.autograd.grad(sum(z.square().sum() for z in again), leaves)])
    assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(*found, strict=True))


def test_inputs_of_any_strides_and_gradients_of_some():
    x, h, gate, D = leaves = drawn(2, 20, 3, 25, 5)
    expected = results([z.double() for z in leaves], True, True, "naive")[1:]
    x, h = x.transpose(1, 3).contiguous().transpose(1, 3), h.mT.contiguous().mT
    for place in range(4):
        given = [z.detach().requires_grad_(place == i) for i, z in enumerate((x, h, gate, D))]
        y = dsf.long_convolution(*given)
        weights = torch.linspace(-1, 1, y.numel()).cos().bfloat16().to(y).view_as(y)
        (slope,) = torch.autograd.grad((y * weights).sum(), [given[place]])
        assert (slope - expected[place]).norm() <= 2e-6 * expected[place].norm()


@pytest.mark.parametrize("order", [2, 3])
def test_hyena_runs_on_it_as_in_float64(order, counting):
    layer, x = mixers.Hyena(8, 64, order=order), torch.randn(2, 50, 8)
    wide = copy.deepcopy(layer).double()
    calls = counting(on_gpu, "run")
    y, _ = layer(x)
    assert calls[0] == order - 1
    exact, _ = wide(x.double())
    assert (y - exact).norm() <= 1e-5 * exact.norm()
    y.square().sum().backward()
    exact.square().sum().backward()
    for a, b in zip(layer.parameters(), wide.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 1e-4 * b.grad.norm()


def test_a_process_that_loads_a_graph_prints_what_it_names():
    names = on_gpu.names()
    kept = {name: CONVOLUTIONS.pop(name) for name in names}
    on_gpu.program_of.cache_clear()
    assert CONVOLUTIONS[names[-1]].functions is not None
    assert {name: CONVOLUTIONS[name] for name in names} == kept
