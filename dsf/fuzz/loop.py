"""`run`: tests random declarations and cases within a budget, in one process or in several."""

from __future__ import annotations

import functools
import math
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from dsf.call.recurrence import Recurrence
from dsf.checking.compare import words_of
from dsf.checking.measure import KERNELS
from dsf.checking.ranges import Given, ranges_of
from dsf.fuzz.case import Case
from dsf.fuzz.declaration import Declaration
from dsf.fuzz.draw import GPU, INTERPRETER, TORCH, Cases, Profile
from dsf.fuzz.grammar import DECK, KNOWN, draw
from dsf.fuzz.report import Result
from dsf.fuzz.shrink import Subject, script, shrunk
from dsf.fuzz.verdict import Finding, Verdict
from dsf.language.errors import FormError, InputError, TraceError

SHRUNK = 6  # failures that each worker shrinks
SEED_STEP = 1_000_003
KEPT = 10.0  # seconds between two records of one run
LOST = ("CUDA error", "illegal memory access", "device-side assert", "AcceleratorError")  # no call goes on after these


@dataclass(frozen=True)
class Plan:
    """The task of one process.

    seed: of all random choices. seconds, cases: the budget; the process ends when one is spent. device: of the calls.
    backend: "torch" or "triton". each: cases of one declaration. share: the most seconds for one declaration. shrink:
    seconds for shrinking one failure. worker, workers: this process takes every workers-th declaration. start: the
    first one.
    """

    seed: int = 0
    seconds: float | None = None
    cases: int | None = None
    device: str = "cpu"
    backend: str = "torch"
    each: int = 8
    share: float | None = None
    shrink: float = 60.0
    poison: bool = True
    profile: Profile | None = None
    worker: int = 0
    workers: int = 1
    start: int = 0

    @property
    def sizes(self) -> Profile:
        """The profile that is used: the user's, or else that of the device and backend."""
        if self.profile is not None:
            return self.profile
        if torch.device(self.device).type == "cuda":
            return GPU.of_seed(self.seed)
        return INTERPRETER if self.backend == KERNELS else TORCH


def run(
    seconds: float | None = None,
    cases: int | None = None,
    *,
    seed: int = 0,
    device: str = "cpu",
    backend: str | None = None,
    recurrence: Recurrence | None = None,
    ranges: Given | None = None,
    each: int | None = None,
    share: float | None = None,
    shrink: float = 60.0,
    poison: bool = True,
    profile: Profile | None = None,
    workers: int = 1,
    told: Callable[[str], None] | None = None,
    kept: Callable[[Result], None] | None = None,
) -> Result:
    """Test random calls of random declarations, or of one recurrence, against the float64 oracle.

    seconds, cases: the budget, of which at least one is given. The run ends when one of them is spent.
    seed: of all random choices. The same seed and number of cases give the same cases.
    device: "cpu" or "cuda". backend: "torch" or "triton"; None: "triton" on a GPU, else "torch". "triton" runs on a CPU
      if TRITON_INTERPRET=1 was set before triton was imported.
    recurrence: test this one alone, in this process; None: random declarations. ranges: as in dsf.check.
    each: cases of one declaration; None: 24 on a GPU, where compiling costs most, else 8.
    share: the most seconds for one declaration. shrink: seconds for shrinking one failure, after the budget.
    poison: fill uninitialised memory with NaN. profile: the distribution of sizes; None: that of device and backend.
    workers: the number of processes, each with its own seeds.
    told: a function that gets a line of text for each failure. kept: a function that gets the result so far about every
      ten seconds, so that an interrupted run leaves a record.

    Returns a `Result`. Raises InputError for an invalid budget or device, FormError for a recurrence that the backend
    cannot run.
    """
    gpu = _device(device)
    if seconds is None and cases is None:
        raise InputError("dsf.fuzz needs a budget: seconds or cases")
    if (seconds is not None and seconds <= 0) or (cases is not None and cases < 1) or workers < 1:
        raise InputError(f"dsf.fuzz: seconds, cases and workers are positive, got {seconds}, {cases}, {workers}")
    backend = backend or (KERNELS if gpu else "torch")
    plan = Plan(seed, seconds, cases, device, backend, each or (24 if gpu else 8), share, shrink, poison, profile)
    _can_run(plan)
    tell, begin = told or (lambda line: None), time.perf_counter()

    def finished(result: Result) -> Result:
        result.seeds, result.workers = [seed], workers
        result.seconds = time.perf_counter() - begin
        return result

    keep = _now_and_then(lambda result: kept(finished(result))) if kept else _nothing
    if recurrence is not None:
        if backend == KERNELS:
            recurrence.plan(N=4, P=2, backend=KERNELS, device=device)  # raises FormError where it cannot run
        given = Subject(None, recurrence, ranges)
        return finished(_local(plan, tell, keep, given))
    if workers == 1:
        return finished(_local(plan, tell, keep))
    return finished(_spawned(plan, workers, tell, keep))


