"""The report builder: sections, sortable tables and figures become one HTML file that needs nothing else.

    page = Page("Title", "what this is")
    page.section("Speed", "What to look at.", table(columns, rows), figure(picture, "Title", "Caption."))
    page.write(path)

Pictures are inline (see report_figures), styles and the sorting script too: the file opens offline, in light and dark.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsf.analysis._write import whole_text
from dsf.analysis.report.style import SCRIPT, STYLE


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

    def html(self, tag: str = "td") -> str:
        """The cell as an HTML element."""
        attributes = ""
        if self.sort is not None:
            attributes += f' data-sort="{_sortable(self.sort)}" class="number"'
        if self.note:
            attributes += f' title="{html.escape(self.note)}"'
        inner = html.escape(self.text)
        if self.color:
            inner = f'<i class="dot" style="background:{self.color}"></i>{inner}'
        if self.strong:
            inner = f"<b>{inner}</b>"
        if self.bar is not None:
            width = 100 * min(1.0, max(0.0, self.bar))
            inner = f'<span class="bar" style="--w:{width:.1f}%;--c:{self.color or "var(--accent)"}">{inner}</span>'
        return f"<{tag}{attributes}>{inner}</{tag}>"


@dataclass(frozen=True)
class Column:
    """A table's column: its heading, what the heading means (shown when pointed at), and the rows' order by it, if any.

    order: "ascending" or "descending" for the column that the rows come sorted by.
    """

    label: str
    note: str = ""
    order: str = ""

    def html(self) -> str:
        """The heading as an HTML element."""
        order = f' aria-sort="{self.order}"' if self.order else ""
        label, note = html.escape(self.label), html.escape(self.note)
        return f'<th scope="col" title="{note}"{order}><button type="button">{label}</button></th>'


Block = str  # a piece of HTML


def text(*paragraphs: str) -> Block:
    """Paragraphs of plain text; `code` between backquotes, **strong** between double asterisks."""
    return "".join(f"<p>{_inline(p)}</p>" for p in paragraphs)


def terms(entries: Mapping[str, str]) -> Block:
    """A list of words and what they mean."""
    items = "".join(f"<div><dt>{_inline(k)}</dt><dd>{_inline(v)}</dd></div>" for k, v in entries.items())
    return f'<dl class="terms">{items}</dl>'


def facts(entries: Mapping[str, str]) -> Block:
    """Names and values in a row, for the head of a page."""
    items = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in entries.items())
    return f'<dl class="facts">{items}</dl>'


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], caption: str = "") -> Block:
    """A table that sorts by the column clicked on. Rows must be as long as columns."""
    head = "".join(c.html() for c in columns)
    body = "".join("<tr>" + "".join(c.html() for _, c in zip(columns, row, strict=True)) + "</tr>" for row in rows)
    below = f"<p class='caption'>{_inline(caption)}</p>" if caption else ""
    return (
        f'<div class="scroll"><table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"{below}"
    )


def figure(picture: Block, title: str, caption: str, color: str | None = None) -> Block:
    """A picture with a title above and one sentence below that says what to look at."""
    dot = f'<i class="dot" style="background:{color}"></i>' if color else ""
    below = f"<figcaption>{_inline(caption)}</figcaption>" if caption else ""
    name = html.escape(title)  # twice, for a narrow card may cut it short
    return f'<figure><h3 title="{name}">{dot}{name}</h3>{picture}{below}</figure>'


def grid(blocks: Sequence[Block], width: int = 250) -> Block:
    """Blocks side by side, as many in a row as fit with at least `width` pixels each."""
    return f'<div class="grid" style="--min:{width}px">{"".join(blocks)}</div>'


def details(title: str, *blocks: Block) -> Block:
    """Blocks folded away under a title."""
    return f"<details><summary>{_inline(title)}</summary>{''.join(blocks)}</details>"


def code(source: str) -> Block:
    """Preformatted text."""
    return f"<pre>{html.escape(source)}</pre>"


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
        links = "".join(f'<a href="#{_slug(t)}">{html.escape(t)}</a>' for t, _, _ in self.sections)
        parts = []
        for title, lead, blocks in self.sections:
            intro = f'<p class="lead">{_inline(lead)}</p>' if lead else ""
            parts.append(
                f'<section id="{_slug(title)}"><h2>{html.escape(title)}</h2>{intro}{"".join(blocks)}</section>'
            )
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark">'
            f"<title>{html.escape(self.title)}</title><style>{STYLE}</style></head><body>"
            f"<header><h1>{html.escape(self.title)}</h1><p>{_inline(self.subtitle)}</p>{''.join(self.intro)}</header>"
            f"<nav>{links}</nav><main>{''.join(parts)}</main><script>{SCRIPT}</script></body></html>"
        )

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


def _sortable(value: float) -> str:
    return "" if math.isnan(value) else repr(float(value))


def _inline(words: str) -> str:
    escaped = html.escape(words, quote=False)
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", escaped)


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
