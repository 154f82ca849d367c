"""The tables of docs/performance.md say what benchmarks/results holds."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_page_shows(name, page):
    """Checks that docs/performance.md has the record's table; returns the record."""
    data = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    text = (ROOT / "docs" / "performance.md").read_text()
    assert f"<!-- {name} -->\n{page(data)}\n<!-- end of {name} -->" in text
    return data


def test_the_table_of_the_matrix_families_is_the_record():
    data = assert_page_shows("gpu_matrix.json", load("gpu_page").page)
    assert {r["run"] for r in data["rows"]} <= data["runs"].keys()


def test_the_table_of_layers_is_the_record():
    assert_page_shows("layers.json", load("layers_page").page)


@pytest.mark.parametrize("name", ["gpu_accuracy", "gpu_decode", "gpu_scan"])
def test_the_other_tables_are_their_records(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    assert_page_shows(f"{name}.json", load(name).page)
