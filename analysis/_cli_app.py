"""The commands `dsf zoo`, `dsf plan`, `dsf check`, `dsf compare`, `dsf analyze` and `dsf doctor`.

Exit codes: 0 fine, 1 a law or a backend is broken, a mixer failed or a conversion is off, 2 wrong usage or input (one
line on stderr).
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import dsf
from dsf.analysis import _cli_analyze, _cli_doctor, _cli_train
from dsf.analysis import _cli_zoo as zoo_data
from dsf.analysis.analyze import LAW, Choice
from dsf.analysis.report import count, duration, finite
from dsf.analysis.subjects import FAMILIES, find, find_all, with_modules
from dsf.analysis.training import Setup
from dsf.call.plan import FORMS
from dsf.mixers import ZOO

LAW_BROKEN, BAD_INPUT = 1, 2
WIDE = 106  # columns that the zoo's whole table takes
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

app = typer.Typer(
    help="Sequence mixers as dynamical systems: list them, see how they are compiled, check them, compare them, "
    "and open up trained models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_NAME = "a mixer of the zoo, or file.py:function for a recurrence of your own"
SubjectArgument = Annotated[str, typer.Argument(metavar="NAME|FILE.py:FUNCTION", help=_NAME)]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]
Command = TypeVar("Command", bound=Callable[..., Any])


def _one_line_errors(command: Command) -> Command:
    """Errors that dsf raises on purpose become one line on stderr and exit code 2."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except dsf.DsfError as error:
            typer.echo(f"dsf: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(BAD_INPUT) from error

    return run  # type: ignore[return-value]


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(finite(data), indent=1, ensure_ascii=False))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dsf {dsf.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")]
    = False,
) -> None:  # fmt: skip
    pass


