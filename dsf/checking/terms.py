"""Parts of an expression that a demand on it is divided among (dsf.checking.ranges)."""

from __future__ import annotations

from collections.abc import Container

from dsf.language.expr import Expr, const


def mixture(a: Expr, b: Expr) -> tuple[Expr, list[list[Expr]]] | None:
    """The share g of a sum g · x + (1 - g) · y, which lies between x and y for every g from 0 to 1, and the other
    factors of either addend: of floor + (1 - floor) · keep, floor and [[], [keep]]. None for another sum."""
    for one, other in ((a, b), (b, a)):
        mine, others = _factors(one), _factors(other)
        for rest in mine:
            if rest.op == "sub" and rest.args[0] is const(1) and rest.args[1] in others:
                mine.remove(rest)
                others.remove(rest.args[1])
                return rest.args[1], [others, mine]
    return None


def _factors(x: Expr) -> list[Expr]:
    return [f for arg in x.args for f in _factors(arg)] if x.op == "mul" else [x]


def reached(x: Expr, through: Container[str]) -> list[str]:
    """Names of the inputs of x that operations `through` lead to; a sigmoid's argument may be none of them."""
    found: set[Expr] = set()
    left = [x]
    while left:
        node = left.pop()
        if node not in found and (node.op == "input" or node.op in through):
            found.add(node)
            left += node.args
    return sorted({node.attrs[0] for node in found if node.op == "input"})
