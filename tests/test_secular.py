"""Eigenvalues of a diagonal plus a rank-one matrix: those of the dense matrix, whatever degenerates."""

import time

import pytest
import torch

from dsf import mixers
from dsf.analysis import measures as m
from dsf.analysis.measures import secular as measures_secular
from dsf.analysis.measures.secular import eigenvalues_of_update

CASES = {
    "random": lambda n: (torch.rand(9, n), torch.rand(9, n)),
    "equal entries": lambda n: (torch.full((9, n), 0.5), torch.rand(9, n)),
    "repeated entries": lambda n: ((5 * torch.rand(9, n)).round(), torch.rand(9, n)),
    "zero weights": lambda n: (torch.rand(9, n), torch.rand(9, n) * (torch.rand(9, n) > 0.5)),
    "all weights zero": lambda n: (torch.rand(9, n), torch.zeros(9, n)),
    "zeros in both": lambda n: (torch.rand(9, n) * torch.rand(9, n).round(), (torch.rand(9, n) - 0.5).relu()),
    "equal entries without weight": lambda n: (torch.rand(9, n).round(), (torch.rand(9, n) - 0.5).relu()),
    "all zero": lambda n: (torch.zeros(9, n), torch.zeros(9, n)),
    "clusters": lambda n: (torch.randint(3, (9, n)) + 1e-9 * torch.rand(9, n), torch.rand(9, n)),
    "all magnitudes": lambda n: (10 ** (-20 * torch.rand(9, n)), 10 ** (-30 * torch.rand(9, n))),
    "large weights": lambda n: (torch.rand(9, n), 1e6 * torch.rand(9, n)),
    "small weights": lambda n: (torch.rand(9, n), 1e-9 * torch.rand(9, n)),
    "evenly spaced": lambda n: (torch.linspace(-1, 1, n).expand(9, n), 10 ** (-20 * torch.rand(9, n))),
}  # fmt: skip


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("n", [1, 2, 3, 17, 64])
@pytest.mark.parametrize("name", CASES)
def test_roots_are_the_eigenvalues_of_the_dense_matrix(name, n):
    d, weights = CASES[name](n)
    z = weights.sqrt()
    expected = torch.linalg.eigvalsh(torch.diag_embed(d) + z.unsqueeze(-1) * z.unsqueeze(-2))
    found = eigenvalues_of_update(d, weights)
    extent = expected.abs().amax().item() + 1e-300
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * extent)
    assert (found.diff(dim=-1) >= -1e-12 * extent).all()


def test_blocks_and_rounds_do_not_change_the_roots(monkeypatch):
    d, weights = torch.rand(20, 30), torch.rand(20, 30)
    expected = eigenvalues_of_update(d, weights)
    monkeypatch.setattr(measures_secular, "BLOCK", 1)
    monkeypatch.setattr(measures_secular, "PASSES", 1)
    torch.testing.assert_close(eigenvalues_of_update(d, weights), expected, rtol=0, atol=1e-9)


def kda(tokens, heads, n, beta, cleared=0.0, still=0.0, decay=None):
    """A trajectory of KDA; `cleared` of the decays are 0, `still` of the keys' entries."""
    shape = (1, tokens, heads)
    k = torch.nn.functional.normalize(torch.randn(*shape, n) * (torch.rand(*shape, n) >= still), dim=-1)
    alpha = torch.sigmoid(torch.randn(*shape, n) + 2) if decay is None else torch.full((*shape, n), decay)
    g = torch.where(torch.rand(*shape, n) < cleared, -torch.inf, alpha.log())
    return mixers.kda.trajectory(torch.randn(*shape, n), k, torch.randn(*shape, 2), g, torch.full(shape, beta))


def erased(t):
    """α_i β k_i² of every entry, [B, T, H, N]."""
    return -(t.transition.left * t.transition.right).squeeze(-1).squeeze(-2)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("case", [{}, {"cleared": 0.5}, {"still": 0.5}, {"cleared": 0.3, "still": 0.3}, {"decay": 0.9}])
def test_kda_has_the_eigenvalues_of_its_dense_transition(beta, case):
    t = kda(5, 2, 12, beta, **case)
    expected = torch.linalg.eigvals(t.dense()).squeeze(3)
    assert expected.imag.abs().max() < 1e-6  # they are real; the dense solver splits double ones
    found = m.eigenvalues(t).squeeze(-1).sort(-1).values
    torch.testing.assert_close(found, expected.real.sort(-1).values, rtol=1e-8, atol=1e-6)
    z = erased(t).sqrt()  # D^½ (I - β k kᵀ) D^½ has them too, and a solver that keeps double ones together
    dense = torch.diag_embed(t.transition.decay.squeeze(-1)) - z.unsqueeze(-1) * z.unsqueeze(-2)
    torch.testing.assert_close(found, torch.linalg.eigvalsh(dense), rtol=1e-8, atol=1e-8)


def test_a_long_kda_spectrum_needs_no_dense_matrix_and_is_quick(monkeypatch):
    monkeypatch.setattr(torch, "diag_embed", None)
    t = kda(256, 16, 128, 0.9)
    start = time.process_time()
    values = m.eigenvalues(t)
    assert time.process_time() - start < 4  # 0.8 s of one core, whoever shares it: an eighth of 2048 tokens
    trace = t.transition.decay.sum((-1, -2)) - erased(t).sum(-1)
    torch.testing.assert_close(values.sum((-1, -2)), trace, rtol=1e-8, atol=1e-8)
    assert m.eigenvalues(kda(2, 1, 300, 0.9)).shape == (1, 2, 1, 300, 1)
