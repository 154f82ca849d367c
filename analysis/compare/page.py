"""The page of `dsf compare`: a Comparison as one HTML file, and its pictures as PNG on request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dsf
from dsf.analysis.compare import CONTEXTS, LAW, PAPER_HEADS, PAPER_WIDTH, Comparison, machine, pictures
from dsf.analysis.probe import MATRIX_TOKENS
from dsf.analysis.report import (
    Cell,
    Column,
    Page,
    code,
    count,
    details,
    duration,
    facts,
    figure,
    grid,
    table,
    terms,
    text,
)
from dsf.analysis.report.figures import colors as palette
from dsf.analysis.report.figures import png, svg
from dsf.call.plan import FORMS

Record = Mapping[str, Any]

WORDS = {
    "State": "What a mixer remembers of the text so far: a fixed number of numbers for recurrences, all "
    "earlier keys and "
    "values for softmax attention.",
    "Eigenvalue": "What one token's transition A multiplies a piece of the state by: 1 keeps it, 0 clears "
    "it, 0.5 halves "
    "it, a negative number flips its sign.",
    "Half-life": "After how many tokens half of what was written is left. It follows from the eigenvalues along the "
    "text; “never” means that nothing is forgotten.",
    "Kernel": "A recurrence is also one big triangular matrix Φ: row i says how much each earlier token counts in "
    "output i. For softmax attention it is the attention map.",
    "Form": "One and the same recurrence computed in another order: naive (the definition), token by token "
    "(recurrent), "
    "a parallel scan, in chunks, or as the matrix Φ. They must agree to rounding.",
    "Bits per byte": "How many bits the model needs for one more byte of text that it has not seen. Knowing "
    "nothing is 8; "
    "lower is better.",
}


def page(comparison: Comparison) -> Page:
    """The whole report."""
    records = comparison.mixers
    colors = dict(zip((r["name"] for r in records), palette(len(records)), strict=True))
    return _Builder(comparison, records, colors).build()


def write_pngs(comparison: Comparison, folder: Path) -> list[Path]:
    """Every picture as folder/<picture>.png; returns the paths."""
    records = comparison.mixers
    colors = dict(zip((r["name"] for r in records), palette(len(records)), strict=True))
    builder = _Builder(comparison, records, colors)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, drawn in builder.figures().items():
        paths.append(folder / f"{name}.png")
        png(drawn, paths[-1])
    return paths


class _Builder:
    """Puts the page together from records and one colour a mixer."""

    def __init__(self, comparison: Comparison, records: Sequence[Record], colors: Mapping[str, str]) -> None:
        self.comparison, self.records, self.colors = comparison, records, colors
        self.yardsticks = comparison.text.yardsticks()
        self.negative = any(r["eigenvalues"]["share_negative"] > 1e-3 for r in records)

    def figures(self) -> dict[str, Any]:
        """All figures, name -> matplotlib figure."""
        records, colors = self.records, self.colors
        drawn = {
            "learning": pictures.learning(records, colors, self.yardsticks),
            "curves": pictures.curves(records, colors),
            "half_lives": pictures.half_lives(records, colors),
            "state_here": pictures.state_sizes(records, colors, CONTEXTS, "here"),
            "state_at_paper_width": pictures.state_sizes(records, colors, CONTEXTS, "at_paper_width"),
            "speeds": pictures.speeds(records, colors, FORMS),
        }
        for record in records:
            name = record["name"]
            drawn[f"eigenvalues_{name}"] = pictures.eigenvalue_histogram(record, colors[name], self.negative)
            drawn[f"kernel_{name}"] = pictures.kernel(record, colors[name])
        return drawn

    def build(self) -> Page:
        """The page with all sections."""
        setup, data = self.comparison.setup, self.comparison.text
        out = Page(
            "Sequence mixers, side by side",
            f"{len(self.records)} ways to mix a sequence, each the same dynamical system "
            "Sₜ = Aₜ Sₜ₋₁ + Bₜ, trained in the same tiny language model on the same text, then opened "
            "up: what it "
            "learns, what it remembers, what it looks at, what it costs.",
        )
        entries = {
            "Mixers": str(len(self.records)),
            "Training": f"{setup.steps} steps · {count(setup.steps * setup.batch * setup.seq)} bytes each",
            "Text": data.name if len(data.name) < 40 else "Python's documentation",
            "Forms agree to": f"{self.comparison.worst():.0e}",
        }
        out.intro.append(facts(entries))
        if not self.records:
            out.section("What failed", "Nothing could be compared.", self.failures())
            return out
        self.drawn = {name: svg(f, name.replace("_", " ")) for name, f in self.figures().items()}
        out.section(
            "Summary",
            "One line a mixer; click a heading to sort by it, point at one to see what it means.",
            self.summary(),
            *([self.failures()] if self.comparison.failed else []),
        )
        out.section("How to read this", "Six words are enough for every picture below.", terms(WORDS))
        self.learning(out)
        self.memory(out)
        self.attention(out)
        self.state(out)
        self.forms(out)
        self.mixers(out)
        self.what_was_run(out)
        return out

    def summary(self) -> str:
        """The first table."""
        columns = [
            Column("mixer", "name of the recurrence"),
            Column("bits/byte after", "on held-out text after training; lower is better", "ascending"),
            Column("before", "the same before training; 8 is knowing nothing"),
            Column("half-life", "median over the state, in tokens (bytes)"),
            Column("never forgotten", "share of the state without any decay"),
            Column("state", "numbers one layer keeps of the text so far, at 1,024 tokens"),
            Column("parameters", "of one mixer layer"),
            Column("fastest form", "tokens per second, one thread"),
            Column("forms differ by", "worst relative error of any form, output or gradient, in float64"),
            Column("structure", "of the transition A"),
        ]
        ordered = sorted(self.records, key=lambda r: r["bits_per_byte"]["after"])
        after = [r["bits_per_byte"]["after"] for r in ordered]
        low, high = 0.0, max(after)  # from zero: a bar twice as long is twice as many bits
        rows = []
        for r in ordered:
            bits, life = r["bits_per_byte"], r["half_life"]
            form, speed = max(r["tokens_per_second"].items(), key=lambda item: item[1])
            state = r["state"]["here"][CONTEXTS.index(1024)]
            color, worst = self.colors[r["name"]], r["worst_disagreement"]
            share = (bits["after"] - low) / (high - low) if high > low else 0.5
            rows.append([
                Cell(r["name"], color=color, note=r["summary"], strong=True),
                Cell(f"{bits['after']:.3f}", bits["after"], bar=share),
                Cell(f"{bits['before']:.2f}", bits["before"]),
                Cell(duration(life["percentiles"]["50"]), life["percentiles"]["50"]),
                Cell(f"{life['share_never']:.0%}", life["share_never"]),
                Cell(f"{state:,}", state, note=r["state"]["formula"]),
                Cell(count(r["parameters"]["mixer"]), r["parameters"]["mixer"]),
                Cell(f"{count(speed)} ({form})", speed),
                Cell(f"{worst:.0e}" if worst else "0", worst, strong=worst > LAW),
                Cell(r["structure"]),
            ])  # fmt: skip
        return table(columns, rows)

    def failures(self) -> str:
        """Mixers that could not be compared, and why."""
        rows = [[Cell(name), Cell(why)] for name, why in self.comparison.failed.items()]
        return table([Column("failed"), Column("because")], rows)

    def learning(self, out: Page) -> None:
        """Bits per byte and training curves."""
        with_conv = [r["name"] for r in self.records if r["has_convolution"]]
        notes = [
            "This is no ranking of architectures: seconds of training on one small text cannot give one. It shows that "
            "each learns, and how fast at this size."
        ]
        if with_conv:
            notes.append(
                "The model has no position encoding. Mixers whose papers put a short convolution in front "
                f"({', '.join(with_conv)}) see the last four bytes at once; the others have to find the order of bytes "
                "through their state alone, in few steps. `dsf compare --bare` takes convolutions and gates away."
            )
        out.section(
            "What they learn",
            "The same model, seed, text and order of batches for all; only the mixer differs.",
            grid(
                [
                    figure(
                        self.drawn["learning"],
                        "Bits per byte after training",
                        "Further left is better. Dotted lines give the scale: order-0 knows only how frequent each "
                        "byte is, bzip2 "
                        "and xz are compressors (xz has read the whole training text, these models a fraction of it).",
                    ),
                    figure(
                        self.drawn["curves"],
                        "How they got there",
                        "Training loss, smoothed: a line that drops earlier learns from fewer bytes.",
                    ),
                ],
                480,
            ),
            text(*notes),
        )

    def memory(self, out: Page) -> None:
        """Half-lives and eigenvalues."""
        histograms = [
            figure(self.drawn[f"eigenvalues_{r['name']}"], r["name"], _spectrum_words(r), self.colors[r["name"]])
            for r in self.records
        ]
        out.section(
            "What they remember",
            "How long a trained mixer keeps what it wrote, measured on held-out text.",
            figure(
                self.drawn["half_lives"],
                "Half-life of the state",
                "The dot is the median over all parts of the state, the bar runs from the 10th to the 90th percentile: "
                "short dots forget within a word, “never” keeps everything and has to live with the clutter.",
            ),
            text(
                "**Eigenvalues of A, token by token.** Mass at 1 (dashed) is memory that is kept as it is; mass near 0 "
                "is overwritten; in between it fades. Heights are on a square-root scale so that rare values show. "
                "Where outputs are divided by a sum (softmax, linear and normalised attention), A includes the factor "
                "by which one token changes that sum: below 1 older tokens' shares shrink, though nothing is forgotten."
            ),
            grid(histograms, 245),
        )

    def attention(self, out: Page) -> None:
        """Kernel matrices."""
        maps = [figure(self.drawn[f"kernel_{r['name']}"], r["name"], "", self.colors[r["name"]]) for r in self.records]
        out.section(
            "What they look at",
            f"The sentence “{self.comparison.sentence}” through the first layer: each row is one output, "
            f"each column an "
            "earlier character, and the stronger the colour, the more it counts.",
            text(
                "Look at how far each row reaches to the left: a thin diagonal sees only the newest "
                "characters, full rows "
                "see everything, vertical stripes are characters that stay important. Shown is |Φ|, "
                "averaged over heads "
                "and channels, each row relative to its largest entry left of the diagonal (skips lie on it)."
            ),
            grid(maps, 340),
        )

    def state(self, out: Page) -> None:
        """State size against context."""
        out.section(
            "What they keep",
            "Numbers one layer stores for one sequence. Softmax attention keeps every key and value (the KV cache) and "
            "grows with the text; all others stay where they are.",
            grid(
                [
                    figure(
                        self.drawn["state_at_paper_width"],
                        f"At a real model's width: d_model {PAPER_WIDTH:,}, {PAPER_HEADS} heads",
                        "Sizes as in the papers. Where the rising line crosses a flat one, the recurrence starts to be "
                        "the cheaper memory.",
                    ),
                    figure(
                        self.drawn["state_here"],
                        "In the tiny model trained here",
                        "Short convolutions count too: they keep the last three inputs of their channels.",
                    ),
                ],
                480,
            ),
        )

    def forms(self, out: Page) -> None:
        """Laws and speeds."""
        names = [f for f in FORMS if f != "naive"]
        columns = [Column("mixer"), *(Column(f, f"worst relative error of {f} against naive") for f in names)]
        rows = []
        for r in self.records:
            cells = []
            for form in names:
                errors = r["forms"].get(form)
                worst = max(errors.values()) if errors else math.nan
                note = f"output {errors['output']:.1e}, gradient {errors['gradient']:.1e}" if errors else "no such form"
                shown = "–" if errors is None else f"{worst:.1e}" if worst else "0"
                cells.append(Cell(shown, worst, note=note, strong=worst > LAW))
            rows.append([Cell(r["name"], color=self.colors[r["name"]]), *cells])
        speed_columns = [Column("mixer"), *(Column(f, f"tokens per second of {f}") for f in FORMS)]
        speed_rows = [
            [
                Cell(r["name"], color=self.colors[r["name"]]),
                *(_speed_cell(r["tokens_per_second"], form) for form in FORMS),
            ]
            for r in self.records
        ]
        out.section(
            "One system, several forms",
            "Every recurrence is computed in up to five ways. On this text, with the trained weights, they "
            "have to give "
            "the same outputs and gradients, and they do at very different speeds.",
            table(
                columns,
                rows,
                f"Worst relative error against the float64 definition (naive), over heads, blocks of 16 "
                f"tokens, outputs "
                f"and all gradients. The law is {LAW:.0e}; anything above is set in bold.",
            ),
            figure(
                self.drawn["speeds"],
                "Tokens per second of each form",
                "A wide line means that the choice of form matters. One sequence on one CPU thread in "
                "float32; naive is "
                "the definition and computes in float64; the kernel matrix is quadratic in length and timed on "
                f"{MATRIX_TOKENS} tokens.",
            ),
            details("The same as a table", table(speed_columns, speed_rows)),
        )

    def mixers(self, out: Page) -> None:
        """What each mixer is."""
        blocks = [
            details(
                f"**{r['name']}**: {r['summary']}",
                text(f"Source: {r['source']}. Layer: `{r['layer']}`. State: {r['state']['formula']} numbers."),
                code(r["system"]),
            )
            for r in self.records
        ]
        out.section(
            "The mixers",
            "Each as its paper writes it: the state decays or is corrected by A, B is written, C reads, D passes by.",
            *blocks,
        )

    def what_was_run(self, out: Page) -> None:
        """Machine, versions, sizes."""
        setup, data = self.comparison.setup, self.comparison.text
        box = machine()
        rows = {
            "Text": f"{data.name}: {len(data.train):,} bytes to train on, the last {len(data.held_out):,} held out",
            "Model": f"byte embedding, {setup.layers} blocks of norm, mixer, norm, MLP; tied head; width "
            f"{setup.d_model}; "
            f"{setup.n_heads} heads, d_state {setup.d_state}, headdim {setup.headdim} where a mixer has them"
            + ("; bare mixers, without short convolutions and gates" if setup.bare else ""),
            "Training": f"AdamW, {setup.steps} steps of {setup.batch} × {setup.seq} bytes "
            f"({setup.steps * setup.batch * setup.seq:,} in all), rate {setup.lr:g}, seed {setup.seed}",
            "Machine": f"{box['cpu']}, {box['cores']} cores, {box['system']}",
            "Versions": f"dsf {dsf.__version__}, torch {box['torch']}, Python {box['python']}",
            "Time": f"{self.comparison.seconds:.0f} s",
        }
        out.section(
            "What was run",
            "Everything needed to repeat it; the same seed gives the same numbers, times apart.",
            terms(rows),
            details("Setup as data", code("\n".join(f"{k} = {v}" for k, v in asdict(setup).items()))),
        )


def _speed_cell(speeds: Mapping[str, float], form: str) -> Cell:
    speed = speeds.get(form)
    if speed is None:
        return Cell("–", math.nan, note="no such form")
    return Cell(count(speed), speed, strong=speed == max(speeds.values()))


def _spectrum_words(record: Record) -> str:
    values, life = record["eigenvalues"], record["half_life"]
    median = life["percentiles"]["50"]
    words = [f"half-life {duration(median)} tokens" if math.isfinite(median) else "half-life: never"]
    if values["share_one"] > 0.005:
        words.append(f"{values['share_one']:.0%} exactly 1")
    if values["share_negative"] > 0.001:
        words.append(f"{values['share_negative']:.1%} negative")
    if values["share_above_one"] > 0.001:
        words.append(f"{values['share_above_one']:.0%} above 1")
    return "; ".join(words)
