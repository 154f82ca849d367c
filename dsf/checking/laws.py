"""The laws every recurrence obeys in every form, each measured on one example.

A law is a function (subject, form, example) -> measures; `LAWS` is the table, its statements are the documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from dsf.call.cost import CONVOLUTION
from dsf.call.decode import in_order
from dsf.call.recurrence import Recurrence, State
from dsf.checking.compare import Measure, Measures, compare, compare_runs, difference, same
from dsf.checking.examples import Example, lengths
from dsf.checking.measure import (
    AGAINST,
    KERNELS,
    ORACLE,
    TOLERANCE,
    Outcome,
    Subject,
    cotangent,
    distance,
    gradients,
)
from dsf.checking.ranges import Given, ranges_of
from dsf.checking.states import changed, rows_of, stacked
from dsf.kernels.attention import KVCache
from dsf.torch.columns import columns


def forms(subject: Subject, form: str, example: Example) -> Measures:
    """Every form equals the naive one, forward and every gradient."""
    yield from compare(subject, subject.outcome(form, example), subject.outcome(ORACLE, example), example.dtype)


def finite(subject: Subject, form: str, example: Example) -> Measures:
    """Outputs, states and gradients are finite."""
    got, oracle = subject.outcome(form, example), subject.outcome(ORACLE, example)
    size = max((float(x.abs().max()) for x in (oracle.y, *oracle.state)), default=0.0)
    detail = f"the float64 oracle's largest number is {size:.3g}"
    if not math.isfinite(size) or size > 1e30:
        detail += ": the recurrence itself grows without bound on these inputs (restrict them with ranges=)"
    for quantity, tensors in (
        ("y", (got.y,)),
        ("state", got.state),
        *((f"grad {name}", (g,)) for name, g in got.grads.items()),
        ("grad of state", tuple(got.state_grads.values())),
    ):
        yield Measure(quantity, 0.0 if all(x.isfinite().all() for x in tensors) else math.inf, 0.0, detail)


def gradcheck(subject: Subject, form: str, example: Example) -> Measures:
    """Gradients equal finite differences of the same form (torch.autograd.gradcheck)."""
    inputs, state = subject.inputs(example), subject.state(example)
    p = subject.sizes(inputs).p
    layout = columns(subject.recurrence.spec.inner, p)
    names = list(inputs)
    fixed: Tensor | None = None
    if isinstance(state, Tensor):  # the running maximum is a choice of scale: no derivative in it
        remembered = state[..., layout.total :]
        fixed = state[..., layout.p + layout.den : layout.total]
        state = torch.cat([state[..., : layout.p + layout.den], remembered], dim=-1)
    leaves = [x.detach().clone().requires_grad_() for x in (*inputs.values(), *subject.state_leaves(state).values())]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        start: State | None = None
        if isinstance(state, KVCache):
            rest = iter(tensors[len(names) :])
            start = state.map(lambda _: next(rest))
        elif fixed is not None:
            free = tensors[-1].split([layout.p + layout.den, tensors[-1].shape[-1] - layout.p - layout.den], dim=-1)
            start = torch.cat([free[0], fixed, free[1]], dim=-1)
        y, final = subject.run(form, dict(zip(names, tensors, strict=False)), start)
        return (y, *(x for x in subject.truth(final, p) if x.requires_grad))

    # Entry by entry for the definition. The law of forms holds all other gradients to those of the definition, entry by
    # entry, so theirs are tried in random directions: one backward pass, not one for every number of the results.
    try:
        torch.autograd.gradcheck(function, leaves, fast_mode=form != "naive")
    except GradcheckError as error:
        yield Measure("gradients", math.inf, 0.0, " ".join(str(error).split())[:200])
    else:
        yield Measure("gradients", 0.0, 0.0)


def causality(subject: Subject, form: str, example: Example) -> Measures:
    """Other future tokens change no past output and no gradient of past outputs, bit for bit (but for the convolution
    form, up to rounding: an FFT mixes all tokens)."""
    if example.tokens < 2:
        return
    cut = example.cuts[0] if example.cuts else example.tokens // 2
    first, other = subject.inputs(example), subject.inputs(replace(example, seed=example.seed + 7))
    timed = {name for name, kind in subject.kinds.items() if kind.time}
    second = {
        name: torch.cat([x[:, :cut], other[name][:, cut:]], dim=1) if name in timed else x for name, x in first.items()
    }
    state = subject.state(example)
    dy = cotangent(example, subject.sizes(first)).to(subject.device)[:, :cut]
    runs, whole = [], []
    for inputs in (first, second):
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        start = changed(state, lambda x: x.detach().requires_grad_())
        y = subject.run(form, leaves, start)[0]
        whole.append(y.detach())
        y = y[:, :cut]
        runs.append((y.detach(), gradients((y * dy.to(y)).sum(), leaves | subject.state_leaves(start))))
    (y_first, grads_first), (y_second, grads_second) = runs
    where = f"tokens from {cut} on differ"
    rounded = form == CONVOLUTION
    tolerance = TOLERANCE[example.dtype] if rounded else 0.0

    def change(a: Tensor, b: Tensor, *computed: Tensor) -> float:
        size = max((float(x.abs().max()) for x in (a, b, *computed) if x.numel()), default=0.0)
        return difference(a, b) / (max(size, 1.0) if rounded else 1.0)

    yield Measure("y", change(y_first, y_second, *whole), tolerance, where)
    for name in grads_first:
        a, b = grads_first[name], grads_second[name]
        if name in timed:
            yield Measure(f"grad {name}", change(a[:, :cut], b[:, :cut], a, b), tolerance, where)
            late = "past outputs have a gradient in future tokens"
            nothing = torch.zeros_like(b[:, cut:])
            yield Measure(f"grad future {name}", change(b[:, cut:], nothing, b), tolerance, late)
        else:
            yield Measure(f"grad {name}", change(a, b), tolerance, where)


def split(subject: Subject, form: str, example: Example) -> Measures:
    """A sequence run in pieces, the state handed over, equals the sequence run whole."""
    if not example.cuts or (form == AGAINST and not subject.against_takes_state):
        return

    def pieces(form: str, inputs: Mapping[str, Tensor], state: State | None) -> tuple[Tensor, State | None]:
        outputs = []
        for begin, end in pairwise(example.bounds):
            y, state = subject.run(form, subject.part(inputs, begin, end), state)
            outputs.append(y)
        return torch.cat(outputs, dim=1), state

    yield from compare_runs(subject, form, example, pieces, None)


def packed(subject: Subject, form: str, example: Example) -> Measures:
    """Sequences packed by cu_seqlens equal the sequences run one by one."""
    bounds = example.packed_bounds
    if form == AGAINST or len(bounds) < 3:
        return

    def together(form: str, inputs: Mapping[str, Tensor], state: State | None) -> tuple[Tensor, State | None]:
        return subject.run(form, inputs, state, torch.tensor(bounds, device=subject.device))

    def separate(form: str, inputs: Mapping[str, Tensor], state: State | None) -> tuple[Tensor, State | None]:
        outputs, states = [], []
        for row, (begin, end) in enumerate(pairwise(bounds)):
            if begin == end:  # what it began with
                states.append(rows_of(state, [row]))
                continue
            y, final = subject.run(form, subject.part(inputs, begin, end), rows_of(state, [row]))
            outputs.append(y)
            states.append(final)
        return torch.cat(outputs, dim=1), stacked(states)

    way = f"sequences of {', '.join(map(str, lengths(bounds)))} tokens"
    yield from compare_runs(subject, form, replace(example, batch=1), together, separate, len(bounds) - 1, way)


def reverse(subject: Subject, form: str, example: Example) -> Measures:
    """A sequence run in reverse, packed or in pieces from its end, equals its tokens run in the other order."""
    if form == AGAINST:
        return
    packs = example.seed % 2 == 1 and len(example.packed_bounds) > 2
    bounds = example.packed_bounds if packs else example.bounds
    example = replace(example, batch=1) if packs else example
    pieces = list(pairwise(bounds))

    def backwards(form: str, inputs: Mapping[str, Tensor], state: State | None) -> tuple[Tensor, State | None]:
        if packs:
            return subject.run(form, inputs, state, torch.tensor(bounds, device=subject.device), reverse=True)
        outputs: list[Tensor] = []
        for begin, end in reversed(pieces):
            y, state = subject.run(form, subject.part(inputs, begin, end), state, reverse=True)
            outputs.insert(0, y)
        return torch.cat(outputs, dim=1), state

    def turned(form: str, inputs: Mapping[str, Tensor], state: State | None) -> tuple[Tensor, State | None]:
        outputs, states = [], []
        for row, (begin, end) in enumerate(pieces if packs else [(0, example.tokens)]):
            start = rows_of(state, [row]) if packs else state
            if begin < end:
                part, kinds = subject.part(inputs, begin, end), subject.kinds
                y, start = subject.run(form, {n: x.flip(1) if kinds[n].time else x for n, x in part.items()}, start)
                outputs.append(y.flip(1))
            states.append(start)
        return torch.cat(outputs, dim=1), stacked(states) if packs else states[0]

    way = f"sequences of {', '.join(map(str, lengths(bounds)))} tokens" if packs else f"cuts at {list(example.cuts)}"
    yield from compare_runs(subject, form, example, backwards, turned, len(bounds) - 1 if packs else 0, way)


def step(subject: Subject, form: str, example: Example) -> Measures:
    """Decoding token by token with step(), caches in place too, equals the sequence run whole."""
    timed = {name for name, kind in subject.kinds.items() if kind.time}

    caches = subject.recurrence.spec.is_attention and form != KERNELS

    def tokens(form: str, inputs: Mapping[str, Tensor], state: State | None) -> tuple[Tensor, State | None]:
        outputs: list[Tensor] = []
        options: dict[str, Any] = {"in_place": caches and not torch.is_grad_enabled()}
        for t in range(example.tokens):
            now: dict[str, Any] = {name: x[:, t] if name in timed else x for name, x in inputs.items()}
            y, state = subject.recurrence.step(state, backend=KERNELS if form == KERNELS else "auto", **options, **now)
            outputs.append(y)
        return torch.stack(outputs, dim=1), in_order(subject.recurrence.spec, state)

    if form != KERNELS:
        yield from compare_runs(subject, form, example, tokens, None)
    if caches or (form == KERNELS and subject.has_decode_kernel):  # what has no gradients
        inputs, start = subject.inputs(example), subject.state(example)
        p = subject.sizes(inputs).p
        with torch.no_grad():
            runs = [run(form, inputs, start) for run in (tokens, subject.run)]
        found, whole = (Outcome(y, subject.truth(final, p)) for y, final in runs)
        yield from compare(subject, found, whole, example.dtype)


def heads(subject: Subject, form: str, example: Example) -> Measures:
    """An input with fewer heads equals the input with each of its heads repeated."""
    example = replace(example, initial=example.initial and not subject.recurrence.spec.is_attention)
    total = subject.sizes(subject.inputs(example)).heads
    grouped = {name for name, kind in subject.kinds.items() if kind.time and example.groups.get(name, total) < total}
    if not grouped or form == AGAINST:
        return

    def few(form: str, inputs: Mapping[str, Tensor], state: State | None) -> tuple[Tensor, State | None]:
        y, final = subject.run(form, inputs, state)
        return y, None if isinstance(final, KVCache) else final  # which has the inputs' heads

    def repeated(form: str, inputs: Mapping[str, Tensor], state: State | None) -> tuple[Tensor, State | None]:
        kinds = subject.kinds
        full = {}
        for name, x in inputs.items():
            dim = 2 + (kinds[name].steps is not None)
            full[name] = x.repeat_interleave(total // x.shape[dim], dim=dim) if name in grouped else x
        return few(form, full, state)

    yield from compare_runs(subject, form, example, few, repeated)


def layout(subject: Subject, form: str, example: Example) -> Measures:
    """Non-contiguous inputs and gradients, and inputs without gradient, change nothing."""
    inputs, state = subject.inputs(example), subject.state(example)
    dy = cotangent(example, subject.sizes(inputs)).to(example.torch_dtype).to(subject.device)
    plain = subject.differentiate(form, inputs, state, dy, example.seed)
    strided = {name: _strided(x, place) for place, (name, x) in enumerate(inputs.items())}
    found = subject.differentiate(form, strided, state, _strided(dy, 1), example.seed)
    yield from compare(subject, found, plain, example.dtype)
    for name in {min(inputs), max(inputs)}:
        leaf = inputs[name].detach().requires_grad_()
        y, _ = subject.run(form, {**inputs, name: leaf}, state)
        alone = gradients((y * dy.to(y)).sum(), {name: leaf})[name]
        error = distance(alone, plain.grads[name], subject.kinds[name], example.dtype)
        yield Measure("grad alone", error, TOLERANCE[example.dtype], f"only `{name}` requires a gradient")


def _strided(x: Tensor, way: int) -> Tensor:
    """The same numbers in another memory layout."""
    if way % 2 and x.dim() > 1:
        return x.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
    return torch.stack([x, torch.full_like(x, 3.0)], dim=-1)[..., 0]


def contract(subject: Subject, form: str, example: Example) -> Measures:
    """y has the inputs' dtype, the state its own; both have the shapes the documentation says."""
    inputs, state = subject.inputs(example), subject.state(example)
    sizes = subject.sizes(inputs)
    y, final = subject.run(form, inputs, state)
    yield same("y", y, (sizes.batch, sizes.tokens, sizes.heads, sizes.p), example.torch_dtype)
    if isinstance(final, Tensor):
        wide = torch.float64 if example.dtype == "float64" else torch.float32
        shape = (sizes.batch, sizes.heads, *subject.recurrence.state_shape(sizes.keys, sizes.p))
        yield same("state", final, shape, wide)
    elif isinstance(final, KVCache):
        before = int(state.lengths[0]) if isinstance(state, KVCache) else 0
        window = subject.recurrence.spec.system.window
        kept = before + sizes.tokens if window is None else min(before + sizes.tokens, window)
        held = final.k.shape[2] == kept and int(final.lengths[0]) == before + sizes.tokens
        yield Measure("state", 0.0 if held else math.inf, 0.0, f"cache of {final.k.shape[2]} places")


