"""`dsf bench`: what it times, what it counts, what it refuses."""

import json

import pytest
import torch
from typer.testing import CliRunner

from dsf import InputError
from dsf.analysis import bench as engine
from dsf.analysis._cli_app import app
from dsf.analysis.subjects import find

SMALL = engine.Sizes(tokens=24, heads=2, n=4, p=4)


def test_a_recurrence_its_layers_and_its_peer_have_their_rows():
    found = engine.bench(find("softmax_attention"), SMALL, layer=True, seconds=0.01)
    assert [r.who for r in found.rows] == ["dsf", "Layer", "SoftmaxAttention (paper)", "torch SDPA"]
    for row in found.rows:
        assert row.forward > 0 and row.both > 0 and row.first > 0 and row.kept > 0 and not row.failed, row
    assert found.rows[0].decode > 0 and found.floor > 0 and found.limited_by in ("bytes", "operations")


def test_peers_that_are_not_here_are_named():
    found = engine.bench(find("gla"), SMALL, seconds=0.01)
    assert [r.who for r in found.rows] == ["dsf"] and found.missing == ["fla"]


def test_what_forward_keeps_is_counted_once_and_without_what_was_there():
    x = torch.randn(1024, requires_grad=True)
    kept = engine.Kept([x])
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda y: y):
        y = x.exp()  # keeps its output
        z = (y * y).sum()  # keeps that output twice more
    assert kept.bytes == y.untyped_storage().nbytes() and z.requires_grad


@pytest.mark.parametrize(
    ("dtype", "taken"), [("float64", torch.float64), ("float32", torch.float32), ("bfloat16", torch.float32)]
)
def test_the_floor_is_of_the_faster_product(monkeypatch, dtype, taken):
    """Else calls in bfloat16 took less than their floor on CPUs that have no such products."""
    ms = {torch.float64: 4.0, torch.float32: 2.0, torch.bfloat16: 40.0}
    monkeypatch.setattr(engine, "median", lambda call, device, seconds: ms[call().dtype])
    product = engine.rates(SMALL.model_copy(update={"dtype": dtype}))[1]
    assert product == 2 * 512**3 / ms[taken] / 1e9


def test_a_peer_that_refuses_is_a_row_that_says_so(monkeypatch):
    from dsf.analysis import peers

    def refuse(who, recurrence, x):
        raise ValueError("not with this Triton")

    monkeypatch.setattr(peers, "operator", refuse)
    row = engine.peer_row("fla", find("gla"), SMALL, 0.01)
    assert row.failed == "ValueError: not with this Triton" and row.forward is None


def test_the_command_prints_a_table_or_json_for_a_recurrence_of_ones_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import dsf\nfrom dsf import Key, System, Value\n"
        "@dsf.recurrence\ndef mine(q: Key, k: Key, v: Value): return System(A=1, B=k * v, C=q)\n"
    )
    sizes = ["--tokens", "16", "--heads", "2", "--n", "4", "--p", "4", "--seconds", "0.01", "--device", "cpu"]
    shown = CliRunner().invoke(app, ["bench", f"{path}:mine", *sizes, "--layer"])
    assert shown.exit_code == 0, shown.output
    assert "Layer" in shown.stdout and "floor" in shown.stdout and "16 tokens, 2 heads" in shown.stdout
    data = json.loads(CliRunner().invoke(app, ["bench", f"{path}:mine", *sizes, "--json"]).stdout)
    assert engine.Bench.model_validate(data).model_dump(mode="json", by_alias=True) == data
    assert data["schema"] == "dsf.bench/1" and data["rows"][0]["who"] == "dsf" and data["sizes"]["n"] == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_and_an_unknown_type_are_refused():
    with pytest.raises(InputError, match="no CUDA GPU"):
        engine.bench(find("gla"), engine.Sizes(device="cuda"))
    with pytest.raises(InputError, match="dtypes are float64"):
        engine.bench(find("gla"), engine.Sizes(dtype="int8"))


def test_an_odd_number_of_keys_in_pairs_is_refused_and_not_rounded():
    with pytest.raises(InputError, match="--n 3: mamba3 takes the Key axis in pairs"):
        engine.bench(find("mamba3"), engine.Sizes(n=3, tokens=8))
