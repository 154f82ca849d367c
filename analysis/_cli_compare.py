"""The command `dsf compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from dsf.analysis import _cli_analyze
from dsf.analysis.subjects import FAMILIES, FEW, find_all, with_modules
from dsf.analysis.training import Setup
from dsf.language.errors import InputError
from dsf.mixers import ZOO
from dsf.mixers._sizes import WIDEST, heads_to_try

LAW_BROKEN = 1
FAILED = "dsf: {} failed: {}"
RATES = "2e-3,6e-3,1.8e-2"
QUICK = {"steps": 100, "recall": 240}  # steps of each run by default: a comparison of FEW ends within minutes
LONG = {"steps": 400, "recall": 600}  # --thorough
SIZES = ("d_model", "layers", "n_heads", "d_state", "headdim", "batch", "seq")
_NAME = "a mixer of the zoo, or file.py:function for a recurrence of your own"


def compare(
    subjects: Annotated[list[str] | None, typer.Argument(metavar="[NAME|FILE.py:FUNCTION]...", help=_NAME)] = None,
    mixers: Annotated[
        str | None,
        typer.Option(help="names separated by commas; zoo: all with a layer of their paper; all: every mixer"),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="a text file instead of Python's documentation")] = None,
    out: Annotated[Path, typer.Option(help="folder for compare.html and compare.json")] = Path("report"),
    thorough: Annotated[bool, typer.Option("--thorough", help="more mixers (18 without names) and steps")] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="training steps of each run (default 100, --thorough 400)")
    ] = None,
    recall: Annotated[
        int | None, typer.Option(min=0, help="steps of the recall task (0: none; default 240, --thorough 600)")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="runs of each layer (default 3)")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="seed of the first run, for weights and batches (default 0)")
    ] = None,
    rates: Annotated[
        str | None, typer.Option(help=f"learning rates; the best in a short run is taken (default {RATES})")
    ] = None,
    papers: Annotated[
        bool | None, typer.Option(help="train the paper's layer too, as a second column (default)")
    ] = None,
    bare: Annotated[bool | None, typer.Option("--bare", help="layers without short convolutions and gates")] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="NAME=VALUE,...", help="d_model, layers, n_heads, d_state, headdim, batch, seq"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="device of the training: cpu (default), cuda or auto")] = None,
    save_weights: Annotated[bool, typer.Option("--save-weights", help="keep every model, in --out/weights")] = False,
    png: Annotated[bool, typer.Option(help="write every picture as PNG too")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="layers trained at the same time (default: at most two)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
    config: Annotated[
        Path | None, typer.Option(help="settings as JSON, or a compare.json to repeat; options override them")
    ] = None,
    saved: Annotated[
        Path | None,
        typer.Option("--from", metavar="COMPARE.JSON", help="draw a saved comparison again, without training"),
    ] = None,
) -> None:
    """Train mixers in one tiny language model on real text and write a report: what they learn, keep, look at, cost."""
    from dsf.analysis.report.figures import require_matplotlib
    from dsf.analysis.text import load_text

    require_matplotlib()
    if saved is not None:
        _cli_analyze.drawn_alone(
            saved, names=subjects or None, mixers=mixers, text=text, thorough=thorough or None, rates=rates, size=size,
            device=device, config=config, steps=steps, recall=recall, seeds=seeds, seed=seed, papers=papers, bare=bare,
            save_weights=save_weights or None, workers=workers,
        )  # fmt: skip
        _draw_again(saved, out, png, as_json)
        return
    of_setup, of_protocol = _of_file(config)
    given = chosen(mixers, subjects or [], FAMILIES if thorough else FEW)
    find_all(given)
    usual = LONG if thorough else QUICK
    line = _given(steps=steps, seed=seed, bare=bare, device=device)  # overrides the file
    setup = _setup(size, **{"steps": usual["steps"], **of_setup, **line})
    setup = replace(setup, device=_cli_analyze.device_of(setup.device))
    corpus = load_text(text)
    _cli_analyze.folder(out, "--out")
    from dsf.analysis import compare as engine
    from dsf.analysis.report import write_json

    kept = _cli_analyze.folder(out / "weights", "--save-weights") if save_weights else None
    line = _given(
        seeds=seeds, rates=None if rates is None else _rates(rates), recall_steps=recall, papers=papers, keep=kept
    )
    protocol = engine.Protocol(**{"recall_steps": usual["recall"], **of_protocol, **line})
    with Bars() as bars:
        result = engine.compare(given, corpus, setup, bars.report, workers, protocol)
    write_json(out / "compare.json", result.to_dict())
    _show(result, out, png, as_json, [out / "compare.html", out / "compare.json"])
    if kept is not None and not as_json:
        typer.echo(f"wrote {sum(len(c.weights) for m in result.mixers for c in m.columns)} models to {kept}")
    if result.failed or result.worst_disagreement > engine.LAW:
        raise typer.Exit(LAW_BROKEN)


def _show(result: Any, out: Path, png: bool, as_json: bool, files: list[Path]) -> None:
    """Write the page and the pictures, print what was found and which files were written."""
    from dsf.analysis.compare.page import Builder
    from dsf.analysis.report.figures import write_pngs

    builder = Builder(result)
    builder.build().write(out / "compare.html")
    pictures = write_pngs(builder.figures(), out / "pictures") if png and result.mixers else []
    for name, why in result.failed.items():
        typer.echo(FAILED.format(name, why), err=True)
    if as_json:
        _cli_analyze.print_json(result.to_dict())
        return
    if result.mixers:
        _cli_analyze.console().print(summary(result))
    typer.echo(f"wrote {' and '.join(map(str, files))}")
    if pictures:
        typer.echo(f"wrote {len(pictures)} pictures to {out / 'pictures'}")


def _draw_again(saved: Path, out: Path, png: bool, as_json: bool) -> None:
    """Draw the page of a saved compare.json without training."""
    from dsf.analysis.compare.saved import load

    result = load(saved)
    _cli_analyze.folder(out, "--out")
    _show(result, out, png, as_json, [out / "compare.html"])


def _of_file(config: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of Setup and Protocol that a settings file names."""
    if config is None:
        return {}, {}
    from dsf.analysis.compare.saved import settings

    return settings(config)


