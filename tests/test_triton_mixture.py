"""Mixtures of tokens: torch's form, and the kernels in Triton's interpreter, against float64."""

import pytest
import torch
from interpreted import INTERPRETED

from dsf.kernels.mixture import token_mixtures

BACKENDS = ["triton" if INTERPRETED else "torch"]  # each in one half of the tests


def leaves_of(batch, tokens, channels, count, kind, of_shares, added=False):
    """x; the other, as a slice of something longer lies; what tokens add, where they do; shares."""
    x = torch.randn(batch, tokens, channels, dtype=torch.float64).to(kind)
    longer = torch.randn(batch, tokens + 1, channels + 3, dtype=torch.float64).to(kind)
    shares = [torch.rand(channels, dtype=torch.float64).to(of_shares) for _ in range(count)]
    more = [torch.randn(count, batch, tokens, channels + 1, dtype=torch.float64).to(kind)] if added else []
    return [y.requires_grad_() for y in (x, longer, *more, *shares)]


def outcome(run, leaves):
    """The results, and the gradients of x, of what the other lies in, and of the shares."""
    x, longer, *shares = leaves
    more = shares.pop(0)[..., 1:] if shares[0].dim() == 4 else None
    found = run(x, longer[:, :-1, 3:], shares, more)
    slopes = [torch.randn(y.shape, generator=torch.Generator().manual_seed(i)).bfloat16() for i, y in enumerate(found)]
    grads = torch.autograd.grad(found, leaves, [s.to(y.dtype) for s, y in zip(slopes, found, strict=True)])
    return [*found, *grads]


def definition(x, other, shares, more):
    shares = [s + (0 if more is None else more[i]) for i, s in enumerate(shares)]
    return [(1 - s) * x + s * other for s in shares]


def wide(leaves):
    return [y.detach().double().requires_grad_() for y in leaves]


CASES = [(2, 5, 24, 6), (1, 130, 40, 3), (3, 1, 8, 1), (2, 33, 100, 8)]  # batch, tokens, channels, shares


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("added", [False, True], ids=["fixed", "by token"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_all_gradients_are_the_definitions(case, added, backend):
    leaves = leaves_of(*case, torch.float32, torch.float32, added)
    wanted, calls = outcome(definition, wide(leaves)), []
    for _ in range(3):
        calls.append(outcome(lambda *t: token_mixtures(*t, backend=backend), leaves))
        for a, b in zip(calls[-1], wanted, strict=True):
            assert a.shape == b.shape and (a.double() - b).abs().max() <= 2e-6 * b.abs().max()
    assert all(torch.equal(a, b) for a, b in zip(*calls[1:], strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("of_shares", [torch.bfloat16, torch.float32], ids=str)
def test_half_precision(of_shares, backend):
    leaves = leaves_of(2, 40, 64, 4, torch.bfloat16, of_shares)
    found = outcome(lambda *t: token_mixtures(*t, backend=backend), leaves)
    assert all(y.dtype == of_shares for y in found[:4])
    assert [g.dtype for g in found[4:]] == [y.dtype for y in leaves]
    for i, (a, b) in enumerate(zip(found, outcome(definition, wide(leaves)), strict=True)):
        once = backend == "triton" or of_shares == torch.float32
        least = (b.to(a.dtype).double() - b).abs().mean() if once else 4e-3 * b.abs().mean()
        assert (a.double() - b).abs().mean() <= 1.5 * least + 2e-6 * b.abs().mean(), i


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_mixed_with_itself_and_a_share_used_twice(backend):
    x, share = torch.randn(2, 9, 16, requires_grad=True), torch.rand(16, requires_grad=True)
    a, b = token_mixtures(x, x, [share, share], backend=backend)
    torch.testing.assert_close(a, x)
    dx, dshare = torch.autograd.grad((a + 2 * b).sum(), [x, share])
    torch.testing.assert_close(dx, torch.full_like(x, 3.0))
    torch.testing.assert_close(dshare, torch.zeros(16))
    frozen = token_mixtures(x, 2 * x.detach(), [share.detach(), share], backend=backend)
    torch.testing.assert_close(torch.autograd.grad(frozen[0].sum(), x)[0], (1 - share.detach()).expand_as(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("added", [False, True], ids=["fixed", "by token"])
def test_compiled_they_are_the_same(added, backend):
    torch.compiler.reset()
    leaves = leaves_of(1, 6, 16, 3, torch.float32, torch.float32, added)

    def run(x, other, shares, more):
        return token_mixtures(x, other, shares, more, backend)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, b in zip(outcome(compiled, leaves), outcome(run, leaves), strict=True):
        torch.testing.assert_close(a, b)


def test_what_does_not_fit_is_refused():
    x, share = torch.randn(2, 3, 8), torch.rand(8)
    for given in (
        (x, x[:, :2], [share]), (x, x, [share, share[:1]]), (x[0], x[0], [share]), (x, x, [share], x),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="sizes do not fit"):
            token_mixtures(*given)
    with pytest.raises(ValueError, match="'auto', 'torch' and 'triton'"):
        token_mixtures(x, x, [share], backend="cuda")
    for given in ((x, x.bfloat16(), [share]), (x, x, [share] * 9), (x, x, [share, share.double()]), (x, x, [])):
        with pytest.raises(ValueError, match="1 to 8 shares of one type"):
            token_mixtures(*given, backend="triton")


@pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own, with TRITON_INTERPRET=1")
def test_second_derivatives_are_refused():
    x, share = torch.randn(1, 4, 8, requires_grad=True), torch.rand(8)
    (y,) = token_mixtures(x, 2 * x, [share], backend="triton")
    with pytest.raises(RuntimeError, match="second"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
