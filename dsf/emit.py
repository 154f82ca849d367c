"""Printing: a Spec's expressions and their derivatives as Triton source, the holes of the fused scan.

The text is written to a file named by its content (`DSF_CACHE_DIR`, else the user's cache directory), because Triton
reads the source of what it compiles; the file is also what a person reads: it carries the spec's own names.
"""

from __future__ import annotations

import hashlib
import importlib.util
import keyword
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

from dsf.annotations import Kind
from dsf.coefficients import masked, packed
from dsf.emit_cache import write
from dsf.emit_operand import Initial, Operand
from dsf.expr import KEY, REDUCTIONS, VALUE, Expr, children_first, const, inputs_of, substitute
from dsf.hoist import parts
from dsf.operator import times
from dsf.primitives import derivatives, exp, sum_key, sum_value
from dsf.regroup import collect, regroup
from dsf.spec import Input, Spec

WIDTH = 60  # characters up to which an expression used once is written inside its user
AT = "batch, head, t0, t, n, p, t_ok, n_ok, p_ok, place, edge, T, H, P, N = at"
RESERVED = {*AT.replace(" = at", "").split(", "), "at", "args", "grads", "held", "sums", "tokens", "fn", "tl", "triton"}
SINK = "rows, shift = sink"
RESERVED |= {*SINK.replace(" = sink", "").split(", "), "sink", "found", "keyed", "loose", "values"}
RESERVED |= {"setup", "load", "step", "zeros", "pull", "finish", "segment", "segments", "first", "NB", "BP"}
RESERVED |= {"rate", "kept", "total", "outer", "plain", "runs", "whole", "merge", "entry", "after", "puts", "keys"}
RESERVED |= {"blank", "L", "dA_A", "plain_back", "runs_back", "whole_back"}
VALID = "valid_tokens"
STARTS, INITIAL = ".starts", ".initial"  # packed sequences: which one begins at a token, and in which state
BOTH = frozenset({KEY, VALUE})
NAMES = ("dA", "dB", "dC", "dE", "dD")
COMPARISONS = ("gt", "ge", "lt", "le")
# Functions made of a power of two, and what their argument is multiplied with first.
POWERS = {
    "exp": ("tl.exp2", "fn.LOG2E"),
    "sigmoid": ("fn.sigmoid2", "-fn.LOG2E"),
    "tanh": ("fn.tanh2", "(2.0 * fn.LOG2E)"),
}
ROUGH = {"fn.tanh": "fn.rough_tanh", "fn.tanh2": "fn.rough_tanh2"}  # where 16-bit inputs say less than float32
OPERATORS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def symbol(name: str, axes: frozenset[str]) -> Expr:
    """An input of generated code that is no input of the recurrence."""
    return Expr("input", (), (name, None), axes)


COTANGENTS = [symbol(name, BOTH if name in ("dA", "dB", "dC") else frozenset({VALUE})) for name in NAMES]


