"""Normalised elementwise systems on the fused scan: numerator and denominator as two heads of one system.

The pair shares all inputs but the driving one, which is v in the first head and 1 in the second, so that one launch
computes both; the rule is applied to their outputs. Exponential gains are removed as in dsf.torch.stabilise: the
running maximum is an additional input without gradient, and every factor that the kernel computes is at most 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsf.call.bind import Bound, environment
from dsf.language.annotations import Input, Kind
from dsf.language.derived import derived
from dsf.language.expr import KEY, VALUE, Expr, children_first, const, inputs_of, substitute
from dsf.language.functions import exp, where
from dsf.language.operator import times
from dsf.language.spec import Spec
from dsf.language.system import ONE, System
from dsf.torch.columns import Columns, columns
from dsf.torch.evaluate import Evaluator
from dsf.torch.lower import apply_rule, lower_gains
from dsf.torch.stabilise import initial_maximum

DEN, BEFORE, AFTER, LEVEL = ".den", ".level_before", ".level_after", ".level"  # inputs of the doubled system


def refusal(spec: Spec) -> str | None:
    """Why the fused scan cannot run the doubled system, in the user's words; None when it can."""
    if spec.is_stabilised and (spec.micro > 1 or KEY in spec.gain_axes):
        return "the fused scan takes exponential gains without a Key axis, of one micro-step a token"
    return None


@derived
def doubled(spec: Spec) -> Spec:
    """The system whose heads are num and den in turn, divided by e^m where there is a running maximum m."""
    steps = [replace(s, normalize=None, drive=None, gauge=None, earlier=()) for s in spec.system.micro_steps]
    levels: list[Expr] = []
    if spec.is_stabilised:
        levels = [Expr("input", (), (name, None), spec.gain_axes) for name in (BEFORE, AFTER, LEVEL)]
        steps = [_gauged(spec, *levels)]
    den = Expr("input", (), (DEN, None), frozenset())
    swap = {v: where(den > 0.5, 1.0, v) for v in spec.drives}
    steps = [replace(s, B=substitute(s.B, swap), D=substitute(s.D, swap)) for s in steps]
    added = [Input(DEN, Kind(frozenset(), time=False)), *(Input(x.attrs[0], Kind(x.axes)) for x in levels)]
    return Spec(f"{spec.name} (num, den)", "", (*spec.inputs, *added), replace(steps[-1], earlier=tuple(steps[:-1])))


def _gauged(spec: Spec, before: Expr, after: Expr, level: Expr) -> System:
    """The system of e^{-m} S. level: outputs are divided by e^level; the maximum of m and the skip's gain."""
    (row,), logs, system = spec.rows, spec.log_decays, spec.system
    moved = before - after
    decay = exp(logs[0] + moved) if logs is not None else times(row.normal.decay, exp(moved))
    written: Expr = const(0)
    for term in row.terms:
        gain = const(0) if term.gain is None else term.gain
        written = written + times(times(term.key, term.value), exp(gain - after))
    skip = spec.skip_term
    readout, added = spec.readout, skip.value
    if skip.gain is not None:
        readout = times(readout, exp((before if system.read == "before" else after) - level))
    if added is not const(0):
        added = times(added, exp((const(0) if skip.gain is None else skip.gain) - level))
    return System(A=decay, B=written, C=readout, D=added, read=system.read)


@dataclass(frozen=True)
class Doubled:
    """What a normalised call gives to the fused scan.

    layout: columns of the state; m: the last running maximum, or None; one: the number 1 in the scale of num and den.
    """

    tensors: dict[str, Tensor]
    state: Tensor | None
    layout: Columns
    m: Tensor | None
    one: Tensor | None


def prepare(
    spec: Spec, bound: Bound, timed: Mapping[str, Tensor], state: Tensor | None, valid: Tensor | None
) -> Doubled:
    """The additional inputs of the doubled system, and its state [B, 2 H, N, P]."""
    heads, p, layout = bound.sizes.heads, bound.sizes.p, columns(spec, bound.sizes.p)
    assert spec.rule is not None
    tensors = {DEN: torch.arange(2 * heads, device=bound.device).remainder(2).float()}
    start, m, one = state, None, None
    if spec.is_stabilised:
        batch, tokens = next(iter(timed.values())).shape[:2]
        shape = (batch, tokens, heads, bound.sizes.n)
        skip = spec.skip_term.gain
        logs = spec.log_decays or (spec.rows[0].normal.decay,)
        gains = [t.gain for t in spec.rows[0].terms if t.gain is not None]
        with torch.no_grad():
            values = _values(spec, bound, timed, [*logs, *gains, *([] if skip is None else [skip])])
            decay, in_logs, gain = lower_gains(spec, values, shape, valid)
            own = None if skip is None else values(skip)
        first, start = initial_maximum(layout, gain, state)
        given = None if state is None else first
        before, after, level = _levels(spec, layout, (decay, in_logs, gain), own, given)
        m = after[:, -1].unsqueeze(-2)
        one = (-level).clamp(max=80.0).exp() if ONE in children_first(spec.rule) else None
        for name, x in ((BEFORE, before), (AFTER, after), (LEVEL, level)):
            tensors[name] = x if VALUE in spec.gain_axes else x[..., 0]
    if start is not None:
        pair = start[..., :p], start[..., p : p + layout.den].expand(*start.shape[:-1], p)
        start = torch.stack(pair, dim=2).flatten(1, 2)
    return Doubled(tensors, start, layout, m, one)


def _levels(
    spec: Spec, layout: Columns, moved: tuple[Tensor, bool, Tensor], own: Tensor | None, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The running maximum before and after every token, and the level of its outputs, [B, T, H, channels] each.

    moved: as from `lower_gains`; own: gains of the skip; first: m_0.
    """
    from dsf.kernels.triton.scan.maximum import running

    decay, in_logs, gain = moved
    size = *gain.shape[:3], layout.gain
    seen = spec.system.read == "before"
    if own is not None:
        own = (own if layout.gain > 1 else own.amax(-1, keepdim=True)).squeeze(-2).expand(size)
    start = None if first is None else first.squeeze(-2).contiguous()
    logs, gains = (x.squeeze(-2).expand(size) for x in (decay[..., : layout.p], gain))
    m, top = running(logs, gains, own, start, in_logs, seen)
    before, after = m[:, :-1], m[:, 1:]
    return before, after, top if own is not None else (before if seen else after)


def finish(
    spec: Spec, bound: Bound, timed: Mapping[str, Tensor], given: Doubled, y: Tensor, final: Tensor
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, P] and the state with all its columns, from the doubled system's output [B, T, 2 H, P] and state."""
    heads, layout = bound.sizes.heads, given.layout
    assert spec.rule is not None
    num, den = y.unflatten(2, (heads, 2)).unbind(3)
    values = _values(spec, bound, timed, [spec.rule])
    one = torch.ones_like(num[:1, :1, :1, :1]) if given.one is None else given.one
    out = apply_rule(spec, values, num, den, one)
    s, ones = final.unflatten(1, (heads, 2)).unbind(2)
    parts = [s, ones[..., : layout.den]]
    if given.m is not None:
        parts.append(given.m.expand(*s.shape[:-1], layout.gain))
    return out, torch.cat(parts, dim=-1)


def _values(spec: Spec, bound: Bound, timed: Mapping[str, Tensor], roots: list[Expr]) -> Evaluator:
    """An evaluator for roots, with only the inputs that they use."""
    env = environment(spec, bound, timed, only={x.attrs[0] for x in inputs_of(*roots)})
    return Evaluator(env, bound.sizes.keys, bound.sizes.p)
