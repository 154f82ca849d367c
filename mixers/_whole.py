"""Files that are whole or not there: written beside their places, then moved into them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def whole_file(path: Path, write: Callable[[Path], object]) -> None:
    """Call write(other) for a file beside `path`, then move that file to `path`. Where write fails, nothing changes."""
    beside = path.with_name(f".{path.stem}-{os.getpid()}.part{path.suffix}")
    try:
        write(beside)
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # a file system that is read-only refuses that, too
            beside.unlink(missing_ok=True)
        raise


def whole_files(folder: Path, write: Callable[[Path], object]) -> list[str]:
    """Call write(other) for an empty folder, then move the files in it into `folder`, one by one; returns their names.

    Where write fails, all files that were there before stay unchanged.
    """
    beside = folder / f".part{os.environ.get('RANK', '')}"  # torchrun's processes may all write
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        write(beside)
        names = sorted(file.name for file in beside.iterdir())
        for name in names:
            (beside / name).replace(folder / name)
        return names
    finally:
        shutil.rmtree(beside, ignore_errors=True)
