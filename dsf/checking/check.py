"""`dsf.check`: tests the laws of dsf.checking.laws on random examples of any recurrence, and shrinks failures."""

from __future__ import annotations

import itertools
import math
import os
import random
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dsf.call.plan import BACKENDS
from dsf.call.recurrence import Recurrence
from dsf.checking.compare import Measure, words_of
from dsf.checking.examples import Example, lengths, regimes_of
from dsf.checking.laws import LAWS, Law
from dsf.checking.measure import AGAINST, KERNELS, ORACLE, TOLERANCE, Subject
from dsf.checking.ranges import Given, ranges_of
from dsf.checking.report import Failure, Report, Row
from dsf.language.errors import FormError, InputError

THREADS = min(8, os.cpu_count() or 1)  # examples at a time where kernels are compiled for a GPU
MATRIX_LONGEST = 70  # the most tokens for the kernel-matrix form, which is quadratic in T
STABLE = 256  # tokens of the examples for the law `finite`
SHRINK_SECONDS, SHRINK_TRIES, SHRUNK = 6.0, 400, 8  # SHRINK_SECONDS of CPU time; failures that are shrunk
SHRINK_WALL = 20.0  # seconds of wall time, as compilers of GPU kernels run in other processes
ALIKE = {"float32": (6, 2), "float16": (6, 2), "bfloat16": (5, 3)}  # N, P of all examples for compiled GPU kernels

Cells = dict[tuple[str, str, str, str], Row]


def check(
    recurrence: Recurrence,
    *,
    against: Callable[..., Any] | None = None,
    ranges: Given | None = None,
    examples: int = 6,
    tokens: int = 130,
    forms: tuple[str, ...] | None = None,
    laws: tuple[str, ...] | None = None,
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16),
    device: torch.device | str = "cpu",
    backend: str = "auto",
    seed: int = 0,
) -> Report:
    """Test every law (dsf.checking.laws) on every form of a recurrence, forward and backward; report the worst errors.

    against: a function of your own to test in place of the library's forms. It is called as against(*inputs) or, if it
      has that parameter, against(*inputs, initial_state=None), and returns y or (y, state). All inputs have H heads.
      The laws of packed sequences, decoding and grouped heads are left out.
    ranges: of inputs, by name, where they do not follow from the expressions (dsf.checking.ranges): {"alpha": (0, 1)},
      or a dsf.testing.Range.
    examples: how many for each law and dtype (dsf.testing.examples). tokens: of the longest example.
    forms, laws, dtypes: those to test; None: all. Laws that do not depend on the dtype take the first one; gradcheck
      takes float64 alone. device: of the tensors. seed: of the random examples.
    backend: "auto" tests the torch forms and, on a CUDA device, the Triton backend as one more form, "triton", in its
      dtypes (not float64). "triton" tests that form alone, "torch" only the others.

    Errors are relative, and the worst over all heads and blocks of 16 tokens (dsf.checking.measure.distance), against
    the float64 oracle on the same rounded inputs. They may reach 1e-9 in float64, 1e-4 in float32 and 2e-2 in half
    precisions, where errors of Params' gradients are relative to the root of the sum of squares of all tokens' parts
    (Subject.terms). Kernels are compiled for each shape, so their examples of a dtype share N, P and number of heads.
    backend="triton" works without a GPU if TRITON_INTERPRET=1 was set before triton was imported.

    Returns a Report: `.ok`, `print(report)`, `.brief()`, `.to_dict()`, `.raise_if_failed()`. Raises FormError for an
    unknown form or backend, and for backend="triton" where it cannot run the recurrence; InputError for anything but a
    recurrence, an unknown law or input name, numbers that do not fit, a device that this machine lacks, and where
    nothing is left to test; DsfError, saying what to install, without hypothesis.
    """
    import dsf.testing  # noqa: F401, needs hypothesis: fail before any work

    begin = time.perf_counter()
    _check_asked(recurrence, against, examples, tokens, seed)
    forms, laws, dtypes = _several(forms), _several(laws), _several(dtypes)
    check_device(recurrence.name, device)
    if backend not in ("auto", *BACKENDS):
        raise FormError(
            f"{recurrence.name}: there is no backend {backend!r}; backends are {', '.join(BACKENDS)} and auto"
        )
    found = _forms(recurrence, against, forms, device, backend)
    elsewhere = "torch" if KERNELS in found else backend
    subject = Subject(recurrence, ranges_of(recurrence.spec, ranges), against, device, elsewhere)
    run = _Run(subject, found, _names(dtypes), ranges, examples, tokens, seed)
    run.try_laws(_laws(recurrence, laws))
    if not run.cells:
        these = f"the laws {', '.join(laws) or 'none'}" if laws is not None else "all laws"
        raise InputError(f"{recurrence.name}: nothing is tested by {these} on the forms {', '.join(found) or 'none'}")
    failures = tuple(run.failures())
    return Report(
        recurrence=recurrence.name,
        structure=recurrence.spec.structure,
        device=str(device),
        ranges={name: str(r) for name, r in subject.ranges.items()},
        rows=tuple(run.cells.values()),
        failures=failures,
        examples=run.drawn,
        seconds=time.perf_counter() - begin,
    )


