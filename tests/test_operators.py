"""The operator algebra: every law of dsf.kernels.operators as a line of code, and the adjoint recurrence from it."""

import pytest
import structures
import torch
from adjoint_recurrence import adjoint, states_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsf.call.bind import bind, environment
from dsf.kernels.operators import Transition, reduce_to
from dsf.kernels.problem import Problem
from dsf.kernels.recurrent import recurrent
from dsf.torch.evaluate import Evaluator
from dsf.torch.lower import lower

LEAD = (2,)
LAWS = settings(max_examples=60)


def randn(*shape: int) -> Tensor:
    return torch.randn(*LEAD, *shape, dtype=torch.float64)


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def dense(a: Transition, n: int, p: int) -> Tensor:
    """[..., P, N, N] whether or not channels differ."""
    return a.to_dense(n).expand(*LEAD, p, n, n)


def times(matrices: Tensor, state: Tensor) -> Tensor:
    """One matrix a channel: [..., P, N, N] x [..., N, P] -> [..., N, P]."""
    return torch.einsum("...pnm,...mp->...np", matrices, state)


@st.composite
def operators(draw: st.DrawFn, count: int = 1) -> tuple[int, int, list[Transition]]:
    """N, P and transitions of every decay shape, rank and kind of correction."""
    n, p = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    found = []
    for _ in range(count):
        rank, wide = draw(st.integers(0, 3)), draw(st.sampled_from([1, p]))
        decay = randn(draw(st.sampled_from([1, n])), draw(st.sampled_from([1, p])))
        low = [randn(rank, n, wide), randn(rank, n, wide)] if rank else [None, None]
        cross = randn(n, draw(st.sampled_from([1, p]))) if n % 2 == 0 and draw(st.booleans()) else None
        found.append(Transition(decay, *low, cross))
    return n, p, found


@LAWS
@given(operators())
def test_apply_is_the_dense_product(case):
    n, p, (a,) = case
    s = randn(n, p)
    same(a.apply(s), times(dense(a, n, p), s))


@LAWS
@given(operators())
def test_apply_transpose_is_the_adjoint_of_apply(case):
    n, p, (a,) = case
    s, g = randn(n, p), randn(n, p)
    same((g * a.apply(s)).sum(), (a.apply_transpose(g) * s).sum())


@LAWS
@given(operators())
def test_apply_transpose_is_the_product_with_the_dense_transpose(case):
    n, p, (a,) = case
    g = randn(n, p)
    same(a.apply_transpose(g), times(dense(a, n, p).mT, g))


@LAWS
@given(operators(2))
def test_compose_is_the_operator_product(case):
    n, p, (later, earlier) = case
    s = randn(n, p)
    same(later.compose(earlier).apply(s), later.apply(earlier.apply(s)))
    same(dense(later.compose(earlier), n, p), dense(later, n, p) @ dense(earlier, n, p))


@LAWS
@given(operators(3))
def test_compose_is_associative(case):
    n, p, (a, b, c) = case
    same(dense(a.compose(b).compose(c), n, p), dense(a.compose(b.compose(c)), n, p))


@LAWS
@given(operators(2))
def test_ranks_add(case):
    _, _, (a, b) = case
    assert a.compose(b).rank == a.rank + b.rank


@LAWS
@given(operators())
def test_bilinear_derivative_is_the_gradient_of_the_bilinear_form(case):
    n, p, (a,) = case
    s, g = randn(n, p), randn(n, p)
    parts = [x.requires_grad_() for x in (a.decay, a.left, a.right, a.cross) if x is not None]
    expected = torch.autograd.grad((g * a.apply(s)).sum(), parts)
    found = a.bilinear_derivative(g, s)
    given = [x for x in (found.decay, found.left, found.right, found.cross) if x is not None]
    for x, y in zip(given, expected, strict=True):
        same(x, y)


@LAWS
@given(operators())
def test_predicates_say_what_the_shapes_are(case):
    n, p, (a,) = case
    whole = a.to_dense(n)
    assert a.is_elementwise == (a.rank == 0 and a.cross is None)
    assert (whole.shape[-3] > 1) == a.is_per_channel
    if a.is_elementwise:
        same(whole, torch.diag_embed(whole.diagonal(dim1=-2, dim2=-1)))


def test_each_row_is_one_row_and_lets_a_single_row_stand_for_all():
    decay, left, right = torch.randn(2, 1, 3, 1, 1), torch.randn(2, 5, 3, 1, 4, 1), torch.randn(2, 5, 3, 1, 4, 1)
    row = Transition(decay, left, right).each_row(5)[4]
    assert torch.equal(row.decay, decay[:, 0]) and torch.equal(row.left, left[:, 4])
    assert torch.equal(row.right, right[:, 4])


def test_reduce_to_is_the_adjoint_of_broadcasting():
    x, y = torch.randn(2, 1, 3, 1).double(), torch.randn(2, 4, 3, 5).double()
    same((x.expand_as(y) * y).sum(), (x * reduce_to(y, x.shape)).sum())


def problem_of(recurrence) -> Problem:
    """The numerics' problem of random inputs, its tensors leaves that require a gradient."""
    bound = bind(recurrence.spec, (), structures.sample(recurrence))
    sizes = bound.sizes
    values = Evaluator(environment(recurrence.spec, bound), sizes.keys, sizes.p)
    shape = (sizes.batch, sizes.tokens, sizes.heads, sizes.n)
    problem = lower(recurrence.spec, values, shape, None, None).problem
    leaves = {name: x.clone().requires_grad_() for name, x in vars(problem).items() if isinstance(x, Tensor)}
    return Problem(**(vars(problem) | leaves))


@pytest.mark.parametrize("recurrence", structures.FINITE, ids=lambda r: r.name)
@pytest.mark.parametrize("with_final", [True, False])
def test_the_adjoint_recurrence_is_autograd_through_the_unrolled_one(recurrence, with_final):
    problem = problem_of(recurrence)
    batch, heads = problem.leading
    initial = torch.randn(batch, heads, problem.n, problem.p, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(batch, problem.tokens, heads, problem.p, dtype=torch.float64)
    dfinal = torch.randn_like(initial) if with_final else torch.zeros_like(initial)
    y, final = recurrent(problem, initial)
    tensors = {name: x for name, x in vars(problem).items() if isinstance(x, Tensor)}
    expected = torch.autograd.grad((y * dy).sum() + (final * dfinal).sum(), [*tensors.values(), initial])
    with torch.no_grad():
        states = states_of(problem, initial)
        found, of_initial = adjoint(problem, states, dy, dfinal if with_final else None)
    same(states[:, -1], final)
    for name, want in zip(tensors, expected, strict=False):
        same(getattr(found, name), want)
    same(of_initial, expected[-1])
