"""Several readouts of a token in one run of the chunk kernels, interpreted, against float64."""

import pytest
import torch
from interpreted import interpreted

import dsf
from dsf import I, Key, Param, Scalar, Steps, System, Value, compose, exp, prev, sigmoid, softplus
from dsf.language.late import early, late
from dsf.mixers import mamba3_mimo_of
from dsf.mixers.mamba3 import mamba3_mimo_weighed_of
from dsf.triton.choose import frame_in_chunks
from dsf.triton.chunk import reads_together
from dsf.triton.operands import operands_of

pytestmark = interpreted


def every(writes, decays, read, skip=0):
    """A token's writes, of which the first one comes with its decay."""
    *others, last = [System(A=I if row else decays, B=write) for row, write in enumerate(writes)]
    return compose(*others, System(A=last.A, B=last.B, C=read, D=skip))


@dsf.recurrence
def four(x: Steps[Value, 4], g: Steps[Value, 4], a: Scalar, b: Steps[Key, 4], c: Steps[Key, 4], D: Param[Scalar]):
    read = sum(q * gate for q, gate in zip(c, g, strict=True))
    return every([k * v for k, v in zip(b, x, strict=True)], exp(-softplus(a)) * I, read, D * x[0] * g[1])


@dsf.recurrence
def fewer_reads(x: Steps[Value, 3], u: Value, a: Scalar, w: Scalar, b: Steps[Key, 3], c: Steps[Key, 2]):
    """Three writes of strengths of their own and two reads, one of which a number of the token scales."""
    writes = [k * (sigmoid(w) * v) for k, v in zip(b, x, strict=True)]
    return every(writes, sigmoid(a) * I, c[0] * sigmoid(u) + c[1] * (w * u))


@dsf.recurrence
def without_decay(x: Steps[Value, 2], u: Value, b: Steps[Key, 2], c: Steps[Key, 2], m: Param[Value]):
    return every([k * v for k, v in zip(b, x, strict=True)], I, c[0] * u + c[1] * m)


@dsf.recurrence
def twice_written(x: Steps[Value, 2], u: Value, a: Scalar, w: Scalar, b: Steps[Key, 2], c: Steps[Key, 2]):
    """Without a turn; every write is made once more as the next token begins, with a number of that token."""
    pairs = list(zip(b, x, strict=True))
    again = [System(A=I, B=sigmoid(w) * prev(k * v)) for k, v in pairs]
    first, second = [k * (softplus(a) * v) for k, v in pairs]
    last = System(A=I, B=second, C=c[0] * u + c[1] * x[0])
    return compose(*again, System(A=sigmoid(a) * I, B=first), last)


TOGETHER = [four, fewer_reads, without_decay]
TWICE = [twice_written, mamba3_mimo_of(2), mamba3_mimo_of(3), *(mamba3_mimo_weighed_of(2, gated) for gated in (0, 1))]
EVERY = pytest.mark.parametrize("r", [*TOGETHER, *TWICE], ids=lambda r: r.name)
BOUNDS = [0, 0, 5, 6, 6, 70, 83]


