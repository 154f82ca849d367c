"""What makes the interpreter strict works: addresses, unwritten memory, order, bfloat16, tf32; and its hurry."""

import math
from collections.abc import Callable
from itertools import product
from types import ModuleType
from typing import Any

import hurried
import mixer_inputs
import numpy as np
import pytest
import strict
import torch
import triton
import triton.language as tl
from hurried_calls import QUICK
from interpreted import interpreted
from triton.language import standard
from triton_private import Handle, block_of, rewritten_anew, semantic

import dsf.kernels.triton.interpreter  # noqa: F401  # computes with bfloat16
from dsf import mixers
from dsf.kernels.triton.chunk import forward_walk, tiles

pytestmark = interpreted


@triton.jit
def copied(x, y, first, count, SIZE: tl.constexpr):
    at = first + tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at, mask=at < count, other=0.0), mask=at < count)


@triton.jit
def in_turn(turns, counter):
    here = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    turn = tl.load(counter)
    tl.store(turns + here, turn)
    tl.store(counter, turn + 1)


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


@triton.jit
def applied(x, y, function: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, function(tl.load(x + at)).to(tl.float32))


@triton.jit
def counted(count, y):
    found = 0
    for _ in range(tl.load(count)):
        found += 1
    tl.store(y, found)


@triton.jit
def multiply(x, y):
    return x * y


@triton.jit
def refuse(x):
    tl.static_assert(False, "no such thing")
    return x


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


