"""Atomic writes, with what a disk refuses in words."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from dsf.language.errors import DsfError
from dsf.mixers import _whole

FULL = "No space left", "Disk quota", "File too large", "inline_container"  # the last is torch's archive, cut short
Left = Callable[[], str]  # what is left when a write fails, in words


def untouched() -> str:
    """What is left of a file that could not be written again."""
    return "an existing file is unchanged"


@contextlib.contextmanager
def refusals(path: Path, left: Left = untouched, kinds: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Turn what a disk refuses inside into a DsfError of one sentence, whichever library met it.

    kinds: the exceptions that say so; others pass, but for those that speak of a full disk.
    """
    try:
        yield
    except DsfError:
        raise
    except Exception as error:  # safetensors has an error of its own
        if any(words in str(error) for words in FULL):
            raise DsfError(f"the disk of {path} is full; {left()}") from error
        if not isinstance(error, kinds):
            raise
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise DsfError(f"cannot write {path}: {why}; {left()}") from error


def whole(path: Path, write: Callable[[Path], object], left: Left = untouched) -> None:
    """Call write(other) for a file beside `path`, then move that file to `path`, whose folder is made where none is.

    Raises DsfError, which names the path, where the disk is full or not writable; an old file then stays unchanged.
    """
    with refusals(path, left, (OSError, RuntimeError)):  # torch.save's are RuntimeErrors
        path.parent.mkdir(parents=True, exist_ok=True)
        _whole.whole_file(path, write)


def whole_text(path: Path, text: str, left: Left = untouched) -> None:
    """`whole` for a text in UTF-8."""
    whole(path, lambda other: other.write_text(text, encoding="utf-8"), left)


def whole_files(folder: Path, write: Callable[[Path], object], left: Left = untouched) -> None:
    """Call write(other) for an empty folder, then move the files in it into `folder`, one by one.

    Raises DsfError as `whole`; where write fails, all files that were there before stay unchanged.
    """
    with refusals(folder, left):
        _whole.whole_files(folder, write)