def sample(r, B, T, N=16):
    """Keys of about unit length."""
    g, sizes = torch.Generator().manual_seed(0), {"B": B, "T": T, "H": 2, "N": N, "N/2": N // 2, "P": 24}
    found = {}
    for i in r.spec.inputs:
        x = torch.randn([i.kind.steps or 0 if axis == "n" else sizes[axis] for axis in i.kind.layout()], generator=g)
        found[i.name] = x / 4 if i.kind.axes == {"key"} and not i.kind.pair else x
    return found


def outcome(r, given, dtype, start=None, calls=1, **options):
    """y, the state and all gradients of the last of so many calls, by name."""
    for _ in range(calls):
        leaves = {k: x.to(dtype).requires_grad_() for k, x in given.items()}
        first = {} if start is None else {"initial_state": start.to(torch.promote_types(dtype, torch.float32))}
        first = {k: x.requires_grad_() for k, x in first.items()}
        y, state = r(**leaves, **first, return_state=True, **options)
        g = torch.Generator().manual_seed(1)
        weights = [torch.randn(x.shape, generator=g, dtype=torch.float64) for x in (y, state)]
        loss = sum((x.double() * w).sum() for x, w in zip((y, state), weights, strict=True))
        found = torch.autograd.grad(loss, [*leaves.values(), *first.values()])
    return {"y": y, "state": state} | dict(zip([*leaves, *first], found, strict=True))


def compare(found, expected, most):
    """Errors over the norm of what is right; of a bias of dt over that of dt's gradients, which it sums and which
    cancel."""
    for name, want in expected.items():
        size = max(want.norm(), expected["dt"].norm() if name == "dt_bias" else 0)
        error = (found[name].double() - want).norm() / size
        assert error <= most, (name, error)


@EVERY
def test_one_run_computes_all_reads(r):
    frame = frame_in_chunks(r.spec, "triton")
    spec = r.spec if r in TOGETHER else frame.spec
    assert reads_together(spec) and "each a run of its own" not in r.plan(N=16, P=24, backend="triton").reason
    operands = operands_of(spec)
    assert operands.rows in (2, 4) and len(operands.queries) == operands.rows
    if r in TWICE:
        assert frame is early(r.spec) and len(operands.fresh) == operands.rows
        assert frame_in_chunks(r.spec, "torch") is late(r.spec)


@EVERY
@pytest.mark.parametrize(
    ("dtype", "bounds", "started"),
    [
        (torch.float32, None, False),
        (torch.float32, BOUNDS, True),
        (torch.bfloat16, None, True),
        (torch.bfloat16, BOUNDS, False),
    ],
    ids=["float32", "float32, packed, started", "bfloat16, started", "bfloat16, packed"],
)
def test_gradients_are_those_in_float64(r, bounds, started, dtype):
    given = {k: x.to(dtype).float() for k, x in sample(r, 1 if bounds else 2, 83).items()}
    options = {"cu_seqlens": torch.tensor(bounds)} if bounds else {}
    rows = len(bounds) - 1 if bounds else 2
    start = torch.randn(rows, 2, *r.state_shape(16, 24), generator=torch.Generator().manual_seed(2))
    start = start.double() if started else None
    expected = outcome(r, given, torch.float64, start, form="naive", **options)
    found = outcome(r, given, dtype, start, 3 if bounds and started else 1, backend="triton", **options)
    compare(found, expected, 2e-6 if dtype == torch.float32 else 2.5e-2)


@pytest.mark.parametrize("r", TWICE, ids=lambda r: r.name)
def test_later_tokens_change_no_bit_of_earlier_outputs(r):
    given = sample(r, 1, 60)
    timed = {i.name for i in r.spec.inputs if i.kind.time}
    other = {k: torch.cat([x[:, :37], 3 * x[:, 37:]], dim=1) if k in timed else x for k, x in given.items()}
    y, changed = (r(**x, backend="triton") for x in (given, other))
    assert torch.equal(y[:, :37], changed[:, :37]) and not torch.equal(y[:, 37:], changed[:, 37:])


@EVERY
def test_a_sequence_in_parts_is_the_whole(r):
    """By chunks, then by steps, whose state is the declaration's, then by chunks again."""
    given = sample(r, 2, 50)
    timed = {i.name for i in r.spec.inputs if i.kind.time}
    whole, last = r(**{k: x.double() for k, x in given.items()}, return_state=True, form="naive")
    state, outputs = None, []
    for part, how in ((slice(0, 21), "chunk"), (slice(21, 23), "recurrent"), (slice(23, 50), "chunk")):
        here = {k: x[:, part] if k in timed else x for k, x in given.items()}
        backend = "torch" if how == "recurrent" else "triton"
        y, state = r(**here, initial_state=state, return_state=True, form=how, backend=backend)
        outputs.append(y)
    compare({"y": torch.cat(outputs, dim=1), "state": state}, {"y": whole, "state": last}, 2e-6)


@pytest.mark.parametrize("r", [four, mamba3_mimo_of(2)], ids=lambda r: r.name)
def test_one_tensor_as_two_inputs(r):
    """Keys that are also queries, values that also weigh outputs; 18 keys, 19 tokens of one sequence."""
    given = sample(r, 1, 19, N=18)
    leaves = {k: x.requires_grad_() for k, x in given.items() if k not in ("c", "g")}
    twins = {"c": leaves["b"], "g": leaves["x"]}
    found, expected = (
        torch.autograd.grad(
            r(**{k: cast(x) for k, x in (leaves | twins).items()}, **how).square().sum(), leaves.values()
        )
        for cast, how in ((lambda x: x, {"backend": "triton"}), (torch.Tensor.double, {"form": "naive"}))
    )
    compare(dict(zip(leaves, found, strict=True)), dict(zip(leaves, expected, strict=True)), 4e-6)
