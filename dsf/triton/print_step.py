"""Printing one step of a recurrence: the decode kernel of any system with a finite state.

The state is one more input with axes {Key, Value}. A, B and the readout are applied to it, micro-step after micro-step,
which gives a few expressions: y, the new state, the normaliser's new column, the new running maximum and the values
that the next token takes as previous ones. One launch computes them all. What all channels share of the new state is a
separate function, called once a program.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dsf.kernels.triton.pointwise.programs import PAIRED, Access
from dsf.kernels.triton.pointwise.step_ops import StepProgram
from dsf.language.derived import derived
from dsf.language.expr import KEY, VALUE, Expr, children_first, const, inputs_of, substitute
from dsf.language.frame import Frame, roots_of
from dsf.language.functions import exp, maximum, minimum, sum_key, sum_value
from dsf.language.operator import times
from dsf.language.primitives import log_of
from dsf.language.spec import Row, Spec
from dsf.language.system import DEN, NUM, ONE
from dsf.torch.stabilise import drift_of
from dsf.triton.operands import is_delta
from dsf.triton.pairs import OTHER, SIDE, Pairs
from dsf.triton.print_pointwise import Body
from dsf.triton.printer import AT, RESERVED, STATE, Printer, as_comment, identifier, indented, name_of, symbol
from dsf.triton.source import Source, file_of

ZERO, UNIT = const(0), const(1)
LANES = ".lanes"  # suffix of a Key input as every lane of the channels loads it


@derived
def step_refusal(spec: Spec) -> str | None:
    """Why the decode kernel cannot step this, in the user's words; None when it can."""
    if spec.system.solve is not None:
        return "its readout is solved for token by token, on torch"
    if spec.is_attention:
        return "the decode kernel keeps a finite state"
    spec, frame = plain_of(spec)
    leaves = () if frame is None else frame.leaves
    if any(x.op == "atan2" for x in children_first(*roots_of(spec.system), *(leaf.source for leaf in leaves))):
        return "no printed kernel computes atan2"
    if not spec.has_key and any(KEY in leaf.source.axes for leaf in leaves):
        return "the decode kernel has no vector state (N = 1) with previous values of Key inputs"
    if spec.features is not None:
        return "no printed kernel evaluates Taylor features"
    if not spec.has_key and any(KEY in x.axes for r in spec.rows for x in (r.normal.decay, *(t.key for t in r.terms))):
        return "the decode kernel has no vector state (N = 1) made of Key inputs"
    if spec.is_stabilised and KEY in spec.gain_axes:
        return "the decode kernel takes exponential gains without a Key axis"
    return None


def plain_of(spec: Spec) -> tuple[Spec, Frame | None]:
    """The system that a step runs, with turns left in A, and its frame; the spec itself where it needs none."""
    frame = spec.turning if spec.is_framed else None
    return (spec, None) if frame is None else (frame.spec, frame)


def _parts(spec: Spec) -> tuple[Expr, Expr]:
    """The normaliser's and the running maximum's part of a state, each one number a head or one a channel."""
    wide = spec.den_has_channels, VALUE in spec.gain_axes
    axes = [frozenset({KEY, VALUE}) if w else frozenset({KEY}) for w in wide]
    return symbol(".column", axes[0]), symbol(".level", axes[1])


