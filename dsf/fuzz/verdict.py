"""The verdict on a case: right, wrong (with the place), undecided or void."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dsf.checking.measure import BLOCK


@dataclass(frozen=True)
class Finding:
    """One failure. quantity: y, state, grad NAME, repeat QUANTITY, inputs or exception. head: counted over all batch
    rows."""

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
    """The result of testing a case.

    status: "right"; "wrong"; "void" (the oracle's result exceeds the dtype); or "undecided" (the oracle itself changes
      by more than UNDECIDED of the tolerance if inputs or expressions' values change by one rounding, or if it is
      computed in float32).
    errors: the worst of each quantity, relative as in dsf.check. finding: what failed, or was undecided.
    """

    status: str
    errors: Mapping[str, float] = field(default_factory=dict)
    finding: Finding | None = None

    def __str__(self) -> str:
        worst = max(self.errors.items(), key=lambda e: e[1], default=("nothing", 0.0))
        return self.status + (f": {self.finding}" if self.finding else f", worst error {worst[1]:.1e} ({worst[0]})")
