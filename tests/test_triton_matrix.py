"""The matrix skeletons in Triton's interpreter, tiny and in float32, against the float64 oracle, both directions."""

import math
from dataclasses import replace

import mixer_inputs
import pytest
import torch
from interpreted import interpreted
from matrix_family import (
    UNSEEN,
    apart_delta,
    driven_ratio,
    erasing_ratio,
    fading_delta,
    fading_rows,
    forgetful_delta,
    gated,
    late_gate,
    late_ratio,
    leaning_rows,
    moving_rows,
    plain_rows,
    skipping_rows,
    sure_rows,
    swinging,
    turning,
)
from mixer_inputs import sample

import dsf
from dsf import I, Key, Scalar, System, Value, outer, sigmoid, tanh
from dsf.kernels.triton import operators
from dsf.kernels.triton.chunk import matrix as matrix_kernels
from dsf.kernels.triton.chunk.precision import Precision
from dsf.mixers import get

pytestmark = interpreted

NAMES = ["unnormalized_linear_attention", "linear_attention", "retnet", "ssd", "mlstm", "deltanet", "gated_deltanet"]
NAMES += ["delta_product", "gated_delta_product", "normalized_attention_exp", "gla", "rwkv6", "kda", "rwkv7"]
ALL = [*UNSEEN, plain_rows, *(get(name).recurrence for name in NAMES)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Chunks of 16 rows, so that a few dozen tokens cross several."""
    table, small = matrix_kernels.tiles, {"chunk": 16, "piece": 16, "gradient_piece": 16, "gradient_keys": 16}
    monkeypatch.setattr(matrix_kernels, "tiles", lambda *key: replace(table(*key), **small))


def outcome(recurrence, given, state, dtype, **how):
    """y, final state and the gradients of a fixed functional of both."""
    leaves = {n: x.to(dtype).requires_grad_() for n, x in given.items()}
    start = None if state is None else state.to(dtype).requires_grad_()
    y, final = recurrence(**leaves, initial_state=start, return_state=True, **how)
    true = recurrence.true_state(final, y.shape[-1])
    columns = true.shape[-1] - recurrence.spec.is_stabilised
    g = torch.Generator().manual_seed(1)
    loss = (y * torch.randn(y.shape, generator=g, dtype=torch.float64)).sum()
    if not recurrence.spec.is_stabilised:  # its state is relative to the running maximum: the law is on outputs
        loss = loss + (true[..., :columns] * torch.randn(true.shape, generator=g, dtype=torch.float64)).sum()
    wanted = [*leaves.values()] + ([] if start is None else [start])
    return [y, true, *torch.autograd.grad(loss, wanted)]


def assert_same(found, expected, tolerance=2e-5):
    for a, b in zip(found, expected, strict=True):
        scale = b.abs().max().clamp(min=1e-3)
        assert ((a.double() - b).abs().max() / scale).item() < tolerance


@pytest.mark.parametrize("recurrence", ALL, ids=lambda r: r.name)
def test_kernels_equal_the_oracle_forward_and_backward(recurrence):
    given = sample(recurrence, tokens=37)
    found = outcome(recurrence, given, None, torch.float32, backend="triton")
    assert_same(found, outcome(recurrence, given, None, torch.float64, form="naive"))


@pytest.mark.parametrize(
    "recurrence",
    [get("rwkv7").recurrence, sure_rows, leaning_rows, moving_rows, fading_delta, get("ssd").recurrence],
    ids=lambda r: r.name,
)
def test_a_gradient_asked_for_alone_is_the_same(recurrence):
    given = {name: x.float() for name, x in sample(recurrence, tokens=21).items()}
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    together = torch.autograd.grad(recurrence(**leaves, backend="triton").square().sum(), list(leaves.values()))
    for name, expected in zip(given, together, strict=True):
        x = given[name].clone().requires_grad_()
        y = recurrence(**{**given, name: x}, backend="triton")
        (alone,) = torch.autograd.grad(y.square().sum(), [x])
        assert torch.equal(alone, expected), name


@pytest.mark.parametrize("name", ["gla", "rwkv7"])
def test_what_is_kept_may_come_back_contiguous(name):
    """As from save_on_cpu(pin_memory=True), whose copies have strides of their own."""
    recurrence = get(name).recurrence
    given = {name: x.float().requires_grad_() for name, x in sample(recurrence, tokens=21).items()}

    def gradients():
        return torch.autograd.grad(recurrence(**given, backend="triton").square().sum(), list(given.values()))

    expected = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().contiguous().clone(), lambda x: x):
        found = gradients()
    for name, a, b in zip(given, found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("tokens", [48, 37])  # whole chunks, and a last one in part
@pytest.mark.parametrize("name, states", [("deltanet", "two"), ("gated_deltanet", "plain")])
def test_operands_in_two_terms_are_added_up(name, states, tokens, monkeypatch):
    assert_split(get(name).recurrence, tokens, Precision("two", states, "two"), monkeypatch)


@dsf.recurrence
def turning_delta(q: Key, k: Key, v: Value, a: Scalar, b: Scalar) -> System:
    """A delta rule whose decays have any sign, and whose values no scale."""
    return System(A=tanh(a) * (I - sigmoid(b) * outer(k, k)), B=k * v, C=q)


@dsf.recurrence
def late_delta(q: Key, k: Key, v: Value, a: Scalar, b: Scalar) -> System:
    """A delta rule read before the update, with a gain of the readout."""
    return System(A=sigmoid(a) * (I - sigmoid(b) * outer(k, k)), B=k * v, C=q * sigmoid(b), read="before")


@pytest.mark.parametrize("cut, count", [(1, 1), (3, 3), (1, 3)])
@pytest.mark.parametrize("tokens", [48, 37])
@pytest.mark.parametrize("recurrence", [forgetful_delta, erasing_ratio, turning_delta], ids=lambda r: r.name)
def test_what_errs_most_in_two_terms_is_added_up(recurrence, tokens, cut, count, monkeypatch):
    monkeypatch.setattr(matrix_kernels, "segments", lambda *_: cut)
    monkeypatch.setattr(matrix_kernels, "stretches", lambda *_: count)
    assert_split(recurrence, tokens, Precision(pairs="two"), monkeypatch)


def assert_split(recurrence, tokens, precision, monkeypatch):
    """What operands in several terms make is exact, but for the product of second terms, which is left out."""
    table = matrix_kernels.tiles
    row = {"gradient_roles": 2, "precision": precision}
    monkeypatch.setattr(matrix_kernels, "tiles", lambda *key: replace(table(*key), **row))
    given = sample(recurrence, tokens=tokens)
    found = outcome(recurrence, given, None, torch.float32, backend="triton")
    assert_same(found, outcome(recurrence, given, None, torch.float64, form="naive"), 2e-4)


@pytest.mark.parametrize("recurrence", [gated, late_gate], ids=lambda r: r.name)
def test_a_call_without_gradients_keeps_nothing_and_reads_the_same(recurrence):
    given = {name: x.float() for name, x in sample(recurrence, tokens=37).items()}
    y = recurrence(**given, backend="triton")
    taught = recurrence(**{name: x.requires_grad_() for name, x in given.items()}, backend="triton")
    assert_same([y], [taught.detach().double()], 1e-6)


@pytest.mark.parametrize("recurrence", [fading_rows, fading_delta, leaning_rows], ids=lambda r: r.name)
@pytest.mark.parametrize("strength", [-0.05, 0.01, 1.0, 30.0])  # states grow, hardly decay, decay, forget
def test_decays_of_several_blocks_of_keys(recurrence, strength, monkeypatch):
    monkeypatch.setitem(mixer_inputs.SIZE, "key", 20)
    given = sample(recurrence, tokens=35)
    given["g"] *= strength
    found = outcome(recurrence, given, None, torch.float32, backend="triton")
    assert_same(found, outcome(recurrence, given, None, torch.float64, form="naive"))


@pytest.mark.parametrize("recurrence", [fading_rows, fading_delta, apart_delta], ids=lambda r: r.name)
@pytest.mark.parametrize("most", [-90.0, -140.0, -180.0])  # log2 of the decays of a chunk of 16 rows
def test_decays_near_what_one_product_takes(recurrence, most):
    """Rows of a chunk meet in one product down to 2^-160, else in several; of some the decays stay near one."""
    given = sample(recurrence, tokens=21)
    given["g"] = most / 12 * math.log(2) * (0.9 + 0.1 * given["g"].sigmoid())
    given["g"][:, [0, 7, 8, 15, 16, 20]] *= 1e-3
    found = outcome(recurrence, given, None, torch.float32, backend="triton")
    assert_same(found, outcome(recurrence, given, None, torch.float64, form="naive"))


@pytest.mark.parametrize("recurrence", [fading_rows, apart_delta], ids=lambda r: r.name)
@pytest.mark.parametrize("most", [60.0, 75.0])
def test_growth_near_what_one_product_takes(recurrence, most):
    """Up to 2^64 in a chunk."""
    given = sample(recurrence, tokens=21)
    given["g"] = most / 16 * math.log(2) * (0.9 + 0.1 * given["g"].sigmoid())
    found = outcome(recurrence, given, None, torch.float32, backend="triton")
    assert_same(found, outcome(recurrence, given, None, torch.float64, form="naive"))


@pytest.mark.parametrize("recurrence", [fading_rows, fading_delta], ids=lambda r: r.name)
def test_keys_that_fill_some_of_their_blocks(recurrence, monkeypatch):
    monkeypatch.setitem(mixer_inputs.SIZE, "key", 48)
    given = sample(recurrence, tokens=18)
    found = outcome(recurrence, given, None, torch.float32, backend="triton")
    assert_same(found, outcome(recurrence, given, None, torch.float64, form="naive"))


@pytest.mark.parametrize("recurrence", [fading_rows, fading_delta], ids=lambda r: r.name)
@pytest.mark.parametrize("strength", [1.0, 30.0])
def test_stronger_decays_in_the_future_change_no_bit_of_the_past(recurrence, strength):
    given = {n: x.float() for n, x in sample(recurrence, tokens=32).items()}
    given["g"][:, 9:] *= strength
    y = recurrence(**given, backend="triton")
    given["g"] = given["g"].clone()
    given["g"][:, 24:] *= 50
    assert torch.equal(recurrence(**given, backend="triton")[:, :24], y[:, :24])


@pytest.mark.parametrize(
    "recurrence",
    [
        forgetful_delta,
        late_ratio,
        driven_ratio,
        erasing_ratio,
        fading_delta,
        leaning_rows,
        late_gate,
        get("ssd").recurrence,
    ],
    ids=lambda r: r.name,
)
@pytest.mark.parametrize("tokens", [1, 15, 17])
def test_initial_states_and_any_length(recurrence, tokens):
    given = sample(recurrence, tokens=tokens)
    state = torch.randn(2, 2, *recurrence.state_shape(N=3, P=4), dtype=torch.float64)
    found = outcome(recurrence, given, state, torch.float32, backend="triton")
    assert_same(found, outcome(recurrence, given, state, torch.float64, form="naive"))


@pytest.mark.parametrize("name", ["mlstm", "ssd", "gated_delta_product", "normalized_attention_exp", "rwkv7"])
def test_played_calls_equal_the_first_of_their_kind(name):
    recurrence = get(name).recurrence
    state = torch.randn(2, 2, *recurrence.state_shape(N=3, P=4), dtype=torch.float64)

    def found(seed):
        given = sample(recurrence, tokens=5, seed=seed)
        return outcome(recurrence, given, state, torch.float32, backend="triton")

    played = [found(seed) for seed in range(3)][-1]
    operators.forget()
    assert all(torch.equal(a, b) for a, b in zip(played, found(2), strict=True))


@pytest.mark.parametrize("name", ["gated_deltanet", "retnet", "mlstm", "delta_product", "rwkv7"])
def test_packed_sequences_are_separate_sequences(name):
    recurrence = get(name).recurrence
    given = sample(recurrence, batch=1, tokens=40)
    bounds = torch.tensor([0, 3, 21, 40])
    found = outcome(recurrence, given, None, torch.float32, backend="triton", cu_seqlens=bounds)
    assert_same(found, outcome(recurrence, given, None, torch.float64, form="naive", cu_seqlens=bounds))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["gated_deltanet", "ssd", "rwkv7", "linear_attention"])
def test_grouped_heads_and_strided_inputs(name, count, monkeypatch):
    monkeypatch.setattr(matrix_kernels, "stretches", lambda *_: count)
    recurrence = get(name).recurrence
    given = sample(recurrence, tokens=20 * count, heads=4)
    for entry in recurrence.spec.inputs:
        if entry.kind.time and entry.kind.axes == {"key"}:
            given[entry.name] = given[entry.name][:, :, :2]
    found = outcome(recurrence, given, None, torch.float32, backend="triton")
    assert_same(found, outcome(recurrence, given, None, torch.float64, form="naive"))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "recurrence",
    [get("ssd").recurrence, turning, get("unnormalized_linear_attention").recurrence],
    ids=lambda r: r.name,
)
def test_heads_that_share_keys_in_one_program(recurrence, count, monkeypatch):
    monkeypatch.setattr(matrix_kernels, "sharing", lambda *_: 2)
    monkeypatch.setattr(matrix_kernels, "stretches", lambda *_: count)
    given = sample(recurrence, tokens=20 * count, heads=4)
    for entry in recurrence.spec.inputs:
        if entry.kind.time and entry.kind.axes == {"key"}:
            given[entry.name] = given[entry.name][:, :, :2]
    found = outcome(recurrence, given, None, torch.float32, backend="triton")
    assert_same(found, outcome(recurrence, given, None, torch.float64, form="naive"))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "recurrence",
    [swinging, forgetful_delta, driven_ratio, fading_rows, fading_delta, get("deltanet").recurrence],
    ids=lambda r: r.name,
)
def test_segments_of_time_are_joined(recurrence, count, monkeypatch):
    monkeypatch.setattr(matrix_kernels, "segments", lambda *_: count)
    given = sample(recurrence, tokens=70)
    state = torch.randn(2, 2, *recurrence.state_shape(N=3, P=4), dtype=torch.float64)
    found = outcome(recurrence, given, state, torch.float32, backend="triton")
    assert_same(found, outcome(recurrence, given, state, torch.float64, form="naive"))


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize(
    "recurrence",
    [swinging, driven_ratio, forgetful_delta, late_delta, fading_delta, get("deltanet").recurrence],
    ids=lambda r: r.name,
)
def test_stretches_of_time_share_memory(recurrence, count, monkeypatch):
    monkeypatch.setattr(matrix_kernels, "stretches", lambda *_: count)
    given = sample(recurrence, tokens=70)
    state = torch.randn(2, 2, *recurrence.state_shape(N=3, P=4), dtype=torch.float64)
    found = outcome(recurrence, given, state, torch.float32, backend="triton")
    assert_same(found, outcome(recurrence, given, state, torch.float64, form="naive"))


@pytest.mark.parametrize("name", ["gated_deltanet", "ssd"])
def test_stretches_of_time_change_no_bit_and_begin_with_no_state(name, monkeypatch):
    recurrence = get(name).recurrence
    given = sample(recurrence, tokens=70)
    whole = outcome(recurrence, given, None, torch.float32, backend="triton")
    monkeypatch.setattr(matrix_kernels, "stretches", lambda *_: 3)
    operators.forget()
    found = outcome(recurrence, given, None, torch.float32, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(found[:2], whole[:2], strict=True))
    assert_same(found, [x.double() for x in whole])


@pytest.mark.parametrize("count, cut, pieces, processors", [(3, 1, 1, 132), (1, 2, 2, 132), (3, 2, 1, 1), (3, 2, 2, 1)])
@pytest.mark.parametrize(
    "recurrence",
    [swinging, driven_ratio, forgetful_delta, get("ssd").recurrence, get("mlstm").recurrence],
    ids=lambda r: r.name,
)
def test_the_backward_pass_walks_from_kept_states(recurrence, count, cut, pieces, processors, monkeypatch):
    monkeypatch.setattr(matrix_kernels, "finer", lambda *_: pieces)
    monkeypatch.setattr(matrix_kernels, "stretches", lambda *_: count)
    monkeypatch.setattr(matrix_kernels, "segments", lambda *_: cut)
    monkeypatch.setattr(matrix_kernels, "limits", lambda *_: (232_448, processors))
    given = sample(recurrence, tokens=100)
    state = torch.randn(2, 2, *recurrence.state_shape(N=3, P=4), dtype=torch.float64)
    found = outcome(recurrence, given, state, torch.float32, backend="triton")
    assert_same(found, outcome(recurrence, given, state, torch.float64, form="naive"))


@pytest.mark.parametrize("cut, pieces", [(2, 1), (2, 2), (1, 1)])
def test_segments_leave_out_what_float32_forgets(cut, pieces, monkeypatch):
    monkeypatch.setattr(matrix_kernels, "segments", lambda *_: cut)
    monkeypatch.setattr(matrix_kernels, "finer", lambda *_: pieces)
    recurrence = get("retnet").recurrence
    given = sample(recurrence, tokens=200)
    given["slope"] = torch.tensor([2.5, 1e-3], dtype=torch.float64)  # two chunks of the first head leave nothing
    state = torch.randn(2, 2, *recurrence.state_shape(N=3, P=4), dtype=torch.float64)
    found = outcome(recurrence, given, state, torch.float32, backend="triton")
    assert_same(found, outcome(recurrence, given, state, torch.float64, form="naive"))


@pytest.mark.parametrize("recurrence", [leaning_rows, get("rwkv7").recurrence], ids=lambda r: r.name)
def test_the_future_changes_no_bit_of_the_past(recurrence):
    given = {n: x.float() for n, x in sample(recurrence, tokens=30).items()}
    y = recurrence(**given, backend="triton")
    for entry in recurrence.spec.inputs:
        if entry.kind.time:
            given[entry.name][:, 21:] = given[entry.name][:, 21:].flip(1)
    assert torch.equal(recurrence(**given, backend="triton")[:, :21], y[:, :21])


def test_the_future_of_segments_changes_no_bit_of_the_past(monkeypatch):
    monkeypatch.setattr(matrix_kernels, "segments", lambda *_: 3)
    given = {n: x.float() for n, x in sample(forgetful_delta, tokens=70).items()}
    y = forgetful_delta(**given, backend="triton")
    for x in given.values():
        x[:, 45:] *= -1
    assert torch.equal(forgetful_delta(**given, backend="triton")[:, :45], y[:, :45])


def test_a_decay_of_zero_forgets_and_keeps_its_gradient():
    @dsf.recurrence
    def resettable(q: Key, k: Key, v: Value, a: Scalar) -> System:
        return System(A=a, B=k * v, C=q)

    given = sample(resettable, tokens=20)
    given["a"][:, 7] = 0.0
    found = outcome(resettable, given, None, torch.float32, backend="triton")
    assert_same(found, outcome(resettable, given, None, torch.float64, form="naive"))


@dsf.recurrence
def erasing_twice_by_channel(q: Key, k: Key, v: Value, b: Value) -> System:
    return System(A=(I - b * outer(k, k)) @ (I - outer(q, q)), B=k * v, C=q)


@pytest.mark.parametrize(
    "recurrence", [erasing_twice_by_channel, get("softmax_attention").recurrence], ids=lambda r: r.name
)
def test_other_structures_are_refused_by_name(recurrence):
    given = {n: x.float() for n, x in sample(recurrence, tokens=20).items()}
    with pytest.raises(dsf.FormError, match="backend='triton' was asked for, but"):
        recurrence(**given, backend="triton")


def test_the_plan_names_the_kernel():
    given = {n: x.float() for n, x in sample(swinging, tokens=20).items()}
    plan = swinging.plan(**given, backend="triton")
    assert plan.backend == "triton" and plan.form == "chunk" and "chunk walk" in plan.kernel
    assert swinging.plan(**given).backend == "torch"


def test_bare_inputs_are_passed_on_and_gates_are_printed():
    from dsf.kernels.triton.pointwise.programs import PROGRAMS
    from dsf.triton.chunk import program_of

    plain = PROGRAMS[program_of(get("unnormalized_linear_attention").recurrence.spec)[1]]
    assert not plain.made and not plain.accesses and set(plain.direct) == {"q", "k", "v"}
    source, name = program_of(get("gla").recurrence.spec)
    assert [m.name for m in PROGRAMS[name].made] == ["decay"] and "fn.logsigmoid(g)" in source.text


@pytest.mark.parametrize(
    ("recurrence", "there", "before"),
    [
        (get("rwkv7").recurrence, {"made_left", "made_decay", "made_own"}, []),
        (skipping_rows, {"made_left", "made_decay"}, ["own"]),
        (plain_rows, set(), []),
        (leaning_rows, set(), ["query", "key", "left"]),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_what_chunk_kernels_can_make_of_rows_is_made_there(recurrence, there, before):
    from dsf.kernels.triton.pointwise.programs import PROGRAMS
    from dsf.triton.chunk import program_of

    program = PROGRAMS[program_of(recurrence.spec)[1]]
    assert {x for x in program.accesses if x.startswith("made_")} == there
    assert [m.name for m in program.made] == before


@pytest.mark.parametrize("tokens", [1, 21])
@pytest.mark.parametrize("recurrence", [get("rwkv7").recurrence, skipping_rows], ids=lambda r: r.name)
def test_rows_are_made_of_inputs_of_any_strides_and_heads_in_several_blocks_of_keys(recurrence, tokens):
    torch.manual_seed(0)
    heads, given = {"a": 1, "w": 2, "g": 2, "r": 2}, {}
    for entry in recurrence.spec.inputs:
        lead = [2, tokens, heads.get(entry.name, 4)] if entry.kind.time else [4]
        x = torch.randn(*lead, *({"key": 40, "value": 4}[axis] for axis in entry.kind.axes), dtype=torch.float64)
        x = x / 40**0.5 if entry.kind.axes == {"key"} else x
        given[entry.name] = x.movedim(-1, 0).contiguous().movedim(0, -1)  # neighbouring keys lie apart
    state = torch.randn(2, 4, 40, 4, dtype=torch.float64)
    found = outcome(recurrence, given, state, torch.float32, backend="triton")
    assert_same(found, outcome(recurrence, given, state, torch.float64, form="naive"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [20, 32])
@pytest.mark.parametrize("recurrence", [get("rwkv7").recurrence, skipping_rows], ids=lambda r: r.name)
def test_rows_are_read_alike_with_and_without_gradients(recurrence, tokens, dtype):
    given = {n: x.to(dtype) for n, x in sample(recurrence, tokens=tokens).items()}
    kept = recurrence(**{n: x.clone().requires_grad_() for n, x in given.items()}, backend="triton")
    assert torch.equal(recurrence(**given, backend="triton"), kept)


def test_the_plan_shows_the_printed_source():
    given = {n: x.float() for n, x in sample(get("mlstm").recurrence, tokens=20).items()}
    source = get("mlstm").recurrence.plan(**given, backend="triton").source
    assert all(f"def {name}(" in source for name in ("levels", "prologue", "finish", "readout_adjoint", "adjoint"))


CHECKED = [get(name).recurrence for name in ("mlstm", "delta_product", "ssd", "rwkv6", "rwkv7")]


@pytest.mark.parametrize("recurrence", [*CHECKED, gated, late_gate], ids=lambda r: r.name)
def test_operator_passes_opcheck(recurrence):
    from dsf.kernels.triton.chunk.operator import matrix_mixer, matrix_mixer_backward
    from dsf.kernels.triton.pointwise.programs import PROGRAMS
    from dsf.triton.chunk import program_of

    given = {n: x.float().requires_grad_() for n, x in sample(recurrence, batch=1, tokens=5, heads=1).items()}
    state = torch.zeros(1, 1, *recurrence.state_shape(N=3, P=4), requires_grad=True)
    program = program_of(recurrence.spec)[1]
    operands = [given[i.name] for i in recurrence.spec.inputs]
    torch.library.opcheck(matrix_mixer, (operands, state, program, True))
    plain, start = [x.detach() for x in operands], state.detach()
    y, final, saved = matrix_mixer(plain, start, program, True)
    saved = [*saved, y] if PROGRAMS[program].quotient else saved  # autograd keeps y beside what the operator saves
    given = torch.randn_like(y), torch.randn_like(final), plain, start, saved, program, [True] * len(plain)
    torch.library.opcheck(matrix_mixer_backward, given, test_utils=("test_schema", "test_faketensor"))


def test_the_operator_of_the_chunk_kernels_alone_has_the_gradients_of_the_schema():
    """The one that tests on GPUs compile and capture (chunk_operator.py)."""
    from chunk_operator import chunk_matrix

    q, k, v, state = (torch.randn(s, requires_grad=True) for s in [(1, 9, 1, 16)] * 3 + [(1, 1, 16, 16)])
    y, final, _ = chunk_matrix(q, k, v, None, None, None, None, state, 1, True, True, False)
    exact = get("unnormalized_linear_attention").recurrence
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, state)]
    expected = exact(*wide[:3], initial_state=wide[3], return_state=True, form="naive")
    up = torch.randn_like(y), torch.randn_like(final)
    found = torch.autograd.grad((y, final), (q, k, v, state), up)
    right = torch.autograd.grad(expected, wide, [x.double() for x in up])
    for a, b in zip((y, final, *found), (*expected, *right), strict=True):
        assert float((a - b).detach().abs().max() / b.detach().abs().max()) < 1e-5


@pytest.mark.parametrize(
    "name, dtype", [("gated_deltanet", torch.float32), ("ssd", torch.float32), ("mlstm", torch.bfloat16)]
)
def test_the_shapes_of_what_stretches_keep_are_known(name, dtype, monkeypatch):
    from dsf.kernels.triton.chunk.operator import matrix_mixer
    from dsf.kernels.triton.operators import schedule_of
    from dsf.triton.chunk import program_of

    monkeypatch.setattr(matrix_kernels, "stretches", lambda *_: 3)
    recurrence = get(name).recurrence
    given = {n: x.to(dtype) for n, x in sample(recurrence, tokens=70).items()}
    operands = [given[i.name] for i in recurrence.spec.inputs]
    program = program_of(recurrence.spec)[1]
    real = matrix_mixer(operands, None, program, True)[2]
    told = schedule_of(matrix_mixer, operands, None, program, True).result[2]
    assert [(tuple(x.shape), x.stride(), x.dtype) for x in real] == [(x.shape, x.stride, x.dtype) for x in told]
