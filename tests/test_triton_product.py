"""Products of a matrix with few rows in Triton's interpreter, against their definition in float64."""

import pytest
import torch
from interpreted import interpreted
from test_triton_layer_norm import definition

from dsf.kernels.norm import added_norm_and_maps, added_rms_norm, gated, gated_rms_norm
from dsf.kernels.product import ROWS, by_blocks, few, linear

pytestmark = interpreted

# shape of x, outputs
SHAPES = [((1, 1, 48), 7), ((3, 1, 40), 130), ((2, 1, 20), 1), ((1, 4, 33), 64), ((1, 520), 19)]


def drawn(*shapes, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=g) for shape in shapes]


def apart(x):
    """x with a gap between its rows, as parts of a projection lie."""
    return torch.cat([torch.full((*x.shape[:-1], 5), torch.nan), x], -1)[..., 5:]


def assert_near(found, wanted, tolerance=1e-5):
    """Row by row, and output by output."""
    assert found.shape == wanted.shape
    assert ((found.double() - wanted).abs() <= tolerance * wanted.abs().amax(-1, keepdim=True)).all()


@pytest.fixture
def launched(counting):
    """Calls of the launch so far."""
    from dsf.kernels.triton.layer import product

    return counting(product, "_launch")


@torch.no_grad()
@pytest.mark.parametrize("shape, outputs", SHAPES, ids=str)
def test_a_product_alone(shape, outputs, launched):
    x, matrix = drawn(shape, (outputs, shape[-1]))
    for weight in (matrix, torch.nn.Parameter(matrix, False), matrix):  # the third call is a remembered one
        assert_near(linear(apart(x), weight, "triton", ahead=True), x.double() @ matrix.double().T)
    assert launched == [2]  # only a module's matrix may be read ahead


@torch.no_grad()
@pytest.mark.parametrize("shape, outputs", SHAPES, ids=str)
def test_a_product_with_a_bias(shape, outputs, launched):
    x, matrix, bias = drawn(shape, (outputs, shape[-1]), (outputs,))
    wanted = x.double() @ matrix.double().T + bias.double()
    for _ in range(3):
        assert_near(linear(apart(x), matrix, "triton", bias=bias), wanted)
    assert launched == [1]
    for other in (bias.double(), bias.repeat_interleave(2)[::2]):  # torch's, or its error
        if other.dtype == torch.float64:
            with pytest.raises(RuntimeError, match="dtype"):
                linear(x, matrix, "triton", bias=other)
        else:
            assert_near(linear(x, matrix, "triton", bias=other), wanted)
    assert launched == [1 + other.is_contiguous()]
    assert_near(linear(x, matrix, "triton", bias=bias[:1]), x.double() @ matrix.double().T + bias[:1].double())


@torch.no_grad()
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("rows", [(0, 7), (3, 5), (129, 130), (4, 4)], ids=str)
def test_some_outputs_pass_a_sigmoid(rows, backend):
    x, matrix, bias = drawn((3, 1, 40), (130, 40), (130,))
    wanted = x.double() @ matrix.double().T + bias.double()
    wanted[..., slice(*rows)] = wanted[..., slice(*rows)].sigmoid()
    assert_near(linear(x, matrix, backend, bias=bias, sigmoid=rows), wanted)


