"""Hypothesis strategies for sequences, gates, keys and whole inputs of any recurrence. Needs `dsf-zoo[test]`.

    from hypothesis import given
    from dsf import testing

    @given(testing.inputs_for(gated_deltanet))
    def test_mine(inputs):
        y = gated_deltanet(**inputs)

`examples` draws the `dsf.checking.examples.Example`s of `dsf.check`, which print as source and shrink.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsf.call.recurrence import Recurrence
from dsf.checking.examples import Example, draw_tensor, regimes_of, tensor_regimes
from dsf.checking.laws import errors
from dsf.checking.ranges import Given, ranges_of
from dsf.checking.values import REAL, UNIT, Range
from dsf.language.annotations import Key, Kind, Value
from dsf.language.errors import DsfError

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise DsfError(
        "dsf.testing and dsf.check draw their examples with hypothesis, which is not installed: "
        "pip install dsf-zoo[test]"
    ) from error

SEEDS = st.integers(0, 2**16)
EMPTIES = st.lists(st.integers(0, 4), max_size=3).map(tuple)  # where sequences without tokens lie


def dtypes(*names: str) -> st.SearchStrategy[str]:
    """Names of input dtypes, among `names` or, without any, among all four. The first is the simplest."""
    return st.sampled_from(names or ("float64", "float32", "bfloat16", "float16"))


def shapes(
    tokens: tuple[int, int] = (1, 130), heads: int = 4, n: int = 5, p: int = 5, batch: int = 3
) -> st.SearchStrategy[tuple[int, int, int, int, int]]:
    """Sizes (B, T, H, N, P). tokens: the least and the most T, which is drawn as by `lengths`. heads, n, p, batch: the
    most H, N, P and B."""
    sizes = (st.integers(1, batch), lengths(*tokens), st.integers(1, heads), st.integers(1, n), st.integers(1, p))
    return st.tuples(*sizes)


def lengths(shortest: int = 1, longest: int = 130) -> st.SearchStrategy[int]:
    """Numbers of tokens from shortest to longest. Half of them are near 16, 32, 64 or 128, where chunks end."""
    edges = [t for e in (16, 32, 64, 128) for t in (e - 1, e, e + 1) if shortest <= t <= longest]
    plain = st.integers(shortest, longest)
    return st.one_of(plain, st.sampled_from(edges)) if edges else plain


def cuts(tokens: int, most: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Places where a sequence of `tokens` tokens is cut: increasing, at most `most`, and at least one if tokens > 1."""
    if tokens < 2:
        return st.just(())
    places = st.sets(st.integers(1, tokens - 1), min_size=1, max_size=min(most, tokens - 1))
    return places.map(lambda found: tuple(sorted(found)))


def packings(tokens: int, most: int = 3) -> st.SearchStrategy[Tensor]:
    """cu_seqlens of packed sequences with `tokens` tokens in all, cut at `most` places at most. Some may be empty."""
    drawn = st.tuples(cuts(tokens, most), EMPTIES)
    return drawn.map(lambda x: torch.tensor(Example(tokens=tokens, cuts=x[0], empties=x[1]).packed_bounds))


def groups(heads: int) -> st.SearchStrategy[int]:
    """Numbers of heads that divide `heads`. Hypothesis takes `heads` itself for the simplest."""
    return st.sampled_from([g for g in range(heads, 0, -1) if heads % g == 0])


def tensors(shape: tuple[int, ...], allowed: Range = REAL, kind: Kind | None = None) -> st.SearchStrategy[Tensor]:
    """float64 tensors of this shape [B, T, ...] with entries in a range, drawn in one of the regimes of
    `dsf.checking.examples.regimes_of`. kind: of the input that the tensor is for."""
    kind = kind or (Value.kind if len(shape) > 3 else Kind(frozenset()))  # type: ignore[attr-defined]
    regimes = st.sampled_from(tensor_regimes(allowed))
    return st.builds(lambda regime, seed: draw_tensor(allowed, regime, list(shape), kind, seed), regimes, SEEDS)


def gates(shape: tuple[int, ...]) -> st.SearchStrategy[Tensor]:
    """Decays of this shape: anywhere in [0, 1], within 1e-30 of 0, within 1e-16 of 1, and exactly 0 and 1."""
    return tensors(shape, Range(0.0, 1.0))


def betas(shape: tuple[int, ...]) -> st.SearchStrategy[Tensor]:
    """Writing strengths of the delta rule of this shape: anywhere in [0, 2], and exactly 0, 1 and 2."""
    return tensors(shape, Range(0.0, 2.0))


