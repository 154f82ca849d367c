"""The command line: `dsf zoo`, `plan`, `check`, `compare`, `bench`, `analyze`, `train` and `doctor`.

Exit codes: 0 fine, 1 a law or a backend is broken, a mixer failed or a conversion is off, 2 wrong usage or input (one
line on stderr).
"""

from __future__ import annotations

import contextlib
import errno
import functools
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
from rich.table import Table
from rich.text import Text

import dsf
from dsf.analysis import _cli_analyze, _cli_bench, _cli_compare, _cli_doctor, _cli_train
from dsf.analysis import _cli_zoo as zoo_data
from dsf.analysis.analyze import LAW, Choice
from dsf.analysis.report import count
from dsf.analysis.subjects import find
from dsf.call.plan import FORMS

LAW_BROKEN, BAD_INPUT, PIPE_CLOSED = 1, 2, 141
WIDE = 110  # characters a terminal needs for all columns of the zoo's table
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

app = typer.Typer(
    help="Sequence mixers as dynamical systems: list, plan, check, time, compare and train them, "
    "and analyse trained models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_NAME = "a mixer of the zoo, or file.py:function for a recurrence of your own"
SubjectArgument = Annotated[str, typer.Argument(metavar="NAME|FILE.py:FUNCTION", help=_NAME)]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]
Command = TypeVar("Command", bound=Callable[..., Any])


def _one_line_errors(command: Command) -> Command:
    """Turn the errors that dsf raises on purpose, and those of memory and of the output, into one line on stderr and
    exit code 2; a reader that closes the pipe (`dsf zoo | head -1`) ends a command with 141, as it ends others.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            try:
                return command(*args, **kwargs)
            finally:
                sys.stdout.flush()  # what is buffered fails here, not after the exit code is known
        except dsf.DsfError as error:
            said = str(error)
        except BrokenPipeError as error:
            _leave_output()
            raise typer.Exit(PIPE_CLOSED) from error
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            _leave_output()
            said = "the disk of the output is full"
        except (MemoryError, RuntimeError) as error:
            full = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
            if not full:
                raise
            said = f"there is not enough memory for this: {error or type(error).__name__}"
        typer.echo(f"dsf: {' '.join(said.split())}", err=True)
        raise typer.Exit(BAD_INPUT)

    return run  # type: ignore[return-value]


def _leave_output() -> None:
    """What is left of the output goes nowhere, so that nothing fails again when Python ends."""
    with contextlib.suppress(OSError, ValueError):  # where it has no file, as in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
        _cli_analyze.print_json(found.to_dict()) if as_json else _print_one(found)
        return
    records = zoo_data.rows()
    if as_json:
        _cli_analyze.print_json([r.to_dict() for r in records])
        return
    console = _cli_analyze.console()
    title = f"The zoo: {len(records)} mixers"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    rows = [_zoo_cells(r) for r in records]
    labels = [label for label in rows[0] if console.width >= WIDE or label not in ("numbers", "parameters", "forms")]
    widths = {label: _narrowest(label, rows) for label in labels}  # rich would otherwise break words
    widths["structure"] = console.width - sum(widths.values()) + widths["structure"] - 2 * len(labels)
    for label in labels:
        side: Literal["left", "right"] = "right" if label in ("numbers", "parameters") else "left"
        table.add_column(label, justify=side, width=widths[label])
    for cells in rows:
        table.add_row(*(cells[label] for label in labels))
    console.print(table)
    left_out = (
        "" if console.width >= WIDE else " A wider terminal (or --json) also shows numbers, parameters and forms."
    )
    console.print(
        f"Numbers and parameters: {records[0].state.of}. Eigenvalues: real parts of A_t met on random inputs in their "
        f"legal ranges. Forms: {', '.join(FORMS)}.{left_out}",
        style="dim",
        highlight=False,
    )


def _narrowest(label: str, rows: list[dict[str, str]]) -> int:
    """The least width of a column: its longest word, or its longest cell where cells are formulas."""
    cells = [label, *(Text.from_markup(row[label]).plain for row in rows)]
    return max(len(word) for cell in cells for word in ([cell] if label == "state" else cell.split()))


def _zoo_cells(found: zoo_data.ZooRecord) -> dict[str, str]:
    """A mixer's row of the table: cells by heading."""
    lacking = [form for form in FORMS if form not in found.forms]
    return {
        "mixer, source": f"[bold]{found.name}[/]\n[dim]{_short_source(found.source)}[/]",
        "structure": found.structure,
        "state": found.state.formula,
        "numbers": count(found.state.numbers),
        "eigenvalues": escape(zoo_data.range_text(found.eigenvalues)),
        "parameters": count(found.module.parameters) if found.module else "–",
        "forms": f"no {', '.join(lacking)}" if lacking else "all",
    }


def _short_source(source: str) -> str:
    """Authors and number of the first paper: Schlag et al. 2102.11174."""
    first = source.partition(";")[0]
    paper = re.match(r"(.*?)[ ,(]+arXiv (\d+\.\d+)", first)
    return f"{paper[1]} {paper[2]}" if paper else first[:30]


