"""The report builder: sections, sortable tables and figures become one HTML file without external resources.

    page = Page("Title", "what this is")
    page.section("Speed", "What to look at.", table(columns, rows), figure(picture, "Title", "Caption."))
    page.write(path)

Pictures (see dsf.analysis.report.figures), styles and the sorting script are inline: the file opens offline, in light
and dark mode.
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
    """A cell of a table.

    text: what is shown. sort: the number to sort by (the text if None; NaN last). bar: a share in [0, 1], drawn as a
    bar behind the text. color: of a dot before the text. note: shown on hover. strong: bold.
    """

    text: str
    sort: float | None = None
    bar: float | None = None
    color: str | None = None
    note: str = ""
    strong: bool = False


@dataclass(frozen=True)
class Column:
    """A column of a table. label: its heading; note: the heading's meaning, shown on hover.

    order: "ascending" or "descending" for the column by which the rows are sorted.
    """

    label: str
    note: str = ""
    order: str = ""


Block = str  # HTML made by these functions; any other string is text and is escaped


def text(*paragraphs: str) -> Block:
    """Paragraphs of plain text; `code` between backquotes, **strong** between double asterisks."""
    return render("text", paragraphs=paragraphs)


def terms(entries: Mapping[str, str]) -> Block:
    """A list of words with their meanings."""
    return render("terms", entries=entries)


def facts(entries: Mapping[str, str]) -> Block:
    """Names and values in a row, for the head of a page."""
    return render("facts", entries=entries)


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], caption: str = "") -> Block:
    """A table that sorts by a clicked column. Raises ValueError for a row of another length than columns."""
    for place, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"table: row {place} has {len(row)} cells for {len(columns)} columns")
    return render("table", columns=columns, rows=rows, caption=caption)


def figure(picture: Block, title: str, caption: str, color: str | None = None) -> Block:
    """A picture with a title above it and a caption below it."""
    return render("figure", picture=picture, title=title, caption=caption, color=color)


def grid(blocks: Sequence[Block], width: int = 250) -> Block:
    """Blocks side by side, as many in a row as fit with at least `width` pixels each."""
    return render("grid", blocks=blocks, width=width)


def details(title: str, *blocks: Block) -> Block:
    """Blocks folded under a title."""
    return render("details", title=title, blocks=blocks)


def code(source: str) -> Block:
    """Preformatted text."""
    return render("code", source=source)


@dataclass
class Page:
    """A report: a title, a subtitle, an introduction, and sections in order."""

    title: str
    subtitle: str
    intro: list[Block] = field(default_factory=list)
    sections: list[tuple[str, str, tuple[Block, ...]]] = field(default_factory=list)

    def section(self, title: str, lead: str, *blocks: Block) -> None:
        """Add a section: its title, a lead that says what to look at, and its blocks."""
        self.sections.append((title, lead, blocks))

    def html(self) -> str:
        """The whole page."""
        return render("page", page=self, style=trusted(STYLE), script=trusted(SCRIPT))

    def write(self, path: Path) -> None:
        """Write the whole page to path, or nothing. Raises DsfError where the disk is full or not writable."""
        whole_text(path, self.html())


def write_json(path: Path, data: object) -> None:
    """Write data as JSON, a whole file or nothing; inf and nan become null.

    Raises DsfError where the disk is full or not writable.
    """
    whole_text(path, json.dumps(finite(data), indent=1, ensure_ascii=False) + "\n")


def finite(data: object) -> object:
    """The same data with None for inf and nan, which JSON does not have."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {str(k): finite(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [finite(v) for v in data]
    return data


def count(number: float) -> str:
    """A short text of a count: 950, 12.3k, 4.1M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * size:  # three digits of less would be 1e+03
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def duration(tokens: float) -> str:
    """A short text of a number of tokens, which may be infinite or nan: 0.4, 12, 3.1k, ∞, –."""
    if math.isnan(tokens):
        return "–"
    if math.isinf(tokens):
        return "∞"
    return f"{tokens:.2g}" if tokens < 10 else count(round(tokens))
