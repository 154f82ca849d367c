"""docs/cpu.md from benchmarks/results/cpu.json: the page says what was measured, nothing else.

python benchmarks/cpu_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
PAGE = ROOT / "docs" / "cpu.md"

TEXT = """# Speed and memory on a CPU

Made by `python benchmarks/cpu.py` (or `make bench`) from `benchmarks/results/cpu.json`; a test holds the two together.

Forward and backward, float32, {threads} threads, Python {python}, {versions}; commit{s} {commits}.
Both sides ran in one process on the same inputs, in turns. Times are medians of several runs; a side that takes minutes
ran once, without a peak. *error* is that of the worst head and block of 64 tokens against the float64 recurrence, on
the first 512 tokens. *peak* is the most memory that tensors beside the inputs take at one time, counted at every
allocation. *ratio* is the other side's time over ours, with the project's target in brackets.

| work | shape | who | time (ms) | peak (MiB) | error | ratio |
|---|---|---|---:|---:|---:|---:|
{rows}

`value_decay` runs by chunks and has no implementation elsewhere; *dsf, scan* is the scan form of the same declaration.
The other implementations are the pure-torch paths that run without a GPU: `torch_chunk_gated_delta_rule`,
`mamba2_chunk_scan` and `mamba_selective_scan` of transformers, and the parallel scan of mambapy. The backward pass of
`mamba_selective_scan` is quadratic in T (it slices the whole sequence at every token), so its ratio depends on T.
"""


def page(data: dict[str, Any]) -> str:
    """The page as Markdown, from the JSON that benchmarks/cpu.py writes."""
    machine = data["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    rows = [_row(result, side) for result in data["results"] for side in result["seconds"]]
    commits = list(dict.fromkeys(f"`{r['commit'][:9]}`" for r in data["results"]))
    facts = {key: machine[key] for key in ("threads", "python")}
    return TEXT.format(
        rows="\n".join(rows), versions=versions, commits=", ".join(commits), s="s"[: len(commits) - 1], **facts
    )


def _row(result: dict[str, Any], side: str) -> str:
    ours = side == "dsf"
    ratio = "" if ours else f"{result['speedup'][side]:.2f} ({result['target'][side]:g})"
    peak = result["peak_mib"].get(side)
    cells = [
        result["case"] if ours else "", result["shape"] if ours else "", side, f"{1e3 * result['seconds'][side]:,.1f}",
        "" if peak is None else f"{peak:.0f}", f"{result['error'][side]:.1e}", ratio,
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
