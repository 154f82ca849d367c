"""The figures of `dsf analyze`: each a function of records of runs that returns a matplotlib figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsf.analysis.analyze.tables import nbytes
from dsf.analysis.compare.pictures import CONTRAST, HALF, WIDE, name_rows, printable, shades
from dsf.analysis.records import Eigenvalues
from dsf.analysis.report import count
from dsf.analysis.report.figures import INK, MONO, fade, new_figure

Colors = Mapping[str, str]

ROW = 0.2  # inches of a row of a picture that has one for each layer
MOST_COLUMNS, MOST_HEADS, MOST_LAYERS = 16, 9, 32  # of the wall of maps


def spectra(found: Mapping[str, Eigenvalues], colors: Colors) -> Any:
    """Eigenvalues of every layer, a row each; darker where more of them are (square-root scale)."""
    shape = next(iter(found.values())).histogram
    figure, axes = new_figure(WIDE, ROW * len(found) + 0.75)
    for place, (name, values) in enumerate(found.items()):
        shares = [math.sqrt(s) for s in values.histogram.shares]
        top = max(shares[1:-1]) or 1.0  # the ends hold all that lies outside
        axes.imshow(
            [shares], cmap=fade(colors[name]), vmin=0, vmax=top, interpolation="none", aspect="auto",
            extent=(shape.low, shape.high, place + 0.45, place - 0.45),
        )  # fmt: skip
    negative = any(values.share_negative > 1e-3 for values in found.values())
    for value in (0, 1) if negative else (1,):
        axes.axvline(value, color=INK, lw=0.7, ls=(0, (2, 2)), alpha=0.55)
    above = any(values.share_above_one > 1e-3 for values in found.values())
    axes.set_xlim(shape.low if negative else 0, shape.high if above else 1.01)
    axes.set_ylim(len(found) - 0.5, -0.5)
    name_rows(axes, list(found), fontsize=8)
    part = "real part of the " if any(values.plane is not None for values in found.values()) else ""
    axes.set_xlabel(f"{part}eigenvalue of one token's transition" + ("" if part else ": 0 clears, 1 keeps"))
    return figure


def heads(found: Mapping[str, Sequence[float]], colors: Colors, label: str, width: float = HALF) -> Any:
    """A number of every head, a column a layer: a dot a head, a dash at the median. Zeros are left out."""
    figure, axes = new_figure(width, 3.2)
    for place, (name, every) in enumerate(found.items()):
        values = [x for x in every if x]
        if not values:
            continue
        axes.plot([place] * len(values), values, "o", color=colors[name], ms=4, alpha=0.55, mew=0)
        middle = statistics.median(values)
        axes.plot([place - 0.33, place + 0.33], [middle, middle], color=colors[name], lw=2, solid_capstyle="round")
    axes.set_yscale("log")
    _plain_ticks(axes)
    _name_columns(axes, list(found))
    axes.set_ylabel(label)
    axes.grid(axis="y")
    return figure


def along(found: Mapping[str, tuple[list[int], list[float]]], colors: Colors, label: str) -> Any:
    """A number of the state along the text, a line a layer."""
    figure, axes = new_figure(HALF, 3.2)
    for name, line in found.items():
        axes.plot(*line, color=colors[name], lw=1.5, alpha=0.9)
    values = [x for _, line in found.values() for x in line if x > 0]
    if values and max(values) > 30 * min(values):
        axes.set_yscale("log")
        _plain_ticks(axes)
    else:
        axes.set_ylim(bottom=0)
    names, last = list(found), [line[-1] for _, line in found.values()]
    for place in {0, len(names) - 1, last.index(max(last)), last.index(min(last))}:
        axes.annotate(
            names[place], (found[names[place]][0][-1], last[place]), xytext=(5, 0), va="center",
            textcoords="offset points", fontsize=7.5, color=colors[names[place]], annotation_clip=False,
        )  # fmt: skip
    axes.set_xlabel("tokens read")
    axes.set_ylabel(label)
    axes.grid(axis="y")
    return figure


def tokens(found: Mapping[str, Sequence[float]], colors: Colors, key: str, pieces: Sequence[str]) -> Any:
    """A number of every token of the sentence, a row a layer, from pale (zero) to dark (the row's largest).

    Decays begin at the row's smallest; attention received has more contrast, as the first token often receives most.
    """
    size = len(pieces)
    long = max(map(len, pieces)) > 1
    figure, axes = new_figure(WIDE, ROW * len(found) + (0.95 if long else 0.6))
    for place, (name, values) in enumerate(found.items()):
        low = min(values) if key == "decay" else 0.0
        span = max(values) - low or 1.0
        contrast = CONTRAST if key == "received" else 1.0
        shade = [(max(0.0, x - low) / span) ** contrast for x in values]
        axes.imshow(
            [shade], cmap=fade(colors[name]), vmin=0, vmax=1, interpolation="none", aspect="auto",
            extent=(-0.5, size - 0.5, place + 0.44, place - 0.44),
        )  # fmt: skip
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlim(-0.5, size - 0.5)
    font = {"fontfamily": MONO, "fontsize": 8}
    axes.set_xticks(range(size), [printable(p) for p in pieces], rotation=90 if long else 0, **font)
    axes.xaxis.tick_top()
    name_rows(axes, list(found), fontsize=8)
    axes.tick_params(axis="x", length=0, pad=2)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def wall(maps: Mapping[str, Tensor], colors: Colors) -> Any:
    """|Phi| of every head on the sentence, a column a layer, a row a head; long models go on below."""
    names = list(maps)
    shown = [names[i] for i in spread(len(names), MOST_LAYERS)]
    rows = min(MOST_HEADS, max(maps[name].shape[0] for name in shown))
    bands = math.ceil(len(shown) / MOST_COLUMNS)
    columns = math.ceil(len(shown) / bands)
    size, gap = maps[shown[0]].shape[-1], 3
    cell = WIDE / columns
    figure, axes = new_figure(WIDE, bands * (rows * min(cell, 1.6) + 0.3))
    height = bands * (rows * (size + gap) + 8)
    canvas = torch.zeros(height, columns * (size + gap), 4)
    for place, name in enumerate(shown):
        band, column = divmod(place, columns)
        mine = maps[name]
        left, top = column * (size + gap), band * (rows * (size + gap) + 8) + 8
        for row, head in enumerate(spread(mine.shape[0], rows)):
            shade = torch.tensor(shades(mine[head].tolist()))
            y = top + row * (size + gap)
            canvas[y : y + size, left : left + size] = _tinted(shade, colors[name])
        axes.text(left + size / 2, top - 1.5, name, ha="center", va="bottom", fontsize=7.5)
    axes.imshow(canvas.numpy(), interpolation="none", aspect="equal" if cell <= 1.6 else "auto")
    axes.set_axis_off()
    return figure


def state_bytes(
    by_kind: Mapping[str, Sequence[int]], contexts: Sequence[int], colors: Colors, if_cached: Sequence[int]
) -> Any:
    """Bytes of one sequence's state against the context, a line a kind of layer, both axes logarithmic.

    if_cached: bytes of the recurrent layers if they were attention, dashed; empty where there are none.
    """
    figure, axes = new_figure(WIDE, 3.4)
    lines: dict[str, tuple[Sequence[int], str, Any]] = {
        kind: (sizes, colors[kind], "-") for kind, sizes in by_kind.items()
    }
    if any(if_cached):
        lines["the recurrent ones, as\nattention of their width"] = (if_cached, INK, (0, (3, 3)))
    for kind, (sizes, color, dashes) in lines.items():
        axes.plot(contexts, [max(s, 1) for s in sizes], color=color, lw=2.2 if dashes == "-" else 1.2, ls=dashes)
        axes.annotate(
            kind, (contexts[-1], max(sizes[-1], 1)), xytext=(6, 0), textcoords="offset points", va="center",
            fontsize=8, color=color, annotation_clip=False,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low / 2, high * 2)
    marks = [1 << i for i in range(0, 52, 5 if high / low > 1e4 else 2)]
    marks = [m for m in marks if low / 2 <= m <= high * 2]
    axes.set_yticks(marks, [nbytes(m) for m in marks])
    axes.minorticks_off()
    axes.set_xlim(contexts[0], contexts[-1])
    ticks = {1: "1", 16: "16", 256: "256", 4096: "4,096", 65_536: "64k", 1_048_576: "1M"}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xlabel("context in tokens")
    axes.set_ylabel("kept for one sequence")
    axes.grid()
    return figure


def spread(number: int, most: int) -> list[int]:
    """At most `most` evenly spaced numbers of 0 … number - 1, with the first and the last."""
    if number <= most:
        return list(range(number))
    return sorted({round(i * (number - 1) / max(1, most - 1)) for i in range(most)})


def _tinted(shade: Tensor, color: str) -> Tensor:
    """[T, T, 4]: the color, with shade as its opacity."""
    from matplotlib.colors import to_rgb

    out = torch.tensor([*to_rgb(color), 0.0]).expand(*shade.shape, 4).clone()
    out[..., 3] = 0.04 + 0.96 * shade
    return out


def _name_columns(axes: Any, names: Sequence[str]) -> None:
    places = spread(len(names), 32)
    upright = sum(len(names[i]) + 2 for i in places) > 12 * axes.figure.get_figwidth()
    axes.set_xticks(places, [names[i] for i in places], rotation=90 if upright else 0, fontsize=7.5)
    axes.set_xlim(-0.7, len(names) - 0.3)


def _plain_ticks(axes: Any) -> None:
    """Ticks at 1, 2, 5, 10 … instead of powers, as few as suffice."""
    low, high = axes.get_ylim()
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks: list[float] = []
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), tuple(1 + 0.1 * i for i in range(90))):
        marks = [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]
        if len(marks) > 2:
            break
    axes.set_yticks(marks, [count(m) for m in marks])
    axes.minorticks_off()
