"""Reversed copies and sums of both directions: torch's form, and the kernels in Triton's interpreter, in float64."""

import pytest
import torch
from interpreted import INTERPRETED

from dsf.kernels.reversal import joined, reversed_tokens

BACKEND = "triton" if INTERPRETED else "torch"  # each in one half of the tests
SHAPES = [(2, 37, 3, 24), (1, 1, 1, 5), (3, 130, 2, 64), (2, 9, 40), (1, 64, 3), (2, 5, 4, 100)]


def random(*shape, kind=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(kind).requires_grad_()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_reversed_copy_its_gradient_and_its_second_one(shape, kind):
    """Bit for bit, of a slice of something longer, the third call."""
    longer = random(shape[0], shape[1] + 2, *shape[2:-1], shape[-1] + 1, kind=kind)
    for _ in range(3):
        x = longer[:, 1:-1, ..., 1:]
        y = reversed_tokens(x, BACKEND)
        assert torch.equal(y, x.flip(1)) and y.data_ptr() != x.data_ptr()
        slope = torch.randn(shape).to(kind).requires_grad_()
        (grad,) = torch.autograd.grad(y, longer, slope, create_graph=True)
        assert torch.equal(grad[:, 1:-1, ..., 1:], slope.flip(1)) and grad[:, 0].abs().max() == 0
        (again,) = torch.autograd.grad(grad, slope, longer.detach())
        assert torch.equal(again, x.flip(1))


def definition(late, ahead, back, x=None, gain=None):
    """Token after token."""
    tokens, rows = ahead.shape[1], []
    for t in range(tokens):
        row = 0.0 * (ahead[:, 0] + back[:, 0])  # with gradients where nothing is read
        if t >= late:
            row = row + ahead[:, t - late]
        if tokens - 1 - t - late >= 0:
            row = row + back[:, tokens - 1 - t - late]
        rows.append(row if x is None else row + gain[:, t].unsqueeze(-1) * x[:, t])
    return torch.stack(rows, 1)


def outcome(run, leaves, slope):
    """y and all gradients; the first and third of four leaves are slices of something longer."""
    ahead, back, *rest = leaves
    given = [ahead[:, 1:], back, *([rest[0][:, :-1], rest[1]] if rest else [])]
    y = run(*given)
    return [y, *torch.autograd.grad(y, leaves, slope.to(y.dtype))]


@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("gained", [False, True], ids=["sum", "gain"])
@pytest.mark.parametrize("shape", [s for s in SHAPES if len(s) == 4], ids=str)
def test_sums_of_both_directions_and_all_gradients_are_the_definitions(shape, gained, late):
    batch, tokens, heads, channels = shape
    late = min(late, tokens)
    leaves = [random(batch, tokens + 1, heads, channels), random(*shape)]
    leaves += [random(batch, tokens + 1, heads, channels), random(batch, tokens, heads)] if gained else []
    slope = torch.randn(shape, dtype=torch.float64)
    exact = outcome(lambda *t: definition(late, *t), [t.detach().double().requires_grad_() for t in leaves], slope)
    calls = [outcome(lambda *t: joined(*t, late=late, backend=BACKEND), leaves, slope) for _ in range(3)]
    for a, b in zip(calls[-1], exact, strict=True):
        assert a.shape == b.shape and (a.double() - b).abs().max() <= 2e-6 * max(b.abs().max(), 1)
    assert all(torch.equal(a, b) for a, b in zip(*calls[1:], strict=True))


def test_half_precision_is_one_rounding():
    leaves = [random(2, 41, 3, 64, kind=torch.bfloat16), random(2, 40, 3, 64, kind=torch.bfloat16)]
    leaves += [random(2, 41, 3, 64, kind=torch.bfloat16), random(2, 40, 3, kind=torch.bfloat16)]
    slope = torch.randn(2, 40, 3, 64).bfloat16()
    exact = outcome(lambda *t: definition(1, *t), [t.detach().double().requires_grad_() for t in leaves], slope)
    found = outcome(lambda *t: joined(*t, late=1, backend=BACKEND), leaves, slope)
    least = 1.01 if INTERPRETED else 3.0  # torch rounds after every operation
    for a, b in zip(found, exact, strict=True):
        assert (a.double() - b).abs().max() <= least * 2.0**-8 * b.abs().max()


def test_one_tensor_may_be_all_of_them():
    x = random(2, 11, 3, 16)
    gain = random(2, 11, 3)
    wide, slope = [t.detach().double().requires_grad_() for t in (x, gain)], torch.randn(2, 11, 3, 16)
    y, exact = joined(x, x, x, gain, 1, BACKEND), definition(1, wide[0], wide[0], *wide)
    found = torch.autograd.grad(y, [x, gain], slope)
    wanted = torch.autograd.grad(exact, wide, slope.double())
    for a, b in zip((y, *found), (exact, *wanted), strict=True):
        assert (a.double() - b).abs().max() <= 2e-6 * b.abs().max()


def test_what_does_not_fit_is_refused_in_words():
    x, gain = torch.randn(2, 5, 3, 4), torch.randn(2, 5, 3)
    for given in ((x, x[:, 1:]), (x, x, x), (x, x, x, gain[:, 1:]), (x, x, None, None, 6), (x[0, 0], x[0, 0])):
        with pytest.raises(ValueError, match="sizes do not fit"):
            joined(*given)
    with pytest.raises(ValueError, match="there are 'auto'"):
        reversed_tokens(x, "cuda")
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        joined(x, x, x, gain.double(), backend="triton")
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        reversed_tokens(x.long(), "triton")


@pytest.mark.skipif(not INTERPRETED, reason="the kernels'")
def test_operators_pass_opcheck_and_refuse_second_derivatives():
    from dsf.kernels.triton.layer.reversal import join, reverse

    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    x, gain = random(2, 5, 3, 4), random(2, 5, 3)
    torch.library.opcheck(reverse, (x,), test_utils=tests)
    torch.library.opcheck(join, (x, x, x, gain, 1), test_utils=tests)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(joined(x, x, x, gain, 1, "triton").sum(), x, create_graph=True)
