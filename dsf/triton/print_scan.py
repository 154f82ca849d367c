"""Printing the holes of the fused scan: a Spec's expressions and their derivatives as Triton source.

The text goes to a file named by its content (in `DSF_CACHE_DIR`, else the user's cache directory), because Triton reads
the source of what it compiles. It uses the spec's own names, so that people can read it, too.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from dsf.language.annotations import Input, Kind
from dsf.language.expr import KEY, REDUCTIONS, VALUE, Expr, children_first, const, inputs_of, substitute
from dsf.language.functions import complement, exp, tanh_slope
from dsf.language.primitives import derivatives
from dsf.language.spec import Spec
from dsf.triton.coefficients import masked, packed
from dsf.triton.hoist import parts
from dsf.triton.print_entries import Entries
from dsf.triton.print_operand import Initial, Operand
from dsf.triton.printer import (
    AT,
    BOTH,
    COTANGENTS,
    NAMES,
    OPERATORS,
    RESERVED,
    SINK,
    STATE,
    Printer,
    as_comment,
    identifier,
    indented,
    key_and_rest,
    name_of,
    pairing,
    symbol,
    unpacked,
)
from dsf.triton.regroup import collect, inward, regroup
from dsf.triton.source import Source, file_of
from dsf.triton.update import Update, update

VALID = "valid_tokens"
STARTS, INITIAL = ".starts", ".initial"  # packed: number of the sequence that begins at a token; its initial state
COMPARISONS = ("gt", "ge", "lt", "le")
SINGLE = ("exp", "log", "sqrt", "rsqrt", "pow")  # one instruction of the special function unit; others take two


def emit(spec: Spec, tokens: str = "", rough: bool = False) -> Source:
    """The holes of the fused scan for a spec.

    tokens: "masked": one more operand, the Scalar VALID, is 0 for padding tokens, which leave the state unchanged;
    "packed": the Scalar STARTS is a sequence's number, from 1, at its first token, else 0; "continued": also the
    operand INITIAL, the sequences' initial states. rough: for 16-bit inputs, with faster functions whose error is below
    the inputs' last bit.
    """
    return _Emission(spec, tokens, rough).source()


class _Emission:
    """Prints the source of one spec."""

    def __init__(self, spec: Spec, tokens: str, rough: bool) -> None:
        self.spec = spec
        self.rough = rough
        self.kinds = {i.name: i.kind for i in spec.inputs}
        self.made = parts(spec).made
        inputs = (*spec.inputs, *(Input(x.attrs[0], Kind(x.axes)) for x in self.made))
        self.kinds |= {i.name: i.kind for i in inputs[len(spec.inputs) :]}
        whole = parts(spec).left
        added: list[Expr] = []
        self.starts = symbol(STARTS, frozenset()) if tokens in ("packed", "continued") else None
        if tokens == "masked":
            added = [symbol(VALID, frozenset())]
            whole = masked(whole, *added)
        elif self.starts is not None:
            given = [symbol(INITIAL, BOTH if spec.has_key else frozenset({VALUE}))] if tokens == "continued" else []
            whole = packed(whole, spec.system.read == "before", *given)
            added = [self.starts, *given]
        inputs = (*inputs, *(Input(x.attrs[0], Kind(x.axes)) for x in added))
        self.kinds |= {x.attrs[0]: Kind(x.axes) for x in added}
        roots = (inward(whole.A), *whole.roots[1:])
        self.angles = len(whole.angle)
        nodes = [*inputs_of(*roots), *([] if self.starts is None else [self.starts])]
        self.tokens = sorted(
            (x for x in nodes if self.kinds[x.attrs[0]].time),
            key=lambda x: (x.attrs[0] != STARTS, KEY in x.axes, (VALUE in x.axes) == (KEY in x.axes)),
        )
        self.params = [x for x in nodes if not self.kinds[x.attrs[0]].time]
        self.names = {x: name_of(x) for x in nodes}
        self.invariants = self._invariants(roots)
        self.held = {
            x: symbol(self.names[x] if x.op == "input" else f"held{i}", x.axes) for i, x in enumerate(self.invariants)
        }
        self.roots = tuple(substitute(r, self.held) for r in roots)
        self.operands = self._operands(inputs)

    def _invariants(self, roots: tuple[Expr, ...]) -> list[Expr]:
        """The largest expressions that depend on Params alone; computed once a program."""
        order = children_first(*roots)
        tokens, params = set(self.tokens), set(self.params)
        varies = {x: x in tokens for x in order}
        bound = {x: x in params for x in order}
        for x in order:
            varies[x] |= any(varies[a] for a in x.args) or x.op in COMPARISONS  # booleans are not held
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
            as_comment(str(self.spec)),
            *(f"  {name.attrs[0]} = {x}, from a kernel before this one" for name, x in self.made.items()),
            "",
            "Printed by dsf from the declaration above; read by dsf.kernels.triton.scan. v1, v2, … are shared parts,",
            "dX is the gradient of X, and what depends on Params alone is held.",
        ]
        parts = [
            self._setup(),
            self._load(),
            self._step(),
            *self._mixing(),
            *self._fresh(),
            *self._products(),
            self._zeros(),
            self._pull(),
            self._finish(),
            *self._entries(),
        ]
        operands, keyed = tuple(self.operands.values()), sum(KEY in x.axes for x in self.held.values())
        name, text = identifier(self.spec.name), file_of(about, parts)
        return Source(name, text, operands, len(self.held), self._separable, self._special(), keyed)

    def _entries(self) -> list[list[str]]:
        """The holes of kernels that process one state entry after the other."""
        if not self.spec.has_key or not self._separable:
            return []
        held, scope, found = list(self.held.values()), self._scope(), self.motion
        slopes = self.slopes
        if found.factor is not None:
            slopes = self._slopes([(found.after, COTANGENTS[1]), *self._pairs()[2:]], [found.factor])
        return Entries(
            self.tokens, held, slopes, self.operands, scope, self.roots[0], self.made, self.rough, self.near, found
        ).functions()  # fmt: skip

    @cached_property
    def motion(self) -> Update:
        """A token's update of an entry's state, in kernels that process one entry after the other."""
        return update(self.roots[0], self.roots[1], STATE, COTANGENTS[1])

    @cached_property
    def near(self) -> set[Expr]:
        """Decays that are exactly a tanh which is used nowhere else.

        They are printed as a function with a small absolute error; other tanh's have a small relative error.
        """
        found, stack = set(), [self.roots[0]]
        while stack:
            x = stack.pop()
            if x.op == "tanh":
                found.add(x)
            elif x.op == "where":
                stack += x.args[1:]
        return found - set(children_first(*self.roots[1:]))

    @cached_property
    def _separable(self) -> bool:
        """True where the only sums over the Key axis are the readout and gradients of nodes without a Key axis.

        False also for a held expression with a Key axis that has a Param without one: its gradient would need the sums
        of all entries at once.
        """
        if self.mixes or any(x.op in REDUCTIONS for x in children_first(*self.roots, *self.invariants)):
            return False
        mixed = [x for x in self.invariants if KEY in x.axes]
        return all(KEY in x.axes for x in inputs_of(*mixed))

    def _special(self) -> int:
        entries = [x for x in children_first(*self.roots) if x.axes == BOTH]
        found = [x.op for x in entries if x.op not in {*OPERATORS, "input", "where", "abs", "minimum", "maximum"}]
        return sum(1 if op in SINGLE else 2 for op in found)

    def _setup(self) -> list[str]:
        printer = Printer(self.names, RESERVED)
        values = printer.print(self.invariants)
        return ["def setup(args, at):", *indented([AT, *self._loads(self.params), *printer.lines, _tuple(values)])]

    def _load(self) -> list[str]:
        names = [self.names[x] for x in self.tokens]
        return ["def load(args, at):", *indented([AT, *self._loads(self.tokens), _tuple(names)])]

    def _loads(self, nodes: list[Expr]) -> list[str]:
        return [f"{self.names[x]} = {self.operands[x].load()}" for x in nodes]

    def _scope(self) -> dict[Expr, str]:
        """Names of nodes inside step and pull."""
        return {x: self.names[x] for x in self.tokens} | {s: s.attrs[0] for s in self.held.values()}

    def _unpack(self, tokens: list[Expr] | None = None) -> list[str]:
        found = [self.names[x] for x in (self.tokens if tokens is None else tokens)]
        lines = [AT, *([unpacked(found, "tokens")] if found else [])]
        if self.held:
            lines.append(unpacked([s.attrs[0] for s in self.held.values()], "held"))
        return lines

    def _step(self) -> list[str]:
        printer = Printer(self._scope(), RESERVED, self.rough, self.near, self.held.values())
        values = printer.print(self.roots[:5])
        names = ["A", "B", "C", "E", "D"]
        if self.roots[4].is_constant and self.roots[4].value == 0:  # the compiler drops the addition of -0, not of +0
            values[4] = "tl.zeros((1, 1, 1), tl.float32) * -1.0"
        lines = [f"{name}_ = {value}" for name, value in zip(names, values, strict=True)]
        body = [*self._unpack(), *printer.lines, *lines, _tuple([f"{n}_" for n in names])]
        return ["def step(tokens, held, at):", *indented(body)]

    @property
    def mixes(self) -> bool:
        """True where the entries of a channel are mixed."""
        return len(self.roots) > 5

    def _mixing(self) -> list[list[str]]:
        """What mixes a channel's entries: cosines and sines, and the vectors of corrections."""
        found = []
        for name, roots in (("angle", self.roots[5 : 5 + self.angles]), ("low", self.roots[5 + self.angles :])):
            if roots:
                printer = Printer(self._scope(), RESERVED, self.rough, self.near, self.held.values())
                values = printer.print(roots)
                body = [*self._unpack(), *printer.lines, _tuple(values)]
                found.append([f"def {name}(tokens, held, at):", *indented(body)])
        return found

    def _fresh(self) -> list[list[str]]:
        """Whether a token is the first of a packed sequence."""
        if self.starts is None:
            return []
        names = unpacked([self.names[x] for x in self.tokens], "tokens")
        return [["def fresh(tokens, at):", *indented([AT, names, f"return {self.names[self.starts]} > 0.5"])]]

    def _products(self) -> list[list[str]]:
        """For A = exp(r w) with r of tokens without a Key axis and w of Params: products of A from sums of r."""
        if self.starts is not None or self.mixes:  # which a first token ends
            return []
        decay = self.roots[0]
        parts = key_and_rest(decay.args[0]) if decay.op == "exp" else None
        if parts is None or set(inputs_of(parts[0])) & set(self.tokens):
            return []
        printer = Printer(self._scope(), RESERVED)
        (value,) = printer.print([parts[1]])
        given = self._unpack([x for x in self.tokens if KEY not in x.axes])
        rate = ["def rate(tokens, held, at):", *indented([*given, *printer.lines, f"return {value} * fn.LOG2E"])]
        printer = Printer(self._scope(), RESERVED)
        (value,) = printer.print([parts[0]])
        names = unpacked([s.attrs[0] for s in self.held.values()], "held")
        kept = ["def kept(total, held):", *indented([names, *printer.lines, f"return tl.exp2({value} * total)"])]
        return [rate, kept]

    def _zeros(self) -> list[str]:
        shapes = ["(1, NB, BP)" if KEY in s.axes else "(1, 1, BP)" for s in self.held.values()] or ["(1, 1, 1)"]
        values = [f"tl.zeros({shape}, tl.float32)" for shape in shapes]
        return ["def zeros(NB: tl.constexpr, BP: tl.constexpr):", *indented([_tuple(values)])]

    @cached_property
    def slopes(self) -> list[Expr]:
        """The gradients of tokens, then of held values, from the coefficients' cotangents."""
        return self._slopes(self._pairs())

    def _pairs(self) -> list[tuple[Expr, Expr]]:
        return list(zip(self.roots, [*COTANGENTS, *self._mixed()], strict=True))

    def _mixed(self) -> list[Expr]:
        """The cotangents of what mixes entries."""
        return [symbol(f"dmix{i}", BOTH) for i in range(len(self.roots) - 5)]

    def _slopes(self, pairs: list[tuple[Expr, Expr]], kept: Collection[Expr] = ()) -> list[Expr]:
        found = derivatives(pairing(pairs), const(1), [*self.tokens, *self.held.values()], late=VALUE)
        if self.rough:  # fewer live numbers; 1 - σ is accurate enough for 16-bit inputs
            known = children_first(*self.roots)
            quick = {exp(x.args[0]): x + 1.0 for x in known if x.op == "expm1" and exp(x.args[0]) not in known}
            quick |= {tanh_slope(x.args[0]): 1.0 - x * x for x in known if x.op == "tanh"}
            quick |= {complement(x.args[0]): 1.0 - x for x in known if x.op == "sigmoid"}
            found = [substitute(x, quick) for x in found]
        return regroup([collect(x) for x in found], kept=kept)

    def _over_channels(self) -> list[bool]:
        """Which gradients of held values are sums over channels, which are computed at the end."""
        return [x.op == "sum_value" for x in self.slopes[len(self.tokens) :]]

    def _pull(self) -> list[str]:
        mixed = self._mixed()
        scope = {**self._scope(), **{c: c.attrs[0] for c in (*COTANGENTS, *mixed)}}
        printer = Printer(scope, {*RESERVED, *NAMES}, self.rough, self.near, self.held.values())
        late = [x.axes == {KEY} and slope.op == "sum_value" for x, slope in zip(self.tokens, self.slopes, strict=False)]
        late += self._over_channels()
        values = printer.print(x.args[0] if open_ else x for x, open_ in zip(self.slopes, late, strict=True))
        stores = ["first = p == edge"]
        for node, value, summed in zip(self.tokens, values, late, strict=False):
            stores += self.operands[node].store(value, summed)
        terms = [f"tile.of_tokens({v}, t_ok, t)" for v in values[len(self.tokens) :]]
        added = [f"sums[{i}] + tile.sum_time({v}, n)" for i, v in enumerate(terms)] or ["sums[0]"]
        given = [unpacked([c.attrs[0] for c in mixed], "dmix")] if mixed else []
        body = [*self._unpack(), *given, SINK, *printer.lines, *stores, _tuple(added)]
        last = ", dmix" * bool(mixed)
        return [f"def pull(tokens, held, sums, grads, dA, dB, dC, dE, dD, at, sink{last}):", *indented(body)]

    def _finish(self) -> list[str]:
        given = [symbol(f"dheld{i}", x.axes) for i, x in enumerate(self.invariants)]
        slopes = derivatives(pairing(zip(self.invariants, given, strict=True)), const(1), self.params)
        sums = [f"tile.sum_value(sums[{i}], p_ok)" if x else f"sums[{i}]" for i, x in enumerate(self._over_channels())]
        scope = {x: self.names[x] for x in self.params} | dict(zip(given, sums, strict=True))
        printer = Printer(scope, RESERVED)
        values = printer.print(slopes)
        stores = ["first = p == edge"]
        for node, value in zip(self.params, values, strict=True):
            stores += self.operands[node].store(value)
        body = [AT, *self._loads(self.params), *printer.lines, *(stores if self.params else ["pass"])]
        return ["def finish(args, grads, sums, segment, segments, at):", *indented(body)]


def _order(inputs: tuple[Input, ...], node: Expr) -> int:
    return [i.name for i in inputs].index(node.attrs[0])


def _tuple(values: list[str]) -> str:
    return f"return ({', '.join(values)},)" if values else "return (tl.zeros((1, 1, 1), tl.float32),)"
