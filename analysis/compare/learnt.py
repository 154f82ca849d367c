"""The results of training on the page of `dsf compare`: the table of all mixers, and a section of figures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dsf.analysis.compare import CONTEXTS, LAW, recall
from dsf.analysis.compare.records import Learnt, MixerRecord, Spread
from dsf.analysis.records import HalfLives
from dsf.analysis.report import Cell, Column, Page, code, count, details, duration, figure, grid, table, text

if TYPE_CHECKING:
    from dsf.analysis.compare.page import Builder


def summary(builder: Builder) -> str:
    """The table of all mixers."""
    columns = [
        Column("mixer", "name of the recurrence"),
        Column("bits/byte", "on held-out text after training, in the same layer for all; lower is better", "ascending"),
        Column("paper's layer", "the same in the layer of its paper: its own convolution, gates and start"),
        Column(
            "recall",
            f"right answers, {recall.GAP} bytes of noise between; a guess among the values: {recall.CHANCE:.0%}",
        ),
        Column("far recall", f"the same with {recall.GAPS[-1]} bytes of noise, which training never had"),
        Column("before", "bits per byte before training; 8 is knowing nothing"),
        Column("rate", "learning rate, the best of those tried in a short run"),
        Column("half-life", "median over the state, in tokens (bytes)"),
        Column("never forgotten", "share of the state without any decay"),
        Column("state", "numbers one layer keeps of the text so far, at 1,024 tokens"),
        Column("parameters", "of the model (on hover: of one mixer)"),
        Column("fastest form", "tokens per second, one thread"),
        Column("forms differ by", "worst relative error of any form, output or gradient, in float64"),
        Column("structure", "of the transition A"),
    ]
    ordered = sorted(builder.records, key=lambda r: r.equal.after.mean)
    longest = max(r.equal.after.mean for r in ordered)
    return table(columns, [row(builder, r, longest) for r in ordered], builder.equal() + ".")


def _lives(life: HalfLives | None, unseen: str) -> list[Cell]:
    """The median of half-lives and the share of what is never forgotten; dashes, with the reason, without any."""
    if life is None:
        return [Cell("–", math.nan, note=unseen)] * 2
    median = life.percentiles.median
    return [Cell(duration(median), median), Cell(f"{life.share_never:.0%}", life.share_never)]


def row(builder: Builder, r: MixerRecord, longest: float) -> list[Cell]:
    """A mixer's row. longest: the bits per byte of the longest bar; bars begin at zero."""
    own, worst = r.equal, r.worst_disagreement
    form, speed = max(r.tokens_per_second.items(), key=lambda item: item[1])
    state, sizes = r.state.here[CONTEXTS.index(1024)], own.parameters
    gaps = (str(recall.GAPS[0]), str(recall.GAPS[-1]))
    right = [_spread_cell(own.recall[g] if own.recall else None, "{:.0%}") for g in gaps]
    return [
        Cell(r.name, color=builder.colors[r.name], note=r.summary, strong=True),
        _spread_cell(own.after, "{:.3f}", bar=own.after.mean / longest),
        _spread_cell(r.paper.after if r.paper else None, "{:.3f}"),
        *right,
        Cell(f"{own.before:.2f}", own.before),
        Cell(f"{own.rate:g}", own.rate, note=_tried(own)),
        *_lives(r.half_life, r.unseen),
        Cell(f"{state:,}", state, note=r.state.formula),
        Cell(count(sizes.model), sizes.model, note=f"mixer {sizes.mixer:,}, MLP {own.hidden} wide"),
        Cell(f"{count(speed)} ({form})", speed),
        Cell(f"{worst:.0e}" if worst else "0", worst, strong=worst > LAW),
        Cell(r.structure),
    ]


def learning(builder: Builder, out: Page) -> None:
    """Add the section of bits per byte, training curves, recall, lengths and samples."""
    bare = builder.comparison.setup.bare
    parts = "no convolution, no gate" if bare else "short convolution and SiLU, gate"
    notes = [
        "This is no ranking of architectures: seconds of training on one small text cannot give one. It shows that "
        "each learns, and how fast at this size; where bars overlap, there is no difference to speak of.",
        f"Full dots: every recurrence in the same layer ({parts}, norm of each head, output projection), made of "
        "its declaration. No model has a position encoding; all see the order of bytes by the same convolution and "
        "by their state. Hollow squares: the layer of the mixer's paper, with what that adds or leaves out. MLPs are "
        "as wide as it takes for all models to have the same number of parameters.",
    ]
    drawn = [
        figure(
            builder.drawn["learning"],
            "Bits per byte after training",
            "Further left is better. Dotted lines give the scale: order-0 knows only how frequent each byte is, "
            "bzip2 and xz are compressors (xz has read the whole training text, these models a fraction of it).",
        ),
        figure(
            builder.drawn["curves"],
            "Training loss",
            "Smoothed; a line that drops earlier learns from fewer bytes.",
        ),
    ]
    if "recall" in builder.drawn:
        drawn.append(figure(
            builder.drawn["recall"],
            "Recall from the state",
            f"New models, trained on this alone: {recall.PAIRS} keys, each with a value, then noise, then the keys "
            "again in another order. Which value came with this key? Weights cannot know, only the state can.",
        ))  # fmt: skip
    if "lengths" in builder.drawn:
        drawn.append(figure(
            builder.drawn["lengths"],
            "Longer than in training",
            "The same bytes predicted after more text: a falling line makes use of it, a rising one gets worse.",
        ))  # fmt: skip
    samples = [details(f"**{r.name}**", code(_readable(r.equal.sample))) for r in builder.records]
    out.section(
        "What they learn",
        "The same text, seeds and order of batches for all; only the mixer differs.",
        grid(drawn, 480),
        text(*notes),
        text(f"**What they write** after “{builder.comparison.text.sentence}”, drawn at temperature 0.8:"),
        *samples,
    )


def _spread_cell(spread: Spread | None, shown: str, bar: float | None = None) -> Cell:
    """The cell of a mean and its spread, with the single runs as its note."""
    if spread is None:
        return Cell("–", math.nan)
    each = ", ".join(shown.format(x) for x in spread.each)
    extra = f" ± {shown.format(spread.spread)}" if len(spread.each) > 1 else ""
    return Cell(shown.format(spread.mean) + extra, spread.mean, bar=bar, note=each if extra else "")


def _tried(learnt: Learnt) -> str:
    """The rates tried with their results, and whether the best is the first or last of them."""
    tried = learnt.rates
    if not tried:
        return "given"
    rates = sorted(map(float, tried))
    edge = "; the best is at the edge of those tried" if learnt.rate in (rates[0], rates[-1]) else ""
    return ", ".join(f"{rate}: {bits:.2f}" for rate, bits in tried.items()) + edge


def _readable(sample: str) -> str:
    """A sample with · in place of characters that cannot be shown."""
    return "".join(c if c == "\n" or (c.isprintable() and c != "\ufffd") else "·" for c in sample)
