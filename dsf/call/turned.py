"""Calls whose sums of angles, and turned keys and queries, are computed by GPU kernels (dsf.kernels.triton.turn).

Half precisions suffice there: what rounding errors would add up to over a sequence, in the gradient of an angle, is
taken from the states between chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsf.call.bind import Bound, Turns
from dsf.call.frame import Framed, frame_for, spread_heads, with_heads
from dsf.call.plan import Plan
from dsf.language.derived import derived
from dsf.language.expr import KEY, Expr, children_first, const, inputs_of, substitute
from dsf.language.frame import Frame
from dsf.language.operator import NO_TURN, split_factors
from dsf.language.reads import apart
from dsf.language.spec import Spec
from dsf.torch.evaluate import Evaluator
from dsf.triton import chunk as gpu_matrix
from dsf.triton.choose import frame_in_chunks, room_of
from dsf.triton.operands import Unfit, operands_of
from dsf.triton.printer import symbol

DOT = symbol(".dot", frozenset())


@dataclass(frozen=True)
class Vector:
    """An input of the plain system that is source + bias, turned; bias: a Param, or None. leaf: the number of the leaf
    which is that sum where the input is the one of the token before, else None."""

    node: Expr
    source: Expr
    bias: Expr | None
    leaf: int | None


@dataclass(frozen=True)
class Recipe:
    """What the kernels compute.

    The sums of the angles scale · pair, and the turned vectors. dot: the number of the vector whose product with the
    first one is DOT in `torch`, the inputs that torch computes; 0 for none. unread: leaves' nodes that nothing else
    takes. rows: so many consecutive vectors are the steps of one input, 1 for inputs of one step.
    """

    scale: Expr
    pair: Expr
    vectors: tuple[Vector, ...]
    dot: int
    torch: tuple[tuple[Expr, Expr], ...]
    unread: frozenset[Expr]
    rows: int


@derived
def recipe(spec: Spec) -> Recipe | None:
    """How kernels turn the vectors of this declaration's chunks; None where they do not."""
    frame = frame_in_chunks(spec, "triton") or spec.frame
    if frame is None or frame.angles is None or not _fits(frame.spec):
        return None
    if {x.node for x in frame.turned} & {*inputs_of(*(source for source, _ in frame.torch))}:
        return None
    rows = [row for row, angle in enumerate(frame.angles) if angle is not NO_TURN]
    if len(rows) != 1 or not _by_pair(frame, frame.angles[rows[0]]):
        return None
    last = {leaf.nodes[0]: number for number, leaf in enumerate(frame.leaves) if len(leaf.nodes) == 1}
    wholes = list[tuple[Expr, Vector]]()
    for t in frame.turned:
        if t.source.axes != {KEY} or (t.row < rows[0] and t.source not in last):
            return None
        leaf = last[t.source] if t.row < rows[0] else None
        whole = t.source if leaf is None else frame.leaves[leaf].source
        wholes.append((whole, Vector(t.node, *_biased(spec, whole), leaf)))
    wholes.sort(key=lambda x: (x[1].leaf is not None, x[1].node.attrs if x[1].node.attrs[1] is not None else ("", 0)))
    found, dot = frame.torch, 0
    products = [x for source, _ in found for x in children_first(source) if x.op == "sum_key"]
    product = next((x for x in products if x.args[0].op == "mul"), None)
    if product is not None:
        pairs = [{wholes[0][0], whole} for whole, _ in wholes]
        dot = next((i for i, pair in enumerate(pairs) if i and pair == {*product.args[0].args}), 0)
        if dot:
            found = tuple((substitute(source, {product: DOT}), node) for source, node in found)
    sources = [x for x, _ in found] + [x.source for x in frame.leaves] + [x.source for x in frame.late]
    sources += [whole for whole, _ in wholes] + [frame.angles[rows[0]]]
    plain = {i.name for i in frame.spec.inputs}
    read = {*inputs_of(*sources)} | {x for x in last if x.attrs[0] in plain}
    pair, scale = split_factors(frame.angles[rows[0]], lambda factor: KEY in factor.axes)
    named = {t.node.attrs[0] for t in frame.turned}
    steps = {i.kind.steps or 1 for i in frame.spec.inputs if i.name in named}
    if len(steps) > 1:
        return None
    return Recipe(scale, pair, tuple(x for _, x in wholes), dot, found, frozenset(last.keys() - read), *steps)


def _biased(spec: Spec, x: Expr) -> tuple[Expr, Expr | None]:
    """(source, bias) of a vector that is the sum of one with a time axis and a Param; (x, None) for others."""
    params = {i.name for i in spec.inputs if not i.kind.time}
    if x.op == "add":
        for source, bias in (x.args, x.args[::-1]):
            if bias.op == "input" and bias.attrs[0] in params and bias.axes == source.axes == {KEY}:
                return source, bias
    return x, None


def _fits(inner: Spec) -> bool:
    """True for plain systems whose chunk kernels know the gradient of turning a state."""
    if inner.is_elementwise or inner.rule is not None or inner.system.read != "after":
        return False
    run = _run_of(inner)
    if room_of(run) is not gpu_matrix:
        return False
    try:
        ops = operands_of(run)
    except Unfit:
        return False
    whole = not ops.rows & (ops.rows - 1)  # chunks begin and end with tokens
    return whole and ops.lefts is None and not ops.keywise and ops.ones is None


