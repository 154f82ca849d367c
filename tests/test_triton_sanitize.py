"""The calls of benchmarks/sanitize.py reach every kernel: noted in Triton's interpreter, not run."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from interpreted import interpreted

from dsf.fuzz import Case, attempt

pytestmark = interpreted
PATH = Path(__file__).resolve().parents[1] / "benchmarks" / "sanitize_calls.py"


@pytest.fixture(scope="module")
def made():
    """The module of the calls."""
    with pytest.MonkeyPatch.context() as now:
        now.syspath_prepend(PATH.parent)
        yield importlib.import_module(PATH.stem)
    for name in (PATH.stem, "sanitize_layers", "sanitize_unwritten"):
        sys.modules.pop(name, None)


def test_every_kernel_that_is_launched_is_reached(made):
    kernels, unread = made.launched()
    found = made.reached()
    assert not unread and len(kernels) > 40
    assert set(found) == kernels
    assert found["norm_forward"] == {"layer-norm"} and found["window_tails"] == {"ranks-convolution"}


def test_calls_that_short_sequences_never_meet_are_right(made):
    """T in segments, heads that share keys in one program: the choices are the kernels', the numbers the oracle's."""
    assert made.one("scalar-decay", "bfloat16", "cpu") and made.one("vector-normalised", "float32", "cpu")
    assert made.one("layer-convolution", "float32", "cpu") and made.one("ranks-convolution", "float32", "cpu")
    assert made.one("layer-products", "float32", "cpu") and made.one("attention-tokens", "bfloat16", "cpu")


@pytest.mark.parametrize("name", ["scalar-decay", "gated-delta"])
def test_kernels_read_no_memory_that_nobody_wrote(made, name, monkeypatch):
    """As initcheck does on a GPU: also what is read and not used. Segments' last effects are not computed."""
    monkeypatch.syspath_prepend(PATH.parent)
    assert importlib.import_module("sanitize_unwritten").unwritten(name, "bfloat16") == set()


def test_no_copy_reads_memory_that_nobody_wrote(made, monkeypatch):
    """What a rank's last segment does to states behind it is not computed, and copies of the rest leave it out."""
    monkeypatch.syspath_prepend(PATH.parent)
    layers, unwritten = (importlib.import_module(f"sanitize_{name}") for name in ("layers", "unwritten"))
    sizes = {"tokens": 24, "batch": 1, "heads": 1, "n": 4, "p": 4}
    with unwritten.watched() as found:
        unwritten.called(*layers.recurrences(layers.over_ranks, sizes, "rg_lru")("float32"))
    assert found == set()
    torch.empty(3).fill_(1.0).clone()  # torch's own again
    with unwritten.watched() as found:
        torch.empty(3).clone()
    assert len(found) == 1


@pytest.mark.parametrize(
    ("name", "how", "given"),
    [
        ("value-decay", "", {"tokens": 33, "n": 3}),  # one entry's row ahead, T no multiple of a run
        ("value-decay", "cut", {"tokens": 70, "n": 4, "initial": True}),  # of four, several groups, segments
        ("value-decay", "", {"tokens": 40, "n": 4, "lengths": (5, 1, 34)}),
        ("s6", "", {"tokens": 40, "n": 4}),  # Params' sums in the rows
    ],
)
def test_scans_load_ahead_only_what_was_written(made, name, how, given, monkeypatch):
    """The row behind the last one, which the adjoint by entry loads a turn ahead, and does not use."""
    monkeypatch.syspath_prepend(PATH.parent)
    watched = importlib.import_module("sanitize_unwritten").watched
    with watched() as found, made.walked(how):
        verdict = attempt(made.SUBJECTS[name](), Case(heads=2, p=5, dtype="bfloat16", **given), "cpu")
    assert verdict.status == "right" and found == set()
