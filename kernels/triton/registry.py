"""Where operators find the printed functions of a declaration: by a name, which graphs hold, too.

A name is made of content alone, so a graph that was saved in one process means the same in another. There the functions
may have yet to be printed: `Registry.finders`, which the floor above fills, are asked to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

Known = TypeVar("Known")


class Registry(dict[str, Known]):
    """What the operators of one kind know of declarations, by name."""

    finders: ClassVar[list[Callable[[str, str], None]]] = []

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __missing__(self, name: str) -> Known:
        """Ask every finder, as finder(kind, name), to print what has that name and to put it here, or to raise."""
        for find in self.finders:
            find(self.kind, name)
        found = self.get(name)
        if found is None:
            raise KeyError(name)
        return found
