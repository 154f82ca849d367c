"""The adversary: random calls of random declarations, compared with the float64 oracle; failures are shrunk."""

from dsf.fuzz.case import Case
from dsf.fuzz.declaration import Declaration
from dsf.fuzz.judge import attempt
from dsf.fuzz.loop import run
from dsf.fuzz.poison import poisoned
from dsf.fuzz.report import Result, combined
from dsf.fuzz.verdict import Finding, Verdict

__all__ = ["Case", "Declaration", "Finding", "Verdict", "Result", "attempt", "combined", "poisoned", "run"]
