"""The records of `dsf zoo`."""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import Field, JsonValue

from dsf import Recurrence
from dsf.analysis.measures import eigenvalues
from dsf.analysis.records import Endless, Number, Record
from dsf.analysis.subjects import Subject, find, paper_sizes
from dsf.analysis.training import accepted
from dsf.checking.ranges import ranges_of
from dsf.mixers import ZOO
from dsf.mixers.layer import random_inputs

D_MODEL, HEADS, CONTEXT = 2048, 16, 4096  # a layer of a 1.3B model
SCALES = (0.3, 3.0, 30.0)


class Given(Record):
    """An input of a recurrence: its kind, and the range of its values."""

    kind: str
    range: str


class State(Record):
    """Size of the state: a formula, and the numbers of one layer whose sizes `of` names."""

    formula: str
    numbers: int
    of: str


class Eigenvalues(Record):
    """Smallest and largest real part that was met; complex: whether any eigenvalue had an imaginary part."""

    low: Number
    high: Endless
    complex: bool


class Module(Record):
    """The paper's layer. parameters: their number; options: its constructor's defaults by name."""

    class_: str = Field(validation_alias="class", serialization_alias="class")
    parameters: int
    options: dict[str, JsonValue]


class ZooRecord(Record):
    """One mixer, as `dsf zoo --json` prints it. Its JSON schema: `ZooRecord.model_json_schema()`."""

    name: str
    summary: str
    source: str
    objective: str | None
    structure: str
    forms: list[str]
    inputs: dict[str, Given]
    state: State
    eigenvalues: Eigenvalues
    module: Module | None
    system: str


def rows() -> list[ZooRecord]:
    """The records of all mixers of the zoo."""
    return [record(find(entry.name)) for entry in ZOO]


def record(subject: Subject) -> ZooRecord:
    """The record of one recurrence: structure, forms, inputs, state, eigenvalues, layer."""
    spec = subject.recurrence.spec
    layer = paper_sizes(subject, D_MODEL, HEADS)
    side = D_MODEL // HEADS
    if layer is None:
        numbers = subject.state_numbers(CONTEXT, heads=HEADS, N=side, P=side)
    else:
        numbers = layer.state_size(CONTEXT, conv=False)
    ranges = ranges_of(spec)
    return ZooRecord(
        name=subject.name,
        summary=subject.summary,
        source=subject.source,
        objective=None if subject.entry is None else subject.entry.objective,
        structure=spec.structure,
        forms=list(subject.recurrence.forms),
        inputs={i.name: Given(kind=str(i.kind), range=str(ranges[i.name])) for i in spec.inputs},
        state=State(
            formula=subject.state_formula(),
            numbers=numbers,
            of=f"one layer, d_model {D_MODEL}, {HEADS} heads, context {CONTEXT}, convolution left out",
        ),
        eigenvalues=eigenvalue_range(subject.recurrence),
        module=None
        if layer is None
        else Module(
            class_=type(layer).__name__,
            parameters=sum(p.numel() for p in layer.parameters()),
            options={name: _default(p.default) for name, p in accepted(subject.make).items()},
        ),
        system=str(subject.recurrence),
    )


def _default(value: Any) -> JsonValue:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return list(value) if isinstance(value, tuple | list) else "required"


def eigenvalue_range(recurrence: Recurrence) -> Eigenvalues:
    """Smallest and largest real part of A_t's eigenvalues on random inputs of three scales within their ranges.

    In the framework paper's gauge (DSF eqs. 15, 22), where quotients and softmax attention have the eigenvalue
    η_{t-1}/η_t.
    """
    values = torch.cat([_eigenvalues(recurrence, scale) for scale in SCALES])
    real = values.real if values.is_complex() else values
    complex_ = bool(values.is_complex() and (values.imag.abs() > 1e-9).any())
    return Eigenvalues(low=float(real.min()), high=float(real.max()), complex=complex_)


def _eigenvalues(recurrence: Recurrence, scale: float) -> torch.Tensor:
    """Eigenvalues of all tokens but the first, which has no predecessor in the gauge."""
    inputs = random_inputs(recurrence, tokens=256, heads=4, N=2, P=2, scale=scale)
    return eigenvalues(recurrence.trajectory(**inputs), paper=True)[:, 1:].flatten()


def range_text(found: Eigenvalues) -> str:
    """An interval such as [0, 1]; a single number where both ends agree; ∞ for an end above 100."""
    low, high = _end(found.low), _end(found.high)
    text = low if low == high else f"[{low}, {high}]"
    return f"{text} complex" if found.complex else text


def _end(value: float) -> str:
    if math.isinf(value) or abs(value) > 100:
        return "∞" if value > 0 else "-∞"
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text
