"""The page of `dsf analyze`: an Analysis as one HTML file, and its figures."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from dsf.analysis.analyze import LAW, Analysis, pictures, tables
from dsf.analysis.analyze.anatomy import CHANNELS, EPS, POINTS
from dsf.analysis.analyze.found import map_words, spectrum_words
from dsf.analysis.compare import pictures as compare_pictures
from dsf.analysis.compare.page import WORDS
from dsf.analysis.report import (
    Page,
    code,
    count,
    details,
    duration,
    facts,
    figure,
    grid,
    terms,
    text,
)
from dsf.analysis.report.figures import colors as palette
from dsf.analysis.report.figures import ramp, svg

FEW = 6  # maps shown at once; the others are folded
TERMS = {
    **{word: WORDS[word] for word in ("State", "Eigenvalue", "Half-life", "Kernel")},
    "Horizon": f"After how many tokens {EPS:.0%} of what was written is left: as far back as a mixer can remember.",
    "Effective state size": "How many numbers of the past the future really depends on. A state may hold a thousand "
    "numbers and use three.",
    "Decay, erase, write": "What a token does to the state: the share that it keeps, the share that it erases "
    "in one direction (delta rules), and how much it writes.",
    "Head": "Mixers work in several copies side by side, each with a state of its own.",
}
TURNING = (
    " Of complex eigenvalues, which also turn what is stored, it is the real part, which is 0 for a quarter of a "
    "circle, too; how much they keep is their distance from 0 in the planes below."
)


class Report:
    """The report of an Analysis: page() and figures. Every layer has a colour, from blue to red by depth."""

    def __init__(self, analysis: Analysis) -> None:
        self.data, self.runs, self.pieces = analysis.data, analysis.data.runs, analysis.data.text.pieces
        self.colors = dict(zip((r.name for r in self.runs), ramp(len(self.runs)), strict=True))
        kinds = list(self.data.state.bytes_by_kind)
        self.kinds = dict(zip(kinds, palette(len(kinds)), strict=True))
        self.spectra = {r.name: r.eigenvalues for r in self.runs if r.eigenvalues is not None}
        lives = {r.name: r.half_life for r in self.runs if r.half_life is not None}
        self.forgetting = {name: life for name, life in lives.items() if life.share_never < 1}
        self.maps = analysis.maps or {r.name: torch.tensor([r.shares]) for r in self.runs}  # or the mean of the heads
        self.of_heads = bool(analysis.maps)

    @cached_property
    def figures(self) -> dict[str, Any]:
        """All matplotlib figures by name."""
        colors, drawn, runs = self.colors, {}, self.runs
        if self.forgetting:
            drawn["half_lives"] = compare_pictures.lives(dict(reversed(self.forgetting.items())), colors, "tokens")
        if self.spectra:
            drawn["eigenvalues"] = pictures.spectra(self.spectra, colors)
            negative = any(found.share_negative > 1e-3 for found in self.spectra.values())
            for name, found in self.spectra.items():
                drawn[f"eigenvalues {name}"] = compare_pictures.eigenvalue_histogram(found, colors[name], negative)
        drawn["maps"] = pictures.wall(self.maps, colors)
        for run in runs:
            drawn[f"map {run.name}"] = compare_pictures.attention(run.shares, self.pieces, colors[run.name], 4.4)
        far = {r.name: [h.distance or 0.0 for h in r.heads] for r in runs if r.distance is not None}
        if far:
            drawn["distances"] = pictures.heads(far, colors, "tokens back, mean", pictures.WIDE)
        used = {r.name: [h.effective_state_size for h in r.heads] for r in runs if r.effective_state_size is not None}
        if used:
            entropies = {name: [size.entropy for size in sizes if size] for name, sizes in used.items()}
            tolerances = {name: [size.tolerance for size in sizes if size] for name, sizes in used.items()}
            drawn["effective_state_entropy"] = pictures.heads(entropies, colors, "effective state size (entropy)")
            drawn["effective_state_tolerance"] = pictures.heads(tolerances, colors, "effective state size (tolerance)")
        if states := {r.name: r.along for r in runs if r.along is not None}:
            norms = {name: (line.tokens, line.norm) for name, line in states.items()}
            ranks = {name: (line.tokens, line.rank) for name, line in states.items()}
            drawn["state_norm"] = pictures.along(norms, colors, "norm of the state")
            drawn["state_rank"] = pictures.along(ranks, colors, "effective rank of the state")
        for key in ("received", "decay", "erase", "write"):
            values = {run.name: getattr(run, key) for run in runs}
            if some := {name: each for name, each in values.items() if each and max(each) > 0}:
                drawn[f"tokens_{key}"] = pictures.tokens(some, colors, key, self.pieces)
        state = self.data.state
        drawn["state_bytes"] = pictures.state_bytes(
            state.bytes_by_kind, self.data.contexts, self.kinds, state.recurrent_if_cached
        )
        return drawn

    def page(self) -> Page:
        """The page with all sections."""
        model, conversion, words = self.data.model, self.data.conversion, self.data.text
        out = Page(f"{model.name}, opened up", f"{model.about}.")
        bits = words.bits_per_token
        out.intro.append(
            facts({
                "Parameters": count(model.parameters),
                "Mixers converted": str(len(conversion.layers)),
                "Read": f"{words.tokens:,} tokens",
                **({} if bits is None else {"Foresees the text": f"{bits:.2f} bits per token"}),
                "Outputs moved by": f"{conversion.deviation:.1g} of their range",
            })
        )  # fmt: skip
        self.drawn = {name: svg(drawn, name.replace("_", " ")) for name, drawn in self.figures.items()}
        self.layers(out)
        out.section("How to read this", "Eight terms are enough for all pictures below.", terms(TERMS))
        self.attention(out)
        self.memory(out)
        self.used(out)
        self.tokens(out)
        self.keeps(out)
        self.costs(out)
        self.conversion(out)
        self.what_was_run(out)
        return out

    def layers(self, out: Page) -> None:
        """Add the tables of layers and heads."""
        out.section(
            "Layer by layer",
            "One line a mixer; click a heading to sort by it, point at one to see what it means.",
            text(*(run.found for run in self.runs)),
            tables.layers(self.data, self.colors),
            details(
                f"Head by head ({sum(len(r.heads) for r in self.runs)} lines)", tables.heads(self.data, self.colors)
            ),
        )

    def attention(self, out: Page) -> None:
        """Add the section of kernel matrices and distances."""
        shown = [self.runs[i] for i in pictures.spread(len(self.runs), FEW)]
        folded = [run for run in self.runs if run not in shown]
        maps = {
            run.name: figure(self.drawn[f"map {run.name}"], run.name, map_words(run), self.colors[run.name])
            for run in self.runs
        }
        most = pictures.MOST_HEADS, pictures.MOST_LAYERS
        cut = max(map(len, self.maps.values())) > most[0] or len(self.runs) > most[1]
        blocks = [
            figure(
                self.drawn["maps"],
                f"All layers {'and heads ' * self.of_heads}at once",
                f"A column a layer, {'a square a head' if self.of_heads else 'the mean of its heads'}, the sentence "
                "running down and to the right in each. A thin diagonal looks at the newest tokens only, a full "
                "triangle at everything, a dark left edge at the beginning of the text."
                + (f" Of many, {most[0]} heads and {most[1]} layers are drawn." if cut else ""),
            ),
            text(
                f"**With the words.** The sentence “{self.data.text.sentence.strip()}”: each row is one output, "
                "each column a token that it takes from, and the stronger the colour, the more it counts. For softmax "
                "attention this is the attention map; for a recurrence it is |Φ|, the same picture computed from A, B "
                "and C. Averaged over heads and channels, each row relative to its largest entry off the diagonal."
            ),
            grid([maps[run.name] for run in shown], 340),
        ]
        if folded:
            blocks.append(details(f"The other {len(folded)} layers", grid([maps[r.name] for r in folded], 340)))
        if "distances" in self.drawn:
            alike = "a quarter" if all(r.causal for r in self.runs) else "a third"
            far = max((h.distance or 0.0, r.name) for r in self.runs for h in r.heads)
            blocks.append(
                figure(
                    self.drawn["distances"],
                    "How far back each head looks",
                    f"Dots are heads, dashes layers: how many tokens back an output takes from, weighted by how much. "
                    f"Looking at everything alike would give {alike} of {min(self.data.window, self.data.text.tokens)} "
                    f"tokens; the farthest-looking head, in layer {far[1]}, looks {far[0]:.0f} back.",
                )
            )
        out.section(
            "What they look at", "How much each token of a sentence counts in each output, layer by layer.", *blocks
        )

    def memory(self, out: Page) -> None:
        """Add the section of half-lives and eigenvalues."""
        blocks = []
        if "half_lives" in self.drawn:
            slow, life = max(self.forgetting.items(), key=lambda pair: pair[1].percentiles.high)
            blocks.append(
                figure(
                    self.drawn["half_lives"],
                    "How long each layer remembers",
                    "Tokens until half of what was written is gone: the dot is the median over all parts of the state, "
                    f"the bar runs from the 10th to the 90th percentile. The longest memory is in layer {slow}, whose "
                    f"slowest tenth halves in {duration(life.percentiles.high)} tokens or more.",
                )
            )
        if any(r.keeps_keys and r.name not in self.forgetting for r in self.runs):
            blocks.append(
                text(
                    "**Softmax attention forgets nothing:** all keys and values stay in its cache as they were "
                    "written, so it has no half-life (attention with a window keeps that many tokens and drops the "
                    "rest). What its eigenvalues show below is dilution: the factor ηₜ₋₁/ηₜ by which the sum that "
                    "every output is divided by grows or shrinks from token to token, in the framework paper's form. "
                    "Values above 1.25 are counted at the right edge."
                )
            )
        if "eigenvalues" in self.drawn:
            histograms = [
                figure(self.drawn[f"eigenvalues {name}"], name, spectrum_words(found), self.colors[name])
                for name, found in self.spectra.items()
            ]
            blocks += [
                figure(
                    self.drawn["eigenvalues"],
                    "Eigenvalues of A, layer by layer",
                    "What one token multiplies the state by. Dark at 1: kept as it is. Dark at 0: overwritten. In "
                    "between it fades." + TURNING * any(x.plane is not None for x in self.spectra.values()),
                ),
                details("As histograms, one a layer", grid(histograms, 245)),
            ]
        if not blocks:
            blocks.append(text("Attention to later tokens is no recurrence in time, so it has no memory to measure."))
        out.section("What they remember", "How fast each layer forgets while it reads the text.", *blocks)

    def used(self, out: Page) -> None:
        """Add the section of effective state sizes, norms and ranks."""
        blocks = []
        if "effective_state_entropy" in self.drawn:
            blocks += [
                figure(
                    self.drawn["effective_state_entropy"],
                    "Effective state size, by entropy",
                    "How many numbers of the past the rest of the text depends on, weighted by their importance. 1 "
                    "means that one summary of the past is all that counts.",
                ),
                figure(
                    self.drawn["effective_state_tolerance"],
                    "Effective state size, by tolerance",
                    "The same, counting all that matter at least a thousandth as much as the first. A recurrence has "
                    "at most its N rows; attention may use as many as there are tokens.",
                ),
            ]
        if "state_norm" in self.drawn:
            blocks += [
                figure(
                    self.drawn["state_norm"],
                    "Size of the state while reading",
                    "A level line: writing and forgetting are in balance. A rising line: the state still grows.",
                ),
                figure(
                    self.drawn["state_rank"],
                    "Effective rank of the state while reading",
                    "Number of directions over which the state is spread: how many different things it holds.",
                ),
            ]
        if blocks:
            out.section(
                "How much of the state is used",
                f"Measured in the middle of the first {min(self.data.window, self.data.text.tokens)} tokens (for "
                f"systems with channels of their own, on {CHANNELS} of them), and at {POINTS} points along the text.",
                grid(blocks, 480),
            )

    def tokens(self, out: Page) -> None:
        """Add the section of single tokens: attention received, decay, erasure, writing."""
        titles = {
            "received": (
                "How much later tokens look at each token",
                "Dark: a token that others take more from than from others as far away. Relative to each layer's most "
                "looked-at token.",
            ),
            "write": (
                "How much each token writes",
                "Dark: the token puts much into the state. Relative to each layer's strongest.",
            ),
            "decay": (
                "How much of the state each token keeps",
                "The share of the state that the token keeps: dark is each layer's largest, pale its smallest. At a "
                "pale token the layer clears most.",
            ),
            "erase": (
                "How much each token erases",
                "Delta rules only: what is stored at the token's own key is taken away before it is written anew.",
            ),
        }
        blocks = [
            figure(self.drawn[f"tokens_{key}"], title, words)
            for key, (title, words) in titles.items()
            if f"tokens_{key}" in self.drawn
        ]
        out.section("What each token does", "The same sentence, token by token, a row a layer.", *blocks)

    def keeps(self, out: Page) -> None:
        """Add the section of state size against context."""
        out.section(
            "What it keeps",
            "Memory for one sequence in float32, all converted layers together. A KV cache grows with every token "
            "read; the state of a recurrence stays as large as it is.",
            figure(
                self.drawn["state_bytes"],
                "Bytes kept against context",
                "Flat: as large after a million tokens as after one. Rising: twice the text, twice the memory."
                + (
                    " Dashed, for scale: a key and a value of the state's width in every head, for every token."
                    if any(self.data.state.recurrent_if_cached)
                    else ""
                ),
            ),
            tables.state(self.data, self.kinds),
        )

    def costs(self, out: Page) -> None:
        """Add the section of the work of every form."""
        out.section(
            "What it costs",
            f"Work of one layer's recurrence on {self.data.text.tokens} tokens, in every form that it can be computed "
            "in: counted, not measured.",
            tables.costs(self.data),
        )

    def conversion(self, out: Page) -> None:
        """Add the section of what was converted, what was left alone, and the change of outputs."""
        found = self.data.conversion
        verdict = "within" if found.deviation <= LAW else "**more than**"
        systems = {x.recurrence: x.system for x in found.layers}
        out.section(
            "What was converted",
            "Every mixer below ran as a recurrence of this library while all of the above was measured. If that "
            "had changed the model's outputs, the report would not be about this model.",
            text(
                f"On the text, outputs changed by at most {found.largest_difference:.1g} where they span "
                f"{found.range:.3g}: {found.deviation:.1g} of their range, {verdict} the {LAW:.0e} allowed."
            ),
            tables.converted(self.data),
            tables.left_alone(found.left_alone)
            if found.left_alone
            else text("All modules that mix tokens were converted."),
            *(details(f"`{name}` as declared", code(system)) for name, system in systems.items()),
        )

    def what_was_run(self, out: Page) -> None:
        """Add the section of machine, versions and sizes."""
        box, words, model = self.data.machine, self.data.text, self.data.model
        rows = {
            "Model": f"{model.about}; class {model.class_}, {model.parameters:,} parameters, float32",
            "Text": f"{words.name}: its first {words.tokens:,} tokens"
            + (", as many as the model has positions for" if words.cut_to_context else ""),
            "Machine": f"{box.cpu}, {box.cores} cores, {box.system}",
            "Versions": f"dsf {self.data.dsf}, torch {box.torch}, Python {box.python}",
            "Time": ", ".join(f"{name} {value:.1f} s" for name, value in self.data.seconds.items()),
            "Memory": f"{self.data.peak_gib:.1f} GiB at most" if self.data.peak_gib else "not reported by this system",
        }
        out.section("What was run", "Everything needed to repeat it.", terms(rows))
