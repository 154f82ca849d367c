"""Printing the Params of an impulse response: what dsf.kernels.triton.fourier.numbers runs, in float64.

    numbers   the logarithm of A, its angle, C and B for entries (or pairs) k and channels of one head
    pull_numbers   stores the gradients of the Params from those of these numbers

Where pairs of entries turn, an expression with a Key axis becomes two, of the first and of the second entry of a pair.
So nothing here has axes: every expression is one number for a head, a pair (or entry) and a channel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsf.kernels.triton.fourier.operator import Fixed
from dsf.language.annotations import Kind
from dsf.language.expr import COMPARISONS, KEY, VALUE, Expr, children_first, const, inputs_of, rebuild
from dsf.language.invariant import Still
from dsf.language.primitives import derivatives, log_of
from dsf.triton.printer import OPERATORS, identifier, indented, pairing

SIGNS = {**OPERATORS, **{x: OPERATORS[x] for x in COMPARISONS}}
CALLS = {
    "exp": "tl.exp", "log": "tl.log", "sqrt": "tl.sqrt", "sin": "tl.sin", "cos": "tl.cos", "abs": "tl.abs",
    "minimum": "tl.minimum", "maximum": "tl.maximum", "where": "tl.where",
    **{x: f"double.{x}" for x in ("expm1", "log1p", "sigmoid", "complement", "softplus", "logsigmoid")},
}  # fmt: skip
AXISLESS = frozenset[str]()
ZERO = const(0)


class Unprintable(Exception):
    """The Params' expressions cannot be printed; the words say why."""


@dataclass(frozen=True)
class Numbers:
    """The numbers of an entry or a pair, expressions without axes.

    log, c, b; where pairs turn log, θ, c0, c1, b0, b1, and where every entry has an input of its own b2, b3.
    """

    roots: tuple[Expr, ...]
    turned: bool


class Split:
    """Takes expressions of Params apart: into the first and the second entry of a pair where pairs turn.

    pairs: {an input with a Key axis: the Pair input that it repeats}.
    """

    def __init__(self, turned: bool, pairs: Mapping[Expr, Expr]) -> None:
        self.turned, self.pairs = turned, pairs
        self.done: dict[Expr, tuple[Expr, Expr]] = {}

    def __call__(self, root: Expr) -> tuple[Expr, Expr]:
        """The two entries of an expression, equal where it does not vary within a pair. Raises Unprintable."""
        for node in children_first(root):
            if node not in self.done:
                self.done[node] = self._split(node)
        return self.done[root]

    def _split(self, node: Expr) -> tuple[Expr, Expr]:
        if node.is_constant:
            if not math.isfinite(node.value):
                raise Unprintable(f"{node.value} is not printed")
            return node, node
        if node.op == "input":
            return self._input(node)
        args = [self.done[x] for x in node.args]
        if node.op == "pair":
            return args[0][0], args[1][1]
        if node.op == "quarter_turn":
            minus: Expr = -args[0][1]
            return minus, args[0][0]
        if node.op not in CALLS and node.op not in SIGNS and node.op not in ("pow", "rsqrt"):
            raise Unprintable(f"{node.op} is not printed in float64")
        if node.op == "pow" and not node.args[1].is_constant:
            raise Unprintable("a power of a Param is not printed in float64")
        first, second = (rebuild_flat(node, tuple(x[i] for x in args)) for i in range(2))
        return first, second

    def _input(self, node: Expr) -> tuple[Expr, Expr]:
        name, step = node.attrs
        if step is not None:
            raise Unprintable("Params of several micro-steps are not printed")
        source = self.pairs.get(node)
        if source is not None:
            one = Expr("input", (), (source.attrs[0], 0), AXISLESS)
            return one, one
        if KEY in node.axes and self.turned:
            first, second = (Expr("input", (), (name, i), AXISLESS) for i in range(2))
            return first, second
        one = Expr("input", (), (name, 0), AXISLESS)
        return one, one


