"""`Result`: the adversary's cases and findings, as a table and as data that can be merged over runs."""

from __future__ import annotations

import math
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dsf.fuzz.case import Case
from dsf.fuzz.draw import RESIDUES
from dsf.fuzz.verdict import Verdict

# The kinds of cases that a run counts.
QUOTAS = (
    "elementwise, bfloat16, T not a multiple of 16", "one tensor for two inputs, three calls or more",
    "overlapping inputs", "packed", "packed with sequences of one token", "packed with empty sequences",
    "after another recurrence of the same shapes", "after another number of heads",
    "after what calls remember was dropped", "three calls or more", "initial state", "grouped heads",
    "memory layouts other than plain", "without gradients", "token by token", "some inputs without a gradient",
)  # fmt: skip


def facts(structure: str, elementwise: bool, case: Case) -> list[str]:
    """The QUOTAS to which a case counts."""
    told = (
        elementwise and case.dtype == "bfloat16" and case.tokens % 16 != 0,
        bool(case.alias) and not case.overlap and case.calls > 2, case.overlap, bool(case.lengths), 1 in case.lengths,
        0 in case.lengths, "other" in case.between, "heads" in case.between, "forget" in case.between, case.calls > 2,
        case.initial, bool(case.groups), bool(case.layouts), not case.loss, case.step, bool(case.frozen),
    )  # fmt: skip
    return [name for name, holds in zip(QUOTAS, told, strict=True) if holds]


