"""Cross entropy of rows of logits in Triton's interpreter, against its definition in float64."""

import pytest
import torch
import torch.nn.functional as F
from interpreted import interpreted

from dsf.kernels.entropy import row_entropies
from dsf.kernels.triton.layer import entropy
from dsf.mixers.models import parts
from dsf.mixers.models.parts import IGNORED, cross_entropy, linear_cross_entropy

pytestmark = interpreted


@pytest.fixture
def by_kernel(monkeypatch):
    """Models' losses run the kernel; its calls."""
    calls = []

    def taken(*given):
        calls.append(given)
        return row_entropies(*given, backend="triton")

    monkeypatch.setattr(parts, "row_entropies", taken)
    monkeypatch.setattr(parts, "launched", lambda logits: True)
    return calls


@pytest.mark.parametrize("words", [1, 31, 150, 64])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_entropies_and_their_gradient(words, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(entropy, "SIZE", 32)
    logits = (8 * torch.randn(9, words)).to(dtype)
    targets, divisor = torch.randint(0, words, (9,)), torch.tensor(7.0)
    targets[3] = IGNORED
    logits[3, 0] = torch.nan  # of which nobody asks
    logits[5, : words // 2] = -torch.inf  # what a model must not say
    targets[5] = words - 1
    wide = logits.double().nan_to_num(nan=0.0, neginf=-torch.inf).requires_grad_()
    exact = F.cross_entropy(wide, targets, reduction="none")
    (slope,) = torch.autograd.grad(exact.sum() / 7, wide)
    for _ in range(3):
        own, found = row_entropies(logits.clone(), targets, divisor, IGNORED, backend="triton")
        assert own.dtype == torch.float32 and found.dtype == dtype
        torch.testing.assert_close(own.double(), exact.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.double(), slope, rtol=tolerance, atol=2e-7)
        assert found[3].eq(0).all() and own[3] == 0
    alone, nothing = row_entropies(logits.clone(), targets, divisor, IGNORED, gradient=False, backend="triton")
    assert nothing is None and torch.equal(alone, own)


def test_a_certain_word_keeps_the_digits_of_its_gradient():
    """softmax - 1 at the target is not made of a rounded softmax."""
    logits, targets = torch.zeros(1, 40).bfloat16(), torch.tensor([3])
    logits[0, 3] = 14.0
    wide = logits.double().requires_grad_()
    (exact,) = torch.autograd.grad(F.cross_entropy(wide, targets), wide)
    found = row_entropies(logits, targets, torch.tensor(1.0), backend="triton")[1]
    assert abs(exact[0, 3]) < 1e-4
    torch.testing.assert_close(found.double(), exact, rtol=5e-3, atol=0.0)


@pytest.mark.parametrize("level", [-1e30, -3e4, 3e4, 1e30])
def test_logits_of_any_level_have_the_entropies_of_their_differences(level):
    """Beside 3e4 float32 keeps 2e-3 of the logarithm of a sum, beside 1e30 nothing."""
    logits, targets = (level + torch.randn(4, 40).round(decimals=1)).float(), torch.arange(4)
    wide = logits.double().requires_grad_()
    exact = F.cross_entropy(wide, targets, reduction="none")
    own, found = row_entropies(logits, targets, torch.tensor(1.0), backend="triton")
    torch.testing.assert_close(own.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.double(), torch.autograd.grad(exact.sum(), wide)[0], rtol=1e-5, atol=1e-7)


def test_a_target_that_is_no_word_shows():
    own = row_entropies(torch.zeros(3, 5), torch.tensor([1, 5, -7]), torch.tensor(1.0), backend="triton")[0]
    assert own.isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("frozen", [False, True])
def test_the_loss_in_pieces_by_the_kernel(frozen, by_kernel, monkeypatch):
    monkeypatch.setattr(parts, "PIECE", 31 * 4 * 3)
    hidden, weight, targets = torch.randn(2, 7, 16), torch.randn(31, 16), torch.randint(0, 31, (2, 7))
    targets[0, 2:4] = IGNORED
    found = []
    for wide in (False, True):
        leaves = [
            (x.double() if wide else x.clone()).requires_grad_(not (frozen and x is weight)) for x in (hidden, weight)
        ]
        if wide:
            loss = F.cross_entropy((leaves[0] @ leaves[1].T).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        else:
            loss = linear_cross_entropy(*leaves, targets)
        found.append([loss, *torch.autograd.grad(3 * loss, [x for x in leaves if x.requires_grad])])
    assert len(by_kernel) == 5
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [None, 5, torch.tensor(5), torch.tensor([5])], ids=str)
def test_the_loss_of_logits_by_the_kernel(count, by_kernel):
    logits, targets = torch.randn(2, 7, 31, requires_grad=True), torch.randint(0, 31, (2, 7))
    targets[0, 2:4] = IGNORED
    wide = logits.detach().double().requires_grad_()
    exact = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum") / (12 if count is None else 5)
    for scale in (1.0, -3.0, 0.0):
        loss = cross_entropy(logits, targets, count)
        (found,) = torch.autograd.grad(scale * loss, logits)
        (slope,) = torch.autograd.grad(scale * exact, wide, retain_graph=True)
        torch.testing.assert_close(found.double(), slope, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(loss.detach().double(), exact.detach(), rtol=1e-6, atol=0.0)
    assert len(by_kernel) == 6
    with torch.no_grad():
        torch.testing.assert_close(cross_entropy(logits, targets, count), loss.detach())


def test_second_derivatives_of_the_loss_of_logits(by_kernel):
    logits, targets = torch.randn(1, 3, 5, dtype=torch.double, requires_grad=True), torch.tensor([[1, IGNORED, 4]])
    far = torch.randn(1, 3, 5, dtype=torch.double)

    def curved(of, wanted):
        (slope,) = torch.autograd.grad(cross_entropy(of, targets), of, create_graph=True)
        return torch.autograd.grad((slope * far.to(of.dtype)).sum(), of)[0] if wanted else slope

    single = logits.detach().float().requires_grad_()
    found = [curved(single, wanted).double() for wanted in (False, True)]
    assert len(by_kernel) == 2  # the values; derivatives of derivatives are torch's
    by_torch = F.cross_entropy(logits[0], targets[0], reduction="sum", ignore_index=IGNORED) / 2
    (slope,) = torch.autograd.grad(by_torch, logits, create_graph=True)
    (bend,) = torch.autograd.grad((slope * far).sum(), logits)
    for mine, exact in zip(found, (slope, bend), strict=True):
        torch.testing.assert_close(mine.detach(), exact.detach(), rtol=1e-5, atol=1e-6)


def test_a_transformed_loss_is_torch_s(by_kernel):
    logits, targets = torch.randn(2, 3, 5), torch.randint(0, 5, (2, 3))
    found = torch.func.grad(lambda x: cross_entropy(x, targets))(logits)
    given = logits.clone().requires_grad_()
    (exact,) = torch.autograd.grad(F.cross_entropy(given.flatten(0, 1), targets.flatten()), given)
    assert not by_kernel
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize(
    "given, error",
    [
        ((torch.zeros(2, 3), torch.zeros(3).long(), torch.ones(())), "sizes do not fit"),
        ((torch.zeros(2, 3), torch.zeros(2).long(), torch.ones(1)), "sizes do not fit"),
        ((torch.zeros(2, 3).double(), torch.zeros(2).long(), torch.ones(())), "float32, bfloat16 or float16"),
    ],
)  # fmt: skip
def test_bad_input(given, error):
    with pytest.raises(ValueError, match=error):
        row_entropies(*given, backend="triton")
    with pytest.raises(ValueError, match="there are 'auto'"):
        row_entropies(*given[:1], torch.zeros(2).long(), torch.ones(()), backend="cuda")