class Printer:
    """Prints nodes as assignments and expressions. names: what each input node is called; rough: ROUGH functions."""

    def __init__(self, names: Mapping[Expr, str], taken: Iterable[str], rough: bool = False) -> None:
        self.rough = rough
        self.text = dict(names)
        self.taken = {*taken, *names.values()}
        self.lines: list[str] = []
        self.squares: dict[Expr, Expr] = {}  # e^2x - 1 and the e^x that is there anyway
        self.scaled: set[Expr] = set()  # products whose factors are printed inside a function of a power of two
        self.count = 0

    def print(self, roots: Iterable[Expr]) -> list[str]:
        """The text of every root; shared and long parts become lines before it."""
        roots = list(roots)
        order = children_first(*roots)
        uses: dict[Expr, int] = {}
        for node in order:
            for place, arg in enumerate(node.args):
                twice = node.op == "pow" and place == 0
                uses[arg] = uses.get(arg, 0) + 1 + twice
        powers = {x.args[0] for x in order if x.op in POWERS and uses[x.args[0]] == 1} - {*roots, *self.text}
        self.scaled |= {x for x in powers if _key_and_rest(x)}
        self.squares = {x: root for x in order if (root := _root(x)) is not x and root in uses}
        for root in self.squares.values():
            uses[root] += 1
        for node in order:
            self._add(node, uses)
        return [f"tl.full((1, 1, 1), {self.text[r]}, tl.float32)" if not r.args and r.op != "input" else self.text[r]
                for r in roots]  # fmt: skip

    def _add(self, node: Expr, uses: Mapping[Expr, int]) -> None:
        """A node's text, as a line of its own where it is shared or long."""
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
        if node.op in POWERS and node.args[0] in self.scaled and (parts := _key_and_rest(node.args[0])):
            function, scale = POWERS[node.op]
            return f"{self._rough(function)}({self.text[parts[0]]} * ({self.text[parts[1]]} * {scale}))"
        args = [self.text[a] for a in node.args]
        if node in self.squares:
            return f"fn.expm1_of({args[0]}, {self.text[self.squares[node]]})"
        if node.op == "pow":
            return _power(args[0], args[1], node.args[1])
        if node.op == "div" and node.args[1].op == "sqrt":  # too small and too large numbers have none like these
            return f"({args[0]} * fn.reciprocal({args[1]}))"
        if node.op in OPERATORS:
            return f"({args[0]} {OPERATORS[node.op]} {args[1]})"
        if node.op == "where":
            return f"tl.where({', '.join(args)})"
        if node.op in REDUCTIONS:
            mask = "n_ok" if node.op == "sum_key" else "p_ok"
            return f"fn.{node.op}({args[0]}, {mask})"
        return f"{self._rough(f'fn.{node.op}')}({', '.join(args)})"

    def _rough(self, function: str) -> str:
        return ROUGH.get(function, function) if self.rough else function


def _root(node: Expr) -> Expr:
    """e^x of e^2x - 1; the node itself if it is not that."""
    if node.op == "expm1" and node.args[0].op == "mul":
        for number, x in (node.args[0].args, node.args[0].args[::-1]):
            if number.is_constant and number.value == 2:
                return exp(x)
    return node


def _key_and_rest(node: Expr) -> tuple[Expr, Expr] | None:
    """The factors of a product of one along the Key axis and one that is the same for all of it, if it is that."""
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


