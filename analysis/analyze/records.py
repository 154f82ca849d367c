"""The records of an analysis: the JSON file of `dsf analyze`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from dsf.analysis.compare import CONTEXTS
from dsf.analysis.records import (
    Eigenvalues,
    File,
    HalfLives,
    Lifetimes,
    Machine,
    Number,
    Percentiles,
    Record,
    schema_field,
)


class EffectiveSize(Record):
    """Effective state sizes, by tolerance and by entropy."""

    tolerance: float
    entropy: float


class State(Record):
    """Norm and effective rank of a head's state at the end of the text."""

    norm: Number
    rank: Number


class Along(Record):
    """Norm and effective rank of the state after these numbers of tokens, mean of the heads."""

    tokens: list[int] = Field(min_length=1)
    norm: list[Number]
    rank: list[Number]


class Gates(Record):
    """Mean gate strengths over the text: decay, erasure, writing; None for a mean that is not finite."""

    decay: float | None = None
    erase: float | None = None
    write: float | None = None


class Head(Record):
    """One head of a run. distance: mean distance in tokens of what it looks at. eigenvalues: of real parts."""

    head: int
    eigenvalues: Percentiles | None = None
    half_life: HalfLives | None = None
    horizon: Lifetimes | None = None
    distance: float | None = None
    effective_state_size: EffectiveSize | None = None
    state: State | None = None
    gates: Gates | None = None


class Run(Record):
    """One run of one layer over the text and over a sentence. Measures that a mixer does not have are None.

    call, part: the run's numbers, where a layer runs several times. window: tokens kept whole, where all others are
    dropped. attention: keeps keys and values, whatever its kind. shares [T, T]: of each token of the sentence in each
    output. received: how much the other tokens look at each token. decay, erase, write: of each token of the sentence.
    found: a sentence about all this.
    """

    name: str
    layer: str
    call: int
    part: int
    backward: bool
    kind: str
    recurrence: str
    structure: str
    N: int
    P: int
    causal: bool = True
    eigenvalues: Eigenvalues | None = None
    window: int | None = None
    attention: bool = False
    half_life: HalfLives | None = None
    horizon: Lifetimes | None = None
    distance: float | None = None
    effective_state_size: EffectiveSize | None = None
    along: Along | None = None
    gates: Gates | None = None
    heads: list[Head] = Field(default_factory=list)
    shares: list[list[Number]] = Field(default_factory=list)
    received: list[Number] = Field(default_factory=list)
    decay: list[Number] | None = None
    erase: list[Number] | None = None
    write: list[Number] | None = None
    found: str = ""

    @property
    def keeps_keys(self) -> bool:
        """Whether its state is a cache of keys and values; files from before `attention` name the kind alone."""
        return self.attention or self.kind == "softmax"


class Model(Record):
    """The analysed model."""

    name: str
    about: str
    class_: str = Field(validation_alias="class", serialization_alias="class")
    parameters: int
    longest_context: int | None


class ConvertedLayer(Record):
    """A layer that ran as a recurrence. heads, N, P: of its state, None for a layer that never ran."""

    name: str
    kind: str
    recurrence: str
    structure: str
    system: str
    heads: int | None
    N: int | None
    P: int | None
    window: int | None
    notes: list[str]
    parameters: int


class LeftAlone(Record):
    """A module that was not converted, and why."""

    name: str
    type: str
    why: str


class Conversion(Record):
    """The converted layers, and the change of outputs: the largest one, their range, and its share of the range."""

    layers: list[ConvertedLayer]
    left_alone: list[LeftAlone]
    largest_difference: Number
    range: Number
    deviation: Number


class ReadText(Record):
    """The text that was read. cut_to_context: the model's longest context, where that cut the text. pieces: of the
    sentence.
    """

    name: str
    tokens: int
    cut_to_context: int | None
    bits_per_token: float | None
    sentence: str
    pieces: list[str] = Field(min_length=2)


class StateBytes(Record):
    """Bytes (float32) that one sequence keeps at each context, by kind of layer; of convolutions apart.

    recurrent_if_cached: of the recurrent layers if they were softmax attention with keys and values of their widths.
    """

    bytes_by_kind: dict[str, list[int]]
    convolutions: int
    recurrent_if_cached: list[int]


class Work(Record):
    """The work of one form, per token."""

    flops: float
    bytes: float


class Costs(Record):
    """The work of every form of a recurrence of one size, and the number of layers with it. window: of attention."""

    recurrence: str
    kind: str
    layers: int
    heads: int
    N: int
    P: int
    forms: dict[str, Work]
    window: int | None = None


class Analysed(File):
    """The content of the JSON file. window: tokens on which Phi was computed. contexts: of the bytes of state."""

    schema_: Literal["dsf.analyze/1"] = schema_field("dsf.analyze/1")
    dsf: str
    machine: Machine
    model: Model
    conversion: Conversion
    text: ReadText
    window: int
    contexts: list[int]
    state: StateBytes
    costs: list[Costs]
    runs: list[Run] = Field(min_length=1)
    seconds: dict[str, float]
    peak_gib: float | None

    @model_validator(mode="after")
    def _check_lengths(self) -> Analysed:
        """Raise ValueError for lists that are drawn against each other and not of one length."""
        size, contexts = len(self.text.pieces), len(self.contexts)
        state = {**self.state.bytes_by_kind, "recurrent_if_cached": self.state.recurrent_if_cached}
        lists: list[tuple[str, Sequence[Any], int, str]]
        lists = [(f"state: {name}", x, contexts, "contexts") for name, x in state.items()]
        for run in self.runs:
            where = f"runs: {run.name}"
            if not run.heads:
                raise ValueError(f"{where}: it has no heads")
            lists.append((f"{where}: shares", run.shares, size, "pieces"))
            lists += [(f"{where}: shares", row, size, "pieces") for row in run.shares]
            each = [("received", run.received), ("decay", run.decay), ("erase", run.erase), ("write", run.write)]
            lists += [(f"{where}: {name}", x, size, "pieces") for name, x in each if x is not None]
            if run.along is not None:
                line = {"norm": run.along.norm, "rank": run.along.rank}
                lists += [(f"{where}: {name}", x, len(run.along.tokens), "tokens") for name, x in line.items()]
        for name, x, expected, of in lists:
            if len(x) != expected:
                raise ValueError(f"{name}: {len(x)} for {expected} {of}")
        if self.contexts != list(CONTEXTS):
            raise ValueError(f"contexts are {self.contexts}; expected {list(CONTEXTS)}")
        return self