Keep = Callable[[Result], None]


def _nothing(result: Result) -> None:
    """The default of `kept`: does nothing."""


def _now_and_then(keep: Keep) -> Keep:
    """`keep`, called only if ten seconds have passed since its last call."""
    last = time.perf_counter()

    def found(result: Result) -> None:
        nonlocal last
        if time.perf_counter() - last > KEPT:
            keep(result)
            last = time.perf_counter()

    return found


def _device(device: str) -> bool:
    """Whether the device is a GPU. Raises InputError for a missing one."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise InputError(f"dsf.fuzz: there is no device {device!r}; cpu or cuda") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError("dsf.fuzz: device='cuda' was asked for, but torch sees no CUDA GPU")
    if kind not in ("cpu", "cuda"):
        raise InputError(f"dsf.fuzz runs on cpu or cuda, got {device!r}")
    return kind == "cuda"


def _can_run(plan: Plan) -> None:
    if plan.backend not in ("torch", KERNELS):
        raise InputError(f"dsf.fuzz: backend is 'torch' or 'triton', got {plan.backend!r}")
    if plan.backend == KERNELS:
        KNOWN.build().plan(N=4, P=2, backend=KERNELS, device=plan.device)  # raises FormError in the user's words


def _local(plan: Plan, told: Callable[[str], None], keep: Keep, given: Subject | None = None) -> Result:
    result = Result(plan.device, plan.backend)
    for message in tried(plan, given):
        _take(result, message, told)
        keep(result)
    return result


Message = tuple[str, Any]


def _take(result: Result, message: Message, told: Callable[[str], None]) -> None:
    """Add a worker's message to the result."""
    kind, data = message
    if kind == "case":
        result.add(*data)
    elif kind == "failure":
        result.failures = [x for x in result.failures if x["seed"] != data["seed"]] + [data]
        told(f"FAILED {data['finding']}\n{data['script']}")
    elif kind == "refused":
        result.refused += 1
    elif kind == "empty":
        result.empty = data


def tried(plan: Plan, given: Subject | None = None) -> Iterator[Message]:
    """The messages of one process: "trying" before every case, "case" after it, and "failure" twice for a failure, at
    once and shrunk at the end.

    After a failure that leaves the GPU unusable the last message is "lost", with the place where another process goes
    on.
    """
    deadline = time.perf_counter() + (math.inf if plan.seconds is None else plan.seconds)
    left = math.inf if plan.cases is None else plan.cases
    empty = takes_empty()
    yield "empty", empty
    failures: list[tuple[Subject, Case, Verdict, int, list[Case]]] = []
    place = plan.start
    while left > 0 and time.perf_counter() < deadline:
        seed = plan.seed * SEED_STEP + place
        rng = random.Random(seed)
        subject = given or _declared(plan, place, rng)
        place += plan.workers
        if subject is None:
            yield "refused", seed
            continue
        spec = subject.recurrence.spec
        ranges = ranges_of(spec, subject.ranges)
        cases = Cases(subject.recurrence, ranges, rng, plan.sizes, plan.backend, empty, seed, plan.device)
        end = min(deadline, time.perf_counter() + (plan.share or math.inf))
        history: list[Case] = []
        for _ in range(plan.each):
            if left <= 0 or time.perf_counter() > end:
                break
            case = cases.draw()
            yield "trying", (place, subject.declaration, case, seed)
            verdict = _tried(plan, subject, case)
            yield "case", (_name(subject), spec.structure, spec.is_elementwise, case, verdict)
            left -= verdict.status != "void"
            if verdict.status == "wrong":
                if verdict.finding is not None and any(word in verdict.finding.detail for word in LOST):
                    yield "failure", _failure(plan, subject, case, verdict, seed)
                    yield "lost", place
                    return
                failures.append((subject, case, verdict, seed, history))
                yield "failure", _failure(plan, subject, case, verdict, seed, history)
                break
            history.append(case)
    for subject, case, verdict, seed, earlier in failures[:SHRUNK] if plan.shrink > 0 else []:
        small = shrunk(subject, case, verdict, plan.device, plan.shrink, plan.poison, tuple(earlier))
        subject, case, verdict, before = small
        yield "failure", _failure(plan, subject, case, verdict, seed, before)


