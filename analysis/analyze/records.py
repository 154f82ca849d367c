"""What an analysis finds, as validated records: the JSON file of `dsf analyze`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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
    """Numbers of the past that the future depends on: by tolerance, by entropy."""

    tolerance: float
    entropy: float


class State(Record):
    """Norm and effective rank of a head's state at the end of the text."""

    norm: Number
    rank: Number


class Along(Record):
    """Norm and effective rank of the state after so many tokens, mean of the heads."""

    tokens: list[int]
    norm: list[Number]
    rank: list[Number]


class Gates(Record):
    """What a token lets stand, takes away and puts in, mean over the text; None for what is not finite."""

    decay: float | None = None
    erase: float | None = None
    write: float | None = None


class Head(Record):
    """One head of a run. distance: how many tokens back it looks, mean. eigenvalues: of real parts."""

    head: int
    eigenvalues: Percentiles | None = None
    half_life: HalfLives | None = None
    horizon: Lifetimes | None = None
    distance: float | None = None
    effective_state_size: EffectiveSize | None = None
    state: State | None = None
    gates: Gates | None = None


class Run(Record):
    """One run of one layer over the text, and over a sentence. What a mixer has no measure of is None.

    call, part: which run, where a layer runs several times. window: tokens that are kept whole, the rest dropped.
    shares: of each token of the sentence in each output [T, T]; received: how much the others look at each token;
    decay, erase, write: of each token of the sentence. found: all this in one sentence.
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


class Model(Record):
    """What was analysed."""

    name: str
    about: str
    class_: str = Field(validation_alias="class", serialization_alias="class")
    parameters: int
    longest_context: int | None


class ConvertedLayer(Record):
    """A layer that ran as a recurrence. heads, N, P: of its state, None where it never ran."""

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
    """What was converted, and how far it moved the outputs: at most, of which range, and the share of that range."""

    layers: list[ConvertedLayer]
    left_alone: list[LeftAlone]
    largest_difference: Number
    range: Number
    deviation: Number


class ReadText(Record):
    """What was read. cut_to_context: the model's longest context, if that is what cut it. pieces: of the sentence."""

    name: str
    tokens: int
    cut_to_context: int | None
    bits_per_token: float | None
    sentence: str
    pieces: list[str]


class StateBytes(Record):
    """Bytes (float32) that one sequence keeps at each context: by kind of layer, and of convolutions apart.

    recurrent_if_cached: what the recurrent layers would keep as softmax attention with keys and values of their width.
    """

    bytes_by_kind: dict[str, list[int]]
    convolutions: int
    recurrent_if_cached: list[int]


class Work(Record):
    """Of one form, a token."""

    flops: float
    bytes: float


class Costs(Record):
    """Work of every form of a recurrence of one size, which so many layers run."""

    recurrence: str
    kind: str
    layers: int
    heads: int
    N: int
    P: int
    forms: dict[str, Work]


class Analysed(File):
    """The content of the JSON file. window: tokens on which Phi was formed. contexts: of the bytes kept."""

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
    runs: list[Run]
    seconds: dict[str, float]
    peak_gib: float | None
