"""The driving input u of a system, for B_t u_t and D_t u_t, found from the declaration."""

from __future__ import annotations

from dataclasses import dataclass

from dsf.language.expr import VALUE, Expr, const, inputs_of
from dsf.language.operator import factors_of, summands, times
from dsf.language.spec import Spec


@dataclass(frozen=True)
class Drive:
    """A system that is linear in one Value input u, inputs[r] in row r (None where a row writes nothing).

    gains: per row, per term, the term's value with u = 1; dense: per row, B with u = 1 where B does not factor.
    skip: D with the last row's u = 1.
    """

    inputs: tuple[Expr | None, ...]
    gains: tuple[tuple[Expr, ...], ...]
    dense: tuple[Expr | None, ...]
    skip: Expr


def drive_of(spec: Spec) -> Drive | None:
    """The driving input of `spec`, or None where no one input enters B and D linearly and A and C not at all."""
    spec = spec.unnormalised
    if spec.is_attention:
        return None
    fixed = [spec.readout] + [x for r in spec.rows for x in (r.normal.decay, r.normal.angle)]
    fixed += [x for r in spec.rows for c in r.normal.corrections for x in (c.scale, c.left, c.right)]
    fixed += [x for r in spec.rows for t in r.terms for x in (t.key, t.gain) if x is not None]
    used = {i.attrs[0] for i in inputs_of(*fixed)}
    names: set[str] | None = None
    for row in spec.rows:
        for part in [t.value for t in row.terms] or ([row.dense] if row.dense is not None else []):
            for _, summand in summands(part):
                found = {f.attrs[0] for f in _bare(summand)} - used
                names = found if names is None else names & found
    if not names or len(names) > 1:
        return None
    return _with(spec, names.pop())


def _bare(part: Expr) -> list[Expr]:
    return [f for f, inverse in factors_of(part) if f.op == "input" and f.axes == {VALUE} and not inverse]


def _with(spec: Spec, name: str) -> Drive | None:
    inputs: list[Expr | None] = []
    gains, dense = [], []
    for row in spec.rows:
        parts = [t.value for t in row.terms] or ([row.dense] if row.dense is not None else [])
        nodes = {f for p in parts for _, s in summands(p) for f in _bare(s) if f.attrs[0] == name}
        if len(nodes) > 1:
            return None
        node = nodes.pop() if nodes else None
        inputs.append(node)
        divided = [_divide(p, node) if node is not None else p for p in parts]
        if None in divided:
            return None
        whole = [x for x in divided if x is not None]
        gains.append(tuple(whole) if row.dense is None else ())
        dense.append(whole[0] if row.dense is not None else None)
    skip = spec.system.D
    if not (skip.is_constant and skip.value == 0):
        last = inputs[-1]
        own = None if last is None else _divide(skip, last)
        if own is None:
            return None
        skip = own
    return Drive(tuple(inputs), tuple(gains), tuple(dense), skip)


def multiple_of(x: Expr, value: Expr) -> Expr | None:
    """m with x = m · value, every factor of value a factor of x as written; else None."""
    for factor, inverse in factors_of(value):
        if inverse or factor.is_constant:
            x = x * factor if inverse else x / factor
            continue
        divided = _divide(x, factor)
        if divided is None:
            return None
        x = divided
    return x


def _divide(x: Expr, node: Expr) -> Expr | None:
    """x / node where every summand of x has node as a factor exactly once, and nowhere else; else None."""
    total: Expr = const(0)
    for sign, part in summands(x):
        factors = factors_of(part)
        if sum(f is node for f, inverse in factors if not inverse) != 1:
            return None
        rest: Expr = const(sign)
        for f, inverse in factors:
            if f is node and not inverse:
                continue
            if node in inputs_of(f):
                return None
            rest = rest / f if inverse else times(rest, f)
        total = rest if total.is_constant and total.value == 0 else total + rest
    return total
