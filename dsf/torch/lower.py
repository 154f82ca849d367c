"""Lowering: a Spec and the tensors of a call -> the `Problem` that the forms solve, and its output -> y.

A normalised system is one Problem, whose columns are those of the values and of the ones (the normaliser's drive).
Exponential gains are removed by a running maximum (`stabilise`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsf.kernels.problem import Problem
from dsf.kernels.turns import turn_pairs, turned_decay
from dsf.language.derived import derived
from dsf.language.errors import FormError
from dsf.language.expr import KEY, VALUE, Expr, const, inputs_of
from dsf.language.functions import exp
from dsf.language.operator import split_factors, split_scale
from dsf.language.spec import Row, Spec, Term
from dsf.language.system import DEN, NUM, ONE
from dsf.torch.columns import Columns, beside, columns, skip_columns, tiled
from dsf.torch.evaluate import Evaluator, stack_rows
from dsf.torch.stabilise import EMPTY, largest_gain, stabilise


@dataclass(frozen=True)
class Lowered:
    """A Problem, its initial state, and what `finish` needs to make y and the final state of its results.

    rescale: factor on the outputs, [B, T, H, p]; skip: added after it; one: the number 1 in the scale of num and den,
    [B, T, H, p]; gain: running maximum after the last row, [B, H, n, p].
    """

    problem: Problem
    state: Tensor | None
    columns: Columns
    rescale: Tensor | None = None
    skip: Tensor | None = None
    one: Tensor | None = None
    gain: Tensor | None = None

    @property
    def whole(self) -> Problem:
        """The Problem whose output is y, for a system that is not normalised: `rescale` and `skip` are part of it."""
        if self.rescale is None:
            return self.problem
        return replace(self.problem, readout=self.problem.readout * self.rescale.unsqueeze(-2), skip=self.skip)


def lower(
    spec: Spec,
    values: Evaluator,
    shape: tuple[int, int, int, int],
    state: Tensor | None,
    valid: Tensor | None,
    compact: bool = False,
) -> Lowered:
    """The Problem of one call.

    shape: (B, T, H, N). state: [B, H, N, columns] or None. valid: [B, T] bool, False for padding tokens, which leave
    the state unchanged. compact: for the scan and for chunks of systems without corrections or running maximum, keeps
    tensors small: decay_factors instead of their product, one head where all heads share a key or a readout.
    """
    batch, tokens, heads, n = shape
    layout = columns(spec, values.p)
    factors = decay_factors(spec) if compact and valid is None else None
    decay, log = (values(factors[0]), True) if factors else decays_of(spec, values, tokens)
    own = -1 if compact else heads
    gate, core = spec.gated_read
    readout = values(core).expand(batch, tokens, own, -1, -1)
    key, value, gain = _injections(spec, values, shape, layout, own)
    dense = _dense(spec, values, shape, layout)
    low: dict[str, Tensor | None] = {}
    if spec.rank:
        low = _corrections(spec, values, shape)
    if spec.mixes_pairs:
        (decay, cross), log = _mixed_pairs(spec, values, shape), False
        low |= {"cross": cross} | _turned_reads(spec, values, shape, low)
    problem = Problem(
        decay=decay, log=log, readout=readout, n=n, p=layout.p + layout.den, key=key, value=value, dense=dense,
        factor=values(factors[1]) if factors else None, before=spec.system.read == "before", micro=spec.micro,
        across=False, **low,
    )  # fmt: skip
    problem = _widen(problem, layout)
    start = None if state is None else state[..., : layout.p + layout.den]
    if valid is not None:
        problem = mask(problem, valid)
        gain = None if gain is None else torch.where(_rows(valid, spec.micro), gain, EMPTY)
    if gate is not const(1):
        skip = skip_columns(values, spec.system.D, None, layout)
        return Lowered(problem, start, layout, rescale=values(gate).squeeze(-2), skip=skip)
    if not spec.is_stabilised:
        return Lowered(_with_skip(spec, problem, values, layout), start, layout)
    assert gain is not None
    problem, start, *rest = stabilise(spec, values, problem, layout, gain, state)
    return Lowered(problem, start, layout, *rest)


@derived
def decay_factors(spec: Spec) -> tuple[Expr, Expr] | None:
    """A Hadamard system's log decay as (factor of Params, factor of tokens), the latter with one axis.

    None where it is no such product, or where another expression has both axes for every token: then some tensor is as
    large as the states of all tokens anyway.
    """
    if not spec.is_elementwise or spec.decay_axes != {KEY, VALUE} or spec.log_decays is None or len(spec.rows) != 1:
        return None
    (row,) = spec.rows
    if spec.ones is not None or row.dense is not None or len(row.terms) != 1 or len(spec.gated_read[1].axes) == 2:
        return None
    timed = {i.name for i in spec.inputs if i.kind.time}
    moving, fixed = split_factors(spec.log_decays[0], lambda x: any(i.attrs[0] in timed for i in inputs_of(x)))
    return (fixed, moving) if len(moving.axes) == 1 else None


def decays_of(spec: Spec, values: Evaluator, tokens: int) -> tuple[Tensor, bool]:
    """(decays of all rows [B|1, rows|1, H|1, n, p], whether they are logarithms): logarithms where they are derived."""
    logs = spec.log_decays
    exprs = logs if logs is not None else tuple(r.normal.decay for r in spec.rows)
    rows = [values(e) for e in exprs]
    if len(rows) > 1:  # micro-steps differ, so every token needs its own rows
        rows = [x.expand(-1, tokens, -1, -1, -1) for x in rows]
    return stack_rows(rows), logs is not None


def _mixed_pairs(spec: Spec, values: Evaluator, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    """decay and cross of (decay ⊙) R(angle) for every row, [B, rows, H, N, p] each (kernels.turns.turned_decay)."""
    parts = [turned_decay(values(r.normal.decay), values(r.normal.angle), shape[3]) for r in spec.rows]
    decays, crosses = ([x.expand(*shape[:3], -1, -1) for x in each] for each in zip(*parts, strict=True))
    return stack_rows(decays), stack_rows(crosses)


def _turned_reads(
    spec: Spec, values: Evaluator, shape: tuple[int, int, int, int], low: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """Corrections as they act before the turn R: left (right' R), that is right turned by -angle."""
    if not spec.rank:
        return {}
    batch, tokens, heads, n = shape
    angles = [values(r.normal.angle).expand(batch, tokens, heads, n, 1)[..., ::2, :] for r in spec.rows]
    right = low["right"]
    assert right is not None
    return {"right": turn_pairs(right, -stack_rows(angles).unsqueeze(3))}


def _injections(
    spec: Spec, values: Evaluator, shape: tuple[int, int, int, int], layout: Columns, own: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """key [B, rows, H, G, n], value [B, rows, H, G, columns], gain [B, rows, H, n, p]; None where B does not factor.

    own: number of heads of the keys, -1 to keep theirs.
    """
    if any(r.dense is not None for r in spec.rows):
        return None, None, None
    batch, tokens, heads, n = shape
    groups = max(max(len(r.terms) for r in spec.rows), spec.rank if spec.is_delta else 1, 1)
    keys, vals, gains = [], [], []
    for index, row in enumerate(spec.rows):
        row_keys, row_values = [], []
        gains.append(largest_gain(spec, values, row, shape))
        for g in range(groups):
            term = row.terms[g] if g < len(row.terms) else Term(const(1), const(0))
            row_keys.append(values(term.key).squeeze(-1).expand(batch, tokens, own, n))
            row_values.append(_value(spec, values, (index, g), term, layout).expand(batch, tokens, heads, -1))
        keys.append(side_by_side(row_keys))
        vals.append(side_by_side(row_values))
    gain = None if gains[0] is None else stack_rows([g for g in gains if g is not None])
    return stack_rows(keys), stack_rows(vals), gain


def side_by_side(parts: list[Tensor]) -> Tensor:
    """Stack along axis 3; a single part is a view, not a copy."""
    return parts[0].unsqueeze(3) if len(parts) == 1 else torch.stack(torch.broadcast_tensors(*parts), dim=3)


def _value(spec: Spec, values: Evaluator, place: tuple[int, int], term: Term, layout: Columns) -> Tensor:
    """A term's value and then the columns driven by ones: [B|1, T|1, H|1, columns]."""
    main = values(term.value).squeeze(-2)
    if spec.ones is None:
        return main.expand(*main.shape[:-1], layout.p)
    row, g = place
    others = spec.ones_rows[row].terms
    ones = values(others[g].value if g < len(others) else const(0)).squeeze(-2)
    return beside(main, ones, layout)


def _dense(spec: Spec, values: Evaluator, shape: tuple[int, int, int, int], layout: Columns) -> Tensor | None:
    """B of every row [B, rows, H, N, columns]; None where B factors in all rows."""
    if all(r.dense is None for r in spec.rows):
        return None
    batch, tokens, heads, n = shape
    rows = []
    for index, row in enumerate(spec.rows):
        full = values(whole_injection(row)).expand(batch, tokens, heads, n, -1)
        if spec.ones is not None:
            ones = values(whole_injection(spec.ones_rows[index]))
            full = beside(full, ones.expand(batch, tokens, heads, n, -1), layout)
        rows.append(full.expand(*full.shape[:-1], layout.p + layout.den))
    return stack_rows(rows)


def whole_injection(row: Row) -> Expr:
    """B of a row as one expression."""
    if row.dense is not None:
        return row.dense
    total: Expr = const(0)
    for term in row.terms:
        product = term.key * term.value
        total = total + (product if term.gain is None else product * exp(term.gain))
    return total


def _corrections(spec: Spec, values: Evaluator, shape: tuple[int, int, int, int]) -> dict[str, Tensor | None]:
    """right [B, rows, H, R, N, p] and either tie [B, rows, H, R] (delta rules) or left [B, rows, H, R, N, p]."""
    batch, tokens, heads, n = shape
    tied = (
        spec.is_delta
        and not spec.mixes_pairs
        and all(c.scale.axes == frozenset() and c.right.axes <= {KEY} for r in spec.rows for c in r.normal.corrections)
    )
    groups = max(max(len(r.terms) for r in spec.rows), spec.rank) if tied else spec.rank
    lefts, rights = [], []
    nothing = values.full(0.0).expand(batch, tokens, heads, n, 1)
    for row in spec.rows:
        left, right = [], []
        for c in row.normal.corrections:
            scale = values(c.scale)
            left.append(scale if tied else (scale * values(c.left)))
            right.append(values(c.right).expand(batch, tokens, heads, n, -1))
        while len(right) < groups:
            left.append(values.full(0.0))
            right.append(nothing)
        lefts.append(side_by_side([x.expand(batch, tokens, heads, 1 if tied else n, -1) for x in left]))
        rights.append(side_by_side(right))
    if not tied:
        return {"right": stack_rows(rights), "left": stack_rows(lefts)}
    own = all(
        c.right is split_scale(t.key)[1] for r in spec.rows for c, t in zip(r.normal.corrections, r.terms, strict=False)
    )
    whole = None if own and spec.rank == groups else stack_rows(rights)
    return {"right": whole, "tie": stack_rows(lefts).squeeze(-1).squeeze(-1)}


def _widen(problem: Problem, layout: Columns) -> Problem:
    """Repeat per-channel decays, readouts and corrections for the normaliser's columns."""
    if not layout.den:
        return problem
    changes = {}
    for name in ("decay", "readout", "left", "right", "cross"):
        x = getattr(problem, name)
        if x is not None and x.shape[-1] > 1:
            assert layout.den == layout.p
            changes[name] = torch.cat([x, x], dim=-1)
    return _replace(problem, changes)


def _replace(problem: Problem, changes: Mapping[str, Tensor | None]) -> Problem:
    return replace(problem, **changes) if changes else problem  # type: ignore[arg-type]


def _rows(valid: Tensor, micro: int) -> Tensor:
    """[B, T] -> [B, rows, 1, 1, 1]."""
    return valid.repeat_interleave(micro, dim=1)[:, :, None, None, None]


def mask(problem: Problem, valid: Tensor) -> Problem:
    """The Problem with padding tokens that decay by one, write nothing and erase nothing."""
    keep = _rows(valid, problem.micro)
    one = 0.0 if problem.log else 1.0
    changes: dict[str, Tensor | None] = {"decay": torch.where(keep, problem.decay, one)}
    for name in ("key", "dense", "cross"):
        x = getattr(problem, name)
        if x is not None:
            changes[name] = torch.where(keep, x, 0.0)
    if problem.left is not None:
        changes["left"] = torch.where(keep.unsqueeze(-1), problem.left, 0.0)
    return _replace(problem, changes)


def _with_skip(spec: Spec, problem: Problem, values: Evaluator, layout: Columns) -> Problem:
    den = None if spec.ones is None else spec.ones.system.D
    skip = skip_columns(values, spec.system.D, den, layout)
    return problem if skip is None else _replace(problem, {"skip": skip})


def lower_gains(
    spec: Spec, values: Evaluator, shape: tuple[int, int, int, int], valid: Tensor | None
) -> tuple[Tensor, bool, Tensor]:
    """What moves the running maximum of every token: decays, whether they are logarithms, and gains, [B, T, H, n, p].

    For systems of one micro-step; arguments as in `lower`.
    """
    decay, log = decays_of(spec, values, shape[1])
    gain = largest_gain(spec, values, spec.rows[0], shape)
    assert gain is not None
    if valid is not None:
        decay = torch.where(_rows(valid, 1), decay, 0.0 if log else 1.0)
        gain = torch.where(_rows(valid, 1), gain, EMPTY)
    return decay, log, gain


def finish(spec: Spec, values: Evaluator, lowered: Lowered, y: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
    """y [B, T, H, P] and the state with all its columns, from the Problem's output [B, T, H, columns] and state."""
    if lowered.rescale is not None:
        y = y * lowered.rescale
    if lowered.skip is not None:
        y = y + lowered.skip
    if spec.rule is None:
        return y, final
    p = lowered.columns.p
    one = values.full(1.0).squeeze(-2) if lowered.one is None else lowered.one
    y = apply_rule(spec, values, y[..., :p], y[..., p:], one)
    if lowered.gain is not None:
        gain = lowered.gain.expand(*final.shape[:-1], -1)
        final = torch.cat([final, gain], dim=-1)
    return y, final


def apply_rule(spec: Spec, values: Evaluator, num: Tensor, den: Tensor, one: Tensor) -> Tensor:
    """The rule `normalize` applied to num [B, T, H, P], den [B, T, H, P or 1], and the number 1 in their scale."""
    assert spec.rule is not None
    env = dict(values.values) | {NUM: num.unsqueeze(-2), DEN: den.unsqueeze(-2), ONE: one.unsqueeze(-2)}
    return Evaluator(env, values.keys, values.p)(spec.rule).squeeze(-2)


def apply_linear_rule(spec: Spec, values: Evaluator, num: Tensor, den: Tensor, one: Tensor) -> Tensor:
    """`apply_rule`, where y is a matrix times what drives the system. Raises FormError unless it is linear in num."""
    found = apply_rule(spec, values, num, den, one)
    if found.is_meta:  # where a recording's size is asked for
        return found
    if not torch.allclose(apply_rule(spec, values, -3 * num, den, one), -3 * found, 1e-4, 0.0, equal_nan=True):
        raise FormError(
            f"{spec.name}: normalize = {spec.rule} is not linear in num, so y is no matrix times what drives the system"
        )
    return found


def true_state(spec: Spec, state: Tensor, p: int) -> Tensor:
    """The columns of S and of the normaliser, multiplied by e^m of the running maximum m, without m.

    m has no gradient here either: the gradient of a state is that of its other columns.
    """
    layout = columns(spec.inner, p)
    state = state[..., : layout.total]
    if not layout.gain:
        return state
    plain, gain = state.split([layout.p + layout.den, layout.gain], dim=-1)
    gain = tiled(gain.detach(), layout)
    overflows = gain > math.log(torch.finfo(gain.dtype).max)  # there a zero stays zero
    return plain * torch.where((plain == 0) & overflows, 0.0, gain).exp()