def _kept(spec: Spec, frame: Frame | None) -> dict[Expr, Access]:
    """Where the state keeps its parts: columns of S, the normaliser, the running maximum, and after them the previous
    values, each filled into columns of N (dsf.call.frame)."""
    found = {STATE: Access(".state", None, True, True, True, column="p")}
    leaves = () if frame is None else frame.leaves
    widths = ["P"]
    for x, there in zip(_parts(spec), (spec.ones is not None, spec.is_stabilised), strict=True):
        if there:
            wide = VALUE in x.axes
            found[x] = Access(".state", None, True, True, wide, column=" + ".join([*widths, *(["p"] if wide else [])]))
            widths.append("P" if wide else "1")
    if spec.is_stabilised and widths[-1] == "1" and not leaves:  # a constant of the kernel, unlike P
        found[x] = replace(found[x], column="COLUMNS - 1")
    for node in (x for leaf in leaves for x in leaf.nodes):
        key, value = KEY in node.axes, VALUE in node.axes
        start, flat = " + ".join(widths), "(n * P + p)" if key else "p"
        column, entry = (f"{start} + {flat} // N", f"({flat} % N)") if value else (start, "n" if key else "t")
        found[node] = Access(".state", None, True, key, value, column=column, entry=entry)
        widths.append(("P" if key else "(P + N - 1) // N") if value else "1")
    return found


@dataclass(frozen=True)
class _Moment:
    """The state at some point of a step: S e^{-level}, the normaliser's column times e^{-level}, and the level."""

    state: Expr
    column: Expr | None
    level: Expr | None


def _advance(row: Row, ones: Row | None, now: _Moment, pairs: Pairs) -> _Moment:
    """One micro-step."""
    level, moved = now.level, None
    if now.level is not None:
        decay = row.normal.decay
        level = now.level + drift_of(decay, log_of(decay))
        for term in row.terms:
            level = maximum(level, term.gain if term.gain is not None else 0.0)
        if KEY in level.axes:  # y and corrections sum over entries, which therefore share one level
            level = _max_key(level)
        moved = exp(now.level - level)
    state = _apply(row, row, pairs.turned(now.state, row.normal.angle), level, moved)
    column = None
    if now.column is not None and ones is not None:
        column = _apply(row, ones, pairs.turned(now.column, row.normal.angle), level, moved)
    return _Moment(state, column, level)


def _apply(row: Row, source: Row, x: Expr, level: Expr | None, moved: Expr | None) -> Expr:
    """A x + B for a turned x, with A of `row`, B of `source`, divided by e^level; moved: what x is multiplied by to be
    so, too."""
    total = times(row.normal.decay, x)
    for c in row.normal.corrections:
        seen = sum_key(c.right * x) if c.axis == KEY else sum_value(c.right * x)
        total = total + times(c.scale, c.left) * seen
    if moved is not None:
        total = total * moved
    if source.dense is not None:
        return total + source.dense
    for term in source.terms:
        product = times(term.key, term.value)
        if level is not None:
            product = product * exp((term.gain if term.gain is not None else const(0)) - level)
        total = total + product
    return total


def _roots(spec: Spec, frame: Frame | None, pairs: Pairs) -> list[tuple[Expr, Expr | None]]:
    """The expressions that one step stores, each with the part of the state that it is the new value of; y has None."""
    ones, (column, level) = spec.ones, _parts(spec)
    top = _max_key(level) if spec.is_stabilised else None
    scale = exp(level - top) if top is not None else UNIT
    now = first = _Moment(STATE * scale, column * scale if ones is not None else None, top)
    for i, row in enumerate(spec.rows):
        now = _advance(row, None if ones is None else spec.ones_rows[i], now, pairs)
    seen = first if spec.system.read == "before" else now
    roots: list[tuple[Expr, Expr | None]] = [(_output(spec, seen), None), (now.state, STATE)]
    if now.column is not None:
        roots.append((now.column, column))
    if now.level is not None:
        roots.append((now.level, level))
    for leaf in () if frame is None else frame.leaves:
        roots += zip((leaf.source, *leaf.nodes), leaf.nodes, strict=False)
    return [(pairs.own(x), part) for x, part in roots]


def _output(spec: Spec, seen: _Moment) -> Expr:
    """y of the state at a point of the step. What D adds may raise the level that numerator and denominator share."""
    ones, skip, level = spec.ones, spec.skip_term, seen.level
    scale = added = UNIT
    if seen.level is not None and skip.gain is not None:
        level = maximum(seen.level, skip.gain)
        scale, added = exp(seen.level - level), exp(skip.gain - level)
    y = times(_read(spec, seen.state), scale) + times(skip.value, added)
    if spec.rule is None:
        return y
    assert ones is not None and seen.column is not None
    one = UNIT if level is None else exp(minimum(-level, 80.0))
    den = times(_read(spec, seen.column), scale) + times(spec.skip_ones.value, added)
    return substitute(spec.rule, {NUM: y, DEN: den, ONE: one})


