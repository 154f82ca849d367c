"""Systems whose A acts on the Value axis: the chunk kernels run the system of the transposed state.

The transposed state Z = Sᵀ [P, N] follows a declaration with Key and Value axes exchanged. Its output would be
y_t = Z_t q_t, but the kernels compute o_t = Z_tᵀ Q_t. Since Σ o_t · q_t = Σ Q_t · (Z_t q_t), y is the gradient of the
kernels' output by Q, with q as the gradient of o: one backward pass of the kernels. In the backward pass of y, the
gradient of q is the kernels' output with Q = dy, and all other gradients come from one more backward pass, with Q = dy
and q as the gradient of o.

Decays by channel without corrections have a kernel that computes y from the states of chunks
(dsf.kernels.triton.chunk.across), and one operator for all gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsf.call.bind import Bound, Sizes, environment
from dsf.kernels.operators import refuse_second_order
from dsf.language.annotations import Input, Kind
from dsf.language.derived import derived, interned
from dsf.language.expr import KEY, REDUCTIONS, VALUE, Axes, Expr, const, inputs_of, reduction, rewritten
from dsf.language.frame import map_operator, roots_of
from dsf.language.spec import Spec
from dsf.language.system import System
from dsf.torch.evaluate import Evaluator
from dsf.triton import chunk
from dsf.triton.chunk import Timed

OTHER = {KEY: VALUE, VALUE: KEY}
LEAST = 32  # entries of one axis, and half of the other's, from which `pays`; kernels pad to 64. 129: never
SUMS = {axis: op for op, axis in REDUCTIONS.items()}
Run = Callable[[Tensor, Tensor | None, list[Tensor]], tuple[Tensor, Tensor]]


def exchanged(axes: Axes) -> Axes:
    """The axes with Key and Value exchanged."""
    return frozenset(OTHER[axis] for axis in axes)


def exchange(x: Expr) -> Expr:
    """The expression with Key and Value exchanged in inputs, sizes and sums."""

    def change(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op == "input":
            return Expr("input", (), node.attrs, exchanged(node.axes))
        if node.op == "size":
            return Expr("size", (), (OTHER[node.attrs[0]],), node.axes)
        return reduction(SUMS[OTHER[REDUCTIONS[node.op]]], args[0]) if node.op in REDUCTIONS else None

    return rewritten(x, change)


@derived
def transposed(spec: Spec) -> Spec:
    """The system of Sᵀ without D. Its readout is a new input, the last one: a Key of the transposed state."""
    name = "Q"
    while name in {i.name for i in spec.inputs}:
        name += "_"
    steps = [System(A=map_operator(s.A, exchange), B=exchange(s.B)) for s in spec.system.micro_steps]
    c = Expr("input", (), (name, None), frozenset({KEY}))
    system = replace(steps[-1], C=c, read=spec.system.read, earlier=tuple(steps[:-1]))
    used = {i.attrs[0] for i in inputs_of(*roots_of(system))}
    kinds = [(i.name, replace(i.kind, axes=exchanged(i.kind.axes))) for i in spec.inputs if i.name in used]
    inputs = (*(Input(*entry) for entry in kinds), Input(name, Kind(frozenset({KEY}))))
    return interned(replace(spec, inputs=inputs, system=system))


@derived
def covers(spec: Spec) -> bool:
    """True for value-diagonal decays without corrections that the chunk kernels can run at some size."""
    if spec.rank or VALUE not in spec.decay_axes or spec.is_elementwise or spec.mixes_pairs:
        return False
    return spec.is_linear and not spec.is_stabilised and chunk.fits(transposed(spec))


def pays(sizes: Sizes, dtype: torch.dtype) -> bool:
    """True where form="auto" runs value-diagonal decays by chunks, and not by the fused scan.

    Other dtypes take shorter chunks and slower products.
    """
    return dtype == torch.bfloat16 and min(sizes.n, sizes.p) >= LEAST and max(sizes.n, sizes.p) >= 2 * LEAST


def sizes_of(sizes: Sizes) -> Sizes:
    """The sizes of the transposed system."""
    return replace(sizes, keys=sizes.p, n=sizes.p, p=sizes.n)


def refusal(spec: Spec, sizes: Sizes, dtype: torch.dtype) -> str | None:
    """Why the matrix kernels cannot run the transposed system, in the user's words; None when they can."""
    if spec.rule is not None:
        return "kernels of the transposed state have no quotient"
    refused = chunk.refusal(transposed(spec), sizes_of(sizes), dtype)
    return None if refused is None else f"of the transposed system, {refused}"


