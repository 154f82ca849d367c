"""Running one call: evaluate the spec's expressions, solve the Problem by the chosen form, finish."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from dsf.call import packing
from dsf.call.bind import Bound, environment, params_unrounded, unrounded
from dsf.call.convolve import convolve
from dsf.call.cost import CONVOLUTION
from dsf.call.plan import KEEP_NUMBERS, Plan, reads_apart
from dsf.kernels.chunk import chunk, scan_blocks
from dsf.kernels.oracle import oracle_dtype
from dsf.kernels.phi import kernel_matrix
from dsf.kernels.problem import Problem
from dsf.kernels.read_scan import scan_elementwise
from dsf.kernels.recurrent import recurrent
from dsf.kernels.segments import segments
from dsf.kernels.turns import scan_pairs
from dsf.language.reads import apart
from dsf.language.spec import Spec
from dsf.torch.columns import columns
from dsf.torch.dense import run_naive
from dsf.torch.evaluate import Evaluator
from dsf.torch.lower import apply_rule, decay_factors, finish, lower, true_state
from dsf.torch.on_values import lower_on_values
from dsf.torch.stabilise import EMPTY
from dsf.triton import scan as gpu_scan
from dsf.triton import step as gpu_step
from dsf.triton.choose import packs, room_of

Timed = Mapping[str, Tensor]


def timed_inputs(spec: Spec, bound: Bound) -> dict[str, Tensor]:
    """The inputs that have a token axis, by name."""
    return {i.name: bound.tensors[i.name] for i in spec.inputs if i.kind.time}


def run(
    spec: Spec, bound: Bound, bounds: list[int] | Tensor | None, state: Tensor | None, plan: Plan, final: bool = True,
    declared: Spec | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y [B, T, H, P] in the computing dtype and the final state.

    bounds: of packed sequences, a tensor for kernels that take one; None for those of a batch. final: whether the final
    state is wanted; if not, forms that would have to compute it for a batch return an empty tensor. declared: the
    declaration, where `spec` is the plain system of its frame.
    """
    if reads_apart(spec, plan):  # into runs that have the final state in common
        bound = unrounded(bound) if plan.backend == "torch" else bound  # whose gradients are added up
        found = [run(part, _bound_of(part, bound), bounds, state, plan, final) for part in apart(spec)]
        (y, last), *more = found
        return sum((other for other, _ in more), start=y), last
    if bounds is not None:
        return _run_packed(spec, bound, bounds, state, plan, declared)
    y, last = _run(spec, bound, timed_inputs(spec, bound), state, None, plan, final, declared)
    return y, last.contiguous() if final else last  # a step overwrites it in place; views keep all tokens' states alive


def _bound_of(part: Spec, bound: Bound) -> Bound:
    """The call with only the inputs of `part`, a system with one of several readouts."""
    names = {i.name for i in part.inputs}
    return replace(bound, tensors={name: x for name, x in bound.tensors.items() if name in names})


def _run_packed(
    spec: Spec, bound: Bound, bounds: list[int] | Tensor, state: Tensor | None, plan: Plan, declared: Spec | None
) -> tuple[Tensor, Tensor]:
    """y [1, T, H, P] and one state a sequence."""
    timed, outputs, finals = timed_inputs(spec, bound), [], []
    if isinstance(bounds, Tensor) or (plan.scan and not plan.one_step and packs(spec)):
        if plan.scan:
            return gpu_scan.fused_scan(spec, bound, timed, state, None, bounds)
        assert isinstance(bounds, Tensor)
        return room_of(spec).run_matrix(spec, bound, timed, state, bounds)
    bound = params_unrounded(spec, bound)
    for batch in packing.batches(bounds, bound.device):
        start = None if state is None else state.index_select(0, batch.chosen)
        y, final = _run(spec, bound, batch.take(timed), start, batch.valid, plan, declared=declared)
        outputs.append((batch, y))
        finals.append((batch, final))
    return packing.unpack(outputs), packing.reorder(finals, _untouched(spec, bound, state, finals[0][0].without))


def _untouched(spec: Spec, bound: Bound, state: Tensor | None, rows: Tensor | None) -> Tensor | None:
    """States of the sequences `rows`, which have no tokens: their initial states; None where there are none."""
    if rows is None or state is not None:
        return None if rows is None or state is None else state.index_select(0, rows)
    layout, sizes = columns(spec, bound.sizes.p), bound.sizes
    blank = torch.zeros(len(rows), sizes.heads, sizes.n, layout.total, dtype=bound.compute, device=bound.device)
    blank[..., layout.p + layout.den :] = EMPTY
    return blank


