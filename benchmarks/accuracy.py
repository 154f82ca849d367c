"""The table of docs/numerics.md: errors of the chunk form against the float64 oracle, on one example a recurrence.

python benchmarks/accuracy.py
"""

from __future__ import annotations

import re
from pathlib import Path

from dsf import mixers
from dsf.checking.measure import TOLERANCE
from dsf.testing import Example, errors

PAGE = Path(__file__).resolve().parents[1] / "docs" / "numerics.md"
TYPES = ("float64", "float32", "bfloat16")
CASES: dict[str, dict[str, str]] = {
    "gated_deltanet": {"alpha": "mixed", "beta": "mixed"},
    "deltanet": {"beta": "mixed", "k": "repeated"},
    "kda": {"g": "mixed"},
    "gla": {"g": "saturated"},
    "ssd": {"dt": "saturated"},
    "mlstm": {"f": "saturated", "i": "wide"},
    "s6": {"dt": "saturated"},
    "rwkv7": {},
    "linear_attention": {},
    "qlstm": {"f": "saturated"},
}
HEADER = ["| recurrence | inputs | float64 | float32 | bfloat16 |", "|---|---|---|---|---|"]


def worst(name: str, dtype: str, tokens: int) -> float:
    """The worst error over y, the final state and all gradients, over heads and blocks of 16 tokens."""
    example = Example(tokens=tokens, heads=2, n=8, p=8, dtype=dtype, regimes=CASES[name], initial=True)
    return max(errors(mixers.get(name).recurrence, "forms", "chunk", example).values())


def table(tokens: int = 1024) -> list[str]:
    """Lines of the table."""
    rows = []
    for name, regimes in CASES.items():
        inputs = ", ".join(f"{k} {v}" for k, v in regimes.items()) or "plain"
        found = [worst(name, dtype, tokens) for dtype in TYPES]
        rows.append(f"| `{name}` | {inputs} | " + " | ".join(f"{x:.1e}" for x in found) + " |")
        assert all(x <= TOLERANCE[dtype] for x, dtype in zip(found, TYPES, strict=True)), rows[-1]
    return HEADER + rows


if __name__ == "__main__":
    text = PAGE.read_text()
    pattern = re.escape(HEADER[0]) + r"\n(\|.*\n)+"
    assert re.search(pattern, text)
    PAGE.write_text(re.sub(pattern, lambda _: "\n".join(table()) + "\n", text))
