"""benchmarks/models.py without a GPU: how far two curves are apart, the table, a process that dies."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def models(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("models_benchmark", ROOT / "benchmarks" / "models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_curves_apart(models):
    base = [4.0] * 20
    off = [*base[:5], 4.4, *base[6:]]
    found = models.follow([{"losses": off, "fingerprint": [1]}, {"losses": base, "fingerprint": [2]}])
    assert found["worst"] == pytest.approx(0.1)
    assert found["worst_of_tens"] == pytest.approx(0.01)
    assert not found["same_start"]


def test_the_table_holds_both_kinds_of_rows_and_what_is_missing(models):
    same = {"mixer": "ssd", "parameters": 1e6, "mfu": 0.5, "peak_mib": 10.0}
    records = [
        {"kind": "training", "who": "ours", "tokens_per_second": 200.0, **same},
        {"kind": "training", "who": "fla", "tokens_per_second": 100.0, **same},
        {"kind": "decoding", "who": "ours", "batch": 1, "ms_a_token": 2.0, "floor_ms": 1.0, "graph": True, **same},
    ]
    text = models.table({"records": records, "failed": [{"case": "a b", "why": "no"}], "left": ["c d"]})
    first, second = text.splitlines()[1:3]
    assert "1.00" in first and "2.000g" in first and "2.00" in first
    assert "0.50" in second and "g" not in second
    assert "failed: a b: no" in text and "left out: c d" in text
