"""Printing the holes of scans by entry: they process some tokens for one state entry, then for the next.

What has a Key axis is computed for every entry, everything else once for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from dsf.language.expr import KEY, VALUE, Expr, substitute
from dsf.language.operator import times
from dsf.triton.print_operand import Operand
from dsf.triton.printer import (
    AT,
    BOTH,
    COTANGENTS,
    NAMES,
    RESERVED,
    SINK,
    STATE,
    Printer,
    grouped,
    indented,
    symbol,
    unpacked,
)
from dsf.triton.update import Update

LOGARITHM = symbol("dA_A", BOTH)  # dA times A, the cotangent of log A


class Entries:
    """The holes of one spec whose entries depend on each other only by sums after the last (`Source.separable`).

    tokens, held: input nodes in the order in which `step` reads them; slopes: their gradients, in the same order.
    operands: how each input is loaded and stored; scope: names of the nodes; decay: A; made: nodes from a kernel
    before the scan; rough, near: as Printer has them; update: a token's update of an entry's state.
    """

    def __init__(
        self, tokens: Sequence[Expr], held: Sequence[Expr], slopes: Sequence[Expr], operands: Mapping[Expr, Operand],
        scope: Mapping[Expr, str], decay: Expr, made: Collection[Expr], rough: bool,
        near: Collection[Expr], update: Update,
    ) -> None:  # fmt: skip
        of_decay, of_write = COTANGENTS[:2]
        shared = {times(of_decay, decay): LOGARITHM}
        if decay.op == "tanh":  # dA (1 - A A) with dA = S dB; A dB is needed for the state before anyway
            shared[times(of_decay, 1.0 - decay * decay)] = STATE * (of_write - decay * times(decay, of_write))
        self.slope = {x: substitute(slope, shared) for x, slope in zip([*tokens, *held], slopes, strict=True)}
        self.plain = [x for x in tokens if KEY not in x.axes]
        self.runs = [x for x in tokens if x.axes == {KEY}]
        self.whole = [x for x in tokens if KEY in x.axes and VALUE in x.axes]
        self.tokens, self.held = [*self.plain, *self.runs, *self.whole], list(held)
        self.keyed = [x for x in held if KEY in x.axes]
        self.loose = [x for x in held if KEY not in x.axes]
        self.operands = operands
        self.scope = {**scope, **{c: c.attrs[0] for c in (*COTANGENTS, LOGARITHM)}, STATE: "state"}
        self.made = made
        self.rough, self.near, self.update = rough, near, update

    def functions(self) -> list[list[str]]:
        """The lines of every hole."""
        return [
            *self._plain(), *self._runs(), self._spread(), self._whole(), self._ahead(), self._parted(), self._merge(),
            self._moved(), self._passed(), self._entry(), self._after(), self._puts(), *self._keys(), self._blank(),
        ]  # fmt: skip

    @cached_property
    def sums(self) -> list[Expr]:
        """The outermost sums over entries in the gradients of nodes without a Key axis."""
        found: dict[Expr, None] = {}
        stack = [self.slope[x] for x in reversed([*self.plain, *self.loose])]
        while stack:
            x = stack.pop()
            if x.op == "sum_key":
                found[x] = None
            else:
                stack += [a for a in x.args if KEY in a.axes or a.args]
        return list(found)

    def _printer(self, scope: Mapping[Expr, str]) -> Printer:
        return Printer(scope, {*RESERVED, *NAMES}, self.rough, self.near, self.held)

    def _named(self, nodes: Sequence[Expr], source: str) -> list[str]:
        return [unpacked([self.scope[x] for x in nodes], source)] if nodes else []

    def _loading(self, head: str, nodes: Sequence[Expr], texts: Sequence[str], given: Sequence[str] = ()) -> list[str]:
        """A function that loads nodes by the given expressions and returns them."""
        names = [self.scope[x] for x in nodes]
        loads = [f"{name} = {text}" for name, text in zip(names, texts, strict=True)]
        return [f"def {head}:", *indented([AT, *given, *loads, f"return {grouped(names)}"])]

    def _plain(self) -> list[list[str]]:
        found = [self.operands[x] for x in self.plain]
        return [
            self._loading("plain(args, at)", self.plain, [x.load(widen=True) for x in found]),
            self._loading("plain_back(args, at)", self.plain, [x.load(fixed=True) for x in found]),
        ]

    def _runs(self) -> list[list[str]]:
        found = [self.operands[x] for x in self.runs]
        return [
            self._loading("runs(args, at, L: tl.constexpr)", self.runs, [x.load_run() for x in found]),
            self._loading("runs_back(args, at, L: tl.constexpr)", self.runs, [x.load_lanes() for x in found]),
        ]

    def _whole(self) -> list[str]:
        loads = [self.operands[x].load() for x in self.whole]
        return self._loading("whole(args, tokens, at)", self.whole, loads, self._named(self.plain, "tokens"))

    def _ahead(self) -> list[str]:
        body = [AT, *(self.operands[x].prefetch() for x in [*self.plain, *self.runs] if x.axes), "pass"]
        return ["def ahead(args, at, L: tl.constexpr, BP: tl.constexpr):", *indented(body)]

    def _spread(self) -> list[str]:
        found = [f"lanes.run_of(run[{i}], L, {self._is_short(x)})" for i, x in enumerate(self.runs)]
        return ["def spread(run, L: tl.constexpr):", *indented([f"return {grouped(found)}"])]

    def _is_short(self, x: Expr) -> bool:
        """True for inputs of 16 bits; what a kernel before the scan computes is float32."""
        return self.rough and x not in self.made

    def _parted(self) -> list[str]:
        places = {x: f"held[{i}]" for i, x in enumerate(self.held)}
        groups = (grouped([places[x] for x in found]) for found in (self.keyed, self.loose))
        return ["def parted(held):", *indented([f"return {', '.join(groups)}"])]

    def _merge(self) -> list[str]:
        places = {x: f"{kind}[{i}]" for kind in ("keyed", "loose") for i, x in enumerate(getattr(self, kind))}
        return ["def merge(keyed, loose):", *indented([f"return {grouped([places[x] for x in self.held])}"])]

    def _moved(self) -> list[str]:
        body = ["return tl.fma(A_, state, B_)"]
        if self.update.factor is not None:
            body = self._inside(self.update.after)
        return ["def moved(tokens, held, A_, B_, state, at):", *indented(body)]

    def _passed(self) -> list[str]:
        body = ["return A_ * dB"]
        if self.update.factor is not None:
            body = self._inside(self.update.before)
        return ["def passed(tokens, held, A_, dB, at):", *indented(body)]

    def _inside(self, x: Expr) -> list[str]:
        """The lines that compute and return an expression of a token's inputs and of held values."""
        printer = self._printer(self.scope)
        (text,) = printer.print([x])
        names = [*self._named(self.tokens, "tokens"), *self._named(self.held, "held")]
        return [AT, *names, *printer.lines, f"return {text}"]

    def _entry(self) -> list[str]:
        late = [_open(self.slope[x]) for x in [*self.runs, *self.keyed]]
        printer = self._printer(self.scope)
        texts = printer.print([*(x.args[0] for x in self.sums), *late, *(self.slope[x] for x in self.whole)])
        parts = []
        for nodes in (self.sums, self.runs, self.keyed):
            parts.append(grouped(texts[: len(nodes)]))
            texts = texts[len(nodes) :]
        stores = [line for x, text in zip(self.whole, texts, strict=True) for line in self.operands[x].store(text)]
        body = [AT, *self._named(self.tokens, "tokens"), *self._named(self.held, "held"), *printer.lines, *stores]
        return [
            "def entry(tokens, held, grads, dA, dB, dC, dA_A, state, at):",
            *indented([*body, f"return {', '.join(parts)}"]),
        ]

    def _after(self) -> list[str]:
        found = {x: symbol(f"found{i}", x.axes) for i, x in enumerate(self.sums)}
        scope = self.scope | {x: f"found[{i}]" for i, x in enumerate(found.values())}
        roots = [_open(self.slope[x]) if self._is_summed(x) else self.slope[x] for x in self.plain]
        roots += [_open(self.slope[x]) for x in self.loose]
        printer = self._printer(scope)
        texts = printer.print(substitute(x, found) for x in roots)
        names = [*self._named(self.plain, "tokens"), *self._named(self.held, "held")]
        groups = f"return {grouped(texts[: len(self.plain)])}, {grouped(texts[len(self.plain) :])}"
        return ["def after(tokens, held, found, dE, dD, at):", *indented([AT, *names, *printer.lines, groups])]

    def _is_summed(self, x: Expr) -> bool:
        """True where the last operation in the gradient of a number is a sum over channels."""
        return not x.axes and self.slope[x].op == "sum_value"

    def _puts(self) -> list[str]:
        stores = []
        for i, x in enumerate(self.plain):
            value = f"values[{i}]"
            summed = self._is_summed(x)
            found = self.operands[x]
            stores += found.store_tokens(value, self.rough) if summed else found.store(value, fixed=True)
        return ["def puts(grads, values, at, sink):", *indented([AT, SINK, "first = p == edge", *stores])]

    def _keys(self) -> list[list[str]]:
        """Sums of Key inputs' gradients over channels, of two inputs together where both gradients are wanted."""
        found = [self.operands[x] for x in self.runs]
        pairs = [found[i : i + 2] for i in range(0, len(found), 2)]
        at, added, stored = [], [], []
        for i, pair in enumerate(pairs):
            for word, wanted in zip(
                ("if", "elif", "elif"), [pair, *([x] for x in pair if len(pair) > 1)], strict=False
            ):
                test = f"{word} {' and '.join(f'grads[{x.index}] is not None' for x in wanted)}:"
                how = f"{len(wanted)} * L, BP, {self.rough}"
                values = " + ".join(f"values[{found.index(x)}]" for x in wanted)
                at += [test, f"    places{i} = {wanted[0].places(wanted[1:], self.rough)}"]
                at += [f"    sums{i} = lanes.waiting({how})"]
                added += [test, f"    sums{i} = lanes.begin_run({values}, p, p_ok, edge, {self.rough})"]
                stored += [test, f"    lanes.end_run(places[{i}], sums[{i}], ok, {how})"]
            at += ["else:", f"    places{i} = (); sums{i} = ()"]
            added += ["else:", f"    sums{i} = ()"]
        sums, places = (grouped([f"{x}{i}" for i in range(len(pairs))]) for x in ("sums", "places"))
        after = grouped([f"lanes.further(places[{i}], rows)" for i in range(len(pairs))])
        sizes = "L: tl.constexpr, BP: tl.constexpr"
        return [
            [f"def keys_at(grads, at, sink, {sizes}):", *indented([AT, SINK, *at, f"return {places}, {sums}"])],
            ["def keys_added(grads, values, at):", *indented([AT, *added, f"return {sums}"])],
            [
                f"def keys_stored(grads, places, sums, ok, sink, {sizes}):",
                *indented([SINK, *stored, f"return {after}"]),
            ],
        ]

    def _blank(self) -> list[str]:
        sums = ["tl.zeros((1, 1, BP), tl.float32)"] * len(self.sums)
        keyed = ["tl.zeros((1, 1, BP), tl.float32)"] * len(self.keyed)
        wide = [VALUE in _open(self.slope[x]).axes | x.axes for x in self.loose]
        loose = [f"tl.zeros((1, 1, {'BP' if w else '1'}), tl.float32)" for w in wide]
        return [
            "def blank(BP: tl.constexpr):",
            *indented([f"return {grouped(sums)}, {grouped(keyed)}, {grouped(loose)}"]),
        ]


def _open(slope: Expr) -> Expr:
    """A gradient without its last operation, where that is a sum over channels."""
    return slope.args[0] if slope.op == "sum_value" else slope
