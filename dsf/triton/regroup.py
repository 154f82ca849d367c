"""Products regrouped so that factors without a Key axis are multiplied first: N entries then take one product."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from dsf.language.expr import KEY, Expr, children_first, const, inputs_of, rebuild
from dsf.language.functions import sum_key, where
from dsf.language.operator import summands, times

Sides = tuple["Expr | None", "Expr | None"]  # the factors with a Key axis, and those without


def regroup(roots: Sequence[Expr], atoms: Iterable[Expr] = (), kept: Collection[Expr] = ()) -> list[Expr]:
    """The same expressions, with (k · a) · x as k · (a · x) and Σ_n a k_n q_n as a Σ_n k_n q_n (a, x: no Key axis).

    Products that are used more than once, `kept` ones, and those of `atoms` alone stay as they are.
    """
    order, free = children_first(*roots), set(atoms)
    uses = Counter(a for x in order for a in x.args)
    uses.update(roots)
    done: dict[Expr, Expr] = {}
    sides: dict[Expr, Sides] = {}
    for x in order:
        same = rebuild(x, tuple(done[a] for a in x.args))
        given = [
            sides[a] if KEY not in a.axes or uses[a] == 1 or any(b.is_constant for b in a.args) else (done[a], None)
            for a in x.args
        ]
        sides[x] = (None, same) if KEY not in x.axes else (same, None)
        if x.op in ("mul", "div") and KEY in x.axes and x not in kept and not set(inputs_of(x)) <= free:
            sides[x] = _product(x, same, *given)
        elif x.op == "sum_key" and given[0][0] is not None and given[0][1] is not None:
            same = times(sum_key(given[0][0]), given[0][1])
            sides[x] = (None, same)
        key, rest = sides[x]
        done[x] = same if key is None or rest is None or {key, rest} == set(same.args) else times(key, rest)
    return [done[x] for x in roots]


def _product(x: Expr, same: Expr, first: Sides, second: Sides) -> Sides:
    """The sides of a product or quotient from those of its operands."""
    (key, rest), (other_key, other_rest) = first, second
    if x.op == "div" and key is None:  # no numerator with a Key axis
        return same, None
    if rest is None and other_rest is not None:
        rest = const(1) / other_rest if x.op == "div" else other_rest
    elif rest is not None and other_rest is not None:
        rest = rebuild(x, (rest, other_rest))
    if key is None:
        key = other_key
    elif other_key is not None:
        key = rebuild(x, (key, other_key))
    return (same, None) if rest is None else (key, rest)


def collect(x: Expr) -> Expr:
    """A sum, also one under a sum over channels, with a common Key vector factored out.

    a k + b x + c k is k (a + c) + b x, so that N entries are multiplied by k once.
    """
    if x.op == "sum_value":
        return rebuild(x, (collect(x.args[0]),))
    terms = [(sign, _factors(part)) for sign, part in summands(x)]
    count = Counter(f for _, factors in terms for f in set(factors) if f.axes == {KEY})
    common = next((f for f in count if count[f] > 1), None)
    if common is None:
        return x
    sums: dict[str, Expr] = {"key": const(0), "rest": const(0), "others": const(0)}
    for sign, factors in terms:
        left = list(factors)
        if common in left:
            left.remove(common)
        part = functools.reduce(times, left, const(sign))
        where = "others" if common not in factors else "key" if KEY in part.axes else "rest"
        sums[where] = sums[where] + part
    return sums["others"] + common * (sums["key"] + sums["rest"])


def inward(x: Expr) -> Expr:
    """tanh(k · where(c, 0, a)) for where(c, 0, tanh(k · a)): one selection a token, not one an entry.

    c and a have no Key axis. A k that is not finite is then not masked. Other expressions stay as they are.
    """
    if x.op != "where" or KEY in x.args[0].axes:
        return x
    condition, *branches = x.args[0], inward(x.args[1]), inward(x.args[2])
    for i, zero in enumerate(branches):
        other = branches[1 - i]
        if not (zero.is_constant and zero.value == 0) or other.op != "tanh":
            continue
        factors = _factors(other.args[0])
        place = next((j for j, f in enumerate(factors) if KEY not in f.axes), None)
        if place is not None:
            kept = [zero, factors[place]] if i == 0 else [factors[place], zero]
            factors[place] = where(condition, *kept)
            return rebuild(other, (functools.reduce(times, factors),))
    return x


def _factors(x: Expr) -> list[Expr]:
    """The factors of a product; a factor without a Key axis is not split further."""
    return _factors(x.args[0]) + _factors(x.args[1]) if x.op == "mul" and KEY in x.axes else [x]
