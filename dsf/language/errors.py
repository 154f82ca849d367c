"""The errors users see. Each says what was expected and what was given, by the user's names."""

from __future__ import annotations

from collections.abc import Hashable


class DsfError(ValueError):
    """Base of every error dsf raises on purpose."""


class TraceError(DsfError):
    """A recurrence is declared wrongly: raised by @dsf.recurrence, names the recurrence and the user's line.

    about: what in the declaration it is about, whose line is then named; by default the System.
    """

    def __init__(self, text: str = "", *, about: Hashable = None) -> None:
        super().__init__(text)
        self.about = about


class InputError(DsfError):
    """A call does not fit the declaration: names the recurrence, the argument, expected and given."""


class FormError(DsfError):
    """The structure does not have the wanted form or backend."""


class LawError(DsfError, AssertionError):
    """A recurrence or a user's function breaks a law: raised by Report.raise_if_failed, holds the whole report."""