def parallel(subject: Subject, form: str, example: Example) -> Measures:
    """A sequence cut over ranks equals the sequence run whole, and what earlier ranks hold matters to later ones."""
    from dsf.checking.shards import over_ranks

    yield from over_ranks(subject, form, example)


@dataclass(frozen=True)
class Law:
    """One row of the table. forms: "all" with the naive one, "fast" without it, or "step" (decoding)."""

    measure: Callable[[Subject, str, Example], Measures]
    forms: str = "fast"
    every_dtype: bool = False
    longest: int = 10_000

    @property
    def name(self) -> str:
        """Its name in reports."""
        return self.measure.__name__

    @property
    def statement(self) -> str:
        """What it says, in a sentence."""
        return " ".join((self.measure.__doc__ or "").split())


LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law(forms, every_dtype=True),
        Law(finite, forms="all", every_dtype=True),
        Law(gradcheck, forms="all", longest=3),
        Law(causality, forms="all"),
        Law(split, forms="all"),
        Law(packed, forms="all"),
        Law(reverse, longest=70),
        Law(step, forms="step", longest=12),
        Law(heads, longest=70),
        Law(layout, longest=70),
        Law(parallel, longest=70),
        Law(contract, forms="all", every_dtype=True, longest=40),
    )
}


def errors(
    recurrence: Recurrence,
    law: str,
    form: str,
    example: Example,
    ranges: Given | None = None,
    against: Callable[..., object] | None = None,
    device: torch.device | str = "cpu",
    backend: str = "auto",
) -> dict[str, float]:
    """The errors of one law on one example by quantity: what reproduces a failure that dsf.check reports."""
    subject = Subject(recurrence, ranges_of(recurrence.spec, ranges), against, device, backend)
    return {m.quantity: m.error for m in LAWS[law].measure(subject, form, subject.supports(form, example))}
