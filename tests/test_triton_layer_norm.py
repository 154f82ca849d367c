"""The fused norm and gate in Triton's interpreter, against its definition in float64."""

import pytest
import torch
from interpreted import interpreted

from dsf.kernels.norm import added_rms_norm, gated, gated_rms_norm

pytestmark = interpreted


ACTIVATIONS = {
    "silu": lambda g: g * torch.sigmoid(g),
    "sigmoid": torch.sigmoid,
    "gelu": lambda g: g * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))) / 2,
}


def definition(x, weight, gate, groups, first, activation, eps=1e-5, norm=True):
    act = None if gate is None else ACTIVATIONS[activation](gate)
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
    ((1, 9, 40), 2, True, True, True, "gelu"),
    ((2, 5, 3, 8), 2, True, True, False, "silu"),  # heads that share the weights of their groups
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


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [40, 2048])
def test_a_gate_alone(width, activation):
    leaves = leaves_of((2, 3, width), False, True, torch.float32)
    leaves[2] = 3 * leaves[2]  # also where gelu is flat
    wanted = outcome(lambda x, w, g: definition(x, w, g, 1, False, activation, norm=False), leaves, torch.float64)
    for backend in ("triton", "torch"):
        found = outcome(lambda x, w, g, b=backend: gated(x, g, activation, backend=b), leaves, torch.float32)
        assert_near(found, wanted, 1e-5)


def test_an_unknown_gate_is_refused():
    with pytest.raises(ValueError, match="'silu', 'sigmoid' or 'gelu'"):
        gated(torch.zeros(2, 3), torch.zeros(2, 3), "tanh")


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


# The same, then a linear map


def mapped(groups, first, activation, norm):
    """Of x, weight, gate and the map's weight: the fused calls, and the definition."""

    def fused(x, weight, gate, then, backend="triton"):
        if norm:
            return gated_rms_norm(x, weight, gate, groups, first, activation, backend=backend, then=then)
        return gated(x, gate, activation, backend, then)

    def exact(x, weight, gate, then):
        y = definition(x, weight, gate, groups, first, activation, norm=norm)
        return (y if y.shape[-1] == then.shape[1] else y.flatten(-2)) @ then.T

    return fused, exact


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_map_behind_keeps_what_it_needs_and_no_more(case, kind):
    shape, groups, weighted, gate, first, activation = case
    width = shape[-1] * (shape[-2] if len(shape) == 4 else 1)
    leaves = [*leaves_of(shape, weighted, gate, kind), torch.randn(20, width).to(kind)]
    check_mapped(mapped(groups, first, activation, True), leaves)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 7, 40), (1, 129, 24), (33, 16)], ids=str)
def test_a_map_behind_a_gate(shape, kind):
    x, _, gate = leaves_of(shape, False, True, kind)
    check_mapped(mapped(1, False, "silu", False), [x, None, gate, torch.randn(20, shape[-1]).to(kind)])


def check_mapped(how, leaves):
    """Three calls against the definition in float64, and what they keep."""
    fused, exact = how
    leaves = [None if x is None else x.requires_grad_() for x in leaves]
    own = [x for x in leaves if x is not None]
    wide = [None if x is None else x.detach().double().requires_grad_() for x in leaves]
    y = exact(*wide)
    dy = torch.randn(y.shape).to(own[0].dtype)
    wanted = [y, *torch.autograd.grad(y, [x for x in wide if x is not None], dy.double())]
    for _ in range(3):
        kept = set()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.add(t.data_ptr()) or t, lambda t: t):
            y = fused(*leaves)
        assert kept == {x.data_ptr() for x in own}
        found = [y, *torch.autograd.grad(y, own, dy)]
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == own[0].dtype and a.shape == b.shape
            assert ((a.double() - b).norm() / b.norm()).item() < (1e-2 if a.dtype == torch.bfloat16 else 1e-5)


def test_a_map_behind_that_is_frozen_or_read_twice():
    fused, exact = mapped(1, False, "silu", True)
    x, weight, gate, then = (torch.randn(s, requires_grad=True) for s in ((2, 5, 24), (24,), (2, 5, 24), (8, 24)))
    y = fused(x, weight, gate, then.detach())
    torch.testing.assert_close(y, exact(x, weight, gate, then))
    with pytest.raises(RuntimeError, match="second"):
        torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    found = torch.autograd.grad(y, [x, gate], torch.ones_like(y))
    torch.testing.assert_close(found, torch.autograd.grad(exact(x, weight, gate, then).sum(), [x, gate]))
    y = fused(x, None, x, x[0, :, :].detach())
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), x), torch.autograd.grad(exact(x, None, x, x[0].detach()).sum(), x)
    )


