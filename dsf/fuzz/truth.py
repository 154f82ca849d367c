"""The expected result of every call of a case: the float64 oracle on the same rounded numbers, all calls at once."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dsf.call.recurrence import Recurrence, State
from dsf.checking.examples import generator_of
from dsf.checking.measure import HALF, LARGEST, ORACLE, Subject, typical_entry, without_gain
from dsf.checking.states import changed, rows_of, stacked
from dsf.fuzz.caches import as_numbers
from dsf.fuzz.case import Case
from dsf.kernels.attention import KVCache
from dsf.kernels.oracle import oracle_dtype

DENSE = 4_000_000  # the most numbers of dense A's for the naive form as oracle; above, the recurrent one in float64
TOO_LARGE = 1e3  # in float16: above it intermediate gradients may exceed its range


@dataclass(frozen=True)
class Expected:
    """Of one call: y, the true final state, the initial one's largest typical entry, gradients and Params' terms."""

    y: Tensor
    state: Tensor
    start: float
    grads: Mapping[str, Tensor] = field(default_factory=dict)
    terms: Mapping[str, Tensor] = field(default_factory=dict)

    def is_usable(self, dtype: str) -> bool:
        """True where all numbers fit a dtype."""
        most = TOO_LARGE if dtype == "float16" else LARGEST[dtype] ** 0.5
        return all(bool((x.abs() < most).all()) for x in (self.y, self.state, *self.grads.values()) if x.numel())


@functools.lru_cache(maxsize=32)
def timed(recurrence: Recurrence) -> Recurrence:
    """The recurrence with per-token inputs in place of Params, which gives their gradients for each token."""
    inputs = tuple(replace(i, kind=replace(i.kind, time=True)) for i in recurrence.spec.inputs)
    return Recurrence(replace(recurrence.spec, inputs=inputs))


def form_of(recurrence: Recurrence, case: Case) -> str:
    """The oracle's form for a case: naive, or recurrent, which other tests compare with naive."""
    dense = case.calls * case.batch * case.tokens * case.heads * case.p * case.n**2 * len(recurrence.spec.rows)
    return ORACLE if dense <= DENSE else "recurrent"


def truths(
    recurrence: Recurrence, case: Case, values: Sequence[Mapping[str, Tensor]], starts: Sequence[State | None],
    cotangents: Sequence[tuple[Tensor, Tensor]], wide: torch.dtype = torch.float64,
) -> list[Expected]:  # fmt: skip
    """The expected result of every call. values, starts, cotangents: those of the calls. wide: the computing dtype."""
    calls, batch = len(values), case.batch
    params = {i.name for i in recurrence.spec.inputs if not i.kind.time}
    leaves: dict[str, Tensor] = {}
    for name in values[0]:
        stack = [v[name].to(wide) for v in values]
        if name in params:
            leaves[name] = torch.stack(stack)[:, None].repeat(1, case.tokens, *[1] * stack[0].dim())
        else:
            leaves[name] = torch.cat(stack)
        leaves[name].requires_grad_(bool(case.loss))
    start = stacked([changed(s, lambda x: x.to(wide)) for s in starts if s is not None]) if case.initial else None
    if start is not None:
        start = changed(start, lambda x: x.detach().requires_grad_(bool(case.loss)))
    given = {n: x.repeat_interleave(batch, dim=0) if n in params else x for n, x in leaves.items()}
    with torch.set_grad_enabled(bool(case.loss)):
        token = oracle_dtype.set(wide)
        try:
            y, state = _run(recurrence, case, given, start)
        finally:
            oracle_dtype.reset(token)
    wrt = leaves | Subject.state_leaves(start)
    grads = _grads(case, y, state, wrt, cotangents) if case.loss else {}
    grads = without_gain(recurrence, grads, case.p)
    held_first = [] if start is None else _sizes(recurrence, case, start)
    found = []
    for call in range(calls):
        mine, held = slice(call * batch, (call + 1) * batch), slice(call * case.rows, (call + 1) * case.rows)
        own: dict[str, Tensor] = {}
        terms: dict[str, Tensor] = {}
        for name, g in grads.items():
            if name in params:
                own[name] = g[call].double().sum(0)
                terms |= {name: g[call].square().sum(0).sqrt()} if case.dtype in HALF else {}
            else:
                own[name] = g[held if name.startswith("initial_state") else mine]
        size = max((typical_entry(x[held], None) for x in held_first), default=0.0)
        found.append(_merged(case, call + 1, Expected(y[mine].detach(), state[held].detach(), size, own, terms)))
    return found


