"""Running one call: evaluate the spec's expressions, hand the Problem to the chosen form, finish."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from dsf.call import packing
from dsf.call.bind import Bound, cache_heads, environment
from dsf.call.plan import KEEP_NUMBERS, Plan
from dsf.kernels.attention import KVCache, extend, fused, softmax_matrix, spread_heads, stepwise, visible
from dsf.kernels.chunk import chunk, scan_blocks
from dsf.kernels.phi import kernel_matrix
from dsf.kernels.problem import Problem
from dsf.kernels.read_scan import scan_elementwise
from dsf.kernels.recurrent import recurrent
from dsf.kernels.segments import segments
from dsf.language.expr import Expr, inputs_of
from dsf.language.operator import split_scale
from dsf.language.spec import Spec
from dsf.torch.dense import run_naive
from dsf.torch.evaluate import Evaluator
from dsf.torch.lower import EMPTY, apply_rule, columns, decay_factors, finish, lower, true_state
from dsf.triton.choose import packs, run_gpu, run_packed_gpu

Timed = Mapping[str, Tensor]


def timed_inputs(spec: Spec, bound: Bound) -> dict[str, Tensor]:
    """The inputs that have a token axis, by name."""
    return {i.name: bound.tensors[i.name] for i in spec.inputs if i.kind.time}


def run(spec: Spec, bound: Bound, state: Tensor | None, plan: Plan) -> tuple[Tensor, Tensor]:
    """One batch of sequences: y [B, T, H, P] in the computing dtype and the final state."""
    return _run(spec, bound, timed_inputs(spec, bound), state, None, plan)


def run_packed(
    spec: Spec, bound: Bound, bounds: list[int] | Tensor, state: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Packed sequences: y [1, T, H, P] and one state a sequence. bounds: a tensor where the kernels take one."""
    timed, outputs, finals = timed_inputs(spec, bound), [], []
    if isinstance(bounds, Tensor) or (plan.backend == "triton" and not plan.one_step and packs(spec)):
        return run_packed_gpu(spec, bound, timed, state, bounds)
    for batch in packing.batches(bounds, bound.device):
        start = None if state is None else state.index_select(0, batch.chosen)
        y, final = _run(spec, bound, batch.take(timed), start, batch.valid, plan)
        outputs.append((batch, y))
        finals.append((batch, final))
    return packing.unpack(outputs), packing.reorder(finals, _untouched(spec, bound, state, finals[0][0].without))


def _untouched(spec: Spec, bound: Bound, state: Tensor | None, rows: Tensor | None) -> Tensor | None:
    """States of sequences without tokens: as they were, or those before a first token."""
    if rows is None or state is not None:
        return None if rows is None or state is None else state.index_select(0, rows)
    layout, sizes = columns(spec, bound.sizes.p), bound.sizes
    blank = torch.zeros(len(rows), sizes.heads, sizes.n, layout.total, dtype=bound.compute, device=bound.device)
    blank[..., layout.p + layout.den :] = EMPTY
    return blank


def _run(
    spec: Spec, bound: Bound, timed: Timed, state: Tensor | None, valid: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor]:
    if plan.backend == "triton":
        return run_gpu(spec, bound, timed, state, valid, plan.one_step)
    if plan.form == "naive":
        return _naive(spec, bound, timed, state, valid)
    compact = plan.form in ("scan", "chunk") and not spec.rank and not spec.is_stabilised
    if plan.form == "chunk" and spec.is_elementwise and (valid is not None or decay_factors(spec) is None):
        return _segments(spec, bound, timed, state, valid, plan)
    values, shape = _evaluator(spec, bound, timed, compact)
    lowered = lower(spec, values, shape, state, valid, compact)
    y, final = _solve(lowered.problem, lowered.state, plan)
    return finish(spec, values, lowered, y, final)


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
    if plan.form == "chunk" and problem.factor is not None:
        keep = _keeps(math.prod(problem.leading) * problem.n * problem.p, problem.tokens)
        return scan_elementwise(problem, state, plan.chunk, keep)
    if plan.form == "scan":
        return scan_elementwise(problem, state) if problem.rank == 0 else scan_blocks(problem, state, plan.chunk)
    return chunk(problem, state, plan.chunk)