def _check_asked(recurrence: Any, against: Any, examples: Any, tokens: Any, seed: Any) -> None:
    """Raise InputError for what is no recurrence, no function and no number of its kind."""
    if not isinstance(recurrence, Recurrence):
        inner = getattr(recurrence, "recurrence", None)
        hint = "; check the recurrence of a layer: layer.recurrence" if isinstance(inner, Recurrence) else ""
        raise InputError(f"dsf.check takes a recurrence, got {type(recurrence).__name__}{hint}")
    for name, given in (("examples", examples), ("tokens", tokens), ("seed", seed)):
        if not isinstance(given, int) or (given < 1 and name != "seed"):
            least = "" if name == "seed" else " of at least 1"
            raise InputError(f"{recurrence.name}: {name} is an integer{least}, got {given!r}")
    if against is not None and not callable(against):
        raise InputError(f"{recurrence.name}: against is a function of the inputs, got {type(against).__name__}")


def _several(given: Any) -> Any:
    """A single name or dtype as a tuple; anything else as it is."""
    return (given,) if isinstance(given, str | torch.dtype) else given


def check_device(owner: str, device: torch.device | str) -> None:
    """Raise InputError for a device that torch does not know or this machine does not have."""
    try:
        kind = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{owner}: {device!r} is no device; give cpu or cuda") from error
    if kind.type == "cuda" and not torch.cuda.is_available():
        build = "" if torch.version.cuda or torch.version.hip else f" (torch {torch.__version__} is built without CUDA)"
        raise InputError(f"{owner}: device {str(kind)!r} was asked for, but torch finds no GPU{build}")
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise InputError(f"{owner}: device {str(kind)!r} was asked for, but this machine has {count} GPUs, from cuda:0")
    if kind.type == "meta":
        raise InputError(f"{owner}: tensors on the meta device have no numbers to check")
    try:
        torch.zeros(1, device=kind)
    except Exception as error:  # a missing backend may raise anything
        why = " ".join(str(error).split())[:200]
        raise InputError(f"{owner}: device {str(kind)!r} was asked for, but torch cannot use it: {why}") from error


def _forms(
    recurrence: Recurrence,
    against: Callable[..., Any] | None,
    forms: tuple[str, ...] | None,
    device: torch.device | str,
    backend: str,
) -> list[str]:
    if against is not None:
        return [AGAINST]
    had = recurrence.forms
    if backend == KERNELS:
        recurrence.plan(N=4, P=2, backend=KERNELS, device=device)  # raises FormError where it cannot run
        had = (ORACLE, KERNELS)
    elif backend == "auto" and torch.device(device).type == "cuda":
        had += (KERNELS,) if recurrence.plan(N=4, P=2, device=device).backend == KERNELS else ()
    for form in forms or ():
        if form not in had:
            raise FormError(
                f"{recurrence.name}: {recurrence.spec.structure} has no {form} form; it has {', '.join(had)}"
            )
    return [f for f in had if forms is None or f in forms]


def _laws(recurrence: Recurrence, names: tuple[str, ...] | None) -> list[Law]:
    for name in names or ():
        if name not in LAWS:
            raise InputError(f"{recurrence.name}: there is no law {name!r}; laws are {', '.join(LAWS)}")
    return [law for law in LAWS.values() if names is None or law.name in names]


def _names(dtypes: tuple[torch.dtype, ...]) -> list[str]:
    names = [str(d).removeprefix("torch.") for d in dtypes]
    if not names or any(n not in TOLERANCE for n in names):
        raise InputError(f"dtypes must be some of {', '.join(TOLERANCE)}, got {', '.join(names) or 'none'}")
    return names


