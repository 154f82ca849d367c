"""The report builder: one file that needs nothing else, tables that sort, pictures inline."""

import json
import math
import re
import sys

import pytest

import dsf
from dsf.analysis import report
from dsf.analysis.analyze.tables import nbytes
from dsf.analysis.report import Cell, Column, Page
from dsf.analysis.report import figures as report_figures

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def drawn():
    figure, axes = report_figures.new_figure(3, 2)
    axes.plot([0, 1], [0, 1], label="line")
    axes.imshow([[0.0, 1.0]], cmap=report_figures.fade("#336699"), interpolation="none")
    axes.set_xlabel("tokens")
    return figure


@pytest.fixture
def page(drawn):
    out = Page("A <title>", "What `this` is.")
    rows = [[Cell("b", color="#123456"), Cell("2.0", 2.0, bar=0.5)], [Cell("a"), Cell("–", math.nan)]]
    block = report.table([Column("name"), Column("size", "in numbers")], rows, "A caption.")
    picture = report.figure(report_figures.svg(drawn, "a line"), "Line", "It rises.")
    out.section("First part", "Look at this.", block, picture, report.details("more", report.code("x < y")))
    return out


def loads_nothing(html: str) -> None:
    """No address, no reference but data: and anchors of the page itself."""
    assert not re.search(r"https?:|//[a-z]+\.", html)
    for target in re.findall(r"(?:href|src)=\"([^\"]*)\"|url\(([^)]*)\)", html):
        assert "".join(target).startswith(("#", "data:")), target


def test_a_page_is_one_file_that_loads_nothing(page, tmp_path):
    page.write(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    loads_nothing(html)
    assert "<svg" in html and "data:image/png;base64" in html


def test_text_is_escaped_and_sections_are_linked(page):
    html = page.html()
    assert "A &lt;title&gt;" in html and "x &lt; y" in html and "<code>this</code>" in html
    assert 'href="#first-part"' in html and 'id="first-part"' in html


def test_whatever_is_put_into_a_block_is_escaped(drawn):
    """Names of mixers, files and texts come from outside: none of them can become an element of the page."""
    evil = "<script>alert(\"x\")</script> & 'y'"
    cell = Cell(evil, color='red"><script>', note=evil, bar=0.5, strong=True)
    blocks = [
        report.text(evil), report.terms({evil: evil}), report.facts({evil: evil}), report.code(evil),
        report.table([Column(evil, evil)], [[cell]], evil), report.details(evil, evil), report.grid([evil]),
        report.figure(evil, evil, evil, evil),
    ]  # fmt: skip
    out = Page(evil, evil, [evil])
    out.section(evil, evil, *blocks, evil)
    html = out.html()
    assert html.count("<script>") == 1 and "alert(&#34;x&#34;)" in html  # the page's own, which sorts tables
    assert "&amp;lt;" not in html  # nothing is escaped twice


def test_tables_carry_the_numbers_they_sort_by(page):
    html = page.html()
    assert 'data-sort="2.0"' in html
    assert 'data-sort=""' in html  # nan: last in either order
    assert html.count("<button") == 2 and "aria-sort" in html


def test_rows_must_be_as_long_as_the_head():
    with pytest.raises(ValueError, match="row 0 has 1 cells for 2 columns"):
        report.table([Column("a"), Column("b")], [[Cell("1")]])


def test_svg_takes_the_ink_of_the_page_and_names_what_it_shows(drawn):
    picture = report_figures.svg(drawn, 'a "line"')
    assert picture.startswith('<svg role="img" aria-label="a &quot;line&quot;"')
    assert "currentColor" in picture and report_figures.INK not in picture
    assert "metadata" not in picture and "xlink" not in picture


def test_svg_is_the_same_every_time(drawn):
    assert report_figures.svg(drawn, "a line") == report_figures.svg(drawn, "a line")


def test_parts_that_svgs_refer_to_are_there_and_differ_between_pictures(drawn):
    one, other = (report_figures.svg(drawn, name) for name in ("one", "other"))
    names = set(re.findall(r'(?:href="#|url\(#)([^")]*)', one))
    assert names and names <= set(re.findall(r'id="([^"]*)"', one))
    assert not names & set(re.findall(r'(?:href="#|url\(#)([^")]*)', other))


def test_pngs_are_written(drawn, tmp_path):
    report_figures.png(drawn, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_json_has_no_numbers_that_json_lacks(tmp_path):
    report.write_json(tmp_path / "a.json", {"a": math.inf, "b": [math.nan, 1.5], "c": "∞"})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": None, "b": [None, 1.5], "c": "∞"}


COUNTS = [(950, "950"), (12_345, "12.3k"), (4_100_000, "4.1M"), (2e9, "2G"), (999.7, "1k"), (999_600, "1M")]


@pytest.mark.parametrize(("number", "text"), COUNTS)
def test_counts_are_short(number, text):
    assert report.count(number) == text


def test_bytes_have_no_exponents():
    sizes = {512: "512 B", 1000: "1000 B", 1536: "1.5 KiB", 1023 * 2**10: "1023 KiB", 48 * 2**20: "48 MiB"}
    assert {size: nbytes(size) for size in sizes} == sizes
    assert nbytes(2**40) == "1 TiB"


@pytest.mark.parametrize(
    ("tokens", "text"), [(0.42, "0.42"), (12.3, "12"), (math.inf, "∞"), (math.nan, "–"), (3100, "3.1k")]
)
def test_durations_are_short(tokens, text):
    assert report.duration(tokens) == text


def test_colours_differ_and_are_hexadecimal():
    found = report_figures.colors(29)
    assert len(set(found)) == 29
    assert all(re.fullmatch(r"#[0-9a-f]{6}", c) for c in found)


def test_a_missing_matplotlib_is_one_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(dsf.DsfError, match=r"dsf-zoo\[plots\]"):
        report_figures.new_figure(1, 1)
