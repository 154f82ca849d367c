"""What a comparison finds, as validated records: the content of compare.json."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Kind = Literal["equal", "paper"]


class Record(BaseModel):
    """Base of the records: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")


class Spread(Record):
    """One number for several seeds. spread: standard deviation of a single run, 0 where there is one seed."""

    mean: float
    spread: float
    each: list[float]

    @classmethod
    def of(cls, each: Sequence[float]) -> Spread:
        """The record of these numbers."""
        values = [float(x) for x in each]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return cls(mean=statistics.fmean(values), spread=spread, each=values)


class Learnt(Record):
    """What models around one layer of a mixer learnt.

    kind: "equal", a `Layer` with the same convolution, gate and norm for all, or "paper", the paper's own. parameters:
    of the model and of one mixer in it. hidden: channels of its MLP, which make the parameters equal. rates: learning
    rates tried -> training bits per byte at the end of the trial; rate: the one taken. before, after: bits per byte of
    held-out text. by_length: of the last bytes of windows so long. recall: share of right answers by the noise between
    telling and asking, None where it was not trained. curve: training bits per byte, mean of the seeds. sample: text
    that the first seed's model wrote on.
    """

    kind: Kind
    layer: str
    has_convolution: bool
    parameters: dict[str, int]
    hidden: int
    rates: dict[str, float]
    rate: float
    before: float
    after: Spread
    by_length: dict[str, Spread]
    recall: dict[str, Spread] | None
    curve: list[float]
    seconds: float
    sample: str
    weights: list[str]


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
    eigenvalues: dict[str, Any]
    half_life: dict[str, Any]
    kernel: dict[str, Any]
    state: dict[str, Any]
    forms: dict[str, dict[str, float]]
    worst_disagreement: float
    tokens_per_second: dict[str, float]

    @property
    def columns(self) -> list[Learnt]:
        """What was trained: the equal layer, and the paper's if it has one."""
        return [self.equal] if self.paper is None else [self.equal, self.paper]
