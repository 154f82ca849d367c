"""The report builder: sections, sortable tables and figures become one HTML file that needs nothing else.

    page = Page("Title", "what this is")
    page.section("Speed", "What to look at.", table(columns, rows), figure(picture, "Title", "Caption."))
    page.write(path)

Pictures are inline (see report_figures), styles and the sorting script too: the file opens offline, in light and dark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsf.analysis._write import whole_text
from dsf.analysis.report.style import SCRIPT, STYLE
from dsf.analysis.report.templates import render, trusted


@dataclass(frozen=True)
class Cell:
    """One place of a table.

    text: what is read. sort: what it is sorted by (the text if None; NaN and missing numbers go last). bar: a share in
    [0, 1] drawn behind the number. color: of a dot in front of the text. note: shown when pointed at. strong: set off.
    """

    text: str
    sort: float | None = None
    bar: float | None = None
    color: str | None = None
    note: str = ""
    strong: bool = False


@dataclass(frozen=True)
class Column:
    """A table's column: its heading, what the heading means (shown when pointed at), and the rows' order by it, if any.

    order: "ascending" or "descending" for the column that the rows come sorted by.
    """

    label: str
    note: str = ""
    order: str = ""


Block = str  # a piece of HTML that these functions made; any other string is text, and is escaped


def text(*paragraphs: str) -> Block:
    """Paragraphs of plain text; `code` between backquotes, **strong** between double asterisks."""
    return render("text", paragraphs=paragraphs)


def terms(entries: Mapping[str, str]) -> Block:
    """A list of words and what they mean."""
    return render("terms", entries=entries)


def facts(entries: Mapping[str, str]) -> Block:
    """Names and values in a row, for the head of a page."""
    return render("facts", entries=entries)


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], caption: str = "") -> Block:
    """A table that sorts by the column clicked on. Rows must be as long as columns, or ValueError is raised."""
    for place, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"table: row {place} has {len(row)} cells for {len(columns)} columns")
    return render("table", columns=columns, rows=rows, caption=caption)


def figure(picture: Block, title: str, caption: str, color: str | None = None) -> Block:
    """A picture with a title above and one sentence below that says what to look at."""
    return render("figure", picture=picture, title=title, caption=caption, color=color)


def grid(blocks: Sequence[Block], width: int = 250) -> Block:
    """Blocks side by side, as many in a row as fit with at least `width` pixels each."""
    return render("grid", blocks=blocks, width=width)


def details(title: str, *blocks: Block) -> Block:
    """Blocks folded away under a title."""
    return render("details", title=title, blocks=blocks)


def code(source: str) -> Block:
    """Preformatted text."""
    return render("code", source=source)


@dataclass
class Page:
    """One report: title, a sentence below it, and sections in order."""

    title: str
    subtitle: str
    intro: list[Block] = field(default_factory=list)
    sections: list[tuple[str, str, tuple[Block, ...]]] = field(default_factory=list)

    def section(self, title: str, lead: str, *blocks: Block) -> None:
        """Add a section: its title, a sentence or two that say what to look at, its content."""
        self.sections.append((title, lead, blocks))

    def html(self) -> str:
        """The whole page."""
        return render("page", page=self, style=trusted(STYLE), script=trusted(SCRIPT))

    def write(self, path: Path) -> None:
        """Write the page to path, whole or not at all. Raises DsfError where the disk does not take it."""
        whole_text(path, self.html())


def write_json(path: Path, data: object) -> None:
    """Write data as JSON that any reader takes (inf and nan become null), whole or not at all.

    Raises DsfError where the disk does not take it.
    """
    whole_text(path, json.dumps(finite(data), indent=1, ensure_ascii=False) + "\n")


def finite(data: object) -> object:
    """The same data with every number that JSON does not have (inf, nan) as None."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {str(k): finite(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [finite(v) for v in data]
    return data


def count(number: float) -> str:
    """A count in few characters: 950, 12.3k, 4.1M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def duration(tokens: float) -> str:
    """A number of tokens that may be infinite: 0.4, 12, 3.1k, ∞."""
    if math.isinf(tokens):
        return "∞"
    return f"{tokens:.2g}" if tokens < 10 else count(round(tokens))
