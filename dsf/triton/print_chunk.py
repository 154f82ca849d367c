"""Printing what surrounds the chunk kernels: their operands, the readout, and the adjoints of both.

One file a spec. Functions marked * are called by the chunk kernels, the others run in separate kernels
(dsf.kernels.triton.pointwise.kernel). The *read* of a token is query' S, before gate, quotient and skip.

    levels            (log decay, gain), of which the running maximum is made
    prologue          the operands that are not bare inputs: gates, feature maps, normalised keys, log decays
    finish *          y from the read: skip, quotient
    skip_adjoint *    the gradients of the values and the Param in a skip
    readout           like finish, where the chunk kernels cannot call it
    readout_adjoint   the gradient of the read
    made_left, made_decay, made_own *   operands computed where they are used
    vectors_adjoint * gradients of the inputs that only the transitions use
    adjoint           gradients of the inputs from those of all operands and of y
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsf.kernels.triton.pointwise.programs import MADE_THERE, VECTORS, Access, Made, Program, Role
from dsf.language.bounds import bounds
from dsf.language.expr import KEY, REDUCTIONS, VALUE, Expr, children_first, inputs_of, substitute
from dsf.language.functions import abs as absolute
from dsf.language.functions import exp, minimum, where
from dsf.language.operator import factors_of, product_of, times
from dsf.language.primitives import derivatives
from dsf.language.spec import Spec
from dsf.language.system import DEN, NUM, ONE
from dsf.torch.stabilise import drift_of
from dsf.triton.operands import UNIT, WRITTEN, ZERO, Operands
from dsf.triton.print_pointwise import Body, Writer
from dsf.triton.printer import RESERVED, Printer, as_comment, identifier, indented, pairing, symbol
from dsf.triton.source import Source, file_of

SCALAR: frozenset[str] = frozenset()
TURNED = ("left", "right", "decay")  # operands of a transition that is diagonal plus rank one
# Values besides the inputs; no input has a dot in its name.
BEFORE, AFTER, READ = (symbol(f".level_{x}", SCALAR) for x in ("before", "after", "read"))
WEIGHT, GIVEN = symbol(".den", SCALAR), symbol(".dy", frozenset({VALUE}))
Y, MORE = symbol(".y", frozenset({VALUE})), symbol(".more", frozenset({VALUE}))  # MORE: y's rounding error, if stored


@dataclass(frozen=True)
class Root:
    """An operand's expression, the name of its tensor, and its micro-step in that tensor."""

    expr: Expr
    name: str
    axes: frozenset[str]
    step: int | None


