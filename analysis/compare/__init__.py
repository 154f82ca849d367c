"""`compare`: train mixers in the same small language model on the same text, and measure them, for a report."""

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
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

import dsf
from dsf.analysis import probe
from dsf.analysis.compare import fair, recall
from dsf.analysis.compare.fair import Protocol
from dsf.analysis.compare.records import Kind, Learnt, Map, MixerRecord, ReadText, RecallTask, StateNumbers
from dsf.analysis.records import Endless, File, Machine, schema_field
from dsf.analysis.subjects import Subject, find, paper_sizes
from dsf.analysis.text import Text
from dsf.analysis.training import ByteLM, Setup
from dsf.language.errors import InputError

LAW = 1e-9  # largest relative error of a form in float64
CONTEXTS = tuple(4**i for i in range(11))  # 1 … 1,048,576 tokens
PAPER_WIDTH, PAPER_HEADS = 2048, 16  # a layer of a 1.3B model
LAW_TOKENS, SPEED_TOKENS = 80, 256

Report = Callable[[str, int, int, float], None]  # (what is trained, steps done, of so many, bits per byte)


class Comparison(File):
    """Settings and results of a comparison: the content of compare.json. dsf.analysis.compare.saved reads it.

    parameters_apart: by which share the largest model has more parameters than the smallest. worst_disagreement: the
    largest relative error of any form of any mixer. seconds: the duration. failed: name -> the error.
    """

    schema_: Literal["dsf.compare/2"] = schema_field("dsf.compare/2")
    dsf: str
    machine: Machine
    setup: Setup
    protocol: Protocol
    parameters_apart: float
    recall: RecallTask
    text: ReadText
    contexts: list[int]
    seconds: float
    worst_disagreement: Endless
    failed: dict[str, str]
    mixers: list[MixerRecord]


@dataclass(frozen=True)
class Job:
    """One layer of one mixer to train and measure."""

    given: str
    kind: Kind
    text: Text
    setup: Setup
    protocol: Protocol
    sentence: str

    @property
    def label(self) -> str:
        """Its name in progress reports."""
        return find(self.given).name + (", paper's layer" if self.kind == "paper" else "")

    @property
    def steps(self) -> int:
        """Its number of training steps."""
        return self.protocol.steps(self.setup, self.kind)


# What a layer learnt, and of the equal layer the mixer's record, with inputs to time forms on; or what went wrong.
Result = tuple[Learnt, "tuple[MixerRecord, dict[str, Tensor]] | None"] | str


def compare(
    given: Sequence[str],
    text: Text,
    setup: Setup,
    report: Report | None = None,
    workers: int | None = None,
    protocol: Protocol | None = None,
) -> Comparison:
    """Train and measure every mixer of `given` (names or file.py:function) on `text`.

    Every recurrence is trained in the same `Layer`, and beside it in its paper's layer (protocol.papers). The widths of
    the MLPs make the parameters of all models equal. report: called when steps are done. workers: processes that train
    at the same time, with one thread each; by default at most two, one on a GPU; results do not depend on it. protocol:
    by default one seed at the rate setup.lr, without papers' layers. A mixer that fails is listed in `failed`. Raises
    InputError for sizes for which parameters cannot be made equal, and for a setup that names `hidden`.
    """
    begin = time.perf_counter()
    if setup.hidden is not None:
        raise InputError("hidden is chosen so that all models have as many parameters; leave it out of the setup")
    protocol = protocol or Protocol(seeds=1, rates=(setup.lr,), papers=False)
    subjects = [find(g) for g in given]
    sentence = text.sentence()
    wanted: list[tuple[Subject, Kind]] = [(s, kind) for s in subjects for kind in fair.kinds(s, protocol)]
    setups = fair.matched([fair.maker(s, kind) for s, kind in wanted], setup)
    jobs = [Job(s.given, kind, text, own, protocol, sentence) for (s, kind), own in zip(wanted, setups, strict=True)]
    usual = 1 if setup.device != "cpu" else min(2, os.cpu_count() or 1)
    workers = min(workers or usual, len(jobs))
    found = _together(jobs, workers, report) if workers > 1 else _in_turn(jobs, report)
    results = {(job.given, job.kind): result for job, result in zip(jobs, found, strict=True)}
    mixers, failed = [], {}
    for subject in subjects:
        equal, paper = results[subject.given, "equal"], results.get((subject.given, "paper"))
        if isinstance(equal, str):
            failed[subject.name] = equal
            continue
        if isinstance(paper, str):
            failed[f"{subject.name}, paper's layer"] = paper
            paper = None
        assert equal[1] is not None  # measured of the equal layer
        record, inputs = equal[1]
        speeds = probe.speeds(subject.recurrence, inputs)
        mixers.append(record.model_copy(update={"paper": paper and paper[0], "tokens_per_second": speeds}))
    sizes = [c.parameters.model for m in mixers for c in m.columns]
    return Comparison(
        dsf=dsf.__version__,
        machine=machine(),
        setup=setup,
        protocol=protocol,
        parameters_apart=max(sizes) / min(sizes) - 1 if sizes else 0.0,
        recall=RecallTask(pairs=recall.PAIRS, gaps=list(recall.GAPS), chance=recall.CHANCE),
        text=ReadText(
            name=text.name,
            train_bytes=len(text.train),
            held_out_bytes=len(text.held_out),
            sentence=sentence,
            yardsticks_bits_per_byte=text.yardsticks(),
        ),
        contexts=list(CONTEXTS),
        seconds=time.perf_counter() - begin,
        worst_disagreement=max((m.worst_disagreement for m in mixers), default=0.0),
        failed=failed,
        mixers=mixers,
    )