def rebuild_flat(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """The node's operation on operands without axes."""
    return rebuild(node, args) if node.op in SIGNS else Expr(node.op, args, node.attrs, AXISLESS)


def numbers_of(still: Still, split: Split, writes: Sequence[tuple[Expr, bool]], keyed: bool) -> Numbers:
    """The numbers of a declaration of one micro-step.

    writes: (fixed part of B, whether its input is a quarter turn of the drive). keyed: every entry of the state has an
    input of its own. Raises Unprintable.
    """
    ((factors, _),) = still.steps
    log: Expr = ZERO
    angle: Expr = ZERO
    for n in factors:
        found = log_of(n.decay)
        if found is None:
            raise Unprintable("A is no exponential")
        log, angle = log + found, angle + n.angle
    read = split(still.read)
    straight, quarter = [ZERO, ZERO], [ZERO, ZERO]
    for fixed, turned in writes:
        into = quarter if turned else straight
        into[:] = [a + b for a, b in zip(into, split(fixed), strict=True)]
    logs = split(log)
    if not split.turned:
        return Numbers((logs[0], read[0], straight[0]), False)
    if logs[0] is not logs[1]:
        raise Unprintable("A differs within pairs of entries that something else takes as pairs")
    own = (logs[0], split(angle)[0], *read)
    if not keyed:
        return Numbers((*own, *straight), True)
    # u = (u0, u1) writes (f0 u0, f1 u1), its quarter turn (-u1, u0) writes (-g0 u1, g1 u0)
    return Numbers((*own, straight[0], quarter[1], -quarter[0], straight[1]), True)


class Doubles:
    """Prints expressions in float64, one line for every operation."""

    def __init__(self, names: Mapping[Expr, str]) -> None:
        self.text = dict(names)
        self.lines: list[str] = []

    def print(self, roots: Sequence[Expr]) -> list[str]:
        """The text of every root."""
        for node in children_first(*roots):
            if node not in self.text:
                self._add(node)
        return [self.text[x] for x in roots]

    def _add(self, node: Expr) -> None:
        if node.is_constant:
            self.text[node] = repr(node.value)
            return
        args = [self.text[x] for x in node.args]
        if node.op in SIGNS:
            text = f"{args[0]} {SIGNS[node.op]} {args[1]}"
        elif node.op == "rsqrt":
            text = f"1.0 / tl.sqrt({args[0]})"
        elif node.op == "pow":
            text = self._power(args[0], node.args[1].value)
        else:  # a number alone would be float32 there
            args = [f"zero + {x}" if a.is_constant else x for a, x in zip(node.args, args, strict=True)]
            text = f"{CALLS[node.op]}({', '.join(args)})"
        self.text[node] = name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")

    @staticmethod
    def _power(base: str, exponent: float) -> str:
        if exponent == int(exponent) and 1 <= abs(exponent) <= 8:
            product = " * ".join([base] * int(abs(exponent)))
            return product if exponent > 0 else f"1.0 / ({product})"
        return f"tl.sqrt({base})" if exponent == 0.5 else f"tl.exp({exponent!r} * tl.log({base}))"


class ParamsWriter:
    """Prints both functions of one declaration. kinds: of its inputs, by name."""

    def __init__(self, numbers: Numbers, kinds: Mapping[str, Kind]) -> None:
        self.numbers, self.kinds = numbers, kinds
        self.nodes = inputs_of(*numbers.roots)
        self.names = {x: f"{identifier(x.attrs[0])}_{x.attrs[1]}_" for x in self.nodes}
        self.fixed = tuple(self._fixed(name) for name in dict.fromkeys(x.attrs[0] for x in self.nodes))

    def _fixed(self, name: str) -> Fixed:
        kind = self.kinds[name]
        entries = 0 if KEY not in kind.axes else 2 if self.numbers.turned and not kind.pair else 1
        return Fixed(name, entries, VALUE in kind.axes)

    def _places(self) -> dict[str, int]:
        """Where a Param's address stands in `args`; its strides follow."""
        found, place = {}, 0
        for x in self.fixed:
            found[x.role] = place
            place += 2 + (x.entries > 0) + x.value
        return found

    def _loads(self) -> list[str]:
        places, by_name = self._places(), {x.role: x for x in self.fixed}
        lines = ["zero = k.to(tl.float64) * 0.0 + channel.to(tl.float64) * 0.0"]
        for node in self.nodes:
            name, half = node.attrs
            fixed, at = by_name[name], places[name]
            terms, masks = [f"args[{at}]", f"lane * args[{at + 1}]"], []
            if fixed.entries:
                terms.append(f"({self._entry(fixed, half)}) * args[{at + 2}]")
                masks.append("(k < K)")
            if fixed.value:
                terms.append(f"channel * args[{at + 2 + (fixed.entries > 0)}]")
                masks.append("(channel < P)")
            mask = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
            lines.append(f"{self.names[node]} = tl.load({' + '.join(terms)}{mask}).to(tl.float64)")
        return lines

    @staticmethod
    def _entry(fixed: Fixed, half: int) -> str:
        return f"2 * k + {half}" if fixed.entries == 2 else "k"

    def make(self) -> list[str]:
        """The function `numbers`."""
        printer = Doubles(self.names)
        texts = printer.print(self.numbers.roots)
        values = ", ".join(f"zero + {x}" for x in texts)
        body = ["lane, k, channel, K, P, _, _ = at", *self._loads(), *printer.lines, f"return {values}"]
        return ["def numbers(args, at):", *indented(body)]

    def pull(self) -> list[str]:
        """The function `pull_numbers`."""
        given = [Expr("input", (), (f".{i}", None), AXISLESS) for i in range(len(self.numbers.roots))]
        pairs = [(x, dx) for x, dx in zip(self.numbers.roots, given, strict=True) if x is not ZERO]
        slopes = derivatives(pairing(pairs), const(1), self.nodes)
        printer = Doubles({**self.names, **{x: f"slopes[{i}]" for i, x in enumerate(given)}})
        texts = dict(zip(self.nodes, printer.print(slopes), strict=True))
        body = [
            "lane, k, channel, K, P, H, row = at", "inside = (k < K) & (channel < P)", *self._loads(), *printer.lines,
        ]  # fmt: skip
        for place, fixed in enumerate(self.fixed):
            mine = [(x.attrs[1], texts[x]) for x in self.nodes if x.attrs[0] == fixed.role]
            body.append(f"if grads[{place}] is not None:")
            body += [f"    {line}" for line in self._stores(f"grads[{place}]", fixed, mine)]
        return ["def pull_numbers(args, grads, at, slopes):", *indented(body)]

    def _stores(self, pointer: str, fixed: Fixed, parts: Sequence[tuple[int, str]]) -> list[str]:
        """The lines that store a Param's gradient, summed over the axes that it lacks; `row`: of these channels."""
        if fixed.entries == 2 and len(parts) == 1:  # the other entry of a pair is not read
            parts = [*parts, (1 - parts[0][0], "0.0")]
        return [self._store(pointer, fixed, half, f"tl.where(inside, zero + {text}, 0.0)") for half, text in parts]

    def _store(self, pointer: str, fixed: Fixed, half: int, value: str) -> str:
        place, masks = "lane" if fixed.value else "(row * H + lane)", []
        if fixed.entries:
            place = f"({place} * {'(2 * K)' if fixed.entries == 2 else 'K'} + {self._entry(fixed, half)})"
            masks.append("(k < K)")
        if fixed.value:
            place = f"{place} * P + channel"
            masks.append("(channel < P)")
        if not masks:
            return f"tl.store({pointer} + {place}, tl.sum(tl.sum({value}, 1), 0))"
        for axis, kept in enumerate((fixed.entries, fixed.value)):
            value = value if kept else f"tl.sum({value}, {axis}, keep_dims=True)"
        return f"tl.store({pointer} + {place}, {value}, mask={' & '.join(masks)})"
