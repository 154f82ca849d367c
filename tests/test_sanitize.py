"""benchmarks/sanitize.py where there is no sanitizer: what it would call, and how it reads logs."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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


@pytest.fixture(scope="module")
def sanitize() -> ModuleType:
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


def test_it_lists_and_shows_its_commands() -> None:
    def said(*arguments: str) -> list[str]:
        done = subprocess.run([sys.executable, str(PATH), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    assert said("--list", "--only", "delta", "s6") == ["delta: identity + delta", "s6: Hadamard"]
    commands = said("--dry-run", "--only", "delta", "--dtypes", "bfloat16", "--sanitizer", "compute-sanitizer")
    assert len(commands) == 3
    assert all(c.endswith("--one delta --dtype bfloat16") for c in commands)
    assert [c.split()[:3] for c in commands] == [
        ["compute-sanitizer", "--tool", tool] for tool in ("memcheck", "initcheck", "racecheck")
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
    assert sanitize.kept(out, "one", [(None, "s6", "a"), ("memcheck", "s6", "a")]) == [rows[1], rows[3]]
    assert sanitize.kept(tmp_path / "none.json", "one", []) == []
    with pytest.raises(SystemExit, match="is of one, this is two"):
        sanitize.kept(out, "two", [])
