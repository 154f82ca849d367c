"""docs/cpu.md and docs/transformer-lens.md say what benchmarks/results/cpu.json and lens.json hold."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", ["cpu_page", "lens_page"])
def test_the_page_is_made_from_the_measurements(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(json.loads(module.RESULTS.read_text()))
