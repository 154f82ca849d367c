"""Printing the kernel before the fused scan (dsf.triton.hoist) and its adjoint.

One file a spec, with functions for dsf.kernels.triton.pointwise.kernel:

    prologue   what the scan takes instead of inputs: expressions without a Value axis, in float32
    adjoint    gradients of the inputs of these expressions
"""

from __future__ import annotations

from dataclasses import replace

from dsf.kernels.triton.pointwise.programs import Access, Made
from dsf.kernels.triton.pointwise.prologue_ops import Prologue
from dsf.language.expr import KEY, Expr, inputs_of
from dsf.language.spec import Spec
from dsf.triton.hoist import Parts
from dsf.triton.print_pointwise import Writer
from dsf.triton.printer import as_comment, identifier, symbol
from dsf.triton.source import Source, file_of


def emit_prologue(spec: Spec, parts: Parts) -> tuple[Source, Prologue]:
    """Source of the kernel before a spec's scan and of its adjoint, and the Prologue that the operators need."""
    kinds = {i.name: i.kind for i in spec.inputs}
    writer = _Writer(kinds)
    roots = [x for _, x in parts.given]
    nodes = inputs_of(*roots)
    for x in nodes:
        writer.call(x)
    names = [_role(name) for name, _ in parts.given]
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
    about = [
        f"{as_comment(spec.name)}: made once a token, before the scan.",
        "",
        *(f"  {_role(name)} = {as_comment(str(x))}" for name, x in parts.made.items()),
        *(f"  {_role(x)} in float32" for x in parts.passed),
        "",
        "Printed by dsf; read by dsf.kernels.triton.pointwise. v1, v2, … are shared parts, dX is the gradient of X.",
    ]
    source = Source(f"{identifier(spec.name)}_prologue", file_of(about, (x for x, _ in printed.values())), ())
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
