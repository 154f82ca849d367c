"""The errors users see. Each says what was expected and what was given, by the user's names."""

from __future__ import annotations

from collections.abc import Hashable


class DsfError(ValueError):
    """Base of the errors below, and a ValueError.

    A few errors are Python's own: KeyError of `dsf.mixers.get`, TypeError, and RuntimeError where a form lacks second
    derivatives.
    """


class TraceError(DsfError):
    """A recurrence is declared wrongly. @dsf.recurrence raises it, with the recurrence's name and the user's line.

    about: the part of the declaration whose line is named; None: the System.
    """

    def __init__(self, text: str = "", *, about: Hashable = None) -> None:
        super().__init__(text)
        self.about = about


class InputError(DsfError):
    """An argument does not fit: of a recurrence, a layer, a model or a tool. Names whose it is, expected and given."""


class FormError(DsfError):
    """A recurrence does not have what was asked for: a form, a backend, a state of fixed size, a matrix."""


class LawError(DsfError, AssertionError):
    """A recurrence or a user's function breaks a law. Report.raise_if_failed raises it, with the report as its text."""
