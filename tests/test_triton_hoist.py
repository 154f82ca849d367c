"""What has no Value axis is made once a token before the scan, where that is worth a kernel; products are regrouped."""

import pytest
import torch
from interpreted import interpreted
from scan_family import aligned, before, channels, crowded, swinging, twice, weighted
from test_triton_scan import close, draw, gradients, small_tiles

import dsf
from dsf import Expr, Key, Param, Scalar, System, Value, dot
from dsf.mixers.longhorn import longhorn
from dsf.mixers.mingru import mingru
from dsf.mixers.rg_lru import rg_lru
from dsf.mixers.s6 import s6
from dsf.triton import scan as gpu_scan
from dsf.triton.hoist import parts
from dsf.triton.normalised import doubled
from dsf.triton.regroup import collect, regroup

__all__ = ["small_tiles"]
UNIT = "l2norm(k)"


@pytest.mark.parametrize(
    ("recurrence", "made", "passed"),
    [
        (longhorn, ["dot(k, k)"], ["k"]),
        (aligned, [UNIT, f"dot(q, {UNIT})"], ["q"]),
        (before, ["softplus(g)"], []),
        (swinging, ["k ** 2"], []),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_shared_parts_are_made_before_the_scan(recurrence: dsf.Recurrence, made: list[str], passed: list[str]) -> None:
    found = parts(recurrence.spec)
    assert [str(x) for x in found.made.values()] == made
    assert [x.attrs[0] for x in found.passed] == passed
    text = gpu_scan.text_of(recurrence.spec)
    assert not any("sum_key" in line for line in text.split("def step(")[1].split("def ")[0].splitlines())


@pytest.mark.parametrize("recurrence", [s6, channels, twice, rg_lru, mingru], ids=lambda r: r.name)
def test_bare_inputs_and_what_is_cheap_stay_in_the_scan(recurrence: dsf.Recurrence) -> None:
    assert not parts(recurrence.spec).made
    assert "def prologue(" not in gpu_scan.text_of(recurrence.spec)


def test_normalised_systems_make_their_features_once() -> None:
    assert [str(x) for x in parts(doubled(weighted.spec)).made.values()] == ["sigmoid(k)", "sigmoid(q)"]


@dsf.recurrence
def scaled(q: Key, k: Key, v: Value, s: Scalar, a: Value) -> System:
    """Cheap scales: one is of numbers a token, one makes a second vector of k."""
    return System(A=1 - dsf.sigmoid(a) * k**2, B=(s * k) * v, C=q * dsf.sigmoid(a))


@dsf.recurrence
def scored(q: Key, k: Key, v: Value, w: Param[Key]) -> System:
    """A vector of k beside k itself: its numbers alone are made, and multiplied where they meet a channel."""
    unit = dsf.l2norm(k * w)
    return System(A=dsf.sigmoid(k * v), B=unit * v, C=q)


def test_no_vector_is_added_for_a_product() -> None:
    assert not parts(scaled.spec).made
    assert str(parts(scaled.spec).left.B) == "k * (s * v)"
    (number,) = parts(scored.spec).made.values()
    assert number.op == "rsqrt" and not number.axes


@interpreted
@pytest.mark.parametrize(
    ("recurrence", "groups"), [(crowded, {}), (crowded, {"k": 4, "s": 2}), (scored, {"q": 2}), (aligned, {"q": 4})],
    ids=lambda x: getattr(x, "name", str(x)),
)  # fmt: skip
def test_gradients_of_inputs_that_heads_share(recurrence: dsf.Recurrence, groups: dict, small_tiles: None) -> None:
    x = draw(recurrence, tokens=5, heads=4)
    for name, heads in groups.items():
        kind = next(i.kind for i in recurrence.spec.inputs if i.name == name)
        steps, last = [kind.steps] if kind.steps else [], [3] if kind.axes else []
        x[name] = torch.randn(1, 5, *steps, heads, *last)
    state = torch.randn(1, 4, *recurrence.state_shape(3, 5))
    ours = gradients(recurrence, x, state, backend="triton")
    close(ours, gradients(recurrence, {k: v.double() for k, v in x.items()}, state.double(), form="naive"))


@interpreted
def test_only_the_gradients_that_are_asked_for(small_tiles: None) -> None:
    x = draw(crowded, tokens=5)

    def found(names: list[str], backend: str) -> list[torch.Tensor]:
        leaves = {k: v.clone().requires_grad_(k in names) for k, v in x.items()}
        return list(torch.autograd.grad(crowded(**leaves, backend=backend).sin().sum(), [leaves[k] for k in names]))

    for names in (["k"], ["q", "v"], ["s"], ["w"], ["v"]):
        close(found(names, "triton"), found(names, "torch"))


@interpreted
def test_packed_sequences_and_first_states(small_tiles: None) -> None:
    x, bounds = draw(crowded, tokens=9), torch.tensor([0, 3, 4, 9])
    state = torch.randn(3, 2, *crowded.state_shape(3, 5))

    def found(backend: str) -> list[torch.Tensor]:
        leaves = [v.clone().requires_grad_() for v in (*x.values(), state)]
        given = dict(zip(x, leaves, strict=False))
        y, final = crowded(**given, initial_state=leaves[-1], cu_seqlens=bounds, return_state=True, backend=backend)
        return [y.detach(), final.detach(), *torch.autograd.grad(y.sin().sum() + final.cos().sum(), leaves)]

    close(found("triton"), found("torch"))


@interpreted
def test_the_prologue_passes_opcheck(small_tiles: None) -> None:
    from dsf.kernels.triton.pointwise.prologue_ops import PROLOGUES, scan_prologue, scan_prologue_adjoint

    x = draw(crowded, tokens=3)
    printed = gpu_scan._prologue(crowded.spec)
    assert printed is not None
    operands = [x[a.role].requires_grad_() for a in PROLOGUES[printed[1]].inputs]
    torch.library.opcheck(scan_prologue, (operands, printed[1]))
    made = [torch.randn(y.shape) for y in scan_prologue(operands, printed[1])]
    plain = [v.detach() for v in operands]
    given = (made, plain, printed[1], [True] * len(plain))
    torch.library.opcheck(scan_prologue_adjoint, given, test_utils=("test_schema", "test_faketensor"))


def test_products_are_grouped_by_their_axes() -> None:
    names = {"k": {"key"}, "q": {"key"}, "x": {"value"}, "s": set(), "w": {"key"}}
    k, q, x, s, w = (Expr("input", (), (n, None), frozenset(a)) for n, a in names.items())
    given = [(k * s) * x, dot(k * s, q) * x, (k * x) / (s * q), (w * s) * k, k * s / x, x * w]
    expected = [k * (s * x), (dot(k, q) * s) * x, (k / q) * (x / s), (w * k) * s, k * (s / x), x * w]
    assert [regroup([x])[0] for x in given] == expected
    shared = k * s
    assert regroup([shared * x, shared * q]) == [shared * x, shared * q]
    assert regroup([(-1.0 * w) * x], [w]) == [(-1.0 * w) * x]


def test_a_vector_is_taken_out_of_sums() -> None:
    names = {"k": {"key"}, "a": {"key", "value"}, "b": {"key", "value"}, "x": {"value"}}
    k, a, b, x = (Expr("input", (), (n, None), frozenset(axes)) for n, axes in names.items())
    assert collect(b * x + (a * x) * k + x * k + x * k) == b * x + k * (a * x + (x + x))
    assert collect(b * x - k * x) == b * x - k * x
