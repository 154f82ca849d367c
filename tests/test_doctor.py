"""`dsf doctor`: what it finds, that it finds what is broken, and what it says of that."""

from __future__ import annotations

import importlib.metadata
import json

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from interpreted import INTERPRETED
from typer.testing import CliRunner

import dsf
from dsf.analysis import doctor
from dsf.analysis._cli_app import app
from dsf.mixers import ZOO

KEYS = ["schema", "ok", "versions", "gpus", "backends", "caches", "environment", "runs", "warnings"]


def run(*args: str, code: int = 0):
    result = CliRunner().invoke(app, ["doctor", *args], env={"COLUMNS": "160"})
    assert result.exit_code == code, f"{result.exit_code}: {result.output} {result.exception!r}"
    return result


@pytest.fixture(scope="module")
def found():
    return json.loads(run("--json").stdout)


@pytest.fixture
def one_probe(monkeypatch):
    monkeypatch.setattr(doctor, "PROBES", ("mingru",))
    monkeypatch.setattr(doctor, "INTERPRETED", ())


def test_json_has_everything(found):
    assert doctor.Examination.model_validate(found).to_dict() == found
    assert list(found) == KEYS and found["schema"] == "dsf.doctor/1" and found["ok"] is True
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert found["versions"]["dsf"].startswith(dsf.__version__)
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert {c["of"] for c in found["caches"]} >= {"generated source", "Triton"}


def test_every_torch_form_is_called_and_right(found):
    torch_lines = [x for x in found["backends"] if x["backend"] == "torch" and x["device"] == "cpu"]
    assert [x["probe"] for x in torch_lines] == list(doctor.PROBES)
    for x in torch_lines:
        assert x["status"] == "works" and 0 < x["error"] < x["allowed"] == 1e-4


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="kernels run here")
def test_a_backend_that_cannot_run_says_why_and_breaks_nothing(found):
    (line,) = [x for x in found["backends"] if x["backend"] == "triton"]
    assert line["probe"] == "all" and line["status"] == "cannot run" and found["ok"]
    assert line["why"].startswith(("its kernels need CUDA tensors", "triton is not installed"))


@pytest.mark.gpu
def test_kernels_work_on_a_gpu(found):
    lines = [x for x in found["backends"] if x["backend"] == "triton" and x["device"] == "cuda:0"]
    assert [x["probe"] for x in lines] == list(doctor.PROBES) and all(x["status"] == "works" for x in lines)
    assert found["gpus"][0]["memory_gib"] > 1 and found["gpus"][0]["capability"].startswith("sm_")


def test_every_mixer_and_structure_has_its_row(found):
    assert sorted(n for row in found["runs"] for n in row["mixers"]) == sorted(e.name for e in ZOO)
    for row in found["runs"]:
        for name in row["mixers"]:
            assert next(e for e in ZOO if e.name == name).recurrence.spec.structure == row["structure"]
        plan = next(e for e in ZOO if e.name == row["mixers"][0]).recurrence.plan(T=2048, H=16)
        assert row["on"]["cpu"]["kernel"] == plan.kernel and row["on"]["cpu"]["backend"] == "torch"


def test_the_table_shows_whatever_json_says(one_probe, found):
    """Every word and number: of the calls, which are timed anew, what was called and whether it works."""

    def leaves(data):
        if isinstance(data, dict):
            return [x for value in data.values() for x in leaves(value)]
        return [x for value in data for x in leaves(value)] if isinstance(data, list) else [str(data)]

    out = " ".join(run().stdout.split())
    for part in ("versions", "gpus", "caches", "warnings"):
        assert [x for x in leaves(found[part]) if x not in ("True", "False", "None") and x not in out] == []
    assert {"mingru", "works"} <= set(out.split())


def test_quick_makes_no_call(monkeypatch):
    monkeypatch.setattr(doctor, "_probe", None)
    found = json.loads(run("--quick", "--json").stdout)
    assert found["backends"] == [] and found["ok"] and found["runs"]
    assert run("--quick").stdout.rstrip().endswith("No calls were made.")


