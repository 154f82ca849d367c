"""Rotary positions: torch's form, and the kernel in Triton's interpreter, against complex numbers in float64."""

import pytest
import torch
from interpreted import INTERPRETED

from dsf.kernels.rotary import rotary

BACKENDS = ["triton" if INTERPRETED else "torch"]  # each in one half of the tests


def definition(q, k, cos, sin, scale):
    """Pairs as complex numbers, times e^(i angle)."""
    turn = torch.complex(cos, sin).unsqueeze(2)
    n, found = cos.shape[-1], []
    for x, times in ((q, 1.0), (k, scale)):
        pairs = torch.complex(x[..., :n], x[..., n : 2 * n]) * turn
        found.append(times * torch.cat([pairs.real, pairs.imag, x[..., 2 * n :]], -1))
    return found


def drawn(batch, tokens, heads, width, angles, kind):
    """q and k as parts of one projection lie, beside what is not turned; cos and sin."""
    u = torch.randn(batch, tokens, (sum(heads) + 1) * width, dtype=torch.float64).to(kind).requires_grad_()
    q, k, _ = u.split([heads[0] * width, heads[1] * width, width], -1)
    angle = 30 * torch.randn(angles, tokens, width // 2, dtype=torch.float64)
    return u, q.unflatten(-1, (-1, width)), k.unflatten(-1, (-1, width)), angle.cos().float(), angle.sin().float()


def outcome(run, u, q, k, cos, sin, kind):
    """What run gives, and the gradient of the projection and its own (in directions of bfloat16's numbers)."""
    found = run(q, k, cos, sin)
    slopes = [torch.randn(y.shape, generator=torch.Generator().manual_seed(i)).bfloat16() for i, y in enumerate(found)]
    slopes = [s.to(kind).requires_grad_() for s in slopes]
    (du,) = torch.autograd.grad(found, u, slopes, create_graph=True)
    again = torch.autograd.grad(du.square().sum(), slopes)
    return [*found, du, *again]


def near(found, wanted, tolerance):
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b).abs().max() <= tolerance * b.abs().max()


CASES = [  # batch, tokens, heads of q and k, width, rows of angles
    (2, 5, (3, 3), 8, 1), (2, 7, (5, 2), 24, 2), (1, 33, (2, 1), 6, 1), (3, 1, (4, 2), 16, 3), (1, 130, (1, 9), 2, 1),
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_turns_pairs_like_complex_numbers(case, backend):
    for _ in range(3):
        u, q, k, cos, sin = drawn(*case, torch.float32)
        wide = u.detach().double().requires_grad_()
        sizes = [q.shape[2] * q.shape[3], k.shape[2] * k.shape[3], q.shape[3]]
        parts = [x.unflatten(-1, (-1, q.shape[3])) for x in wide.split(sizes, -1)[:2]]
        exact = outcome(lambda *t: definition(*t, 0.3), wide, *parts, cos.double(), sin.double(), torch.float64)
        found = outcome(lambda *t: rotary(*t, 0.3, backend), u, q, k, cos, sin, torch.float32)
        near(found, exact, 3e-6)
        assert all(torch.equal(a, b) for a, b in zip(rotary(q, k, cos, sin, 0.3, backend), found[:2], strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(kind, backend):
    for tokens in (1, 9):
        _, q, k, cos, sin = drawn(2, tokens, (3, 2), 16, 1, kind)
        found = rotary(q, k, cos, sin, 0.3, backend)
        for y, exact in zip(found, definition(q.double(), k.double(), cos.double(), sin.double(), 0.3), strict=True):
            assert y.dtype == kind
            least = (exact.to(kind).double() - exact).abs().mean()
            assert (y.double() - exact).abs().mean() <= 1.01 * least + 1e-7


def test_an_odd_width_keeps_its_last_entry():
    q, k = torch.randn(2, 3, 2, 5), torch.randn(2, 3, 1, 5)
    angle = torch.randn(1, 3, 2)
    for tokens in (1, 3):
        given = [x[:, :tokens] for x in (q, k, angle.cos(), angle.sin())]
        for y, exact in zip(rotary(*given, 0.5), definition(*given, 0.5), strict=True):
            torch.testing.assert_close(y, exact)


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_that_are_the_keys(backend):
    u, q, _, cos, sin = drawn(2, 6, (2, 2), 8, 1, torch.float32)
    (du,) = torch.autograd.grad(sum(x.square().sum() for x in rotary(q, q, cos, sin, 2.0, backend)), u)
    torch.testing.assert_close(du[..., :16], 10 * u[..., :16])
    assert not du[..., 16:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_it_is_the_same(backend):
    torch.compiler.reset()
    u, q, k, cos, sin = drawn(2, 6, (2, 1), 8, 1, torch.float32)
    cut = q.shape[2] * q.shape[3]

    def loss(u):
        q, k = u[..., :cut].unflatten(-1, (-1, 8)), u[..., cut:-8].unflatten(-1, (-1, 8))
        return sum(x.sin().sum() for x in rotary(q, k, cos, sin, 0.5, backend))

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for f in (compiled, compiled):
        torch.testing.assert_close(torch.autograd.grad(f(u), u), torch.autograd.grad(loss(u), u))


def test_what_does_not_fit_is_refused():
    q, k, angle = torch.randn(2, 3, 2, 8), torch.randn(2, 3, 1, 8), torch.randn(1, 3, 4)
    for given in (
        (q, k[..., :6], angle, angle), (q, k[:, :2], angle, angle), (q, k, angle[..., :3], angle),
        (q, k, angle[:, :2], angle[:, :2]), (q[:1].expand(3, -1, -1, -1), k[:1].expand(3, -1, -1, -1), q[0], q[0]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="sizes do not fit"):
            rotary(*given)
    with pytest.raises(ValueError, match="'auto', 'torch' and 'triton'"):
        rotary(q, k, angle, angle, backend="cuda")
    for given in ((q, k.double(), angle, angle), (q, k, angle.requires_grad_(), angle)):
        with pytest.raises(ValueError, match="heads of an even width"):
            rotary(*given, backend="triton")
