"""Sequences over ranks on the kernels, in Triton's interpreter: the passes around the exchanges against the oracle."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from interpreted import interpreted
from matrix_family import late_ratio
from mixer_inputs import sample

import dsf
from dsf import Key, Param, Scalar, System, Value, abs, exp, maximum, sigmoid, tanh
from dsf.call.bind import bind
from dsf.kernels.triton import operators
from dsf.kernels.triton.chunk import call as chunk_calls
from dsf.kernels.triton.chunk import matrix as matrix_kernels
from dsf.kernels.triton.scan import launches as scan_launches
from dsf.mixers import get
from dsf.parallel import Simulated, fused
from dsf.triton.shard import Shard

pytestmark = interpreted

# No decays but beside corrections, scalar and key-diagonal ones, read before, normalised, rank-one; scans.
NAMES = ["gated_deltanet", "ssd", "mlstm", "kda", "rwkv6", "rwkv7", "s6", "rg_lru"]
RECURRENCES = [*(get(name).recurrence for name in NAMES), late_ratio]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Chunks of 16 rows, so that a few dozen tokens cross several."""
    table, small = matrix_kernels.tiles, {"chunk": 16, "piece": 16, "gradient_piece": 16, "gradient_keys": 16}
    monkeypatch.setattr(matrix_kernels, "tiles", lambda *key: replace(table(*key), **small))


SLOWER = {  # gates near the decay of trained models, so that what earlier ranks wrote is still there
    "alpha": lambda x: 0.9 + 0.1 * x, "g": lambda x: 0.02 * x, "f": lambda x: x + 4.0, "dt": lambda x: x - 4.0,
    "r": lambda x: x - 4.0, "w": lambda x: x - 4.0, "a": lambda x: x + 3.0, "reset": torch.zeros_like,
    "z": lambda x: x - 3.0,
}  # fmt: skip


def draw(recurrence, tokens):
    found = sample(recurrence, 1, tokens, 1)
    if recurrence.name in ("gla", "rwkv7"):
        return found
    return {n: SLOWER[n](x) if n in SLOWER else x for n, x in found.items()}


