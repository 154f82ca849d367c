"""benchmarks/sanitize.py where there is no sanitizer: what it would call, how it shares that out, and reads logs.

tests/test_triton_sanitize.py has which kernels its calls reach.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

PATH = Path(__file__).resolve().parents[1] / "benchmarks" / "sanitize.py"

MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at walk_backward+0x1f40 in walk.py:212
=========     by thread (32,0,0) in block (3,0,0)
=========     Address 0x7f1a2b000400 is out of bounds
=========
========= Invalid __global__ read of size 4 bytes
=========     at walk_backward+0x1f80 in walk.py:212
=========
========= ERROR SUMMARY: 2 errors
"""
RACES = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at keywise+0x2a0 in keywise.py:72
=========     and Read access at keywise+0x310 in keywise.py:75 [16 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.fixture
def sanitize(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(PATH.parent)  # as for a script
    spec = importlib.util.spec_from_file_location("sanitize", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_logs_are_counted_by_kind_and_place(sanitize: ModuleType) -> None:
    assert sanitize.parsed(MEMCHECK) == (
        2, {"Invalid __global__ read of size 4 bytes at walk_backward in walk.py:212": 2}
    )  # fmt: skip
    count, kinds = sanitize.parsed(RACES)
    assert count == 1 and list(kinds) == ["Error: Race reported between Write access at keywise+0x… in keywise.py:72"]
    assert sanitize.parsed("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n") == (0, {})
    assert sanitize.parsed("killed") == (None, {})  # no summary is no success


def test_all_subjects_run_on_the_kernels_in_every_case(sanitize: ModuleType) -> None:
    pytest.importorskip("triton")
    for make in sanitize.SUBJECTS.values():
        recurrence = make()
        assert recurrence.plan(T=37, N=24, P=40, H=3, backend="triton", device="cuda").backend == "triton"


def test_it_lists_and_shows_its_commands(
    sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [str(PATH), *arguments])
        assert sanitize.main() == 0
        return capsys.readouterr().out.splitlines()

    assert said("--list", "--only", "delta", "s6") == ["delta: identity + delta", "s6: Hadamard"]
    how = ("--dry-run", "--only", "delta", "s6", "kda", "--sanitizer", "compute-sanitizer", "--workers")
    commands = said(*how, "2", "--dtypes", "bfloat16")
    assert [c.split()[:3] for c in commands[::2]] == [
        ["compute-sanitizer", "--tool", tool] for tool in ("memcheck", "initcheck", "racecheck")
    ]
    ends = ["--one delta kda --dtypes bfloat16", "--one s6 --dtypes bfloat16"]
    assert [c[c.index("--one") :] for c in commands] == ends * 3


def test_there_are_no_more_processes_than_names(sanitize: ModuleType) -> None:
    assert sanitize.shares(["memcheck"], ["a", "b", "c"], ["float32"], 8) == [
        ("memcheck", [name], ["float32"]) for name in "abc"
    ]


class Done(NamedTuple):
    """A process that ended."""

    returncode: int
    stdout: str
    stderr: str = ""


def test_a_process_that_finds_something_runs_again_name_by_name(
    sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run(command: list[str], **_: Any) -> Done:
        names = command[command.index("--one") + 1 : command.index("--dtypes")]
        asked.append(names)
        seconds = sanitize.TOOK + json.dumps({f"{n} float32": 1.5 for n in names})
        return (
            Done(86, MEMCHECK + seconds) if "kda" in names else Done(0, f"========= ERROR SUMMARY: 0 errors\n{seconds}")
        )

    monkeypatch.setattr(sanitize.subprocess, "run", run)
    good = sanitize.run_one("compute-sanitizer", "memcheck", ["delta", "s6"], ["float32"], 9.0)
    assert asked == [["delta", "s6"]]
    assert [(r["name"], r["ok"], r["found"], r["seconds"]) for r in good] == [
        ("delta", True, 0, 1.5),
        ("s6", True, 0, 1.5),
    ]
    rows = sanitize.run_one("compute-sanitizer", "memcheck", ["delta", "kda"], ["float32"], 9.0)
    assert asked[1:] == [["delta", "kda"], ["delta"], ["kda"]]
    assert [(r["name"], r["ok"], r["found"]) for r in rows] == [("delta", True, 0), ("kda", False, 2)]


def test_a_process_that_does_not_end_is_not_all_right(sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> Done:
        raise subprocess.TimeoutExpired(command, 9.0)

    monkeypatch.setattr(sanitize.subprocess, "run", run)
    rows = sanitize.run_one("compute-sanitizer", "racecheck", ["delta", "s6"], ["float32"], 9.0)
    assert [(r["name"], r["ok"], r["found"], r["said"]) for r in rows] == [
        (name, False, None, "did not end in time") for name in ("delta", "s6")
    ]


def test_without_a_sanitizer_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(PATH), "--sanitizer", "/nowhere/compute-sanitizer"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "there is no /nowhere/compute-sanitizer" in done.stderr


def test_a_record_is_added_to_but_for_what_runs_again(sanitize: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    rows = [{"tool": t, "name": "s6", "dtype": d, "ok": True, "found": 0} for t in ("none", "memcheck") for d in "ab"]
    sanitize.write(out, {"commit": "one"}, rows)
    assert sanitize.kept(out, "one", [(None, ["s6"], ["a"]), ("memcheck", ["s6"], ["a"])]) == [rows[1], rows[3]]
    assert sanitize.kept(tmp_path / "none.json", "one", []) == []
    with pytest.raises(SystemExit, match="is of one, this is two"):
        sanitize.kept(out, "two", [])
