"""Two GPUs: training steps from CUDA graphs (tests/ranks_graphed.py), `dsf train` with them, and compiled layers on
packed sequences and compiled models (tests/ranks_compiled.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks_compiled import MODELS, NAMES
from ranks_graphed import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
HERE = Path(__file__).parent


def torchrun(*words, folder):
    """Run a command on two ranks in a folder."""
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    return subprocess.run(started, cwd=folder, capture_output=True, text=True, timeout=400)


def of_two(script, folder):
    """What each rank of a script found."""
    done = torchrun(str(HERE / script), str(folder), folder=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return of_two("ranks_graphed.py", tmp_path_factory.mktemp("graphed"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return of_two("ranks_compiled.py", tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("name", CASES)
def test_steps_from_a_graph_are_those_without_one(found, name):
    for rank in found:
        assert rank[name].get("equal"), rank[name]
        assert rank[name]["graphs"] == len(CASES[name].get("lengths", (0,)))


@pytest.mark.parametrize("words", [("--cp", "2"), ("--tp", "2"), ()], ids=str)
def test_dsf_train_with_graphs_is_without(tmp_path, words):
    pytest.importorskip("transformers")
    from safetensors.torch import load_file

    text = "the quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 400
    (tmp_path / "text.txt").write_text(text)
    for name, more in (("graph", ()), ("eager", ("--no-graph",))):
        done = torchrun(
            "-m", "dsf.analysis.cli", "train", "--mixer", "gated_deltanet", "--text", "text.txt", "--steps", "8",
            "--seq", "64", "--batch", "4", "--device", "cuda", "--bf16", "--out", name, *words, *more, folder=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("graph", "eager"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", [*NAMES, *MODELS])
def test_compiled_layers_and_models_over_two_gpus(compiled, name):
    for rank in compiled:
        assert "failed" not in rank[name], rank[name]
        assert rank[name]["eager"] < 1e-4 and rank[name]["compiled"] < 1e-4, rank[name]
