"""The operands of attention: queries, keys, values, decays and angles of a call, from its expressions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsf.call.bind import Bound, angle_width, cached_heads, environment, key_width
from dsf.call.run import Timed
from dsf.kernels.attention import spread_heads
from dsf.language.derived import derived
from dsf.language.expr import KEY, Expr, const, inputs_of
from dsf.language.operator import split_scale
from dsf.language.spec import Spec
from dsf.torch.evaluate import Evaluator, number_of

# Lower bound of log decays. Sums of them are subtracted from each other, so one of -1e30 would take the digits of all
# others, and one of -inf would leave NaN; no score is larger than another by so much that e^-1000 would show.
LEAST = -1e3


@dataclass(frozen=True)
class Operands:
    """A call's tensors as every form takes them, in the computing dtype, with only as many heads as differ.

    a: [B, H, T, N], k: [B, Hk, T, N], v: [B, Hv, T, P] of C = φ(a), B = φ(k) v (φ: exponential features, or nothing).
    log: of the decay, at least LEAST, and gain: both [B, Hb, T] in float64, or None. angle: [B, Ha, T, N/2 or 1], or
    None. gate: [B, T, H, P or 1], a factor of y, and skip: added to y, or None. values: the evaluator that made them.
    """

    a: Tensor
    k: Tensor
    v: Tensor
    log: Tensor | None
    gain: Tensor | None
    angle: Tensor | None
    gate: Tensor | None
    skip: Tensor | None
    values: Evaluator

    def to(self, dtype: torch.dtype) -> Operands:
        """The same with a, k and v in another dtype."""
        return replace(self, a=self.a.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))


def operands(spec: Spec, bound: Bound, timed: Timed) -> Operands:
    """The values of one call's expressions."""
    first = next(iter(timed.values()))
    batch, tokens, heads, sizes = first.shape[0], first.shape[1], bound.sizes.heads, bound.sizes
    values = Evaluator(environment(spec, bound, timed), sizes.keys, sizes.p)
    (row,) = spec.rows
    (term,) = row.terms
    gate, core = (const(1), spec.readout) if spec.is_softmax else spec.gated_read
    query, key = (core.args[0], term.key.args[0]) if spec.is_softmax else (core, term.key)
    k_heads, v_heads = cached_heads(spec, sizes)[0]

    def layout(x: Tensor, width: int, fewer: int) -> Tensor:
        found = x.expand(batch, tokens, heads, width)[:, :, :: heads // fewer].transpose(1, 2)
        return found if fewer == heads else found.contiguous()  # a cache would keep what all heads share alive

    n = key_width(spec, bound.sizes)
    log, gain, angle = rates(spec, bound, values, batch, tokens)
    skip = None if spec.system.D is const(0) else values(spec.system.D).squeeze(-2)
    return Operands(
        layout(values(query).squeeze(-1), n, heads), layout(values(key).squeeze(-1), n, k_heads),
        layout(values(term.value).squeeze(-2), sizes.p, v_heads), log, gain, angle,
        None if gate is const(1) else values(gate).squeeze(-2), skip, values,
    )  # fmt: skip


def rates(
    spec: Spec, bound: Bound, values: Evaluator, batch: int, tokens: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """log, gain and angle of Operands. dtype: of log and gain."""
    (row,) = spec.rows
    (term,) = row.terms
    sizes, (b_heads, a_heads) = bound.sizes, cached_heads(spec, bound.sizes)[1]

    def layout(x: Tensor, width: int, fewer: int) -> Tensor:
        return x.expand(batch, tokens, sizes.heads, width)[:, :, :: sizes.heads // fewer].transpose(1, 2)

    def number(x: Expr) -> Tensor:
        return layout(values(x).squeeze(-1), 1, b_heads).squeeze(-1).to(dtype)

    log = gain = angle = None
    if b_heads:
        assert spec.log_decays is not None
        log = number(spec.log_decays[0]).clamp(min=LEAST)
        gain = None if term.gain is None else number(term.gain)
    if a_heads:
        found = values(row.normal.angle).squeeze(-1)
        found = found[..., ::2] if KEY in row.normal.angle.axes else found
        angle = layout(found, angle_width(spec, sizes), a_heads)
    return log, gain, angle


def rates_alone(spec: Spec, bound: Bound, timed: Timed) -> Evaluator:
    """The evaluator for `rates` and the quotient, of only the inputs that these take."""
    return Evaluator(environment(spec, bound, timed, only=_of_rates(spec)), bound.sizes.keys, bound.sizes.p)


@derived
def _of_rates(spec: Spec) -> set[str]:
    """The inputs of `rates` and the quotient."""
    row, gain = spec.rows[0], spec.rows[0].terms[0].gain
    parts = [row.normal.angle, *(spec.log_decays or ()), gain, spec.rule]
    return {i.attrs[0] for i in inputs_of(*(x for x in parts if x is not None))}


def fused_operands(spec: Spec, bound: Bound, timed: Timed) -> tuple[Tensor, Tensor, Tensor, float]:
    """a / scale, k, v as in `operands` but in the inputs' dtype, and scale.

    Bare inputs, a also with a constant factor, are not copied: half precisions reach torch's fused attention unchanged.
    """
    heads = (bound.sizes.heads, *cached_heads(spec, bound.sizes)[0])
    names, factor = _bare(spec)
    found = [
        None if name is None else spread_heads(timed[name].transpose(1, 2), count)
        for name, count in zip(names, heads, strict=True)
    ]
    scale = 1.0 if found[0] is None else number_of(factor, int(bound.sizes.keys), int(bound.sizes.p))
    if None in names:
        rest = operands(spec, bound, timed)
        found = [y.to(bound.dtype) if x is None else x for x, y in zip(found, (rest.a, rest.k, rest.v), strict=True)]
    a, k, v = (x for x in found if x is not None)
    return a, k, v, scale


def kernel_operands(spec: Spec, bound: Bound, timed: Timed) -> tuple[Operands, float]:
    """What the attention kernels take of `Operands`, a, k and v as in `fused_operands`, and the scale of scores."""
    a, k, v, scale = fused_operands(spec, bound, timed)
    values = rates_alone(spec, bound, timed)
    log, _, angle = rates(spec, bound, values, a.shape[0], a.shape[2])
    return Operands(a, k, v, log, None, angle, None, None, values), scale


@derived
def _bare(spec: Spec) -> tuple[tuple[str | None, ...], Expr]:
    """The inputs that are query, key and value as they came, None where these are more, and the query's factor."""
    term, kinds = spec.rows[0].terms[0], {i.name: i.kind for i in spec.inputs}
    factor, query = split_scale(spec.readout.args[0])

    def bare(x: Expr) -> str | None:
        return x.attrs[0] if x.op == "input" and x.attrs[1] is None and kinds[x.attrs[0]].time else None

    return (None if inputs_of(factor) else bare(query), bare(term.key.args[0]), bare(term.value)), factor