@pytest.mark.parametrize("grid", [(2,), (5,), (2, 1, 3)])
def test_programs_run_in_another_order_than_that_of_their_numbers(grid: tuple[int, ...]) -> None:
    count = math.prod(grid)
    turns, counter = torch.zeros(count, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    in_turn[grid](turns, counter)
    assert sorted(turns.tolist()) == list(range(count)) and turns.tolist() != list(range(count))


def test_bfloat16_rounds_every_result_once() -> None:
    x, y = torch.randn(2, 64).bfloat16()
    z = torch.empty_like(x)
    combined[(1,)](x, y, z, SIZE=64)
    assert z.equal(torch.where(x > y, x * y + x, -y))


OF_ONE: dict[str, tuple[Callable[[Any], Any], Callable[[torch.Tensor], Any]]] = {
    "sum": (lambda x: tl.sum(x, 0), lambda x: x.sum()),
    "largest": (lambda x: tl.reduce(x, 0, tl.standard._elementwise_max), lambda x: x.max()),
    "place of the smallest": (lambda x: tl.argmin(x, 0), lambda x: x.argmin()),
    "sums so far": (lambda x: tl.associative_scan(x, 0, tl.standard._sum_combine), lambda x: x.cumsum(0)),
    "product": (lambda x: tl.reduce(x, 0, multiply), lambda x: x.prod()),
    "x x + x": (lambda x: tl.fma(x, x, x), lambda x: x * x + x),
    "-x": (lambda x: -x, lambda x: -x),
    "|x|": (lambda x: tl.abs(x), torch.abs),
    "at least -x": (lambda x: tl.maximum(x, -x), torch.abs),
    "within limits": (lambda x: tl.clamp(x, -0.5, 0.5), lambda x: x.clamp(-0.5, 0.5)),
    "chosen": (lambda x: tl.where(x < x * x, x, -x), lambda x: torch.where(x < x * x, x, -x)),
    "integers": (lambda x: (x + x + x).to(tl.int32), lambda x: (3 * x).int()),
    "float16": (lambda x: x.to(tl.float16), lambda x: x),
    "a number's bits": (lambda x: (x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.bfloat16, bitcast=True), torch.abs),
}


@pytest.mark.parametrize("name", OF_ONE)
def test_no_operation_takes_the_bits_of_bfloat16_for_numbers(name: str) -> None:
    function, true = OF_ONE[name]
    x, y = torch.randn(16).bfloat16(), torch.empty(16)
    applied[(1,)](x, y, function, SIZE=16)
    torch.testing.assert_close(y, true(x.float()).float().expand(16), rtol=1e-2, atol=1e-2)


def test_products_of_bfloat16_are_summed_in_float32() -> None:
    x, y = torch.randn(2, 16, 16).bfloat16()
    z = torch.empty(16, 16)
    multiplied[(1,)](x, y, z, SIZE=16, PRECISION="tf32")
    torch.testing.assert_close(z, (x.double() @ y.double()).float(), rtol=1e-5, atol=1e-5)


BOUNDS = [("tf32", 1e-4, 2e-3), ("tf32x3", 0.0, 1e-6), ("ieee", 0.0, 1e-6)]


@pytest.mark.parametrize(("precision", "low", "high"), BOUNDS)
def test_products_in_tf32_cut_operands_off(precision: str, low: float, high: float) -> None:
    x, y = torch.rand(2, 16, 16)
    z = torch.empty(16, 16)
    multiplied[(1,)](x, y, z, SIZE=16, PRECISION=precision)
    exact = x.double() @ y.double()
    error = ((z - exact).abs() / exact).max().item()
    assert low < error < high


def test_a_float32_number_is_the_sum_of_two_tf32_numbers_in_tf32x3() -> None:
    x, y = torch.randn(2, 16, 16) * 2.0 ** torch.arange(-8, 8)
    first, second = (torch.from_numpy(part) for part in strict._in_two(x.numpy()))
    assert all((part.view(torch.int32) & 0x1FFF == 0).all() for part in (first, second))
    assert ((x.double() - first.double() - second.double()).abs() <= x.abs().double() * 2.0**-21).all()
    assert (second != 0).any()
    x[0, 0], y[1, 1], z = math.inf, math.nan, torch.empty(16, 16)
    multiplied[(1,)](x, y, z, SIZE=16, PRECISION="tf32x3")
    exact = x @ y
    assert torch.equal(z.isnan(), exact.isnan()) and torch.equal(z.isinf(), exact.isinf())


DTYPES = (tl.int1, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.pointer_type(tl.float32))
SHAPES = ((), (4,), (1, 4), (2, 1), (2, 4), (2, 2, 4))
NUMBERS = (0, 3, -2, True, 1, 0.0, -0.0, 0.1, -1e30, math.nan, 2**40)
OPERATIONS = {
    "add": lambda s, x, y: s.add(x, y, False),
    "sub": lambda s, x, y: s.sub(x, y, False),
    "mul": lambda s, x, y: s.mul(x, y, False),
    "truediv": lambda s, x, y: s.truediv(x, y),
    "floordiv": lambda s, x, y: s.floordiv(x, y),
    "mod": lambda s, x, y: s.mod(x, y),
    "and": lambda s, x, y: s.and_(x, y),
    "or": lambda s, x, y: s.or_(x, y),
    "either alone": lambda s, x, y: s.xor_(x, y),
    "equal": lambda s, x, y: s.equal(x, y),
    "not equal": lambda s, x, y: s.not_equal(x, y),
    "less": lambda s, x, y: s.less_than(x, y),
    "at most": lambda s, x, y: s.less_equal(x, y),
    "greater": lambda s, x, y: s.greater_than(x, y),
    "at least": lambda s, x, y: s.greater_equal(x, y),
    "maximum": lambda s, x, y: s.maximum(x, y, tl.PropagateNan.ALL),
    "larger number": lambda s, x, y: s.maximum(x, y, tl.PropagateNan.NONE),
    "smaller number": lambda s, x, y: s.minimum(x, y, tl.PropagateNan.NONE),
    "cast": lambda s, x, y: s.cast(x, y.type.scalar),
    "first repeated": lambda s, x, y: s.broadcast_impl_value(x, y)[0],
    "second repeated": lambda s, x, y: s.broadcast_impl_value(x, y)[1],
    "where": lambda s, x, y: s.where(operand(tl.int1, (2, 2, 4)), x, y),
}


def operand(dtype: tl.dtype, shape: tuple[int, ...]) -> Any:
    kind = tl.block_type(dtype, list(shape)) if shape else dtype
    data = np.random.default_rng(len(shape)).integers(1, 100, shape or (1,))
    return block_of(data, dtype, kind)


def computed(name: str, x: Any, y: Any) -> Any:
    """Type, shape, dtype and bits of a result, or what was raised."""
    try:
        with np.errstate(all="ignore"):
            z = OPERATIONS[name](semantic(), x, y)
    except Exception as e:
        return type(e), str(e)
    data = z.handle.data
    sizes = [s.value for s in z.shape]
    return str(z.type), str(z.dtype), sizes, z.numel.value, data.shape, data.dtype, data.tobytes()


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_hurried_interpreter_computes_the_same_of_any_two_operands(name: str) -> None:
    tensors = [operand(dtype, shape) for dtype, shape in product(DTYPES, SHAPES)]
    pairs = [*product(tensors, [*tensors, *NUMBERS]), *product(NUMBERS, tensors)]
    with hurried.as_it_is():
        expected = [computed(name, x, y) for x, y in pairs]
    for (x, y), wanted in zip(pairs, expected, strict=True):
        for _ in range(2):  # found out, and remembered
            assert computed(name, x, y) == wanted, (getattr(x, "type", x), getattr(y, "type", y))


@triton.jit
def either_of(x, n, out):
    """Bits from comparisons of float64, and of int32, which become blocks of bits."""
    j = tl.arange(0, 4)
    of_floats = (tl.load(x) > 0) | (tl.load(x + 1) > 0)
    tl.store(out + j, 1, mask=(j < 3) & of_floats)
    of_numbers = (n > 1) | (n < -1)
    tl.store(out + 4 + j, 1, mask=(j < 3) & of_numbers)


def test_bits_are_bits_whatever_was_compared() -> None:
    for _ in range(3):
        out = torch.zeros(8, dtype=torch.int32)
        either_of[(1,)](torch.tensor([-1.0, 2.0], dtype=torch.float64), 5, out)
        assert out.tolist() == [1, 1, 1, 0] * 2


@triton.jit
def farther(x, i, y, j):
    """The pair whose number is larger in size."""
    mine = tl.abs(x) >= tl.abs(y)
    return tl.where(mine, x, y), tl.where(mine, i, j)


@triton.jit
def combine_rows(x, out, places, SIZE: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr):
    rows, local = tl.arange(0, 4)[:, None], tl.arange(0, SIZE)
    at = rows * SIZE + local[None, :]
    given, numbers = tl.load(x + at), at + tl.full((4, SIZE), 3, tl.int32) * tl.zeros((4, SIZE), tl.int32)
    best, place = tl.associative_scan((given, numbers), AXIS, farther)
    tl.store(out + at, best)
    tl.store(places + at, place)
    last, where = tl.reduce((given, numbers), AXIS, farther, keep_dims=KEEP)
    if KEEP:
        tl.store(out + 4 * SIZE + at, last + tl.zeros((4, SIZE), tl.float32))
        tl.store(places + 4 * SIZE + at, where + tl.zeros((4, SIZE), tl.int32))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_hurried_interpreter_combines_slices_to_the_same_bits(axis: int) -> None:
    x = torch.randn(4, 8)

    def found() -> list[torch.Tensor]:
        out, places = torch.zeros(2, 4, 8), torch.zeros(2, 4, 8, dtype=torch.int32)
        for keep in (True, False):
            combine_rows[(1,)](x, out, places, SIZE=8, AXIS=axis, KEEP=keep)
        return [out, places]

    with hurried.as_it_is():
        expected = found()
    for _ in range(2):  # found out, and remembered
        assert all(torch.equal(a, b) for a, b in zip(found(), expected, strict=True))
    assert expected[1].unique().numel() > 4


@pytest.mark.parametrize("name", ["s6", "rwkv7", "mlstm"])
def test_a_hurried_interpreter_computes_the_same_bits_of_kernels(name: str) -> None:
    recurrence = mixers.get(name).recurrence
    given = {n: x.bfloat16() for n, x in mixer_inputs.sample(recurrence, batch=1, tokens=5, heads=1).items()}

    def found() -> list[torch.Tensor]:
        leaves = {n: x.clone().requires_grad_() for n, x in given.items()}
        y = recurrence(**leaves, backend="triton")
        return [y, *torch.autograd.grad(y.square().sum(), list(leaves.values()))]

    with hurried.as_it_is():
        expected = found()
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(found(), expected, strict=True))


