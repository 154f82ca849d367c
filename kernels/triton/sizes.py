"""Arithmetic of sizes by comparisons alone, so that numbers of tokens and sequences may be symbols."""

from __future__ import annotations


def power(size: int) -> int:
    """The smallest power of two that is at least `size`. Limits belong inside: power(min(size, limit)) asks one thing
    of a size beyond the limit, and min(power(size), limit) one more for every doubling."""
    found = 1
    while found < size:
        found *= 2
    return found


def padded(size: int) -> int:
    """`power`, at least 16: the shortest side of a matrix product's tile."""
    return max(16, power(size))


def bits(size: int) -> int:
    """The number of binary digits of `size`."""
    found = 0
    while size >= 1 << found:
        found += 1
    return found


def bases(first: int, stop: int, step: int) -> list[int]:
    """list(range(first, stop, step))."""
    found = []
    while first < stop:
        found.append(first)
        first = first + step
    return found
