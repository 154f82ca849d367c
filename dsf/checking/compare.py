"""Comparison of a form's outputs, states and gradients with expected ones: the measures that laws yield."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsf.checking.examples import Example
from dsf.checking.measure import HALF, TOLERANCE, Outcome, Run, Subject, cotangent, distance, typical_entry
from dsf.language.annotations import Kind
from dsf.language.expr import VALUE

OUTPUT = Kind(frozenset({VALUE}))


@dataclass(frozen=True)
class Measure:
    """The error of one quantity of a form under a law. detail: an explanation for a failure."""

    quantity: str
    error: float
    tolerance: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        """True when the law holds."""
        return self.error <= self.tolerance


Measures = Iterator[Measure]


def compare(subject: Subject, got: Outcome, expected: Outcome, dtype: str) -> Measures:
    """One measure for y, the state, the gradient in each input, and all gradients through the final state.

    Where one fails, the error that rounding the declaration's expressions causes for these inputs is estimated, and the
    quantities are compared again relative to it (`distance`).
    """
    found = list(_compare(subject, got, expected, dtype, None))
    if expected.condition is not None and dtype not in HALF and not all(m.ok for m in found):
        found = list(_compare(subject, got, expected, dtype, expected.condition()))
    yield from found


def compare_runs(
    subject: Subject, form: str, example: Example, found: Run | None, expected: Run | None, rows: int = 0,
    detail: str = "",
) -> Measures:  # fmt: skip
    """`compare` of an example run in two ways; None for that of the form itself. rows: of the initial state, instead
    of B."""
    inputs, state = subject.inputs(example), subject.state(example, rows)
    dy = cotangent(example, subject.sizes(inputs)).to(example.torch_dtype).to(subject.device)
    a, b = (subject.differentiate(form, inputs, state, dy, example.seed, way) for way in (found, expected))
    for m in compare(subject, a, b, example.dtype):
        yield replace(m, detail=f"{m.detail} {detail}".strip())


def _compare(subject: Subject, got: Outcome, expected: Outcome, dtype: str, condition: Outcome | None) -> Measures:
    tolerance, kinds = TOLERANCE[dtype], subject.kinds
    off = condition or Outcome(got.y.new_zeros(()), tuple(x.new_zeros(()) for x in expected.state))
    held = max([expected.start, typical_entry(expected.y, OUTPUT), *(typical_entry(x, None) for x in expected.state)])
    yield Measure("y", distance(got.y, expected.y, OUTPUT, dtype, held, condition=off.y), tolerance)
    if got.state:
        each = zip(got.state, expected.state, off.state, strict=True)
        yield Measure("state", max(distance(a, b, None, dtype, held, condition=c) for a, b, c in each), tolerance)
    yield from _gradients("grad {}", got.grads, expected.grads, expected.terms, off.grads, kinds, dtype)
    if got.state_grads:
        terms = expected.state_terms
        found = _gradients("{}", got.state_grads, expected.state_grads, terms, off.state_grads, kinds, dtype, 1.0)
        worst = max(found, key=lambda m: _order(m.error))
        yield Measure("grad of state", worst.error, tolerance, f"the gradient in `{worst.quantity}`")


def _gradients(
    title: str,
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    terms: Mapping[str, Tensor],
    off: Mapping[str, Tensor],
    kinds: Mapping[str, Kind],
    dtype: str,
    cotangent: float = 0.0,
) -> Measures:
    scale = max([cotangent, *(typical_entry(x, kinds.get(name)) for name, x in expected.items())])
    for name, reference in expected.items():
        error = distance(got[name], reference, kinds.get(name), dtype, scale, terms.get(name), off.get(name))
        yield Measure(title.format(name), error, TOLERANCE[dtype])


def _order(error: float) -> float:
    return math.inf if math.isnan(error) else error


def difference(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference; exactly 0 when equal."""
    if a.shape != b.shape:
        return math.inf
    worst = float((a - b).abs().max()) if a.numel() else 0.0
    return math.inf if math.isnan(worst) else worst


def words_of(error: Exception) -> str:
    """What is reported of an exception, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def same(quantity: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Measure:
    """A measure of 0 where a tensor has this shape and dtype, else infinite."""
    held = tuple(x.shape) == shape and x.dtype == dtype
    detail = f"expected {list(shape)} {dtype}, got {list(x.shape)} {x.dtype}"
    return Measure(quantity, 0.0 if held else math.inf, 0.0, detail)
