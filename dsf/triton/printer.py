"""Printing expressions as lines of Triton code, and the names in printed functions."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Iterable, Mapping, Sequence

from dsf.language.expr import KEY, REDUCTIONS, VALUE, Expr, children_first, const
from dsf.language.functions import exp, sum_key, sum_value
from dsf.language.operator import times

WIDTH = 60  # characters up to which an expression that is used once gets no line of its own
AT = "batch, head, t0, t, n, p, t_ok, n_ok, p_ok, place, edge, T, H, P, N = at"
SINK = "rows, shift = sink"
NAMES = ("dA", "dB", "dC", "dE", "dD")
BOTH = frozenset({KEY, VALUE})
# Names of functions, arguments and constants in printed files, which no input may have.
RESERVED = {
    *AT.replace(" = at", "").split(", "), *SINK.replace(" = sink", "").split(", "),
    "at", "args", "grads", "held", "sums", "tokens", "fn", "tile", "tl", "triton", "sink", "found", "keyed", "loose",
    "values", "setup", "load", "step", "zeros", "pull", "finish", "segment", "segments", "first", "NB", "BP", "rate",
    "kept", "total", "outer", "plain", "runs", "whole", "merge", "entry", "after", "puts", "blank", "L", "dA_A",
    "plain_back", "runs_back", "spread", "parted", "run", "lanes", "moved", "passed", "state", "places", "ok",
    "keys_at", "keys_added", "keys_stored", "dmix",
}  # fmt: skip
# Functions computed by a power of two, and the factor of their argument.
POWERS = {
    "exp": ("tl.exp2", "fn.LOG2E"),
    "sigmoid": ("fn.sigmoid2", "-fn.LOG2E"),
    "complement": ("fn.complement2", "-fn.LOG2E"),
    "tanh": ("fn.tanh2", "(2.0 * fn.LOG2E)"),
    "tanh_slope": ("fn.tanh_slope2", "(2.0 * fn.LOG2E)"),
}
ROUGH = {
    "fn.tanh": "fn.rough_tanh", "fn.tanh2": "fn.rough_tanh2", "fn.softplus": "fn.rough_softplus",
    "fn.logsigmoid": "fn.rough_logsigmoid",
}  # faster, accurate enough for 16-bit inputs  # fmt: skip
NEAR = {"fn.tanh": "fn.near_tanh", "fn.tanh2": "fn.near_tanh2"}  # with a small absolute error
FAR = 1e-20  # a sum with a larger constant is 0 or not denormal
ROUNDED = ("round_to", "rest_of")  # x rounded to the dtype of the tensor in their attribute; its rounding error
OPERATORS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def symbol(name: str, axes: frozenset[str]) -> Expr:
    """An input of printed code that is not an input of the recurrence."""
    return Expr("input", (), (name, None), axes)


COTANGENTS = [symbol(name, BOTH if name in ("dA", "dB", "dC") else frozenset({VALUE})) for name in NAMES]
STATE = symbol(".state", BOTH)  # before a token


class Printer:
    """Prints nodes as assignments and expressions.

    names: of the input nodes. taken: names that may not be used. rough: use ROUGH functions; near: nodes that then use
    NEAR ones. still: input nodes that are the same for all tokens. kinds: dtypes of tensors by role, for ROUNDED.
    """

    def __init__(
        self, names: Mapping[Expr, str], taken: Iterable[str], rough: bool = False, near: Collection[Expr] = (),
        still: Collection[Expr] = (), kinds: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.rough, self.near, self.still = rough, near, still
        self.kinds = kinds or {}
        self.text = dict(names)
        self.taken = {*taken, *names.values()}
        self.lines: list[str] = []
        self.squares: dict[Expr, Expr] = {}  # e^2x or e^2x - 1 -> the e^x that is computed anyway
        self.scaled: set[Expr] = set()  # products printed inside a function of POWERS
        self.count = 0

    def print(self, roots: Iterable[Expr]) -> list[str]:
        """The text of every root; shared and long parts become lines in `lines`."""
        roots = list(roots)
        order = children_first(*roots)
        uses: dict[Expr, int] = {}
        scales: dict[Expr, set[str]] = {}  # factors by which users multiply it, "" for none
        for node in order:
            for place, arg in enumerate(node.args):
                twice = node.op == "pow" and place == 0
                uses[arg] = uses.get(arg, 0) + 1 + twice
                scales.setdefault(arg, set()).add(POWERS[node.op][1] if node.op in POWERS else "")
        self.squares = {x: root for x in order if (root := _root(x)) is not x and root in uses}
        powers = {x for x, found in scales.items() if len(found) == 1 and "" not in found} - {*roots, *self.text}
        self.scaled |= {x for x in powers - {x.args[0] for x in self.squares} if key_and_rest(x)}
        for root in self.squares.values():
            uses[root] += 1
        for node in order:
            self._add(node, uses)
        return [f"tl.full((1, 1, 1), {self.text[r]}, tl.float32)" if not r.args and r.op != "input" else self.text[r]
                for r in roots]  # fmt: skip

    def _add(self, node: Expr, uses: Mapping[Expr, int]) -> None:
        """Print a node, as a line of its own where it is shared or long."""
        if node in self.text or node in self.scaled:
            return
        if node in self.squares:
            self._add(self.squares[node], uses)
        text = self._expression(node)
        if node.args and (uses.get(node, 0) > 1 or (len(text) > WIDTH and node in uses)):
            name = self._fresh()
            self.lines.append(f"{name} = {text}")
            text = name
        self.text[node] = text

    def _fresh(self) -> str:
        while True:
            self.count += 1
            if (name := f"v{self.count}") not in self.taken:
                return name

    def _expression(self, node: Expr) -> str:
        if node.op == "const":
            return repr(node.value)
        if node.op == "size":
            return "tl.full((1, 1, 1), N, tl.float32)" if node.attrs[0] == KEY else "(P * 1.0)"
        if node.op in POWERS and node.args[0] in self.scaled and (parts := key_and_rest(node.args[0])):
            function, scale = POWERS[node.op]
            key, rest = (self.text[x] for x in parts)
            if parts[0] in self.still:  # multiplied once for all tokens; rest is needed unscaled, too
                return f"{self._rough(function, node)}(({key} * {scale}) * {rest})"
            return f"{self._rough(function, node)}({key} * ({rest} * {scale}))"
        args = [self.text[a] for a in node.args]
        if node in self.squares:
            root = self.text[self.squares[node]]
            return f"fn.expm1_of({args[0]}, {root})" if node.op == "expm1" else f"({root} * {root})"
        if node.op == "pow":
            return _power(args[0], args[1], node.args[1])
        if node.op == "div" and (node.args[1].op == "sqrt" or (self.rough and _is_far(node.args[1]))):
            # a square root is neither denormal nor too large for it
            return f"({args[0]} * fn.reciprocal({args[1]}))"
        if node.op in OPERATORS:
            return f"({args[0]} {OPERATORS[node.op]} {args[1]})"
        if node.op == "where":
            return f"tl.where({', '.join(args)})"
        if node.op in ROUNDED:
            return f"fn.{node.op}({args[0]}, {self.kinds[node.attrs[0]]})"
        if node.op in REDUCTIONS:
            mask = "n_ok" if node.op == "sum_key" else "p_ok"
            return f"tile.{node.op}({args[0]}, {mask})"
        return f"{self._rough(f'fn.{node.op}', node)}({', '.join(args)})"

    def _rough(self, function: str, node: Expr) -> str:
        return ((NEAR if node in self.near else {}) or ROUGH).get(function, function) if self.rough else function


def _root(node: Expr) -> Expr:
    """e^x for a node e^2x or e^2x - 1; the node itself for others."""
    if node.op in ("exp", "expm1") and node.args[0].op == "mul":
        for number, x in (node.args[0].args, node.args[0].args[::-1]):
            if number.is_constant and number.value == 2:
                return exp(x)
    return node


def _is_far(node: Expr) -> bool:
    """True for a value that is 0 or not denormal, so that its fast reciprocal is right (0 beyond 2^126)."""
    return node.op == "add" and any(x.is_constant and abs(x.value) > FAR for x in node.args)


def key_and_rest(node: Expr) -> tuple[Expr, Expr] | None:
    """(factor with a Key axis, factor without) of a product of two such factors; None for other nodes."""
    if node.op != "mul" or (KEY in node.args[0].axes) == (KEY in node.args[1].axes):
        return None
    first, second = node.args
    return (first, second) if KEY in first.axes else (second, first)


def _power(base: str, exponent: str, node: Expr) -> str:
    if not node.is_constant:
        return f"fn.power({base}, {exponent})"
    value = node.value
    if value == int(value) and 1 <= abs(value) <= 8:
        product = " * ".join([base] * int(abs(value)))
        return f"({product})" if value > 0 else f"(1.0 / ({product}))"
    if value == 0.5:
        return f"fn.sqrt({base})"
    return f"fn.exp({exponent} * fn.log({base}))"


def pairing(pairs: Iterable[tuple[Expr, Expr]]) -> Expr:
    """Σ ⟨x, dx⟩ over the pairs, each product summed over its axes."""
    total = const(0)
    for x, dx in pairs:
        if x.is_constant:
            continue
        product = times(x, dx)
        if KEY in product.axes:
            product = sum_key(product)
        if VALUE in product.axes:
            product = sum_value(product)
        total = total + product
    return total


def name_of(node: Expr) -> str:
    """An input's name in printed files."""
    name, step = node.attrs
    text = name if step is None else f"{name}_{step}"
    clash = text in RESERVED or keyword.iskeyword(text) or (text[:1] == "v" and text[1:].isdigit())
    clash = clash or text in (*NAMES, "A_", "B_", "C_", "E_", "D_") or text.startswith(("held", "dmix"))
    return f"{text}__" if clash else identifier(text)


def identifier(text: str) -> str:
    """The text as an identifier, with underscores for other characters."""
    return "".join(c if c.isalnum() or c == "_" else "_" for c in text)


def as_comment(text: str) -> str:
    """The text, safe inside a docstring."""
    return text.replace("\\", "/").replace('"""', "'''")


def grouped(values: Sequence[str]) -> str:
    """The text of a tuple."""
    return f"({', '.join(values)},)" if values else "()"


def unpacked(names: Sequence[str], source: str) -> str:
    """One line that assigns the members of a tuple to names."""
    return "; ".join(f"{name} = {source}[{i}]" for i, name in enumerate(names))


def indented(lines: Iterable[str]) -> list[str]:
    """The lines of a function's body."""
    return [f"    {line}" for line in lines]
