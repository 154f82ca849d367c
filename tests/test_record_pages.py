"""Whatever a page says to be made from a record of benchmarks/results/ is what that record makes."""

from __future__ import annotations

import importlib.util
import json
import re
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"<!-- (\w+)\.json -->\n(.*?)\n<!-- end of \1\.json -->", re.DOTALL)
BLOCKS = [
    (page, name, text)
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for name, text in BLOCK.findall(page.read_text(encoding="utf-8"))
]
MAKERS = {  # else the script of the record's name
    "gpu_matrix": "gpu_page", "layers": "layers_page", "parallel": "parallel_page",
    "parallel_2_h200": "parallel_page", "parallel_2_layers": "parallel_page", "parallel_4_h200": "parallel_page",
    "parallel_4_projected": "parallel_page",
    "models_h200": "models", "models_short": "models", "models_compiled": "models",
    "beside_scans": "beside", "beside_tiny": "beside",
    "hybrid_2": "hybrid", "hybrid_4_8k": "hybrid", "hybrid_4_8k_graphed": "hybrid",
    "hybrid_4_32k": "hybrid", "hybrid_4_128k": "hybrid", "last_tokens_decays": "last_tokens",
}  # fmt: skip
WHOLE_PAGES = ["cpu_page", "lens_page"]


def load(name: str) -> ModuleType:
    """A script of benchmarks/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("page", "name", "text"), BLOCKS, ids=[name for _, name, _ in BLOCKS])
def test_a_block_is_what_its_record_makes(page: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    data = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    assert load(MAKERS.get(name, name)).page(data) == text, f"{page.name}: --page results/{name}.json --into it"


@pytest.mark.parametrize("name", WHOLE_PAGES)
def test_a_whole_page_is_what_its_record_makes(name: str) -> None:
    maker = load(name)
    assert maker.PAGE.read_text() == maker.page(json.loads(maker.RESULTS.read_text()))


def test_blocks_are_found() -> None:
    made = {name for _, name, _ in BLOCKS}
    assert {"gpu_matrix", "gpu_scan", "gpu_decode", "gpu_accuracy", "layers", "parallel"} <= made


def test_a_hybrid_s_run_goes_on_from_its_first_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the same conditions, of as many steps, and where the other half is missing."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    hybrid, facts, one = load("hybrid"), {"device": "cpu", "tokens": 301}, {"losses": [3.0, 2.0], "ms": 1.0}
    asked = Namespace(json=tmp_path / "record.json", steps=2)
    assert hybrid.halves(asked, facts) == {}
    for who in ("one", "ranks"):
        hybrid.save(asked, {**facts, who: one})
        assert hybrid.halves(asked, facts) == {who: one}
        assert hybrid.halves(asked, {**facts, "tokens": 300}) == {}
        assert hybrid.halves(Namespace(json=asked.json, steps=3), facts) == {}
    hybrid.save(asked, {**facts, "one": one, "ranks": one})
    assert hybrid.halves(asked, facts) == {}


def test_a_hybrid_s_text_is_the_same_on_every_rank_and_can_be_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    hybrid = load("hybrid")
    monkeypatch.setattr(hybrid, "VOCABULARY", 50)
    ids = hybrid.text(3, 4000, "cpu")
    assert ids.shape == (3, 4000) and bool((ids == hybrid.text(3, 4000, "cpu")).all())
    counts = ids.flatten().bincount(minlength=50)
    assert len(counts) == 50 and counts[0] > 5 * counts[25]
    pairs = (ids[:, :-1] * 50 + ids[:, 1:]).flatten().bincount(minlength=2500).view(50, 50)
    told = pairs.sort(1, descending=True).values[:, : hybrid.WAYS].sum() / pairs.sum()
    free = counts.sort(descending=True).values[: hybrid.WAYS].sum() / counts.sum()
    assert told > 0.5 and told > free + 0.1  # what follows a word says more than how often words come


def test_halves_of_a_hybrid_s_run_are_joined_over_the_steps_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    hybrid, facts = load("hybrid"), {"device": "cpu", "torch": "", "commit": "c", "tokens": 301}
    one = {**facts, "layout": "contiguous", "ranks_count": 1, "one": {"losses": [4.0, 3.0, 9.0], "ms": 6.0}}
    ranks = {**facts, "layout": "headtail", "ranks_count": 2, "ranks": {"losses": [4.0, 3.3], "ms": 4.0}}
    found = hybrid.joined(ranks, one)
    assert found["layout"] == "headtail" and found["apart"] == pytest.approx(0.3 / 3.3) and found["strong"] == 0.75
    for half in (found["one"], found["ranks"]):
        half["peak_mib"] = None
    table = hybrid.page(found)
    assert "loss after 2 steps" in table and "| 3.0000 |" in table and "| 3.3000 |" in table
    with pytest.raises(SystemExit, match="commit"):
        hybrid.joined({**ranks, "commit": "d"}, one)
