"""The update of a state entry by one token, A S + B, and of its cotangent.

A = 1 - F G and B = F Z (a rule that erases before it writes) give S + F (Z - G S). Where F, G and Z are cheaper than A
and B, this form takes fewer operations an entry, and so do the gradients.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from dsf.language.expr import KEY, Expr, children_first, const
from dsf.language.operator import times

POWERS = range(2, 5)  # integer powers that count as products


@dataclass(frozen=True)
class Update:
    """after: S after the token, from S before it; before: the cotangent of S before it, from that after.

    factor: F of the form S + F (Z - G S); None for A S + B.
    """

    after: Expr
    before: Expr
    factor: Expr | None = None


def update(decay: Expr, write: Expr, state: Expr, cotangent: Expr) -> Update:
    """The update by A = decay and B = write, in the form that takes fewer operations."""
    plain = Update(times(decay, state) + write, times(decay, cotangent))
    if decay.op != "sub" or not decay.args[0].is_constant or decay.args[0].value != 1:
        return plain
    erased, written = _factors(decay.args[1]), _factors(write)
    common = erased & written
    f, g, z = (_product(x.elements()) for x in (common, erased - common, written - common))
    if not common or g.is_constant or z.is_constant:
        return plain
    found = Update(state + f * (z - g * state), cotangent - g * (f * cotangent), f)
    return found if _cost(found) < _cost(plain) else plain


def _factors(x: Expr) -> Counter[Expr]:
    """The factors of a product and how often each occurs."""
    if x.op == "mul":
        return _factors(x.args[0]) + _factors(x.args[1])
    if x.op == "pow" and x.args[1].is_constant and x.args[1].value in POWERS:
        return Counter({x.args[0]: int(x.args[1].value)})
    return Counter({x: 1})


def _product(factors: Iterable[Expr]) -> Expr:
    """The product of factors, those without a Key axis first."""
    found = sorted(factors, key=lambda x: KEY in x.axes)
    return functools.reduce(times, found, const(1))


def _cost(found: Update) -> int:
    """Operations for an entry."""
    return sum(bool(x.args) and KEY in x.axes for x in children_first(found.after))
