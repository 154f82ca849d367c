"""The adversary in Triton's interpreter: 300 random cases of random declarations, in the dtypes that kernels take."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted import interpreted
from test_triton_scan import small_tiles  # noqa: F401, a fixture

from dsf.fuzz import Case, attempt, run
from dsf.fuzz.draw import INTERPRETER
from dsf.fuzz.grammar import KNOWN
from dsf.fuzz.loop import takes_empty

pytestmark = interpreted
PARTS = 10  # of the 300 cases, for runners side by side


@pytest.fixture
def tiny_tiles(monkeypatch: pytest.MonkeyPatch, small_tiles: None) -> None:  # noqa: F811
    """Chunks of 16 rows and segments of a few tokens, so that short sequences cross several."""
    from dsf.kernels.triton.chunk import matrix

    table, small = matrix.tiles, {"chunk": 16, "piece": 16, "gradient_piece": 16, "gradient_keys": 16}

    def tiles(*key: Any) -> Any:  # those of rank-one corrections keep their pieces, which slices of states are made for
        return table(*key) if "rank_one" in key else replace(table(*key), **small)

    monkeypatch.setattr(matrix, "tiles", tiles)


@pytest.fixture
def rehearsed() -> None:
    """Calls are not rehearsed here: other tests do that, and it doubles what these take."""


@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_withstand_random_calls_of_random_declarations(part: int, tiny_tiles: None) -> None:
    result = run(cases=300 // PARTS, seed=200 + part, backend="triton", each=5, shrink=0)
    assert result.ok, str(result)
    assert result.cases == 300 // PARTS and len(result.undecided) <= 2, result.undecided
    assert result.quotas["three calls or more"] and (result.quotas["packed with empty sequences"] or not takes_empty())


def test_played_calls_that_forget_which_inputs_were_one_are_found(
    monkeypatch: pytest.MonkeyPatch, tiny_tiles: None
) -> None:
    """A memory of calls that goes by shapes alone, and by which inputs were one when it was written."""
    from dsf.kernels.triton.scan import operator

    kept: dict[Any, list[int]] = {}
    assert hasattr(operator, "played")
    played = operator.played

    def by_shapes(function: Callable[..., Any], tensors: Sequence[Any], *options: Any) -> Any:
        key = (function, *options, *(None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors))
        places = [next(i for i, y in enumerate(tensors) if y is x or _same(x, y)) for x in tensors]
        first = kept.setdefault(key, places)
        return played(function, [tensors[i] for i in first], *options)

    monkeypatch.setattr(operator, "played", by_shapes)
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

    def wrong(spec: Any, bound: Any, state: Any, plan: Any) -> Any:
        y, final = ran(spec, bound, state, plan)
        return (y if plan.form == "naive" else Unwritten.apply(y)), final

    monkeypatch.setattr(call, "run", wrong)
    case = Case(tokens=11, n=3, p=4, dtype="bfloat16", loss="y")
    verdict = attempt(KNOWN.build(), case)
    assert verdict.finding is not None and "not finite" in verdict.finding.detail
    assert attempt(KNOWN.build(), replace(case, tokens=8)).status == "right"


def test_the_interpreter_profile_is_small() -> None:
    assert INTERPRETER.longest <= 40 and max(INTERPRETER.n) <= 8
