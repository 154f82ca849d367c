"""`dsf.validate`: checks that calls get inputs in their declared ranges, and finite inputs, states and outputs.

A call costs one reduction for each tensor and one wait for the device; a wrong entry is searched only after a failure.
"""

from __future__ import annotations

import bisect
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ContextDecorator
from contextvars import Token
from typing import Any

import torch
from torch import Tensor

from dsf.call import guard
from dsf.call.bind import Bound, environment
from dsf.call.calls import is_transformed
from dsf.call.frame import materialised
from dsf.checking.ranges import legal_ranges
from dsf.checking.values import INF, REAL, TINY, Range, as_range, key_axis
from dsf.kernels.attention import KVCache
from dsf.language.annotations import Kind
from dsf.language.errors import InputError
from dsf.language.expr import KEY, Expr, inputs_of, substitute
from dsf.language.spec import Spec
from dsf.torch.evaluate import Evaluator

GivenRanges = Mapping[str, "Range | tuple[float, float] | None"]
Bounds = list[int] | Tensor | None
Known = tuple[dict[str, Range], frozenset[str]]
PLACES = {"B": "batch row", "T": "token", "n": "micro-step", "H": "head", "N": "entry", "N/2": "pair", "P": "channel"}
ROUNDINGS = 8  # units in the last place by which a number may exceed its range


class validate(ContextDecorator):
    """Check every call and step of this thread: `with dsf.validate():`, or as a decorator of a function.

    * Inputs are finite and in their ranges, which `dsf zoo NAME` prints: factors of decays in [0, 1], keys of delta
      rules of unit length (shorter ones, such as padded tokens', are let through), arguments of logarithms and
      denominators above 0. Where the declaration bounds a sum or product of several inputs, its value is checked.
      Inputs may exceed a range by 8 units in the last place of their dtype, in float64 by 8 of float32.
    * Initial states are finite, and so are outputs and final states.

    ranges: in place of inferred ranges, by input ("alpha") or by recurrence and input ("gated_deltanet.alpha"): (low,
      high), a dsf.testing.Range, or None for any finite number. A warning at the end lists names that no call had.
    enabled: False: check nothing inside this `with`, whatever DSF_VALIDATE=1 or a `with` around it says.

    DSF_VALIDATE=1 in the environment, read when dsf is imported, checks the whole process. A call costs a pass over
    every tensor and a wait for the GPU; without validation, a test of one variable. Not checked, with one warning:
    compiled graphs (torch.compile), CUDA graphs under capture, torch.func's transformations, the meta device and
    subclasses of Tensor. Gradients are not checked: use torch.autograd.detect_anomaly.

    Calls raise InputError, which names the recurrence, the input, the batch row (or packed sequence), token and head,
    the value and the range. An empty range, and a "recurrence.input" that the recurrence lacks, raise it, too.
    """

    def __init__(self, *, ranges: GivenRanges | None = None, enabled: bool = True) -> None:
        self.guard: Guard | guard.Off = Guard(ranges) if enabled else guard.Off()
        self.tokens: list[Token[Any]] = []

    def _recreate_cm(self) -> validate:
        return self  # a decorator enters it again for every call of its function

    def __enter__(self) -> validate:
        if not torch.compiler.is_dynamo_compiling():  # nothing is checked inside a compiled function
            self.tokens.append(guard.enter(self.guard))
        return self

    def __exit__(self, *_: object) -> None:
        if not torch.compiler.is_dynamo_compiling():
            guard.leave(self.tokens.pop())
            self.guard.end()