def _in_turn(jobs: list[Job], report: Report | None) -> list[Result]:
    return [_measure(job, report) for job in jobs]


def _together(jobs: list[Job], workers: int, report: Report | None) -> list[Result]:
    """Run the jobs in several processes; results are in the order of jobs, progress comes through a queue."""
    context = mp.get_context("spawn")
    news: Any = context.Queue()
    with ProcessPoolExecutor(workers, context, initializer=_worker, initargs=(news,)) as pool:
        others = mp.active_children()
        try:
            with _without_interrupts():  # a Ctrl-C inside is raised at the block's end
                futures: list[Future[Result]] = [pool.submit(_measure_there, job) for job in jobs]
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
    """Processes that are started inside the block do not receive Ctrl-C; this process receives it at the block's end.

    They inherit the signal mask, so that they print no traceback while they import. As another thread of this process
    may receive the signal, a handler notes it until the end.
    """
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    usual = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, signal.default_int_handler if usual is None else usual)
    if came:
        raise KeyboardInterrupt


def _arrived(news: Any) -> Iterator[tuple[str, int, int, float]]:
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
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    threading.Thread(target=_end_with, args=(mp.parent_process(),), daemon=True).start()
    torch.set_num_threads(1)
    # Results that share memory by file descriptor would be lost when their process ends.
    torch.multiprocessing.set_sharing_strategy("file_system")


def _end_with(parent: Any) -> None:
    """End this process when its parent is gone, which may have been killed: training would go on for nobody."""
    parent.join()
    os._exit(1)


def _measure_there(job: Job) -> Result:
    return _measure(job, lambda *message: _news.put(message))


def _measure(job: Job, report: Report | None) -> Result:
    """Train one layer and measure it, in one thread; returns the error's text where that fails."""
    subject = find(job.given)

    def tell(step: int, bits: float) -> None:
        if report is not None:
            report(job.label, step, job.steps, bits)

    try:
        with probe.threads(1):
            learnt, model = fair.learn(subject, job.kind, job.text, job.setup, job.protocol, tell)
            return learnt, _opened(subject, learnt, model.cpu(), job) if job.kind == "equal" else None
    except (dsf.DsfError, RuntimeError, ValueError) as error:
        return " ".join(str(error).split()) or type(error).__name__


def _opened(subject: Subject, learnt: Learnt, model: ByteLM, job: Job) -> tuple[MixerRecord, dict[str, Tensor]]:
    """(the mixer's record, without the paper's layer and speeds; inputs for timing the forms of its recurrence)."""
    recurrence = _mixer(model).recurrence
    window = job.text.held_out[: probe.SPECTRUM_TOKENS].unsqueeze(0)
    layers = probe.inputs_of_layers(model, window)
    letters = torch.tensor([list(job.sentence.encode())])
    laws = probe.disagreement(recurrence, probe.first(recurrence, layers[0], LAW_TOKENS))
    kernel, eigenvalues, lives, unseen = None, None, None, ""
    try:
        shares = probe.picture_of_kernel(recurrence, probe.inputs_of_layers(model, letters)[0])
        kernel = Map(sentence=job.sentence, shares=shares)
        eigenvalues, lives = probe.spectrum(recurrence, layers)
    except dsf.FormError as error:  # it has no trajectory; what it learnt stands
        unseen = " ".join(str(error).split())
    found = MixerRecord(
        name=subject.name,
        given=subject.given,
        summary=subject.summary,
        source=subject.source,
        system=str(subject.recurrence),
        structure=subject.recurrence.spec.structure,
        equal=learnt,
        paper=None,
        eigenvalues=eigenvalues,
        half_life=lives,
        kernel=kernel,
        unseen=unseen,
        state=_states(subject, model),
        forms=laws,
        worst_disagreement=max(errors.worst for errors in laws.values()),
        tokens_per_second={},
    )
    return found, probe.first(recurrence, layers[0], SPEED_TOKENS)


def _mixer(model: ByteLM) -> Any:
    return cast(Any, model.blocks[0]).mixer


def _states(subject: Subject, model: ByteLM) -> StateNumbers:
    """Sizes of one layer's state: a formula, and numbers at every context of CONTEXTS, here and at a real model's
    width.
    """
    large = paper_sizes(subject, PAPER_WIDTH, PAPER_HEADS)
    side = PAPER_WIDTH // PAPER_HEADS
    at_width = (
        (lambda t: subject.state_numbers(t, heads=PAPER_HEADS, N=side, P=side)) if large is None else large.state_size
    )
    return StateNumbers(
        formula=subject.state_formula(),
        here=[_mixer(model).state_size(t) for t in CONTEXTS],
        at_paper_width=[at_width(t) for t in CONTEXTS],
    )


def machine() -> Machine:
    """This machine and its software."""
    return Machine(
        cpu=_cpu_name(),
        cores=str(os.cpu_count()),
        threads=str(torch.get_num_threads()),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
    )


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown"
