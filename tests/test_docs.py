"""The pages tell the truth: their Python runs, prints what they show, and what they name exists."""

import contextlib
import io
import linecache
import re
import runpy
import shlex
from itertools import zip_longest
from pathlib import Path

import pytest

import dsf
from dsf import mixers
from dsf.analysis.pretrained import NotInstalledError

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
ROOMS = ("analysis", "benchmarks", "docs", "dsf", "kernels", "mixers", "tests")
EXTRAS = ("matplotlib", "transformers")
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def examples(text):
    """(source, line of the page, expected output or None) of every ```python block; output is a ```text block
    with nothing between."""
    fences = list(FENCE.finditer(text))
    for fence, after in zip_longest(fences, fences[1:]):
        if fence[1] == "python":
            is_output = after is not None and after[1] == "text" and not text[fence.end() : after.start()].strip()
            yield fence[2], text[: fence.start()].count("\n") + 2, after[2] if is_output else None


def run(source, scope):
    """What the block prints, the error that ends it too. Errors quote the block as a file mixer.py of its own."""
    linecache.cache["mixer.py"] = (len(source), None, source.splitlines(keepends=True), "mixer.py")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(source, "mixer.py", "exec"), scope)
        except NotInstalledError:
            raise
        except dsf.DsfError as error:
            print(f"{type(error).__name__}: {error}")
    return printed.getvalue()


@EACH_PAGE
def test_python_blocks_run_in_order_and_print_what_the_page_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    scope = {"__name__": "page"}
    for source, line, expected in examples(page.read_text()):
        try:
            printed = run(source, scope)
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
            pytest.skip(f"{error.name} is not installed")
        except NotInstalledError as error:  # weights that are packages of their own
            pytest.skip(str(error))
        assert printed == (expected or ""), f"{page.name}, line {line}"


def test_an_example_that_prints_something_else_is_noticed():
    (source, line, expected), *rest = examples("a\n\n```python\nprint(1)\n```\n\n```text\n2\n```\n")
    assert (line, expected, rest) == (4, "2\n", [])
    assert run(source, {}) == "1\n"


def test_the_tables_of_the_zoo_are_those_that_the_code_makes():
    zoo = runpy.run_path(str(ROOT / "docs" / "zoo.py"))
    for path, made in zoo["PAGES"]:
        page = path.read_text()
        assert zoo["BEGIN"] in page
        assert zoo["with_table"](page, made()) == page, f"{path.name} is behind the zoo: run python docs/zoo.py"
    families = (ROOT / "README.md").read_text().partition(zoo["BEGIN"])[2].partition(zoo["END"])[0]
    named = [name for row in families.splitlines()[3:] for name in re.findall(r"`(\w+)`", row.split("|")[-2:-1][0])]
    assert sorted(named) == sorted([*(e.name for e in mixers.ZOO), *mixers.LAYERS]), "every name once"


@EACH_PAGE
def test_commands_are_ones_that_the_command_line_takes(page):
    typer = pytest.importorskip("typer")
    from dsf.analysis._cli_app import app

    group = typer.main.get_command(app)
    lines = re.findall(r"^(?:    |[$] )dsf (.*)$", page.read_text(), re.MULTILINE)
    for words in map(shlex.split, lines):
        group.get_command(None, words[0]).make_context(words[0], words[1:])  # raises what the user would see


@EACH_PAGE
def test_console_blocks_print_what_the_page_shows(page, tmp_path, monkeypatch):
    """Each `$ dsf …` line is run; what it prints, errors too, begins with the lines under it."""
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from dsf.analysis._cli_app import app

    monkeypatch.chdir(tmp_path)
    for fence in FENCE.finditer(page.read_text()):
        if fence[1] == "console":
            for command, shown in re.findall(r"^[$] dsf (.*)\n((?:[^$].*\n)*)", fence[2], re.MULTILINE):
                assert CliRunner().invoke(app, shlex.split(command)).output.startswith(shown), command


@EACH_PAGE
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


def anchors(page):
    """Headings as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@EACH_PAGE
def test_files_and_tests_that_a_page_names_exist(page):
    named = re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w/.]+?\.(?:py|md))(?:::(\w+))?`", page.read_text())
    for path, test in named:
        assert (ROOT / path).is_file(), f"{page.name} names {path}"
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{page.name} names {path}::{test}"