def keys(shape: tuple[int, int, int, int]) -> st.SearchStrategy[Tensor]:
    """Unit vectors of this shape [B, T, H, N]: random, the same at every token, two in turn, or one-hot."""
    return tensors(shape, UNIT, Key.kind)  # type: ignore[attr-defined]


def examples(
    recurrence: Recurrence,
    ranges: Given | None = None,
    tokens: tuple[int, int] = (1, 130),
    dtype: str = "float64",
    plain: bool = False,
) -> st.SearchStrategy[Example]:
    """`Example`s of a recurrence. ranges: as in `dsf.check`. tokens: the least and the most T. dtype: of the inputs.
    plain: every input in its plainest regime, all sizes but T at most 2."""
    spec, allowed = recurrence.spec, ranges_of(recurrence.spec, ranges)
    timed = tuple(i.name for i in spec.inputs if i.kind.time)
    ways = {i.name: regimes_of(spec, i.name, allowed[i.name]) for i in spec.inputs}
    return _examples(timed, ways, tokens, dtype, plain)  # Hypothesis may hold a strategy for ever: not the recurrence


@st.composite
def _examples(
    draw: Any,
    timed: tuple[str, ...],
    ways: dict[str, tuple[str, ...]],
    tokens: tuple[int, int],
    dtype: str,
    plain: bool,
) -> Example:
    """`Example`s for these inputs and each one's possible regimes."""
    most = {"heads": 2, "n": 2, "p": 2, "batch": 1} if plain else {}
    b, t, h, n, p = draw(shapes(tokens, **most))
    shared = {name: draw(groups(h)) for name in timed[1:]} if h > 1 else {}
    regimes = {name: draw(st.one_of(st.just(w[0]), st.sampled_from(w[1:]))) for name, w in ways.items()}
    return Example(
        batch=b, tokens=t, heads=h, n=n, p=p, dtype=dtype,
        groups={name: g for name, g in shared.items() if g < h},
        regimes={} if plain else {k: v for k, v in regimes.items() if v != ways[k][0]},
        initial=draw(st.booleans()), cuts=draw(cuts(t)), seed=draw(SEEDS), empties=draw(EMPTIES),
    )  # fmt: skip


@st.composite
def inputs_for(
    draw: Any,
    recurrence: Recurrence,
    ranges: Given | None = None,
    tokens: tuple[int, int] = (1, 130),
    dtype: str = "float64",
) -> dict[str, Tensor]:
    """Valid inputs of any recurrence, {name: tensor}. ranges: as in `dsf.check`. tokens: the least and the most T.
    dtype: of the inputs."""
    allowed = ranges_of(recurrence.spec, ranges)
    example: Example = draw(examples(recurrence, ranges, tokens, dtype))
    return example.inputs(recurrence, allowed)


@st.composite
def simpler(draw: Any, example: Example) -> Example:
    """Examples with the fields of the given one, or simpler ones."""

    def some(simple: int, same: Any) -> Any:
        """0 … simple - 1 or `same`, as one choice, so that Hypothesis can go from the second to the first."""
        place = draw(st.integers(0, 2 * simple - 1))
        return place if place < simple else same

    def up_to(most: int) -> int:
        return some(most, most - 1) + 1 if most > 1 else 1

    tokens = up_to(example.tokens)
    kept = tuple(c for c in example.cuts if c < tokens)
    if kept and not isinstance(place := some(tokens - 1, kept), tuple):
        kept = (place + 1,)
    heads = up_to(example.heads)
    shared = {name: g for name, g in example.groups.items() if heads % g == 0 and g < heads and draw(st.booleans())}
    regimes = {name: regime for name, regime in example.regimes.items() if draw(st.booleans())}
    return replace(
        example, batch=up_to(example.batch), tokens=tokens, heads=heads, n=up_to(example.n), p=up_to(example.p),
        groups=shared, regimes=regimes, cuts=kept, initial=example.initial and draw(st.booleans()),
        seed=some(4, example.seed), empties=tuple(place for place in example.empties if draw(st.booleans())),
    )  # fmt: skip


__all__ = [
    "Example",
    "Range",
    "betas",
    "cuts",
    "dtypes",
    "errors",
    "examples",
    "gates",
    "groups",
    "inputs_for",
    "keys",
    "lengths",
    "packings",
    "shapes",
    "simpler",
    "tensors",
]