def _run(recurrence: Recurrence, case: Case, given: Mapping[str, Tensor], start: State | None) -> tuple[Tensor, Tensor]:
    """y and the true final states; packed sequences one by one, each of all calls at once, states call by call."""
    wide, form = timed(recurrence), form_of(recurrence, case)

    def ran(inputs: Mapping[str, Any], state: State | None) -> tuple[Tensor, State]:
        if case.reverse:  # Params are per token here, too
            inputs = {name: x.flip(1) for name, x in inputs.items()}
        y, final = wide(**inputs, initial_state=state, form=form, backend="torch", return_state=True)
        return y.flip(1) if case.reverse else y, final

    def numbers(state: State) -> Tensor:
        return as_numbers(recurrence, case, state, case.calls)

    if not case.lengths:
        y, final = ran(given, start)
        return y, numbers(final)
    sequences = len(case.lengths)
    outputs: list[Tensor] = []
    finals: dict[int, State] = {}
    for row, (begin, end) in enumerate(pairwise(case.bounds)):
        own = rows_of(start, range(row, case.calls * sequences, sequences))
        if end > begin:
            y, finals[row] = ran({n: x[:, begin:end] for n, x in given.items()}, own)
            outputs.append(y)
        elif own is not None:
            finals[row] = own
    whole = stacked([finals.get(row) for row in range(sequences)])
    by_call = [row * case.calls + call for call in range(case.calls) for row in range(sequences)]
    return torch.cat(outputs, dim=1), numbers(rows_of(whole, by_call))


def _sizes(recurrence: Recurrence, case: Case, start: State) -> list[Tensor]:
    """The tensors of a state that determine its scale."""
    start = changed(start, Tensor.detach)
    return [start.k, start.v] if isinstance(start, KVCache) else [recurrence.true_state(start, case.p)]


def _grads(
    case: Case, y: Tensor, state: Tensor, wrt: Mapping[str, Tensor], cotangents: Sequence[tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    pairs = []
    if case.loss in ("both", "y"):
        pairs.append((y, torch.cat([dy.to(y) for dy, _ in cotangents])))
    if case.loss in ("both", "state"):
        pairs.append((state, torch.cat([ds.to(state) for _, ds in cotangents])))
    return differentiated(pairs, wrt)


def differentiated(pairs: Sequence[tuple[Tensor, Tensor]], wrt: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of leaves, by name, from pairs of an output and its gradient; zeros where none depends on them."""
    pairs = [(x, d) for x, d in pairs if x.requires_grad]
    if not pairs:
        return {name: torch.zeros_like(x) for name, x in wrt.items()}
    outputs, ds = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, list(wrt.values()), ds, allow_unused=True)
    return {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(wrt.items(), found, strict=True)}


def _merged(case: Case, call: int, found: Expected) -> Expected:
    """Gradients by leaf: without those of frozen inputs, and one sum for inputs that are one tensor."""
    grads = dict(found.grads)
    if case.is_one(call) and not case.overlap and grads:
        first, *rest = case.alias
        for name in rest:
            grads[first] = grads[first] + grads.pop(name)
    for name in case.frozen:
        grads.pop(name, None)
    return replace(found, grads=grads)


def moved(
    values: Sequence[Mapping[str, Tensor]], starts: Sequence[State | None], dtype: str, seed: int
) -> tuple[list[dict[str, Tensor]], list[State | None]]:
    """The numbers changed by about one rounding of the dtype, to measure how sensitive the oracle is.

    Initial states, too, as inputs of that dtype produced them.
    """
    generator = generator_of(seed)
    unit = torch.finfo(getattr(torch, dtype)).eps / 2

    def shaken(x: Tensor) -> Tensor:
        return x.double() * (1 + unit * torch.randn(x.shape, generator=generator, dtype=torch.float64))

    own = [{name: shaken(x) for name, x in v.items()} for v in values]
    return own, [changed(s, shaken) for s in starts]