def _max_key(x: Expr) -> Expr:
    return Expr("max_key", (x,), (), x.axes - {KEY})


def _in_lanes(x: Expr) -> Expr:
    """x with its Key inputs loaded by every lane. Rows of P + 1 or P + 2 columns have another layout than a Key vector;
    this avoids a conversion of the tile through shared memory."""
    keys = [
        i for i in inputs_of(x) if i.axes == {KEY} and not i.attrs[0].startswith(".") and not i.attrs[0].endswith(LANES)
    ]
    return substitute(x, {i: Expr("input", (), (i.attrs[0] + LANES, i.attrs[1]), i.axes) for i in keys})


def _read(spec: Spec, state: Expr) -> Expr:
    product = spec.readout * state
    return sum_key(product) if spec.has_key else product


def _shared(roots: Sequence[Expr], kept: Collection[str]) -> list[Expr]:
    """The largest parts of roots that are the same for all channels, single inputs only where the state keeps them."""
    order = children_first(*roots)
    used = {a for x in order if VALUE in x.axes for a in x.args} | set(roots)
    parts = [x for x in order if x in used and VALUE not in x.axes]
    return [x for x in parts if x.args or (x.op == "input" and x.attrs[0].removesuffix(OTHER) in kept)]


class _Printer(Printer):
    """Also prints max_key, the largest entry over the Key axis, and what differs within a pair of places."""

    def _expression(self, node: Expr) -> str:
        if node.op == "max_key":
            return f"tile.max_key({self.text[node.args[0]]}, n_ok)"
        if node is SIDE:
            return "tl.where(n % 2 == 0, -1.0, 1.0)"
        if node.op == "pair":
            return f"tl.where(n % 2 == 0, {', '.join(self.text[a] for a in node.args)})"
        return super()._expression(node)


class _Step:
    """Prints the functions of one spec's decode kernel. kept: where the parts of the state are."""

    def __init__(self, spec: Spec, frame: Frame | None, kept: Mapping[Expr, Access]) -> None:
        self.kinds, self.kept = {i.name: i.kind for i in spec.inputs}, kept
        self.pairs = {} if frame is None else {node: source for source, node in frame.pairs}
        self.names: dict[Expr, str] = {}
        self.accesses: list[Access] = []

    def name(self, nodes: Sequence[Expr]) -> None:
        """Give nodes unique names in the printed text."""
        for node in (x for x in nodes if x not in self.names):
            text = name_of(node).strip("_") if "." in node.attrs[0] else name_of(node)
            while text in {*self.names.values(), "sums", "shared"}:
                text += "_"
            self.names[node] = text

    def print(self, roots: Sequence[tuple[Expr, Access]], given: Sequence[Expr], gives: Sequence[Expr]) -> list[str]:
        """The lines of a function that stores roots and returns `gives`; `given` are arguments."""
        exprs = [*(e for e, _ in roots), *gives]
        nodes = [x for x in inputs_of(*exprs) if x not in given]
        self.name(nodes)
        body = Body(self.names)
        body.place = sum(a.width for a in self.accesses)
        body.lines = [AT.replace("N = at", "N, COLUMNS = at")]
        if given:
            body.lines.append(f"{', '.join(self.names[x] for x in given)}, = shared")
        for node in nodes:
            body.load(node, *self._place(node))
        printer = _Printer(self.names, RESERVED | {"COLUMNS", "shared"})
        values = printer.print(exprs)
        body.lines += [*printer.lines, "tl.debug_barrier()"]  # every thread has read the state before it is overwritten
        for value, (_, access) in zip(values, roots, strict=False):
            body.store(value, access)
        if gives:
            body.lines.append(f"return ({', '.join(values[len(roots) :])},)")
        self.accesses += body.accesses
        return indented(body.lines)

    def _place(self, node: Expr) -> tuple[Access, bool]:
        """The tensor of an input, and whether every lane of the channels loads it."""
        name, step = node.attrs
        other, lanes = OTHER in name, name.endswith(LANES)
        own = Expr("input", (), (name.removesuffix(LANES).removesuffix(OTHER), step), node.axes)
        if own in self.kept:
            found = self.kept[own]
        else:
            source = self.pairs.get(own)
            name = own.attrs[0] if source is None else source.attrs[0]
            step = step if source is None else source.attrs[1]
            time = name not in self.kinds or self.kinds[name].time
            entry = "n" if source is None else PAIRED
            found = Access(name, step, time, KEY in node.axes, VALUE in node.axes, entry=entry)
        return _other_place(found) if other else found, lanes


