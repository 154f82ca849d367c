"""What users install: the wheel, the core without any extra, what an import costs, and the arrows."""

import ast
import os
import pydoc
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsf

ROOT = Path(__file__).resolve().parent.parent

# Room -> the rooms it may import. Arrows point down: analysis -> mixers -> dsf -> kernels.
MAY_IMPORT = {
    "kernels": {"kernels"},
    "dsf": {"dsf", "kernels"},
    "mixers": {"mixers", "dsf", "kernels"},
    "analysis": {"analysis", "mixers", "dsf", "kernels"},
}
UPPER_ROOMS = set(MAY_IMPORT) - {"dsf"}
SOURCES = [path for room in MAY_IMPORT for path in sorted((ROOT / room).rglob("*.py"))]

# What the extras bring, by import name: none of it may be needed by, or loaded with, the core.
COMPILER = {"sympy", "torch._dynamo", "torch._inductor"}  # which take a first call as long as all else in it
EXTRA_MODULES = {"typer", "rich", "matplotlib", "transformers", "accelerate", "hypothesis", "pytest"}
WITHOUT_EXTRAS = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRA_MODULES}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build in the tree leaves stale files behind that enter the next one."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    for room in MAY_IMPORT:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    target = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-index", "--quiet", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True)
    return target


def run_without_extras(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new process on the package in `site`, where the extras' modules cannot be imported."""
    setup = f"{WITHOUT_EXTRAS}sys.path.insert(0, {str(site)!r})\n"
    return subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, cwd=site)


# The wheel


def test_the_wheel_holds_the_four_rooms_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {name for name in names if ".dist-info/" not in name}
    expected = {"dsf/py.typed"}
    for path in SOURCES:
        inside = path.relative_to(ROOT / room_of(path)).as_posix()
        expected.add(f"dsf/{inside}" if room_of(path) == "dsf" else f"dsf/{room_of(path)}/{inside}")
    assert shipped == expected


