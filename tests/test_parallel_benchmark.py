"""benchmarks/parallel.py without ranks: its projection, what is folded, its tables."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from dsf import mixers
from dsf.kernels.affine import Frame
from dsf.parallel import Link

ROOT = Path(__file__).resolve().parents[1]
NEAR = Link(50e-6, 1e9)
ROW = {
    "name": "gated_deltanet", "tokens_a_rank": 64, "heads": 4, "n": 8, "p": 16,
    "ranks_ms": {"forward": 2.0, "both": 5.0}, "part_ms": {"forward": 1.0, "both": 4.0}, "pieces_ms": {"M": 0.25},
    "folds_ms": {"2": [0.1, 0.2], "4": [0.4, 0.6], "8": [1.0, 1.5]},
}  # fmt: skip


def module(monkeypatch, name):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module(name)


def test_more_ranks_add_the_map_the_exchange_and_the_fold(monkeypatch):
    """Of a gather: (W - 1)(f + m) bytes forward, from two ranks none of m, and (W - 1) c backward."""
    model = module(monkeypatch, "parallel_model")
    f, m = 4 * 4 * 8 * 16, 4 * 4 * 8 * 8
    found = model.projection(mixers.gated_deltanet, ROW, 2, NEAR)
    assert list(found) == ["4", "8", "64", "1024"]
    four = found["4"]
    sent = 1e3 * (3 * (f + m) - f) / NEAR.bandwidth
    back = 1e3 * (3 * f - f) / NEAR.bandwidth
    assert four["exchange"] == "gather"
    assert four["ms"]["forward"] == pytest.approx(2.0 + 0.25 + 0.3 + sent, rel=1e-9)
    assert four["ms"]["both"] == pytest.approx(5.0 + 0.25 + 0.3 + sent + 0.4 + back, rel=1e-9)
    assert four["weak"]["both"] == pytest.approx(4.0 / four["ms"]["both"])
    from_four = model.projection(mixers.gated_deltanet, ROW, 4, NEAR)["8"]  # has its M's already
    more = 1e3 * 4 * (f + m) / NEAR.bandwidth
    assert from_four["ms"]["forward"] == pytest.approx(2.0 + 0.6 + more, rel=1e-9)


def test_a_host_that_takes_longer_is_what_is_projected(monkeypatch):
    """Its M and folds are added to what it took; the GPU's own time does not change that."""
    model = module(monkeypatch, "parallel_model")
    busy = ROW | {"ranks_host_ms": {"forward": 2.0, "both": 4.0}, "pieces_ms": {"M": 0.25, "M_host": 7.0}}
    busy["folds_host_ms"] = {"2": [0.2, 0.3], "4": [0.5, 0.8], "8": [0.5, 0.8]}
    four = model.projection(mixers.gated_deltanet, busy, 2, NEAR)["4"]
    assert four["ms"] == pytest.approx({"forward": 2.0 + 7.0 + 0.3, "both": 4.0 + 7.0 + 0.3 + 0.5}, rel=1e-9)
    eight = model.projection(mixers.gated_deltanet, busy, 4, NEAR)["8"]
    assert eight["ms"] == model.projection(mixers.gated_deltanet, ROW, 4, NEAR)["8"]["ms"]


def test_folds_between_and_beyond_those_measured(monkeypatch):
    model = module(monkeypatch, "parallel_model")
    measured = {"2": [1.0, 2.0], "8": [4.0, 8.0], "4": [2.0, 4.0]}
    assert model.folded(measured, 4) == pytest.approx([2.0, 4.0])
    assert model.folded(measured, 6) == pytest.approx([3.0, 6.0])
    assert model.folded(measured, 16) == pytest.approx([8.0, 16.0])