def cut_time(monkeypatch, count):
    """Kernels walk T in so many segments."""
    monkeypatch.setattr(matrix_kernels, "segments", lambda *_: count)
    if count > 1:
        monkeypatch.setattr(chunk_calls, "LEVEL_TOKENS", 16)
        monkeypatch.setattr(scan_launches, "segments", lambda tokens, _, t, __: (-(-tokens // t.chunk), t.chunk))


def of_y_alone(recurrence, given, dtype, **how):
    """y, and the gradients of a fixed functional of it."""
    leaves = {n: x.to(dtype).requires_grad_() for n, x in given.items()}
    y = recurrence(**leaves, **how)
    loss = (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).sum()
    return [y, *torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)]


def outcome(recurrence, given, state, dtype, **how):
    """y, the true final state, and the gradients of a fixed functional of both."""
    leaves = {n: x.to(dtype).requires_grad_() for n, x in given.items()}
    start = None if state is None else state.to(dtype).requires_grad_()
    y, final = recurrence(**leaves, initial_state=start, return_state=True, **how)
    true = recurrence.true_state(final, y.shape[-1])
    g = torch.Generator().manual_seed(1)
    loss = (y * torch.randn(y.shape, generator=g, dtype=torch.float64)).sum()
    if not recurrence.spec.is_stabilised:
        loss = loss + (true * torch.randn(true.shape, generator=g, dtype=torch.float64)).sum()
    wanted = [*leaves.values()] + ([] if start is None else [start])
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [y, true, *(torch.zeros_like(w) if x is None else x for w, x in zip(wanted, grads, strict=True))]


def compare(recurrence, given, state, world, counted):
    """Ranks on the kernels in float32 against the whole sequence by the definition in float64, per head and token."""
    expected = outcome(recurrence, given, state, torch.float64, form="naive")
    before = counted[0]
    found = outcome(recurrence, given, state, torch.float32, backend="triton", parallel=world)
    assert counted[0] == before + 1
    whole = expected
    if recurrence.spec.is_stabilised:  # a quotient whose divisor comes near zero: no worse than the whole sequence's
        whole = outcome(recurrence, given, state, torch.float32, backend="triton")
    for got, want, one in zip(found, expected, whole, strict=True):
        assert got.shape == want.shape
        size = max(1.0, float(want.detach().abs().max()))
        most = 3 * float((one.double() - want).detach().abs().max()) + 3e-5 * size
        assert float((got.double() - want).detach().abs().max()) <= most


@pytest.fixture
def counted(counting):
    """How many calls went through the kernels' passes."""
    return counting(fused, "run")


def begun(recurrence, given):
    """A state that something was written into."""
    if recurrence.spec.is_stabilised:
        return None
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    early = {n: x[:, :3] if n in timed else x for n, x in given.items()}
    return recurrence(**early, return_state=True)[1].detach()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("recurrence", RECURRENCES, ids=lambda r: r.name)
def test_ranks_on_the_kernels_equal_the_whole(recurrence, count, monkeypatch, counted):
    cut_time(monkeypatch, count)
    sizes = (70, 3, 67) if count > 1 and recurrence.spec.is_elementwise else (37, 3, 35)
    given = draw(recurrence, sum(sizes))
    world = Simulated(3, sizes=sizes, exchange="gather")
    compare(recurrence, given, begun(recurrence, given) if count > 1 else None, world, counted)


@pytest.mark.parametrize("recurrence", RECURRENCES, ids=lambda r: r.name)
def test_ranks_without_a_final_state_equal_the_whole(recurrence, monkeypatch, counted):
    """The first rank receives no state and the last no gradient of one: neither makes zeros of it."""
    cut_time(monkeypatch, 2)
    given = draw(recurrence, 70)
    found = of_y_alone(recurrence, given, torch.float32, backend="triton", parallel=Simulated(2))
    assert counted[0] == 1
    want = of_y_alone(recurrence, given, torch.float64, form="naive")
    one = of_y_alone(recurrence, given, torch.float32, backend="triton") if recurrence.spec.is_stabilised else want
    for got, true, plain in zip(found, want, one, strict=True):
        most = 3 * float((plain.double() - true).detach().abs().max())
        assert float((got.double() - true).detach().abs().max()) <= most + 3e-5 * max(
            1.0, float(true.detach().abs().max())
        )


@pytest.mark.parametrize("count", [1, 2])
def test_head_and_tail_are_rows_of_one_pass(count, monkeypatch, counted):
    cut_time(monkeypatch, count)
    recurrence = get("gated_deltanet").recurrence
    given = draw(recurrence, 4 * 33)
    compare(recurrence, given, begun(recurrence, given), Simulated(2, "headtail", exchange="transpose"), counted)


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels of every pass that ran for the first time."""
    found = Counter()
    runnable = operators.runnable

    def noted(schedule, *more):
        found.update(x.kernel.__name__ for x in schedule.launches)
        return runnable(schedule, *more)

    monkeypatch.setattr(operators, "runnable", noted)
    return found


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", [*NAMES, "gla", "retnet", "linear_attention", "delta_product", "comba"])
def test_what_is_summed_up_before_changes_no_bit(name, count, monkeypatch, launched):
    """One rank alone, entered with a state: the passes after a summary against a plain call and its gradients."""
    recurrence = get(name).recurrence
    cut_time(monkeypatch, count)
    given = {n: x.float().requires_grad_() for n, x in draw(recurrence, 70).items()}
    state = begun(recurrence, given)
    shard = Shard.of(recurrence.spec, bind(recurrence.spec, (), given))
    plain, end = recurrence(**given, initial_state=state, return_state=True, backend="triton")
    dy, dend = torch.randn_like(plain), torch.randn_like(end)
    if recurrence.spec.is_stabilised:
        dend[..., -1] = 0.0  # of the running maximum there is none
    with torch.no_grad():
        launched.clear()
        last, _, held = shard.summary(state, False, True)
        y, final, saved = shard.forward(state, True, held)
        if name != "mlstm":  # whose rows depend on what enters
            once = ["prepare", "prepare_keys", "rank_one_chunk", "delta_transform", "sum_piece"]
            assert max(launched[kernel] for kernel in once) <= 1 and launched["pointwise"] <= 2, launched
        assert torch.equal(y, plain) and torch.equal(final, end)
        torch.testing.assert_close(last, end, rtol=1e-5, atol=1e-5)
        launched.clear()
        ends, held = dend[..., : last.shape[-1] - recurrence.spec.is_stabilised], shard.held_back(held)
        _, later = shard.adjoint(dy, ends, state, saved, held)
        pulled, _ = shard.backward(dy, dend, state, saved, [True] * len(shard.operands), later)
        assert launched["prepare"] <= 1 and launched["pointwise"] <= 2, launched  # readout and prologue
        without, _, _ = shard.forward(state, False, shard.summary(state, False, False)[2])
        assert torch.equal(without, recurrence(**given, initial_state=state, backend="triton"))
    if not shard.scans:  # whose operands are computed from the inputs, by operators that autograd knows
        expected = torch.autograd.grad([plain, end], shard.operands, [dy, dend])
        assert all(torch.equal(a, b) for a, b in zip(pulled, expected, strict=True))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["gated_deltanet", "ssd", "kda", "gla"])
def test_passes_behind_a_summary_have_the_bits_of_passes_without_one(name, count, monkeypatch):
    """In bfloat16, which a call of so few keys would widen.

    Not of mLSTM and RWKV-7, whose states are then stored in slices that are wider than the tiles here.
    """
    recurrence = get(name).recurrence
    cut_time(monkeypatch, count)
    given = {n: x.bfloat16() for n, x in draw(recurrence, 33).items()}
    state, shard = begun(recurrence, given), Shard.of(recurrence.spec, bind(recurrence.spec, (), given))
    every = [True] * len(shard.operands)
    last, _, held = shard.summary(state, False, True)
    behind, alone = shard.forward(state, True, held), shard.forward(state, True, [])
    dy, dend = torch.randn_like(behind[0]), torch.randn_like(behind[1])
    ends = dend[..., : last.shape[-1] - recurrence.spec.is_stabilised]
    _, later = shard.adjoint(dy, ends, state, behind[2], shard.held_back(held))
    pulled, first = shard.backward(dy, ends, state, behind[2], every, later)
    expected, of_state = shard.backward(dy, ends, state, alone[2], every, [])
    for got, want in zip([*behind[:2], *pulled, first], [*alone[:2], *expected, of_state], strict=True):
        assert got.isfinite().all() and torch.equal(got, want)


def test_a_readout_that_is_a_solve_is_spread_by_public_calls(counted):
    """Its shards' passes would leave out the states of what is solved."""
    recurrence = get("mesanet").recurrence
    given = draw(recurrence, 70)
    found = of_y_alone(recurrence, given, torch.float32, backend="triton", parallel=Simulated(3, exchange="gather"))
    assert counted[0] == 0
    for got, want in zip(found, of_y_alone(recurrence, given, torch.float64, form="naive"), strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-5)


@dsf.recurrence
def swaying(q: Key, k: Key, v: Value, s: Scalar, i: Scalar) -> System:
    """M has a sign, so that it is computed from the inputs of every call."""
    return System(A=tanh(s), B=exp(i) * k * v, C=q, normalize=lambda num, den, one: num / maximum(abs(den), one))


@dsf.recurrence
def steady(q: Key, k: Key, v: Value, s: Param[Scalar], i: Scalar) -> System:
    """The decay is one for all tokens."""
    return System(A=sigmoid(s), B=exp(i) * k * v, C=q, normalize=lambda num, den, one: num / maximum(abs(den), one))


MAXIMA = {r.name: r for r in (swaying, steady)}  # with running maxima


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("gated_deltanet", Simulated(2, exchange="gather")),
        ("mlstm", Simulated(2, exchange="gather")),
        ("mlstm", Simulated(3, exchange="gather")),
        ("mlstm", Simulated(2, "headtail", exchange="relay")),
        ("swaying", Simulated(3, exchange="gather")),
        ("steady", Simulated(3, exchange="gather")),
        ("kda", Simulated(3, exchange="gather")),
        ("rwkv7", Simulated(2, exchange="gather")),
        ("rwkv7", Simulated(3, exchange="transpose")),
        ("s6", Simulated(2, exchange="gather")),
    ],
    ids=lambda x: getattr(x, "exchange", x),
)
def test_third_calls_are_played_on_other_numbers(name, world, monkeypatch, counted):
    cut_time(monkeypatch, 2)
    recurrence = MAXIMA.get(name) or get(name).recurrence
    given = draw(recurrence, 72)
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    for turn in range(3):
        compare(recurrence, {n: x.roll(turn, 1) if n in timed else x for n, x in given.items()}, None, world, counted)


