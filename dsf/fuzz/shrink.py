"""Shrinking of a failing case: sizes, calls, layouts and terms of the declaration are removed while it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsf.call.recurrence import Recurrence
from dsf.checking.ranges import Given
from dsf.fuzz.case import Case
from dsf.fuzz.declaration import Declaration, smaller
from dsf.fuzz.judge import attempt, forget
from dsf.fuzz.verdict import Verdict
from dsf.language.errors import DsfError


@dataclass(frozen=True)
class Subject:
    """The subject of a test: a random declaration, or a user's recurrence, whose text is unknown."""

    declaration: Declaration | None
    recurrence: Recurrence
    ranges: Given | None = None
    fresh: bool = False  # clear the caches before a case

    def attempt(self, case: Case, device: torch.device | str, poison: bool = True) -> Verdict:
        """Test the case on the recurrence."""
        if self.fresh:
            forget(self.recurrence)
        return attempt(self.recurrence, case, device, self.ranges, poison)


def shrunk(
    subject: Subject, case: Case, verdict: Verdict, device: torch.device | str, seconds: float, poison: bool = True,
    history: Sequence[Case] = (),
) -> tuple[Subject, Case, Verdict, tuple[Case, ...]]:  # fmt: skip
    """The smallest subject and case found within `seconds` with the same kind of failure, and its verdict.

    history: earlier cases of the subject, on which the failure may depend through caches. The needed part of it is the
    last result; where none is needed, every test starts with empty caches.
    """
    deadline = time.perf_counter() + seconds
    kind = _kind(verdict)
    subject = replace(subject, fresh=True)
    now = _safely(subject, case, device, poison)
    if now is None or now.status != "wrong":
        return subject, case, verdict, _needed(subject, case, device, deadline, poison, tuple(history))
    kind = _kind(now)
    best = (subject, case, now)
    tried = {_name(subject, case)}  # what is simpler in one way may be what there was in another
    changed = True
    while changed and time.perf_counter() < deadline:
        changed = False
        for candidates in (_cases, _declarations):
            best, better = _descend(best, candidates, tried, kind, device, deadline, poison)
            changed = changed or better
    return *best, ()


def _safely(subject: Subject, case: Case, device: torch.device | str, poison: bool) -> Verdict | None:
    try:
        return subject.attempt(case, device, poison)
    except Exception:  # the oracle raises: not a legal case
        return None


def _needed(
    subject: Subject, case: Case, device: torch.device | str, deadline: float, poison: bool, history: tuple[Case, ...]
) -> tuple[Case, ...]:
    """The earlier cases that the failure needs; all of them where it does not repeat."""

    def fails(before: tuple[Case, ...]) -> bool:
        forget(subject.recurrence)
        later = replace(subject, fresh=False)
        for one in before:
            _safely(later, one, device, poison)
        found = _safely(later, case, device, poison)
        return found is not None and found.status == "wrong"

    size = len(history)
    while size and time.perf_counter() < deadline:
        for start in range(0, len(history), size):
            less = history[:start] + history[start + size :]
            if len(less) < len(history) and time.perf_counter() < deadline and fails(less):
                history = less
                break
        else:
            size //= 2
    return history


Found = tuple[Subject, Case, Verdict]


def _descend(
    best: Found, candidates: Callable[[Subject, Case], Iterator[tuple[Subject, Case]]], tried: set[str], kind: str,
    device: torch.device | str, deadline: float, poison: bool,
) -> tuple[Found, bool]:  # fmt: skip
    """Repeatedly take the first candidate with the same kind of failure that was not tried before."""
    better = False
    while True:
        for subject, case in candidates(best[0], best[1]):
            if time.perf_counter() > deadline:
                return best, better
            name = _name(subject, case)
            if name in tried:
                continue
            tried.add(name)
            verdict = _safely(subject, case, device, poison)
            if verdict is not None and verdict.status == "wrong" and _kind(verdict) == kind:
                best, better = (subject, case, verdict), True
                break
        else:
            return best, better


def _name(subject: Subject, case: Case) -> str:
    return repr(subject.declaration) + repr(case)


def _kind(verdict: Verdict) -> str:
    """The kind of a failure: of its quantity, or the class of its exception."""
    assert verdict.finding is not None
    if verdict.finding.quantity == "exception":
        return verdict.finding.detail.partition(":")[0]
    return "repeat" if verdict.finding.quantity.startswith("repeat") else "number"


