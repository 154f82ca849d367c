"""Declarations with `turn`, `prev` and Pair inputs, rewritten as plain ones with inputs computed before the forms run.

* A product's previous value is the product of its factors' previous values, zero where a sequence begins: `prev(k * v)`
  becomes a product of two inputs, k and v of the token before. The state keeps these *leaves*, not their products.
* Where the decay is equal within each pair, turns are removed by a change of variables (a gauge): with Θ_r the sum of
  the angles up to row r of a sequence, Ŝ_r = R(-Θ_r) S_r obeys S's recurrence without the turns, with keys, corrections
  and readouts turned by -Θ_r: R(-Θ_r) (D + l r') R(θ_r) R(Θ_{r-1}) = D + (R(-Θ_r) l) (R(-Θ_r) r)'. Delta rules stay
  delta rules, and S_0 is unchanged.
* A Pair input's entries are repeated for both places; torch computes sines, cosines, angles and complex pairs.

So forms and kernels need no case for these. Where a decay differs within a pair the turns stay (`Spec.mixes_pairs`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from dsf.language.annotations import Input, Kind
from dsf.language.derived import interned
from dsf.language.errors import TraceError
from dsf.language.expr import (
    BY_TORCH,
    KEY,
    VALUE,
    Axes,
    Expr,
    children_first,
    const,
    inputs_of,
    is_paired,
    rebuild,
    rewritten,
    substitute,
)
from dsf.language.gauge import NoGaugeError, into_gauge
from dsf.language.operator import Operator, factors_of, times
from dsf.language.system import System

if TYPE_CHECKING:
    from dsf.language.spec import Spec

UNIT = const(1)
Way = Literal["gauge", "turning", "oracle"]


@dataclass(frozen=True)
class Leaf:
    """A delayed expression: the state keeps the last len(nodes) values of `source`; nodes[d - 1] is d tokens ago."""

    source: Expr
    nodes: tuple[Expr, ...]


@dataclass(frozen=True)
class Turned:
    """An input that is `source` turned by minus the sum of the angles up to row `row` of its token (-1: before it)."""

    node: Expr
    source: Expr
    row: int


@dataclass(frozen=True)
class Late:
    """An input that is `source` of the token before, 0 at first ones. The last state takes source · key · value of the
    last token (dsf.language.late)."""

    node: Expr
    source: Expr
    key: Expr
    value: Expr


@dataclass(frozen=True)
class Early:
    """An input that is `source` of the token after, 0 at last ones. The first state takes source · before of the first
    token, before in leaves' nodes (dsf.language.late)."""

    node: Expr
    source: Expr
    before: Expr


@dataclass(frozen=True, eq=False)
class Frame:
    """A plain Spec, and the recipe of the inputs that it has besides those of the declaration.

    leaves: each depends only on earlier ones. whole: for the oracle, (input, the whole expression whose previous value
    it is, its first value in leaves' nodes). pairs: (a Pair input, the input of its repeated
    entries). turned: the inputs turned into the gauge. angles: every row's turn in the gauge, None without one. torch:
    (an expression that kernels cannot compute, its input). late: what tokens write of the one before; early: of
    themselves for the one after.
    """

    spec: Spec
    leaves: tuple[Leaf, ...]
    whole: tuple[tuple[Expr, Expr, Expr], ...]
    pairs: tuple[tuple[Expr, Expr], ...]
    turned: tuple[Turned, ...]
    angles: tuple[Expr, ...] | None
    torch: tuple[tuple[Expr, Expr], ...] = ()
    late: tuple[Late, ...] = ()
    early: tuple[Early, ...] = ()

    @property
    def unread(self) -> frozenset[Expr]:
        """Leaves' nodes that no input of the plain system is made of, where tokens write for the one after."""
        sources = [leaf.source for leaf in self.leaves] + [x for x, _ in self.torch]
        sources += [t.source for t in self.turned] + [*(self.angles or ())]
        plain = {i.name for i in self.spec.inputs}
        nodes = {node for leaf in self.leaves for node in leaf.nodes if self.early}
        return frozenset(x for x in nodes - {*inputs_of(*sources)} if x.attrs[0] not in plain)

    @property
    def words(self) -> dict[Expr, Expr]:
        """For every leaf's node, repeated input and torch input, its expression in terms of the declaration."""
        found = {node: Expr("spread", (source,)) for source, node in self.pairs}
        found |= {node: source for source, node in self.torch}
        for leaf in self.leaves:
            before = substitute(leaf.source, found)
            for node in leaf.nodes:
                before = found[node] = Expr("prev", (before,))
        return found


def needs_frame(spec: Spec) -> bool:
    """True for declarations with a turn, a previous value, a Pair input or an operation that only torch computes."""
    made = {"prev", "spread", *BY_TORCH}
    return any(x.op in made for x in children_first(*roots_of(spec.system))) or turns(spec.system)


