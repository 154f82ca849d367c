"""`Report`: the result of dsf.check, as data and as a table quantity x form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsf.checking.examples import Example
from dsf.language.errors import LawError

SHOWN, MOST = 3, 12  # of the brief report: failures in full, lines of the table


@dataclass(frozen=True)
class Row:
    """The worst relative error of one quantity of one form under one law, over all examples.

    tolerance: the largest error that is allowed, 0 where the law is exact. example: the one with the worst error.
    """

    law: str
    dtype: str
    form: str
    quantity: str
    error: float
    tolerance: float
    example: Example
    detail: str = ""

    @property
    def ok(self) -> bool:
        """True when the law holds."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Failure:
    """A broken law: the worst row of one form, the simplest example that Hypothesis found, and code to repeat it."""

    row: Row
    statement: str
    shrunk: bool
    snippet: str

    def __str__(self) -> str:
        row = self.row
        size = "raises" if row.quantity == "exception" else f"is off by {_number(row.error)}, allowed {row.tolerance:g}"
        lines = [f"BROKEN {row.law}: {row.form}, {row.quantity} {size} ({row.dtype})", f"  law: {self.statement}"]
        if row.detail:
            lines.append(f"  {row.detail}")
        lines.append(f"  {'smallest' if self.shrunk else 'first'} example found: {row.example}")
        return "\n".join([*lines, "  to repeat it:", *(f"    {line}" for line in self.snippet.splitlines())])


@dataclass(frozen=True)
class Report:
    """The result of dsf.check for one recurrence.

    ranges: the inputs' ranges, as text. rows: the worst errors. failures: one for each broken law and form. examples:
    how many were tested. seconds: how long it took.
    """

    recurrence: str
    structure: str
    device: str
    ranges: Mapping[str, str]
    rows: tuple[Row, ...]
    failures: tuple[Failure, ...]
    examples: int
    seconds: float

    @property
    def ok(self) -> bool:
        """True when no law is broken."""
        return not self.failures

    @property
    def worst(self) -> Row | None:
        """The row with the largest error relative to its tolerance, exact laws left out; None without rows."""
        graded = [r for r in self.rows if r.tolerance]
        return max(graded, key=lambda r: r.error / r.tolerance, default=None)

    @property
    def verdict(self) -> str:
        """One line: whether all laws hold or how many fail, the number of examples, and the worst error."""
        words = "all laws hold" if self.ok else f"{len(self.failures)} broken"
        line = (
            f"{self.recurrence}: {words} ({self.structure}; {self.examples} examples, {self.seconds:.1f} s on "
            f"{self.device})"
        )
        worst = self.worst
        if not self.ok or worst is None:
            return line
        return (
            f"{line}; nearest to its bound: {worst.form}, {worst.dtype}, {_number(worst.error)} of {worst.tolerance:g}"
        )

    def brief(self) -> str:
        """The verdict, the table of broken laws, and at most SHOWN failures in full."""
        if self.ok:
            return self.verdict
        few, rest = self._apart()
        shown = [f"\n{f}" for f in few]
        if rest:
            names = ", ".join(dict.fromkeys(f"{f.row.law} ({f.row.form})" for f in rest))
            shown.append(f"\n{len(rest)} more broken: {names if len(names) < 400 else names[:400] + ' …'}")
        return "\n".join([self.verdict, self._inputs(), "", *self._table(broken=True), *shown])

    def _apart(self) -> tuple[list[Failure], list[Failure]]:
        """(Failures to show in full, one for each exception message; the others)."""
        few: list[Failure] = []
        for failure in self.failures:
            told = {f.row.detail for f in few if f.row.detail}
            if len(few) < SHOWN and failure.row.detail not in told:
                few.append(failure)
        return few, [f for f in self.failures if f not in few]

    def _inputs(self) -> str:
        return "inputs: " + ", ".join(f"{name} {text}" for name, text in self.ranges.items())

    def raise_if_failed(self) -> Report:
        """The report itself; raises LawError, whose text is the report, when a law is broken."""
        if not self.ok:
            raise LawError(str(self))
        return self

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data for JSON. An error that is not finite becomes the string "inf"."""
        return {
            "recurrence": self.recurrence,
            "structure": self.structure,
            "ok": self.ok,
            "device": self.device,
            "ranges": dict(self.ranges),
            "examples": self.examples,
            "seconds": round(self.seconds, 3),
            "rows": [_row(r) for r in self.rows],
            "failures": [
                {**_row(f.row), "statement": f.statement, "shrunk": f.shrunk, "snippet": f.snippet}
                for f in self.failures
            ],
        }

    def __str__(self) -> str:
        head = [self.verdict, self._inputs()]
        return "\n".join([*head, "", *self._table(), *(f"\n{f}" for f in self.failures)])

    def _table(self, broken: bool = False) -> list[str]:
        """A line for every quantity of the law `forms` and every broken one; one line for all others of a law.

        A column for every form; the last is the tolerance. broken: only broken quantities, at most MOST lines.
        """
        rows = [r for r in self.rows if not (broken and r.ok)]
        names = list(dict.fromkeys(r.form for r in rows))
        cells: dict[tuple[str, str, str], dict[str, Row]] = {}
        for r in rows:
            quantity = r.quantity if r.law == "forms" or not r.ok else "all others"
            found = cells.setdefault((r.law, r.dtype, quantity), {})
            if r.form not in found or r.error > found[r.form].error:
                found[r.form] = r
        widths = [max([8, *(len(key[i]) for key in cells)]) for i in range(3)]
        columns = [max(10, len(name) + 2) for name in names]
        lines = [_line([*widths, *columns], ("law", "dtype", "quantity"), names, "allowed")]
        last = ""
        for (law, dtype, quantity), found in cells.items():
            shown = [_number(found[f].error) + "!" * (not found[f].ok) if f in found else "" for f in names]
            allowed = next(iter(found.values())).tolerance
            some = {q for a, d, q in cells if (a, d) == (law, dtype)} - {"all others"}
            title = "all" if quantity == "all others" and not some else quantity
            first = (law if law != last else "", dtype, title)
            lines.append(_line([*widths, *columns], first, shown, f"{allowed:g}" if allowed else "exact"))
            last = law
        more = len(lines) - 1 - MOST
        return [*lines[: MOST + 1], f"… and {more} lines like these"] if broken and more > 0 else lines


def _line(widths: list[int], first: tuple[str, ...], cells: list[str], last: str) -> str:
    left = "  ".join(text.ljust(width) for text, width in zip(first, widths, strict=False))
    right = "".join(text.rjust(width) for text, width in zip(cells, widths[len(first) :], strict=True))
    return f"{left}  {right}{last.rjust(9)}".rstrip()


def _number(error: float) -> str:
    return "0" if error == 0 else ("inf" if math.isinf(error) else f"{error:.1e}")


def _row(r: Row) -> dict[str, Any]:
    return {
        "law": r.law, "dtype": r.dtype, "form": r.form, "quantity": r.quantity,
        "error": r.error if math.isfinite(r.error) else "inf", "tolerance": r.tolerance, "ok": r.ok,
        "detail": r.detail, "example": r.example.to_dict(),
    }  # fmt: skip
