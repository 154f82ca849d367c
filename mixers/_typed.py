"""What type checkers are told of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def called_as(forward: F) -> Callable[[Any], F]:
    """Tell type checkers, to whom torch says Any of a module's call, that `__call__` is typed as `forward`."""
    return lambda _: forward