def turns(system: System) -> bool:
    """True where some A contains a turn."""

    def found(a: Operator) -> bool:
        return a.kind == "turn" or any(map(found, a.parts))

    return any(found(step.A) for step in system.micro_steps)


def roots_of(system: System) -> list[Expr]:
    """Every expression of a System, without normalize."""
    roots = [x for x in (system.C, system.D, system.gauge) if x is not None]
    for step in system.micro_steps:
        roots += [step.B, *step.A.all_exprs]
    return roots + ([] if system.solve is None else [*system.solve.exprs])


def map_operator(a: Operator, change: Callable[[Expr], Expr]) -> Operator:
    """The operator with `change` applied to every expression."""
    return Operator(a.kind, tuple(map_operator(p, change) for p in a.parts), tuple(map(change, a.exprs)))


def map_system(system: System, change: Callable[[Expr], Expr]) -> System:
    """The system with `change` applied to every expression; normalize, drive and window unchanged."""
    steps = [
        System(
            A=map_operator(s.A, change),
            B=change(s.B),
            C=None if s.C is None else change(s.C),
            D=change(s.D),
            read=s.read,
        )
        for s in system.micro_steps
    ]
    gauge = None if system.gauge is None else change(system.gauge)
    return replace(
        steps[-1], earlier=tuple(steps[:-1]), normalize=system.normalize, gauge=gauge, drive=system.drive,
        window=system.window,
    )  # fmt: skip


def frame_of(spec: Spec, way: Way) -> Frame:
    """The plain system: "gauge": without turns where possible; "turning": turns left in A; "oracle": turns left, and
    whole expressions delayed instead of their factors. Raises TraceError."""
    made = Made(spec)
    whole: list[tuple[Expr, Expr, Expr]] = []
    if way == "oracle":
        system = map_system(spec.system, lambda x: made.without_pairs(made.keep_whole(x, whole)))
    else:
        system = map_system(spec.system, lambda x: made.without_pairs(made.without_prev(x)))
    angles = None
    if way == "gauge" and turns(system):
        try:
            system, angles = into_gauge(made, system)
        except NoGaugeError:
            made.turned.clear()
    if way == "gauge":
        system = map_system(system, made.by_torch)
    return made.frame(system, angles, tuple(whole))


