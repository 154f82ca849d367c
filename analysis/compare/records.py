"""What a comparison finds, as validated records: the content of compare.json."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from dsf.analysis.records import Eigenvalues, Errors, HalfLives, Number, Record

Kind = Literal["equal", "paper"]


class Spread(Record):
    """One number for several seeds. spread: standard deviation of a single run, 0 where there is one seed."""

    mean: Number
    spread: Number
    each: list[Number]

    @classmethod
    def of(cls, each: Sequence[float]) -> Spread:
        """The record of these numbers."""
        values = [float(x) for x in each]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return cls(mean=statistics.fmean(values), spread=spread, each=values)


class Parameters(Record):
    """Of a model and of one mixer in it."""

    model: int
    mixer: int


class Learnt(Record):
    """What models around one layer of a mixer learnt.

    kind: "equal", a `Layer` with the same convolution, gate and norm for all, or "paper", the paper's own. hidden:
    channels of its MLP, which make the parameters equal. rates: learning rates tried -> training bits per byte at the
    end of the trial; rate: the one taken. before, after: bits per byte of held-out text. by_length: of the last bytes
    of windows so long. recall: share of right answers by the noise between telling and asking, None where it was not
    trained. curve: training bits per byte, mean of the seeds. sample: text that the first seed's model wrote on.
    """

    kind: Kind
    layer: str
    has_convolution: bool
    parameters: Parameters
    hidden: int
    rates: dict[str, Number]
    rate: float
    before: Number
    after: Spread
    by_length: dict[str, Spread]
    recall: dict[str, Spread] | None
    curve: list[Number]
    seconds: float
    sample: str
    weights: list[str]


class Map(Record):
    """|Phi| on a sentence: shares [T, T] of each earlier byte in each output."""

    sentence: str
    shares: list[list[Number]]


class StateNumbers(Record):
    """Numbers that one layer keeps: as a formula, and at each context of the comparison, here and at a real width."""

    formula: str
    here: list[int]
    at_paper_width: list[int]


class ReadText(Record):
    """The text, as a comparison keeps it. yardsticks_bits_per_byte: of coders that everybody knows."""

    name: str
    train_bytes: int
    held_out_bytes: int
    sentence: str
    yardsticks_bits_per_byte: dict[str, float]


class RecallTask(Record):
    """Pairs told, bytes of noise between telling and asking, share of right answers by chance."""

    pairs: int
    gaps: list[int]
    chance: float


class MixerRecord(Record):
    """One mixer: what it is, what its layers learnt, and what the first model of the equal layer is made of."""

    name: str
    given: str
    summary: str
    source: str
    system: str
    structure: str
    equal: Learnt
    paper: Learnt | None
    eigenvalues: Eigenvalues
    half_life: HalfLives
    kernel: Map
    state: StateNumbers
    forms: dict[str, Errors]
    worst_disagreement: Number
    tokens_per_second: dict[str, float]

    @property
    def columns(self) -> list[Learnt]:
        """What was trained: the equal layer, and the paper's if it has one."""
        return [self.equal] if self.paper is None else [self.equal, self.paper]