@torch.no_grad()
@pytest.mark.parametrize("rows, channels, size", [(1, 40, 4), (3, 264, 2), (5, 48, 16), (2, 5, 1)])
def test_matrices_of_blocks(rows, channels, size):
    """Of rows that lie apart, and of one tensor twice; the third call is a remembered one."""
    x, z, *weights = drawn((rows, 1, channels), (rows, 1, channels), *[(channels // size, size, size)] * 3)
    xs = apart(x), apart(x), z
    wanted = torch.cat([y.double() @ torch.block_diag(*w.double()).T for y, w in zip(xs, weights, strict=True)], -1)
    for _ in range(3):
        assert_near(by_blocks(xs, weights, "triton"), wanted)
    assert_near(by_blocks(xs, weights, "torch"), wanted)
    wide = drawn((rows, 1, 36), (2, 18, 18))
    assert_near(by_blocks(wide[:1], wide[1:], "triton"), wide[0].double() @ torch.block_diag(*wide[1].double()).T)


@torch.no_grad()
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("with_gate", [False, True])
def test_behind_a_norm(with_gate, groups, first, launched):
    x, weight, gate, matrix = drawn((2, 1, 40), (40,), (2, 1, 40), (11, 40))
    found = gated_rms_norm(x, weight, apart(gate) if with_gate else None, groups, first, backend="triton", then=matrix)
    given = [y.double() for y in (x, weight, gate)]
    wanted = definition(*given[:2], given[2] if with_gate else None, groups, first, "silu") @ matrix.double().T
    assert_near(found, wanted)
    assert launched == [1]


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 4])
def test_behind_a_norm_of_heads(groups, launched):
    x, weight, gate, matrix = drawn((2, 1, 3, 24), (24,), (2, 1, 3, 24), (5, 72))
    found = gated_rms_norm(x, weight, gate, groups, activation="sigmoid", backend="triton", then=matrix)
    normal = definition(x.double(), weight.double(), gate.double(), groups, False, "sigmoid")
    assert_near(found, normal.flatten(2) @ matrix.double().T)
    assert launched == [1]


@torch.no_grad()
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_behind_a_gate(activation, launched):
    x, gate, matrix = drawn((1, 1, 72), (1, 1, 72), (33, 72))
    found = gated(apart(x), apart(gate), activation, "triton", then=matrix)
    wanted = definition(x.double(), None, gate.double(), 1, False, activation, norm=False) @ matrix.double().T
    assert_near(found, wanted)
    assert launched == [1]


@torch.no_grad()
def test_of_one_tensor_twice(launched):
    x, weight, matrix = drawn((2, 1, 40), (40,), (9, 40))
    wide = matrix.double().T
    given, own = x.double(), weight.double()
    assert_near(
        gated(x, x, backend="triton", then=matrix), definition(given, None, given, 1, False, "silu", norm=False) @ wide
    )
    total, found = added_rms_norm(x, x, weight, backend="triton", then=matrix)
    assert torch.equal(total, 2 * x)
    assert_near(found, definition(2 * given, own, None, 1, False, "silu") @ wide)
    assert launched == [2]


@torch.no_grad()
@pytest.mark.parametrize("outputs", [3, 700])  # one program, and several, of which one stores the sum
def test_behind_the_norm_of_a_sum(outputs, launched, monkeypatch):
    from dsf.kernels.triton.layer import table

    monkeypatch.setattr(table, "product", lambda *_: (16, 4))
    x, other, weight, matrix = drawn((3, 1, 40), (3, 1, 40), (40,), (outputs, 40))
    total, found = added_rms_norm(apart(x), other, weight, backend="triton", then=matrix)
    assert torch.equal(total, x + other)
    assert_near(found, definition((x + other).double(), weight.double(), None, 1, False, "silu") @ matrix.double().T)
    assert launched == [1]


@torch.no_grad()
def test_bfloat16_rounds_what_the_launches_apart_round():
    x, other, weight, matrix = (y.bfloat16() for y in drawn((2, 1, 64), (2, 1, 64), (64,), (50, 64)))
    total, found = added_rms_norm(x, other, weight, backend="triton", then=matrix)
    kept, normal = added_rms_norm(x, other, weight, backend="triton")
    assert torch.equal(total, kept)
    assert_near(found, normal.double() @ matrix.double().T, 2**-8)


@torch.no_grad()
def test_other_calls_go_the_way_that_they_went(launched):
    x, matrix = drawn((ROWS + 1, 1, 16), (8, 16))
    wanted = x.double() @ matrix.double().T
    assert_near(linear(x, matrix, "triton"), wanted)  # too many rows
    with torch.enable_grad():
        weighed = matrix.clone().requires_grad_()
        y = linear(x[:1], weighed, "triton")
        assert_near(y, wanted[:1])
        assert torch.autograd.grad(y.sum(), weighed)[0] is not None
    assert_near(linear(x[:1].double(), matrix.double(), "triton"), wanted[:1])
    assert not few(x[:1], matrix.T.contiguous().T)  # the columns are contiguous, not the rows
    with torch.autocast("cpu", torch.bfloat16):
        assert not few(x[:1], matrix)
    with pytest.raises(RuntimeError):
        linear(x[:4].reshape(2, 1, 32), matrix, "triton")  # as many numbers as four rows, of another width
    assert launched == [0]


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_the_norm_of_a_sum_and_its_maps(rows, biased, launched):
    x, other, weight, matrix, bias = drawn((rows, 1, 40), (rows, 1, 40), (40,), (70, 40), (70,))
    total = x.double() + other.double()
    normal = definition(total, weight.double(), None, 1, False, "silu", 1e-5)
    made = normal @ matrix.double().T + (bias.double() if biased else 0)
    made[..., 10:13] = made[..., 10:13].sigmoid()
    own = [torch.nn.Parameter(y, False) for y in (weight, matrix, bias)]
    # parameters are read ahead, and what is none, such as one of them here, is not
    for scale, weights, added in ((weight, matrix, bias), own, (weight, *own[1:]), (own[0], matrix, own[2])):
        how = {"bias": added if biased else None, "sigmoid": (10, 13), "ahead": True}
        found = added_norm_and_maps(apart(x), apart(other), scale, weights, backend="triton", **how)
        for got, wanted in zip(found, (total, normal, made), strict=True):
            assert_near(got, wanted)
    assert launched == [2]
    for got, wanted in zip(added_norm_and_maps(x, other, weight, matrix, **how), (total, normal, made), strict=True):
        assert_near(got, wanted)
    assert launched == [2]
    one = added_norm_and_maps(x, other, weight, matrix, bias[:1], backend="triton")[2]
    assert_near(one, normal @ matrix.double().T + bias[:1].double())
    low = [t.bfloat16() for t in (x, other, weight, matrix)]
    total, normal = added_rms_norm(*low[:3], backend="triton")
    whole = linear(normal, low[3], "triton")
    assert all(map(torch.equal, added_norm_and_maps(*low, backend="triton"), (total, normal, whole)))