def test_a_wrong_result_is_broken_and_exits_with_one(one_probe, monkeypatch):
    honest = dsf.Recurrence.__call__

    def rigged(self, *args, form="auto", **kwargs):
        y, state = honest(self, *args, form=form, **kwargs)
        return (y * 1.001 if form == "chunk" else y), state

    monkeypatch.setattr(dsf.Recurrence, "__call__", rigged)
    out = run(code=1).stdout
    assert "broken" in out and "is off by" in out
    assert out.rstrip().endswith("Broken: mingru on torch, cpu")


def test_an_exception_is_broken_too_and_stops_nothing(one_probe, monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("PTX was compiled with\nan unsupported toolchain")

    monkeypatch.setattr(dsf.Recurrence, "__call__", failing)
    found = json.loads(run("--json", code=1).stdout)
    line = found["backends"][0]
    assert line["status"] == "broken" and line["why"] == "RuntimeError: PTX was compiled with an unsupported toolchain"
    assert not found["ok"] and found["runs"]


def test_a_planner_that_fails_is_shown(one_probe, monkeypatch):
    monkeypatch.setattr(dsf.Recurrence, "plan", lambda *_, **__: 1 / 0)
    found = json.loads(run("--json", code=1).stdout)
    assert found["runs"][0]["on"]["cpu"]["refused"] == "ZeroDivisionError: division by zero"


def test_caches_that_cannot_be_written_are_warned_of(one_probe, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSF_CACHE_DIR", str(tmp_path / "file" / "below"))
    found = json.loads(run("--quick", "--json").stdout)
    cache = next(c for c in found["caches"] if c["of"] == "generated source")
    if cache["path"].startswith(str(tmp_path / "file")):  # where nothing else is chosen in its place
        assert not cache["writable"] and any("cannot be written" in w for w in found["warnings"])
    monkeypatch.setenv("DSF_CACHE_DIR", str(tmp_path / "new" / "below"))
    found = json.loads(run("--quick", "--json").stdout)
    assert next(c for c in found["caches"] if c["of"] == "generated source")["writable"]
    assert not (tmp_path / "new").exists()


def test_variables_that_matter_are_shown_and_unknown_ones_of_ours_said_to_be(monkeypatch):
    monkeypatch.setenv("DSF_VALIDATES", "1")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    found = json.loads(run("--quick", "--json").stdout)
    assert found["environment"]["DSF_VALIDATES"]["meaning"] == "nothing that dsf knows"
    assert found["environment"]["CUDA_LAUNCH_BLOCKING"]["value"] == "1"
    assert any(w.startswith("CUDA_LAUNCH_BLOCKING") for w in found["warnings"])


def test_releases_that_were_not_tried_are_said(monkeypatch):
    asked = ["torch>=99", "numpy>=1", "triton>=3.2; sys_platform == 'nowhere'", "typer>=99; extra == 'cli'"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: asked)
    (said,) = doctor._untried()
    assert said.startswith(f"torch {importlib.metadata.version('torch')} was not tried; dsf asks for >=99")
    monkeypatch.setattr(doctor, "_import_triton", lambda: "ImportError: libcuda.so.1")
    found = doctor.examine(calls=False)
    assert not found.ok and "triton does not import: ImportError: libcuda.so.1" in found.warnings


def test_devices_that_kernels_refuse_are_warned_of():
    off = doctor.Choice(form="chunk", backend="torch", kernel="WY chunks", refused="a GPU of sm_75 is too old")
    on = doctor.Choice(form="chunk", backend="triton", kernel="delta", refused="")
    cpu = doctor.Choice(form="chunk", backend="torch", kernel="WY chunks", refused="")
    rows = [{"cpu": cpu, "cuda:0": off, "cuda:1": on}, {"cpu": cpu, "cuda:0": off, "cuda:1": off}]
    (said,) = doctor._refusals([doctor.Structure(structure="decay", mixers=[], on=row) for row in rows])
    assert said == "cuda:0: nothing runs on triton (a GPU of sm_75 is too old); the torch forms run there"
