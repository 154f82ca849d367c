"""The switch of `dsf.validate`, and a warning for tensors whose tokens and heads look swapped.

`ON` is False unless DSF_VALIDATE=1 is set or a `with dsf.validate()` is open, so an unchecked call only reads one
module variable. The guard itself (dsf.checking.validate) belongs to the context (thread or task) of its `with` block.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import FrameType
from typing import TYPE_CHECKING

import torch

from dsf.call.bind import Sizes
from dsf.language.spec import Spec

if TYPE_CHECKING:
    from dsf.checking.validate import Guard

VARIABLE = "DSF_VALIDATE"


def asked_for(value: str | None) -> bool:
    """The meaning of a value of DSF_VALIDATE: False for none, empty, 0, false, no and off."""
    return (value or "").strip().lower() not in ("", "0", "false", "no", "off")


EVERYWHERE = asked_for(os.environ.get(VARIABLE))  # read once, when dsf is imported
ON = EVERYWHERE
_chosen: ContextVar[Guard | Off | None] = ContextVar("dsf_guard")
_lock = threading.Lock()
_open = 0  # open blocks in all threads
everywhere: Guard | None = None  # set by dsf/__init__.py if EVERYWHERE


class Off:
    """A guard that checks nothing."""

    def end(self) -> None:
        """Does nothing."""

    def inputs(self, *_: object) -> None:
        """Does nothing."""

    def outputs(self, *_: object) -> None:
        """Does nothing."""


def current() -> Guard | Off | None:
    """The guard of the innermost `with dsf.validate()`, else the environment variable's, else None.

    None while torch.compile traces, since a guard would break the graph.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    return _chosen.get(everywhere)


def enter(guard: Guard | Off) -> Token[Guard | Off | None]:
    """Make a guard the current one."""
    _count(1)
    return _chosen.set(guard)


def leave(token: Token[Guard | Off | None]) -> None:
    """Undo `enter`."""
    _chosen.reset(token)
    _count(-1)


@contextmanager
def unwatched() -> Iterator[None]:
    """Switches the guard off in a block, for dsf's internal calls, whose inputs no user declared."""
    if not ON or torch.compiler.is_dynamo_compiling():
        yield
        return
    token = enter(Off())
    try:
        yield
    finally:
        leave(token)


def _count(change: int) -> None:
    global ON, _open
    with _lock:
        _open += change
        ON = EVERYWHERE or _open > 0


def looks_swapped(spec: Spec, sizes: Sizes) -> bool:
    """Warn at the user's line where there are more heads than tokens: the inputs may be [B, H, T, ·].

    Runs for the first call of a shape only. Calls from within dsf (layers, dsf.check and functions that it calls) never
    warn. Returns whether it warned.
    """
    if sizes.heads <= sizes.tokens:
        return False
    depth, names = 0, list[str]()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names.append(frame.f_globals.get("__name__", ""))
        depth += depth == len(names) - 1 and names[-1].startswith("dsf.call.")
        frame = frame.f_back
    if any(name.partition(".")[0] == "dsf" for name in names[depth:]):
        return False
    warnings.warn(
        f"{spec.name}: the inputs have H = {sizes.heads} heads and T = {sizes.tokens} tokens; a call takes "
        "[B, T, H, ·], tokens before heads. If [B, H, T, ·] was given, x.transpose(1, 2) mends it. Said once",
        UserWarning,
        stacklevel=depth + 2,
    )
    return True
