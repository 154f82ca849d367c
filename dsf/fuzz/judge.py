"""The test of one case: its calls, each compared with the oracle, and the first again, compared bit by bit."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsf.call import packing
from dsf.call.recurrence import Recurrence, State
from dsf.checking.compare import OUTPUT, words_of
from dsf.checking.measure import KERNELS, Subject, distance, misfits, typical_entry
from dsf.checking.ranges import Given, ranges_of
from dsf.checking.states import changed
from dsf.fuzz.caches import as_numbers, start_dtype
from dsf.fuzz.case import Case
from dsf.fuzz.inputs import Memory, cotangents, given_of, numbers, states
from dsf.fuzz.poison import poisoned
from dsf.fuzz.truth import Expected, differentiated, form_of, moved, truths
from dsf.fuzz.verdict import Finding, Verdict
from dsf.kernels.attention import KVCache
from dsf.language.annotations import Kind
from dsf.torch.columns import columns
from dsf.torch.evaluate import disturbed

DRAWS = 4  # random roundings of inputs: near a kink (minimum, where) only some of them cross it
UNDECIDED = 0.5  # the share of a tolerance above which the oracle's own rounding error makes a case undecided
Cotangents = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Ran:
    """The result of one call: y, the raw final state and the one in its true scale, gradients by leaf."""

    y: Tensor
    raw: Tensor | None
    state: Tensor
    grads: Mapping[str, Tensor]

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors that a repeated call must reproduce bit by bit."""
        raw = {} if self.raw is None else {"state": self.raw}
        return {"y": self.y} | raw | {f"grad {n}": g for n, g in self.grads.items()}


def attempt(
    recurrence: Recurrence,
    case: Case,
    device: torch.device | str = "cpu",
    ranges: Given | None = None,
    poison: bool = True,
) -> Verdict:
    """Test a case of a recurrence. device: of the calls (the oracle runs on the CPU). ranges: as in dsf.check.

    poison: fill uninitialised memory with NaN. Any exception is a finding, as cases are legal calls.
    """
    subject = Subject(recurrence, _ranges(recurrence, ranges), None, device, case.backend)
    values = [numbers(recurrence, subject.ranges, case, call) for call in range(1, case.calls + 1)]
    starts = states(recurrence, subject.ranges, case)
    shape = _state_shape(recurrence, case, values, starts)
    cots = [cotangents(case, call, shape, recurrence.spec.is_attention) for call in range(1, case.calls + 1)]
    expected = truths(recurrence, case, values, starts, cots)
    if not all(e.is_usable(case.dtype) for e in expected):
        return Verdict("void")
    with poisoned() if poison else contextlib.nullcontext():
        errors, finding = _calls(subject, case, values, starts, cots, expected)
    if finding is None:
        return Verdict("right", errors)
    if finding.tolerance:
        exact, same = torch.float64, (values, starts)
        for what, inputs, share, wide in (
            *(
                ("when inputs move by one rounding", moved(values, starts, case.dtype, case.seed + draw), 0.0, exact)
                for draw in range(DRAWS)
            ),
            ("when values of expressions move by one rounding", same, torch.finfo(start_dtype(case)).eps / 2, exact),
            ("in float32", same, 0.0, torch.float32),
        ):
            if wide != exact and (case.dtype == "float64" or form_of(recurrence, case) == case.form):
                continue  # the form itself is no independent reference
            with disturbed(case.seed, share):
                found = truths(recurrence, case, *inputs, cots, wide)
            now, before = found[finding.call - 1], expected[finding.call - 1]
            if not now.is_usable(case.dtype):  # aliased inputs no longer cancel
                more = f"the oracle itself has numbers beyond {case.dtype} {what}"
                return Verdict("undecided", errors, replace(finding, detail=more))
            if not math.isfinite(finding.error):
                continue
            own = dict(_measures(subject, case, Ran(now.y, None, now.state, now.grads), before))[finding.quantity][0]
            if own > UNDECIDED * finding.tolerance:
                more = f"the oracle itself is off by {own:.1e} {what}"
                return Verdict("undecided", errors, replace(finding, detail=more))
    return Verdict("wrong", errors, finding)


