"""Tracing: run the user's function once on symbols. Errors name the recurrence and the user's line."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

from dsf.annotations import Kind, kinds_of
from dsf.errors import TraceError
from dsf.expr import KEY, Expr, inputs_of
from dsf.spec import Input, Spec
from dsf.system import System

Function = Callable[..., Any]


def trace(function: Function) -> Spec:
    """The Spec of a function that returns a System. Raises TraceError."""
    kinds = kinds_of(function)
    symbols = {name: _symbol(name, kind) for name, kind in kinds.items()}
    try:
        system = function(**symbols)
    except Exception as error:
        raise TraceError(f"{function.__name__}: {error}{_user_line(function, error)}") from error
    if not isinstance(system, System):
        raise TraceError(f"{function.__name__}: a recurrence returns a System, got {type(system).__name__}")
    inputs = tuple(Input(name, kind) for name, kind in kinds.items())
    spec = Spec(function.__name__, inspect.getdoc(function) or "", inputs, system)
    _check(spec)
    return spec


def _symbol(name: str, kind: Kind) -> Expr | tuple[Expr, ...]:
    if kind.steps is None:
        return Expr("input", (), (name, None), kind.axes)
    return tuple(Expr("input", (), (name, step), kind.axes) for step in range(kind.steps))


def _user_line(function: Function, error: BaseException) -> str:
    """Where in the user's function the error arose."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == function.__code__.co_filename]
    if not frames:
        return ""
    return f"\n  {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"


def _check(spec: Spec) -> None:
    """What only the whole System can tell. Raises TraceError."""
    if spec.system.C is None:
        raise TraceError(f"{spec.name}: System needs a readout C")
    for entry in spec.inputs:
        if not any(n.attrs[0] == entry.name for n in _all_inputs(spec)):
            raise TraceError(f"{spec.name}: input `{entry.name}` is never used")
    if not any(i.kind.time for i in spec.inputs):
        raise TraceError(
            f"{spec.name}: every input is a Param; a recurrence needs at least one input with a token axis"
        )
    if spec.has_key and KEY not in spec.readout.axes:
        raise TraceError(
            f"{spec.name}: the state has a Key axis but C = {spec.readout} has none, so y would keep it; "
            "contract it with a Key readout"
        )
    _check_features(spec)
    if spec.rule is not None:
        _check_rule(spec)


def _all_inputs(spec: Spec) -> list[Expr]:
    roots = [spec.readout, spec.system.D]
    for step in spec.system.micro_steps:
        roots += [step.B, *_operator_exprs(step.A)]
    if spec.system.gauge is not None:
        roots.append(spec.system.gauge)
    return inputs_of(*roots)


def _operator_exprs(a: Any) -> list[Expr]:
    return [*a.exprs, *(e for p in a.parts for e in _operator_exprs(p))]


def _check_features(spec: Spec) -> None:
    kinds = {spec.readout.features}
    for row in spec.rows:
        kinds |= {t.key.features for t in row.terms if KEY in t.key.axes}
        kinds |= {row.normal.decay.features} if KEY in row.normal.decay.axes else set()
        kinds |= {c.left.features for c in row.normal.corrections}
    if len(kinds) > 1:
        names = " and ".join(sorted(k or "N entries" for k in kinds))
        raise TraceError(f"{spec.name}: the state's Key axis holds {names} at once; use the same features everywhere")
    if "exp" not in kinds:
        return
    plain = spec.decay_kind == "identity" and spec.rank == 0 and spec.micro == 1 and spec.system.read == "after"
    terms = spec.rows[0].terms
    bare = spec.readout.op == "exp_features" and len(terms) == 1 and terms[0].key.op == "exp_features"
    quotient = spec.rule is not None and spec.rule.op == "div" and spec.rule.args[0].attrs[:1] == ("num",)
    if not (plain and bare and quotient and spec.system.D.is_constant and spec.system.D.value == 0):
        raise TraceError(
            f"{spec.name}: exponential features have the kernel trick only as softmax attention, "
            "System(A=I, B=exp_features(k) * v, C=exp_features(q), normalize=ratio); cut them with taylor_features "
            "for anything else"
        )


def _check_rule(spec: Spec) -> None:
    rule = spec.rule
    assert rule is not None
    if KEY in rule.axes:
        raise TraceError(f"{spec.name}: normalize = {rule} has a Key axis, but y has none")
    if spec.drive is not None and not any(spec.drive in inputs_of(s.B) for s in spec.system.micro_steps):
        raise TraceError(f"{spec.name}: drive = {spec.drive} does not occur in B")
