"""Printed source, and its files, named by their content, for Triton and for people to read."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.util
import linecache
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from dsf.language.derived import digest
from dsf.language.errors import DsfError
from dsf.language.spec import Spec
from dsf.triton.print_operand import Operand

STALE = 3600.0  # seconds after which an unfinished file counts as abandoned


@dataclass(frozen=True)
class Source:
    """Printed source of one spec, and what its kernels need to know of it.

    operands: in the order of the kernel's arguments. sums: how many sums the gradients of Params take, `keyed` of them
    along the Key axis. separable: gradients of one entry do not depend on those of others, so that a program may
    process one entry after the other. special: special-function instructions for one entry and token.
    """

    name: str
    text: str
    operands: tuple[Operand, ...]
    sums: int = 1
    separable: bool = False
    special: int = 0
    keyed: int = 0

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits of the text's SHA-256."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def module(self) -> ModuleType:
        """The file on disk, imported (once a process)."""
        name = f"dsf_generated_{self.digest}"
        if name not in sys.modules:
            path = write(self)
            found = importlib.util.spec_from_file_location(name, path)
            assert found is not None
            module = importlib.util.module_from_spec(found)
            # The printed text is run, never the file, which may have changed: neither Python nor Triton, which takes
            # the lines from linecache, reads it. The file is for people, debuggers and profilers.
            linecache.cache[str(path)] = len(self.text), None, self.text.splitlines(keepends=True), str(path)
            exec(compile(self.text, str(path), "exec"), module.__dict__)
            sys.modules[name] = module
        return sys.modules[name]


def name_of(spec: Spec, source: Source, known: Any) -> str:
    """A program's name. known: what the operators know of it besides its functions."""
    printed = hashlib.sha256(f"{source.text}\n{known!r}".encode()).hexdigest()[:16]
    return f"{spec.name}-{digest(spec)}-{printed}"


def file_of(about: Sequence[str], functions: Iterable[Sequence[str]]) -> str:
    """The text of a printed file: a docstring with the lines `about`, imports, and functions."""
    head = ['"""' + about[0], *about[1:], '"""', "", "import triton", "import triton.language as tl", ""]
    head += ["from dsf.kernels.triton import functions as fn", "from dsf.kernels.triton import lanes, tile", ""]
    return "\n".join(head) + "".join("\n\n@triton.jit\n" + "\n".join(x) + "\n" for x in functions)


def cache_directory() -> Path:
    """The folder of printed source: DSF_CACHE_DIR, else dsf/ in the user's cache directory (XDG_CACHE_HOME, ~/.cache).

    If the latter cannot be written, or others can write to it: a temporary folder of this process. Raises DsfError for
    a DSF_CACHE_DIR that cannot be written.
    """
    chosen = os.environ.get("DSF_CACHE_DIR")
    if chosen:
        refused = _refusal(Path(chosen))
        if refused is not None:
            raise DsfError(f"DSF_CACHE_DIR={chosen} cannot hold the source that is printed: {refused}")
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    usual = Path(home) / "dsf"
    if not usual.is_absolute() or _refusal(usual) is not None or _is_open(usual.stat()):
        return _own_directory()
    return usual


def _refusal(path: Path) -> str | None:
    """Why a folder, which is created if needed, cannot be written; None when it can."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return f"{error.strerror} ({type(error).__name__})"
    return None if os.access(path, os.W_OK | os.X_OK) else "it is not writable"


def _is_open(found: os.stat_result) -> bool:
    """True where others than this user and root can change a file or folder."""
    if not hasattr(os, "getuid"):
        return False
    return found.st_uid not in (os.getuid(), 0) or bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


@functools.cache
def _own_directory() -> Path:
    """A new folder that only this user can access, removed when the process ends."""
    path = tempfile.mkdtemp(prefix="dsf-")  # mode 0700
    atexit.register(_remove, path, os.getpid())
    return Path(path)


def _remove(path: str, process: int) -> None:
    if os.getpid() == process:  # a forked child leaves it
        shutil.rmtree(path, ignore_errors=True)


def write(source: Source) -> Path:
    """The path of the source's file, which is written atomically (several processes may race).

    A file with other content, a link, or a file that others can write is replaced.
    """
    folder = cache_directory()
    try:
        return _write(source, folder)
    except OSError:  # a full disk, or a file of someone else in a shared folder
        if folder == _own_directory():
            raise
        return _write(source, _own_directory())


def _write(source: Source, folder: Path) -> Path:
    path = folder / f"{source.name}_{source.digest}.py"
    if _holds(path, source.text):
        return path
    _clean(folder)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".tmp")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(source.text)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    return path


def _holds(path: Path, text: str) -> bool:
    """True for a regular file with exactly that text which nobody else can change."""
    try:
        found = path.lstat()
        return stat.S_ISREG(found.st_mode) and not _is_open(found) and path.read_bytes() == text.encode()
    except OSError:
        return False


def _clean(folder: Path) -> None:
    """Remove unfinished files of processes that died. Other processes may do the same at the same time."""
    for left in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - left.lstat().st_mtime > STALE:
                left.unlink()
