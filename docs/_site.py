"""What the documentation site (mkdocs.yml) has beside the pages: the README as its first page, lists of public names,
and docstrings with their fields as lists. The pages themselves stay as GitHub shows them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# A docstring line that begins with what it explains: "cu_seqlens: ..." or "forms, laws, dtypes: ...".
FIELD = re.compile(r"^([A-Za-z_]\w*(?:, [A-Za-z_]\w*)*): (.*)$")
SENTENCE = re.compile(r"^(?:Returns|Raises|Yields|Source|Symbols|Objective)\b")


def fields_as_lists(text: str) -> str:
    """A docstring's fields as list items, and what it returns and raises as paragraphs of its own."""
    lines: list[str] = []
    in_list = False
    for line in escaped(text).splitlines():
        field = FIELD.match(line)
        if SENTENCE.match(line) or (in_list and line and not field and not line.startswith(" ")):
            lines.append("")
            in_list = False
            field = None
        if field:
            lines += ([] if in_list else [""]) + [f"* **{field[1]}**: {field[2]}"]
            in_list = True
        else:
            lines.append(f"    {line.strip()}" if in_list and line else line)
            in_list = in_list and bool(line)
    return "\n".join(lines)


def escaped(text: str) -> str:
    """A docstring whose shapes [B, T] are no links and whose *arguments are no emphasis; `code` stays as it is."""
    parts = re.split(r"(`+[^`]*`+)", text)
    parts[::2] = [re.sub(r"\[|(?<=\()\*+(?=\w)", lambda m: "".join("\\" + c for c in m[0]), p) for p in parts[::2]]
    return "".join(parts)


try:
    import griffe
except ModuleNotFoundError:  # the tests of `fields_as_lists` need no site
    pass
else:

    class Fields(griffe.Extension):
        """Prepares every docstring of the reference."""

        def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
            """Rewrite the docstring in place."""
            if obj.docstring is not None:
                obj.docstring.value = fields_as_lists(obj.docstring.value)


def on_config(config: Any) -> Any:
    """Put pages that nobody gave a place in mkdocs.yml behind the others, so that a new page is one file."""
    placed = set(re.findall(r"[\w/-]+\.md", repr(config.nav)))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    if left := sorted(pages - placed):
        config.nav.append({"More": left})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the README as the site's first page."""
    from mkdocs.structure.files import File

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text.replace("](docs/", "](").replace("see [LICENSE](LICENSE)", "see `LICENSE`")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links to the README to the first page; write a line for every name of `::: all of MODULE KIND`."""
    markdown = markdown.replace("](../README.md", "](index.md").replace("](../../README.md", "](../index.md")
    return re.sub(r"^::: all of (\S+) (\w+)$", lambda m: all_of(m[1], m[2]), markdown, flags=re.MULTILINE)


def all_of(module: str, kind: str) -> str:
    """A reference to each name of a module's __all__ that no page lists: its "classes", the others, or the "rest"."""
    room = importlib.import_module(module)
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = set(re.findall(rf"^::: {re.escape(module)}\.(\w+)$", pages, re.MULTILINE))
    lazy = set(room.__all__) - vars(room).keys()  # made by the module's __getattr__: seen where they are defined
    found = [
        name
        for name in sorted(set(room.__all__) - listed)
        if kind == "rest" or isinstance(getattr(room, name), type) == (kind == "classes")
    ]
    found = [f"{getattr(room, name).__module__ if name in lazy else module}.{name}" for name in found]
    return "\n\n".join(f"::: {name}" for name in found)
