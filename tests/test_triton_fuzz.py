"""The adversary in Triton's interpreter: 300 random cases of random declarations, in the dtypes that kernels take."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted import interpreted
from test_triton_scan import small_tiles  # noqa: F401, a fixture

from dsf import mixers
from dsf.fuzz import Case, Declaration, attempt, loop, run
from dsf.fuzz.draw import INTERPRETER
from dsf.fuzz.grammar import KNOWN
from dsf.fuzz.loop import takes_empty

pytestmark = interpreted
SEEDS = (200, 201, 202, 203, 204, 205, 206, 207, 208, 209)  # of 30 cases each, for runners side by side


@pytest.fixture
def tiny_tiles(monkeypatch: pytest.MonkeyPatch, small_tiles: None) -> None:  # noqa: F811
    """Chunks of 16 rows and segments of a few tokens, so that short sequences cross several."""
    from dsf.kernels.triton.chunk import matrix

    table, small = matrix.tiles, {"chunk": 16, "piece": 16, "gradient_piece": 16, "gradient_keys": 16}

    def tiles(*key: Any) -> Any:  # those of rank-one corrections keep their pieces, which slices of states are made for
        return table(*key) if "rank_one" in key else replace(table(*key), **small)

    monkeypatch.setattr(matrix, "tiles", tiles)


@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_withstand_random_calls_of_random_declarations(seed: int, tiny_tiles: None) -> None:
    result = run(cases=30, seed=seed, backend="triton", each=5, shrink=0)
    assert result.ok, str(result)
    assert result.cases == 30 and len(result.undecided) <= 2, result.undecided
    assert result.quotas["three calls or more"] and (result.quotas["packed with empty sequences"] or not takes_empty())


@pytest.mark.parametrize("seed", range(4))
def test_attention_kernels_withstand_random_calls_of_random_declarations(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases, turns, windows and sinks, from caches and packed; KNOWN, which every run begins with, besides."""
    monkeypatch.setattr(loop, "DECK", ("attention",))
    result = run(cases=30, seed=300 + seed, backend="triton", each=5, shrink=0)
    assert result.ok, str(result)
    assert result.cases == 30 and len(result.undecided) <= 2, result.undecided


def test_the_gradient_of_a_first_state_that_is_all_but_erased(tiny_tiles: None) -> None:
    erased = Declaration("delta", (("I - sigmoid(b) * outer(k, k)", "k * (sigmoid(b) * v)"),), "l2norm(q)")
    case = Case(
        tokens=13, n=2, dtype="bfloat16", regimes={"b": "repeated"}, layouts={"dy": "strided"}, initial=True,
        frozen=("q",), seed=51787,
    )  # fmt: skip
    assert attempt(erased.build(), case).status == "right"


