"""What makes the interpreter's tests strict works: addresses, unwritten memory, bfloat16 and tf32."""

import pytest
import torch
import triton
import triton.language as tl
from interpreted import interpreted

pytestmark = interpreted


@triton.jit
def copied(x, y, first, count, SIZE: tl.constexpr):
    at = first + tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at, mask=at < count, other=0.0), mask=at < count)


@triton.jit
def multiplied(x, y, z, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(x + at), tl.load(y + at), input_precision=PRECISION)
    tl.store(z + at, product)


@triton.jit
def combined(x, y, z, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(z + at, tl.where(a > b, a * b + a, -b))


@pytest.mark.parametrize(("first", "count"), [(-1, 8), (4, 9), (5000, 6000)])
def test_addresses_outside_the_tensors_raise(first: int, count: int) -> None:
    with pytest.raises(triton.runtime.errors.InterpreterError, match=r"copied reads [18] of [58] numbers outside"):
        copied[(1,)](torch.ones(8), torch.empty(8), first, count, SIZE=8)


def test_writes_outside_the_tensors_raise() -> None:
    with pytest.raises(triton.runtime.errors.InterpreterError, match="copied writes 4 of 8"):
        copied[(1,)](torch.ones(8), torch.empty(4), 0, 8, SIZE=8)


def test_masked_addresses_may_lie_anywhere() -> None:
    y = torch.empty(4)
    copied[(1,)](torch.ones(4), y, 0, 4, SIZE=8)
    assert y.eq(1).all()


def test_unwritten_memory_is_no_number() -> None:
    y = torch.empty(8)
    copied[(1,)](torch.ones(8), y, 0, 3, SIZE=8)
    assert y[:3].eq(1).all() and y[3:].isnan().all()


def test_bfloat16_rounds_every_result_once() -> None:
    x, y = torch.randn(2, 64).bfloat16()
    z = torch.empty_like(x)
    combined[(1,)](x, y, z, SIZE=64)
    assert z.equal(torch.where(x > y, x * y + x, -y))


def test_products_of_bfloat16_are_summed_in_float32() -> None:
    x, y = torch.randn(2, 16, 16).bfloat16()
    z = torch.empty(16, 16)
    multiplied[(1,)](x, y, z, SIZE=16, PRECISION="tf32")
    torch.testing.assert_close(z, (x.double() @ y.double()).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("precision", "low", "high"), [("tf32", 1e-4, 2e-3), ("ieee", 0.0, 1e-6)])
def test_products_in_tf32_cut_operands_off(precision: str, low: float, high: float) -> None:
    x, y = torch.rand(2, 16, 16)
    z = torch.empty(16, 16)
    multiplied[(1,)](x, y, z, SIZE=16, PRECISION=precision)
    exact = x.double() @ y.double()
    error = ((z - exact).abs() / exact).max().item()
    assert low < error < high
