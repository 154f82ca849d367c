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


def test_every_page_is_built_and_the_reference_has_every_public_name(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page
    whole = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    names = {*dsf.__all__, "checking.check.check", "checking.validate.validate", "analysis.convert.convert"}
    assert [name for name in sorted(names) if f'id="dsf.{name}"' not in whole] == []
    mixers = (site / "api" / "mixers.html").read_text()
    assert all(f'id="dsf.mixers.{name}"' in mixers for name in dsf.mixers.__all__)
    measures = (site / "api" / "analysis.html").read_text()
    assert all(f'id="dsf.analysis.measures.{name}"' in measures for name in dsf.analysis.measures.__all__)


def test_nothing_is_loaded_from_other_servers(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:link|script|img)[^>]*?(?:href|src)=\"?(https?://[^\">\s]+)", page.read_text())
        assert not loaded, page


def test_fields_of_a_docstring_become_a_list() -> None:
    text = (
        "What it does.\n\nx: [B, T] or `[B]`, called\n  as f(*x).\nforms, laws: all\n\nReturns z.\nRaises InputError.\n"
    )
    assert SITE["fields_as_lists"](text).split("\n") == [
        "What it does.", "", "", r"* **x**: \[B, T] or `[B]`, called", r"    as f(\*x).", "* **forms, laws**: all",
        "", "", "Returns z.", "", "Raises InputError.",
    ]  # fmt: skip