# The norm of a sum


def drawn(shape, kinds, weighted=True):
    """Leaves x, other and weight; other as a slice of something wider lies."""
    x, weight, other = leaves_of(shape, weighted, True, torch.float64)
    other = torch.cat([torch.zeros(*shape[:-1], 3, dtype=torch.float64), other], -1).to(kinds[1])[..., 3:]
    found = [x.to(kinds[0]), other, None if weight is None else weight.to(kinds[2])]
    return [None if y is None else y.detach().requires_grad_() for y in found]


def pulled(run, leaves, which=(0, 1)):
    """The sum and its norm, and gradients through those that are asked for."""
    found = run(*leaves)
    slopes = [torch.randn(y.shape, generator=torch.Generator().manual_seed(i)).bfloat16() for i, y in enumerate(found)]
    loss = sum((found[i].double() * slopes[i].double()).sum() for i in which)
    own = [x for x in leaves if x is not None]
    return [*found, *torch.autograd.grad(loss, own, allow_unused=which == (0,))]


def summed(x, other, weight):
    total = x + other
    return total, definition(total, weight, None, 1, False, "silu")


SHAPES = [((1, 9, 20), True), ((2, 5, 48), True), ((3, 33), False), ((2, 3, 2, 8), True), ((1, 130, 40), True)]


@pytest.mark.parametrize("which", [(0, 1), (1,), (0,)], ids=["both", "norm", "sum"])
@pytest.mark.parametrize("shape, weighted", SHAPES, ids=str)
def test_a_sum_and_its_norm_are_the_definitions(shape, weighted, which, monkeypatch):
    from dsf.kernels.triton.layer import table

    monkeypatch.setattr(table, "PROGRAMS", 2)
    leaves = drawn(shape, [torch.float32] * 3, weighted)
    wide = [None if x is None else x.detach().double().requires_grad_() for x in leaves]
    wanted = pulled(summed, wide, which)
    found = pulled(lambda *t: added_rms_norm(*t, backend="triton"), leaves, which)
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if b is not None]
    assert_near(*zip(*pairs, strict=True), 1e-5)
    assert [x is None for x in found] == [x is None for x in wanted]
    exact = pulled(added_rms_norm, wide, which)
    assert_near(*zip(*[(a, b) for a, b in zip(exact, wanted, strict=True) if b is not None], strict=True), 1e-12)
    second, third = (pulled(lambda *t: added_rms_norm(*t, backend="triton"), leaves, which) for _ in range(2))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(second, third, strict=True))


def test_a_sum_of_a_tensor_and_itself():
    (x, _, weight), (y, _, scale) = (drawn((2, 7, 24), [dtype] * 3) for dtype in (torch.float32, torch.float64))
    found = pulled(lambda x, w: added_rms_norm(x, x, w, backend="triton"), [x, weight])
    assert_near(found, pulled(lambda x, w: summed(x, x, w), [y, scale]), 1e-5)


KINDS = [  # of x, other, weight, and of the norm
    (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16, torch.float16, torch.float16),
]


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_a_sum_is_rounded_once_and_its_norm_is_that_of_what_is_kept(kinds):
    leaves = drawn((2, 16, 64), kinds)
    found = pulled(lambda *t: added_rms_norm(*t, backend="triton", dtype=kinds[3]), leaves)
    total = leaves[0] + leaves[1]
    assert torch.equal(found[0], total) and [y.dtype for y in found] == [total.dtype, kinds[3], *kinds[:3]]
    torch_form = pulled(lambda *t: added_rms_norm(*t, backend="torch", dtype=kinds[3]), leaves)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    wanted = pulled(lambda x, other, w: summed(x + (total.double() - x - other).detach(), other, w), wide)
    for a, b, c in zip(found, wanted, torch_form, strict=True):
        least = (b.to(a.dtype).double() - b).abs().mean()
        assert (a.double() - b).abs().mean() <= 1.5 * least + 1e-6 * b.abs().mean()
        assert a.dtype == c.dtype


def test_sums_that_do_not_fit_are_refused():
    x = torch.randn(2, 3, 8)
    for other, weight in ((x[:, :2], None), (x[..., :1], None), (x, torch.ones(4))):
        with pytest.raises(ValueError, match="sizes do not fit"):
            added_rms_norm(x, other, weight)
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        added_rms_norm(x, x.double(), backend="triton")
