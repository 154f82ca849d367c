"""Tokens that write twice, at their own time and once more as the next token begins, with one row in place of two.

Mamba-3's trapezoid (arXiv 2603.15569) writes X_t = k_t v_tᵀ twice, at token t and once more as token t + 1 begins:
S_t = A_t (S_{t-1} + g_t X_{t-1}) + w_t X_t. The state without what a token writes last, S'_t = S_t - w_t X_t, obeys
S'_t = A_t (S'_{t-1} + (w_{t-1} + g_t) X_{t-1}), one write a token, and C_tᵀ S_t = C_tᵀ S'_t + w_t ⟨C_t, k_t⟩ v_t. At
the first token of a call w_{t-1} is 0, as its state has that write; the last state takes w_T X_T. Where C is a sum of
keys with gates by channel, ⟨C_t, k_t⟩ is one with the same gates.

The GPU's chunks take no token's write to the next one: S″_t = S_t + g_{t+1} X_t obeys S″_t = A_t S″_{t-1} + (w_t +
g_{t+1}) X_t, and C_tᵀ S_t is C_tᵀ S″_t whose own token has written w_t X_t alone. No y depends on a later g. At the
last token of a call g_{t+1} is 0; the first state takes g_1 X_0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dsf.language.derived import derived
from dsf.language.expr import KEY, VALUE, Expr, children_first, const
from dsf.language.frame import Early, Frame, Late, Made, map_system, turns
from dsf.language.functions import sum_key
from dsf.language.gauge import NoGaugeError, into_gauge
from dsf.language.operator import I, diag, factors_of, quotient, split_factors, summands, times
from dsf.language.reads import expanded
from dsf.language.system import System

if TYPE_CHECKING:
    from dsf.language.spec import Spec


@dataclass(frozen=True)
class _Pair:
    """The two writes of x: again · prev(x) as a token begins, and own · x."""

    again: Expr
    x: Expr
    own: Expr


@derived
def late(spec: Spec) -> Frame | None:
    """The frame of `spec` in which the next token makes a token's writes; None where it does not write them again.

    The forms that walk token by token take `Spec.frame`, whose state is the declaration's.
    """
    pairs = _pairs(spec)
    if not pairs:
        return None
    made = Made(spec)

    def plain(x: Expr) -> Expr:
        return made.without_pairs(made.without_prev(x))

    map_system(spec.system, plain)  # for leaves in the declaration's order, as the state holds them
    every, written = list[Late](), const(0)
    for pair in pairs:
        node, before = made.node("late", frozenset()), made.without_pairs(made.lagged(pair.x, 1))
        key, value = split_factors(pair.x, lambda factor: KEY in factor.axes)
        every.append(Late(node, plain(pair.own), plain(key), plain(value)))
        written = written + times(before, node + plain(pair.again))
    target = spec.system.micro_steps[len(pairs)]
    last = replace(spec.system, A=target.A, B=const(0), earlier=(System(A=I, B=written),))
    system, angles = map_system(last, plain), None
    decay = made.spec(system).rows[1].normal.decay
    if turns(system):
        try:
            system, angles = into_gauge(made, system)
        except NoGaugeError:
            return None
    parts = [times(part, decay) if sign > 0 else -times(part, decay) for sign, part in summands(system.earlier[0].B)]
    skip, c = spec.system.D, spec.readout
    for pair in pairs:
        key, value = split_factors(pair.x, lambda factor: KEY in factor.axes)
        seen = plain(pair.own * _read(c, key))
        made.torch[seen] = made.node("seen", seen.axes)
        own = times(made.torch[seen], value)
        skip = own if skip is const(0) else skip + own
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    system = replace(system, A=diag(decay), B=total, D=plain(skip), earlier=())
    return replace(made.frame(map_system(system, made.by_torch), angles), late=tuple(every))


@derived
def early(spec: Spec) -> Frame | None:
    """The frame of `spec` in which a token makes the next one's write of it, too; None where there is no such write.

    Its system has inputs `unseen`, which forms other than the GPU's chunks do not know.
    """
    pairs = _pairs(spec)
    if not pairs:
        return None
    made, every, written = Made(spec), dict[Expr, Early](), list[Expr]()

    def plain(x: Expr) -> Expr:
        return made.without_pairs(made.without_prev(x))

    system = map_system(spec.system, plain)  # with leaves in the declaration's order, as the state holds them
    for pair in pairs:
        again, before = plain(pair.again), made.without_pairs(made.lagged(pair.x, 1))
        known = every.get(again)
        if known is None:
            every[again] = Early(made.node("next", frozenset()), again, before)
        else:
            every[again] = replace(known, before=known.before + before)
        written.append(times(plain(pair.x), plain(pair.own) + every[again].node))
    last = replace(system, A=system.micro_steps[len(pairs)].A, B=sum(written[1:], written[0]), earlier=())
    angles = None
    if turns(last):
        try:
            last, angles = into_gauge(made, last)
        except NoGaugeError:
            return None
    last = made.in_rows(map_system(last, made.by_torch), len(pairs))
    last = replace(last, unseen=tuple(x.node for x in every.values()))
    return replace(made.frame(last, angles), early=tuple(every.values()))


def _pairs(spec: Spec) -> list[_Pair]:
    """All writes of a token, if it makes each of them twice and only decays and turns in between; else none."""
    system = spec.system
    special = (system.normalize, system.gauge, system.window, system.solve)
    if spec.made or any(x is not None for x in special) or system.read != "after":
        return []
    if any(read.axes != {KEY} for _, read in _reads(spec.readout)):
        return []
    again = [write for step in system.micro_steps if (write := _again(step)) is not None]
    first, *rest = system.micro_steps[len(again) :] or (None,)
    plain = len(spec.rows) == len(system.micro_steps) and not spec.rank
    if not again or first is None or not plain or any(step.A.kind != "identity" for step in rest):
        return []
    own = [step.B for step in (first, *rest)]
    pairs = list[_Pair]()
    for scale, x in again:
        found = next(((b, share) for b in own if (share := _share(b, x)) is not None), None)
        if found is None:
            return []
        own.remove(found[0])
        pairs.append(_Pair(scale, x, found[1]))
    return [] if own else pairs


def _reads(c: Expr) -> list[tuple[Expr, Expr]]:
    """(gate, key) of the products whose sum is C, which is one where it has no gate."""
    parts = expanded(c) if VALUE in c.axes else [c]
    return [split_factors(part, lambda factor: KEY not in factor.axes) for part in parts]


def _read(c: Expr, key: Expr) -> Expr:
    """⟨C, key⟩."""
    return sum((times(gate, sum_key(read * key)) for gate, read in _reads(c)), const(0))


def _again(step: System) -> tuple[Expr, Expr] | None:
    """(scale, x) of a step that only writes scale · prev(x), for a scale without Key and Value axis; else None."""
    before = [f for f, inverse in factors_of(step.B) if f.op == "prev" and not inverse]
    if step.A.kind != "identity" or step.C is not None or len(before) != 1 or _delays(before[0].args[0]):
        return None
    scale, _ = split_factors(step.B, lambda factor: factor is not before[0])
    parts = {factor.axes for factor, _ in factors_of(before[0].args[0])}
    whole = before[0].args[0].axes == {KEY, VALUE} and {KEY, VALUE} not in parts
    return (scale, before[0].args[0]) if whole and not scale.axes and not _delays(scale) else None


def _share(b: Expr, x: Expr) -> Expr | None:
    """The expression without Key and Value axis whose product with x is b; None for others."""
    share = quotient(b, x)
    return None if share is None or share.axes or _delays(share) else share


def _delays(x: Expr) -> bool:
    return any(node.op == "prev" for node in children_first(x))
