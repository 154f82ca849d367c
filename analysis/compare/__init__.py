"""`compare`: mixers in the same tiny language model on the same text; numbers for a report and a JSON file."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import platform
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

import dsf
from dsf.analysis import probe
from dsf.analysis.subjects import Subject, find, paper_sizes
from dsf.analysis.text import Text
from dsf.analysis.training import ByteLM, Setup, bits_per_byte, build, make_model, train

SCHEMA = "dsf.compare/1"
LAW = 1e-9  # how far forms may be apart in float64
CONTEXTS = tuple(4**i for i in range(11))  # 1 … 1,048,576 tokens
PAPER_WIDTH, PAPER_HEADS = 2048, 16  # a layer of a 1.3B model
LAW_TOKENS, SPEED_TOKENS = 80, 256

Report = Callable[[str, int, float], None]  # (mixer, steps done, bits per byte)


@dataclass(frozen=True)
class Comparison:
    """What was run and what came out. mixers: a record each (the JSON's), failed: name -> what went wrong."""

    setup: Setup
    text: Text
    sentence: str
    mixers: list[dict[str, Any]]
    failed: dict[str, str]
    seconds: float

    def worst(self) -> float:
        """The largest disagreement of any form of any mixer."""
        return max((m["worst_disagreement"] for m in self.mixers), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, the content of compare.json."""
        return {
            "schema": SCHEMA,
            "dsf": dsf.__version__,
            "machine": machine(),
            "setup": asdict(self.setup),
            "text": {
                "name": self.text.name,
                "train_bytes": len(self.text.train),
                "held_out_bytes": len(self.text.held_out),
                "sentence": self.sentence,
                "yardsticks_bits_per_byte": self.text.yardsticks(),
            },
            "contexts": list(CONTEXTS),
            "seconds": self.seconds,
            "worst_disagreement": self.worst(),
            "failed": self.failed,
            "mixers": self.mixers,
        }


def compare(
    given: Sequence[str], text: Text, setup: Setup, report: Report | None = None, workers: int | None = None
) -> Comparison:
    """Train and measure every mixer of `given` (names or file.py:function) on `text`.

    report: called as steps are done. workers: processes that train side by side, one thread each (two at most unless
    told; the numbers do not depend on it). A mixer that fails is listed in `failed` and the others go on.
    """
    begin = time.perf_counter()
    subjects = [find(g) for g in given]
    sentence = text.sentence()
    workers = min(workers or min(2, os.cpu_count() or 1), len(subjects))
    jobs = [(s.given, text, setup, sentence) for s in subjects]
    results = _together(jobs, workers, report) if workers > 1 else _in_turn(jobs, report)
    mixers, failed = [], {}
    for subject, result in zip(subjects, results, strict=True):
        if isinstance(result, str):
            failed[subject.name] = result
            continue
        record, inputs = result
        # A layer may run another recurrence than it is listed under: Gated DeltaNet computes its decay inside.
        record["tokens_per_second"] = probe.speeds(build(subject.make, setup).recurrence, inputs)
        mixers.append(record)
    return Comparison(setup, text, sentence, mixers, failed, time.perf_counter() - begin)


Job = tuple[str, Text, Setup, str]
Result = tuple[dict[str, Any], dict[str, Tensor]] | str


def _in_turn(jobs: list[Job], report: Report | None) -> list[Result]:
    return [_measure(*job, report) for job in jobs]


def _together(jobs: list[Job], workers: int, report: Report | None) -> list[Result]:
    """The jobs in several processes, results in the order of jobs; progress comes back through a queue."""
    context = mp.get_context("spawn")
    news: Any = context.Queue()
    with ProcessPoolExecutor(workers, context, initializer=_worker, initargs=(news,)) as pool:
        others = mp.active_children()
        with _without_interrupts():
            futures: list[Future[Result]] = [pool.submit(_measure_there, job) for job in jobs]
        try:
            waiting: set[Future[Result]] = set(futures)
            while waiting:
                waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED).not_done
                for message in _arrived(news):
                    if report is not None:
                        report(*message)
            return [f.result() for f in futures]
        except KeyboardInterrupt:
            for process in mp.active_children():
                if process not in others:
                    process.terminate()
            raise


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes started in here do not see Ctrl-C, of which each would print what it was importing; it waits for us."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _arrived(news: Any) -> Iterator[tuple[str, int, float]]:
    while True:
        try:
            yield news.get_nowait()
        except queue.Empty:
            return


_news: Any = None


def _worker(news: Any) -> None:
    global _news
    _news = news
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this ends it
    torch.set_num_threads(1)
    # Tensors go back by value: sharing them by file descriptor fails once their process has ended.
    torch.multiprocessing.set_sharing_strategy("file_system")


def _measure_there(job: Job) -> Result:
    return _measure(*job, lambda *message: _news.put(message))


def _measure(given: str, text: Text, setup: Setup, sentence: str, report: Report | None) -> Result:
    """One mixer's record and the inputs to time its forms on, or what went wrong. One thread: others run beside it."""
    subject = find(given)
    try:
        with probe.threads(1):
            return _record(subject, text, setup, sentence, report)
    except (dsf.DsfError, RuntimeError, ValueError) as error:
        return " ".join(str(error).split()) or type(error).__name__


def _record(
    subject: Subject, text: Text, setup: Setup, sentence: str, report: Report | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    model = make_model(subject.make, setup)
    before = bits_per_byte(model, text.held_out, setup.seq)
    curve, seconds = train(
        model, text, setup, None if report is None else lambda step, bits: report(subject.name, step, bits)
    )
    after = bits_per_byte(model, text.held_out, setup.seq)
    recurrence = _mixer(model).recurrence
    window = text.held_out[: probe.SPECTRUM_TOKENS].unsqueeze(0)
    layers = probe.inputs_of_layers(model, window)
    letters = torch.tensor([list(sentence.encode())])
    laws = probe.disagreement(recurrence, probe.first(recurrence, layers[0], LAW_TOKENS))
    worst = max(e for errors in laws.values() for e in errors.values())
    record = {
        "name": subject.name,
        "given": subject.given,
        "summary": subject.summary,
        "source": subject.source,
        "system": str(recurrence),
        "structure": recurrence.spec.structure,
        "layer": _layer(subject),
        "has_convolution": _mixer(model).conv1d is not None,
        "parameters": {"model": _count(model), "mixer": _count(_mixer(model))},
        "bits_per_byte": {"before": before, "after": after},
        "training": {"seconds": seconds, "bits_per_byte": [round(x, 4) for x in curve]},
        **probe.spectrum(recurrence, layers),
        "kernel": {
            "sentence": sentence,
            "shares": probe.picture_of_kernel(recurrence, probe.inputs_of_layers(model, letters)[0]),
        },
        "state": _states(subject, model),
        "forms": laws,
        "worst_disagreement": worst,
    }
    return record, probe.first(recurrence, layers[0], SPEED_TOKENS)


def _mixer(model: ByteLM) -> Any:
    return cast(Any, model.blocks[0]).mixer


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _layer(subject: Subject) -> str:
    return getattr(subject.make, "__name__", "Layer") if subject.has_module else "Layer"


def _states(subject: Subject, model: ByteLM) -> dict[str, Any]:
    """Numbers one layer keeps: as a formula, and at every context of CONTEXTS here and at a real model's width."""
    large = paper_sizes(subject, PAPER_WIDTH, PAPER_HEADS)
    side = PAPER_WIDTH // PAPER_HEADS
    at_width = (
        (lambda t: subject.state_numbers(t, heads=PAPER_HEADS, N=side, P=side)) if large is None else large.state_size
    )
    return {
        "formula": subject.state_formula(),
        "here": [_mixer(model).state_size(t) for t in CONTEXTS],
        "at_paper_width": [at_width(t) for t in CONTEXTS],
    }


def machine() -> dict[str, str]:
    """What the numbers were computed on."""
    return {
        "cpu": _cpu_name(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown"