@triton.jit
def load_all_ways(x, out, first, REST: tl.constexpr):
    """Blocks and numbers, without a mask, with one of the block's shape, of rows, of one place and of a number."""
    rows, columns = tl.arange(0, 4)[:, None], tl.arange(0, 8)[None, :]
    at = rows * 8 + columns
    many = (at % 3 == 0) & (at > first)
    tl.store(out + at, tl.load(x + at))
    tl.store(out + 32 + at, tl.load(x + at, mask=many, other=REST))
    tl.store(out + 64 + at, tl.load(x + at, mask=many))
    tl.store(out + 96 + at, tl.load(x + at, mask=rows < 2, other=REST))
    tl.store(out + 128 + at, tl.load(x + at, mask=first < 2, other=REST))
    tl.store(out + 160 + at, tl.load(x + rows * 8, mask=many, other=REST))  # wider than the pointers
    tl.store(out + 192 + at, tl.load(x + at, mask=many, other=rows.to(x.dtype.element_ty)))
    tl.store(out + 224 + at, tl.load(x + first) + tl.load(x + first, mask=first > 5, other=REST))


def test_pointers_beside_a_number_can_be_stored_to_the_second_time_too() -> None:
    """The second ones have a type that is equal to the first ones' and another object."""
    for _ in range(2):
        kind = tl.block_type(tl.pointer_type(tl.float32), [4, 8])
        pointers = tl.tensor(Handle(np.zeros((4, 8), np.uint64), kind.scalar), kind)
        number = tl.tensor(Handle(np.zeros((), np.float32), tl.float32), tl.float32)
        found, numbers = semantic().broadcast_impl_value(pointers, number)
        assert found.handle.data.flags.writeable
        assert numbers.handle.data.shape == (4, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.bool])
