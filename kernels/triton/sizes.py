"""Arithmetic of sizes by comparisons alone, so that torch.compile may leave numbers of tokens and sequences open."""

from __future__ import annotations


def power(size: int) -> int:
    """The power of two that holds `size`."""
    found = 1
    while found < size:
        found *= 2
    return found


def bits(size: int) -> int:
    """How many binary digits it has."""
    found = 0
    while size >= 1 << found:
        found += 1
    return found


def bases(first: int, stop: int, step: int) -> list[int]:
    """range(first, stop, step)."""
    found = []
    while first < stop:
        found.append(first)
        first = first + step
    return found
