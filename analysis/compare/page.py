"""The page of `dsf compare`: a Comparison as one HTML file, and its figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dsf.analysis.compare import CONTEXTS, LAW, PAPER_HEADS, PAPER_WIDTH, Comparison, pictures, recall
from dsf.analysis.compare.learnt import learning, summary
from dsf.analysis.compare.records import MixerRecord
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
from dsf.analysis.report.figures import svg
from dsf.call.cost import CONVOLUTION
from dsf.call.plan import FORMS

WORDS = {
    "State": "What a mixer remembers of the text so far: a fixed number of numbers for recurrences, all "
    "earlier keys and values for softmax attention.",
    "Eigenvalue": "What one token's transition A multiplies a piece of the state by: 1 keeps it, 0 clears "
    "it, 0.5 halves it, a negative number flips its sign.",
    "Half-life": "After how many tokens half of what was written is left. It follows from the eigenvalues along the "
    "text; “never” means that nothing is forgotten.",
    "Kernel": "A recurrence is also one big triangular matrix Φ: row i says how much each earlier token counts in "
    "output i. For softmax attention it is the attention map.",
    "Form": "One and the same recurrence computed in another order: naive (the definition), token by token "
    "(recurrent), a parallel scan, in chunks, or as the matrix Φ. They must agree to rounding.",
    "Bits per byte": "How many bits the model needs for one more byte of text that it has not seen. Knowing "
    "nothing is 8; lower is better.",
}


class Builder:
    """Builds the page of a Comparison. Every mixer has a colour."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.records = comparison.mixers
        self.colors = dict(zip((r.name for r in self.records), palette(len(self.records)), strict=True))
        self.yardsticks = comparison.text.yardsticks_bits_per_byte
        some = any(CONVOLUTION in r.tokens_per_second for r in self.records)
        self.named_forms = (*FORMS, CONVOLUTION) if some else FORMS
        self.seen = [r for r in self.records if not r.unseen]
        self.negative = any(r.eigenvalues.share_negative > 1e-3 for r in self.seen if r.eigenvalues is not None)

    def figures(self) -> dict[str, Any]:
        """All matplotlib figures by name."""
        records, colors = self.records, self.colors
        drawn = {
            "learning": pictures.learning(records, colors, self.yardsticks, self.equal()),
            "curves": pictures.curves(records, colors),
            "state_here": pictures.state_sizes({r.name: r.state.here for r in records}, colors, CONTEXTS),
            "state_at_paper_width": pictures.state_sizes(
                {r.name: r.state.at_paper_width for r in records}, colors, CONTEXTS
            ),
            "speeds": pictures.speeds(records, colors, self.named_forms),
        }
        if any(r.equal.recall for r in records):
            drawn["recall"] = pictures.recalled(records, colors, recall.CHANCE, str(recall.GAP))
        if any(r.equal.by_length for r in records):
            drawn["lengths"] = pictures.lengths(records, colors)
        if self.seen:
            drawn["half_lives"] = pictures.half_lives(self.seen, colors)
        for r in self.seen:
            assert r.eigenvalues is not None
            drawn[f"eigenvalues_{r.name}"] = pictures.eigenvalue_histogram(r.eigenvalues, colors[r.name], self.negative)
            drawn[f"kernel_{r.name}"] = pictures.kernel(r, colors[r.name])
        return drawn

    def equal(self) -> str:
        """Words about what is equal for all mixers, and the number of runs."""
        protocol, apart = self.comparison.protocol, self.comparison.parameters_apart
        rates = "rate: the best of " + ", ".join(f"{r:g}" for r in protocol.rates) if len(protocol.rates) > 1 else ""
        seeds = f"{protocol.seeds} seeds, bars: ± one standard deviation" if protocol.seeds > 1 else "one seed"
        return "; ".join(filter(None, [f"parameters equal to {max(apart, 0.001):.1%}", seeds, rates]))

    def build(self) -> Page:
        """The whole page."""
        setup, data = self.comparison.setup, self.comparison.text
        out = Page(
            "Sequence mixers, side by side",
            f"{len(self.records)} ways to mix a sequence, each the same dynamical system Sₜ = Aₜ Sₜ₋₁ + Bₜ, trained in "
            "the same tiny language model on the same text, then opened up: what it learns, what it remembers, what it "
            "looks at, what it costs.",
        )
        entries = {
            "Mixers": str(len(self.records)),
            "Training": f"{setup.steps} steps · {count(setup.steps * setup.batch * setup.seq)} bytes each",
            "Text": data.name if len(data.name) < 40 else "Python's documentation",
            "Forms agree to": f"{self.comparison.worst_disagreement:.0e}",
        }
        out.intro.append(facts(entries))
        if not self.records:
            out.section("What failed", "Nothing could be compared.", self.failures())
            return out
        self.drawn = {name: svg(f, name.replace("_", " ")) for name, f in self.figures().items()}
        out.section(
            "Summary",
            "One line a mixer; click a heading to sort by it, point at one to see what it means.",
            summary(self),
            *([self.failures()] if self.comparison.failed else []),
        )
        out.section("How to read this", "Six terms are enough for all pictures below.", terms(WORDS))
        learning(self, out)
        self.memory(out)
        self.attention(out)
        self.state(out)
        self.forms(out)
        self.mixers(out)
        self.what_was_run(out)
        return out

    def failures(self) -> str:
        """The block of mixers that failed, with their errors."""
        rows = [[Cell(name), Cell(why)] for name, why in self.comparison.failed.items()]
        return table([Column("failed"), Column("because")], rows)

    def unseen(self) -> list[str]:
        """A block of the mixers without eigenvalues and kernel, with the reasons, where there are any."""
        rows = [[Cell(r.name), Cell(r.unseen)] for r in self.records if r.unseen]
        return [table([Column("not seen"), Column("because")], rows)] if rows else []

    def memory(self, out: Page) -> None:
        """Add the section of half-lives and eigenvalues."""
        histograms = [
            figure(self.drawn[f"eigenvalues_{r.name}"], r.name, _spectrum_words(r), self.colors[r.name])
            for r in self.seen
        ]
        about = "How long a trained mixer keeps what it wrote, measured on held-out text."
        if not self.seen:
            out.section("What they remember", about, *self.unseen())
            return
        out.section(
            "What they remember",
            about,
            figure(
                self.drawn["half_lives"],
                "Half-life of the state",
                "The dot is the median over all parts of the state, the bar runs from the 10th to the 90th percentile: "
                "far left, half is forgotten within a word; at “never” everything is kept.",
            ),
            text(
                "**Eigenvalues of A, token by token.** Mass at 1 (dashed) is memory that is kept as it is; mass near 0 "
                "is overwritten; in between it fades. Heights are on a square-root scale so that rare values show. "
                "Where outputs are divided by a sum (softmax, linear and normalised attention), A includes the factor "
                "by which one token changes that sum: below 1 older tokens' shares shrink, though nothing is forgotten."
            ),
            grid(histograms, 245),
            *self.unseen(),
        )

    def attention(self, out: Page) -> None:
        """Add the section of kernel matrices."""
        maps = [figure(self.drawn[f"kernel_{r.name}"], r.name, "", self.colors[r.name]) for r in self.seen]
        if not maps:
            return
        out.section(
            "What they look at",
            f"The sentence “{self.comparison.text.sentence}” through the first layer: each row is one output, each "
            "column an earlier character, and the stronger the colour, the more it counts.",
            text(
                "Look at how far each row reaches to the left: a thin diagonal sees only the newest characters, full "
                "rows see everything, vertical stripes are characters that stay important. Shown is |Φ|, averaged over "
                "heads and channels, each row relative to its largest entry left of the diagonal (skips lie on it)."
            ),
            grid(maps, 340),
        )

    def state(self, out: Page) -> None:
        """Add the section of state size against context."""
        out.section(
            "What they keep",
            "Numbers one layer stores for one sequence. Softmax attention keeps every key and value (the KV cache) and "
            "grows with the text; all others keep their size.",
            grid(
                [
                    figure(
                        self.drawn["state_at_paper_width"],
                        f"At a real model's width: d_model {PAPER_WIDTH:,}, {PAPER_HEADS} heads",
                        "Sizes as in the papers. Where the rising line crosses a flat one, the recurrence needs less "
                        "memory from there on.",
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
        """Add the section of agreement and speed of the forms."""
        forms = self.named_forms
        names = [f for f in forms if f != "naive"]
        columns = [Column("mixer"), *(Column(f, f"worst relative error of {f} against naive") for f in names)]
        rows = []
        for r in self.records:
            cells = []
            for form in names:
                errors = r.forms.get(form)
                worst = errors.worst if errors else math.nan
                note = f"output {errors.output:.1e}, gradient {errors.gradient:.1e}" if errors else "no such form"
                shown = "–" if errors is None else f"{worst:.1e}" if worst else "0"
                cells.append(Cell(shown, worst, note=note, strong=worst > LAW))
            rows.append([Cell(r.name, color=self.colors[r.name]), *cells])
        speed_columns = [Column("mixer"), *(Column(f, f"tokens per second of {f}") for f in forms)]
        speed_rows = [
            [
                Cell(r.name, color=self.colors[r.name]),
                *(_speed_cell(r.tokens_per_second, form) for form in forms),
            ]
            for r in self.records
        ]
        out.section(
            "One system, several forms",
            f"Every recurrence is computed in up to {'six' if CONVOLUTION in forms else 'five'} ways. On this text, "
            "with the trained weights, all must give the same outputs and gradients; their speeds differ.",
            table(
                columns,
                rows,
                "Worst relative error against the float64 definition (naive), over heads, blocks of 16 tokens, outputs "
                f"and all gradients. The law is {LAW:.0e}; anything above is set in bold.",
            ),
            figure(
                self.drawn["speeds"],
                "Tokens per second of each form",
                "A wide line means that the choice of form matters. One sequence on one CPU thread in float32; naive "
                "is the definition and computes in float64; the kernel matrix is quadratic in length and timed on "
                f"{MATRIX_TOKENS} tokens.",
            ),
            details("The same as a table", table(speed_columns, speed_rows)),
        )

    def mixers(self, out: Page) -> None:
        """Add the section that describes each mixer."""
        blocks = [
            details(
                f"**{r.name}**: {r.summary}",
                text(f"Source: {r.source}. Layer of its paper: `{_paper(r)}`. State: {r.state.formula} numbers."),
                code(r.system),
            )
            for r in self.records
        ]
        out.section(
            "The mixers",
            "Each as its paper writes it: the state decays or is corrected by A, B is written, C reads, D passes by.",
            *blocks,
        )

    def what_was_run(self, out: Page) -> None:
        """Add the section of machine, versions and sizes."""
        setup, data = self.comparison.setup, self.comparison.text
        box = self.comparison.machine
        rows = {
            "Text": f"{data.name}: {data.train_bytes:,} bytes to train on, the last {data.held_out_bytes:,} held out",
            "Model": f"byte embedding, {setup.layers} blocks of norm, mixer, norm, MLP; tied head; width "
            f"{setup.d_model}; "
            f"{setup.n_heads} heads, d_state {setup.d_state}, headdim {setup.headdim} where a mixer has them"
            + ("; bare mixers, without short convolutions and gates" if setup.bare else ""),
            "Training": f"AdamW, {setup.steps} steps of {setup.batch} × {setup.seq} bytes "
            f"({setup.steps * setup.batch * setup.seq:,} in all), seeds from {setup.seed} on; {self.equal()}",
            "Recall": f"{self.comparison.protocol.recall_steps} steps of {recall.ROWS} sequences of their own"
            if self.comparison.protocol.recall_steps
            else "not trained",
            "Machine": f"{box.cpu}, {box.cores} cores, {box.system}",
            "Versions": f"dsf {self.comparison.dsf}, torch {box.torch}, Python {box.python}",
            "Time": f"{self.comparison.seconds:.0f} s",
        }
        out.section(
            "What was run",
            "Everything needed to repeat it; the same seed gives the same numbers, times apart.",
            terms(rows),
            details("Setup as data", code("\n".join(f"{k} = {v}" for k, v in asdict(setup).items() if v is not None))),
        )


def _paper(r: MixerRecord) -> str:
    return r.paper.layer if r.paper else "none trained"


def _speed_cell(speeds: Mapping[str, float], form: str) -> Cell:
    speed = speeds.get(form)
    if speed is None:
        return Cell("–", math.nan, note="no such form")
    return Cell(count(speed), speed, strong=speed == max(speeds.values()))


def _spectrum_words(record: MixerRecord) -> str:
    values, life = record.eigenvalues, record.half_life
    assert values is not None and life is not None
    median = life.percentiles.median
    words = ["half-life: never" if math.isinf(median) else f"half-life {duration(median)} tokens"]
    if values.share_one > 0.005:
        words.append(f"{values.share_one:.0%} exactly 1")
    if values.share_negative > 0.001:
        words.append(f"{values.share_negative:.1%} {'negative' if values.plane is None else 'of negative real part'}")
    if values.share_above_one > 0.001:
        words.append(f"{values.share_above_one:.0%} above 1")
    return "; ".join(words)
