"""Printing the kernel before the fused scan (dsf.triton.hoist) and its adjoint.

One file a spec, with functions for dsf.kernels.triton.pointwise.kernel:

    prologue   what the scan takes instead of inputs: expressions without a Value axis, in float32
    adjoint    gradients of the inputs of these expressions

A function of a token's own numbers (dsf.call.tokenwise) is printed likewise, with one expression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dsf.kernels.triton.pointwise.programs import Access, Made
from dsf.kernels.triton.pointwise.prologue_ops import Prologue
from dsf.language.annotations import Input
from dsf.language.expr import KEY, Expr, inputs_of
from dsf.language.spec import Spec
from dsf.triton.hoist import Parts
from dsf.triton.print_pointwise import Writer
from dsf.triton.printer import as_comment, identifier, symbol
from dsf.triton.source import Source, file_of


def emit_prologue(spec: Spec, parts: Parts) -> tuple[Source, Prologue]:
    """Source of the kernel before a spec's scan and of its adjoint, and the Prologue that the operators need."""
    about = [
        f"{as_comment(spec.name)}: made once a token, before the scan.",
        "",
        *(f"  {_role(name)} = {as_comment(str(x))}" for name, x in parts.made.items()),
        *(f"  {_role(x)} in float32" for x in parts.passed),
    ]
    return _emit(f"{identifier(spec.name)}_prologue", about, spec.inputs, parts.given)


def emit_tokenwise(name: str, inputs: tuple[Input, ...], root: Expr) -> tuple[Source, Prologue]:
    """The same of a function of a token's own numbers (dsf.call.tokenwise)."""
    about = [f"{as_comment(name)}: a function of a token's own numbers.", "", f"  made = {as_comment(str(root))}"]
    made = Expr("input", (), ("made", None), root.axes)
    return _emit(f"{identifier(name)}_tokenwise", about, inputs, [(made, root)])


def _emit(
    title: str, about: list[str], given_inputs: tuple[Input, ...], outputs: Sequence[tuple[Expr, Expr]]
) -> tuple[Source, Prologue]:
    """A file of this name with both functions for outputs (name, expression) of the inputs. about: its first lines."""
    kinds = {i.name: i.kind for i in given_inputs}
    writer = _Writer(kinds)
    roots = [x for _, x in outputs]
    nodes = inputs_of(*roots)
    for x in nodes:
        writer.call(x)
    names = [_role(name) for name, _ in outputs]
    made = [
        Made(name, KEY in x.axes, False, 1, tuple(sorted({i.attrs[0] for i in inputs_of(x)})))
        for name, x in zip(names, roots, strict=True)
    ]
    places = [Access(f".{m.name}", None, True, m.key, False, True) for m in made]
    given = [symbol(f".d{m.name}", x.axes) for m, x in zip(made, roots, strict=True)]
    for x in given:
        writer.call(x)
    printed = {
        "prologue": writer.function("prologue", list(zip(roots, places, strict=True))),
        "adjoint": writer.pulled(list(zip(roots, given, strict=True)), nodes),
    }
    used = {x.attrs[0] for x in nodes}
    inputs = tuple(
        Access(name, kind.steps, kind.time, KEY in kind.axes, False) for name, kind in kinds.items() if name in used
    )
    last = "Printed by dsf; read by dsf.kernels.triton.pointwise. v1, v2, … are shared parts, dX is the gradient of X."
    source = Source(title, file_of([*about, "", last], (x for x, _ in printed.values())), ())
    return source, Prologue(inputs, tuple(made), {name: accesses for name, (_, accesses) in printed.items()})


class _Writer(Writer):
    """Gradients of inputs with fewer heads than the launch are added by the first head of each group alone."""

    def access(self, node: Expr) -> Access:
        """The tensor that a node is loaded from."""
        return replace(super().access(node), stored=node.attrs[0].startswith(".d"))


def _role(symbol: Expr) -> str:
    """The scan's name of a tensor from the prologue, with the micro-step where it is an input of several."""
    name, step = symbol.attrs
    return str(name) if step is None else f"{name}[{step}]"
