"""docs/cpu.md says what benchmarks/results/cpu.json holds."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_is_made_from_the_measurements() -> None:
    spec = importlib.util.spec_from_file_location("cpu_page", ROOT / "benchmarks" / "cpu_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(json.loads(module.RESULTS.read_text()))
