"""The rows of a micro-step as the chunk kernels take them: one correction and one product of B each.

Where A sums several corrections, a micro-step becomes a *group* of rows. All rows of a group read the state before the
micro-step, none what another row of it changes; the first one pays the decay. Groups have as many rows as the largest,
rounded up to a power of two: chunks then hold whole groups. Rows that fill a group up read and write nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dsf.language.expr import Expr, const
from dsf.language.operator import Correction, Normal, split_scale, times
from dsf.language.spec import Row, Spec

MOST = 8  # rows of a group that the kernels take: half of the shortest chunk
Parts = list[tuple[Correction | None, int | None]]  # what a row has: a correction, and the place of a product of B


def lines_of(spec: Spec) -> tuple[int, list[Row], list[Row]]:
    """(rows of a group, all rows of a token, those of the system driven by ones).

    Only the first row of a group has the decay, the others have 1. A row has at most one correction and one term.
    """
    steps = [_parts(row) for row in spec.rows]
    group = 1 << (max(1, *map(len, steps)) - 1).bit_length()
    ones = spec.ones_rows if spec.ones is not None else spec.rows
    lines, driven = ([x for row, parts in zip(rows, steps, strict=True) for x in _lines(row, parts, group)]
                     for rows in (spec.rows, ones))  # fmt: skip
    return group, lines, driven


def paid(decays: Sequence[Expr], group: int, none: Expr) -> tuple[Expr, ...]:
    """The decays of all rows from those of micro-steps. none: what leaves the state as it is."""
    return tuple(x for decay in decays for x in (decay, *[none] * (group - 1)))


def _parts(row: Row) -> Parts:
    """The fewest rows for a micro-step: a correction and what is written at its key share one, then any two do."""
    free = list(range(len(row.terms)))
    found: Parts = []
    for c in _merged(row.normal.corrections):
        same = next((i for i in free if split_scale(row.terms[i].key)[1] is c.left), None)
        free = [i for i in free if i != same]
        found.append((c, same))
    for place, (correction, term) in enumerate(found):
        if term is None and free:
            found[place] = correction, free.pop(0)
    return [*found, *((None, i) for i in free)]


def _merged(corrections: tuple[Correction, ...]) -> list[Correction]:
    """Corrections that read along one vector, as the terms of a product that is multiplied out do, are one."""
    found: dict[Expr, Correction] = {}
    for c in corrections:
        same = found.get(c.right)
        if same is not None and same.left is c.left:
            c = Correction(same.scale + c.scale, c.left, c.right)
        elif same is not None:
            c = Correction(const(1), times(same.scale, same.left) + times(c.scale, c.left), c.right)
        found[c.right] = c
    return list(found.values())


def _lines(row: Row, parts: Parts, group: int) -> list[Row]:
    """The rows of one micro-step."""
    if row.dense is not None:
        return [row] * group
    found = []
    for place in range(group):
        c, term = parts[place] if place < len(parts) else (None, None)
        decay = const(1) if place else row.normal.decay
        normal = Normal(decay, () if c is None else (c,), row.normal.angle)
        found.append(replace(row, normal=normal, terms=() if term is None else (row.terms[term],)))
    return found