def chosen(mixers: str | None, subjects: list[str], otherwise: Sequence[str]) -> list[str]:
    """The names of the mixers to compare: those of --mixers and of the arguments, or `otherwise` where neither is
    given. Raises InputError for an empty --mixers.
    """
    if mixers is None:
        return subjects or list(otherwise)
    groups = {"zoo": with_modules(), "all": [entry.name for entry in ZOO]}
    names = groups.get(mixers) or [name.strip() for name in mixers.split(",") if name.strip()]
    if not names:
        raise InputError("--mixers names no mixer; write names with commas between, zoo or all")
    return [*names, *(s for s in subjects if s not in names)]


def _given(**options: Any) -> dict[str, Any]:
    """The options that the command line names: those that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _setup(size: str | None, **options: Any) -> Setup:
    """The Setup of these options, but for the sizes of a text NAME=VALUE,... Raises InputError."""
    known = [f.name for f in fields(Setup) if f.name in SIZES]
    sizes: dict[str, int] = {}
    for part in filter(None, (x.strip() for x in (size or "").split(","))):
        name, _, value = (x.strip() for x in part.partition("="))
        if name not in known or not value.isdigit() or int(value) < 1:
            raise InputError(f"--size {part!r}: expected NAME=VALUE with a positive number, NAME of {', '.join(known)}")
        sizes[name] = int(value)
    if sizes.keys() & {"d_model", "n_heads"}:  # heads share the width, unless told
        d_model, heads = (sizes.get(x, options.get(x, getattr(Setup, x))) for x in ("d_model", "n_heads"))
        divisors = (n for n in heads_to_try(d_model, heads, WIDEST) if d_model % n == 0)
        width = d_model // sizes.setdefault("n_heads", next(divisors, heads))
        sizes = {"d_state": max(1, width), "headdim": max(1, width), **sizes}
    return Setup(**{**options, **sizes})


def _rates(given: str) -> tuple[float, ...]:
    """Learning rates from a text with commas. Raises InputError."""
    try:
        found = tuple(float(x) for x in given.split(",") if x.strip())
    except ValueError:
        found = ()
    if not found or not all(0 < x < 1e6 for x in found) or len(set(found)) < len(found):
        raise InputError(f"--rates {given!r}: expected different positive numbers with commas between, such as {RATES}")
    return found


class Bars:
    """Progress on stderr: bars on a terminal, a line for each finished layer everywhere."""

    def __init__(self) -> None:
        self.finished = 0
        self.progress = Progress(
            SpinnerColumn(), TextColumn("{task.description:<42}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        return self  # bars start with the first report, so that earlier errors are shown alone

    def __exit__(self, *_: object) -> None:
        if self.tasks:
            self.progress.stop()

    def report(self, name: str, step: int, steps: int, bits: float) -> None:
        """Show that step `step` of `steps` of a layer's training is done."""
        if name not in self.tasks:
            self.progress.start()
            self.tasks[name] = self.progress.add_task(name, total=steps)
        self.progress.update(self.tasks[name], completed=step)
        if step == steps:
            self.finished += 1
            self.progress.update(self.tasks[name], visible=False)
            self.progress.console.print(f"{self.finished:>3} trained: {name}", highlight=False)


def summary(result: Any) -> Table:
    """The table that the terminal shows: one row a mixer, in the order given."""
    labels = ("mixer", "bits/byte", "paper's layer", "recall", "half-life", "tokens/s", "forms to")
    found = _cli_analyze.table(*labels, left=labels[:1])
    from dsf.analysis.compare import recall
    from dsf.analysis.report import count, duration

    for r in result.mixers:
        right = "–" if r.equal.recall is None else f"{r.equal.recall[str(recall.GAP)].mean:.0%}"
        found.add_row(
            r.name,
            with_spread(r.equal.after),
            "–" if r.paper is None else with_spread(r.paper.after),
            right,
            "–" if r.half_life is None else duration(r.half_life.percentiles.median),
            count(max(r.tokens_per_second.values())),
            f"{r.worst_disagreement:.0e}",
        )
    return found


def with_spread(spread: Any) -> str:
    """A mean and its spread: 2.71 ± 0.02."""
    return f"{spread.mean:.3f} ± {spread.spread:.3f}" if len(spread.each) > 1 else f"{spread.mean:.3f}"
