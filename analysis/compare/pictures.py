"""The figures of `dsf compare`: each a function of records that returns a matplotlib figure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from dsf.analysis.compare.records import MixerRecord, Spread
from dsf.analysis.records import Eigenvalues, HalfLives, Plane
from dsf.analysis.report import count
from dsf.analysis.report.figures import INK, MONO, fade, new_figure

Colors = Mapping[str, str]

WIDE, HALF = 10.8, 6.2  # inches of a figure that has the page's width, and of one of two side by side
CONTRAST = 0.6  # exponent of shades: below 1, so that faint entries are visible
MARKERS = "x", "o", "^", "s", "D", "v"  # of forms
LONGEST_LIFE = 1e5  # position of infinite and of longer half-lives, in tokens


def learning(records: Sequence[MixerRecord], colors: Colors, yardsticks: Mapping[str, float], equal: str) -> Any:
    """Bits per byte after training: a dot at the mean of the seeds, with a bar of one standard deviation to each side.

    Full dots: the same layer for all; hollow dots: the paper's layer. yardsticks: vertical lines. equal: words about
    what is equal.
    """
    ordered = sorted(records, key=lambda r: -r.equal.after.mean)
    figure, axes = new_figure(HALF, 0.34 * len(ordered) + 1.5)
    means = [c.after.mean for r in ordered for c in (r.equal, r.paper) if c is not None]
    low, high = min([*means, *yardsticks.values()]) - 0.15, max([*means, *yardsticks.values()]) + 0.3
    for place, record in enumerate(ordered):
        color = colors[record.name]
        _dot(axes, record.equal.after, place, color)
        if record.paper is not None:
            _dot(axes, record.paper.after, place - 0.24, color, hollow=True)
    for name, value in yardsticks.items():
        axes.axvline(value, color=INK, lw=0.8, ls=(0, (2, 3)), alpha=0.6)
        axes.text(value, len(ordered) - 0.35, f" {name}", va="bottom", fontsize=8, alpha=0.8)
    name_rows(axes, [r.name for r in ordered])
    axes.set_ylim(-0.7, len(ordered) + 0.25)
    axes.set_xlim(low, high)
    _legend(axes, ordered)
    axes.set_xlabel("bits per byte of held-out text (lower is better)\n" + "\n".join(textwrap.wrap(equal, 78)))
    axes.grid(axis="x")
    return figure


def recalled(records: Sequence[MixerRecord], colors: Colors, chance: float, trained: str) -> Any:
    """Share of right answers in the recall task: full dots at the training distance, smaller and paler ones beyond."""
    asked = [(r.name, r.equal.recall) for r in records if r.equal.recall is not None]
    ordered = sorted(asked, key=lambda pair: pair[1][trained].mean)
    figure, axes = new_figure(HALF, 0.34 * len(ordered) + 1.5)
    for place, (name, right) in enumerate(ordered):
        for number, (gap, found) in enumerate(right.items()):
            _dot(axes, found, place - 0.2 * number, colors[name], faint=number, label=gap)
    axes.axvline(chance, color=INK, lw=0.8, ls=(0, (2, 3)), alpha=0.6)
    axes.text(chance, len(ordered) - 0.35, " any value told", va="bottom", fontsize=8, alpha=0.8)
    name_rows(axes, [name for name, _ in ordered])
    axes.set_ylim(-0.9, len(ordered) + 0.1)
    axes.set_xlim(-0.03, 1.03)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_xlabel("right answers; upper dot: noise as in training;\nbelow: 4 and 16 times as much")
    axes.grid(axis="x")
    return figure


def lengths(records: Sequence[MixerRecord], colors: Colors) -> Any:
    """Bits per byte of the same bytes against the number of bytes read before them, from the training length on."""
    figure, axes = new_figure(HALF, max(3.4, 0.25 * len(records) + 1.0))
    for record in records:
        found = record.equal.by_length
        axes.errorbar(
            [int(n) for n in found], [s.mean for s in found.values()], [s.spread for s in found.values()],
            color=colors[record.name], lw=1.5, marker="o", ms=4, capsize=2,
        )  # fmt: skip
    known = [int(n) for n in max((r.equal.by_length for r in records), key=len)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(known, [f"{n:,}" for n in known])
    ends = [list(r.equal.by_length.values())[-1].mean for r in records]
    _name_ends(axes, records, colors, ends, known[-1])
    axes.set_xlabel("bytes read (the first is the length of training)")
    axes.set_ylabel("bits per byte")
    axes.grid(axis="y")
    return figure


def curves(records: Sequence[MixerRecord], colors: Colors) -> Any:
    """Training loss of every mixer in the equal layer against steps: mean of the seeds, smoothed."""
    figure, axes = new_figure(HALF, max(3.4, 0.25 * len(records) + 1.0))
    smooth = [_smooth(r.equal.curve) for r in records]
    for record, values in zip(records, smooth, strict=True):
        axes.plot(range(1, len(values) + 1), values, color=colors[record.name], lw=1.5)
    steps = max(map(len, smooth))
    axes.set_xlim(1, max(steps, 2))
    _name_ends(axes, records, colors, [values[-1] for values in smooth], steps)
    axes.set_xlabel("training step")
    axes.set_ylabel("bits per byte")
    axes.grid(axis="y")
    return figure


def _dot(
    axes: Any,
    spread: Spread,
    place: float,
    color: str,
    hollow: bool = False,
    faint: int = 0,
    label: str = "",
) -> None:
    """A dot at the mean, with a bar of one standard deviation to each side where there are several runs."""
    width = spread.spread if len(spread.each) > 1 else None
    axes.errorbar(
        spread.mean, place, xerr=width, fmt="s" if hollow else "o", color=color, ms=(5.5, 4.5, 4)[faint],
        mfc="none" if hollow else color, capsize=2.5, lw=1.3, alpha=(1, 0.7, 0.5)[faint], gid=label or None,
    )  # fmt: skip


def name_rows(axes: Any, names: Sequence[str], **font: Any) -> None:
    """Name the rows along the y axis, which has no line."""
    axes.set_yticks(range(len(names)), names, **font)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _legend(axes: Any, records: Sequence[MixerRecord]) -> None:
    axes.plot([], [], "o", color=INK, ms=5.5, label="the same layer for all")
    if any(r.paper is not None for r in records):
        axes.plot([], [], "s", color=INK, ms=5.5, mfc="none", label="the paper's own layer")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.06), ncols=2, frameon=False, fontsize=8)


def half_lives(records: Sequence[MixerRecord], colors: Colors, unit: str = "tokens (bytes of text)") -> Any:
    """Half-lives, longest on top, on a logarithmic axis: a dot at the median, a line from the 10th to the 90th
    percentile."""
    found = [(r.name, r.half_life) for r in records if r.half_life is not None]
    found.sort(key=lambda pair: (pair[1].percentiles.median, pair[1].percentiles.high, pair[1].percentiles.low))
    return lives(dict(found), colors, unit)


def lives(ordered: Mapping[str, HalfLives], colors: Colors, unit: str) -> Any:
    """Half-lives by name, the first at the bottom, as in `half_lives`."""
    figure, axes = new_figure(WIDE, 0.25 * len(ordered) + 0.8)
    for place, (name, life) in enumerate(ordered.items()):
        low, middle, high = map(_drawn, (life.percentiles.low, life.percentiles.median, life.percentiles.high))
        axes.plot([low, high], [place, place], color=colors[name], lw=4.5, alpha=0.4, solid_capstyle="round")
        axes.plot(middle, place, "o", color=colors[name], ms=7)
    ticks = [0.1, 1, 10, 100, 1000, 10_000, LONGEST_LIFE]
    axes.set_xscale("log")
    axes.set_xlim(0.08, 1.6 * LONGEST_LIFE)
    every = [x for life in ordered.values() for _, x in life.percentiles]
    cut = any(LONGEST_LIFE <= x < math.inf for x in every)  # those are drawn there, too
    last = f"{LONGEST_LIFE:,.0f} to never" if cut else "never"
    axes.set_xticks(ticks, ["0.1", "1", "10", "100", "1,000", "10,000", last])
    name_rows(axes, list(ordered))
    axes.set_ylim(-0.6, len(ordered) - 0.4)
    axes.set_xlabel(f"half-life in {unit}")
    axes.grid(axis="x")
    return figure


def eigenvalue_histogram(found: Eigenvalues, color: str, negative: bool) -> Any:
    """Shares of eigenvalues on [-1 or 0, 1.25]; heights on a square-root scale, so that rare ones stay visible.

    Complex ones in the plane.
    """
    if found.plane is not None:
        return eigenvalue_plane(found.plane, color)
    low, high, shares = found.histogram.low, found.histogram.high, found.histogram.shares
    step = (high - low) / len(shares)
    edges = [low + i * step for i in range(len(shares) + 1)]
    figure, axes = new_figure(2.9, 1.45)
    axes.stairs([math.sqrt(s) for s in shares], edges, fill=True, color=color, alpha=0.85, lw=0)
    axes.axvline(1, color=INK, lw=0.7, ls=(0, (2, 2)), alpha=0.55)
    if negative:
        axes.axvline(0, color=INK, lw=0.5, alpha=0.35)
    axes.set_xlim(-1.05 if negative else -0.05, high)
    axes.set_ylim(0, 1.02)
    axes.set_xticks([-1, -0.5, 0, 0.5, 1] if negative else [0, 0.25, 0.5, 0.75, 1])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    return figure


def eigenvalue_plane(plane: Plane, color: str) -> Any:
    """Complex eigenvalues in the plane, darker where more of them are (square-root scale), and the unit circle."""
    side, shares = plane.side, [[math.sqrt(s) for s in row] for row in plane.shares]
    figure, axes = new_figure(2.9, 2.7)
    axes.imshow(
        shares, cmap=fade(color), vmin=0, interpolation="none", origin="lower", extent=(-side, side, -side, side)
    )
    around = [2 * math.pi * i / 90 for i in range(91)]
    axes.plot(
        [math.cos(x) for x in around], [math.sin(x) for x in around], color=INK, lw=0.7, ls=(0, (2, 2)), alpha=0.55
    )
    axes.set_xticks([-1, 0, 1])
    axes.set_yticks([-1, 0, 1], ["-i", "0", "i"])
    return figure


def kernel(record: MixerRecord, color: str) -> Any:
    """|Phi| on the sentence: row = the output at a character, column = an earlier character."""
    assert record.kernel is not None
    shares, sentence = record.kernel.shares, record.kernel.sentence
    letters = list(sentence.encode().decode("latin-1")) if len(sentence) != len(shares) else list(sentence)
    return attention(shares, letters, color)


def attention(shares: Sequence[Sequence[float]], pieces: Sequence[str], color: str, side: float = 3.9) -> Any:
    """A matrix of shares between pieces of text: row = output, column = the piece that it looks at."""
    size, long = len(shares), max(map(len, pieces)) > 1
    figure, axes = new_figure(side, side)
    axes.imshow(shades(shares), cmap=fade(color), vmin=0, vmax=1, interpolation="none", aspect="equal")
    labels, points = [printable(c) for c in pieces], max(4.5, min(8.0, 300 / size))
    font = {"fontfamily": MONO, "fontsize": points}
    axes.set_xticks(range(size), labels, rotation=90 if long else 0, **font)
    axes.set_yticks(range(size), labels, **font)
    margin = (max(map(len, labels)) * 0.62 + 0.9) * points / 72 / side  # measuring this many labels takes seconds
    figure.set_layout_engine("none")
    axes.set_position((margin, 0.01, 0.99 - margin, 0.99 - margin))
    axes.xaxis.tick_top()
    axes.tick_params(length=0, pad=1.5)
    for edge in axes.spines.values():
        edge.set_visible(False)
    axes.plot([-0.5, size - 0.5], [-0.5, size - 0.5], color=INK, lw=0.4, alpha=0.3)
    return figure


def state_sizes(kept: Mapping[str, Sequence[int]], colors: Colors, contexts: Sequence[int]) -> Any:
    """Numbers of one layer's state for one sequence, by mixer, against the context, both axes logarithmic."""
    figure, axes = new_figure(HALF, 4.4)
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, found in kept.items():
        groups.setdefault(tuple(found), []).append(name)
    for sizes, members in groups.items():
        grows = sizes[-1] > sizes[0]
        color = colors[members[0]]
        axes.plot(contexts, [max(s, 1) for s in sizes], color=color, lw=2.6 if grows else 1.7)
    ends = [math.log10(max(sizes[-1], 1)) for sizes in groups]
    axes.set_xscale("log")
    axes.set_yscale("log")
    labels = [_short(", ".join(members), len(members)) for members in groups.values()]
    labels = [f"{x} (KV cache)" if g[-1] > g[0] else x for x, g in zip(labels, groups, strict=True)]
    low, high = axes.get_ylim()
    places = _apart(ends, (math.log10(high) - math.log10(low)) / 24)
    for place, label, members in zip(places, labels, groups.values(), strict=True):
        axes.annotate(
            label, (contexts[-1], 10**place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8,
            color=colors[members[0]], annotation_clip=False,
        )  # fmt: skip
    axes.set_xlim(contexts[0], contexts[-1])
    ticks = {1: "1", 16: "16", 256: "256", 4096: "4,096", 65_536: "64k", 1_048_576: "1M"}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_yticks(*_count_ticks(low, high))
    axes.set_xlabel("context in tokens")
    axes.set_ylabel("numbers kept")
    axes.grid()
    return figure


def speeds(records: Sequence[MixerRecord], colors: Colors, forms: Sequence[str]) -> Any:
    """Tokens per second of every form, a row a mixer, on a logarithmic axis, one marker a form."""
    markers = dict(zip(forms, MARKERS[: len(forms)], strict=True))
    figure, axes = new_figure(WIDE, 0.25 * len(records) + 1.1)
    ordered = sorted(records, key=lambda r: max(r.tokens_per_second.values()))
    for place, record in enumerate(ordered):
        speeds = record.tokens_per_second
        color = colors[record.name]
        axes.plot([min(speeds.values()), max(speeds.values())], [place, place], color=color, lw=1, alpha=0.4)
        for form, speed in speeds.items():
            axes.plot(speed, place, markers[form], color=color, ms=6, alpha=0.95)
    for form, marker in markers.items():
        axes.plot([], [], marker, color=INK, ms=5.5, label=form)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(markers), frameon=False, fontsize=8)
    axes.set_xscale("log")
    axes.set_xticks(*_count_ticks(*axes.get_xlim()))
    name_rows(axes, [r.name for r in ordered])
    axes.set_ylim(-0.6, len(ordered) - 0.4)
    axes.set_xlabel("tokens per second, one thread (further right is faster)")
    axes.grid(axis="x")
    return figure