def test_keys_of_params_are_computed_in_float32_over_ranks_too():
    """Products of Params that cancel to a hundredth: a bfloat16 call rounds its tokens alone."""

    @dsf.recurrence
    def bank(v: Value, a: Scalar, b: Param[Key], c: Param[Key]) -> System:
        return System(A=0.9 + 0.1 * sigmoid(a), B=b * v, C=c)

    g = torch.Generator().manual_seed(0)
    v, a = torch.randn(1, 40, 1, 16, generator=g).bfloat16(), torch.randn(1, 40, 1, generator=g).bfloat16()
    b, c = torch.randn(2, 1, 16, generator=g)
    c = c - 0.99 * (c * b).sum() / b.square().sum() * b
    found = []
    for wide, how in ((True, {"form": "naive"}), (False, {"backend": "triton", "parallel": Simulated(3)})):
        leaves = {"v": v, "a": a, "b": b, "c": c}
        leaves = {n: (x.double() if wide else x).clone().requires_grad_() for n, x in leaves.items()}
        y = bank(**leaves, **how)
        assert y.dtype == leaves["v"].dtype
        found.append([y, *torch.autograd.grad(y.double().square().sum(), [*leaves.values()])])
    for expected, got in zip(*found, strict=True):
        assert (got.double() - expected).norm() <= 3e-3 * expected.norm()