def _run_of(inner: Spec) -> Spec:
    """What a run of the kernels computes: the first readout where each has a run of its own."""
    return inner if gpu_matrix.reads_together(inner) else next(iter(apart(inner)), inner)


def _by_pair(frame: Frame, angle: Expr) -> bool:
    """True for an angle whose numbers by key are all of Pair inputs."""
    made = {node for _, node in frame.pairs}
    keyed = all(x in made for x in inputs_of(angle) if KEY in x.axes)
    return keyed and not any(x.op == "size" for x in children_first(angle))


def by_kernels(spec: Spec, bound: Bound, plan: Plan, packed: bool) -> bool:
    """True where kernels turn the vectors of this call. packed: whether its boundaries are known to the host alone."""
    if plan.backend != "triton" or plan.one_step or plan.scan or packed or plan.form == "recurrent":
        return False
    sizes = bound.sizes
    fits = bound.compute == torch.float32 and sizes.tokens > 0 and sizes.keys == sizes.n >= gpu_matrix.FEWEST
    if not fits or sizes.batch * sizes.heads > gpu_matrix.GRID or recipe(spec) is None:
        return False
    return gpu_matrix.channels(_run_of(frame_for(spec, plan).spec), sizes.p) == sizes.p


class TurnedByKernels(Framed):
    """One call whose vectors are turned by kernels."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        found = recipe(self.spec)
        assert found is not None
        self.recipe, self.unread, self.torch = found, found.unread, found.torch
        self.turns: Turns | None = None

    def _turn(self) -> None:
        """Compute the turned inputs, the angle of the final state, and what has their gradients."""
        from dsf.kernels.triton.turn.operator import How, Turned

        sizes, vectors = self.bound.sizes, self.recipe.vectors
        scale, pair = self._factor(self.recipe.scale), self._factor(self.recipe.pair)
        xs = [self.evaluate(x.source).squeeze(-1) for x in vectors]
        biases = [self._input(x.bias)[0, 0, :, :, 0] for x in vectors if x.bias is not None]
        heads = [x.shape[2] for x in (scale, pair, *xs) if x is not None] + [x.shape[0] for x in biases]
        recalled = [x.leaf for x in vectors if x.leaf is not None and self.rest is not None]
        common = sizes.heads if recalled else math.lcm(*heads)  # in a state heads that share keys may differ
        chunk = gpu_matrix.kernel_of(_run_of(self.frame.spec), sizes, self.bound.dtype, self.bound.device)[1]
        firsts = [self.first(leaf) for leaf in recalled]
        delayed = sum(1 << i for i, x in enumerate(vectors) if x.leaf is not None)
        biased = sum(1 << i for i, x in enumerate(vectors) if x.bias is not None)
        rows, started = self.recipe.rows, self.rest is not None
        how = How(chunk, common, delayed, biased, self.recipe.dot, started, rows, self.bound.dtype)
        biases = [spread_heads(x, common, 0) for x in biases]
        found = Turned.apply(scale, pair, self.bounds, how, len(xs), *xs, *biases, *firsts)
        border, final, dots = found[:3]
        marks, outs = found[3 : 3 + len(xs) // rows], found[3 + len(xs) // rows :]
        names = [x.node.attrs[0] for x in vectors[::rows]]
        for name, out in zip(names, outs, strict=True):
            self.values[Expr("input", (), (name, None), frozenset({KEY}))] = out.unsqueeze(-1)
        if border.requires_grad:
            named = dict(zip(names, marks, strict=True))
            self.turns = Turns(spread_heads(border, sizes.heads, 1), named)
        self.values[DOT] = dots[..., None, None]
        self.final = spread_heads(final.unsqueeze(-1), sizes.heads, 1)

    def _factor(self, x: Expr) -> Tensor | None:
        """A factor of the angles of all tokens, [B, T, heads] or, one a pair, [B, T, heads, N / 2]; None for 1."""
        if x.is_constant and x.value == 1:
            return None
        sizes, made = self.bound.sizes, {node: source for source, node in self.frame.pairs}
        found = {node: self._input(made[node]) if node in made else self._value(node) for node in inputs_of(x)}
        found = {node: value.float() for node, value in found.items()} or {const(0): self.bound.zero()}
        angle = Evaluator(with_heads(found), sizes.keys // 2, sizes.p)(x)[..., 0]
        angle = angle.expand(sizes.batch, sizes.tokens, -1, -1)
        return angle if KEY in x.axes else angle.squeeze(-1)

    def first(self, leaf: int) -> Tensor:
        """What a leaf has before the first tokens, [B or sequences, H, N]."""
        place = sum(self._width(x) * len(x.nodes) for x in self.frame.leaves[:leaf])
        return self._recalled(self.frame.leaves[leaf], place).squeeze(-1)

    def inner(self, rounded: bool = False) -> Bound:
        """The call of the plain system, whose turned inputs have their gradients through `turns`."""
        return replace(super().inner(rounded), turns=self.turns)