def _segments(
    spec: Spec, bound: Bound, timed: Timed, state: Tensor | None, valid: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Elementwise systems, a segment at a time."""
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
    """True for short sequences, whose states the backward pass had better not compute again."""
    return numbers * tokens <= KEEP_NUMBERS


def _naive(spec: Spec, bound: Bound, timed: Timed, state: Tensor | None, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """The oracle, in float64 whatever the inputs."""
    values, shape = _evaluator(spec, replace(bound, compute=torch.float64), timed)
    layout = columns(spec, bound.sizes.p)
    start = values.full(0.0).new_zeros(shape[0], shape[2], shape[3], layout.p + layout.den)
    if state is not None:
        start = true_state(spec, state.double(), layout.p)
    y, final = run_naive(spec, values, shape, start[..., : layout.p], valid)
    if spec.ones is not None and spec.rule is not None:
        den, den_state = run_naive(spec.ones, values, shape, start[..., layout.p :], valid)
        y = apply_rule(spec, values, y, den, values.full(1.0).squeeze(-2))
        final = torch.cat([final, den_state], dim=-1)
    if layout.gain:
        final = torch.cat([final, final.new_zeros(*final.shape[:-1], layout.gain)], dim=-1)
    return y.to(bound.compute), final.to(bound.compute)


def run_softmax(
    spec: Spec, bound: Bound, bounds: list[int] | None, cache: KVCache | None, plan: Plan
) -> tuple[Tensor, KVCache]:
    """Exponential features: y and the extended KV cache."""
    if plan.form == "naive" and bound.compute != torch.float64:
        wide = replace(bound, compute=torch.float64)
        y, final = run_softmax(spec, wide, bounds, cache, plan)
        return y.to(bound.compute), final
    timed = timed_inputs(spec, bound)
    if bounds is None:
        return _softmax(spec, bound, timed, cache, None, plan)
    outputs, caches = [], []
    for batch in packing.batches(bounds, bound.device):
        start = None
        if cache is not None:
            start = KVCache(*(x.index_select(0, batch.chosen) for x in cache))
        y, final = _softmax(spec, bound, batch.take(timed), start, batch.counts, plan)
        outputs.append((batch, y))
        caches.append((batch, final))
    return packing.unpack(outputs), _merge(caches, _untouched_cache(spec, bound, cache, caches[0][0].without))


def _untouched_cache(spec: Spec, bound: Bound, cache: KVCache | None, rows: Tensor | None) -> KVCache | None:
    """Of sequences without tokens."""
    if rows is None:
        return None
    if cache is not None:
        return KVCache(*(x.index_select(0, rows) for x in cache))
    heads, sizes = cache_heads(spec, bound.sizes), bound.sizes
    none = torch.zeros(len(rows), 1, 0, 1, dtype=bound.dtype, device=bound.device)
    k, v = none.expand(-1, heads[0], -1, sizes.keys), none.expand(-1, heads[1], -1, sizes.p)
    return KVCache(k, v, torch.zeros(len(rows), dtype=torch.int64, device=bound.device))


def _softmax(
    spec: Spec, bound: Bound, timed: Timed, cache: KVCache | None, lengths: Tensor | None, plan: Plan
) -> tuple[Tensor, KVCache]:
    if plan.form == "chunk" and bound.device.type == "cuda":
        a, k, v, scale = fused_operands(spec, bound, timed)
    else:
        (a, k, v), scale = softmax_operands(spec, bound, timed), 1.0
        cache = None if cache is None else cache.to(bound.compute)
    if lengths is None:
        lengths = torch.full((a.shape[0],), a.shape[2], dtype=torch.int64, device=a.device)
    if plan.form == "recurrent":
        y = stepwise(a, k, v, cache)
        return y.transpose(1, 2), extend(cache, k, v, lengths).to(bound.dtype)
    seen = visible(cache, a.shape[2], a.device)
    whole = extend(cache, k, v, torch.full_like(lengths, a.shape[2])) if cache is not None else KVCache(k, v, lengths)
    if seen is not None:
        seen = seen[..., : whole.k.shape[2]]
    if plan.form == "chunk":
        y = fused(a, whole.k, whole.v, seen, scale)
    else:
        keys, values = spread_heads(whole.k, a.shape[1]), spread_heads(whole.v, a.shape[1])
        y = softmax_matrix(a, keys, seen) @ values
    return y.transpose(1, 2), extend(cache, k, v, lengths).to(bound.dtype)


def softmax_operands(spec: Spec, bound: Bound, timed: Timed) -> tuple[Tensor, Tensor, Tensor]:
    """a [B, H, T, N], k [B, Hk, T, N], v [B, Hv, T, P] of C = φ(a), B = φ(k) v; heads as few as the inputs have."""
    values, (batch, tokens, heads, _) = _evaluator(spec, bound, timed)
    term = spec.rows[0].terms[0]

    def layout(x: Tensor, fewer: int) -> Tensor:
        return x.expand(batch, tokens, heads, -1)[:, :, :: heads // fewer].transpose(1, 2)

    a = values(spec.readout.args[0]).squeeze(-1)
    k = values(term.key.args[0]).squeeze(-1)
    v = values(term.value).squeeze(-2)
    k_heads, v_heads = cache_heads(spec, bound.sizes)
    return layout(a, heads), layout(k, k_heads), layout(v.expand(*v.shape[:-1], bound.sizes.p), v_heads)


def fused_operands(spec: Spec, bound: Bound, timed: Timed) -> tuple[Tensor, Tensor, Tensor, float]:
    """a / scale, k, v as `softmax_operands` has them, in the inputs' dtype, and scale.

    Inputs that stand bare, but for a constant factor of a, stay where they are: half precision reaches torch's fused
    attention as it came.
    """
    term, kinds = spec.rows[0].terms[0], {i.name: i.kind for i in spec.inputs}
    factor, query = split_scale(spec.readout.args[0])
    exprs = (query, term.key.args[0], term.value)
    heads = (bound.sizes.heads, *cache_heads(spec, bound.sizes))

    def bare(x: Expr, count: int) -> Tensor | None:
        if x.op != "input" or x.attrs[1] is not None or not kinds[x.attrs[0]].time:
            return None
        return spread_heads(timed[x.attrs[0]].transpose(1, 2), count)

    found = [bare(x, count) for x, count in zip(exprs, heads, strict=True)]
    if inputs_of(factor):
        found[0] = None
    scale = 1.0
    if found[0] is not None:
        number = Evaluator({query: torch.zeros((), dtype=torch.float64)}, bound.sizes.keys, bound.sizes.p)(factor)
        scale = float(number)
    if any(x is None for x in found):
        rest = softmax_operands(spec, bound, timed)
        found = [y.to(bound.dtype) if x is None else x for x, y in zip(found, rest, strict=True)]
    a, k, v = (x for x in found if x is not None)
    return a, k, v, scale


def _merge(parts: list[tuple[packing.Batch, KVCache]], rest: KVCache | None) -> KVCache:
    """Caches of every batch, and of sequences without tokens, padded to one length, in the order of the sequences."""
    longest = max(c.k.shape[2] for c in [*(cache for _, cache in parts), *([] if rest is None else [rest])])

    def padded(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, longest - x.shape[2]))

    return KVCache(
        packing.reorder([(b, padded(c.k)) for b, c in parts], None if rest is None else padded(rest.k)),
        packing.reorder([(b, padded(c.v)) for b, c in parts], None if rest is None else padded(rest.v)),
        packing.reorder([(b, c.lengths) for b, c in parts], None if rest is None else rest.lengths),
    )
