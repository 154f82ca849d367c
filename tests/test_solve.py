"""Readouts by a solve (dsf.learn by="exact"): laws, conjugate gradients that stop early, states, what is refused."""

import os

import pytest
import torch

import dsf
from dsf import Key, Memory, Param, Scalar, System, Value, learn, mixers, norm2, sigmoid, softplus
from dsf.kernels.solve import conjugate_gradients

S = Memory()
CAUTIOUS = ("finite", "forms", "causality", "split", "packed", "reverse", "step", "heads", "layout", "contract")


@dsf.recurrence
def two_squares(
    q: Key, k: Key, v: Value, l: Key, w: Value, a: Scalar, b: Scalar, lam: Scalar, D: Param[Value]
) -> System:
    """Read before it writes; a bare decay; a ridge that each token has its own of."""
    loss = 0.5 * norm2(S.T @ k - v) + sigmoid(b) * norm2(S.T @ l - w)
    return learn(loss, by="exact", rate=b, decay=a, ridge=lam, C=q, D=D * v, read="before")


@dsf.recurrence
def least_squares(q: Key, k: Key, v: Value) -> System:
    """Nothing decays."""
    return learn(norm2(S.T @ k - v), by="exact", ridge=1, C=q)


@pytest.mark.parametrize("recurrence", [mixers.mesanet, two_squares, least_squares], ids=lambda r: r.name)
def test_the_laws_hold_to_the_last_digits(recurrence):
    report = dsf.check(recurrence, examples=2, tokens=70, laws=CAUTIOUS, dtypes=(torch.float64,))
    assert report.ok, report


def test_gradients_are_finite_differences():
    report = dsf.check(two_squares, examples=3, laws=("gradcheck",), dtypes=(torch.float64,))
    assert report.ok, report


def test_half_precisions_solve_in_float32():
    report = dsf.check(mixers.mesanet, examples=2, tokens=40, laws=("forms",), dtypes=(torch.bfloat16, torch.float32))
    assert report.ok, report


def inputs(tokens=90, n=12, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    q, k = torch.nn.functional.normalize(torch.randn(2, 2, tokens, 3, n, dtype=dtype), dim=-1)
    v, (f, b) = torch.randn(2, tokens, 3, 5, dtype=dtype), torch.randn(2, 2, tokens, 3, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v, f + 3, b.sigmoid(), torch.randn(3, n, dtype=dtype))]


def test_thirty_steps_in_float32_are_enough_for_keys_of_unit_length():
    given = inputs()
    y = mixers.mesanet(*given, form="naive")
    expected = torch.autograd.grad(y.sin().sum(), given)
    short = [x.detach().float().requires_grad_() for x in given]
    for form in ("scan", "chunk"):
        found = mixers.mesanet(*short, form=form)
        assert (found - y).abs().max() < 1e-5 * y.abs().max()
        for a, b in zip(torch.autograd.grad(found.sin().sum(), short), expected, strict=True):
            assert (a - b).abs().max() < 2e-5 * b.abs().max()


def mesanet_of(steps):
    @dsf.recurrence
    def stopped(q: Key, k: Key, v: Value, f: Scalar, beta: Scalar, lam: Param[Key]) -> System:
        loss = 0.5 * norm2(S.T @ k - v)
        how = {"rate": beta, "decay": sigmoid(f), "ridge": 0.25 + softplus(lam), "steps": steps}
        return learn(loss, by="exact", C=q, **how)

    return stopped


def test_fewer_steps_are_taken_as_asked():
    of = mesanet_of
    given = [x.detach().float() for x in inputs()]
    exact = mixers.mesanet(*given, form="naive")
    off = [float((of(steps)(*given, form="chunk") - exact).abs().max()) for steps in (1, 2, 4, 8)]
    assert off == sorted(off, reverse=True) and off[-1] < 1e-2 * off[0]
    assert of(3).spec is not of(4).spec and "3 steps" in of(3).plan(T=100).kernel