@app.command()
@_one_line_errors
def zoo(
    name: Annotated[str | None, typer.Argument(metavar="[NAME|FILE.py:FUNCTION]", help="everything about one")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the mixers: structure, forms, state, eigenvalues, parameters, source; with a NAME, all about that one."""
    if name is not None:
        found = zoo_data.record(find(name))
        _print_json(found) if as_json else _print_one(found)
        return
    records = zoo_data.rows()
    if as_json:
        _print_json(records)
        return
    console = _console()
    title = f"The zoo: {len(records)} mixers"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    rows = [_zoo_cells(r) for r in records]
    labels = [label for label in rows[0] if console.width >= WIDE or label not in ("numbers", "parameters", "forms")]
    for label in labels:
        side: Literal["left", "right"] = "right" if label in ("numbers", "parameters") else "left"
        table.add_column(label, justify=side, no_wrap=label != "structure")
    for cells in rows:
        table.add_row(*(cells[label] for label in labels))
    console.print(table)
    left_out = (
        "" if console.width >= WIDE else " A wider terminal (or --json) also shows numbers, parameters and forms."
    )
    console.print(
        f"Numbers and parameters: {records[0]['state']['of']}. "
        "Eigenvalues: real parts of A_t met on random inputs in their legal ranges. "
        f"Forms: {', '.join(FORMS)}.{left_out}",
        style="dim",
        highlight=False,
    )


def _zoo_cells(found: dict[str, Any]) -> dict[str, str]:
    """A mixer's line of the table, by heading."""
    lacking = [form for form in FORMS if form not in found["forms"]]
    return {
        "mixer, source": f"[bold]{found['name']}[/]\n[dim]{_short_source(found['source'])}[/]",
        "structure": found["structure"],
        "state": found["state"]["formula"],
        "numbers": count(found["state"]["numbers"]),
        "eigenvalues": escape(zoo_data.range_text(found["eigenvalues"])),
        "parameters": count(found["module"]["parameters"]) if found["module"] else "–",
        "forms": f"no {', '.join(lacking)}" if lacking else "all",
    }


def _short_source(source: str) -> str:
    """Authors and number of the paper: Schlag et al. 2102.11174."""
    paper = re.match(r"(.*?)[ ,(]+arXiv (\d+\.\d+)", source)
    return f"{paper[1]} {paper[2]}" if paper else source[:30]


def _console() -> Console:
    """Standard output: the terminal's width, or 120 columns where it is piped and nobody says otherwise."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(file=sys.stdout, width=120 if piped else None)


def _print_one(found: dict[str, Any]) -> None:
    console = _console()
    console.print(f"[bold]{found['summary'] or found['name']}[/]\n")
    console.print(found["system"], markup=False, highlight=False)
    module, state = found["module"], found["state"]
    lines = {
        "source": found["source"],
        "objective": found["objective"],
        "forms": ", ".join(found["forms"]),
        "state": f"{state['formula']} numbers: {state['numbers']:,} ({state['of']})",
        "eigenvalues": zoo_data.range_text(found["eigenvalues"]),
        "inputs": ", ".join(f"{k} ({v['kind']}, {v['range']})" for k, v in found["inputs"].items()),
        "layer": module and f"dsf.mixers.{module['class']}, {module['parameters']:,} parameters",
        "options": module and ", ".join(f"{k}={v}" if v != "required" else k for k, v in module["options"].items()),
    }
    console.print()
    for label, words in lines.items():
        if words:
            console.print(f"[dim]{label:<12}[/]{escape(words)}", highlight=False, soft_wrap=True)


@app.command()
@_one_line_errors
def plan(
    subject: SubjectArgument,
    batch: Annotated[int, typer.Option("--B", min=1, help="sequences")] = 1,
    tokens: Annotated[int, typer.Option("--T", min=1, help="tokens")] = 2048,
    heads: Annotated[int, typer.Option("--H", min=1, help="heads")] = 1,
    keys: Annotated[int, typer.Option("--N", min=1, help="size of the Key axis")] = 64,
    channels: Annotated[int, typer.Option("--P", min=1, help="size of the Value axis")] = 64,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "float32",
    form: Annotated[str, typer.Option(help="naive, recurrent, scan, chunk, kernel or auto")] = "auto",
    backend: Annotated[str, typer.Option(help="torch, triton or auto")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Show what the compiler chooses for a recurrence and sizes, and why."""
    if dtype not in DTYPES:
        raise dsf.InputError(f"--dtype {dtype!r} is unknown; dtypes are {', '.join(DTYPES)}")
    recurrence = find(subject).recurrence
    chosen = recurrence.plan(
        B=batch, T=tokens, H=heads, N=keys, P=channels, dtype=DTYPES[dtype], form=form, backend=backend
    )
    if as_json:
        _print_json({**asdict(chosen), "system": str(recurrence)})
        return
    typer.echo(f"{recurrence}\n")
    typer.echo(str(chosen))


@app.command()
@_one_line_errors
def check(
    subject: SubjectArgument,
    examples: Annotated[int, typer.Option(min=1, help="drawn for each law and dtype")] = 6,
    tokens: Annotated[int, typer.Option(min=1, help="longest sequence")] = 130,
    seed: Annotated[int, typer.Option(help="of what is drawn")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    backend: Annotated[str, typer.Option(help="torch, triton or auto: both where there is a GPU")] = "auto",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="the errors of every form, not the verdict alone")]
    = False,
    fuzz: Annotated[
        float | None, typer.Option("--fuzz", min=1, help="seconds of random calls in place of laws")
    ] = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Test that every form of a recurrence is right, forward and backward; exit code 1 if a law is broken."""
    recurrence = find(subject).recurrence
    if fuzz is not None:
        from dsf.fuzz import run

        found = run(
            fuzz, seed=seed, device=device, backend=None if backend == "auto" else backend, recurrence=recurrence
        )
        _print_json(found.to_dict()) if as_json else typer.echo(str(found))
        raise typer.Exit(0 if found.ok else LAW_BROKEN)
    with Console(stderr=True).status(f"checking {recurrence.name} …"):
        report = dsf.check(recurrence, examples=examples, tokens=tokens, seed=seed, device=device, backend=backend)
    if as_json:
        _print_json(report.to_dict())
    else:
        typer.echo(str(report) if verbose else report.brief())
    if not report.ok:
        raise typer.Exit(LAW_BROKEN)


@app.command()
@_one_line_errors
def compare(
    subjects: Annotated[list[str] | None, typer.Argument(metavar="[NAME|FILE.py:FUNCTION]...", help=_NAME)] = None,
    mixers: Annotated[str | None, typer.Option(help="names with commas between; zoo or all: every mixer")] = None,
    text: Annotated[Path | None, typer.Option(help="a text file instead of Python's documentation")] = None,
    out: Annotated[Path, typer.Option(help="folder for compare.html and compare.json")] = Path("report"),
    steps: Annotated[int, typer.Option(min=1, help="training steps of each mixer")] = Setup.steps,
    seed: Annotated[int, typer.Option(min=0, help="of weights and batches")] = Setup.seed,
    bare: Annotated[bool, typer.Option(help="mixers without their short convolutions and gates")] = False,
    png: Annotated[bool, typer.Option(help="write every picture as PNG too")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="mixers trained side by side (two at most)")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train mixers in one tiny language model on real text and write a report: what they learn, keep, look at, cost."""
    from dsf.analysis.report.figures import require_matplotlib
    from dsf.analysis.text import load_text

    require_matplotlib()
    given = _chosen(mixers, subjects or [])
    find_all(given)
    corpus = load_text(text)
    _cli_analyze.folder(out, "--out")
    from dsf.analysis import compare as engine
    from dsf.analysis.compare.page import page, write_pngs
    from dsf.analysis.report import write_json

    setup = Setup(steps=steps, seed=seed, bare=bare)
    with _Bars(len(given), steps) as bars:
        result = engine.compare(given, corpus, setup, bars.report, workers)
    data = result.to_dict()
    write_json(out / "compare.json", data)
    page(result).write(out / "compare.html")
    pictures = write_pngs(result, out / "pictures") if png and result.mixers else []
    for name, why in result.failed.items():
        typer.echo(f"dsf: {name} failed: {why}", err=True)
    if as_json:
        _print_json(data)
    else:
        if result.mixers:
            _print_comparison(result)
        typer.echo(f"wrote {out / 'compare.html'} and {out / 'compare.json'}")
        if pictures:
            typer.echo(f"wrote {len(pictures)} pictures to {out / 'pictures'}")
    if result.failed or result.worst() > engine.LAW:
        raise typer.Exit(LAW_BROKEN)


@app.command()
@_one_line_errors
def analyze(
    model: Annotated[
        str, typer.Argument(metavar="MODEL_DIR|NAME", help="folder that save_pretrained wrote, or typeseg, smollm2")
    ],
    text: Annotated[Path | None, typer.Option(help="a text file instead of Python's documentation")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="of the text that are read")] = Choice.tokens,
    layers: Annotated[str | None, typer.Option(help="of the converted ones: 0,4-7 or names; all by default")] = None,
    heads: Annotated[str | None, typer.Option(help="of every layer: 2 or 0-3; all by default")] = None,
    out: Annotated[Path, typer.Option(help="the page; its data is written beside it as .json")] = Path(
        "report/analyze.html"
    ),
    png: Annotated[Path | None, typer.Option(help="folder for every picture as PNG too")] = None,
    gib: Annotated[
        float | None, typer.Option("--memory", min=0, help="GiB that the recording of one layer may take")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a trained model's mixers as recurrences on a text; report what each remembers, looks at and keeps."""
    choice = Choice(tokens, layers, _cli_analyze.heads_of(heads), gib)
    out = _cli_analyze.out_file(out)
    pictures = None if png is None else _cli_analyze.folder(png, "--png")
    found = _cli_analyze.run(model, text, choice)
    written = _cli_analyze.write(found, out, pictures)
    if as_json:
        _print_json(found.data)
    else:
        console = _console()
        console.print(_cli_analyze.summary(found))
        for line in [*_cli_analyze.verdict(found), *written]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if not found.deviation <= LAW:
        raise typer.Exit(LAW_BROKEN)


@app.command()
@_one_line_errors
def doctor(
    quick: Annotated[bool, typer.Option(help="without calls, which take seconds (on a GPU, a minute)")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what is installed, what will run where, and whether it works; exit code 1 if something is broken."""
    found = _cli_doctor.look(calls=not quick)
    _print_json(found) if as_json else _cli_doctor.show(_console(), found)
    if not found["ok"]:
        raise typer.Exit(LAW_BROKEN)


_cli_train.register(app, _one_line_errors)


def _chosen(mixers: str | None, subjects: list[str]) -> list[str]:
    """What is compared: --mixers and the subjects named; one or two of each family when neither is given."""
    if mixers is None:
        return subjects or list(FAMILIES)
    groups = {"zoo": with_modules(), "all": [entry.name for entry in ZOO]}
    names = groups.get(mixers) or [name.strip() for name in mixers.split(",") if name.strip()]
    if not names:
        raise dsf.InputError("--mixers names no mixer; write names with commas between, zoo or all")
    return [*names, *(s for s in subjects if s not in names)]


class _Bars:
    """Progress on stderr: bars on a terminal, a line for each finished mixer everywhere."""

    def __init__(self, mixers: int, steps: int) -> None:
        self.mixers, self.steps, self.finished = mixers, steps, 0
        self.progress = Progress(
            SpinnerColumn(), TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> _Bars:
        self.progress.start()
        self.all = self.progress.add_task("mixers", total=self.mixers)
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def report(self, name: str, step: int, bits: float) -> None:
        """Step `step` of a mixer is done."""
        if name not in self.tasks:
            self.tasks[name] = self.progress.add_task(name, total=self.steps)
        self.progress.update(self.tasks[name], completed=step)
        if step == self.steps:
            self.finished += 1
            self.progress.update(self.tasks[name], visible=False)
            self.progress.update(self.all, completed=self.finished)
            self.progress.console.print(
                f"{self.finished:>3} of {self.mixers}  {name}: {bits:.2f} bits per byte in training", highlight=False
            )
            if self.finished == self.mixers:
                self.progress.update(self.all, description="measuring")


def _print_comparison(result: Any) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for label in ("mixer", "bits/byte", "before", "half-life", "tokens/s", "forms to"):
        table.add_column(label, justify="left" if label == "mixer" else "right", no_wrap=True)
    for r in sorted(result.mixers, key=lambda m: m["bits_per_byte"]["after"]):
        table.add_row(
            r["name"],
            f"{r['bits_per_byte']['after']:.3f}",
            f"{r['bits_per_byte']['before']:.2f}",
            duration(r["half_life"]["percentiles"]["50"]),
            count(max(r["tokens_per_second"].values())),
            f"{r['worst_disagreement']:.0e}",
        )
    _console().print(table)