@pytest.mark.parametrize(("name", "heads"), [("gather", 5), ("transpose", 2)])
def test_a_fold_is_as_long_as_the_exchange_s(name, heads, monkeypatch):
    """W - 2 products of maps in either direction, the first rank's map being its F; of all heads or of a share."""
    model = module(monkeypatch, "parallel_model")
    shapes = []
    into, back = Frame.into, Frame.back

    def told(self, move, written, state):
        shapes.append(("into", state.shape[1]))
        return into(self, move, written, state)

    def told_back(self, move, g, before, after):
        shapes.append(("back", g.shape[1]))
        return back(self, move, g, before, after)

    monkeypatch.setattr(Frame, "into", told)
    monkeypatch.setattr(Frame, "back", told_back)

    def clock(call):
        shapes.clear()
        call()
        assert {size for _, size in shapes} == {heads}
        return (float(len(shapes)), 0.0)

    frame = model.frame_of(mixers.gated_deltanet.spec, 8, 16)
    assert model.fold_times(frame, 5, 4, name, clock, torch.device("cpu"))[0] == (2.0, 2.0)
    assert model.fold_times(frame, 5 if name == "gather" else 10, 5, name, clock, torch.device("cpu"))[0] == (3.0, 3.0)


def test_a_run_is_held_to_the_rows_of_its_sizes(monkeypatch):
    model = module(monkeypatch, "parallel_model")
    other = {**ROW, "ranks_ms": {"forward": 9.0, "both": 9.0}, "heads": 2}
    fitted = {
        "machine": {"ranks": 2, "commit": "abc"},
        "link": NEAR._asdict(),
        "rows": [other, ROW, {"name": "failed"}],
    }
    told = model.projection(mixers.gated_deltanet, ROW, 2, NEAR)["4"]["ms"]
    row = {**ROW, "ranks_ms": {"forward": 2 * told["forward"], "both": told["both"]}}
    model.compared(row, fitted, mixers.gated_deltanet, 4)
    assert row["off"] == pytest.approx({"forward": 2.0, "both": 1.0})
    assert row["fitted"] == {"ranks": 2, "commit": "abc"}
    fewer = dict(ROW)
    model.compared(fewer, fitted, mixers.gated_deltanet, 2)
    assert "off" not in fewer


def test_the_tables_show_graphs_projections_exchanges_and_what_failed(monkeypatch):
    page = module(monkeypatch, "parallel_page").page
    record = json.loads((ROOT / "benchmarks" / "results" / "parallel.json").read_text())
    record.pop("graphs")
    plain = page(record)
    assert "CUDA graphs" not in plain and "projected" not in plain and "fla" not in plain
    first = record["rows"][0]
    first |= {"projected_ms": {"forward": 1.5, "both": 2.5}, "off": {"forward": 1.25, "both": 0.75}}
    same = {"name": first["name"], "tokens_a_rank": first["tokens_a_rank"]}
    record["graphs"] = [{**same, "ranks_ms": {"forward": 0.11}, "refused": {"ranks both": "no room"}}]
    told = {"ranks_ms": {"forward": 0.33, "both": 0.44}, "model_ms": 0.5, "bytes": 6000, "back": 7000, "rounds": 2}
    record["exchanges"] = [{**same, "chosen": "relay", "exchanges": {"gather": told, "relay": {**told, "failed": "x"}}}]
    record["peers"] = [{**same, "ranks_ms": {"forward": 0.77, "both": 0.88}, "strong": {"forward": 0.5, "both": 0.25}}]
    text = page(record)
    sizes = f"{first['heads']} x {first['n']} x {first['p']} | {first['tokens_a_rank']:,}"
    line = next(x for x in text.splitlines() if x.startswith(f"| {first['name']} | {sizes}"))
    assert "| 0.11 / – |" in line and "| 1.50 / 2.50 | 1.25 / 0.75 |" in line
    assert "| gather | 0.33 / 0.44 |" in text and "| relay (chosen) |" in text and "| 6,000 / 7,000 |" in text
    assert "| 0.77 / 0.88 |" in text and "| 50 % / 25 % |" in text
    assert "no graph of ranks both: no room" in text
