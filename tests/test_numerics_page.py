"""The accuracy table of docs/numerics.md has the rows of benchmarks/accuracy.py, and its errors are those of now."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[1] / "benchmarks" / "accuracy.py"
spec = importlib.util.spec_from_file_location("accuracy", PATH)
assert spec is not None and spec.loader is not None
accuracy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(accuracy)


def written() -> dict[str, list[float]]:
    """The page's errors by recurrence."""
    lines = accuracy.PAGE.read_text().splitlines()
    start = lines.index(accuracy.HEADER[0]) + len(accuracy.HEADER)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[start : start + len(accuracy.CASES)]
    ]
    return {row[0].strip("`"): [float(x) for x in row[2:]] for row in rows}


def test_the_page_has_every_case() -> None:
    assert list(written()) == list(accuracy.CASES)


@pytest.mark.parametrize("name", ["gated_deltanet", "s6", "gla"])
@pytest.mark.parametrize("column", [0, 1])
def test_what_the_page_says_is_reached(name: str, column: int) -> None:
    # another processor sums in another order: the page's digits may move, by less than this
    assert accuracy.worst(name, accuracy.TYPES[column], 1024) <= 10 * written()[name][column]