@functools.lru_cache(maxsize=64)
def _inferred(recurrence: Recurrence) -> dict[str, Any]:
    return ranges_of(recurrence.spec)


def _ranges(recurrence: Recurrence, given: Given | None) -> dict[str, Any]:
    return ranges_of(recurrence.spec, given) if given else _inferred(recurrence)


def true_shape(recurrence: Recurrence, case: Case) -> tuple[int, int]:
    """Rows and columns of one head's state in its true scale."""
    layout = columns(recurrence.spec.inner, case.p)
    return recurrence.state_shape(N=case.n if recurrence.spec.has_key else 1, P=case.p)[0], layout.p + layout.den


def _state_shape(
    recurrence: Recurrence, case: Case, values: Sequence[Mapping[str, Tensor]], starts: Sequence[State | None]
) -> tuple[int, ...]:
    """The shape of a call's final state as numbers; for a cache the oracle's."""
    if not recurrence.spec.is_attention:
        return (case.rows, case.heads, *true_shape(recurrence, case))
    return tuple(truths(recurrence, replace(case, loss=""), values, starts, [])[0].state.shape)


def _calls(
    subject: Subject, case: Case, values: Sequence[Mapping[str, Tensor]], starts: Sequence[State | None],
    cots: Sequence[Cotangents], expected: Sequence[Expected],
) -> tuple[dict[str, float], Finding | None]:  # fmt: skip
    """The worst errors, and the first finding."""
    errors: dict[str, float] = {}
    first: Ran | None = None
    for call in (*range(1, case.calls + 1), 1):
        place = call - 1
        again = first is not None and call == 1
        memory = Memory(torch.device(subject.device))
        try:
            leaves = given_of(subject.recurrence, subject.ranges, case, call, values[place], memory)
            if not again:
                _between(subject, case, call, leaves)
            start = _start(case, starts[place], memory)
            ran = _run(subject, case, call, leaves, start, cots[place], memory)
        except Exception as error:  # any exception of a legal call is a finding
            return errors, Finding("exception", call, math.inf, 0.0, detail=words_of(error))
        if memory.changed():
            return errors, Finding("inputs", call, math.inf, 0.0, detail="written to, or what lies around them")
        if again:
            assert first is not None
            return errors, _repeated(first, ran, call)
        finding = _judge(subject, case, call, ran, expected[place], errors)
        if finding is not None:
            return errors, finding
        first = first or ran
    return errors, None


def _start(case: Case, start: State | None, memory: Memory) -> State | None:
    if start is None:
        return None
    way = case.layouts.get("initial_state", "plain")
    found = changed(start, lambda x: memory.put(x, way, 1).detach().requires_grad_(bool(case.loss)))
    return found._replace(lengths=found.lengths.to(memory.device)) if isinstance(found, KVCache) else found


