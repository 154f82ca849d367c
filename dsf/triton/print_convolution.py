"""Printing what surrounds the FFTs of a time-invariant system: one file a spec.

    enter     the inputs' part of B, one number a token and column
    leave     y from the FFT's rows: gate and skip
    begin     the gradient of these rows
    adjoint   the gradients of the inputs from those of y and of what `enter` returned
    numbers, pull_numbers   the Params' part of the impulse response (dsf.triton.print_impulse)

The first four run on tiles whose every lane is a column of a head of its own (dsf.kernels.triton.fourier.rows), so
their inputs all have the Value axis (or all the Key axis, where every entry of the state has an input of its own) and
nothing is summed over it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsf.kernels.triton.fourier.operator import Convolution
from dsf.kernels.triton.pointwise.programs import Access
from dsf.language.annotations import Kind
from dsf.language.expr import IN_PAIRS, KEY, REDUCTIONS, VALUE, Expr, children_first, const, inputs_of
from dsf.language.invariant import Still
from dsf.language.operator import times
from dsf.language.primitives import derivatives
from dsf.language.spec import Spec
from dsf.triton.print_impulse import Numbers, ParamsWriter, Split, Unprintable, numbers_of
from dsf.triton.print_pointwise import Writer
from dsf.triton.printer import as_comment, identifier, symbol
from dsf.triton.source import Source, file_of

UNIT, ZERO = const(1), const(0)
ROWS, GIVEN = symbol(".z", frozenset({VALUE})), symbol(".dy", frozenset({VALUE}))


def emit_convolution(spec: Spec, still: Still) -> tuple[Source, Convolution]:
    """Printed source and Convolution of a declaration. Raises Unprintable."""
    drive, keyed, numbers = _numbers(spec, still)
    y: Expr = times(ROWS, still.gate) + still.of.system.D
    moving = _Writer({i.name: i.kind for i in still.of.inputs}, drive, y, keyed)
    params = ParamsWriter(numbers, {i.name: i.kind for i in spec.inputs})
    if not params.fixed:
        raise Unprintable("no Param is in A, B or C")
    printed = moving.functions()
    about = [
        as_comment(str(spec)), "", "Printed by dsf from the declaration above; read by dsf.kernels.triton.fourier.",
        "v1, v2, … are shared parts, dX is the gradient of X.",
    ]  # fmt: skip
    functions = [x for x, _ in printed.values()] + [params.make(), params.pull()]
    text = file_of(about, functions).replace(" import lanes, tile", " import double, lanes, tile")
    known = Convolution(
        moving.inputs, params.fixed, keyed, numbers.turned, len(numbers.roots),
        still.of.system.read == "before", moving.gated,
        {name: accesses for name, (_, accesses) in printed.items()},
    )  # fmt: skip
    return Source(f"{identifier(spec.name)}_convolution", text, ()), known


def emit_filter(gated: bool, skipped: bool) -> tuple[Source, Convolution]:
    """Printed source and Convolution of gate (z + D x), where z is x convolved with a given response."""
    drive = symbol("x", frozenset({VALUE}))
    kinds, y = {"x": Kind(drive.axes, True)}, ROWS
    if skipped:
        kinds["D"] = Kind(drive.axes, False)
        y = y + symbol("D", drive.axes) * drive
    if gated:
        kinds["gate"] = Kind(drive.axes, True)
        y = symbol("gate", drive.axes) * y
    about = ["What surrounds the FFTs of a convolution with a given filter.", "", "Printed by dsf."]
    return _around("long_convolution", about, _Writer(kinds, drive, y, False))


def emit_given(spec: Spec, still: Still) -> tuple[Source, Convolution]:
    """Printed source and Convolution of a declaration whose impulse response is given. Raises Unprintable."""
    moving = {x.moving for _, drives in still.steps for x in drives}
    if len(moving) != 1:
        raise Unprintable("several inputs drive the state")
    (drive,) = moving
    if drive.axes != {VALUE}:
        raise Unprintable("the drive is not one number a channel")
    about = [
        as_comment(str(spec)), "", "Printed by dsf from the declaration above; read by dsf.kernels.triton.fourier with",
        "a given impulse response. v1, v2, … are shared parts, dX is the gradient of X.",
    ]  # fmt: skip
    y: Expr = times(ROWS, still.gate) + still.of.system.D
    writer = _Writer({i.name: i.kind for i in still.of.inputs}, drive, y, False)
    return _around(f"{identifier(spec.name)}_filter", about, writer)


def _around(name: str, about: Sequence[str], moving: _Writer) -> tuple[Source, Convolution]:
    """Printed source and Convolution of what is around the FFTs alone."""
    printed = moving.functions()
    accesses = {function: found for function, (_, found) in printed.items()}
    known = Convolution(moving.inputs, (), False, False, 0, False, moving.gated, accesses)
    return Source(name, file_of(about, [x for x, _ in printed.values()]), ()), known


def _numbers(spec: Spec, still: Still) -> tuple[Expr, bool, Numbers]:
    """The drive, whether every entry has its own, and the numbers of the impulse response."""
    frame = spec.turning if spec.is_framed else None
    if frame is not None and frame.leaves:
        raise Unprintable("previous values are in the state")
    if not still.diagonal or len(still.steps) != 1:
        raise Unprintable("A is not one diagonal")
    ((factors, drives),) = still.steps
    pairs = {} if frame is None else {node: source for source, node in frame.pairs}
    bases = {x.moving.args[0] if x.moving.op == "quarter_turn" else x.moving for x in drives}
    if len(bases) != 1:
        raise Unprintable("several inputs drive the state")
    (drive,) = bases
    keyed = KEY in drive.axes
    if drive.axes != ({KEY} if keyed else {VALUE}):
        raise Unprintable("the drive is neither one number a channel nor one an entry")
    if any(x in pairs for x in inputs_of(drive, still.gate, still.of.system.D)):
        raise Unprintable("an input of tokens has one entry for two of the state")
    parts = [still.read, *(e for n in factors for e in (n.decay, n.angle))]
    parts += [e for x in drives for e in (x.fixed, x.moving)]
    turned = any(n.angle is not ZERO for n in factors)
    turned = turned or any(x in pairs or x.op in IN_PAIRS for x in children_first(*parts))
    written = [(x.fixed, x.moving.op == "quarter_turn") for x in drives]
    found = numbers_of(still, Split(turned, pairs), written, keyed)
    return drive, keyed, found


class _Writer(Writer):
    """Prints the functions of moving inputs."""

    def __init__(self, kinds: Mapping[str, Kind], drive: Expr, y: Expr, keyed: bool) -> None:
        super().__init__(kinds)
        self.drive, self.y, self.keyed = drive, y, keyed
        self.axes = frozenset({KEY if keyed else VALUE})
        self.given = symbol(".du", self.axes)
        self.gated = bool(inputs_of(derivatives(y, UNIT, [ROWS])[0]))
        self.nodes = [x for x in inputs_of(drive, y) if x is not ROWS]
        if keyed and self.y is not ROWS:
            raise Unprintable("gates and skips beside an input for every entry")
        for x in self.nodes:
            kind = self.kinds[x.attrs[0]]
            if kind.axes != self.axes or kind.steps is not None:
                raise Unprintable(f"{x} has other axes than the drive")
        for x in children_first(drive, self.y):
            if x.op in {*REDUCTIONS, "size", "taylor_features", "exp_features", "quarter_turn", "pair", "spread"}:
                raise Unprintable(f"{x.op} is not printed beside an FFT")
        for x in [*self.nodes, ROWS, GIVEN, self.given]:
            self.call(x)

    @property
    def inputs(self) -> tuple[Access, ...]:
        """The moving inputs."""
        return tuple(self.access(x) for x in self.nodes)

    def functions(self) -> dict[str, tuple[list[str], tuple[Access, ...]]]:
        """The printed functions and their tensors, by name."""
        y = Access(".y", None, True, False, True, True)
        begun = derivatives(self.y, GIVEN, [ROWS])
        pairs = [(self.drive, self.given), *([] if self.keyed else [(self.y, GIVEN)])]
        return {
            "enter": self.returning("enter", [self.drive]),
            "leave": self.function("leave", [(self.y, y)]),
            "begin": self.returning("begin", begun),
            "adjoint": self.pulled(pairs, self.nodes),
        }

    def pulled(
        self, pairs: Sequence[tuple[Expr, Expr]], wanted: Sequence[Expr]
    ) -> tuple[list[str], tuple[Access, ...]]:
        """As Writer has it; all have the same axes, so that nothing is summed over them."""
        total: list[Expr] = [ZERO for _ in wanted]
        for x, given in pairs:
            slopes = derivatives(x, given, list(wanted))
            total = [a + b for a, b in zip(total, slopes, strict=True)]
        return self.storing(wanted, total)