def test_every_file_of_a_room_is_python_or_named_package_data() -> None:
    others = {
        short(path)
        for room in MAY_IMPORT
        for path in (ROOT / room).rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert others == {"dsf/py.typed"}


def dist_info(wheel: Path, name: str) -> str:
    archive = zipfile.ZipFile(wheel)
    folder = next(member.partition("/")[0] for member in archive.namelist() if ".dist-info/" in member)
    return archive.read(f"{folder}/{name}").decode()


def test_the_wheel_carries_its_readme_licence_and_command(wheel: Path) -> None:
    assert (ROOT / "README.md").read_text().strip() in dist_info(wheel, "METADATA")
    assert dist_info(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    assert "dsf = dsf.analysis.cli:main" in dist_info(wheel, "entry_points.txt")


def test_the_metadata_sets_lower_bounds_and_pins_nothing(wheel: Path) -> None:
    required = re.findall(r"^Requires-Dist: ([^;\n]*)", dist_info(wheel, "METADATA"), flags=re.MULTILINE)
    assert {re.split(r"[<>=~!]", line)[0] for line in required} >= {"torch", "numpy", "triton"}
    assert all(re.fullmatch(r"[\w-]+>=[\d.]+", line) for line in required)


# The core, without any extra


def test_the_core_works_without_any_extra(installed: Path) -> None:
    code = """
import torch, dsf
from dsf import Key, Scalar, System, Value, mixers

@dsf.recurrence
def retention(q: Key, k: Key, v: Value, g: Scalar) -> System:
    return System(A=g, B=k * v, C=q)

q = torch.ones(1, 3, 1, 2)
y = retention(q, q, torch.ones(1, 3, 1, 1), torch.full((1, 3, 1), 0.5))
print(dsf.__file__, mixers.__file__, y.flatten().tolist())
"""
    done = run_without_extras(installed, code)
    assert done.returncode == 0, done.stderr
    # S_t = S_{t-1} / 2 + 1 in both rows, y_t = their sum
    here = installed / "dsf"
    assert done.stdout.strip() == f"{here / '__init__.py'} {here / 'mixers/__init__.py'} [2.0, 3.0, 3.5]"


def test_the_command_names_the_extra_that_it_needs(installed: Path) -> None:
    done = run_without_extras(installed, "from dsf.analysis.cli import main\nsys.exit(main())")
    said = (done.stdout + done.stderr).strip()
    assert done.returncode != 0
    assert "dsf-zoo[cli]" in said and len(said.splitlines()) == 1


def test_importing_dsf_and_mixers_and_a_first_call_load_no_heavy_module_that_torch_did_not() -> None:
    heavy = EXTRA_MODULES | {"triton", "pydantic", "dsf.analysis"}
    code = f"""
import sys, torch
before = set(sys.modules)
import dsf, dsf.mixers
print(sorted({heavy} & (set(sys.modules) - before)))
before = set(sys.modules)
x = torch.ones(1, 70, 2, 4, requires_grad=True)
gate = torch.ones(1, 70, 2, requires_grad=True)
for y in (dsf.mixers.linear_attention(x, x, x), dsf.mixers.mlstm(x, x, x, gate, gate), dsf.mixers.gla(x, x, x, x)):
    y.sum().backward()
print(sorted({heavy | COMPILER} & (set(sys.modules) - before)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]"] * 2


@pytest.mark.parametrize("checker", [("mypy", "--python-executable"), ("pyright", "--pythonpath")])
def test_type_checkers_know_what_a_users_calls_return(checker: tuple[str, str]) -> None:
    """And what is no call: a `type: ignore` of the file without an error is an error. `make` installs no pyright."""
    name, option = checker
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    command = [found, option, sys.executable, "tests/typed_calls.py"]  # mypy's cache is that of `make lint`
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "MYPYPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr


def test_help_begins_with_what_users_call() -> None:
    text = pydoc.render_doc(dsf, renderer=pydoc.plaintext)
    shown = text[text.index("DESCRIPTION") : text.index("PACKAGE CONTENTS")]
    named = set(re.findall(r"\bdsf\.(\w+)", shown))
    assert {"recurrence", "System", "check", "learn", "convert", "mixers", "models", "parallel"} <= named
    assert all(getattr(dsf, name) is not None for name in named)
    assert all(hasattr(dsf.Recurrence, name) for name in re.findall(r"\bf\.(\w+)", shown))
    assert "SUBMODULES" not in text  # of inner rooms


# The house


# Files whose lazy names are those of upper rooms, which type checkers are told by imports of theirs alone.
RE_EXPORTS = {"dsf/__init__.py", "dsf/models/__init__.py", "dsf/models/hf.py"}


def as_run(path: Path) -> ast.Module:
    """A file, without what stands for type checkers where names of upper rooms are given on."""
    tree = ast.parse(path.read_text())
    if short(path) in RE_EXPORTS:
        tree.body = [x for x in tree.body if not (isinstance(x, ast.If) and ast.unparse(x.test) == "TYPE_CHECKING")]
    return tree


def imported_rooms(tree: ast.Module, home: str) -> Iterator[tuple[int, str]]:
    """Every (line, room) that a file of the room `home` imports, wherever in the file the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = "dsf" if home == "dsf" else f"dsf.{home}"
            base = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            module = (base + (node.module or "")).rstrip(".")
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "dsf":
                yield node.lineno, parts[1] if len(parts) > 1 and parts[1] in UPPER_ROOMS else "dsf"


@pytest.mark.parametrize(
    ("line", "home", "room"),
    [
        ("import dsf", "kernels", "dsf"),
        ("import dsf.mixers.s6 as s6", "dsf", "mixers"),
        ("from dsf import kernels", "dsf", "kernels"),
        ("from dsf.analysis import cli", "mixers", "analysis"),
        ("from . import scan", "kernels", "kernels"),
        ("from .. import mixers", "kernels", "mixers"),
        ("from ..spec import Spec", "kernels", "dsf"),
        ("def f():\n    from .mixers import s6", "dsf", "mixers"),
    ],
)
def test_every_way_to_import_a_room_is_seen(line: str, home: str, room: str) -> None:
    assert [found for _, found in imported_rooms(ast.parse(line), home)] == [room]


def test_arrows_between_rooms_point_down_only() -> None:
    upward = [
        f"{short(path)}:{line} imports {room}"
        for path in SOURCES
        for line, room in imported_rooms(as_run(path), room_of(path))
        if room not in MAY_IMPORT[room_of(path)]
    ]
    assert not upward