def _between(subject: Subject, case: Case, call: int, leaves: Mapping[str, Tensor]) -> None:
    """Run the action of `case.between` before a call."""
    what = case.between[call - 2] if 2 <= call < 2 + len(case.between) else ""
    if what == "forget":
        forget(subject.recurrence)
    elif what == "other":
        other = neighbour(subject.recurrence)
        how: dict[str, Any] = {**leaves, "form": "auto" if case.form == KERNELS else case.form}
        y = other(**how, backend=case.backend)
        if y.requires_grad:
            y.sum().backward(inputs=[x for x in leaves.values() if x.requires_grad])
            for x in leaves.values():
                x.grad = None
    elif what in ("shorter", "heads"):
        if what == "heads":
            given = _with_other_heads(subject, case, call, leaves)
        else:
            given = subject.part(leaves, 0, (case.tokens + 1) // 2)
        y, _ = subject.run(case.form, given, reverse=case.reverse)
        if y.requires_grad:
            torch.autograd.grad(y.sum(), [x for x in given.values() if x.requires_grad], allow_unused=True)


def _with_other_heads(subject: Subject, case: Case, call: int, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs with other heads, one more or (of three and more) one fewer, in the case's memory layouts."""
    heads = case.heads - 1 if case.heads > 2 else case.heads + 1
    memory, found = Memory(torch.device(subject.device)), {}
    for name, x in leaves.items():
        axis = subject.kinds[name].layout().index("H")
        some = x.detach().index_select(axis, torch.arange(heads, device=x.device) % x.shape[axis])
        way = case.layout(name, call)
        found[name] = memory.put(some, "plain" if way == "fused" else way, heads).requires_grad_(x.requires_grad)
    return found


@functools.lru_cache(maxsize=32)
def neighbour(recurrence: Recurrence) -> Recurrence:
    """Another recurrence with the same inputs: with C doubled, or for softmax with another name only."""
    system = recurrence.spec.system
    if recurrence.spec.is_softmax:
        return Recurrence(replace(recurrence.spec, name=f"{recurrence.name}_again"))
    return Recurrence(replace(recurrence.spec, name=f"{recurrence.name}_twice", system=replace(system, C=2 * system.C)))


def forget(recurrence: Recurrence) -> None:
    """Clear what calls cache: plans, schedules, places of packed sequences."""
    recurrence._calls.kept.clear()
    operators = sys.modules.get("dsf.kernels.triton.operators")
    if operators is not None:
        operators.forget()
    for kept in ("_values", "_places"):
        getattr(packing, kept, {}).clear()


def _run(
    subject: Subject, case: Case, call: int, leaves: Mapping[str, Tensor], start: State | None, cots: Cotangents,
    memory: Memory,
) -> Ran:  # fmt: skip
    """One call and its gradients."""
    wrt = {n: x for n, x in leaves.items() if x.requires_grad and case.loss}
    if case.is_one(call) and not case.overlap:
        wrt = {n: x for n, x in wrt.items() if n not in case.alias[1:]}
    wrt |= subject.state_leaves(start) if case.loss else {}
    dy = memory.put(cots[0], case.layout("dy", call), 2) if case.loss else cots[0]
    wanted = [case.loss in ("both", what) for what in ("y", "state")]
    if case.way == "func" and wrt:
        return _by_func(
            subject, case, leaves, start, wrt, [d * use for d, use in zip((dy, cots[1]), wanted, strict=True)]
        )
    with torch.set_grad_enabled(bool(case.loss)):
        y, final = _called(subject, case, leaves, start)
        state = as_numbers(subject.recurrence, case, final)
    pairs = [(x, d.to(x)) for x, d, use in zip((y, state), (dy, cots[1]), wanted, strict=True) if use]
    grads = subject.without_gain(differentiated(pairs, wrt), case.p) if wrt else {}
    raw = final if isinstance(final, Tensor) else state.to(start_dtype(case))
    return Ran(y.detach(), raw.detach(), state.detach(), grads)


def _by_func(
    subject: Subject, case: Case, leaves: Mapping[str, Tensor], start: State | None, wrt: Mapping[str, Tensor],
    cots: Sequence[Tensor],
) -> Ran:  # fmt: skip
    """`_run` by torch.func.vjp, for a recurrence whose state is one tensor."""
    known = {id(x): name for name, x in wrt.items()}

    def outputs(*given: Tensor) -> tuple[tuple[Tensor, Tensor], Any]:
        now = dict(zip(wrt, given, strict=True))
        inputs = {n: now[known[id(x)]] if id(x) in known else x for n, x in leaves.items()}
        y, final = _called(subject, case, inputs, now.get("initial_state", start))
        return (y, as_numbers(subject.recurrence, case, final)), final

    made: Any = torch.func.vjp(outputs, *wrt.values(), has_aux=True)
    found, pull, raw = made
    grads = dict(zip(wrt, pull(tuple(d.to(x) for x, d in zip(found, cots, strict=True))), strict=True))
    return Ran(found[0].detach(), raw.detach(), found[1].detach(), subject.without_gain(grads, case.p))


def _called(
    subject: Subject, case: Case, inputs: Mapping[str, Tensor], start: State | None
) -> tuple[Tensor, State]:  # fmt: skip
    """y and the raw final state, by `case.step` and `case.way`."""
    if case.step:
        return _stepped(subject, case, inputs, start)
    bounds = torch.tensor(case.bounds, device=subject.device) if case.lengths else None

    def run(inputs: Mapping[str, Tensor], start: State | None, bounds: Tensor | None) -> tuple[Tensor, Any]:
        return subject.run(case.form, inputs, start, bounds, reverse=case.reverse)

    if case.way == "compiled":
        torch.compiler.reset()
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    y, found = run(inputs, start, bounds)
    assert found is not None
    return y, found


def _stepped(subject: Subject, case: Case, leaves: Mapping[str, Tensor], state: Any) -> tuple[Tensor, State]:
    timed = {name for name, kind in subject.kinds.items() if kind.time}
    outputs = []
    for t in range(case.tokens):
        now: dict[str, Any] = {n: x[:, t] if n in timed else x for n, x in leaves.items()}
        y, state = subject.recurrence.step(state, backend=case.backend, **now)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def _measures(
    subject: Subject, case: Case, ran: Ran, expected: Expected
) -> Iterator[tuple[str, tuple[float, tuple[Any, ...]]]]:
    """(quantity, (error, arguments of `distance`)) of a call. The scales are those of dsf.checking.compare."""
    held = max(expected.start, typical_entry(expected.y, OUTPUT), typical_entry(expected.state, None))
    kinds: Mapping[str, Kind | None] = subject.kinds
    least = 1.0 if case.loss != "y" else 0.0
    if subject.recurrence.spec.rule is not None:  # gradients of num and den, which may cancel, are about as large as y
        least = max(least, typical_entry(expected.y, OUTPUT))
    scale = max([least, *(typical_entry(x, kinds.get(n)) for n, x in expected.grads.items())])
    told: list[tuple[str, Tensor, Tensor, Any, float, Tensor | None]] = [
        ("y", ran.y, expected.y, OUTPUT, held, None), ("state", ran.state, expected.state, None, held, None)
    ]  # fmt: skip
    for name, want in expected.grads.items():
        got = ran.grads.get(name)
        got = torch.zeros(()) if got is None else got
        told.append((f"grad {name}", got, want, kinds.get(name), scale, expected.terms.get(name)))
    for quantity, got, want, kind, size, terms in told:
        measured = (got.detach().cpu(), want, kind, case.dtype, size, terms)
        yield quantity, (distance(*measured), measured)


def _judge(
    subject: Subject, case: Case, call: int, ran: Ran, expected: Expected, errors: dict[str, float]
) -> Finding | None:
    """The worst finding of a call, or None; its errors are added to `errors`."""
    worst: Finding | None = None
    wide = "float64" if case.dtype == "float64" else "float32"
    for quantity, (error, measured) in _measures(subject, case, ran, expected):
        errors[quantity] = max(error, errors.get(quantity, 0.0))
        if error <= case.tolerance:
            continue
        head, block, detail = _where(measured)
        if worst is None or error > worst.error or math.isinf(error):
            worst = Finding(quantity, call, error, case.tolerance, head, block, detail)
    if worst is None and (str(ran.y.dtype), str(ran.raw is not None and ran.raw.dtype)) != (
        f"torch.{case.dtype}", f"torch.{wide}",
    ):  # fmt: skip
        return Finding(
            "dtype", call, math.inf, 0.0, detail=f"y {ran.y.dtype}, state {ran.raw is not None and ran.raw.dtype}"
        )
    return worst


def _where(measured: tuple[Any, ...]) -> tuple[int | None, int | None, str]:
    """Head, token block and description of a finding."""
    got, want, kind, dtype = measured[:4]
    if got.shape != want.shape:
        return None, None, f"shape {list(got.shape)} for {list(want.shape)}"
    ratios = misfits(*measured)
    ratios = torch.where(ratios.isnan(), math.inf, ratios)
    head, block = divmod(int(ratios.argmax()), ratios.shape[1])
    bad = int((~got.isfinite()).sum())
    return head, block if kind is not None and kind.time else None, f"{bad} of {got.numel()} not finite" if bad else ""


def _repeated(first: Ran, again: Ran, call: int) -> Finding | None:
    """The finding where a repeated call differs from the first in any bit, or None."""
    for quantity, x in first.parts.items():
        other = again.parts[quantity]
        if not torch.equal(x, other):
            off = float((x.double() - other.double()).abs().max()) if x.shape == other.shape else math.inf
            off = math.inf if math.isnan(off) else off
            return Finding(f"repeat {quantity}", call, off, 0.0, detail="the same call again gives other bits")
    return None
