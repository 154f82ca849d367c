"""The fused norm and gate in Triton's interpreter, against its definition in float64."""

import pytest
import torch
from interpreted import interpreted

from dsf.kernels.norm import gated, gated_rms_norm

pytestmark = interpreted


def definition(x, weight, gate, groups, first, activation, eps=1e-5, norm=True):
    act = None if gate is None else gate * torch.sigmoid(gate) if activation == "silu" else torch.sigmoid(gate)
    y = x if act is None or not first else x * act
    if norm:
        parts = y.unflatten(-1, (groups, -1))
        y = (parts / (parts.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)
    y = y if weight is None else y * weight
    return y if act is None or first else y * act


def leaves_of(shape, weighted, gate, dtype):
    g = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=g, dtype=torch.float64)]
    found.append(torch.randn(shape[-1], generator=g, dtype=torch.float64) if weighted else None)
    found.append(torch.randn(shape, generator=g, dtype=torch.float64) if gate else None)
    return [None if x is None else x.to(dtype) for x in found]


def outcome(run, leaves, dtype):
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in leaves]
    x, weight, gate = leaves
    if gate is not None:  # as a slice of a projection lies
        gate = torch.cat([torch.zeros(*gate.shape[:-1], 3, dtype=dtype), gate], -1)[..., 3:]
    y = run(x, weight, gate)
    slope = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return [y, *torch.autograd.grad(y, [x for x in leaves if x is not None], slope.to(dtype))]


def assert_near(found, wanted, tolerance):
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.shape == b.shape, i
        assert (a.double() - b).abs().max() <= tolerance * b.abs().max(), i


CASES = [  # shape, groups, weight, gate, gate first, activation
    ((2, 5, 3, 24), 1, True, True, False, "silu"),
    ((2, 7, 48), 3, True, True, True, "silu"),
    ((1, 9, 20), 1, True, False, False, "silu"),
    ((3, 33), 1, False, True, False, "sigmoid"),
    ((1, 2, 3, 2, 8), 2, True, True, True, "sigmoid"),
    ((1, 130, 40), 1, True, True, False, "silu"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_forward_and_all_gradients_are_the_definitions(case, monkeypatch):
    from dsf.kernels.triton.layer import table

    monkeypatch.setattr(table, "PROGRAMS", 2)
    shape, groups, weighted, with_gate, first, activation = case
    leaves = leaves_of(shape, weighted, with_gate, torch.float32)

    def fused(x, weight, gate):
        return gated_rms_norm(x, weight, gate, groups, first, activation, backend="triton")

    wanted = outcome(lambda *t: definition(*t, groups, first, activation), leaves, torch.float64)
    assert_near(outcome(fused, leaves, torch.float32), wanted, 1e-5)
    second, third = (outcome(fused, leaves, torch.float32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(second, third, strict=True))


@pytest.mark.parametrize("width", [40, 2048])
def test_a_gate_alone(width):
    leaves = leaves_of((2, 3, width), False, True, torch.float32)
    wanted = outcome(lambda x, w, g: definition(x, w, g, 1, False, "silu", norm=False), leaves, torch.float64)
    assert_near(outcome(lambda x, w, g: gated(x, g, backend="triton"), leaves, torch.float32), wanted, 1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_torch_forms_are_the_definition(case):
    shape, groups, weighted, with_gate, *how = case
    leaves = leaves_of(shape, weighted, with_gate, torch.float64)
    wanted = outcome(lambda *t: definition(*t, groups, *how), leaves, torch.float64)
    assert_near(outcome(lambda *t: gated_rms_norm(*t, groups, *how), leaves, torch.float64), wanted, 1e-9)


def test_bfloat16_errs_by_one_rounding():
    leaves = leaves_of((2, 16, 2, 32), True, True, torch.bfloat16)
    wanted = outcome(lambda *t: definition(*t, 1, False, "silu"), [x.double() for x in leaves], torch.float64)
    found = outcome(lambda *t: gated_rms_norm(*t, backend="triton"), leaves, torch.bfloat16)
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).abs().mean() <= 1.5 * (b.to(torch.bfloat16).double() - b).abs().mean()


@pytest.mark.parametrize("kinds", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_the_result_may_have_another_type_and_is_rounded_once(kinds):
    given, asked = kinds
    leaves = leaves_of((2, 9, 96), True, False, given)

    def norm(backend):
        return lambda x, weight, gate: gated_rms_norm(x, weight, gate, backend=backend, dtype=asked)

    found, torchs = norm("triton")(*leaves), norm("torch")(*leaves)
    assert found.dtype == torchs.dtype == asked
    torch.testing.assert_close(found, torchs, rtol=1e-6 if asked == torch.float32 else 2**-7, atol=1e-6)
    wanted = outcome(lambda *t: definition(*t, 1, False, "silu"), leaves, torch.float64)
    own = outcome(norm("triton"), leaves, given)
    assert [x.dtype for x in own[1:]] == [given, given]
    for a, b in zip(own, wanted, strict=True):
        assert ((a.double() - b).norm() / b.norm()).item() < (1e-2 if torch.bfloat16 in (a.dtype, asked) else 1e-5)