QUOTIENTS = {  # of one token the gradients of keys and queries are what is left where their terms cancel
    "a decay a key": (
        "bfloat16",
        Declaration("decay", (("sigmoid(sk)", "sigmoid(k) * v"),), "sigmoid(q)", rule="dsf.ratio"),
    ),
    "no decay": ("float16", Declaration("decay", (("I", "softplus(k) * v"),), "softplus(q)", rule="dsf.ratio")),
    "a strength that drives the normaliser": (
        "bfloat16",
        Declaration("decay", (("sigmoid(sk)", "sigmoid(k) * (sigmoid(b) * v)"),), "sigmoid(q)", rule="dsf.ratio"),
    ),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_the_gradients_of_a_quotient_that_cancel(name: str) -> None:
    dtype, quotient = QUOTIENTS[name]
    for case in (Case(), Case(tokens=7, n=2, heads=2), Case(tokens=9, n=4, initial=True, lengths=(4, 0, 5))):
        for seed in (25608, 25609):
            verdict = attempt(quotient.build(), replace(case, p=64, dtype=dtype, loss="y", seed=seed))
            assert verdict.status == "right", (case, str(verdict))


def test_calls_that_forget_which_inputs_were_one_are_found(monkeypatch: pytest.MonkeyPatch, tiny_tiles: None) -> None:
    """A memory of calls that goes by shapes alone, and by which inputs were one when it was written."""
    from dsf.kernels.triton.operators import Scheduled

    kept: dict[Any, list[int]] = {}
    run = Scheduled._run

    def by_shapes(self: Any, args: Any, tensors: Sequence[Any], kind: Any) -> Any:
        key = (self.host, *(None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors))
        places = [next(i for i, y in enumerate(tensors) if y is x or _same(x, y)) for x in tensors]
        first = kept.setdefault(key, places)
        return run(self, args, [tensors[i] for i in first], kind)

    monkeypatch.setattr(Scheduled, "_run", by_shapes)
    recurrence = replace(KNOWN, steps=(("sigmoid(bv)", "k * x"),), D="0", lets=()).build()
    case = Case(tokens=5, n=3, p=4, dtype="float32", calls=3, alias=("q", "k"), alias_calls=(1, 2), loss="y")
    verdict = attempt(recurrence, case)
    assert verdict.finding is not None and verdict.finding.call == 3
    assert attempt(recurrence, replace(case, alias=(), alias_calls=(), seed=1, p=5)).status == "right"


def _same(x: Any, y: Any) -> bool:
    return isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.data_ptr() == y.data_ptr() != 0


def test_rows_that_no_program_writes_are_found(monkeypatch: pytest.MonkeyPatch, tiny_tiles: None) -> None:
    """The gradient of a token left out, as one that no program writes would be: unwritten memory is NaN."""
    from dsf.call import recurrence as call

    ran = call.run

    class Unwritten(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            left = torch.empty_like(g)
            whole = g.shape[1] - g.shape[1] % 8
            left[:, :whole] = g[:, :whole]
            return left

    def wrong(spec: Any, bound: Any, bounds: Any, state: Any, plan: Any, *more: Any) -> Any:
        y, final = ran(spec, bound, bounds, state, plan, *more)
        return (y if plan.form == "naive" else Unwritten.apply(y)), final

    monkeypatch.setattr(call, "run", wrong)
    case = Case(tokens=11, n=3, p=4, dtype="bfloat16", loss="y")
    verdict = attempt(KNOWN.build(), case)
    assert verdict.finding is not None and "not finite" in verdict.finding.detail
    assert attempt(KNOWN.build(), replace(case, tokens=8)).status == "right"


def test_the_interpreter_profile_is_small() -> None:
    assert INTERPRETER.longest <= 40 and max(INTERPRETER.n) <= 8


@pytest.mark.parametrize("lengths", [(), (3, 0, 4)])
def test_more_channels_than_kernels_hold(lengths: tuple[int, ...]) -> None:
    case = Case(tokens=7, n=2, p=260, dtype="float32", initial=True, lengths=lengths, calls=2)
    verdict = attempt(mixers.gated_deltanet, case)
    assert verdict.status == "right", str(verdict)


def attempted(declaration: Declaration, **case: Any) -> Any:
    return attempt(declaration.build(), Case(**case))


@pytest.mark.parametrize("decay", ["sigmoid(sv)", "tanh(sv)"])
def test_the_gradient_of_a_saturated_gate_where_only_the_gate_has_one(decay: str) -> None:
    gated = Declaration("vector", ((decay, "v"),), "1")
    for seed in range(4):  # of either sign
        verdict = attempted(
            gated, tokens=2, dtype="float32", regimes={"sv": "saturated"}, frozen=("v",), loss="y", seed=seed
        )
        assert verdict.status == "right", verdict


@pytest.mark.parametrize("wide, sizes, seeds", [
    (True, {"tokens": 17, "n": 4, "p": 3}, (5, 6, 8)),
    (False, {"tokens": 181, "n": 16, "p": 4}, (7, 10)),
])  # fmt: skip
def test_a_params_gradient_where_logarithms_of_decays_are_extreme(
    wide: bool, sizes: dict[str, int], seeds: tuple[int, ...]
) -> None:
    key, query = ("k", "q") if wide else ("l2norm(k)", "silu(q)")
    steep = Declaration("decay", (("exp(-exp(pk) * softplus(s))", f"{key} * v"),), query, read="before").build()
    regimes = {"s": "saturated"} | ({"pk": "wide"} if wide else {})
    for seed in seeds:
        verdict = attempt(steep, Case(**sizes, dtype="float32", regimes=regimes, loss="y", seed=seed))
        assert verdict.status == "right", verdict


@pytest.mark.parametrize("more", [{"loss": ""}, {}, {"lengths": (1, 0, 39), "initial": True, "calls": 3}], ids=str)
def test_reads_and_writes_of_params_alone_may_cancel(more: dict[str, Any]) -> None:
    for key, query, seed in (("quarter_turn(pk)", "pk * sigmoid(s)", 9144), ("pair(pth, sin(ps))", "pk", 9476)):
        still = Declaration("scalar", (("1", f"{key} * v"),), query)
        verdict = attempted(still, tokens=40, heads=3, n=16, p=16, dtype="bfloat16", seed=seed, **more)
        assert verdict.status == "right", verdict


HELD = {  # what random runs on a GPU found, and what it came from
    "an angle of Params, in bfloat16": (
        Declaration("decay", (("sigmoid(s) * turn(pth)", "prev(k) * v"),), "q * sigmoid(o)"),
        Case(tokens=6, n=2, p=32, dtype="bfloat16", loss="y", reverse=True, seed=31180),
    ),
    "an angle a token, in bfloat16": (
        Declaration(
            "decay", (("sigmoid(s) * turn(b)", "0.5 * k * v + 0.5 * prev(k * v)"),), "q * sigmoid(o)", "pv * v"
        ),
        Case(heads=4, n=100, p=17, dtype="bfloat16", loss="y", seed=58289),
    ),
    "an angle of Params, in float16": (
        Declaration("decay", (("sigmoid(ps) * turn(pth)", "k * v"),), "pk * sigmoid(s)", "pv * v"),
        Case(tokens=33, n=2, dtype="float16", loss="y", seed=62611),
    ),
    "strong decays of a quotient": (
        Declaration(
            "decay", (("exp(-softplus(s))", "k * (sigmoid(b) * v)"),), "q", drive="v",
            rule="lambda num, den, one: num / maximum(abs(den), one)",
        ),
        Case(tokens=138, n=17, p=16, dtype="float32", regimes={"q": "wide", "s": "saturated"}, loss="y", seed=35018),
    ),
    "strong decays of a quotient, by key": (
        Declaration(
            "decay", (("sigmoid(sk)", "k * (sigmoid(b) * v)"),), "q", drive="v",
            rule="lambda num, den, one: num / (abs(den) + one)",
        ),
        Case(
            tokens=165, n=17, p=16, dtype="float32", regimes={"sk": "saturated"}, alias=("sk", "q"), alias_calls=(1,),
            loss="", seed=50389,
        ),
    ),
    "reflections by keys that alternate": (
        Declaration("delta", (("I - 2 * sigmoid(b) * outer(k, k)", "k * (sigmoid(b) * v)"),), "l2norm(q)", "ps * v"),
        Case(
            tokens=139, heads=4, n=100, p=17, dtype="bfloat16", regimes={"k": "alternating"}, calls=2, alias=("k", "q"),
            alias_calls=(1, 2), loss="", seed=38937,
        ),
    ),
    "an input that Params' gradients divide by, in tiles of tokens past the end": (
        Declaration("elementwise", (("bv / k * pv", "k"),), "q"),
        Case(tokens=2, p=3, dtype="float32", seed=6533),
    ),
    "a quotient that a kernel before divides by, in tiles of tokens past the end": (
        Declaration(
            "elementwise", (("(1 - d * k ** 2) * tanh(pv)", "k * v"),), "silu(q)", "where(i > 0, v, 0.0)", "before",
            lets=(("d", "sigmoid(bv) / (1 + dot(k, k))"),),
        ),
        Case(tokens=2, p=3, dtype="float16", regimes={"pv": "zero"}, lengths=(2, 0), initial=True, seed=6533),
    ),
    "few keys": (
        Declaration(
            "delta", (("(I - d * outer(k, k)) @ diag(sigmoid(sk) ** 0.0625)", "k * v"),), "q / (1 + abs(pk))",
            lets=(("d", "softplus(b) / (1 + softplus(s) + softplus(b) * dot(k, k))"),),
        ),
        Case(
            tokens=50, heads=2, n=3, dtype="bfloat16", groups={"k": 1, "v": 1, "s": 1, "b": 1},
            regimes={"q": "zero", "b": "zero", "pk": "normal"}, seed=65388,
        ),
    ),
    "keys that repeat, erased along others": (
        Declaration(
            "rank one", (("I - sigmoid(b) * outer(k, k * sigmoid(pk))", "silu(k) * v"),), "q", "pv * v", "before"
        ),
        Case(
            tokens=100, heads=2, n=16, p=17, dtype="bfloat16", regimes={"k": "repeated"}, alias=("q", "k"),
            alias_calls=(1,), loss="y", seed=32703,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_what_random_runs_found_stays_mended(name: str) -> None:
    declaration, case = HELD[name]
    for seed in range(case.seed, case.seed + 2):
        verdict = attempt(declaration.build(), replace(case, seed=seed))
        assert verdict.status == "right", str(verdict)
        assert max(verdict.errors.values()) < 0.5 * case.tolerance, str(verdict)
