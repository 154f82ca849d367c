"""Figures of reports: matplotlib figures as inline SVG in the page's text colour, light or dark, or as PNG.

matplotlib is an optional extra (`dsf-zoo[plots]`), imported for the first figure.
"""

from __future__ import annotations

import base64
import html
import importlib
import io
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsf.analysis._write import whole
from dsf.analysis.report.templates import render, trusted
from dsf.language.errors import DsfError

INK = "#1e1f22"  # replaced by the page's text colour in SVG; kept in PNG
_FONTS = "system-ui,-apple-system,'Segoe UI',Inter,Roboto,'Helvetica Neue',Arial,sans-serif"
MONO = "DejaVu Sans Mono"  # in figures; on the page the reader's own monospace font
_MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9.0,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 3.0,
    "ytick.major.size": 3.0,
    "xtick.minor.size": 0.0,
    "ytick.minor.size": 0.0,
    "text.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def require_matplotlib() -> None:
    """Raise a DsfError that names the extra, unless matplotlib is installed."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise DsfError("pictures need matplotlib: pip install 'dsf-zoo[plots]'") from error


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure of width x height inches with one plot: (figure, axes). Raises DsfError without matplotlib."""
    require_matplotlib()
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        return figure, figure.add_subplot()


def svg(figure: Any, label: str) -> str:
    """The figure as an inline <svg> without external references. label: a description for screen readers."""
    import matplotlib as mpl

    _settle(figure)
    buffer = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn = buffer.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.S)
    drawn = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", drawn)
    drawn = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", drawn, count=1)
    drawn = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", drawn, count=1)
    drawn = drawn.replace("xlink:href", "href").replace(INK, "currentColor")
    drawn = re.sub(r"<!--.*?-->\n?", "", drawn, flags=re.S)
    drawn = re.sub(r"(font: [^\"']*?px) [^\";]*", _font, drawn)
    drawn = re.sub(r' id="(?!p[0-9a-f]{10}|m[0-9a-f]{10}|h[0-9a-f]{10}|image|C)[^"]*"', "", drawn)
    return trusted(drawn.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1))


def _settle(figure: Any) -> None:
    """Compute the figure's layout once; a layout for every drawing would move things slightly."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    if isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")


def _font(match: re.Match[str]) -> str:
    return f"{match[1]} {_MONO if 'Mono' in match[0] else _FONTS}"


def png(figure: Any, path: Path, dpi: int = 200) -> None:
    """Write the figure as a PNG on white, with the same bytes every time. Raises DsfError where the disk is full."""
    _settle(figure)
    how: dict[str, Any] = {"format": "png", "dpi": dpi, "facecolor": "white", "metadata": {"Software": None}}
    whole(path, lambda other: figure.savefig(other, **how))


def write_pngs(figures: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write every figure as folder/<name>.png, without characters that file names cannot have; returns the paths."""
    paths = [folder / f"{_file_name(name)}.png" for name in figures]
    for path, drawn in zip(paths, figures.values(), strict=True):
        png(drawn, path)
    return paths


def _file_name(name: str) -> str:
    words = name.replace("←", "backward").replace("→", "forward")
    return "_".join("".join(c if c.isalnum() or c in "._-" else " " for c in words).split())


def colors(number: int) -> list[str]:
    """`number` colours that are readable on white and on black: hues around the circle (OKLCH) with two lightnesses
    in turn.
    """
    return [_oklch(0.60 if i % 2 else 0.71, 0.15, 25 + 360 * i / max(number, 6)) for i in range(number)]


def ramp(number: int) -> list[str]:
    """`number` colours in a visible order, blue to red, for layers by depth."""
    return [_oklch(0.66, 0.15, 260 - 230 * i / max(1, number - 1)) for i in range(number)]


def _oklch(lightness: float, chroma: float, hue: float) -> str:
    """#rrggbb of an OKLCH colour (Ottosson 2020), clipped to sRGB."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    s = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
        -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
        -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s,
    )
    return "#" + "".join(f"{_channel(x):02x}" for x in linear)


def _channel(x: float) -> int:
    x = min(1.0, max(0.0, x))
    return round(255 * (12.92 * x if x <= 0.0031308 else 1.055 * x ** (1 / 2.4) - 0.055))


def fade(color: str) -> Any:
    """A colour map from transparent to color."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    r, g, b = to_rgb(color)
    return LinearSegmentedColormap.from_list(color, [(r, g, b, 0.0), (r, g, b, 1.0)])
