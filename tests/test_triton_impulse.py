"""The impulse response of time-invariant systems by kernels, in Triton's interpreter, against torch's in float64."""

import pytest
import torch
from interpreted import interpreted
from test_invariant import complex_bank, driven_entries, everything, sample, two_steps

from dsf import mixers
from dsf.kernels import invariant
from dsf.kernels.invariant import Diagonal, Invariant

pytestmark = interpreted


@pytest.fixture
def by_kernel(monkeypatch):
    """A function that says whether impulse responses of float32 are made by kernels from now on."""

    def set_to(now):
        monkeypatch.setattr(invariant, "_has_kernel", lambda x, length, dtype: now and dtype == torch.float32)

    return set_to


def system(heads, n, of_read, of_write, turned, apart, before=False):
    """(leaves, a function that makes the Invariant of them)."""
    g = torch.Generator().manual_seed(heads * n)
    c, b = (torch.randn(heads, n, p, generator=g, dtype=torch.float64) for p in (of_read, of_write))
    rates = n // 2 if turned else n
    log = -0.2 * torch.rand(heads, rates if apart else 1, 1, generator=g, dtype=torch.float64)
    angle = 2 * torch.randn(heads, rates, 1, generator=g, dtype=torch.float64) if turned else None
    leaves = [x.requires_grad_() for x in (c, b, log, angle) if x is not None]

    def made():
        wide = log.repeat_interleave(2, dim=1) if turned and apart else log
        return Invariant(Diagonal(wide, True, angle), c, (b,), before)

    return leaves, made


@pytest.mark.parametrize(
    "sizes, length",
    [
        ((2, 6, 1, 1, True, True), 37), ((2, 5, 3, 1, False, True), 100), ((1, 4, 2, 2, True, False), 2),
        ((2, 3, 1, 2, False, True), 1),
        ((2, 40, 1, 1, True, True, True), 300), ((1, 3, 2, 2, False, False), 70), ((1, 36, 1, 2, True, True), 5000),
    ],
)  # fmt: skip
def test_impulse_responses_and_gradients_by_kernels_are_those_of_float64(sizes, length, by_kernel):
    leaves, made = system(*sizes)
    found = []
    for dtype, now in ((torch.float64, False), (torch.float32, True)):
        by_kernel(now)
        h = made().impulses(length, dtype)[0]
        dh = torch.randn(h.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        found.append([h, *torch.autograd.grad(h, leaves, dh.to(dtype))])
    for got, expected in zip(found[1], found[0], strict=True):
        assert got.shape == expected.shape
        for a, b in zip(got.double().unbind(0), expected.unbind(0), strict=True):  # head by head
            assert (a - b).norm() <= 1e-6 * b.norm().clamp(min=1)  # sums of numbers of about 1, which may cancel


def test_second_derivatives_go_through_torch(by_kernel):
    leaves, made = system(2, 6, 1, 1, True, True)
    found = []
    for dtype, now in ((torch.float64, False), (torch.float32, True)):
        by_kernel(now)
        first = torch.autograd.grad(made().impulses(40, dtype)[0].square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))
    for got, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize(
    "r", [mixers.s4d, mixers.s4d_real, mixers.lru, complex_bank, driven_entries, two_steps], ids=lambda r: r.name
)
def test_calls_convolve_as_they_recur(r, by_kernel, counting):
    inputs = sample(r, T=50, dtype=torch.float32)
    if "dt" in inputs:
        inputs["dt"] -= 3
    by_kernel(True)
    launched = counting(invariant, "by_kernel")
    got = everything(r, inputs, "convolution")
    assert bool(launched[0]) == (r is not two_steps)  # whose decay is no exponential
    wide = {n: x.double() for n, x in inputs.items()}
    for a, b in zip(got, everything(r, wide, "recurrent"), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
