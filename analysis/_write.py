"""Atomic writes: a file is first written beside its path, then moved into place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from dsf.language.errors import DsfError


def whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call write(other) for a file beside `path`, then move that file to `path`.

    Raises DsfError, which names the path, where the disk is full or not writable; an old file then stays unchanged.
    """
    try:
        with beside(path) as other:
            write(other)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise DsfError(f"cannot write {path}: {why}; an existing file is unchanged") from error


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`: moved to `path` at the end of the block, removed if the block fails."""
    other = path.with_name(f".{path.stem}-{os.getpid()}.part{path.suffix}")
    try:
        yield other
        other.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # a file system that is read-only refuses that, too
            other.unlink(missing_ok=True)
        raise


def whole_text(path: Path, text: str) -> None:
    """`whole` for a text in UTF-8."""
    whole(path, lambda other: other.write_text(text, encoding="utf-8"))