@dataclass
class Made:
    """The added inputs of a frame, collected while expressions are rewritten."""

    of: Spec
    kinds: dict[str, Kind] = field(default_factory=dict)
    leaves: dict[Expr, list[Expr]] = field(default_factory=dict)
    pairs: dict[Expr, Expr] = field(default_factory=dict)
    turned: dict[tuple[Expr, int], Expr] = field(default_factory=dict)
    torch: dict[Expr, Expr] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.taken = {i.name for i in self.of.inputs}
        self.timed = {i.name for i in self.of.inputs if i.kind.time}

    def frame(
        self, system: System, angles: tuple[Expr, ...] | None, whole: tuple[tuple[Expr, Expr, Expr], ...] = ()
    ) -> Frame:
        """The frame of a system that is made of these inputs."""
        leaves = tuple(Leaf(self.without_pairs(x), tuple(nodes)) for x, nodes in self.leaves.items())
        turned = tuple(Turned(node, *key) for key, node in self.turned.items())
        return Frame(
            interned(self.spec(system)), leaves, whole, tuple(self.pairs.items()), turned, angles,
            tuple(self.torch.items()),
        )  # fmt: skip

    def node(self, name: str, axes: Axes, time: bool = True) -> Expr:
        """A new input."""
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        self.kinds[name] = Kind(axes, time)
        if time:
            self.timed.add(name)
        return Expr("input", (), (name, None), axes)

    def spec(self, system: System) -> Spec:
        """The declaration with another system, and only the inputs that it uses."""
        rule = [] if self.of.rule is None else [self.of.rule]
        used = {n.attrs[0] for n in inputs_of(*roots_of(system), *rule)}
        if rule:
            system = replace(system, drive=self.of.drives)
        every = {i.name: i.kind for i in self.of.inputs} | self.kinds
        inputs = tuple(Input(name, kind) for name, kind in every.items() if name in used)
        return replace(self.of, inputs=inputs, system=system, made=True)

    def moves(self, x: Expr) -> bool:
        """True where x depends on an input with a time axis."""
        return any(i.attrs[0] in self.timed for i in inputs_of(x))

    def without_prev(self, x: Expr) -> Expr:
        """x with every previous value replaced by leaves."""
        return rewritten(x, lambda node, _: self.lagged(node.args[0], 1) if node.op == "prev" else None)

    def keep_whole(self, x: Expr, whole: list[tuple[Expr, Expr, Expr]]) -> Expr:
        """x with one input for every whole previous value. Appends to `whole` as in `Frame`."""

        def change(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
            if node.op != "prev":
                return None
            first = self.without_pairs(self.lagged(node.args[0], 1))
            before = self.without_pairs(args[0])
            known = next((made for made, source, _ in whole if source is before), None)
            if known is None:
                known = self.node("before", node.axes)
                whole.append((known, before, first))
            return known

        return rewritten(x, change)

    def lagged(self, x: Expr, delay: int) -> Expr:
        """x of `delay` tokens ago, in leaves; zero before a sequence begins. Raises TraceError for a fixed x."""
        if x.op == "prev":
            return self.lagged(x.args[0], delay + 1)
        if x.op in ("add", "sub") and all(map(self.moves, x.args)):
            a, b = (self.lagged(arg, delay) for arg in x.args)
            return a + b if x.op == "add" else a - b
        out, moving = UNIT, dict[Axes, Expr]()
        for factor, inverse in factors_of(x):
            if not self.moves(factor):
                out = out / factor if inverse else times(out, factor)
                continue
            if not inverse and (
                factor.op == "prev" or (factor.op in ("add", "sub") and all(map(self.moves, factor.args)))
            ):
                out = times(out, self.lagged(factor, delay))
                continue
            found = moving.get(factor.axes, UNIT)
            moving[factor.axes] = found / factor if inverse else times(found, factor)
        if not moving and out is UNIT:
            raise TraceError(f"prev({x}) is the same for every token")
        for part in moving.values():
            out = times(out, self._leaf(self.without_prev(part), delay))
        return out

    def _leaf(self, source: Expr, delay: int) -> Expr:
        nodes = self.leaves.setdefault(source, [])
        while len(nodes) < delay:
            bare = source.args[0] if source.op == "spread" else source
            stem = f"{bare.attrs[0]}{'' if bare.attrs[1] is None else bare.attrs[1]}" if bare.op == "input" else "value"
            nodes.append(self.node(f"{stem}_before{len(nodes) + 1 if nodes else ''}", source.axes))
        return nodes[delay - 1]

    def without_pairs(self, x: Expr) -> Expr:
        """x with Pair inputs replaced by inputs of the Key axis."""

        def change(node: Expr, _: tuple[Expr, ...]) -> Expr | None:
            if node.op != "spread":
                return None
            source = node.args[0]
            if source not in self.pairs:
                name = f"{source.attrs[0]}{'' if source.attrs[1] is None else source.attrs[1]}_spread"
                self.pairs[source] = self.node(name, node.axes, source.attrs[0] in self.timed)
            return self.pairs[source]

        return rewritten(x, change)

    def is_paired(self, x: Expr) -> bool:
        """dsf.language.expr.is_paired of an expression without spread nodes."""
        return is_paired(x, {*self.pairs.values()})

    def by_torch(self, x: Expr) -> Expr:
        """x with operations that only torch computes replaced by inputs."""
        if not any(node.op in BY_TORCH for node in children_first(x)):
            return x
        if x.op in BY_TORCH:
            if x not in self.torch:
                self.torch[x] = self.node(x.op, x.axes, self.moves(x))
            return self.torch[x]
        return rebuild(x, tuple(map(self.by_torch, x.args)))

    def in_rows(self, system: System, rows: int) -> System:
        """The system with its turned keys, and its turned readouts, as the steps of one input each where there is one
        of both for every row of a token: kernels then take them as they lie."""
        old = {*self.turned.values()}
        groups = [[x for x in inputs_of(of) if x in old] for of in (system.B, system.C)]
        if rows == 1 or any(len(group) != rows for group in groups) or {*groups[0]} & {*groups[1]}:
            return system
        new = dict[Expr, Expr]()
        for stem, group in zip(("keys", "queries"), groups, strict=True):
            name = self.node(f"{stem}_turned", frozenset({KEY})).attrs[0]
            self.kinds[name] = Kind(frozenset({KEY}), steps=rows)
            new |= {x: Expr("input", (), (name, row), x.axes) for row, x in enumerate(group)}
        self.turned = {key: new.get(x, x) for key, x in self.turned.items()}
        return map_system(system, lambda x: substitute(x, new))

    def turn(self, x: Expr, row: int) -> Expr:
        """The input that is x turned into the gauge of a row. Raises NoGaugeError for an x with a Value axis."""
        if VALUE in x.axes:
            raise NoGaugeError
        if (x, row) not in self.turned:
            stem = x.attrs[0] if x.op == "input" else "key"
            self.turned[x, row] = self.node(f"{stem}_turned", frozenset({KEY}))
        return self.turned[x, row]
