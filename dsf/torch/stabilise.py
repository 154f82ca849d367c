"""Exponential gains of a Problem removed by rescaling its state with a running maximum.

With m_t ≥ gain_t and m_t ≥ m_{t-1} + log decay_t, the state e^{-m_t} S_t follows a recurrence in which every factor is
at most one (m is the stabiliser of mLSTM, arXiv 2405.04517 eq. 15). y and the true state do not depend on m, so it has
no gradient. A tensor is *in the gauge* of m when it belongs to the recurrence of e^{-m_t} S_t.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsf.kernels.operators import broadcast_shape
from dsf.kernels.problem import Problem
from dsf.language.expr import KEY, VALUE, Expr, const
from dsf.language.functions import abs as absolute
from dsf.language.spec import Row, Spec
from dsf.torch.columns import Columns, skip_columns, tiled
from dsf.torch.evaluate import Evaluator, stack_rows

EMPTY = -1e30  # running maximum before the first write
# Lower bound of log decays in the running maximum. Any bound is valid, but a token that decays by more can underflow to
# 0/0, and with a much lower one rounding errors of sums over T tokens in float32 could exceed e^±80.
FLOOR = -1e3
# Logarithm of the most that the number 1 is in the scale of num and den: e^80 leaves float32 room for a factor of 10^3,
# and num is nothing beside it unless the rule has a small factor of 1, such as a sink of e^-90.
MOST = {torch.float32: 80.0, torch.float64: 350.0}


def drift_of(decay: Expr, log: Expr | None) -> Expr:
    """By how much a decay moves the running maximum. log: its logarithm where one is derived.

    The nodes are made here, as dsf.language.functions refuse the logarithm of a decay that is the number 0.
    """
    return Expr("maximum", (Expr("log", (absolute(decay),)) if log is None else log, const(FLOOR)))


def largest_gain(spec: Spec, values: Evaluator, row: Row, shape: tuple[int, int, int, int]) -> Tensor | None:
    """Largest gain of a row's terms, maximised over axes that the running maximum lacks: [B, T, H, n, p], or None."""
    if not spec.is_stabilised:
        return None
    batch, tokens, heads, _ = shape
    found = None
    for term in row.terms:
        exponent = values(term.gain if term.gain is not None else const(0)).detach()
        for axis, dim in ((KEY, -2), (VALUE, -1)):
            if axis not in spec.gain_axes:
                exponent = exponent.amax(dim, keepdim=True)
        found = exponent if found is None else torch.maximum(found, exponent)
    found = values.full(EMPTY) if found is None else found
    return found.expand(batch, tokens, heads, -1, -1)


def stabilise(
    spec: Spec,
    values: Evaluator,
    problem: Problem,
    layout: Columns,
    gain: Tensor,
    state: Tensor | None,
) -> tuple[Problem, Tensor | None, Tensor, Tensor | None, Tensor, Tensor]:
    """The recurrence of e^{-m} S with the running maximum m.

    Returns (Problem, initial state, factor on y, what is added to y after it, the number 1 in the scale of num and den,
    m after the last row).
    """
    first, start = initial_maximum(layout, gain, state)
    size = problem.decay if problem.cross is None else torch.hypot(problem.decay, problem.cross)  # without the turn
    before, after = running_maximum(spec, size, problem.log, layout, gain, first)
    widened = [tiled(m, layout) for m in (before, after)]
    moved = widened[0] - widened[1]
    decay = problem.decay + moved if problem.log else problem.decay * moved.exp()
    changes: dict[str, Tensor | None] = {"decay": decay}
    if problem.cross is not None:
        changes["cross"] = problem.cross * moved.exp()
    changes |= _gauged_corrections(spec, problem, moved)
    changes |= _gauged_injection(spec, values, problem, layout, after)
    micro = spec.micro
    seen = before[:, ::micro] if problem.before else after[:, micro - 1 :: micro]  # [B, T, H, n, p]
    top = seen.amax(-2, keepdim=True)
    if seen.shape[-2] > 1:
        changes["readout"] = problem.readout * tiled((seen - top).exp(), layout)
    top = top.squeeze(-2)
    skip_gain = spec.skip_term.gain
    level = top
    if skip_gain is not None:
        own = values(skip_gain).squeeze(-2).detach()
        level = torch.maximum(top, own if layout.gain > 1 else own.amax(-1, keepdim=True))
    rescale = tiled(top - level, layout).exp()
    skip = _gauged_skip(spec, values, layout, level)
    one = (-level).clamp(max=MOST[level.dtype]).exp()
    return replace(problem, **changes), start, rescale, skip, one, after[:, -1]  # type: ignore[arg-type]


