"""Registries in which operators look up the printed functions of a declaration by name.

Graphs hold these names, which depend on content alone, so that a saved graph means the same in another process. If the
functions are not printed there yet, `Registry.finders`, which dsf.triton.names fills, print them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

Known = TypeVar("Known")


class Registry(dict[str, Known]):
    """{name: what the operators of one kind know of a declaration}."""

    finders: ClassVar[list[Callable[[str, str], None]]] = []

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __missing__(self, name: str) -> Known:
        """Call every finder(kind, name), which must print and register that name, or raise."""
        for find in self.finders:
            find(self.kind, name)
        found = self.get(name)
        if found is None:
            raise KeyError(name)
        return found