@dataclass(frozen=True)
class Source:
    """Generated source of one spec, and how its kernels are called.

    sums: what it sums for Params' gradients, `keyed` of them along the Key axis. separable: no entry's gradients wait
    for another's, so that a program may take one entry after the other. cheap: no entry of a channel needs a function.
    """

    name: str
    text: str
    operands: tuple[Operand, ...]
    sums: int = 1
    separable: bool = False
    cheap: bool = False
    keyed: int = 0

    @cached_property
    def digest(self) -> str:
        """Names the text by its content."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def module(self) -> ModuleType:
        """The file on disk, imported (once a process)."""
        name = f"dsf_generated_{self.digest}"
        if name not in sys.modules:
            path = write(self)
            found = importlib.util.spec_from_file_location(name, path)
            assert found is not None and found.loader is not None
            module = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
            sys.modules[name] = module
        return sys.modules[name]


def file_of(about: Sequence[str], functions: Iterable[Sequence[str]]) -> str:
    """A printed file: the lines of what it says of itself, what it imports, and its functions."""
    head = ['"""' + about[0], *about[1:], '"""', "", "import triton", "import triton.language as tl", ""]
    head += ["from dsf.kernels.triton import functions as fn", ""]
    return "\n".join(head) + "".join("\n\n@triton.jit\n" + "\n".join(x) + "\n" for x in functions)


def emit(spec: Spec, tokens: str = "", rough: bool = False) -> Source:
    """The holes of the fused scan for an elementwise spec.

    tokens: "masked": one more operand, the Scalar VALID, is 0 for tokens that leave the state as it is (padding);
    "packed": the Scalar STARTS is a sequence's number, from 1, at its first token, else 0; "continued": so, and
    INITIAL is the states in which the sequences begin. rough: for 16-bit inputs, with functions that err by less than
    their last bit.
    """
    return _Emission(spec, tokens, rough).source()


class _Emission:
    """One spec on its way to source."""

    def __init__(self, spec: Spec, tokens: str, rough: bool) -> None:
        self.spec = spec
        self.rough = rough
        self.kinds = {i.name: i.kind for i in spec.inputs}
        self.made = parts(spec).made
        inputs = (*spec.inputs, *(Input(x.attrs[0], Kind(x.axes)) for x in self.made))
        self.kinds |= {i.name: i.kind for i in inputs[len(spec.inputs) :]}
        whole = parts(spec).left
        added: list[Expr] = []
        if tokens == "masked":
            added = [symbol(VALID, frozenset())]
            whole = masked(whole, *added)
        elif tokens:
            added = [symbol(STARTS, frozenset())]
            if tokens == "continued":
                added.append(symbol(INITIAL, BOTH if spec.has_key else frozenset({VALUE})))
            whole = packed(whole, spec.system.read == "before", *added)
        inputs = (*inputs, *(Input(x.attrs[0], Kind(x.axes)) for x in added))
        self.kinds |= {x.attrs[0]: Kind(x.axes) for x in added}
        nodes = inputs_of(*whole.roots)
        self.tokens = sorted(
            (x for x in nodes if self.kinds[x.attrs[0]].time),
            key=lambda x: (x.attrs[0] != STARTS, KEY in x.axes, (VALUE in x.axes) == (KEY in x.axes)),
        )
        self.params = [x for x in nodes if not self.kinds[x.attrs[0]].time]
        self.names = {x: _name(x) for x in nodes}
        self.invariants = self._invariants(whole.roots)
        self.held = {x: symbol(self._held_name(i, x), x.axes) for i, x in enumerate(self.invariants)}
        self.roots = tuple(substitute(r, self.held) for r in whole.roots)
        self.operands = self._operands(inputs)

    def _held_name(self, index: int, node: Expr) -> str:
        return self.names[node] if node.op == "input" else f"held{index}"

    def _invariants(self, roots: tuple[Expr, ...]) -> list[Expr]:
        """The largest expressions of Params alone, computed once a program."""
        order = children_first(*roots)
        tokens, params = set(self.tokens), set(self.params)
        varies = {x: x in tokens for x in order}
        bound = {x: x in params for x in order}
        for x in order:
            varies[x] |= any(varies[a] for a in x.args) or x.op in COMPARISONS  # truth values are not held
            bound[x] |= any(bound[a] for a in x.args)
        fixed = {x for x in order if bound[x] and not varies[x]}
        used = {a for x in order if varies[x] for a in x.args} | set(roots)
        return [x for x in order if x in fixed and x in used]

    def _operands(self, inputs: tuple[Input, ...]) -> dict[Expr, Operand]:
        found: dict[Expr, Operand] = {}
        place, index = 0, 1  # grads[0] is the batch size
        for node in sorted(self.names, key=lambda x: (_order(inputs, x), x.attrs[1] or 0)):
            kind = self.kinds[node.attrs[0]]
            operand = Operand(node.attrs[0], kind.time, kind.axes, node.attrs[1], place, index)
            if operand.name == INITIAL:
                number = self.names[symbol(STARTS, frozenset())]
                operand = Initial(operand.name, True, kind.axes, None, place, index, number)
            found[node] = operand
            place, index = place + 1 + operand.strides, index + 1
        return found

    def source(self) -> Source:
        """The whole file."""
        about = [
            _comment(str(self.spec)),
            *(f"  {name.attrs[0]} = {x}, from a kernel before this one" for name, x in self.made.items()),
            "",
            "Printed by dsf from the declaration above; read by dsf.kernels.triton.scan. v1, v2, … are shared parts,",
            "dX is the gradient of X, and what depends on Params alone is held.",
        ]
        parts = [
            self._setup(),
            self._load(),
            *(self._apart() if self.spec.has_key and self._separable() else []),
            self._step(),
            *self._products(),
            self._zeros(),
            self._pull(),
            self._finish(),
            *self._entries(),
        ]
        operands, keyed = tuple(self.operands.values()), sum(KEY in x.axes for x in self.held.values())
        name, text = _identifier(self.spec.name), file_of(about, parts)
        return Source(name, text, operands, len(self.held), self._separable(), self._cheap(), keyed)

    def _entries(self) -> list[list[str]]:
        """What an adjoint reads that takes one state entry after the other."""
        from dsf.emit_entries import Entries  # which prints as this module does

        if not self.spec.has_key or not self._separable():
            return []
        held, scope = list(self.held.values()), self._scope()
        return Entries(self.tokens, held, self.slopes, self.operands, scope, self.roots[0], self.rough).functions()

    def _separable(self) -> bool:
        """True when nothing sums over the Key axis but the readout and the gradients of what has no Key axis.

        A Param without a Key axis inside one with it would need all entries' sums at once when it is finished.
        """
        if any(x.op in REDUCTIONS for x in children_first(*self.roots, *self.invariants)):
            return False
        mixed = [x for x in self.invariants if KEY in x.axes]
        return all(KEY in x.axes for x in inputs_of(*mixed))

    def _cheap(self) -> bool:
        entries = [x for x in children_first(*self.roots) if x.axes == BOTH]
        return all(x.op in OPERATORS or x.op in ("input", "where", "abs", "minimum", "maximum") for x in entries)

    def _setup(self) -> list[str]:
        printer = Printer(self.names, RESERVED)
        values = printer.print(self.invariants)
        return ["def setup(args, at):", *_body([AT, *self._loads(self.params), *printer.lines, _tuple(values)])]

    def _load(self) -> list[str]:
        names = [self.names[x] for x in self.tokens]
        return ["def load(args, at):", *_body([AT, *self._loads(self.tokens), _tuple(names)])]

    def _apart(self) -> list[list[str]]:
        """`load` in three: what has no Key axis, L tokens of what has no other, and what has both."""
        plain = [x for x in self.tokens if KEY not in x.axes]
        runs = [x for x in self.tokens if x.axes == {KEY}]
        whole = [x for x in self.tokens if x.axes == BOTH]
        loads = [f"{self.names[x]} = {self.operands[x].load_run()}" for x in runs]
        given = [_assign([self.names[x] for x in plain], "tokens")] if plain else []
        bodies = {
            "plain(args, at)": [*self._loads(plain), _group([self.names[x] for x in plain])],
            "runs(args, at, L: tl.constexpr)": [*loads, _group([self.names[x] for x in runs])],
            "ahead(args, at, L: tl.constexpr, BP: tl.constexpr)": [
                *(self.operands[x].prefetch() for x in self.tokens if len(x.axes) == 1),
                "pass",
            ],
            "whole(args, tokens, at)": [*given, *self._loads(whole), _group([self.names[x] for x in whole])],
        }
        return [[f"def {head}:", *_body([AT, *body])] for head, body in bodies.items()]

    def _loads(self, nodes: list[Expr]) -> list[str]:
        return [f"{self.names[x]} = {self.operands[x].load()}" for x in nodes]

    def _scope(self) -> dict[Expr, str]:
        """Names inside step and pull."""
        return {x: self.names[x] for x in self.tokens} | {s: s.attrs[0] for s in self.held.values()}

    def _unpack(self, tokens: list[Expr] | None = None) -> list[str]:
        found = [self.names[x] for x in (self.tokens if tokens is None else tokens)]
        lines = [AT, *([_assign(found, "tokens")] if found else [])]
        if self.held:
            lines.append(_assign([s.attrs[0] for s in self.held.values()], "held"))
        return lines

    def _step(self) -> list[str]:
        printer = Printer(self._scope(), RESERVED, self.rough)
        values = printer.print(self.roots)
        names = ["A", "B", "C", "E", "D"]
        if self.roots[4].is_constant and self.roots[4].value == 0:  # adding it costs nothing, unlike +0
            values[4] = "tl.zeros((1, 1, 1), tl.float32) * -1.0"
        lines = [f"{name}_ = {value}" for name, value in zip(names, values, strict=True)]
        body = [*self._unpack(), *printer.lines, *lines, _tuple([f"{n}_" for n in names])]
        return ["def step(tokens, held, at):", *_body(body)]

    def _products(self) -> list[list[str]]:
        """Where A = exp(r w), r of tokens without a Key axis and w of Params: products of A from sums of r."""
        decay = self.roots[0]
        parts = _key_and_rest(decay.args[0]) if decay.op == "exp" else None
        if parts is None or set(inputs_of(parts[0])) & set(self.tokens):
            return []
        printer = Printer(self._scope(), RESERVED)
        (value,) = printer.print([parts[1]])
        given = self._unpack([x for x in self.tokens if KEY not in x.axes])
        rate = ["def rate(tokens, held, at):", *_body([*given, *printer.lines, f"return {value} * fn.LOG2E"])]
        printer = Printer(self._scope(), RESERVED)
        (value,) = printer.print([parts[0]])
        names = _assign([s.attrs[0] for s in self.held.values()], "held")
        kept = ["def kept(total, held):", *_body([names, *printer.lines, f"return tl.exp2({value} * total)"])]
        return [rate, kept]

    def _zeros(self) -> list[str]:
        shapes = ["(1, NB, BP)" if KEY in s.axes else "(1, 1, BP)" for s in self.held.values()] or ["(1, 1, 1)"]
        values = [f"tl.zeros({shape}, tl.float32)" for shape in shapes]
        return ["def zeros(NB: tl.constexpr, BP: tl.constexpr):", *_body([_tuple(values)])]

    @cached_property
    def slopes(self) -> list[Expr]:
        """The gradients of tokens, then of what is held, made of the coefficients' cotangents."""
        total = _total(zip(self.roots, COTANGENTS, strict=True))
        found = derivatives(total, const(1), [*self.tokens, *self.held.values()], late=VALUE)
        return regroup([collect(x) for x in found])

    def _over_channels(self) -> list[bool]:
        """Which gradients of what is held are sums over channels: these are left for the end."""
        return [x.op == "sum_value" for x in self.slopes[len(self.tokens) :]]

    def _pull(self) -> list[str]:
        scope = {**self._scope(), **{c: c.attrs[0] for c in COTANGENTS}}
        printer = Printer(scope, {*RESERVED, *NAMES}, self.rough)
        late = [x.axes == {KEY} and slope.op == "sum_value" for x, slope in zip(self.tokens, self.slopes, strict=False)]
        late += self._over_channels()
        values = printer.print(x.args[0] if open_ else x for x, open_ in zip(self.slopes, late, strict=True))
        stores = ["first = p == edge"]
        for node, value, summed in zip(self.tokens, values, late, strict=False):
            stores += self.operands[node].store(value, summed)
        added = [f"sums[{i}] + fn.sum_time({v}, n)" for i, v in enumerate(values[len(self.tokens) :])] or ["sums[0]"]
        body = [*self._unpack(), SINK, *printer.lines, *stores, _tuple(added)]
        return ["def pull(tokens, held, sums, grads, dA, dB, dC, dE, dD, at, sink):", *_body(body)]

    def _finish(self) -> list[str]:
        given = [symbol(f"dheld{i}", x.axes) for i, x in enumerate(self.invariants)]
        slopes = derivatives(_total(zip(self.invariants, given, strict=True)), const(1), self.params)
        sums = [f"fn.sum_value(sums[{i}], p_ok)" if x else f"sums[{i}]" for i, x in enumerate(self._over_channels())]
        scope = {x: self.names[x] for x in self.params} | dict(zip(given, sums, strict=True))
        printer = Printer(scope, RESERVED)
        values = printer.print(slopes)
        stores = ["first = p == edge"]
        for node, value in zip(self.params, values, strict=True):
            stores += self.operands[node].store(value)
        body = [AT, *self._loads(self.params), *printer.lines, *(stores if self.params else ["pass"])]
        return ["def finish(args, grads, sums, segment, segments, at):", *_body(body)]


def _total(pairs: Iterable[tuple[Expr, Expr]]) -> Expr:
    """Σ ⟨x, dx⟩ over the pairs, each summed over the axes it has."""
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


def _order(inputs: tuple[Input, ...], node: Expr) -> int:
    return [i.name for i in inputs].index(node.attrs[0])


def _name(node: Expr) -> str:
    name, step = node.attrs
    text = name if step is None else f"{name}_{step}"
    clash = text in RESERVED or keyword.iskeyword(text) or (text[:1] == "v" and text[1:].isdigit())
    clash = clash or text in (*NAMES, "A_", "B_", "C_", "E_", "D_") or text.startswith("held")
    return f"{text}__" if clash else _identifier(text)


def _identifier(text: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else "_" for c in text)


def _comment(text: str) -> str:
    return text.replace("\\", "/").replace('"""', "'''")


def _tuple(values: list[str]) -> str:
    return f"return ({', '.join(values)},)" if values else "return (tl.zeros((1, 1, 1), tl.float32),)"


def _group(values: list[str]) -> str:
    return f"return ({', '.join(values)},)" if values else "return ()"


def _assign(names: list[str], source: str) -> str:
    return "; ".join(f"{name} = {source}[{i}]" for i, name in enumerate(names))


def _body(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
