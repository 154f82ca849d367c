"""Where in the user's function things are written, so that what only the whole System can tell names a line, too."""

from __future__ import annotations

import linecache
import sys
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from dsf.language.spec import Spec

PAIRS = "pairs"  # what takes places of the Key axis two by two, first
Thing = TypeVar("Thing", bound=Hashable)


class Places:
    """Lines of one function, by what is written there."""

    def __init__(self, code: CodeType) -> None:
        self.file, self.first = code.co_filename, code.co_firstlineno
        self.lines: dict[Hashable, int] = {}

    def text(self, number: int) -> str:
        """file:line: source."""
        source = linecache.getline(self.file, number).strip()
        return f"{self.file}:{number}: {source}" if source else f"{self.file}:{number}"

    def of(self, thing: Hashable) -> str | None:
        """The line where it was first written."""
        return self.text(self.lines[thing]) if thing in self.lines else None

    @property
    def signature(self) -> str:
        """The line of the def, which decorators may stand above."""
        number = self.first
        while linecache.getline(self.file, number).lstrip().startswith("@"):
            number += 1
        return self.text(number)

    def add(self, thing: Hashable, frame: FrameType | None) -> None:
        """Remember the line of the innermost frame that is in the function's file."""
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back
        if frame is not None:
            self.lines.setdefault(thing, frame.f_lineno)


_current: ContextVar[Places | None] = ContextVar("dsf_places", default=None)


@contextmanager
def noting(code: CodeType) -> Iterator[Places]:
    """While a recurrence's function runs: `note` remembers lines of it."""
    token = _current.set(Places(code))
    try:
        places = _current.get()
        assert places is not None
        yield places
    finally:
        _current.reset(token)


takers: weakref.WeakKeyDictionary[Spec, str] = weakref.WeakKeyDictionary()  # where declarations first take pairs


def note(thing: Thing) -> Thing:
    """It, the user's line remembered where a recurrence is being declared."""
    places = _current.get()
    if places is not None:
        places.add(thing, sys._getframe(1))
    return thing


def line_of_pairs(spec: Spec) -> str:
    """The user's line that first takes places in pairs, to follow an error; empty where none is known."""
    return f"\n  {takers[spec]}" if spec in takers else ""
