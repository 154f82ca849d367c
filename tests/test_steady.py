"""Calls as users make them: not the first of their kind, with tensors that are one or share memory, on several threads.

In the interpreter (TRITON_INTERPRET=1) and on a GPU these are the kernels; without either, the torch forms.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from interpreted import INTERPRETED

import dsf
from dsf import I, Key, Param, Scalar, System, Value, dot, exp, mixers, outer, sigmoid
from dsf.checking.compare import OUTPUT
from dsf.checking.measure import distance

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
BACKEND = "triton" if INTERPRETED or DEVICE == "cuda" else "torch"


def run(recurrence, inputs, wanted, form="auto", backend=BACKEND):
    """y, the final state and the gradients of `wanted` of a loss that sees both."""
    y, final = recurrence(*inputs, return_state=True, form=form, backend=backend)
    weights = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=weights, dtype=torch.float64).to(x)).sum() for x in (y, final))
    return [y.detach(), final.detach(), *torch.autograd.grad(loss, wanted)]


def worst(found, expected, kinds, dtype=torch.float32):
    """The largest error of a head and block of tokens among y, the final state and the gradients."""
    kinds = [OUTPUT, None, *kinds]
    name = str(dtype).removeprefix("torch.")
    return max(distance(a, b, kind, name) for a, b, kind in zip(found, expected, kinds, strict=True))


def holds(recurrence, inputs):
    """The call against the float64 oracle, of the same inputs, one tensor where they are one."""
    wide = {id(x): x.detach().double().requires_grad_() for x in inputs}
    kinds = {id(x): i.kind for i, x in zip(recurrence.spec.inputs, inputs, strict=True)}
    once = list({id(x): x for x in inputs}.values())
    expected = run(recurrence, [wide[id(x)] for x in inputs], [wide[id(x)] for x in once], "naive", "torch")
    found = run(recurrence, inputs, once)
    assert worst(found, expected, [kinds[id(x)] for x in once]) < 1e-4


def leaf(*shape, dtype=torch.float32, low=None):
    x = torch.randn(shape, device=DEVICE, dtype=torch.float32)
    return (x if low is None else low + (1 - low) * x.sigmoid()).to(dtype).requires_grad_()


def delta_inputs(dtype=torch.float32, tokens=21, same_gates=False, same_rows=False):
    """q, k, v, alpha, beta of gated_deltanet: keys of length one, gates in (0.5, 1)."""
    q, k, v = (leaf(2, tokens, 2, 8, dtype=dtype) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x.detach().float(), dim=-1).to(dtype).requires_grad_() for x in (q, k))
    alpha, beta = (leaf(2, tokens, 2, dtype=dtype, low=0.5) for _ in range(2))
    return [k if same_rows else q, k, v, beta if same_gates else alpha, beta]


@pytest.mark.parametrize("kind", ["same_gates", "same_rows"])
@pytest.mark.parametrize("first", [True, False], ids=["then distinct", "then one"])
def test_inputs_that_were_one_tensor_and_then_are_not(kind, first):
    for call in range(4):
        holds(mixers.gated_deltanet, delta_inputs(**{kind: (call < 2) == first}))


@dsf.recurrence
def shared_scan(q: Key, k: Key, x: Value, b: Value, D: Param[Value]) -> System:
    """Elementwise, its decay from a dot product."""
    d = sigmoid(b) / (1 + dot(k, k))
    return System(A=1 - d * k**2, B=k * (d * x), C=q, D=D * x)


@pytest.mark.parametrize("first", [True, False], ids=["then distinct", "then one"])
def test_a_scan_whose_inputs_were_one_tensor(first):
    for call in range(4):
        q, k = leaf(1, 11, 2, 2), leaf(1, 11, 2, 2)
        x, b = leaf(1, 11, 2, 4), leaf(1, 11, 2, 4)
        one = (call < 2) == first
        holds(shared_scan, [k if one else q, k, x, x if one else b, leaf(2, 4)])


def test_other_recurrences_of_the_same_shapes_in_between():
    @dsf.recurrence
    def plain(q: Key, k: Key, v: Value, alpha: Scalar, beta: Scalar) -> System:
        return System(A=alpha, B=k * (beta * v), C=q)

    for _ in range(3):
        for recurrence in (plain, mixers.gated_deltanet):
            holds(recurrence, delta_inputs())


def test_inputs_that_overlap_in_memory():
    for _ in range(3):
        rows = torch.nn.functional.normalize(leaf(2, 20, 2, 16).detach(), dim=-1)
        memory = torch.empty(2, 20, 2, 24, device=DEVICE)
        memory[..., :16] = rows
        memory[..., 16:] = 0.1
        v, gates = leaf(2, 20, 2, 16), leaf(2, 20, 2, low=0.5)
        views = [memory[..., :16], memory[..., 8:], v.detach(), gates.detach(), gates.detach()[:, :1].expand(2, 20, 2)]
        wide = [x.double() for x in views]
        expected = mixers.gated_deltanet(*wide, form="naive")
        assert distance(mixers.gated_deltanet(*views, backend=BACKEND), expected, OUTPUT, "float32") < 1e-4


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter runs one kernel at a time")
def test_two_threads_call_at_once():
    given = [delta_inputs(tokens=20 + i % 3) for i in range(4)]
    alone = [run(mixers.gated_deltanet, inputs, inputs) for inputs in given]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(lambda inputs: run(mixers.gated_deltanet, inputs, inputs), given * 3))
    for found, expected in zip(together, alone * 3, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.skipif(DEVICE != "cuda", reason="streams are a GPU's")
def test_a_second_stream():
    for call in range(4):
        stream = torch.cuda.Stream() if call % 2 else torch.cuda.default_stream()
        inputs = delta_inputs()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            holds(mixers.gated_deltanet, inputs)
        torch.cuda.synchronize()


# ---- tokens past the end ------------------------------------------------------------------------

# Tokens past the end of the last tile are computed from zeros: 1 / 0 here. Nothing of theirs may reach another's.


@dsf.recurrence
def quotients(q: Key, k: Key, x: Value, b: Value, w: Param[Key, Value], D: Param[Value]) -> System:
    d = sigmoid(b) / (1 + dot(k, k))
    return System(A=exp(-exp(w) * d), B=k * (d * x / b), C=q, D=D * x / b)


@dsf.recurrence
def vector_quotients(x: Value, b: Value, w: Param[Value]) -> System:
    return System(A=sigmoid(w / b), B=x / b, C=1 / b)


@dsf.recurrence
def late_quotients(q: Key, k: Key, x: Value, b: Value, c: Scalar) -> System:
    return System(A=sigmoid(b / c), B=k * (x / b), C=q / c, read="before")


@dsf.recurrence
def delta_quotients(q: Key, k: Key, v: Value, a: Scalar, b: Scalar, w: Param[Scalar]) -> System:
    n = k / dot(k, k)
    return System(A=exp(-w / a) * (I - sigmoid(b) * outer(k, n)), B=n * (v / b), C=q / a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [33, 46])
@pytest.mark.parametrize("recurrence", [shared_scan, quotients, vector_quotients, late_quotients, delta_quotients])
def test_tokens_past_the_end_reach_no_gradient(recurrence, tokens, dtype):
    inputs = []
    for i in recurrence.spec.inputs:
        sizes = [{"key": 4, "value": 33}[axis] for axis in ("key", "value") if axis in i.kind.axes]
        lead = (1, tokens, 1) if i.kind.time else (1,)  # a head's tiles know nothing of other heads
        bounded = i.name in ("a", "b", "c", "w")
        x = leaf(*lead, *sizes, dtype=dtype, low=0.5 if bounded else None)
        if i.name in ("q", "k"):
            x = (x.detach() * 0.5).requires_grad_()
        inputs.append(x)
    found = run(recurrence, inputs, inputs)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = run(recurrence, wide, wide, "naive", "torch")
    kinds = [i.kind for i in recurrence.spec.inputs]
    assert worst(found, expected, kinds, dtype) < (1e-4 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(("n", "p"), [(100, 3), (3, 100)])
def test_a_delta_rule_whose_keys_and_values_differ_in_width(n, p):
    """Their tiles differ, too, which only a compiler of kernels minds: on a GPU this did not compile."""
    q, k = (torch.nn.functional.normalize(leaf(1, 10, 1, n).detach(), dim=-1) for _ in range(2))
    given = [q, k, leaf(1, 10, 1, p).detach(), leaf(1, 10, 1, low=0.5).detach()]
    inputs = [x.bfloat16().requires_grad_() for x in given]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = run(mixers.deltanet, wide, wide, "naive", "torch")
    kinds = [i.kind for i in mixers.deltanet.spec.inputs]
    assert worst(run(mixers.deltanet, inputs, inputs), expected, kinds, torch.bfloat16) < 2e-2


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrence", [mixers.gated_deltanet, shared_scan], ids=lambda r: r.name)
def test_second_derivatives_are_refused_in_words(recurrence):
    if recurrence is shared_scan:
        inputs = [leaf(1, 20, 2, 4), leaf(1, 20, 2, 4), leaf(1, 20, 2, 6), leaf(1, 20, 2, 6), leaf(2, 6)]
    else:
        inputs = delta_inputs()
    y = recurrence(*inputs, backend=BACKEND, form="chunk")
    with pytest.raises(RuntimeError, match=r"second derivatives .* ask for form='recurrent', backend='torch'"):
        torch.autograd.grad(y.square().sum(), inputs, create_graph=True)


@pytest.mark.skipif(BACKEND == "torch", reason="about the kernels' grids")
def test_a_batch_with_more_heads_than_a_grid_has_programs_runs_in_parts(monkeypatch):
    import dsf.triton.chunk as front

    monkeypatch.setattr(front, "GRID", 5)  # two heads: two rows a part
    inputs = [torch.cat([x, x.flip(0), x[:1]]).detach().requires_grad_() for x in delta_inputs()]
    for _ in range(3):
        holds(mixers.gated_deltanet, inputs)
    bounds = torch.arange(0, 21, 2, device=DEVICE)
    packed = [x[:1, :20].detach() for x in inputs]
    with pytest.raises(dsf.InputError, match="10 packed sequences; the matrix kernels take at most 5 a call"):
        mixers.gated_deltanet(*packed, cu_seqlens=bounds, backend=BACKEND)
    monkeypatch.setattr(front, "GRID", 1)
    with pytest.raises(dsf.FormError, match="at most 1 heads, got 2"):
        mixers.gated_deltanet.plan(*packed, backend=BACKEND)
