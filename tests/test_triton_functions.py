"""The elementwise functions of generated kernels over float32's whole range, beside float64."""

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from interpreted import INTERPRETED

import dsf.kernels.triton.interpreter  # noqa: F401  # computes with bfloat16
from dsf.kernels.triton import functions as fn
from dsf.kernels.triton import lanes, tile

BLOCK = 1 << 13
EXACT = 5e-7  # as near to the true value as float32's arguments and powers of two allow
# name -> true function, largest relative error, range of arguments; errors grow where e^x does, by x's own rounding
FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float, tuple[float, float]]] = {
    "tanh": (torch.tanh, 1e-6, (-3e38, 3e38)),
    "rough_tanh": (torch.tanh, 4e-5, (-3e38, 3e38)),
    "sigmoid": (torch.sigmoid, EXACT, (-4.0, 3e38)),
    "softplus": (lambda x: torch.logaddexp(x, x.new_zeros(())), EXACT, (-4.0, 3e38)),
    "logsigmoid": (lambda x: -torch.logaddexp(-x, x.new_zeros(())), EXACT, (-3e38, 4.0)),
    "rough_softplus": (lambda x: torch.logaddexp(x, x.new_zeros(())), 2e-5, (-4.0, 3e38)),
    "rough_logsigmoid": (lambda x: -torch.logaddexp(-x, x.new_zeros(())), 2e-5, (-3e38, 4.0)),
    "expm1": (torch.expm1, 2e-6, (-3e38, 4.0)),
    "expm1_from_root": (torch.expm1, 3e-6, (-3e38, 4.0)),
    "phi1": (lambda x: torch.where(x == 0, 1.0, torch.expm1(x) / torch.where(x == 0, 1.0, x)), 1e-6, (-3e38, 4.0)),
    "rsqrt": (torch.rsqrt, EXACT, (1e-37, 3e38)),
}
EDGES = {
    "tanh": (0.0, 1.0, -1.0), "rough_tanh": (0.0, 1.0, -1.0), "sigmoid": (0.5, 1.0, 0.0),
    "sigmoid_slope": (0.25, 0.0, 0.0), "tanh_slope": (1.0, 0.0, 0.0),
    "softplus": (0.6931472, torch.inf, 0.0), "logsigmoid": (-0.6931472, 0.0, -torch.inf),
}  # fmt: skip

on_a_device = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@triton.jit
def _apply(x, y, function: tl.constexpr, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + i, function(tl.load(x + i)))


@triton.jit
def expm1_from_root(x):
    return fn.expm1_of(x, fn.exp(0.5 * x))


@triton.jit
def sigmoid_slope(x):
    return fn.sigmoid(x) * fn.complement(x)


OWN = {"expm1_from_root": expm1_from_root, "sigmoid_slope": sigmoid_slope}


