"""What the command `dsf analyze` does, and what all commands share: console, progress bar, JSON, folders."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from dsf.analysis.analyze import Analysis, Choice, analyze
from dsf.analysis.analyze.records import Analysed
from dsf.analysis.models import load_model
from dsf.analysis.record import RecordingError
from dsf.analysis.report import duration, finite, write_json
from dsf.analysis.report.figures import require_matplotlib, write_pngs
from dsf.analysis.text import read_text
from dsf.language.errors import InputError


def console() -> Console:
    """Standard output: in the terminal's width, or by default 120 columns where it is piped."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return _Console(file=sys.stdout, width=120 if piped else None)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Where rich would exit with 1, which says that a law is broken."""
        raise BrokenPipeError


def print_json(data: object) -> None:
    """Print data as JSON; inf and nan are null."""
    print(json.dumps(finite(data), indent=1, ensure_ascii=False))


def table(*labels: str, left: Sequence[str] = ()) -> Table:
    """An empty table with these columns; those in `left` are aligned to the left, the others to the right."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for label in labels:
        made.add_column(label, justify="left" if label in left else "right", no_wrap=True)
    return made


def found(model: str | None, saved: Path | None, text: Path | None, choice: Choice) -> Analysis:
    """Analyse a model, or read a saved analysis back. Raises InputError unless exactly one of the two is given."""
    if (model is None) == (saved is None):
        raise InputError("expected either a model or --from a JSON file of dsf analyze")
    require_matplotlib()
    return Analysis(Analysed.load(saved)) if saved is not None else run(str(model), text, choice)


def run(model: str, text: Path | None, choice: Choice) -> Analysis:
    """Load a model and analyse it, with a progress bar on stderr."""
    name, data = read_text(text)
    with Bar() as bar, _quiet_transformers():
        bar.step(f"load {model}", 0, 1)
        pretrained = load_model(model)
        try:
            return analyze(pretrained, data.decode("utf-8", errors="replace"), name, choice, bar.step)
        except RecordingError as error:
            raise RecordingError(str(error).replace("raise limit=", "raise --memory")) from error


def drawn_alone(saved: Path, **others: Any) -> None:
    """Raise InputError for what says what to measure and is not None, beside --from, which measures nothing."""
    words = ["names" if name == "names" else f"--{name.replace('_', '-')}" for name in others]
    given = [word for word, x in zip(words, others.values(), strict=True) if x is not None]
    if given:
        raise InputError(f"--from draws what {saved} holds, so that it takes no {' and no '.join(given)}")


def write(analysis: Analysis, out: Path, pictures: Path | None) -> list[str]:
    """Write the page, the JSON beside it and the pictures; returns a line for each kind."""
    from dsf.analysis.analyze.page import Report

    beside, report = out.with_suffix(".json"), Report(analysis)
    with Bar() as bar:
        bar.step("draw the report", 0, 1)
        report.page().write(out)
        lines = [f"wrote {out}"]
        if analysis.maps:  # or it was read from a file
            write_json(beside, analysis.data.to_dict())
            lines = [f"wrote {out} and {beside}"]
        if pictures is not None:
            bar.step("draw the pictures", 0, 1)
            lines.append(f"wrote {len(write_pngs(report.figures, pictures))} pictures to {pictures}")
    return lines


def out_file(out: Path) -> Path:
    """The page's path. Raises InputError for a folder, a name without .html, and where `folder` does."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--out {out} is the page to write; expected a name that ends in .html")
    if out.is_dir():
        raise InputError(f"--out {out} is a folder; expected the page to write")
    folder(out.parent, "--out")
    return out


def folder(path: Path, option: str) -> Path:
    """The folder, which the first file that is written makes. Raises InputError, before any work, where none can be."""
    for there in (path, *path.absolute().parents):
        try:
            there.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise InputError(f"{option} {path}: cannot make this folder ({error.strerror})") from error
        break
    if not there.is_dir():
        raise InputError(f"{option} {path}: cannot make this folder ({os.strerror(errno.EEXIST)})")
    if not os.access(there, os.W_OK):
        raise InputError(f"{option} {path}: cannot write into this folder")
    return path


def device_of(given: str) -> str:
    """The device of --device; auto: the GPU if there is one.

    Raises InputError for an unknown device, and for CUDA without a GPU.
    """
    if given == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if given != "cpu" and given.partition(":")[0] != "cuda":
        raise InputError(f"--device {given!r}: expected cpu or cuda")
    if given != "cpu" and not torch.cuda.is_available():
        raise InputError(f"--device {given}: there is no CUDA GPU here; `dsf doctor` says what there is")
    return given


def heads_of(spec: str | None) -> slice | None:
    """The slice of heads that a text such as `2` or `0-3` names; None for None. Raises InputError."""
    if spec is None:
        return None
    between = re.fullmatch(r"(\d+)(?:-(\d+))?", spec.strip())
    if between is None or int(between[2] or between[1]) < int(between[1]):
        raise InputError(f"--heads {spec!r}: expected a head or a range of heads, such as 2 or 0-3")
    return slice(int(between[1]), int(between[2] or between[1]) + 1)


def summary(analysis: Analysis) -> Table:
    """The table that the terminal shows: one row a layer."""
    labels = ("layer", "structure", "heads", "half-life", "looks back", "effective state")
    shown = table(*labels, left=labels[:2])
    for run in analysis.data.runs:
        life, size = run.half_life, run.effective_state_size
        kept = "–" if life is None else duration(life.percentiles.median)
        shown.add_row(
            run.name, run.structure, str(len(run.heads)), kept if run.window is None else f"window {run.window}",
            "–" if run.distance is None else f"{run.distance:.1f}", f"{size.entropy:.1f}" if size else "–",
        )  # fmt: skip
    return shown


def verdict(analysis: Analysis) -> list[str]:
    """Lines for the terminal: what was converted, a finding for each layer, and what was left alone."""
    data, found = analysis.data, analysis.data.conversion
    lines = [
        f"{data.model.class_}: {sum(x.heads is not None for x in found.layers)} mixers ran as recurrences on "
        f"{data.text.tokens} tokens; outputs changed by {found.deviation:.1g} of their range"
    ]
    lines += [run.found for run in data.runs]
    return lines + [f"left alone: {x.name or 'the model'} ({x.type}): {x.why}" for x in found.left_alone]


class Bar:
    """One progress bar on stderr, if that is a terminal; it shows the current step and vanishes at the end."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.progress = Progress(
            SpinnerColumn(), TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip

    def __enter__(self) -> Bar:
        self.progress.start()
        self.task = self.progress.add_task("", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def step(self, name: str, done: int, of: int) -> None:
        """Show that `done` of `of` parts of a step are finished."""
        self.progress.update(self.task, description=name, completed=done, total=of)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Suppress transformers' progress bars and warnings inside the block."""
    try:
        logging: Any = importlib.import_module("transformers.utils.logging")
    except ImportError:
        yield
        return
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
