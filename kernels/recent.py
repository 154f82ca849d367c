"""A cache that keeps the most recently used entries."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Generic, TypeVar

Known = TypeVar("Known")


class Recent(Generic[Known]):
    """A thread-safe cache of at most `most` entries; the least recently used one is dropped first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.kept: OrderedDict[Any, Known] = OrderedDict()
        self._changing = threading.Lock()

    def get(self, key: Any) -> Known | None:
        """The value of a key, or None."""
        with self._changing:
            found = self.kept.get(key)
            if found is not None:
                self.kept.move_to_end(key)
            return found

    def put(self, key: Any, value: Known) -> None:
        """Store a value."""
        with self._changing:
            self.kept[key] = value
            self.kept.move_to_end(key)
            while len(self.kept) > self.most:
                self.kept.popitem(last=False)

    def clear(self) -> None:
        """Drop all entries."""
        with self._changing:
            self.kept.clear()