class _Writer(Writer):
    """Prints the file and makes the Program of one spec."""

    def __init__(self, spec: Spec, operands: Operands) -> None:
        super().__init__({i.name: i.kind for i in spec.inputs})
        self.spec, self.ops = spec, operands
        self.column = operands.column
        self.roots = self._operand_roots()
        self.y = self._readout()
        self.factor = self._factor()
        self.bare = {name: entry for name in self._names() if (entry := self._bare(name)) is not None}
        found = inputs_of(*(r.expr for r in self.roots), *([self.y] if self.y is not None else []))
        if self.ops.gains is not None:
            found = list(dict.fromkeys([*found, *inputs_of(*self._level_exprs())]))
        self.nodes = [x for x in found if x.attrs[0] in self.kinds]
        for x in [*found, GIVEN, Y, MORE]:
            self.call(x)
        self.optional = frozenset({MORE})
        self.beside = self._beside()
        self.vectors = self._vectors()
        self.there = {name: made for name in MADE_THERE if (made := self._made_there(name)) is not None}

    def _names(self) -> list[str]:
        return list(dict.fromkeys(r.name for r in self.roots))

    def _operand_roots(self) -> list[Root]:
        ops, many = self.ops, self.ops.rows > 1
        roots = [Root(x, "query", frozenset({KEY}), m) for m, x in enumerate(ops.queries)]
        roots = roots or [Root(ops.query, "query", frozenset({KEY}), None)]
        if ops.read is not UNIT:
            roots.append(Root(ops.read, "read", SCALAR, None))
        sources, decays = list(ops.sources), list(ops.decays or [])
        if ops.gains is not None:
            moved = BEFORE - AFTER
            decays = [x + moved if ops.log else x * exp(moved) for x in decays]
            sources = [times(x, exp(g - AFTER)) for x, g in zip(ops.sources, ops.gains, strict=True)]
        ones = list(ops.ones or [])
        if not self.column and all(x is UNIT for x in ones):  # the kernels then need no tensor
            ones = []
        keys, lefts, rights = (list(x or []) for x in (ops.keys, ops.lefts, ops.rights))
        if lefts:  # their keys include the write strength
            sources = []
        rows: list[tuple[str, Sequence[Expr], frozenset[str]]] = [
            ("key", keys, frozenset({KEY})), ("left", lefts, frozenset({KEY})), ("right", rights, frozenset({KEY})),
            ("value", ops.values, frozenset({VALUE})),
            ("ones", ones, SCALAR), ("source", [] if all(x is UNIT for x in sources) else sources, SCALAR),
            ("erase", ops.divided, SCALAR), ("fresh", ops.fresh, SCALAR),
            ("own", [] if ops.own is None else [ops.own], SCALAR),
            ("decay", decays, frozenset({KEY}) if ops.keywise else SCALAR),
        ]  # fmt: skip
        for name, exprs, axes in rows:
            roots += [Root(x, name, axes, m if many else None) for m, x in enumerate(exprs)]
        return roots

    def _bare(self, name: str) -> str | None:
        """The per-token input that an operand is, by name; None for an expression, or a part of an input."""
        roots = [r for r in self.roots if r.name == name]
        if name == "value" and self.column:
            return None
        exprs = [r.expr for r in roots]
        if any(e.op != "input" or e.axes != roots[0].axes for e in exprs):
            return None
        names, steps = {e.attrs[0] for e in exprs}, [e.attrs[1] for e in exprs]
        if len(names) > 1 or not (names <= self.kinds.keys()) or not self.kinds[exprs[0].attrs[0]].time:
            return None
        kind = self.kinds[exprs[0].attrs[0]]
        whole = [None] if kind.steps is None else list(range(kind.steps))
        return exprs[0].attrs[0] if steps == whole else None

    def _readout(self) -> Expr | None:
        """y as an expression of NUM, DEN and the inputs; None where the read is y."""
        spec, skip = self.spec, self.spec.system.D if self.ops.own is None else ZERO
        if spec.rule is None:
            read = self.ops.read_out
            return read + skip if skip is not ZERO else read if self.ops.gated else None
        num, den = WRITTEN, WEIGHT
        if skip is not ZERO:
            assert spec.ones is not None
            num, den = num + skip, den + spec.ones.system.D
        one = UNIT if self.ops.gains is None else exp(minimum(-READ, 80.0))
        return substitute(spec.rule, {NUM: num, DEN: den, ONE: one})

    def _factor(self) -> Expr | None:
        """The factor in y = num · factor, if it depends on the denominator alone (a plain quotient); else None."""
        spec = self.spec
        if self.y is None or spec.ones is None or self.column or inputs_of(self.ops.read):
            return None
        factors = factors_of(self.y)
        rest = [(x, inverse) for x, inverse in factors if x is not WRITTEN]
        if len(rest) != len(factors) - 1 or (WRITTEN, True) in factors:
            return None
        factor = product_of(rest)
        return factor if set(inputs_of(factor)) <= {WEIGHT, READ} and spec.ones.system.D is ZERO else None

    def _level_exprs(self) -> tuple[Expr, Expr]:
        assert self.ops.gains is not None and self.ops.decays is not None
        decay = self.ops.decays[0]
        return drift_of(decay, decay if self.ops.log else None), self.ops.gains[0]

    def _vectors(self) -> list[Expr]:
        """The inputs of TURNED, if all are per-token Keys used only there, and key by key; else none."""
        if not self.ops.lefts:
            return []
        own = [r.expr for r in self.roots if r.name in TURNED]
        found = inputs_of(*own)
        others = [*(r.expr for r in self.roots if r.name not in TURNED), *([] if self.y is None else [self.y])]
        keyed = all(x.axes == {KEY} and x in self.nodes and self.kinds[x.attrs[0]].time for x in found)
        apart = not {x.attrs[0] for x in found} & {x.attrs[0] for x in inputs_of(*others)}
        summed = any(x.op in {*REDUCTIONS, "size"} for x in children_first(*own))
        return found if keyed and apart and not summed and self.ops.rows == 1 else []

    def _made_there(self, name: str) -> Expr | None:
        """What the chunk kernels compute of an operand key by key: itself or the terms of its sum; None for nothing."""
        found = [r.expr for r in self.roots if r.name == name]
        if not self.vectors or not found or name in self.bare:
            return None
        expr = found[0]
        if name != "own":
            return expr
        if expr.op != "sum_key" or any(x.op in {*REDUCTIONS, "size"} for x in children_first(expr.args[0])):
            return None
        return expr.args[0]

    def _is_column(self, name: str) -> bool:
        """True for the drive of a normaliser that is one more column of values."""
        return name == "ones" and self.column

    def prologue(self) -> tuple[list[str], tuple[Access, ...]] | None:
        """Stores every operand that is not a bare input."""
        stores = [
            (r.expr, Access(f".{r.name}", r.step, True, KEY in r.axes, VALUE in r.axes or self._is_column(r.name), True,
                            tail=self._is_column(r.name), again=True))
            for r in self.roots if r.name not in self.bare and r.name not in self.there
        ]  # fmt: skip
        if not stores:
            return None
        return self.function("prologue", stores)

    def finish(self) -> tuple[list[str], tuple[Access, ...]] | None:
        """Returns y from tiles of num [L, P] and den [L, 1] in the forward walk; None where it cannot run there.

        A second function, finish_loads, has its loads, so that the walk can issue them earlier; values are the walk's.
        """
        spec, ops = self.spec, self.ops
        if self.y is None or self.column or ops.lefts or ops.rows > 1 or spec.system.read == "before":
            return None
        nodes = children_first(self.y)
        if (spec.rule is not None and self.factor is None) or any(
            KEY in x.axes or x.op in {*REDUCTIONS, "size"} for x in nodes
        ):
            return None
        function = Body(self.names | {WRITTEN: "num", WEIGHT: "den"})
        given: list[str] = []
        loaded: list[str] = []
        for node in inputs_of(self.y):
            name = function.names[node]
            if node not in (WRITTEN, WEIGHT):
                if node.attrs[0] == self.bare.get("value"):
                    given.append(f"{name} = value.to(tl.float32)")
                    continue
                given.append(f"{name} = loaded[{len(loaded)}].to(tl.float32)")
                loaded.append(name)
                function.load(node, self.access(node), convert=False)
        printer = Printer(function.names, RESERVED | {"loaded", "value"})
        y = printer.print([self.y])[0]
        loads = [*function.lines, f"return ({', '.join(loaded or ['batch'])},)"]
        head = ["def finish_loads(args, at):", *indented(loads), "", "", "@triton.jit"]
        body = [*given, *printer.lines, f"return {y}"]
        return [*head, "def finish(loaded, num, den, value):", *indented(body)], tuple(function.accesses)

    def _beside(self) -> tuple[Expr, Expr] | None:
        """The values and the Param of a skip, where the chunk kernels can compute its gradients; else None."""
        ops, skip = self.ops, self.spec.system.D
        other = self.ops.gated or self.spec.rule is not None or ops.erases or ops.keywise
        if self.y is None or other or self.finish() is None:
            return None
        found = inputs_of(skip)
        values = [x for x in found if x.attrs[0] == self.bare.get("value")]
        params = [x for x in found if x.axes == SCALAR and not self.kinds[x.attrs[0]].time]
        if len(values) != 1 or len(params) != 1 or len(found) != 2:
            return None
        used = [x for r in self.roots for x in inputs_of(r.expr)]
        return (values[0], params[0]) if params[0] not in used and used.count(values[0]) == 1 else None

    def skip_adjoint(self) -> tuple[list[str], tuple[Access, ...]] | None:
        """Returns the gradients of values and of the Param by channel, from tiles of dy and values [L, P]."""
        if self.beside is None:
            return None
        value, param = self.beside
        apart = symbol(".param", frozenset({VALUE}))
        slopes = derivatives(substitute(self.spec.system.D, {param: apart}), GIVEN, [value, apart])
        printer = Printer({value: "value", apart: "param", GIVEN: "dy"}, RESERVED | {"loaded", "value", "param"})
        values = printer.print(slopes)
        body = ["param = loaded[0].to(tl.float32)", *printer.lines, f"return ({', '.join(values)})"]
        return ["def skip_adjoint(loaded, dy, value):", *indented(body)], ()

    def readout(self) -> tuple[list[str], tuple[Access, ...]] | None:
        """Stores y where the walk cannot compute it, or where a backward pass needs the read."""
        if self.y is None or (self.finish() is not None and not self.ops.gated):
            return None
        stores = [(self.y, Access(".y", None, True, False, True, True))]
        if self.factor is not None:
            stores.append((Expr("rest_of", (self.y,), (".y",)), Access(".more", None, True, False, True, True)))
        return self.function("readout", stores)

    def readout_adjoint(self) -> tuple[list[str], tuple[Access, ...]] | None:
        """Stores the gradients of num and of den.

        For a plain quotient y = num / den it stores two other numbers: the factor 1 / den, a read scale with which the
        kernels can use y's gradient as that of the read, and den's gradient, from Σ dy·num = Σ dy·y / factor. That sum
        takes y with more digits than y is returned in, because its terms nearly cancel.
        """
        if self.y is None or (self.spec.rule is None and not self.ops.gated):
            return None
        if self.factor is not None:
            moved = derivatives(self.factor, UNIT, [WEIGHT])[0] / self.factor
            slope = moved * (pairing([(GIVEN, Expr("with_rest", (Y, MORE)))]) / self.factor)
            factor, den = (Access(name, None, True, False, False, True) for name in (".factor", ".dden"))
            return self.function("readout_adjoint", [(times(self.ops.read, self.factor), factor), (slope, den)])
        *slopes, of_den = derivatives(pairing([(self.y, GIVEN)]), UNIT, [*self.ops.reads, WEIGHT])
        every = [
            (slope, Access(".dnum", x.attrs[1], True, False, True, True))
            for slope, x in zip(slopes, self.ops.reads, strict=True)
        ]
        if self.ops.gated:
            return self.function("readout_adjoint", every)
        (num,) = every
        den = Access(".dtail", None, True, False, True, True, tail=True)
        if not self.column:
            den = Access(".dden", None, True, False, False, True)
        # num's gradient is rounded when it is stored. den's gradient is computed from the dy of that rounded number,
        # since the two nearly cancel where a sequence is short.
        kept = Expr("round_to", (slopes[0],), (".dnum",)) / slopes[0]
        given = times(GIVEN, where(absolute(slopes[0]) > 0, kept, 1.0))
        return self.function("readout_adjoint", [num, (substitute(of_den, {GIVEN: given}), den)])

    def direct(self) -> dict[str, str]:
        """Inputs whose gradient is exactly the kernels' gradient of one operand: {input: operand}."""
        uses: dict[str, set[str]] = {}
        for r in self.roots:
            for x in inputs_of(r.expr):
                uses.setdefault(x.attrs[0], set()).add(r.name)
        for x in inputs_of(self.y) if self.y is not None and self.beside is None else []:
            uses.setdefault(x.attrs[0], set()).add("y")
        pulled = {x.attrs[0] for x in self.vectors}
        found = {entry: name for name, entry in self.bare.items() if uses[entry] == {name} and entry not in pulled}
        return {entry: name for entry, name in found.items() if name in (*VECTORS, *["decay"] * self.ops.keywise)}

    def adjoint(self) -> tuple[list[str], tuple[Access, ...]] | None:
        """Stores the gradients of every input that is not direct."""
        skipped = {*self.direct(), *([] if self.beside is None else [self.beside[1].attrs[0]])}
        skipped |= {x.attrs[0] for x in self.vectors}
        wanted = [x for x in self.nodes if x.attrs[0] not in skipped]
        roots = [r for r in self.roots if not (self.vectors and r.name in TURNED)]
        varied = [r for r in roots if inputs_of(*(x.expr for x in self.roots if x.name == r.name))]
        given = [self.call(Expr("input", (), (f".d{r.name}", r.step), r.axes)) for r in varied]
        pairs = [self.ops.pair(r.name, r.step, r.expr, x) for r, x in zip(varied, given, strict=True)]
        if self.y is not None and self.beside is None:
            pairs.append((self.y, GIVEN))
        if not wanted:
            return None
        slopes = derivatives(pairing(pairs), UNIT, wanted)
        return self.storing(wanted, [substitute(x, self.ops.constants) for x in slopes])

    def vectors_adjoint(self) -> tuple[list[str], tuple[Access, ...]] | None:
        """Stores the gradients of `vectors`, from tiles [L, N] of the gradients of TURNED."""
        if not self.vectors:
            return None
        given = {r.name: self.call(symbol(f".d{r.name}", frozenset({KEY}))) for r in self.roots if r.name in TURNED}
        pairs = [(r.expr, self.ops.settled(r.name, r.expr, given[r.name])) for r in self.roots if r.name in TURNED]
        slopes = derivatives(pairing(pairs), UNIT, self.vectors)
        function = Body(self.names)
        for node in inputs_of(*slopes):
            if node not in given.values():
                function.load(node, self.access(node))
        printer = Printer(function.names, RESERVED)
        values = printer.print(slopes)
        function.lines += printer.lines
        for node, value in zip(self.vectors, values, strict=True):
            function.store(value, Access(f".grad_{node.attrs[0]}", None, True, True, False, True))
        arguments = ", ".join(self.names[given[name]] for name in TURNED)
        return [f"def vectors_adjoint(args, at, {arguments}):", *indented(function.lines)], tuple(function.accesses)

    def levels(self) -> tuple[list[str], tuple[Access, ...]] | None:
        """Returns (log decay, gain)."""
        return None if self.ops.gains is None else self.returning("levels", self._level_exprs())

    def program(self) -> tuple[Source, Program]:
        """The printed file and the Program that the operator needs."""
        parts, accesses = [], {}
        for name in ("levels", "prologue", "finish", "skip_adjoint", "readout", "readout_adjoint",
                     "vectors_adjoint", "adjoint"):  # fmt: skip
            printed = getattr(self, name)()
            if printed is not None:
                parts.append(printed[0])
                accesses[name] = printed[1]
        for name, expr in self.there.items():
            text, accesses[f"made_{name}"] = self.returning(f"made_{name}", [expr])
            parts.append(text)
        about = [
            as_comment(str(self.spec)),
            "",
            "Printed by dsf from the declaration above; read by dsf.kernels.triton.pointwise. v1, v2, … are shared",
            "parts; X is what the chunk kernels take under that name, dX its gradient.",
        ]
        source = Source(identifier(self.spec.name), file_of(about, parts), ())
        return source, self._program(accesses)

    def _program(self, accesses: Mapping[str, tuple[Access, ...]]) -> Program:
        ops, roles, made = self.ops, {}, []
        for name in self._names():
            mine = [r for r in self.roots if r.name == name]
            positive = all(bounds(r.expr)[0] >= 0 for r in mine)
            roles[name] = Role(self.bare.get(name), any(inputs_of(r.expr) for r in mine), positive)
            if name in self.bare or name in self.there or self._is_column(name):
                continue
            used = {x.attrs[0] for r in mine for x in inputs_of(r.expr)} & self.kinds.keys()
            if name == "value" and self.column and self.ops.ones is not None:
                used |= {x.attrs[0] for e in self.ops.ones for x in inputs_of(e)} & self.kinds.keys()
            rows = ops.rows if mine[0].step is not None else 1
            made.append(Made(name, KEY in mine[0].axes, VALUE in mine[0].axes, rows, tuple(sorted(used))))
        kinds = self.kinds.items()
        inputs = tuple(Access(name, x.steps, x.time, KEY in x.axes, VALUE in x.axes) for name, x in kinds)
        return Program(
            inputs, roles, tuple(made), self.direct(), ops.rows, self.spec.system.read == "before",
            ops.log, ops.keywise, ops.ones is not None, self.column, ops.gated, self.factor is not None,
            None if self.beside is None else self.beside[1].attrs[0], ops.gains is not None,
            ops.floor if ops.lefts else None, tuple(x.attrs[0] for x in self.vectors), dict(accesses),
            ops.group, ops.divisors is not None, len(ops.queries) or 1,
        )  # fmt: skip


def emit_matrix(spec: Spec, operands: Operands) -> tuple[Source, Program]:
    """Printed source and Program of a spec of the matrix families."""
    return _Writer(spec, operands).program()
