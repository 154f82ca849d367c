"""What watches calls: the switch of `dsf.validate`, and a word about tensors whose tokens and heads look swapped.

`ON` is False until DSF_VALIDATE=1 or a `with dsf.validate()` says otherwise, so that a call that nobody watches reads
one module variable. The guard itself (dsf.checking.validate) belongs to a context, a thread or a task, as a `with`
block does.
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
    """What a value of the environment variable means: nothing, 0, false, no and off are no."""
    return (value or "").strip().lower() not in ("", "0", "false", "no", "off")


EVERYWHERE = asked_for(os.environ.get(VARIABLE))  # read once, when dsf is imported
ON = EVERYWHERE
_chosen: ContextVar[Guard | Off | None] = ContextVar("dsf_guard")
_lock = threading.Lock()
_open = 0  # blocks that are open in any thread
everywhere: Guard | None = None  # made by dsf/__init__.py where EVERYWHERE says so


class Off:
    """A guard that lets everything pass."""

    def end(self) -> None:
        """Nothing was held."""

    def inputs(self, *_: object) -> None:
        """Nothing is held."""

    def outputs(self, *_: object) -> None:
        """Nothing is held."""


def current() -> Guard | Off | None:
    """The guard of the innermost `with dsf.validate()`, else the environment variable's, else None.

    None while torch.compile traces, which would stop at what a guard does.
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
    """No guard looks into the calls of this block, which are dsf's own and hold to nothing that a user declared."""
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
    """Warn, naming the user's line, where there are more heads than tokens: [B, H, T, ·] may have been given.

    Called for the first call of a shape only. Calls from within dsf (layers, dsf.check and what it is given) are left
    alone. Returns whether it warned.
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