def _cases(subject: Subject, case: Case) -> Iterator[tuple[Subject, Case]]:
    for other in simpler(case):
        yield subject, other


PLAIN: dict[str, Any] = {
    "lengths": (), "layouts": {}, "groups": {}, "regimes": {}, "initial": False, "frozen": (), "step": False,
    "reverse": False, "way": "",
}  # fmt: skip


def simpler(case: Case) -> Iterator[Case]:
    """Cases with one thing removed, the largest removals first."""
    if case.between:
        yield replace(case, between=())
    for calls in sorted({1, 2, case.calls - 1}):
        if 0 < calls < case.calls:
            kept = tuple(c for c in case.alias_calls if c <= calls)
            yield replace(
                case, calls=calls, between=case.between[: calls - 1], alias_calls=kept, alias=case.alias if kept else ()
            )
    if case.alias:
        yield replace(case, alias=(), alias_calls=(), overlap=False)
        if case.overlap:
            yield replace(case, overlap=False)
        if len(case.alias) > 2:
            yield replace(case, alias=case.alias[:2])
    for name, plain in PLAIN.items():
        if getattr(case, name) != plain:
            yield replace(case, **{name: plain})
    less: dict[str, Any]
    for name in ("layouts", "groups", "regimes"):
        now: dict[str, Any] = getattr(case, name)
        for lost in now:
            less = {name: {k: v for k, v in now.items() if k != lost}}
            yield replace(case, **less)
    if case.loss == "both":
        yield from (replace(case, loss=loss) for loss in ("", "y", "state"))
    elif case.loss:
        yield replace(case, loss="")
    for size in ("batch", "heads", "n", "p"):
        count: int = getattr(case, size)
        for value in sorted({1, 2, count // 2, count - 1}):
            if 0 < value < count and (size != "heads" or all(value % g == 0 for g in case.groups.values())):
                less = {size: value}
                yield replace(case, **less)
    yield from _shorter(case)


def _shorter(case: Case) -> Iterator[Case]:
    if case.lengths:
        for place, length in enumerate(case.lengths):
            for value in (None, length // 2, length - 1):
                own = () if value is None else (value,)
                pieces = (*case.lengths[:place], *own, *case.lengths[place + 1 :])
                fewer = sum(pieces) < case.tokens or (value is None and length == 0)
                if fewer and sum(pieces) and min(pieces) >= 0:
                    yield replace(case, lengths=pieces, tokens=sum(pieces))
        return
    t = case.tokens
    for value in sorted({1, 2, 5, 17, 33, t // 4, t // 2, t - 16, t - 8, t - 1}):
        if 0 < value < t:
            yield replace(case, tokens=value)


def _declarations(subject: Subject, case: Case) -> Iterator[tuple[Subject, Case]]:
    if subject.declaration is None:
        return
    for other in smaller(subject.declaration):
        try:
            recurrence = other.build()
        except (DsfError, SyntaxError, TypeError, NameError):
            continue
        lost = set(subject.declaration.inputs) - set(other.inputs)
        yield replace(subject, declaration=other, recurrence=recurrence), case.without(lost)


def script(
    subject: Subject, case: Case, verdict: Verdict, device: str, poison: bool = True, history: Sequence[Case] = ()
) -> str:
    """A program that repeats the failure. history: cases to run before."""
    name = "fuzzed" if subject.declaration is not None else subject.recurrence.name
    text = subject.declaration.text if subject.declaration is not None else f"# {name}: your recurrence\n"
    more = f", device={device!r}" if device != "cpu" else ""
    more += f", ranges={dict(subject.ranges)!r}" if subject.ranges else ""
    more += "" if poison else ", poison=False"
    first = "# run with TRITON_INTERPRET=1\n" if case.form == "triton" and device == "cpu" else ""
    earlier = "".join(f"attempt({name}, {one!r}{more})\n" for one in history)
    return (
        f"{first}{text}\n\nfrom dsf.fuzz import Case, attempt\n\n{earlier}case = {case!r}\n"
        f"print(attempt({name}, case{more}))\n# {verdict.status}: {verdict.finding}\n"
    )
