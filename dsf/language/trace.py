"""Tracing: run the user's function once on symbols. Errors name the recurrence and the user's line."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

import torch

from dsf.language.annotations import Input, Kind, kinds_of
from dsf.language.attention import check_attention
from dsf.language.errors import TraceError
from dsf.language.expr import KEY, VALUE, Expr, children_first, const, inputs_of, symbol_of
from dsf.language.instead import told
from dsf.language.places import PAIRS, Places, noting, takers
from dsf.language.reads import apart
from dsf.language.solve import check_solve
from dsf.language.spec import Spec
from dsf.language.system import DEN, NUM, ONE, System
from dsf.torch.evaluate import Evaluator

Function = Callable[..., Any]
SIGNATURE = "signature"  # what an error is about that is no matter of the System


def trace(function: Function) -> Spec:
    """The Spec of a function that returns a System. Raises TraceError."""
    kinds = kinds_of(function)
    symbols = {name: _symbol(name, kind) for name, kind in kinds.items()}
    system: Any = None
    with noting(function.__code__) as places:
        try:
            system = function(**symbols)
            if not isinstance(system, System):
                raise TraceError(_no_system(system), about=SIGNATURE)
            spec = Spec(
                function.__name__,
                inspect.getdoc(function) or "",
                tuple(Input(name, kind) for name, kind in kinds.items()),
                system,
            )
            _check(spec)
        except Exception as error:
            where = line_of(places, error, system)
            raise TraceError(f"{function.__name__}: {told(error)}\n  {where}") from error
    pairs = places.of(PAIRS)
    if pairs is not None:
        takers[spec] = pairs
    return spec


def _no_system(given: Any) -> str:
    """What is said to a function that returns something else."""
    if given is None:
        return "a recurrence returns a System, this one returns nothing: write return System(...)"
    if given is System:
        return "a recurrence returns a System with its A, B and C, got the class: System(A=..., B=..., C=...)"
    more = ": several steps of a token are dsf.compose(first, second)" if isinstance(given, tuple | list) else ""
    return f"a recurrence returns a System, got {type(given).__name__}{more}"


def _symbol(name: str, kind: Kind) -> Expr | tuple[Expr, ...]:
    if kind.steps is None:
        return symbol_of(name, None, kind.axes, kind.pair)
    return tuple(symbol_of(name, step, kind.axes, kind.pair) for step in range(kind.steps))


def line_of(places: Places, error: Exception, system: Any = None) -> str:
    """Where in the user's function the error arose; what it is about where only the whole System could tell."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == places.file]
    if frames:
        return places.text(frames[-1].lineno or places.first)
    about = getattr(error, "about", None)
    found = places.of(about) or (None if about is SIGNATURE else places.of(system))
    return found or places.signature


def _check(spec: Spec) -> None:
    """Check the whole System. Raises TraceError."""
    if spec.system.C is None:
        raise TraceError("System needs a readout C: a Key that reads the state, or 1 where it has no Key axis")
    nodes = inputs_of(*_roots(spec))
    _check_own(spec, nodes)
    used = {n.attrs[0] for n in nodes}
    for entry in spec.inputs:
        if entry.name not in used:
            raise TraceError(f"input `{entry.name}` is never used; leave it out, or use it", about=SIGNATURE)
    if not any(i.kind.time for i in spec.inputs):
        raise TraceError(
            "every input is a Param; a recurrence needs at least one input of tokens (Key, Pair, Value, Scalar)",
            about=SIGNATURE,
        )
    _check_frame(spec)
    check_solve(spec)
    if spec.acts_on_values:
        _check_values(spec)
    if spec.has_key and KEY not in spec.readout.axes:
        raise TraceError(
            f"the state has a Key axis but C = {spec.readout} has none, so y would keep it; contract it with a Key "
            f"readout{_annotated(spec, spec.readout)}"
        )
    if KEY in spec.readout.axes and not spec.state_has_key:
        raise TraceError(
            f"C = {spec.readout} reads the Key axis, but the state has none: A and B do not vary over it; write along "
            f"one, as in B = k * v of a Key k and a Value v{_annotated(spec, *(s.B for s in spec.system.micro_steps))}"
        )
    _check_features(spec)
    check_attention(spec, _roots(spec))
    if spec.rule is not None:
        _check_rule(spec, spec.rule)