def _width(kept: Mapping[Expr, Access], part: Expr) -> str | None:
    """The columns of a part of a state: P or 1; None where the state lacks it."""
    return None if part not in kept else "P" if kept[part].value else "1"


def _other_place(place: Access) -> Access:
    """Where the other entry of its pair is."""
    entry, column = (re.sub(r"\bn\b", "(n ^ 1)", x) for x in (place.entry, place.column or ""))
    return replace(place, entry=entry, column=column or None)


def _stored(place: Access) -> Access:
    """Where the new value goes."""
    return replace(place, role=".new_state" if place.value else ".new_shared", stored=True)


def emit_step(spec: Spec) -> tuple[Source, StepProgram]:
    """Printed source and StepProgram of a spec's decode kernel."""
    plain, frame = plain_of(spec)
    kept = _kept(plain, frame)
    pairs = Pairs(() if frame is None else [node for _, node in frame.pairs])
    y = Access(".y", None, True, False, True, True)
    roots = [(x, y if part is None else _stored(kept[part])) for x, part in _roots(plain, frame, pairs)]
    step, parts = _Step(spec, frame, kept), []
    held: list[Expr] = []
    own = [(e, a) for e, a in roots if not a.value]
    if own:
        roots = [(e, a) for e, a in roots if a.value]
        common = _shared([e for e, _ in roots], {x.attrs[0] for x in kept})
        held = [symbol(f".shared_{i}", x.axes) for i, x in enumerate(common)]
        parts.append(["def shared(args, at):", *step.print(own, [], common)])
        roots = [(_in_lanes(substitute(e, dict(zip(common, held, strict=True)))), a) for e, a in roots]
        step.name(held)
    parts.append(["def step(args, at, shared):", *step.print(roots, held, [])])
    about = "One step, printed by dsf from the declaration above; read by dsf.kernels.triton.pointwise.kernel.step."
    text = file_of([as_comment(str(spec)), "", about], parts)
    inputs = tuple(
        Access(
            i.name, i.kind.steps, i.kind.time, KEY in i.kind.axes, VALUE in i.kind.axes,
            entry=PAIRED if i.kind.pair else "n",
        )
        for i in spec.inputs
    )  # fmt: skip
    whole = any(x.op == "sum_value" for x in children_first(*(e for e, _ in roots)))
    rows = plain.rows
    identity = all(r.normal.decay is UNIT and not r.normal.corrections for r in rows)
    general = not all(is_delta(r, r.normal.decay) for r in rows)
    column, level = _parts(plain)
    before = tuple((a.key, a.value) for x, a in kept.items() if x not in (STATE, column, level))
    program = StepProgram(
        inputs, tuple(step.accesses), _width(kept, column), _width(kept, level), bool(own), whole, plain.rank > 0,
        general, identity, KEY in plain.decay_axes, plain.micro, before,
    )  # fmt: skip
    return Source(f"{identifier(spec.name)}_step", text, ()), program