@dataclass
class _Run:
    """One running check, with the worst row so far of every law, dtype, form and quantity."""

    subject: Subject
    forms: list[str]
    dtypes: list[str]
    ranges: Given | None
    examples: int
    tokens: int
    seed: int
    cells: Cells = field(default_factory=dict)
    drawn: int = 0

    def try_laws(self, laws: list[Law]) -> None:
        """Measure every law on its examples; `finite` is measured from the runs of `forms`, too.

        On a GPU several at a time, since most of the time goes into kernels, many of which are compiled at once; the
        first one alone, since torch loads some of its libraries in a way that threads disturb.
        """
        tried: list[tuple[list[Law], Example]] = []
        for law in laws:
            together = [law, LAWS["finite"]] if law.name == "forms" and LAWS["finite"] in laws else [law]
            tried += ((together, example) for example in self.examples_of(law))
        self.drawn += len(tried)
        found = list(map(self.rows, tried[:1]))
        with ThreadPoolExecutor(THREADS) as threads:
            found += (threads.map if self.compiled else map)(self.rows, tried[1:])
        for row in itertools.chain.from_iterable(found):
            self.keep(row)

    def rows(self, tried: tuple[list[Law], Example]) -> list[Row]:
        """The measures of laws on one example, by every form."""
        laws, example = tried
        dtype, long = example.dtype, example.tokens > MATRIX_LONGEST
        return [
            Row(law.name, dtype, form, m.quantity, m.error, m.tolerance, example, m.detail)
            for law in laws
            for form in self.forms_of(law)
            if dtype in self.dtypes_of(law, form) and not (long and form == "kernel")
            for m in self.measure(law, form, example)
        ]

    def forms_of(self, law: Law) -> list[str]:
        """The forms on which a law is tested."""
        if law.forms == "step":
            return [f for f in self.forms if f in ("recurrent", KERNELS)]
        return [f for f in self.forms if law.forms == "all" or f != ORACLE]

    def dtypes_of(self, law: Law, form: str) -> list[str]:
        """The dtypes in which a law is tested on a form."""
        able = [d for d in self.dtypes if d != "float64" or form != KERNELS]
        if law.name == "gradcheck":  # finite differences need float64's digits
            return [d for d in able if d == "float64"]
        return able if law.every_dtype else able[:1]

    def measure(self, law: Law, form: str, example: Example) -> list[Measure]:
        """A law's measures; an exception counts as an infinite error."""
        try:
            return list(law.measure(self.subject, form, self.subject.supports(form, example)))
        except Exception as error:  # any exception on valid inputs is a failure
            return [Measure("exception", math.inf, 0.0, words_of(error))]

    def keep(self, row: Row) -> None:
        """Keep a row if it is the worst of its law, dtype, quantity and form."""
        key = (row.law, row.dtype, row.quantity, row.form)
        if key not in self.cells or not row.error <= self.cells[key].error:
            self.cells[key] = row

    def examples_of(self, law: Law) -> Iterator[Example]:
        """The examples for a law: one typical sequence, then random short, medium and long ones."""
        if law.name == "finite":  # it is also measured on all examples of `forms`
            yield from self.extremes()
            return
        seed = self.seed + zlib.crc32(law.name.encode())
        tried = [d for f in self.forms_of(law) for d in self.dtypes_of(law, f)]
        for dtype in [d for d in self.dtypes if d in tried]:
            yield self.alike(self.typical(min(law.longest, self.tokens), dtype))
            bands = [(low, min(high, self.tokens, law.longest)) for low, high in ((1, 9), (10, 40), (41, self.tokens))]
            bands = [b for b in bands if b[0] <= b[1]]
            count = self.examples if law.name == "forms" and dtype == self.dtypes[0] else -(-self.examples // 2)
            count = -(-count // 3) if law.name == "gradcheck" else count  # finite differences need many calls
            for place, band in enumerate(bands):
                share = (count + place) // len(bands)
                yield from self.draw(band, share, dtype, law.name == "gradcheck", seed + place)

    def typical(self, longest: int, dtype: str) -> Example:
        """The typical example: normal numbers, grouped heads, an initial state, two cuts, one after the first chunk."""
        tokens = min(70, longest)
        timed = [i.name for i in self.subject.recurrence.spec.inputs if i.kind.time]
        cuts = tuple(sorted({c for c in (tokens // 3, tokens - 3) if 0 < c < tokens}))
        heads, (n, p) = (4, ALIKE[dtype]) if self.compiled and dtype in ALIKE else (2, (3, 2))
        return Example(
            batch=2 if longest > 3 else 1, tokens=tokens, heads=heads, n=n, p=p, dtype=dtype,
            groups=dict.fromkeys(timed[1:2], heads // 2), initial=True, cuts=cuts, seed=self.seed,
            empties=(0, 1, 1, len(cuts) + 1),
        )  # fmt: skip

    @property
    def compiled(self) -> bool:
        """True where a new shape costs seconds, because GPU kernels are compiled for it."""
        return KERNELS in self.forms and torch.device(self.subject.device).type == "cuda"

    def alike(self, example: Example) -> Example:
        """The example with the typical one's shape except T; all pieces between cuts get odd lengths.

        Triton compiles separate kernels for strides and addresses divisible by 16, and for strides of 1.
        """
        if not self.compiled or example.dtype not in ALIKE:
            return example
        same = self.typical(example.tokens, example.dtype)
        pieces = [max(3, piece | 1) for piece in lengths(example.bounds)]
        cuts = tuple(itertools.accumulate(pieces if len(pieces) % 2 else [*pieces, 3]))  # so T, their sum, is odd
        return replace(example, batch=same.batch, heads=same.heads, groups=same.groups, n=same.n, p=same.p,
                       tokens=cuts[-1], cuts=cuts[:-1])  # fmt: skip

    def draw(self, tokens: tuple[int, int], count: int, dtype: str, plain: bool, seed: int) -> list[Example]:
        """`count` examples from Hypothesis."""
        from dsf import testing

        strategy = testing.examples(self.subject.recurrence, self.ranges, tokens, dtype, plain)
        found: list[Example] = []

        def see(example: Example) -> bool:
            found.append(self.alike(example))
            return False

        if count:
            _find(strategy, see, 3 * count, seed)
        return found[-count:] if count else []  # the first ones of Hypothesis are trivial

    def extremes(self) -> Iterator[Example]:
        """Long sequences of normal numbers and of numbers at the ends of their ranges, in float32 if it is tested."""
        spec, ranges = self.subject.recurrence.spec, self.subject.ranges
        dtype = "float32" if "float32" in self.dtypes else self.dtypes[0]
        base = self.alike(Example(tokens=STABLE, n=3, p=2, dtype=dtype))
        yield base
        for wanted in (("corners", "saturated"), ("high", "alternating"), ("mixed",)):
            ways = {i.name: regimes_of(spec, i.name, ranges[i.name]) for i in spec.inputs}
            ends = {name: next((r for r in w if r in wanted), None) for name, w in ways.items()}
            keys = [n for n, w in ways.items() if ranges[n].unit and "repeated" in w and not ends[n]]
            ends |= dict.fromkeys(keys, "repeated")
            yield replace(base, regimes={name: r for name, r in ends.items() if r}, initial=True)

    def failures(self) -> Iterator[Failure]:
        """One failure for each broken law and form, the worst dtype and quantity first."""
        broken: dict[tuple[str, str], Row] = {}
        for row in self.cells.values():
            worst = broken.get((row.law, row.form))
            if not row.ok and (worst is None or _excess(row) > _excess(worst)):
                broken[row.law, row.form] = row
        for number, row in enumerate(broken.values()):
            small = self.shrink(row) if number < SHRUNK else None
            final = small or row
            yield Failure(final, LAWS[row.law].statement, small is not None, self.snippet(final))

    def shrink(self, row: Row) -> Row | None:
        """The simplest example that Hypothesis finds to break the same law by the same form; None if it finds none."""
        from dsf import testing

        law, deadline = LAWS[row.law], time.process_time() + SHRINK_SECONDS
        last = time.perf_counter() + SHRINK_WALL
        tried: dict[str, Row | None] = {}  # after the deadline only known results are returned, so Hypothesis stops

        def breaks(example: Example) -> bool:
            name = repr(example)
            if name not in tried and time.process_time() < deadline and time.perf_counter() < last:
                tried[name] = measured(example)
            return tried.get(name) is not None

        def measured(example: Example) -> Row | None:
            bad = [m for m in self.measure(law, row.form, example) if not m.ok]
            bad = [m for m in bad if m.quantity == row.quantity] or bad
            if not bad:
                return None
            m = max(bad, key=lambda m: m.error)
            return Row(row.law, row.dtype, row.form, m.quantity, m.error, m.tolerance, example, m.detail)

        return tried.get(repr(_find(testing.simpler(row.example), breaks, SHRINK_TRIES, self.seed)))

    def snippet(self, row: Row) -> str:
        """Code that repeats the measurement."""
        name = self.subject.recurrence.name
        more = "" if not self.ranges else f", ranges={dict(self.ranges)!r}"
        more += ", against=your_function" if row.form == AGAINST else ""
        more += f", device={str(self.subject.device)!r}" if str(self.subject.device) != "cpu" else ""
        more += f", backend={self.subject.backend!r}" if self.subject.backend != "auto" else ""
        return (
            f"from dsf.testing import Example, Range, errors\n"
            f"example = {row.example!r}\n"
            f"print(errors({name}, {row.law!r}, {row.form!r}, example{more}))"
        )


def _excess(row: Row) -> float:
    """A row's error divided by its tolerance; for an exact law the error."""
    return row.error / row.tolerance if row.tolerance else row.error


def _find(strategy: Any, condition: Callable[[Example], bool], tries: int, seed: int) -> Example | None:
    """The simplest example that Hypothesis finds for a condition, or None."""
    from hypothesis import HealthCheck, Phase, find, settings
    from hypothesis.errors import NoSuchExample, Unsatisfiable

    chosen = settings(
        max_examples=max(1, tries), database=None, deadline=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    try:
        return find(strategy, condition, settings=chosen, random=random.Random(seed))
    except (NoSuchExample, Unsatisfiable):
        return None