def _check_own(spec: Spec, nodes: list[Expr]) -> None:
    """Raise TraceError for inputs of another declaration, as a function that keeps expressions may give them."""
    own = set[Expr]()
    for entry in spec.inputs:
        made = _symbol(entry.name, entry.kind)
        own |= {*inputs_of(*(made if isinstance(made, tuple) else (made,)))}
    for node in nodes:
        if node not in own:
            raise TraceError(
                f"`{node}` is an input of another declaration, not of this one; make expressions of the function's own "
                "parameters in every call"
            )


def _annotated(spec: Spec, *exprs: Expr) -> str:
    """How their inputs are annotated, in brackets."""
    kinds = {i.name: i.kind for i in spec.inputs}
    names = sorted({i.attrs[0] for i in inputs_of(*exprs)})
    return f" (here {', '.join(f'{name}: {kinds[name]}' for name in names)})" if names else ""


def _check_frame(spec: Spec) -> None:
    """Check turns and previous values. Raises TraceError."""
    timed = {i.name for i in spec.inputs if i.kind.time}
    for node in children_first(*_roots(spec)):
        if node.op == "prev" and not any(i.attrs[0] in timed for i in inputs_of(node)):
            raise TraceError(
                f"{node}: Params are the same for every token; prev takes what changes from token to token",
                about=node,
            )
    for node in children_first(*_roots(spec)) if spec.rule is not None else ():
        if node.op == "prev" and any(drive in inputs_of(node) for drive in spec.drives):
            raise TraceError(
                f"{node}: normalize divides by the same system driven by ones, and {spec.drives[0]}, which drives it, "
                "would have been one before the sequence began, too; leave it out of prev",
                about=node,
            )
    if spec.rule is not None and any(node.op == "prev" for node in children_first(spec.rule)):
        raise TraceError(f"normalize = {spec.rule} has a previous value; prev stands in A, B, C and D")
    if not spec.turns:
        return
    angle = next((r.normal.angle for r in spec.rows if r.normal.angle is not const(0)), None)
    if angle is None:
        raise TraceError(f"A = {spec.system.A}: its turns add up to 0, which is no turn; leave them out")
    if not spec.state_has_key:
        raise TraceError(
            f"turn({angle}) turns pairs of places of the Key axis, but the state has none: A is no operator on Key; "
            "write along one, as in B = k * v of a Key k and a Value v",
            about=angle,
        )
    if spec.readout.features not in (None, "exp"):
        raise TraceError(f"turn({angle}) turns pairs of key entries; Taylor features have no such pairs", about=angle)
    if spec.inner.mixes_pairs and spec.is_stabilised:
        raise TraceError(
            f"turn({angle}): the decay differs within a pair, and exp(…) in B keeps a running maximum, which needs one "
            "decay for both places; make the decay of Scalars or Pairs"
        )


def _check_values(spec: Spec) -> None:
    """Check a System with an operator on the Value axis. Raises TraceError."""
    corrections = [c for r in spec.rows for c in r.normal.corrections]
    own = next(c for c in corrections if c.axis == VALUE)
    here = f"outer({own.left}, {own.right}) acts on the Value axis"
    for c in corrections:
        if c.axis == KEY:
            raise TraceError(f"{here} and outer({c.left}, {c.right}) on the Key axis; A acts on one of the two")
    for x in [r.normal.decay for r in spec.rows] + [x for c in corrections for x in (c.scale, c.left, c.right)]:
        if KEY in x.axes:
            raise TraceError(f"{here}, alike for every place of the Key axis, but `{x}` in A differs by place")
    if spec.turns:
        raise TraceError(f"{here} and a turn on the Key axis; A acts on one of the two")
    if spec.rule is not None:
        raise TraceError(f"{here} and mixes channels, which normalize divides one by one; leave normalize out")
    if spec.system.window is not None:
        raise TraceError(f"{here}; a window keeps keys and values as they came, so A may only decay in it")
    if spec.features is not None:
        raise TraceError(f"{here}; exponential and Taylor features are for states whose A acts on the Key axis")
    gate, read = spec.gated_read
    if spec.has_key and VALUE in read.axes and not apart(spec):
        raise TraceError(
            f"{here}, so C is made of Key expressions times Value ones; C = {spec.readout} is no sum of such products"
        )


