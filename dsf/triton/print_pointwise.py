"""Printing functions for the pointwise kernels (dsf.kernels.triton.pointwise): load tiles, compute, store tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsf.kernels.triton.pointwise.programs import PADDING, Access
from dsf.language.annotations import Kind
from dsf.language.expr import KEY, VALUE, Expr, const, inputs_of
from dsf.language.primitives import derivatives
from dsf.triton.printer import AT, RESERVED, Printer, indented, name_of, pairing

EVERYWHERE = "tl.full((1, 1, 1), True, tl.int1)"


class Body:
    """One printed function: its lines, and the tensors (accesses) whose pointers and strides it reads from `args`."""

    def __init__(self, names: Mapping[Expr, str]) -> None:
        self.names = dict(names)
        self.accesses: list[Access] = []
        self.place = 0
        self.kinds: dict[str, str] = {}
        self.lines: list[str] = [AT]

    def reach(self, access: Access) -> tuple[str, str, str]:
        """Register a tensor. Returns the text of its pointer, of the tile's address and of its mask."""
        place, at = self.place, iter(range(self.place + 1, self.place + 10))
        self.accesses.append(access)
        self.announce([access])
        self.place += access.width
        pointer, masks = f"args[{place}]", []
        if access.column is not None:
            masks += ["n_ok"] * access.key + ["p_ok"] * access.value or ["t_ok"]
            masks += ["(place == 0)"] * (access.stored and not access.value)
            at_row = f"({access.entry} * COLUMNS + {access.column})"
            return pointer, f"{pointer} + (batch * H + head) * (N * COLUMNS) + {at_row}", " & ".join(masks)
        if access.summed:
            sizes = {(False, False): "1", (True, False): "N", (False, True): "P", (True, True): "(N * P)"}
            size = sizes[access.key, access.value]
            ends = [
                f"(row * H + head) * {size} + tl.zeros((1, 1, 1), tl.int32)",
                *(["n * P" if access.value else "n"] if access.key else []),
            ]
            masks += ["n_ok"] * access.key + ["p_ok"] * access.value
            return pointer, " + ".join([pointer, *ends, *(["p"] if access.value else [])]), " & ".join(masks)
        terms = [pointer]
        if access.time:
            terms += [f"batch * args[{next(at)}]", f"(t0 + t) * args[{next(at)}]"]
            masks.append("t_ok")
        stride, group = next(at), next(at)
        terms.append(f"head // args[{group}] * args[{stride}]")
        if access.stored:
            masks.append(f"(head % args[{group}] == 0)")
        if access.stored and not access.value:
            masks.append("(place == 0)")
        if access.key:
            terms.append(f"{access.entry} * args[{next(at)}]")
            masks.append("n_ok")
        if access.value:
            terms.append(f"{'beside' if access.tail else 'p'} * args[{next(at)}]")
            masks.append(f"(beside < args[{next(at)}])" if access.tail else "p_ok")
        return pointer, " + ".join(terms), " & ".join(masks)

    def announce(self, accesses: Sequence[Access]) -> None:
        """Register the dtypes of the tensors that `reach` will get next, in this order."""
        place = self.place
        for access in accesses:
            self.kinds[access.role] = f"args[{place}].dtype.element_ty"
            place += access.width

    def load(
        self, node: Expr, access: Access, spread: bool = False, convert: bool = True, optional: bool = False
    ) -> None:
        """Add the line that loads a tile of an input, as float32 if `convert`.

        spread: every lane of the channels loads the Key vector. optional: zeros where there is no tensor.
        """
        pointer, address, mask = self.reach(access)
        address = f"tile.to_lanes({address}, p)" if spread else address
        masked = f", mask={mask}, other=0.0" if mask else ""
        line = f"{self.names[node]} = tl.load({address}{masked}){'.to(tl.float32)' * convert}"
        if optional:
            self.lines += [f"{self.names[node]} = tl.zeros((1, 1, 1), tl.float32)", f"if {pointer} is not None:"]
        self.lines.append("    " * optional + line)

    def store(self, value: str, access: Access) -> None:
        """Add the lines that store a tile where the launch has its tensor."""
        pointer, address, mask = self.reach(access)
        if access.tail:
            self.lines.append(f"beside = tl.arange(0, {2 * PADDING})[None, None, :]")
            # The second column holds the rounding error of the first, or the first again.
            second = value if access.again else f"{value} - fn.round_to({value}, {self.kinds[access.role]})"
            value = f"tl.where(beside == 0, {value}, tl.where(beside == 1, {second}, 0.0))"
        self.lines += [f"if {pointer} is not None:", f"    tile.store({address}, {value}, {mask or EVERYWHERE})"]