def _run(
    spec: Spec, bound: Bound, timed: Timed, state: Tensor | None, valid: Tensor | None, plan: Plan, final: bool = True,
    declared: Spec | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if plan.backend == "triton":
        if plan.one_step:
            return gpu_step.run(spec, bound, state)
        if plan.scan:
            return gpu_scan.fused_scan(spec, bound, timed, state, valid)
        return room_of(spec).run_matrix(spec, bound, timed, state)
    if plan.form == CONVOLUTION:
        return convolve(declared or spec, bound, timed, state, valid, final, plan.torch_alone)
    if plan.form == "naive":
        return _naive(spec, bound, timed, state, valid)
    compact = plan.form in ("scan", "chunk") and not (spec.rank or spec.is_stabilised or spec.mixes_pairs)
    if plan.form == "chunk" and spec.is_elementwise and (valid is not None or decay_factors(spec) is None):
        return _segments(spec, bound, timed, state, valid, plan)
    values, shape = _evaluator(spec, bound, timed, compact)
    if spec.acts_on_values:
        lowered = lower_on_values(spec, values, shape, state, valid)
        y, last = _solve(lowered.problem, lowered.state, plan)
        return finish(spec, values, lowered, y, last.transpose(-1, -2))
    lowered = lower(spec, values, shape, state, valid, compact)
    return finish(spec, values, lowered, *_solve(lowered.problem, lowered.state, plan))


def _evaluator(
    spec: Spec, bound: Bound, timed: Timed, compact: bool = False
) -> tuple[Evaluator, tuple[int, int, int, int]]:
    first = next(iter(timed.values()))
    sizes = bound.sizes
    values = Evaluator(environment(spec, bound, timed, compact), sizes.keys, sizes.p)
    return values, (first.shape[0], first.shape[1], sizes.heads, sizes.n)


def _solve(problem: Problem, state: Tensor | None, plan: Plan) -> tuple[Tensor, Tensor]:
    if plan.form == "recurrent":
        return recurrent(problem, state)
    if plan.form == "kernel":
        return kernel_matrix(problem, state)
    if problem.cross is not None:
        return scan_pairs(problem, state, plan.chunk or problem.tokens)
    if plan.form == "chunk" and problem.factor is not None:
        keep = _keeps(math.prod(problem.leading) * problem.n * problem.p, problem.tokens)
        return scan_elementwise(problem, state, plan.chunk, keep)
    if plan.form == "scan":
        return scan_elementwise(problem, state) if problem.rank == 0 else scan_blocks(problem, state, plan.chunk)
    return chunk(problem, state, plan.chunk)


def _segments(
    spec: Spec, bound: Bound, timed: Timed, state: Tensor | None, valid: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Elementwise systems, one segment of tokens at a time."""
    bound = params_unrounded(spec, bound)
    names = list(timed)
    first = next(iter(timed.values()))
    sizes, layout = bound.sizes, columns(spec, bound.sizes.p)
    if state is None:
        state = first.new_zeros(first.shape[0], sizes.heads, sizes.n, layout.total, dtype=bound.compute)
        if layout.gain:
            state[..., -layout.gain :] = EMPTY

    def body(start: Tensor, *pieces: Tensor) -> tuple[Tensor, Tensor]:
        piece = dict(zip(names, pieces, strict=False))
        values, shape = _evaluator(spec, bound, piece)
        lowered = lower(spec, values, shape, start, pieces[-1] if valid is not None else None)
        return finish(spec, values, lowered, *scan_elementwise(lowered.problem, lowered.state))

    inputs = tuple(timed.values()) + (() if valid is None else (valid,))
    return segments(body, inputs, state, plan.chunk, _keeps(state.numel(), first.shape[1]))


def _keeps(numbers: int, tokens: int) -> bool:
    """True for short sequences, whose states are kept for the backward pass instead of computed again."""
    return numbers * tokens <= KEEP_NUMBERS


def _naive(spec: Spec, bound: Bound, timed: Timed, state: Tensor | None, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """The oracle (dsf.kernels.oracle), in float64 for every dtype of inputs."""
    wide = oracle_dtype.get()
    values, shape = _evaluator(spec, replace(bound, compute=wide), timed)
    layout = columns(spec, bound.sizes.p)
    start = values.full(0.0).new_zeros(shape[0], shape[2], shape[3], layout.p + layout.den)
    if state is not None:
        start = true_state(spec, state.to(wide), layout.p)
    y, final = run_naive(spec, values, shape, start[..., : layout.p], valid)
    if spec.ones is not None and spec.rule is not None:
        den, den_state = run_naive(spec.ones, values, shape, start[..., layout.p :], valid)
        y = apply_rule(spec, values, y, den, values.full(1.0).squeeze(-2))
        final = torch.cat([final, den_state], dim=-1)
    if layout.gain:
        final = torch.cat([final, final.new_zeros(*final.shape[:-1], layout.gain)], dim=-1)
    return y.to(bound.compute), final.to(bound.compute)
