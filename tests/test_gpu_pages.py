"""The tables of docs/performance.md say what benchmarks/results holds."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_table_of_the_matrix_families_is_the_record():
    spec = importlib.util.spec_from_file_location("gpu_page", ROOT / "benchmarks" / "gpu_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    data = json.loads((ROOT / "benchmarks" / "results" / "gpu_matrix.json").read_text())
    text = (ROOT / "docs" / "performance.md").read_text()
    assert f"<!-- gpu_matrix.json -->\n{module.page(data)}\n<!-- end of gpu_matrix.json -->" in text
    assert {r["run"] for r in data["rows"]} <= data["runs"].keys()