def _declared(plan: Plan, place: int, rng: random.Random) -> Subject | None:
    """The random declaration of a place, None where the backend cannot run any of eight."""
    for attempt in range(8):
        declaration = KNOWN if place == 0 and not attempt else draw(rng.choice, DECK[place % len(DECK)])
        try:
            recurrence = declaration.build()
            if plan.backend == KERNELS:
                recurrence.plan(N=4, P=2, backend=KERNELS, device=plan.device)
        except (TraceError, FormError):
            continue
        return Subject(declaration, recurrence)
    return None


def _tried(plan: Plan, subject: Subject, case: Case) -> Verdict:
    """The case's verdict; an exception of the oracle, an error of the adversary itself, is also reported."""
    try:
        return subject.attempt(case, plan.device, plan.poison)
    except Exception as error:
        return Verdict("wrong", {}, Finding("oracle", 0, math.inf, 0.0, detail=words_of(error)))


def _name(subject: Subject) -> str:
    return subject.recurrence.name if subject.declaration is None else subject.declaration.text


def _failure(
    plan: Plan, subject: Subject, case: Case, verdict: Verdict, seed: int, history: Sequence[Case] = ()
) -> dict[str, Any]:
    assert verdict.finding is not None
    return {
        "seed": seed, "structure": subject.recurrence.spec.structure, "dtype": case.dtype,
        "quantity": verdict.finding.quantity, "error": verdict.finding.error, "finding": str(verdict.finding),
        "script": script(subject, case, verdict, plan.device, plan.poison, history),
    }  # fmt: skip


@functools.cache
def takes_empty() -> bool:
    """Whether packed sequences may be empty."""
    d = Declaration("decay", (("sigmoid(s)", "k * v"),), "q")
    x, s = torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1)
    try:
        d.build()(x, x, x, s, cu_seqlens=torch.tensor([0, 0, 2]))
    except InputError:
        return False
    return True


def _spawned(plan: Plan, workers: int, told: Callable[[str], None], keep: Keep) -> Result:
    """`tried` in several processes; one that dies is replaced, and its last case is a failure."""
    result = Result(plan.device, plan.backend)
    context = multiprocessing.get_context("spawn")
    begin = time.perf_counter()
    share = None if plan.cases is None else -(-plan.cases // workers)
    running: dict[Connection, tuple[Any, Plan]] = {}
    doing: dict[Connection, Any] = {}

    def start(mine: Plan) -> None:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_worker, args=(theirs, mine), daemon=True)
        process.start()
        theirs.close()
        running[ours] = process, mine

    def again(connection: Connection, place: int) -> None:
        """Start another process for the remaining time and cases."""
        _, mine = running[connection]
        seconds = None if plan.seconds is None else plan.seconds - (time.perf_counter() - begin)
        if seconds is None or seconds > 1:
            start(replace(mine, start=place, seconds=seconds))

    for worker in range(workers):
        start(replace(plan, cases=share, worker=worker, workers=workers, start=worker))
    while running:
        for connection in wait(list(running)):
            assert isinstance(connection, Connection)
            try:
                message = connection.recv()
            except EOFError:
                process, mine = running[connection]
                process.join()
                if connection in doing:  # it died
                    place, declaration, case, seed = doing.pop(connection)
                    result.failures.append(_died(declaration, case, seed, process.exitcode, mine))
                    again(connection, place)
                del running[connection]
                continue
            if message[0] == "trying":
                doing[connection] = message[1]
            elif message[0] == "lost":
                again(connection, message[1])
                doing.pop(connection, None)
            elif message[0] == "end":
                doing.pop(connection, None)
            else:
                _take(result, message, told)
                keep(result)
    return result


def _worker(connection: Connection, plan: Plan) -> None:
    torch.set_num_threads(1)
    for message in tried(plan):
        connection.send(message)
    connection.send(("end", None))
    connection.close()


def _died(declaration: Declaration, case: Case, seed: int, code: int | None, plan: Plan) -> dict[str, Any]:
    finding = Finding("exception", 0, math.inf, 0.0, detail=f"the process died with exit code {code}")
    return _failure(plan, Subject(declaration, declaration.build()), case, Verdict("wrong", {}, finding), seed)
