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
    for line in re.sub(r"\((\*+)(?=\w)", lambda stars: "(" + stars[1].replace("*", "\\*"), text).splitlines():
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
    """A reference to each name of a module's __all__: of kind "classes" the classes, else what is no class."""
    room = importlib.import_module(module)
    found = [
        name
        for name in sorted(room.__all__)
        if name not in HAND.get(module, ()) and isinstance(getattr(room, name), type) == (kind == "classes")
    ]
    return "\n\n".join(f"::: {module}.{name}" for name in found)


# Names that a page lists itself, in an order of meaning.
HAND = {
    "dsf.mixers": (
        "Mixer", "MixerState", "Layer", "Entry", "ZOO", "get", "canonical", "layer_for", "parameter_groups",
        "shard_rates",
    ),
}  # fmt: skip
