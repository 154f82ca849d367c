"""The HTML of all reports as jinja2 templates. Everything put into them is escaped, except blocks made by them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

TEMPLATES = {
    "parts": """
{%- macro cell(c, head=False) -%}
<td{% if c.sort is not none %} data-sort="{{ c.sort|sortable }}" class="number"{% endif %}
{%- if c.note %} title="{{ c.note }}"{% endif %}>
{%- if c.bar is not none %}<span class="bar" style="--w:{{ "%.1f"|format(100 * [0.0, [1.0, c.bar]|min]|max) }}%;
{#- #}--c:{{ c.color or "var(--accent)" }}">{% endif %}
{%- if c.strong %}<b>{% endif %}
{%- if c.color %}{{ dot(c.color) }}{% endif %}{{ c.text }}
{%- if c.strong %}</b>{% endif %}
{%- if c.bar is not none %}</span>{% endif -%}
</td>
{%- endmacro -%}
{%- macro column(c) -%}
<th scope="col" title="{{ c.note }}"{% if c.order %} aria-sort="{{ c.order }}"{% endif %}>
{#- #}<button type="button">{{ c.label }}</button></th>
{%- endmacro -%}
{%- macro dot(color) -%}<i class="dot" style="background:{{ color }}"></i>{%- endmacro -%}
""",
    "text": "{% for p in paragraphs %}<p>{{ p|inline }}</p>{% endfor %}",
    "terms": """<dl class="terms">
{%- for k, v in entries.items() %}<div><dt>{{ k|inline }}</dt><dd>{{ v|inline }}</dd></div>{% endfor -%}
</dl>""",
    "facts": """<dl class="facts">
{%- for k, v in entries.items() %}<div><dt>{{ k }}</dt><dd>{{ v }}</dd></div>{% endfor -%}
</dl>""",
    "table": """{%- import "parts" as parts -%}
<div class="scroll"><table class="sortable"><thead><tr>{% for c in columns %}{{ parts.column(c) }}{% endfor %}</tr></thead>
{#- #}<tbody>{% for row in rows %}<tr>{% for c in row %}{{ parts.cell(c) }}{% endfor %}</tr>{% endfor %}</tbody></table></div>
{%- if caption %}<p class="caption">{{ caption|inline }}</p>{% endif %}""",
    # The title twice, for a narrow card may cut it short.
    "figure": """{%- import "parts" as parts -%}
<figure><h3 title="{{ title }}">{% if color %}{{ parts.dot(color) }}{% endif %}{{ title }}</h3>{{ picture }}
{%- if caption %}<figcaption>{{ caption|inline }}</figcaption>{% endif %}</figure>""",
    "grid": """<div class="grid" style="--min:{{ width }}px">{{ blocks|join }}</div>""",
    "details": """<details><summary>{{ title|inline }}</summary>{{ blocks|join }}</details>""",
    "code": "<pre>{{ source }}</pre>",
    "page": """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<title>{{ page.title }}</title><style>{{ style }}</style></head><body>
<header><h1>{{ page.title }}</h1><p>{{ page.subtitle|inline }}</p>{{ page.intro|join }}</header>
<nav>{% for title, _, _ in page.sections %}<a href="#{{ title|slug }}">{{ title }}</a>{% endfor %}</nav><main>
{%- for title, lead, blocks in page.sections -%}
<section id="{{ title|slug }}"><h2>{{ title }}</h2>
{%- if lead %}<p class="lead">{{ lead|inline }}</p>{% endif %}{{ blocks|join }}</section>
{%- endfor -%}
</main><script>{{ script }}</script></body></html>""",
}


def render(name: str, **values: Any) -> str:
    """A filled-in template: a block (markupsafe.Markup), which other templates insert unescaped."""
    return trusted(_environment().get_template(name).render(**values))


def trusted(html: str) -> str:
    """HTML made by this package itself, which templates insert unescaped."""
    from markupsafe import Markup

    return Markup(html)


@cache
def _environment() -> Any:
    """jinja2 with autoescape, imported for the first block, so that the command line starts without it."""
    from jinja2 import DictLoader, Environment, StrictUndefined

    found = Environment(autoescape=True, loader=DictLoader(TEMPLATES), undefined=StrictUndefined)
    found.filters |= {"inline": _inline, "slug": _slug, "sortable": _sortable}
    return found


def _inline(words: str) -> str:
    """Escaped text; `code` between backquotes, **strong** between double asterisks."""
    from markupsafe import escape

    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(words)))
    return trusted(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", marked))


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _sortable(value: float) -> str:
    return "" if value != value else repr(float(value))  # nan: last in either order
