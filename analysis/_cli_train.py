"""The command `dsf train`."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsf.analysis._cli_analyze import Bar, _quiet_transformers, print_json

if TYPE_CHECKING:
    from dsf.analysis.train import Trained


def train(
    mixer: Annotated[str, typer.Option(help="mixer of the zoo or file.py:function; with commas: a pattern of layers")],
    out: Annotated[Path, typer.Option(help="folder for the model, its checkpoints, train.json and loss.png")],
    text: Annotated[Path | None, typer.Option(help="a text file instead of Python's documentation")] = None,
    size: Annotated[str, typer.Option(help="size of the model: tiny, 20m, 100m or 340m")] = "tiny",
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = 1000,
    tokenizer: Annotated[str, typer.Option(metavar="bytes|DIR", help="bytes, or the folder of a tokenizer")] = "bytes",
    device: Annotated[str, typer.Option(help="cpu or cuda; the GPU if there is one by default")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="go on from the last checkpoint in --out")] = False,
    lr: Annotated[float | None, typer.Option(min=0, help="highest learning rate (default: by the size)")] = None,
    batch: Annotated[int, typer.Option(min=1, help="sequences a step")] = 16,
    seq: Annotated[int, typer.Option(min=2, help="tokens a sequence")] = 256,
    bf16: Annotated[bool, typer.Option("--bf16", help="matrix products in bfloat16")] = False,
    compile: Annotated[bool, typer.Option("--compile", help="through torch.compile")] = False,
    graph: Annotated[bool, typer.Option(help="steps on a GPU from a CUDA graph")] = True,
    seed: Annotated[int, typer.Option(min=0, help="seed of weights and data")] = 0,
    cp: Annotated[int, typer.Option(min=1, help="number of torchrun's processes that share every sequence")] = 1,
    tp: Annotated[int, typer.Option(min=1, help="number of torchrun's processes that share heads and parameters")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of lines")] = False,
) -> None:  # fmt: skip
    """Train a language model around a mixer on a text; save it where `dsf analyze` and transformers open it."""
    import torch

    from dsf.analysis import train as engine

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    run = engine.Run(
        mixer, out, text, size, steps, tokenizer, device, lr, batch, seq, bf16, compile, seed, cp=cp, tp=tp, graph=graph
    )
    with _stopped_in_words(out), _quiet_transformers(), Bar() as bar:
        bar.step("read and tokenize", 0, 1)
        _quiet()
        prepared = engine.prepare(run, resume)
        record = engine.train(prepared, lambda step, loss: bar.step(f"loss {loss:.3f} nats", step, steps))
    if run.ranks.rank:  # only the first process prints
        return
    if as_json:
        print_json(record.to_dict())
        return
    for line in lines(record, out):
        typer.echo(line)


@contextmanager
def _stopped_in_words(out: Path) -> Iterator[None]:
    """End the command on Ctrl-C and SIGTERM with one line that says what is kept; the exit code is 128 + the signal's
    number.
    """
    number = signal.SIGINT

    def stop(given: int, frame: Any) -> None:
        nonlocal number
        number = signal.Signals(given)
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if main else None
    try:
        yield
    except KeyboardInterrupt:
        from dsf.analysis.checkpoints import kept

        typer.echo(f"dsf: stopped; {kept(out)}", err=True)
        raise typer.Exit(128 + number) from None
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


def lines(record: Trained, out: Path) -> list[str]:
    """Lines for the terminal: what was trained, its loss, the files written."""
    from dsf.mixers import Hyena

    opens = f"(dsf analyze {out} opens it)"
    if set(record.mixers.split(", ")) == {"hyena"}:
        opens = f"(which dsf analyze does not open: {Hyena.no_state})"
    end = record.loss[-1][1] if record.loss else float("nan")
    return [
        f"{record.mixers}: {record.parameters:,} parameters, {record.run.steps} steps, "
        f"{record.tokens_per_second:,.0f} tokens/s",
        f"loss {end:.3f} nats a token in training; held out {record.bits_per_token:.3f} bits a token",
        f"wrote {out} {opens}, {out / 'train.json'} and {out / 'loss.png'}",
    ]


def _quiet() -> None:
    """Silence libraries that log to the terminal by themselves, whatever transformers' verbosity."""
    for name in ("accelerate", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