class Writer:
    """Prints functions of one spec's inputs.

    kinds: of the inputs, by name. names: what each input node is called in the text. optional: nodes that a launch may
    lack.
    """

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self.kinds = dict(kinds)
        self.names: dict[Expr, str] = {}
        self.optional: frozenset[Expr] = frozenset()

    def call(self, node: Expr) -> Expr:
        """Give a node a unique name in the printed text."""
        text = name_of(node).strip("_") if node.attrs[0].startswith(".") else name_of(node)
        while text in {*self.names.values(), "beside", "row", "sums", "loaded", "value"}:
            text += "_"
        self.names[node] = text
        return node

    def access(self, node: Expr) -> Access:
        """The tensor that a node is loaded from."""
        name, step = node.attrs
        kind = self.kinds.get(name)
        return Access(name, step, kind is None or kind.time, KEY in node.axes, VALUE in node.axes)

    def function(self, name: str, stores: Sequence[tuple[Expr, Access]]) -> tuple[list[str], tuple[Access, ...]]:
        """A function that computes and stores expressions, and the functions that sum them over tokens where needed."""
        function = Body(self.names)
        for node in inputs_of(*(e for e, _ in stores)):
            function.load(node, self.access(node), optional=node in self.optional)
        function.announce([access for _, access in stores])
        printer = Printer(function.names, RESERVED | {"beside", "row"}, kinds=function.kinds)
        values = printer.print([e for e, _ in stores])
        function.lines += printer.lines
        sums = []
        for (expr, access), value in zip(stores, values, strict=True):
            if access.summed:
                sums.append((expr, value, access))
            else:
                function.store(value, access)
        text = [f"def {name}(args, sums, at):", *indented([*function.lines, self._added(sums)])]
        finish = [f"def {name}_finish(args, sums, at, row):"]
        if sums:
            closing = Body({})
            closing.place = function.place
            for i, (_, _, access) in enumerate(sums):
                closing.store(f"sums[{i}]", access)
            function.accesses += closing.accesses
            finish += indented(closing.lines)
            axes = [f"(1, {'NB' if a.key else 1}, {'BP' if a.value else 1})" for _, _, a in sums]
            zeros = ", ".join(f"tl.zeros({x}, tl.float32)" for x in axes)
            start = [f"def {name}_zeros(NB: tl.constexpr, BP: tl.constexpr):", f"    return ({zeros},)"]
            text = [*text, "", "", "@triton.jit", *start, "", "", "@triton.jit", *finish]
        return text, tuple(function.accesses)

    def returning(self, name: str, exprs: Sequence[Expr]) -> tuple[list[str], tuple[Access, ...]]:
        """A function that loads the inputs of some expressions and returns their tiles."""
        function = Body(self.names)
        for node in inputs_of(*exprs):
            function.load(node, self.access(node))
        printer = Printer(function.names, RESERVED)
        values = printer.print(exprs)
        body = [*function.lines, *printer.lines, f"return {', '.join(values)}"]
        return [f"def {name}(args, at):", *indented(body)], tuple(function.accesses)

    @staticmethod
    def _added(sums: Sequence[tuple[Expr, str, Access]]) -> str:
        if not sums:
            return "return sums"
        return "return (" + ", ".join(
            f"sums[{i}] + tile.sum_time(tl.where(t_ok, {v}, 0.0), n)" for i, (_, v, _) in enumerate(sums)
        ) + ",)"  # fmt: skip

    def pulled(
        self, pairs: Sequence[tuple[Expr, Expr]], wanted: Sequence[Expr]
    ) -> tuple[list[str], tuple[Access, ...]]:
        """The function `adjoint`: gradients of the wanted inputs from pairs (expression, its gradient)."""
        return self.storing(wanted, derivatives(pairing(pairs), const(1), list(wanted)))

    def storing(self, wanted: Sequence[Expr], slopes: Sequence[Expr]) -> tuple[list[str], tuple[Access, ...]]:
        """The function `adjoint` from the gradients of the wanted inputs."""
        stores = []
        for node, slope in zip(wanted, slopes, strict=True):
            a = self.access(node)
            place = Access(f".grad_{a.role}", a.step, a.time, a.key, a.value, True, summed=not a.time)
            stores.append((slope, place))
        return self.function("adjoint", stores)