def run_matrix(
    spec: Spec, bound: Bound, timed: Timed, state: Tensor | None, bounds: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, P] and the final state [B, H, N, P]; arguments as dsf.triton.chunk.run_matrix has them."""
    of, sizes = transposed(spec), bound.sizes
    *inputs, query = of.inputs
    values = Evaluator(environment(spec, bound, timed), sizes.keys, sizes.p)
    batch, tokens = next(iter(timed.values())).shape[:2]
    gate, core = spec.gated_read if spec.has_key else (spec.readout, const(1))
    q = values(core).squeeze(-1).expand(batch, tokens, sizes.heads, sizes.n).to(bound.dtype)
    timed_names = {i.name for i in inputs if i.kind.time} | {query.name}
    given = {i.name: timed.get(i.name, bound.tensors[i.name]) for i in inputs}
    both = {i.name for i in inputs if len(i.kind.axes) == 2}

    def moved(tensors: list[Tensor]) -> dict[str, Tensor]:
        every = dict(zip(given, tensors, strict=True))
        return {name: x.transpose(-1, -2) if name in both else x for name, x in every.items()}

    def run(reads: Tensor, start: Tensor | None, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        every = moved(tensors) | {query.name: reads}
        mine = replace(bound, tensors=every, sizes=sizes_of(sizes))
        return chunk.run_matrix(of, mine, {n: x for n, x in every.items() if n in timed_names}, start, bounds)

    start = None if state is None else state.transpose(-1, -2).contiguous()
    if covers(spec) and chunk.channels(of, sizes.n) == sizes.n and batch * sizes.heads <= chunk.GRID:
        y, final = _read_by_chunks(of, sizes.p, q, start, list(moved([*given.values()]).values()), bounds)
    else:
        y, final = Across.apply(run, sizes.p, q, start, *given.values())
    y = y if gate is const(1) else y * values(gate).squeeze(-2)
    skip = spec.system.D
    y = y if skip is const(0) else y + values(skip).squeeze(-2)
    return y, final.transpose(-1, -2)


def _read_by_chunks(
    of: Spec, p: int, q: Tensor, start: Tensor | None, operands: list[Tensor], bounds: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, p] and the last state [B, H, p, n] of a system that `covers` allows.

    operands: those of `of`, the transposed system, without its readout, for which q [B, T, H, n] stands.
    """
    from dsf.kernels.triton.chunk.across_ops import across_mixer

    _, name = chunk.program_of(of)
    chunk.check_packed(of, bounds)
    if p < chunk.FEWEST and q.dtype.itemsize == 2:
        q, operands = q.float(), [x.float() for x in operands]
    y, final, _ = across_mixer(operands, q, start, name, False, bounds)
    return y, final


class Across(torch.autograd.Function):
    """y_t = Z_t q_t and the last state, from `run`: (Q, state, tensors) -> (o_t = Z_tᵀ Q_t, the last state)."""

    @staticmethod
    def forward(ctx: Any, run: Run, n: int, q: Tensor, state: Tensor | None, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """q: [B, T, H, p]; run: as in run_matrix. Returns y [B, T, H, n] and the last state [B, H, n, p]."""
        ctx.run, ctx.held = run, state is not None
        ctx.save_for_backward(q, *tensors, *([] if state is None else [state]))
        with torch.enable_grad():
            reads = q.new_zeros(*q.shape[:-1], n).requires_grad_()
            o, final = run(reads, None if state is None else state.detach(), [x.detach() for x in tensors])
            (y,) = torch.autograd.grad(o, reads, q.detach().to(o.dtype))
        return y, final.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of q is the output with Q = dy; all others come from one backward pass."""
        refuse_second_order()
        dy, dfinal = cotangents
        q, *tensors = ctx.saved_tensors
        state = tensors.pop() if ctx.held else None
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in tensors]
            start = None if state is None else state.detach().requires_grad_()
            o, final = ctx.run(dy.to(q.dtype), start, leaves)
            wanted = [*leaves, *([] if start is None else [start])]
            found = list(torch.autograd.grad((o, final), wanted, (q.to(o.dtype), dfinal), allow_unused=True))
        dstate = found.pop() if start is not None else None
        return None, None, o.detach().to(q.dtype), dstate, *found