def initial_maximum(layout: Columns, gain: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """m_0 [B, H, n, p] and the state divided by e^{m_0}. In `state` each row may have its own maximum."""
    if state is None:
        return gain.new_full((), EMPTY).expand_as(gain[:, 0]), None
    plain, own = state.split([layout.p + layout.den, layout.gain], dim=-1)
    own = own.detach()
    first = own if gain.shape[-2] > 1 else own.amax(-2, keepdim=True)
    return first, plain * tiled(own - first, layout).exp()


def running_maximum(
    spec: Spec, decay: Tensor, in_logs: bool, layout: Columns, gain: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    """m_{r-1} and m_r of every row, m_r = max(m_{r-1} + log decay_r, gain_r), by cumulative sums and maxima."""
    decay = decay.detach()
    log = decay if in_logs else decay.abs().log()
    log = log[..., : layout.p].clamp(min=FLOOR)  # the den columns repeat the num columns
    if KEY not in spec.gain_axes:
        log = log.amax(-2, keepdim=True)
    gain = gain.expand(broadcast_shape(gain.shape, log.shape))
    if log.shape[1] == 1:  # of Params: the same every row
        rows = torch.arange(1, gain.shape[1] + 1, dtype=log.dtype, device=log.device)
        drift = log * rows.view(-1, 1, 1, 1)
    else:
        drift = log.expand_as(gain).cumsum(1)
    first = first.expand_as(gain[:, 0])
    after = drift + torch.maximum(torch.cummax(gain - drift, dim=1).values, first.unsqueeze(1))
    return torch.cat([first.unsqueeze(1), after[:, :-1]], dim=1), after


def _gauged_corrections(spec: Spec, problem: Problem, moved: Tensor) -> dict[str, Tensor | None]:
    """left times e^moved, moved = m before - m after [B, rows, H, 1, p]; still tied to the key if that has no gain."""
    if not problem.rank:
        return {}
    keys_move = any(t.gain is not None and KEY in t.gain.axes for r in spec.rows for t in r.terms)
    if problem.tie is not None and moved.shape[-1] == 1 and not keys_move:
        return {"tie": problem.tie * moved.squeeze(-1).exp()}
    left = problem.full_left() * moved.unsqueeze(-3).exp()
    return {"left": left, "right": problem.full_right(), "tie": None}


def _gauged_injection(
    spec: Spec, values: Evaluator, problem: Problem, layout: Columns, after: Tensor
) -> dict[str, Tensor | None]:
    """Terms times e^{gain - m}: a factor of the values, or of the keys, or of their product where it has both axes."""
    assert problem.key is not None and problem.value is not None
    scale = torch.stack(_exponents(spec, values, problem, after), dim=3).exp()  # [B, rows, H, G, n, p]
    if scale.shape[-2] == 1:
        return {"value": problem.value * tiled(scale, layout).squeeze(-2)}
    if scale.shape[-1] == 1:
        return {"key": problem.key * scale.squeeze(-1)}
    full = problem.key.unsqueeze(-1) * problem.value.unsqueeze(-2) * tiled(scale, layout)
    return {"key": None, "value": None, "dense": full.sum(3)}  # an elementwise system does not need the factors


def _exponents(spec: Spec, values: Evaluator, problem: Problem, after: Tensor) -> list[Tensor]:
    """gain - m of every term, each [B, rows, H, n, p]."""
    assert problem.key is not None
    batch, rows, heads, groups, _ = problem.key.shape
    found = []
    for g in range(groups):
        own = [_gain(values, row, g).expand(batch, rows // spec.micro, heads, -1, -1) for row in spec.rows]
        found.append(stack_rows(own) - after)
    return list(torch.broadcast_tensors(*found))


def _gain(values: Evaluator, row: Row, group: int) -> Tensor:
    if group >= len(row.terms):  # it writes nothing; before the first write e^(0 - m) would be infinite
        return values.full(EMPTY)
    gain = row.terms[group].gain
    return values(gain if gain is not None else const(0))


def _gauged_skip(spec: Spec, values: Evaluator, layout: Columns, level: Tensor) -> Tensor | None:
    """D's columns times e^{gain - level}."""
    assert spec.ones is not None
    term = spec.skip_term
    ones = spec.skip_ones
    skip = skip_columns(values, term.value, ones.value, layout)
    if skip is None:
        return None
    exponent = values(term.gain).squeeze(-2) if term.gain is not None else 0.0
    return skip * tiled((exponent - level).exp(), layout)