def test_a_hurried_interpreter_loads_the_same_bits(dtype: torch.dtype) -> None:
    x = (torch.randn(64) * 5).to(dtype)

    def found(first: int, rest: float) -> torch.Tensor:
        out = torch.zeros(256, dtype=dtype)
        load_all_ways[(1,)](x, out, first, REST=rest)
        return out

    cases = [(1, 0.0), (2, 1.0), (7, 0.0), (1, 1.0)] + [(3, 2.5), (3, float("nan"))] * dtype.is_floating_point
    with hurried.as_it_is():
        expected = [found(*case).view(torch.uint8) for case in cases]
    for _ in range(2):
        assert all(torch.equal(found(*c).view(torch.uint8), y) for c, y in zip(cases, expected, strict=True))
    assert len({tuple(y.tolist()) for y in expected}) >= 3


@triton.jit
def kept(out, place: tl.constexpr, x):
    at = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(out + place * 32 + at, x.to(tl.float32))


@triton.jit
def call_all(x, out, NUMBER: tl.constexpr):
    """Every function of triton.language that is repeated."""
    rows, columns = tl.arange(0, 4)[:, None], tl.arange(0, 8)[None, :]
    at = rows * 8 + columns
    y = tl.load(x + at)
    f = tl.abs(y.to(tl.float32))
    kept(out, 0, tl.where(f > 1, f, NUMBER) + tl.where(f > 1, NUMBER, f) + tl.where(rows > 1, y, -y))
    kept(out, 1, tl.exp(-f) + tl.exp2(-f) + tl.log(f) + tl.log2(f) + tl.sqrt(f) + tl.sin(f) + tl.cos(f))
    kept(out, 2, tl.maximum(y, NUMBER) + tl.minimum(y, -y))
    kept(out, 3, tl.maximum(y, f, propagate_nan=tl.PropagateNan.ALL))
    kept(out, 4, tl.broadcast_to(tl.load(x + rows * 8), (4, 8)))
    kept(out, 5, tl.broadcast_to(tl.permute(tl.load(x + tl.arange(0, 8)[:, None]), (1, 0)), 4, 8))
    kept(out, 6, tl.reshape(tl.permute(f, (1, 0)), (4, 8)) + tl.permute(tl.reshape(y, 8, 4), 1, 0))
    kept(out, 7, tl.gather(f, (at * 3) % 8, 1) + tl.gather(y, (at * 3) % 4, axis=0))
    kept(out, 8, tl.full((4, 8), NUMBER, tl.float32) * tl.full([4, 8], 3, tl.int32).to(tl.float32))
    kept(out, 9, (at // 3 + at % 5 + (at ^ 6)).to(tl.float32) / (1.0 / f) + (NUMBER + 2 * f))
    tl.store(out + 320 + at, NUMBER, mask=rows < 2)
    tl.store(out + 352 + at, tl.load(x + rows * 8), mask=(y > 0) & (columns > 2))
    tl.store(out + 384 + at, y.to(tl.bfloat16))
    tl.store(out + 416, f.to(tl.float16).sum())
    pair = (tl.sum(f, 0), (True, 3, NUMBER))
    sums, numbers = pair
    truth, three, number = numbers
    SIDE: tl.constexpr = 4
    kept(out, 14, tl.full(f.shape, NUMBER, tl.float32) + tl.broadcast_to(sums[None, :], y.shape) * three)
    kept(out, 15, tl.reshape(tl.reshape(f, 2 * SIDE, SIDE), f.shape) + tl.arange(0, 2 * SIDE)[None, :])
    kept(out, 16, tl.maximum(f, three) + tl.minimum(f, NUMBER) + tl.sum(y, axis=1, keep_dims=True).to(tl.float32))
    kept(out, 17, tl.where(truth, y.to(tl.float32, bitcast=False), number))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_hurried_interpreter_calls_functions_to_the_same_bits(dtype: torch.dtype) -> None:
    x = torch.randn(32).to(dtype)
    x[3] = math.nan

    def found(number: float) -> torch.Tensor:
        out = torch.zeros(18 * 32)
        call_all[(1,)](x, out, NUMBER=number)
        return out.view(torch.uint8)

    numbers = (0.0, -0.0, 1.0, 1, math.nan, 2.5)
    with hurried.as_it_is(), np.errstate(all="ignore"):
        expected = [found(number) for number in numbers]
    for _ in range(2):  # found out, and remembered
        assert all(torch.equal(found(number), y) for number, y in zip(numbers, expected, strict=True))
    assert len({tuple(y.tolist()) for y in expected}) >= 4  # 1 may be 1.0, and Triton's zeros have no sign


@triton.jit
def multiply_all_ways(x, out, PRECISION: tl.constexpr):
    """Products with and without what they are added to, in several precisions, of transposed blocks, too."""
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    a, b = tl.load(x + at), tl.load(x + 256 + at)
    for i in range(3):
        tl.store(out + i * 256 + at, tl.dot(a, tl.trans(b), input_precision=PRECISION))
        a, b = tl.trans(b, 1, 0), a
    total = tl.dot(a, b, input_precision="ieee") + tl.dot(a, b, out_dtype=tl.float32)
    for _ in range(3):
        total = tl.dot(a, b, total, input_precision=PRECISION)
        total = tl.dot(tl.trans(a), b, acc=total)
    tl.store(out + 768 + at, total)
    tl.store(out + 1024 + at, tl.trans(tl.dot(a, b)))
    cube = tl.reshape(a, (4, 4, 16))
    tl.store(out + 1280 + at, tl.reshape(tl.trans(cube, 1, 0, 2), (16, 16)).to(tl.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_hurried_interpreter_multiplies_to_the_same_bits(dtype: torch.dtype) -> None:
    x = torch.randn(512).to(dtype)

    def found(precision: str) -> torch.Tensor:
        out = torch.zeros(1536)
        multiply_all_ways[(1,)](x, out, PRECISION=precision)
        return out

    precisions = ("tf32", "tf32x3", "ieee")
    with hurried.as_it_is():
        expected = [found(precision) for precision in precisions]
    for _ in range(2):  # found out, and remembered
        assert all(torch.equal(found(precision), y) for precision, y in zip(precisions, expected, strict=True))
    assert torch.equal(expected[0], expected[2]) == (dtype != torch.float32)


def test_a_loop_ends_at_a_number_that_a_kernel_loads() -> None:
    """NumPy 2.4 refuses the conversion by which Triton 3.6 finds it, so that kernels ended in an InterpreterError."""
    y = torch.zeros(1, dtype=torch.int32)
    counted[(1,)](torch.full((1,), 3, dtype=torch.int32), y)
    assert y.item() == 3


def test_what_a_launch_puts_into_triton_s_language_goes_with_it() -> None:
    applied[(1,)](torch.ones(16), torch.empty(16), OF_ONE["sum"][0], SIZE=16)
    for owner in (tl, tl.core, tl.math, tl.tensor):
        left = [getattr(owner, name) for name in (*QUICK, "__add__") if hasattr(owner, name)]
        assert left and all(x.__module__.startswith("triton.") for x in left)


def test_a_kernel_s_errors_name_what_went_wrong_within_its_functions() -> None:
    with pytest.raises(triton.runtime.errors.InterpreterError, match="no such thing"):
        applied[(1,)](torch.ones(16), torch.empty(16), refuse, SIZE=16)


@pytest.mark.parametrize("module", [tiles, standard, forward_walk], ids=lambda m: m.__name__)
def test_a_hurried_interpreter_makes_the_same_code_of_a_kernel_s_source(module: ModuleType) -> None:
    def code(function: Any) -> list[Any]:
        made = rewritten_anew(function)
        parts = [made.__code__.co_code, [str(x) for x in made.__code__.co_consts], list(made.__code__.co_lines())]
        return [*parts, made.__code__.co_filename, made.__defaults__, made.__annotations__]

    functions = [x for x in vars(module).values() if isinstance(x, type(copied)) and x.fn.__module__ == module.__name__]
    with hurried.as_it_is():
        expected = [code(x) for x in functions]
    assert expected and [code(x) for x in functions] == expected
