"""What comes of a case: right, wrong and where, or no case at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dsf.checking.measure import BLOCK


@dataclass(frozen=True)
class Finding:
    """What was wrong. quantity: y, state, grad NAME, repeat QUANTITY, inputs or exception. head: of all batch rows."""

    quantity: str
    call: int
    error: float
    tolerance: float
    head: int | None = None
    block: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        place = "" if self.head is None else f", head {self.head} of all rows"
        if self.block is not None:
            place += f", tokens {BLOCK * self.block} to {BLOCK * self.block + BLOCK - 1}"
        size = (
            ""
            if math.isinf(self.error) and self.quantity in NO_NUMBER
            else f": off by {self.error:.2e}, allowed {self.tolerance:g}"
        )
        return f"call {self.call}, {self.quantity}{place}{size}" + (f" ({self.detail})" if self.detail else "")


NO_NUMBER = ("exception", "inputs")


@dataclass(frozen=True)
class Verdict:
    """What came of a case.

    status: "right"; "wrong"; "void" (what the oracle gives does not fit the dtype: no case); or "undecided" (the oracle
    itself is off by more than UNDECIDED of the tolerance when inputs or expressions' values move by one rounding, or
    when the definition, dense and token by token, is computed in float32).
    errors: the worst by quantity, relative as dsf.check has them. finding: what was wrong, or is undecided.
    """

    status: str
    errors: Mapping[str, float] = field(default_factory=dict)
    finding: Finding | None = None

    def __str__(self) -> str:
        worst = max(self.errors.items(), key=lambda e: e[1], default=("nothing", 0.0))
        return self.status + (f": {self.finding}" if self.finding else f", worst error {worst[1]:.1e} ({worst[0]})")
