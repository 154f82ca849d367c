"""The documentation site builds without a warning, and its reference has every public name."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import dsf

ROOT = Path(__file__).resolve().parents[1]
SITE = runpy.run_path(str(ROOT / "docs" / "_site.py"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; warnings (links and anchors that lead nowhere, names that do not exist) are errors."""
    if find_spec("mkdocs") is None or find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs is not installed: pip install '.[docs]'")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return out


def test_every_page_is_built_and_the_reference_documents_layers_and_measures(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page
    mixers = (site / "api" / "mixers.html").read_text()
    assert all(f'id="dsf.mixers.{name}"' in mixers for name in dsf.mixers.__all__)
    measures = (site / "api" / "analysis.html").read_text()
    assert all(f'id="dsf.analysis.measures.{name}"' in measures for name in dsf.analysis.measures.__all__)


def test_nothing_is_loaded_from_other_servers(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:link|script|img)[^>]*?(?:href|src)=\"?(https?://[^\">\s]+)", page.read_text())
        assert not loaded, page


def test_the_reference_has_every_public_name_of_the_package() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = set(re.findall(r"^::: (\S+)", pages, re.MULTILINE))
    short = {name.rpartition(".")[2] for name in listed}
    assert set(dsf.__all__) | {"check", "convert", "validate", "register_operators"} <= short


def test_fields_of_a_docstring_become_a_list() -> None:
    text = (
        "What it does.\n\nx: [B, T], called\n  as f(*x). y: more\nforms, laws: all\n\nReturns z.\nRaises InputError.\n"
    )
    assert SITE["fields_as_lists"](text).split("\n") == [
        "What it does.", "", "", "* **x**: [B, T], called", r"    as f(\*x). y: more", "* **forms, laws**: all", "", "",
        "Returns z.", "", "Raises InputError.",
    ]  # fmt: skip