def shades(shares: Sequence[Sequence[float]]) -> list[list[float]]:
    """Each row relative to its largest entry off the diagonal, since skips lie on the diagonal and would be the
    largest.
    """
    out = []
    for i, row in enumerate(shares):
        top = max((x for j, x in enumerate(row) if j != i), default=0.0) or row[i] or 1.0
        out.append([min(1.0, x / top) ** CONTRAST for x in row])
    return out


def _drawn(life: float) -> float:
    return min(max(life, 0.1), LONGEST_LIFE)


def printable(piece: str, longest: int = 14) -> str:
    """A readable label of a character or token: a space as ␣, the space before a word left out."""
    shown = "".join("⏎" if c == "\n" else c if c.isprintable() and c not in "$�" else "·" for c in piece)
    return (shown.strip() or "␣" * min(len(shown), 3) or "·")[:longest]


def _smooth(values: Sequence[float], share: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start."""
    out, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = share * mean + (1 - share) * value, share * weight + (1 - share)
        out.append(mean / weight)
    return out


def _name_ends(axes: Any, records: Sequence[MixerRecord], colors: Colors, ends: Sequence[float], at: float) -> None:
    """Write names beside the right ends of lines, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    places = _apart(ends, (high - low) / 19)
    lift = max(0.0, low - min(places))
    for place, end, record in zip([p + lift for p in places], ends, records, strict=True):
        color = colors[record.name]
        axes.annotate(
            record.name, (at, end), xytext=(1.035, place), textcoords=axes.get_yaxis_transform(), va="center",
            fontsize=8, color=color, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.5, "alpha": 0.6, "relpos": (0, 0.5)},
        )  # fmt: skip


def _apart(values: Sequence[float], gap: float) -> list[float]:
    """The values moved apart so that neighbours are `gap` apart, in the same order, by a few sweeps."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    placed = [values[i] for i in order]
    for _ in range(200):
        for i in range(len(placed) - 1):
            lack = gap - (placed[i + 1] - placed[i])
            if lack > 1e-9:
                placed[i] -= lack / 2
                placed[i + 1] += lack / 2
    out = [0.0] * len(values)
    for place, i in zip(placed, order, strict=True):
        out[i] = place
    return out


def _short(names: str, number: int) -> str:
    return names if len(names) < 34 else f"{names.split(', ')[0]} and {number - 1} more"


def _count_ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Powers of ten inside [low, high] with labels, at most seven."""
    powers = list(range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1))
    step = max(1, math.ceil(len(powers) / 7))
    ticks = [10.0**p for p in powers[::step]]
    return ticks, [count(t) for t in ticks]