class Guard:
    """The checks of calls. given: the user's ranges, as in `validate`."""

    def __init__(self, given: GivenRanges | None = None) -> None:
        self.given = {
            name: as_range("dsf.validate", name, REAL if x is None else x) for name, x in (given or {}).items()
        }
        self.known: weakref.WeakKeyDictionary[Spec, Known] = weakref.WeakKeyDictionary()
        self.passed: set[str] = set()  # reasons already warned of
        self.unused = set(self.given)  # names that no call had

    def end(self) -> None:
        """Warn, once, of the user's ranges whose names no call had."""
        if self.unused and len(self.known):
            names = ", ".join(f"`{name}`" for name in sorted(self.unused))
            warnings.warn(f"dsf.validate: no call had an input {names}, for which ranges holds one", stacklevel=3)
            self.unused = set()

    def inputs(self, spec: Spec, bound: Bound, bounds: Bounds, state: Any) -> None:
        """Raise InputError for inputs out of range, and for inputs or an initial state that are not finite."""
        if not self._looks(spec, (*bound.tensors.values(), *_parts(state))):
            return
        with torch.no_grad():
            ranges, loose = self._ranges(spec)
            kinds = {i.name: i.kind for i in spec.inputs}
            fine = [_fine(x, ranges[name], kinds[name]) for name, x in bound.tensors.items()]
            finite = [x.all() for x in _state_fine(state)]
            answers = torch.stack([x.all() for x in fine] + finite).tolist()
            for (name, x), ok, mask in zip(bound.tensors.items(), answers, fine, strict=False):
                if ok:
                    continue
                where = Where(bound, bounds)
                if not x.isfinite().all():
                    _not_finite(spec, f"`{name}`", x, kinds[name].layout(), where)
                if name not in loose:
                    _out_of_range(spec, name, x, mask, ranges[name], kinds[name], where)
                _demands(spec, bound, bounds, state)
            if not all(answers[len(fine) :]):
                _bad_state(spec, "initial_state", state)

    def outputs(self, spec: Spec, bound: Bound, bounds: Bounds, y: Tensor, final: Any) -> None:
        """Raise InputError for outputs or a final state that are not finite though the inputs passed."""
        if not self._looks(spec, (y, *_parts(final))):
            return
        with torch.no_grad():
            checks = [y.isfinite(), *_state_fine(final)]
            answers = torch.stack([x.all() for x in checks]).tolist()
            if not answers[0]:
                why = "inputs are finite and in their ranges, so the recurrence grows without bound or divides by 0"
                if y.dtype == torch.float16:
                    why += "; or y passed 65,504, the largest float16"
                _not_finite(spec, "y", y, ("B", "T", "H", "P"), Where(bound, bounds), why)
            if not all(answers):
                _bad_state(spec, "the final state", final)

    def _looks(self, spec: Spec, tensors: Sequence[Tensor]) -> bool:
        """Whether the numbers can be read; if not, warn once for each reason."""
        reason = _hidden(tensors)
        if reason and reason not in self.passed:
            self.passed.add(reason)
            warnings.warn(f"dsf.validate: calls {reason} are not looked into ({spec.name})", UserWarning, stacklevel=2)
        return not reason

    def _ranges(self, spec: Spec) -> Known:
        found = self.known.get(spec)
        if found is None:
            names = {i.name for i in spec.inputs}
            mine = {name: x for name, x in self.given.items() if name in names}
            self.unused -= set(mine)
            for full, allowed in self.given.items():
                owner, dot, name = full.rpartition(".")
                if dot and owner == spec.name:
                    mine[name] = allowed
                    self.unused.discard(full)
            with torch.device("cpu"):
                found = self.known[spec] = legal_ranges(spec, mine)
        return found


class Where:
    """The place of an index of an input, in words."""

    def __init__(self, bound: Bound, bounds: Bounds) -> None:
        self.one_token = bound.sizes.tokens == 1
        self.bounds = bounds.tolist() if isinstance(bounds, Tensor) else bounds

    def __call__(self, layout: Sequence[str], index: Sequence[int]) -> str:
        """Such as "batch row 0, token 17, head 2", for packed sequences with the sequence in place of the row."""
        at = dict(zip(layout, index, strict=True))
        if "T" in at and self.bounds is not None:
            sequence = bisect.bisect_right(self.bounds, at["T"]) - 1
            words = [f"token {at['T']} (sequence {sequence}, its token {at['T'] - self.bounds[sequence]})"]
            at = {axis: i for axis, i in at.items() if axis not in "BT"}
        else:
            words = []
        at = {axis: i for axis, i in at.items() if axis != "T" or not self.one_token}
        return ", ".join([*words, *(f"{PLACES[axis]} {i}" for axis, i in at.items())])


