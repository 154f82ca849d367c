"""What was used last, up to a number of things."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Generic, TypeVar

Known = TypeVar("Known")


class Recent(Generic[Known]):
    """Values by key, from any thread; of more than `most` the one that was asked for longest ago is forgotten first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.kept: OrderedDict[Any, Known] = OrderedDict()
        self._changing = threading.Lock()

    def get(self, key: Any) -> Known | None:
        """What was put there, or None."""
        with self._changing:
            found = self.kept.get(key)
            if found is not None:
                self.kept.move_to_end(key)
            return found

    def put(self, key: Any, value: Known) -> None:
        """Keep value under key."""
        with self._changing:
            self.kept[key] = value
            self.kept.move_to_end(key)
            while len(self.kept) > self.most:
                self.kept.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        with self._changing:
            self.kept.clear()