def apply(name: str, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    _apply[(x.numel() // BLOCK,)](x, y, OWN.get(name) or getattr(fn, name), BLOCK)
    return y


def arguments(low: float, high: float) -> torch.Tensor:
    """Every magnitude from 1e-36 on, and densely what is neither small nor large."""
    sizes = torch.logspace(-36, 38.4, BLOCK // 2, dtype=torch.float64)
    x = torch.cat([sizes, -sizes, torch.linspace(-20, 20, BLOCK, dtype=torch.float64)])
    return x.clamp(low, high).float()


@pytest.mark.parametrize("device", on_a_device)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_err_by_little_more_than_rounding(name: str, device: str) -> None:
    true, tolerance, allowed = FUNCTIONS[name]
    x = arguments(*allowed).to(device)
    y, oracle = apply(name, x).double(), true(x.double())
    normal = oracle.abs() > 1.2e-38
    error = ((y - oracle).abs() / oracle.abs())[normal]
    assert float(error.max()) < tolerance, (float(error.max()), float(x[normal][error.argmax()]))
    assert float(y[~normal].abs().max() if bool((~normal).any()) else 0.0) < 1.2e-38


@pytest.mark.parametrize("device", on_a_device)
@pytest.mark.parametrize("name", ["sigmoid_slope", "tanh_slope"])
def test_slopes_err_by_no_more_than_the_power_in_them(name: str, device: str) -> None:
    x = torch.linspace(-40, 40, BLOCK, device=device)
    exponent = 2 * x if name == "tanh_slope" else x
    oracle = (4.0 if name == "tanh_slope" else 1.0) * 0.5 / (1 + exponent.double().cosh())
    error = (apply(name, x).double() / oracle - 1).abs()
    assert bool((error < 1e-6 + exponent.abs().double() * 2**-24).all()), float(error.max())


@pytest.mark.parametrize("device", on_a_device)
@pytest.mark.parametrize("name", EDGES)
def test_functions_at_zero_infinity_and_nan(name: str, device: str) -> None:
    x = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan], device=device).repeat(BLOCK // 4)
    y = apply(name, x)[:4].cpu()
    torch.testing.assert_close(y[:3], torch.tensor(EDGES[name]), rtol=EXACT, atol=0.0)
    assert bool(y[3].isnan())


@pytest.mark.parametrize("device", on_a_device)
def test_a_tanh_for_decays_errs_by_rounding_of_1_and_is_0_at_0(device: str) -> None:
    x = arguments(-3e38, 3e38).to(device)
    assert float((apply("near_tanh", x).double() - torch.tanh(x.double())).abs().max()) < 4e-7
    x = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan], device=device).repeat(BLOCK // 4)
    y = apply("near_tanh", x)[:4].tolist()
    assert y[:3] == [0.0, 1.0, -1.0] and y[3] != y[3]


@triton.jit
def _entries(x, y):
    at = tl.program_id(0) * 512 + tl.arange(0, 16)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    tl.store(y + at, fn.near_tanh2(tl.load(x + at)))


@pytest.mark.parametrize("device", on_a_device)
def test_state_entries_whose_tanh_shares_a_reciprocal_err_by_rounding_of_1(device: str) -> None:
    x = arguments(-3e38, 3e38)
    x = x[torch.randperm(len(x))].to(device)
    y = torch.empty_like(x)
    _entries[(len(x) // 512,)](x, y, num_warps=1)
    assert float((y.double() - torch.tanh(x.double() / (2 * fn.LOG2E.value))).abs().max()) < 5e-7
    x = torch.zeros(512, device=device)
    x[:32], x[32:64] = torch.inf, -torch.inf
    _entries[(1,)](x, y, num_warps=1)
    assert y[:64].tolist() == [1.0] * 32 + [-1.0] * 32 and float(y[64:512].abs().max()) < 5e-7


@triton.jit
def _run(x, y, z, SHORT: tl.constexpr):
    lane = tl.arange(0, 32)[None, None, :]
    found = lanes.run_of(lanes.load_lanes(x, lane, 8), 8, SHORT)
    for i in tl.static_range(8):
        tl.store(y + i * 32 + lane, tl.broadcast_to(found[i], (1, 1, 32)))
    rows = tl.load(tile.in_order(x + tl.arange(0, 8)[:, None, None] * 32 + lane))
    values = tile.tokens_of(rows)
    sums = lanes.begin_run(values + values, lane, lane < 20, 0, True)
    lanes.end_run(lanes.places(z, 16, 32, True, other=z + 8), sums, True, 16, 32, True)
    lanes.store_tokens(z + 16, 2, rows, lane, lane < 20, 0, True)


@pytest.mark.parametrize("device", on_a_device)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_handed_to_lanes_and_sums_over_them(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, device=device).to(dtype).float()
    y, z = x.new_empty(8, 32), x.new_zeros(32)
    _run[(1,)](x, y, z, True, num_warps=1)
    assert torch.equal(y, x[:8, None].expand(8, 32))
    sums = x.view(8, 32)[:, :20].sum(1)
    for found in (z[:8], z[8:16], z[16::2]):
        torch.testing.assert_close(found, sums, rtol=2e-3, atol=2e-3)


@triton.jit
def _widened(x, y):
    lane = tl.arange(0, 64)[None, None, :]
    tl.store(y + lane, tile.widened(tl.load(x + lane)))


@pytest.mark.parametrize("device", on_a_device)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_neighbours_widened_together_stay_as_they_are(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(64, device=device).to(dtype)
    y = torch.empty(64, device=device)
    _widened[(1,)](x, y, num_warps=1)
    assert torch.equal(y, x.float())


@triton.jit
def _refined(x):
    return fn.with_rest(x.to(tl.bfloat16).to(tl.float32), fn.rest_of(x, tl.bfloat16))


@pytest.mark.parametrize("device", on_a_device)
def test_eight_more_digits_of_bfloat16(device: str) -> None:
    """Of float32 numbers, and halves between two of bfloat16, to 2^-15 of themselves; all that is not finite."""
    ties = 1.0 + (2 * torch.arange(BLOCK // 2) + 1) / 256
    ends = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 1e-30])
    x = torch.cat([arguments(-3.4e38, 3.4e38)[: BLOCK // 2], ties])
    x = torch.cat([x, -x])
    x[: len(ends)] = ends
    y = torch.empty_like(x, device=device)
    _apply[(x.numel() // BLOCK,)](x.to(device), y, _refined, BLOCK)
    known = x.isfinite()
    assert float(((y.cpu() - x).abs() - x.abs() * 2.0**-15)[known].max()) <= 0
    assert torch.equal(y.cpu()[:4], x[:4]) and bool(y[4].isnan())
