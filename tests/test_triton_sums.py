"""Sums of corrections in one step on the chunk kernels, in Triton's interpreter, against the float64 oracle."""

from dataclasses import replace

import mixer_inputs
import pytest
import torch
from interpreted import interpreted
from matrix_family import (
    SUMMED,
    apart_delta,
    apart_in_steps,
    decayed_apart,
    early_delta,
    early_in_steps,
    moved_in_steps,
    thrice_erased,
    twice_erased,
    twice_moved,
)
from mixer_inputs import sample
from test_triton_rounding import TIMES, ratios

import dsf
from dsf import I, Key, Scalar, System, Value, diag, exp, outer, sigmoid
from dsf.fuzz import Case, attempt
from dsf.kernels.triton.chunk import matrix as matrix_kernels
from dsf.kernels.triton.chunk import tiles
from dsf.mixers import ZOO, get
from dsf.parallel import Simulated, fused
from dsf.triton.operands import TINY, Unfit, operands_of

pytestmark = interpreted
CHUNK = 16
ROWS = {  # of a token; of a group; whether corrections are delta rules
    twice_erased: (2, 2, True), thrice_erased: (4, 4, True), decayed_apart: (2, 2, True), twice_moved: (4, 4, False),
    moved_in_steps: (4, 2, False), early_in_steps: (4, 2, True), apart_in_steps: (4, 2, True),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Chunks of 16 rows, so that a few tokens of several rows cross several."""
    table = matrix_kernels.tiles
    small = {"chunk": CHUNK, "piece": 16, "gradient_piece": 16, "gradient_keys": 16}

    def tiles_of(*key):  # those of bfloat16 keep their pieces, which slices of states in float16 are made for
        return table(*key) if torch.bfloat16 in key else replace(table(*key), **small)

    monkeypatch.setattr(matrix_kernels, "tiles", tiles_of)


def outcome(recurrence, given, state, dtype, **how):
    """y, the final state, and the gradients of a fixed functional of both in inputs and the first state, by name."""
    leaves = {n: x.to(dtype).requires_grad_() for n, x in given.items()}
    start = {} if state is None else {"state": state.to(dtype).requires_grad_()}
    y, final = recurrence(**leaves, initial_state=start.get("state"), return_state=True, **how)
    g = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=g, dtype=torch.float64)).sum() for x in (y, final))
    wanted = leaves | start
    return {"y": y, "final": final} | dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))


def assert_same(found, expected, tolerance=2e-5, block=4):
    """By head and block of tokens; a block of little counts as if it had a tenth of the largest."""
    for name, b in expected.items():
        error, size = (found[name].double() - b).detach(), b.detach()
        if name not in ("final", "state") and b.dim() > 2 and b.shape[1] > block:  # [B, T, ..., H, ·]
            error, size = (blocks(x, block, b.dim() > 3) for x in (error, size))
        else:
            error, size = (x.flatten(2).norm(dim=-1) for x in (error, size))
        assert (error / size.clamp(min=0.1 * float(size.max()) + 1e-3)).max() < tolerance, name


def blocks(x, block, wide):
    """Norms by batch row, block of tokens and head."""
    tokens = x.shape[1] // block * block
    x = x[:, :tokens].unflatten(1, (-1, block))
    return (x.norm(dim=(2, x.dim() - 1)) if wide else x.norm(dim=2)).flatten(2)


def state_of(recurrence, rows=2):
    return torch.randn(rows, 2, *recurrence.state_shape(N=3, P=4), dtype=torch.float64)


@pytest.mark.parametrize("tokens", [1, 21])
@pytest.mark.parametrize("recurrence", SUMMED, ids=lambda r: r.name)
def test_sums_of_corrections_equal_the_oracle(recurrence, tokens):
    given = sample(recurrence, tokens=tokens)
    state = state_of(recurrence)
    found = outcome(recurrence, given, state, torch.float32, backend="triton")
    assert_same(found, outcome(recurrence, given, state, torch.float64, form="naive"))


@pytest.mark.parametrize("recurrence", SUMMED, ids=lambda r: r.name)
def test_a_step_is_so_many_rows_of_a_family_of_kernels(recurrence):
    ops = operands_of(recurrence.spec)
    rows, group, erases = ROWS[recurrence]
    assert (ops.rows, ops.group, ops.erases is not None, ops.lefts is not None) == (rows, group, erases, not erases)
    given = {n: x.float() for n, x in sample(recurrence, tokens=20).items()}
    plan = recurrence.plan(**given, backend="triton")
    assert "chunk walk of sums of corrections" in plan.kernel and plan.chunk * rows == 32


def test_other_declarations_are_in_groups_of_one():
    for entry in ZOO:
        if entry.recurrence is None:
            continue
        try:
            assert operands_of(get(entry.name).recurrence.spec).group == 1
        except Unfit:
            continue


@dsf.recurrence
def read_along_one(q: Key, k: Key, l: Key, w: Key, v: Value, a: Scalar, b: Scalar) -> System:
    """Corrections that read along one vector are one: a product that is multiplied out among them."""
    product = (I - sigmoid(b) * outer(k, k)) @ (I - 0.5 * outer(w, w))
    return System(A=sigmoid(a) * product + outer(l, w) - b * outer(l, k), B=k * v, C=q)


def test_corrections_that_read_along_one_vector_share_a_row():
    assert read_along_one.spec.rank == 5 and operands_of(read_along_one.spec).group == 2
    given = sample(read_along_one, tokens=9)
    found = outcome(read_along_one, given, None, torch.float32, backend="triton")
    assert_same(found, outcome(read_along_one, given, None, torch.float64, form="naive"))


@dsf.recurrence
def erased_again(q: Key, k: Key, v: Value, b: Scalar, c: Scalar) -> System:
    """One key twice: a delta rule."""
    return System(A=I - sigmoid(b) * outer(k, k) - c * outer(k, k), B=k * v, C=q)


def test_a_key_that_is_erased_twice_is_erased_once():
    ops = operands_of(erased_again.spec)
    assert (erased_again.spec.rank, ops.group, ops.lefts) == (2, 1, None)
    given = sample(erased_again, tokens=5)
    found = outcome(erased_again, given, None, torch.float32, backend="triton")
    assert_same(found, outcome(erased_again, given, None, torch.float64, form="naive"))


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize(
    "recurrence", [thrice_erased, twice_moved, early_in_steps, apart_in_steps], ids=lambda r: r.name
)
def test_packed_sequences_are_separate_sequences(recurrence, stateful):
    """Of no token, of one, and of as many as a chunk has rows for, less one and more one."""
    bounds = torch.tensor([0, 0, 1, 4, 4, 9, 12, 13, 13])
    given = sample(recurrence, batch=1, tokens=13)
    state = state_of(recurrence, len(bounds) - 1) if stateful else None
    found = outcome(recurrence, given, state, torch.float32, backend="triton", cu_seqlens=bounds)
    assert_same(found, outcome(recurrence, given, state, torch.float64, form="naive", cu_seqlens=bounds))


@pytest.mark.parametrize("strength", [-0.05, 0.01, 3.0, 30.0])  # states grow, hardly decay, decay, forget
@pytest.mark.parametrize("recurrence", [thrice_erased, twice_moved], ids=lambda r: r.name)
def test_decays_of_any_strength(recurrence, strength):
    given = sample(recurrence, tokens=13)
    given["g"] *= strength
    found = outcome(recurrence, given, None, torch.float32, backend="triton")
    expected = outcome(recurrence, given, None, torch.float64, form="naive")
    of_decays = expected.pop("g")  # differences of sums: of what is all but forgotten, only their rounding is left
    assert (found["g"].double() - of_decays).abs().max() < 2e-5 * of_decays.abs().max()
    assert_same(found, expected)


@pytest.mark.parametrize("most", [7.0, 20.0])  # eight of them, one a token of a chunk: e^-56 and e^-160
def test_decays_that_are_bounded(most):
    """Rows of a chunk meet at once where the decays of all its tokens together stay in float32's range."""

    @dsf.recurrence
    def bounded(q: Key, k: Key, u: Key, w: Key, v: Value, g: Key) -> System:
        return System(A=diag(exp(-most * sigmoid(g))) - 0.5 * outer(k, k) + 0.5 * outer(u, w), B=k * v, C=q)

    given, state = sample(bounded, tokens=19), state_of(bounded)
    given["g"][:, :9] += 9.0
    found = outcome(bounded, given, state, torch.float32, backend="triton")
    assert_same(found, outcome(bounded, given, state, torch.float64, form="naive"))


@pytest.mark.parametrize("recurrence", [twice_erased, twice_moved], ids=lambda r: r.name)
def test_the_future_changes_no_bit_of_the_past(recurrence):
    given = {n: x.float() for n, x in sample(recurrence, tokens=18).items()}
    y = recurrence(**given, backend="triton")
    later = {n: torch.cat([x[:, :11], 3 * x[:, 11:].flip(1)], dim=1) for n, x in given.items()}
    changed = recurrence(**later, backend="triton")
    assert torch.equal(changed[:, :11], y[:, :11]) and not torch.equal(changed[:, 11:], y[:, 11:])


@pytest.mark.parametrize("cut, count", [(3, 1), (1, 3)])
@pytest.mark.parametrize("recurrence", [twice_erased, early_in_steps], ids=lambda r: r.name)
def test_segments_and_stretches_of_time_hold_whole_tokens(recurrence, cut, count, monkeypatch):
    monkeypatch.setattr(matrix_kernels, "segments", lambda *_: cut)
    monkeypatch.setattr(matrix_kernels, "stretches", lambda *_: count)
    given, state = sample(recurrence, tokens=39), state_of(recurrence)
    found = outcome(recurrence, given, state, torch.float32, backend="triton")
    assert_same(found, outcome(recurrence, given, state, torch.float64, form="naive"))


@pytest.mark.parametrize(
    "recurrence", [twice_erased, decayed_apart, twice_moved, early_in_steps, apart_in_steps], ids=lambda r: r.name
)
def test_ranks_equal_the_whole(recurrence, counting):
    counted, sizes = counting(fused, "run"), (9, 1, 8)
    given = sample(recurrence, batch=1, tokens=sum(sizes))
    state = state_of(recurrence, 1)
    world = Simulated(3, sizes=sizes, exchange="gather")
    found = outcome(recurrence, given, state, torch.float32, backend="triton", parallel=world)
    assert counted[0] == 1
    assert_same(found, outcome(recurrence, given, state, torch.float64, form="naive"))


def test_bfloat16_errs_about_as_one_rounding(monkeypatch):
    for axis in ("key", "value"):
        monkeypatch.setitem(mixer_inputs.SIZE, axis, 64)
    monkeypatch.setitem(mixer_inputs.RANGES, "l", mixer_inputs.RANGES["k"])
    monkeypatch.setitem(mixer_inputs.RANGES, "a", lambda x: x + 3.0)
    given = {name: x.bfloat16() for name, x in sample(twice_erased, batch=1, tokens=128).items()}
    times = ratios(twice_erased, given)
    assert max(times.values()) < TIMES, times


CASES = {
    "one tensor as two inputs, third calls": Case(tokens=11, batch=2, heads=2, n=5, p=4, dtype="float32", calls=3,
                                                  initial=True, alias=("k", "q"), alias_calls=(1, 3)),
    "bfloat16, strides": Case(tokens=19, heads=3, n=20, p=24, dtype="bfloat16", initial=True,
                              layouts={"dy": "expanded-tokens", "k": "late", "v": "transposed"}),
    "float16, shared heads, reversed": Case(tokens=9, heads=2, n=16, p=16, dtype="float16", reverse=True,
                                            groups={"k": 1, "r": 1, "v": 1}, lengths=(5, 0, 4)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("recurrence", [twice_erased, twice_moved, early_delta, apart_delta], ids=lambda r: r.name)
def test_calls_of_every_kind(recurrence, case):
    verdict = attempt(recurrence, case)
    assert verdict.status == "right", str(verdict)


@dsf.recurrence
def on_values(q: Key, k: Key, v: Value, x: Value, a: Scalar, b: Scalar) -> System:
    """Two corrections on the Value axis, by the kernels of the transposed state."""
    return System(A=sigmoid(a) * (I - sigmoid(b) * outer(v, v)) - 0.5 * outer(x, x), B=k * (sigmoid(b) * v), C=q)


def test_sums_of_corrections_on_the_value_axis():
    given = sample(on_values, tokens=9)
    found = outcome(on_values, given, None, torch.float32, backend="triton")
    assert_same(found, outcome(on_values, given, None, torch.float64, form="naive"))


@dsf.recurrence
def erased_before(q: Key, k: Key, v: Value, g: Scalar, b: Scalar) -> System:
    """What a key reads before the decay is erased."""
    return System(A=exp(g) * I - sigmoid(b) * outer(k, k), B=k * (b * v), C=q)


@pytest.mark.parametrize("strength", [-0.05, 0.01, 3.0, 30.0, 120.0])  # up to decays below what the kernels tell apart
def test_erasures_before_a_decay_keep_the_digits_of_all_gradients(strength):
    """An erase is divided by its decay there, and the decay's gradient has no part of both that would cancel."""
    ops = operands_of(erased_before.spec)
    assert ops.lefts is None and ops.divisors is not None and tiles.TINY.value == TINY
    given, state = sample(erased_before, tokens=40), state_of(erased_before)
    given["g"] = -strength * given["g"].abs()
    found = outcome(erased_before, given, state, torch.float32, backend="triton")
    expected = outcome(erased_before, given, state, torch.float64, form="naive")
    of_decays = expected.pop("g").detach()
    assert ((found["g"].double() - of_decays).abs() <= 2e-5 * of_decays.abs() + 2e-6 * of_decays.abs().max()).all()
    assert_same(found, expected)