@dataclass
class Result:
    """Counts, worst errors and failures of a run.

    rows: for each (structure, dtype) the number of cases, of calls and of undecided cases, and the worst error with its
    quantity and case. quotas: the number of cases of each of QUOTAS. seeds: of the runs. failures: dicts, each with the
    script that repeats it. void: the number of draws whose oracle exceeds the dtype; they are not cases. residues: the
    values of T modulo RESIDUES that occurred.
    """

    device: str
    backend: str
    rows: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    quotas: dict[str, int] = field(default_factory=lambda: dict.fromkeys(QUOTAS, 0))
    seeds: list[int] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    undecided: list[dict[str, Any]] = field(default_factory=list)
    declarations: set[str] = field(default_factory=set)
    residues: set[int] = field(default_factory=set)
    void: int = 0
    refused: int = 0
    seconds: float = 0.0
    workers: int = 1
    empty: bool = True

    @property
    def ok(self) -> bool:
        """True when nothing failed."""
        return not self.failures

    @property
    def cases(self) -> int:
        """The number of cases."""
        return sum(row["cases"] for row in self.rows.values())

    def add(self, name: str, structure: str, elementwise: bool, case: Case, verdict: Verdict) -> None:
        """Count a case. name: of its declaration."""
        if verdict.status == "void":
            self.void += 1
            return
        row = self.rows.setdefault((structure, case.dtype), _row())
        row["cases"] += 1
        row["calls"] += case.calls + 1
        row["undecided"] += verdict.status == "undecided"
        self.declarations.add(name)
        self.residues.add(case.tokens % RESIDUES)
        for quota in facts(structure, elementwise, case):
            self.quotas[quota] += 1
        if verdict.status == "undecided":
            self.undecided.append({"declaration": name, "case": repr(case), "finding": str(verdict.finding)})
        if verdict.status == "right":
            for quantity, error in verdict.errors.items():
                if error > row["worst"]:
                    row |= {"worst": error, "quantity": quantity, "case": repr(case)}

    def merge(self, other: Result) -> Result:
        """Add another run's counts to this result, and return it."""
        for key, theirs in other.rows.items():
            row = self.rows.setdefault(key, _row())
            for name in ("cases", "calls", "undecided"):
                row[name] += theirs[name]
            if theirs["worst"] > row["worst"]:
                row |= {name: theirs[name] for name in ("worst", "quantity", "case")}
        for quota, count in other.quotas.items():
            self.quotas[quota] += count
        self.seeds += [s for s in other.seeds if s not in self.seeds]
        self.failures += other.failures
        self.undecided += other.undecided
        self.declarations |= other.declarations
        self.residues |= other.residues
        self.void += other.void
        self.refused += other.refused
        self.seconds += other.seconds
        self.workers = max(self.workers, other.workers)
        self.empty = self.empty and other.empty
        return self

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON; errors that are not finite are the string "inf"."""
        return {
            "machine": machine(self.device), "commit": commit(), "device": self.device, "backend": self.backend,
            "seeds": self.seeds, "seconds": round(self.seconds, 1), "workers": self.workers, "cases": self.cases,
            "calls": sum(row["calls"] for row in self.rows.values()),
            "declarations": len(self.declarations), "residues": len(self.residues),
            "empty_sequences_are_taken": self.empty, "void": self.void, "refused_declarations": self.refused,
            "counts": self.quotas,
            "rows": [{"structure": s, "dtype": d, **_finite(row)} for (s, d), row in sorted(self.rows.items())],
            "undecided": self.undecided, "failures": [_finite(f) for f in self.failures],
        }  # fmt: skip

    def __str__(self) -> str:
        verdict = "no failures" if self.ok else f"{len(self.failures)} failures"
        lines = [
            f"{self.cases} cases over {len(self.declarations)} declarations on {self.device} ({self.backend}): "
            f"{verdict}; seeds {', '.join(map(str, self.seeds))}; {self.seconds:.0f} s, {self.workers} workers; "
            f"T takes {len(self.residues)} of {RESIDUES} residues",
            "",
            f"{'structure':<34}{'dtype':<10}{'cases':>7}{'calls':>7}{'undecided':>11}{'worst':>10}  of",
        ]
        for (structure, dtype), row in sorted(self.rows.items()):
            lines.append(
                f"{structure:<34}{dtype:<10}{row['cases']:>7}{row['calls']:>7}{row['undecided']:>11}{row['worst']:>10.1e}"
                f"  {row['quantity']}"
            )
        lines += ["", *(f"{count:>7}  {quota}" for quota, count in self.quotas.items())]
        if not self.empty:
            lines.append("         (empty sequences are refused here, so none was drawn)")
        if self.void:
            lines.append(f"{self.void:>7}  draws left out: what the oracle gives does not fit the dtype")
        for failure in self.failures:
            lines += ["", f"FAILED {failure['finding']} (seed {failure['seed']})", *failure["script"].splitlines()]
        return "\n".join(lines)


def _row() -> dict[str, Any]:
    return {"cases": 0, "calls": 0, "undecided": 0, "worst": 0.0, "quantity": "", "case": ""}


def _finite(data: dict[str, Any]) -> dict[str, Any]:
    return {k: "inf" if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()}


def machine(device: str) -> dict[str, Any]:
    """The processor and the versions of a record."""
    gpu = torch.device(device).type == "cuda"
    found = {
        "processor": torch.cuda.get_device_name() if gpu else platform.machine(),
        "python": platform.python_version(),
    }
    if gpu:
        found["cuda"] = str(torch.version.cuda)
    return found | {"versions": dict(_versions(("torch", "triton", "numpy", "dsf-zoo")))}


def _versions(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name in names:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def commit() -> str:
    """The commit of the running source, "" outside a repository."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def combined(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Records (Result.to_dict) of several runs of one commit on one machine as one. ValueError where they differ."""
    first = records[0]
    for other in records[1:]:
        for key in ("commit", "device", "backend", "machine"):
            if other[key] != first[key]:
                raise ValueError(f"records differ in {key}: {first[key]!r} and {other[key]!r}")
    seeds = [s for r in records for s in r["seeds"]]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"records share seeds, so their cases are the same: {seeds}")
    total: dict[str, Any] = dict(first)
    for key in ("cases", "calls", "declarations", "seconds", "void", "refused_declarations"):
        total[key] = sum(r[key] for r in records)
    total["seeds"] = seeds
    total["workers"] = max(r["workers"] for r in records)
    total["residues"] = max(r["residues"] for r in records)
    total["counts"] = {q: sum(r["counts"][q] for r in records) for q in first["counts"]}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for row in (x for r in records for x in r["rows"]):
        mine = rows.setdefault(
            (row["structure"], row["dtype"]), {"structure": row["structure"], "dtype": row["dtype"], **_row()}
        )
        for key in ("cases", "calls", "undecided"):
            mine[key] += row[key]
        if row["worst"] > mine["worst"]:
            mine |= {key: row[key] for key in ("worst", "quantity", "case")}
    total["rows"] = [rows[key] for key in sorted(rows)]
    for key in ("undecided", "failures"):
        total[key] = [x for r in records for x in r[key]]
    return total


def stderr(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)