def _slack(dtype: torch.dtype) -> float:
    """The relative tolerance; for float64, often converted from float32, that of float32."""
    return ROUNDINGS * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def _hidden(tensors: Sequence[Tensor]) -> str:
    """The reason why the numbers of a call cannot be read, or ""."""
    if torch.compiler.is_compiling():
        return "in a compiled graph"
    if is_transformed(tensors):
        return "within torch.func or with forward-mode derivatives"
    for x in tensors:
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return "in a compiled graph" if "Fake" in type(x).__name__ else f"on tensors of type {type(x).__name__}"
        if x.device.type == "meta":
            return "on the meta device"
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return "under capture by a CUDA graph"
    return ""


def _fine(x: Tensor, allowed: Range, kind: Kind) -> Tensor:
    """Where x is finite and in its range: bool; for unit vectors with their axis of size 1."""
    if allowed.is_real:
        return x.isfinite()
    slack = _slack(x.dtype)
    if allowed.unit:
        return _lengths(x, kind) <= 1 + slack
    low = allowed.low - slack * abs(allowed.low) if TINY < abs(allowed.low) < INF else allowed.low
    high = allowed.high + slack * abs(allowed.high) if abs(allowed.high) < INF else allowed.high
    fine = ((x > 0) if low == TINY else (x >= low)) & (x <= high)
    return fine if abs(low) < INF and abs(high) < INF else fine & x.isfinite()


def _lengths(x: Tensor, kind: Kind) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(x, dim=key_axis(kind), keepdim=True, dtype=wide)


def _parts(state: Any) -> tuple[Tensor, ...]:
    if isinstance(state, KVCache):
        return tuple(x for x in (state.k, state.v, state.bias) if x is not None)
    return (state,) if isinstance(state, Tensor) else ()


def _state_fine(state: Any) -> list[Tensor]:
    """Where a state is finite; for a cache unused entries count as finite."""
    if isinstance(state, KVCache):
        free = ~state.in_use()[:, None]
        return [x.isfinite() | (free if x.dim() == 3 else free[..., None]) for x in _parts(state)]
    return [state.isfinite()] if isinstance(state, Tensor) else []


def _first(wrong: Tensor, layout: Sequence[str]) -> tuple[int, ...]:
    """The index, in the layout's order, of a wrong entry at the earliest token."""
    found = wrong.nonzero()
    if "T" in layout:
        found = found[found[:, layout.index("T")].argmin()].unsqueeze(0)
    return tuple(int(i) for i in found[0])


def _others(wrong: Tensor) -> str:
    count = int(wrong.sum()) - 1
    return f" (and {count:,} more)" if count else ""


def _raise(spec: Spec, text: str, *more: str) -> None:
    raise InputError("; ".join([f"{spec.name}: {text}", *(m for m in more if m)]) + " [dsf.validate]")


def _not_finite(spec: Spec, what: str, x: Tensor, layout: Sequence[str], where: Where, why: str = "") -> None:
    wrong = ~x.isfinite()
    at = _first(wrong, layout)
    _raise(spec, f"{what} is {float(x[at]):g} at {where(layout, at)}{_others(wrong)}; expected finite numbers", why)


