"""The pictures of docs/paper.md and docs/spectra.md, and the table of the latter: python docs/paper.py.

Trains seven mixers for a few minutes on Python's documentation prose. Needs the extra `plots`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from dsf import mixers
from dsf.analysis import measures
from dsf.analysis.probe import inputs_of_layers
from dsf.analysis.report.figures import colors, new_figure, png
from dsf.analysis.text import Text, load_text
from dsf.analysis.training import ByteLM, Setup, bits_per_byte, make_model, train

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
PAGE = DOCS / "spectra.md"
BEGIN, END = "<!-- spectra: made by docs/paper.py -->", "<!-- end of spectra -->"
DPI = 110

# The mixers of the follow-up's spectra, all without convolution and gate, so that the recurrence does the work.
NAMES = ("softmax_attention", "linear_attention", "normalized_attention_exp", "s6", "ssd", "qlstm", "rg_lru")
DILUTED = NAMES[:3]  # whose outputs are divided: two forms
SETUP = Setup(bare=True, steps=200)
TOKENS = 512
LOW, HIGH, BINS = 0.0, 1.5, 60
ORDERS = range(33)
RANGES = (1, 2, 4, 8, 16)  # largest |score|


def scored(largest: float) -> dict[str, torch.Tensor]:
    """Inputs of softmax attention whose largest |score| is `largest`: 64 tokens, one head, N = P = 8, float64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 64, 1, 8, generator=generator, dtype=torch.float64)
    scores = torch.einsum("bihn,bjhn->bhij", q, k).tril() * 8**-0.5
    return {"q": q * (largest / scores.abs().max()), "k": k, "v": v}


def taylor() -> None:
    """Error against order, a line for each range of scores."""
    figure, axes = new_figure(5.2, 3.0)
    for largest, color in zip(RANGES, colors(len(RANGES)), strict=True):
        errors = measures.taylor_error(mixers.softmax_attention.trajectory(**scored(largest)), list(ORDERS))
        axes.semilogy(list(ORDERS), errors, color=color, linewidth=1.4, label=f"{largest}")
    axes.set_ylim(1e-16, 1e2)
    axes.set_xlabel("order r of the Taylor features")
    axes.set_ylabel("largest error / range of outputs")
    axes.legend(title="largest |score|", frameon=False, fontsize=8)
    axes.grid(True)
    png(figure, PICTURES / "paper_taylor.png", DPI)


def gates() -> None:
    """A_t against the pre-activation of its gate."""
    x = torch.linspace(-6, 6, 200)
    lines = {
        "qLSTM  σ(x)": torch.sigmoid(x),
        "S6, a = 1  exp(-softplus(x)) = σ(-x)": torch.exp(-torch.nn.functional.softplus(x)),
        "S6, a = 16  σ(-x)^16": torch.sigmoid(-x) ** 16,
        "RG-LRU, σ(-Λ) = 0.9^(1/8)  σ(-Λ)^(8 σ(x))": 0.9 ** torch.sigmoid(x),
        "RG-LRU, σ(-Λ) = 0.999^(1/8)": 0.999 ** torch.sigmoid(x),
    }
    figure, axes = new_figure(5.2, 2.8)
    for (label, y), color in zip(lines.items(), colors(len(lines)), strict=True):
        axes.plot(x, y, color=color, linewidth=1.6, label=label)
    axes.set_xlabel("pre-activation x")
    axes.set_ylabel("A_t")
    axes.legend(frameon=False, fontsize=7.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.grid(True)
    png(figure, PICTURES / "paper_gates.png", DPI)


def eigenvalues(model: ByteLM, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """All eigenvalues of all layers on ids [1, T] from the second token on: {"plain": …, "paper": …}."""
    recurrence = model.blocks[0].mixer.recurrence
    found = [recurrence.trajectory(**inputs) for inputs in inputs_of_layers(model, ids)]
    return {
        form: torch.cat([measures.eigenvalues(t, paper=form == "paper")[:, 1:].flatten() for t in found])
        for form in ("plain", "paper")
    }


def spectra(text: Text) -> dict[str, dict[str, dict[str, torch.Tensor]]]:
    """name -> {"new": …, "trained": …} -> form -> eigenvalues; prints how well each model predicts."""
    ids = text.held_out[:TOKENS].unsqueeze(0)
    found = {}
    for name in NAMES:
        make = mixers.get(name).module
        assert make is not None
        model = make_model(make, SETUP)
        new = eigenvalues(model, ids)
        train(model, text, SETUP)
        found[name] = {"new": new, "trained": eigenvalues(model, ids)}
        print(f"{name}: {bits_per_byte(model, text.held_out, SETUP.seq):.2f} bits a byte")
    return found


def histograms(found: dict[str, dict[str, dict[str, torch.Tensor]]]) -> None:
    """A row a mixer: before and after training, in the paper's form."""
    figure, first = new_figure(6.6, 8.6)
    first.remove()
    grid = figure.subplots(len(NAMES), 2, sharex=True)
    edges = torch.linspace(LOW, HIGH, BINS + 1)
    for row, (name, color) in enumerate(zip(NAMES, colors(len(NAMES)), strict=True)):
        for column, when in enumerate(("new", "trained")):
            axes, values = grid[row][column], found[name][when]["paper"].clamp(LOW, HIGH).float()
            shares = torch.histc(values, BINS, LOW, HIGH) / len(values)
            axes.bar(edges[:-1], shares.sqrt(), width=(HIGH - LOW) / BINS, align="edge", color=color)
            axes.axvline(1.0, linestyle="--", linewidth=0.8, color="black", alpha=0.5)
            axes.set_ylim(0, 1)
            axes.set_yticks([0, 0.1**0.5, 0.5**0.5, 1], ["0", "10 %", "50 %", "100 %"], fontsize=6.5)
            axes.set_xlim(LOW, HIGH)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
            axes.text(0.02, 0.86, name, transform=axes.transAxes, fontsize=8)
    for column, title in enumerate(("freshly initialised", f"after {SETUP.steps} steps")):
        grid[0][column].set_title(title, fontsize=9)
        grid[-1][column].set_xlabel("eigenvalue (1.5: that or more)", fontsize=8)
    png(figure, PICTURES / "paper_spectra.png", DPI)


def table(found: dict[str, dict[str, dict[str, torch.Tensor]]]) -> str:
    """The page's table: percentiles and shares of the trained models, both forms where they differ."""
    lines = [
        "| mixer | form | 10 % | median | 90 % | above 1 | below 0.5 | median when new |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in NAMES:
        for form in ("plain", "paper") if name in DILUTED else ("both",):
            key = "paper" if form == "both" else form
            x, new = found[name]["trained"][key], found[name]["new"][key]
            low, middle, high = measures.percentiles(x).tolist()
            above, below = ((x > 1 + 1e-9).double().mean(), (x < 0.5).double().mean())
            start = measures.percentiles(new, (50,)).item()
            numbers = f"{low:.3f} | {middle:.3f} | {high:.3f} | {above:.0%} | {below:.0%} | {start:.3f}"
            lines.append(f"| `{name}` | {form} | {numbers} |")
    return "\n".join(lines)


def with_table(page: str, made: str) -> str:
    """page with what is between the two markers replaced."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    taylor()
    gates()
    found = spectra(load_text())
    histograms(found)
    if PAGE.exists():
        PAGE.write_text(with_table(PAGE.read_text(), table(found)))
    print(table(found))
