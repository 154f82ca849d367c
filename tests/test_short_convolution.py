"""The short convolution on a CPU, a tap at a time, beside its definition."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import jvp

from dsf.kernels.convolution import short_convolution


def drawn(rows, tokens, channels, taps):
    x, weight = torch.randn(rows, tokens, channels), torch.randn(channels, taps)
    bias, state = torch.randn(channels), torch.randn(rows, channels, taps - 1)
    return [t.double().requires_grad_() for t in (x, weight, bias, state)]


def defined(x, weight, bias, state):
    """y and the state after x, token by token."""
    window, out = state, []
    for t in range(x.shape[1]):
        window = torch.cat([window, x[:, t, :, None]], 2)
        out.append((window * weight).sum(2) + bias)
        window = window[..., 1:]
    return F.silu(torch.stack(out, 1)), window


def convolved(x, weight, bias, state, cu_seqlens=None):
    (y,), final = short_convolution(x, weight, bias, state, cu_seqlens)
    return y, final


def agree(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("taps", [1, 2, 4, 8, 9])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_values_and_both_derivatives_are_those_of_the_definition(tokens, taps):
    given = drawn(3, tokens, 5, taps)
    directions = [torch.randn_like(t) for t in given]
    results = []
    for function in (convolved, defined):
        y, final = function(*given)
        loss = (y * y.detach().roll(1, 0)).sum() + (final * final.detach().roll(1, 0)).sum()
        first = torch.autograd.grad(loss, given, create_graph=True)
        along = sum((g * d).sum() for g, d in zip(first, directions, strict=True))
        results.append(
            [y, final, *first, *torch.autograd.grad(along, given, allow_unused=True, materialize_grads=True)]
        )
    agree(*results)


@pytest.mark.parametrize("frozen", [0, 1, 2, 3])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen):
    given = drawn(2, 5, 3, 4)
    given[frozen].requires_grad_(False)
    wanted = [t for t in given if t.requires_grad]
    agree(*(torch.autograd.grad(f(*given)[0].square().sum(), wanted) for f in (convolved, defined)))


def test_packed_sequences_are_separate_and_final_states_keep_no_tokens_alive():
    lengths = [3, 0, 1, 6]
    x, weight, bias, _ = drawn(1, sum(lengths), 5, 4)
    state = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    bounds = torch.tensor([0, 3, 3, 4, 10])
    y, final = convolved(x, weight, bias, state, bounds)
    alone = [defined(part, weight, bias, state[i : i + 1]) if n else (part, state[i : i + 1])
             for i, (part, n) in enumerate(zip(x.split(lengths, 1), lengths, strict=True))]  # fmt: skip
    expected = torch.cat([part for part, _ in alone], 1), torch.cat([last for _, last in alone])
    agree((y, final), expected)
    dy, dfinal = torch.randn_like(y), torch.randn_like(final)
    given = (x, weight, bias, state)
    agree(*(torch.autograd.grad(outputs, given, (dy, dfinal)) for outputs in ((y, final), expected)))
    for taps, tokens in ((4, 9), (2, 1), (2, 9)):
        _, last = convolved(*drawn(1, tokens, 5, taps))
        assert last.is_contiguous() and last.untyped_storage().nbytes() == last.numel() * 8


def test_forward_mode_and_vmap_go_through():
    given = [t.detach() for t in drawn(2, 6, 3, 4)]
    tangents = tuple(torch.randn_like(t) for t in given)
    agree(*(sum(jvp(f, tuple(given), tangents), ()) for f in (convolved, defined)))
    x, *rest = given
    found = torch.func.vmap(lambda row: convolved(row, *rest)[0])(torch.stack([x, 2 * x]))
    agree(found, [defined(each, *rest)[0] for each in (x, 2 * x)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once_also_under_autocast(dtype):
    x, weight, bias, state = drawn(2, 40, 6, 4)
    given = [t.detach().to(dtype) for t in (x, state)]
    exact = defined(given[0].double(), weight.float().double(), bias.float().double(), given[1].double())[0]
    for on in (False, True):
        with torch.autocast("cpu", dtype, enabled=on):
            y, _ = convolved(given[0], weight.float(), bias.float(), given[1])
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