def _print_one(found: zoo_data.ZooRecord) -> None:
    console = _cli_analyze.console()
    console.print(f"[bold]{found.summary or found.name}[/]\n")
    console.print(found.system, markup=False, highlight=False)
    module, state = found.module, found.state
    lines = {
        "source": found.source,
        "objective": found.objective,
        "forms": ", ".join(found.forms),
        "state": f"{state.formula} numbers: {state.numbers:,} ({state.of})",
        "eigenvalues": zoo_data.range_text(found.eigenvalues),
        "inputs": ", ".join(f"{k} ({v.kind}, {v.range})" for k, v in found.inputs.items()),
        "layer": module and f"dsf.mixers.{module.class_}, {module.parameters:,} parameters",
        "options": module and ", ".join(f"{k}={v}" if v != "required" else k for k, v in module.options.items()),
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
        _cli_analyze.print_json({**asdict(chosen), "system": str(recurrence)})
        return
    typer.echo(f"{recurrence}\n")
    typer.echo(str(chosen))


def _is_given(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


@app.command()
@_one_line_errors
def check(
    context: typer.Context,
    subject: SubjectArgument,
    examples: Annotated[int, typer.Option(min=1, help="random examples for each law and dtype")] = 6,
    tokens: Annotated[int, typer.Option(min=1, help="longest sequence")] = 130,
    seed: Annotated[int, typer.Option(help="of what is drawn")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    backend: Annotated[str, typer.Option(help="torch, triton or auto: both where there is a GPU")] = "auto",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="print the errors of every form, too")]
    = False,
    fuzz: Annotated[
        float | None, typer.Option("--fuzz", min=1, help="seconds of random calls instead of the laws")
    ] = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Test that every form of a recurrence is right, forward and backward; exit code 1 if a law is broken."""
    if fuzz is not None:
        laws = [f"--{name}" for name in ("examples", "tokens", "verbose") if _is_given(context, name)]
        if laws:
            raise dsf.InputError(
                f"--fuzz runs random calls instead of the laws, so that it takes no {' and no '.join(laws)}"
            )
    recurrence = find(subject).recurrence
    if fuzz is not None:
        from dsf.fuzz import run

        found = run(
            fuzz, seed=seed, device=device, backend=None if backend == "auto" else backend, recurrence=recurrence
        )
        _cli_analyze.print_json(found.to_dict()) if as_json else typer.echo(str(found))
        raise typer.Exit(0 if found.ok else LAW_BROKEN)
    with Console(stderr=True).status(f"checking {recurrence.name} …"):
        report = dsf.check(recurrence, examples=examples, tokens=tokens, seed=seed, device=device, backend=backend)
    if as_json:
        _cli_analyze.print_json(report.to_dict())
    else:
        typer.echo(str(report) if verbose else report.brief())
    if not report.ok:
        raise typer.Exit(LAW_BROKEN)


app.command()(_one_line_errors(_cli_compare.compare))
app.command()(_one_line_errors(_cli_bench.bench))


@app.command()
@_one_line_errors
def analyze(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL_DIR|NAME", help="folder that save_pretrained wrote, or typeseg, smollm2"),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="a text file instead of Python's documentation")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="tokens of the text to read")] = Choice.tokens,
    layers: Annotated[str | None, typer.Option(help="converted layers: 0,4-7 or names; default: all")] = None,
    heads: Annotated[str | None, typer.Option(help="heads of every layer: 2 or 0-3; default: all")] = None,
    out: Annotated[Path, typer.Option(help="the page; its data is written beside it as .json")] = Path(
        "report/analyze.html"
    ),
    png: Annotated[Path | None, typer.Option(help="folder for every picture as PNG too")] = None,
    gib: Annotated[
        float | None, typer.Option("--memory", min=0, help="GiB that the recording of one layer may take")
    ] = None,
    saved: Annotated[
        Path | None,
        typer.Option("--from", metavar="ANALYZE.JSON", help="draw a saved analysis again, without its model"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a trained model's mixers as recurrences on a text; report what each remembers, looks at and keeps."""
    if saved is not None and model is None:
        asked = None if tokens == Choice.tokens else tokens
        _cli_analyze.drawn_alone(saved, text=text, tokens=asked, layers=layers, heads=heads, memory=gib)
    choice = Choice(tokens, layers, _cli_analyze.heads_of(heads), gib)
    out = _cli_analyze.out_file(out)
    pictures = None if png is None else _cli_analyze.folder(png, "--png")
    found = _cli_analyze.found(model, saved, text, choice)
    written = _cli_analyze.write(found, out, pictures)
    if as_json:
        _cli_analyze.print_json(found.data.to_dict())
    else:
        console = _cli_analyze.console()
        console.print(_cli_analyze.summary(found))
        for line in [*_cli_analyze.verdict(found), *written]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if not found.deviation <= LAW:
        raise typer.Exit(LAW_BROKEN)


@app.command()
@_one_line_errors
def doctor(
    quick: Annotated[bool, typer.Option(help="leave out the calls, which take seconds (on a GPU, a minute)")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what is installed, what will run where, and whether it works; exit code 1 if something is broken."""
    found = _cli_doctor.look(calls=not quick)
    _cli_analyze.print_json(found.to_dict()) if as_json else _cli_doctor.show(_cli_analyze.console(), found)
    if not found.ok:
        raise typer.Exit(LAW_BROKEN)


app.command()(_one_line_errors(_cli_train.train))
