"""Random expressions as Triton holes, in the interpreter: whatever is printed computes what torch computes."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import interpreted
from scan_family import before, channels, erasing, leaky_peak, swinging
from test_random_systems import X, declare
from test_triton_scan import close, draw, gradients

import dsf
from dsf import Expr, FormError, System, maximum, minimum, sigmoid, softplus, tanh, where
from dsf.kernels.triton import functions, lanes, tile
from dsf.mixers import ZOO
from dsf.triton import scan as gpu_scan
from dsf.triton.print_scan import emit
from dsf.triton.scan import _hole

UNARY = [sigmoid, softplus, tanh, dsf.silu, dsf.log1p, dsf.expm1, dsf.exp, dsf.sqrt, dsf.rsqrt, dsf.log, dsf.abs]
POSITIVE = {dsf.log1p, dsf.sqrt, dsf.rsqrt, dsf.log}  # their arguments are made so


@st.composite
def expressions(draw: st.DrawFn, leaves: list[Expr]) -> Expr:
    """A directed acyclic graph: every new node combines any of those before it, so that parts are shared."""
    nodes = list(leaves)
    pick = st.integers(0, 20).map(lambda i: nodes[-1 - i % len(nodes)])
    for _ in range(draw(st.integers(1, 6))):
        a, b = draw(pick), draw(pick)
        f = draw(st.sampled_from(UNARY))
        inside = 0.5 + softplus(a) if f in POSITIVE else tanh(a) if f in (dsf.exp, dsf.expm1) else a
        node = st.sampled_from([f(inside), a + b, a - b, 0.5 * a * b, a / (1 + b * b), maximum(a, b), minimum(a, b)])
        nodes.append(draw(node | st.just(where(a > b, a, tanh(b))) | st.just(a**2 - b**3 / 3)))
    return nodes[-1]


@st.composite
def systems(draw: st.DrawFn) -> System:
    """A scan of random parts, whose state neither grows nor has an axis less than the fused scan needs."""
    leaves = [X[name] for name in ("s", "sv", "iv", "pv")]
    keys = [*leaves, X["sk"], X["pkv"]]
    vector = draw(st.booleans())
    a, b, c = (draw(expressions(leaves if vector else keys)) for _ in range(3))
    write = tanh(b) * X["v"]
    if vector:
        return System(A=tanh(a) * sigmoid(X["sv"]), B=write, C=tanh(c))
    return System(A=tanh(a) * sigmoid(X["sk"] + X["sv"]), B=write * X["k"], C=X["q"] * tanh(c))


SCANS = [e.recurrence for e in ZOO if e.recurrence.spec.structure in ("Hadamard", "vector (N = 1)")]


@pytest.mark.parametrize("rough", [False, True])
@pytest.mark.parametrize("recurrence", [*SCANS, swinging, erasing, leaky_peak, before, channels], ids=lambda r: r.name)
def test_whatever_a_printed_scan_calls_exists(recurrence: dsf.Recurrence, rough: bool) -> None:
    """Functions of 16-bit inputs (rough) among them, which tests in float32 do not meet."""
    try:
        text = emit(recurrence.spec, rough=rough).text
    except FormError:
        return  # a normalised system, which is printed as num and den side by side
    called = re.findall(r"\b(fn|tile|lanes)\.(\w+)", text)
    modules = {"fn": functions, "tile": tile, "lanes": lanes}
    assert called and not [name for room, name in called if not hasattr(modules[room], name)]
    compile(text, recurrence.name, "exec")


@interpreted
def test_a_plan_shows_the_source_that_runs(monkeypatch) -> None:
    ran = []
    monkeypatch.setattr(gpu_scan, "_hole", lambda *how: ran.append(how) or _hole(*how))
    for dtype in (torch.float32, torch.float16):
        x = {name: v.to(dtype) for name, v in draw(swinging, tokens=3, n=2, p=3).items()}
        swinging(**x, backend="triton")
        source = gpu_scan.source_of(*ran[-1]).text
        before = gpu_scan._prologue(swinging.spec)[0].text  # makes k ** 2
        assert swinging.plan(**x, backend="triton").source == f"{before}\n\n{source}"


@interpreted
@settings(max_examples=15, deadline=None, derandomize=True)
@given(systems())
def test_what_is_printed_computes_what_was_declared(system: System) -> None:
    torch.manual_seed(0)
    r = declare(system)
    assert r is not None
    x = draw(r, tokens=3, n=2, p=3)
    state = torch.randn(1, 2, *r.state_shape(2 if r.spec.has_key else 1, 3))
    wide = gradients(r, {k: v.double() for k, v in x.items()}, state.double(), backend="torch", form="recurrent")
    close(gradients(r, x, state, backend="triton"), wide, 1e-4)