def test_conjugate_gradients_end_where_there_is_nothing_left():
    torch.manual_seed(0)
    root = torch.randn(4, 6, 6)
    matrices = root @ root.mT + torch.eye(6)
    right = torch.randn(4, 6) * torch.tensor([[1.0], [0.0], [1e-18], [1e6]])
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)
    found = conjugate_gradients(lambda x: (matrices @ x[..., None])[..., 0], diagonal, right, 400)
    expected = torch.linalg.solve(matrices, right[..., None])[..., 0]
    assert found.isfinite().all()
    assert ((found - expected).norm(dim=-1) <= 1e-5 * expected.norm(dim=-1)).all()


def test_only_the_symmetric_part_of_a_state_counts():
    given = [x.detach() for x in inputs(tokens=4)]
    state = mixers.mesanet(*given, return_state=True)[1]
    skew = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    other = torch.cat([state[..., :5], state[..., 5:] + skew - skew.mT], dim=-1)
    for form in mixers.mesanet.forms:
        a, b = (mixers.mesanet(*given, initial_state=s, form=form) for s in (state, other))
        torch.testing.assert_close(a, b)


def test_a_state_that_is_not_positive_is_seen():
    given = [x.detach() for x in inputs(tokens=1)]
    state = torch.zeros(2, 3, 12, 17, dtype=torch.float64)
    state[..., 5:] = -100 * torch.eye(12)
    assert mixers.mesanet(*given, initial_state=state, form="recurrent").isnan().all()


def test_second_derivatives_pass_through_what_solves_in_turn():
    given = inputs(tokens=5, n=3)
    for form in ("naive", "recurrent", "kernel"):
        (first,) = torch.autograd.grad(mixers.mesanet(*given, form=form).sum(), given[1], create_graph=True)
        assert torch.autograd.grad(first.square().sum(), given[1])[0].abs().max() > 0
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(mixers.mesanet(*given, form="chunk").sum(), given[1], create_graph=True)


def test_the_trajectory_has_the_solutions_as_readouts():
    given = [x.detach() for x in inputs(tokens=9)]
    trajectory = mixers.mesanet.trajectory(*given)
    y = torch.einsum("bhtjp,bjhp->bthp", trajectory.kernel_matrix(), given[2])
    torch.testing.assert_close(y, mixers.mesanet(*given))


def test_packed_sequences_and_compiled_calls():
    given = [x.detach()[:1] if x.dim() > 2 else x.detach() for x in inputs()]
    bounds = torch.tensor([0, 40, 40, 90])
    y, last = mixers.mesanet(*given, cu_seqlens=bounds, return_state=True)
    alone = [x[:, 40:] if x.dim() > 2 else x for x in given]
    torch.testing.assert_close(y[:, 40:], mixers.mesanet(*alone))
    assert last.shape[0] == 3 and (last[1] == 0).all()
    few, given = mesanet_of(3), [x.detach()[:1] if x.dim() > 2 else x.detach() for x in inputs(n=4)]  # a graph has each
    compiled = torch.compile(lambda *x: few(*x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), few(*given))


def test_refusals():
    given = [x.detach() for x in inputs(tokens=12)]
    with pytest.raises(dsf.FormError, match="no convolution form, the readout is solved for"):
        mixers.mesanet(*given, form="convolution")
    with pytest.raises(dsf.FormError, match="the recurrent form solves token by token, on torch"):
        mixers.mesanet(*given, form="recurrent", backend="triton")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 runs it")
def test_products_run_on_the_chunk_kernels():
    given = [x.detach().float().requires_grad_() for x in inputs(tokens=19, n=8)]
    plan = mixers.mesanet.plan(*given, backend="triton")
    assert plan.backend == "triton" and plan.form == "chunk"
    results = []
    for backend in ("triton", "torch"):
        y, last = mixers.mesanet(*given, backend=backend, form="chunk", return_state=True)
        results.append([y, last, *torch.autograd.grad(y.sin().sum() + last.cos().sum(), given)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