def _roots(spec: Spec) -> list[Expr]:
    """Every expression of the System as written."""
    roots = [spec.readout, spec.system.D]
    for step in spec.system.micro_steps:
        roots += [step.B, *step.A.all_exprs]
    roots += [] if spec.system.solve is None else [*spec.system.solve.exprs]
    return roots + [x for x in (spec.system.gauge, spec.rule) if x is not None]


def _check_features(spec: Spec) -> None:
    kinds = {spec.readout.features}
    for row in spec.rows:
        kinds |= {t.key.features for t in row.terms if KEY in t.key.axes}
        decayed = KEY in row.normal.decay.axes and not spec.is_softmax  # which raises its own error
        kinds |= {row.normal.decay.features} if decayed else set()
        kinds |= {c.left.features for c in row.normal.corrections}
    if len(kinds) > 1:
        names = " and ".join(sorted(k or "N entries" for k in kinds))
        raise TraceError(f"the state's Key axis holds {names} at once; use the same features everywhere")


def _check_rule(spec: Spec, rule: Expr) -> None:
    if KEY in rule.axes:
        raise TraceError(f"normalize = {rule} has a Key axis, but y has none")
    if NUM not in children_first(rule):
        raise TraceError(f"normalize = {rule} does not use num, the output that it normalises")
    driven = inputs_of(*(s.B for s in spec.system.micro_steps))
    for drive in spec.drives:
        if not isinstance(drive, Expr):
            raise TraceError(f"drive = {drive!r} is no input; drive takes the input itself, which B writes")
        if not any(drive is x for x in driven):
            raise TraceError(f"drive = {drive} does not occur in B")
        for x in _shared(spec):
            if drive in inputs_of(x):
                raise TraceError(
                    f"normalize divides by the same system driven by ones, but {drive}, which drives it, also occurs "
                    f"in `{x}`, which both have in common; give what stands there an input of its own, or name another "
                    "drive"
                )
    if (spec.is_stabilised or spec.is_softmax) and not _is_homogeneous(rule):
        cause = "exponential features keep" if spec.is_softmax else "exp(…) in B keeps"
        raise TraceError(
            f"normalize = {rule} changes when num and den are scaled alike, but {cause} the state at a scale "
            "of its own; write the rule with (num, den, one), where one is the number 1 at that scale"
        )


def _shared(spec: Spec) -> list[Expr]:
    """The keys and exponential gains of B and D, which the system driven by ones has in common with this one."""
    terms = [t for r in spec.rows for t in r.terms] + [spec.skip_term]
    return [x for t in terms for x in (t.key, t.gain) if x is not None]


def _is_homogeneous(rule: Expr) -> bool:
    """Whether rule(c num, c den, c one) == rule(num, den, one), tested on random numbers."""
    generator = torch.Generator().manual_seed(0)

    def numbers(node: Expr) -> torch.Tensor:
        shape = (64, 1, 1, 2 if KEY in node.axes else 1, 2 if VALUE in node.axes else 1)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    env = {node: numbers(node) for node in {NUM, DEN, ONE, *inputs_of(rule)}}
    env[ONE] = torch.ones_like(env[ONE])
    scaled = env | {node: 4 * env[node] for node in (NUM, DEN, ONE)}
    y, same = (Evaluator(values, 2, 2)(rule) for values in (env, scaled))
    return torch.allclose(y, same, rtol=1e-9, atol=0, equal_nan=True)