def _out_of_range(
    spec: Spec, name: str, x: Tensor, fine: Tensor, allowed: Range, kind: Kind, where: Where
) -> None:  # fmt: skip
    wrong, layout = ~fine, kind.layout()
    at = _first(wrong, layout)
    if allowed.unit:
        whole = layout[key_axis(kind)]
        size, place = float(_lengths(x, kind)[at]), [p for p in zip(layout, at, strict=True) if p[0] != whole]
        there = where(*zip(*place, strict=True))
        text = f"`{name}` has length {size:.6g} at {there}{_others(wrong)}; expected unit length"
    else:
        text = f"`{name}` is {float(x[at]):.6g} at {where(layout, at)}{_others(wrong)}; expected {name} {allowed}"
    _raise(spec, text, _hint(name, allowed, kind))


def _hint(name: str, allowed: Range, kind: Kind) -> str:
    """A suggestion for the error message."""
    if allowed.unit:
        own = f"l2norm({name})" if KEY in kind.axes else f"{name} * rsqrt(sum_value({name} * {name}) + 1e-6)"
        return f"normalise it, {own} in the declaration or torch.nn.functional.normalize({name}, dim=-1)"
    if allowed.low == 0 and allowed.high < INF:
        factor = "" if allowed.high == 1 else f"{allowed.high:g} * "
        return f"if it is a logit, give {factor}sigmoid({name})"
    if allowed.low == -INF and allowed.high in (0, -TINY):
        return f"if it is a logit, give logsigmoid({name}) or -softplus({name})"
    return f"if any number may stand there, give softplus({name})" if allowed.low >= 0 and allowed.high == INF else ""


def _demands(declared: Spec, bound: Bound, bounds: Bounds, state: Any) -> None:
    """Raise InputError where several inputs together violate the declaration's demand on an expression."""
    where, spec, words = Where(bound, bounds), declared, dict[Expr, Expr]()
    if declared.turning is not None:  # whose previous values are inputs
        spec, bound = declared.turning.spec, materialised(declared, declared.turning, bound, state, bounds)
        words = declared.turning.words
    values = Evaluator(environment(spec, bound), bound.sizes.keys, bound.sizes.p)
    slack = _slack(bound.dtype)
    for row in spec.rows:
        decay = row.normal.decay
        _demand(spec, substitute(decay, words), values(decay), 1.0, slack, where, "the decay")
        most = 2.0 / max(1, len(row.normal.corrections))
        for c in row.normal.corrections:
            along = -2 if c.axis == KEY else -1
            lengths = values(c.left).norm(dim=along, keepdim=True) * values(c.right).norm(dim=along, keepdim=True)
            scale = substitute(c.scale, words)
            _demand(spec, scale, values(c.scale) * lengths, most, slack, where, "the size of the correction by")


def _demand(
    spec: Spec, x: Expr, found: Tensor, most: float, slack: float, where: Where, what: str
) -> None:  # fmt: skip
    """found: [B|1, T|1, H|1, n, p], no larger than `most`."""
    wrong = ~(found.abs() <= most * (1 + slack))
    if not wrong.any():
        return
    at, layout = _first(wrong, "BTHNP"), "BTHNP"
    there = [(axis, i) for axis, i, size in zip(layout, at, found.shape, strict=True) if size > 1 or axis in "BH"]
    names = ", ".join(f"`{n}`" for n in dict.fromkeys(i.attrs[0] for i in inputs_of(x)))
    place = where(*zip(*there, strict=True))
    _raise(
        spec, f"{names}: {what} {x} is {float(found[at]):.6g} at {place}{_others(wrong)}; expected ≤ {most:g} in size"
    )


def _bad_state(spec: Spec, what: str, state: Any) -> None:
    names = ("k of ", "v of ", "bias of ") if isinstance(state, KVCache) else ("",)
    axes = ("head", "place", "entry") if isinstance(state, KVCache) else ("head", "entry", "column")
    for name, x, fine in zip(names, _parts(state), _state_fine(state), strict=False):
        if fine.all():
            continue
        at = tuple(int(i) for i in (~fine).nonzero()[0])
        place = ", ".join(f"{axis} {i}" for axis, i in zip(("row", *axes), at, strict=False))
        _raise(spec, f"{name}{what} is {float(x[at]):g} at {place}{_others(~fine)}; expected finite numbers")
