"""Printed source, and the files named by its content in which Triton reads it and people may."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

from dsf.triton.print_operand import Operand


@dataclass(frozen=True)
class Source:
    """Generated source of one spec, and how its kernels are called.

    sums: what it sums for Params' gradients, `keyed` of them along the Key axis. separable: no entry's gradients wait
    for another's, so that a program may take one entry after the other. special: instructions of the unit for functions
    that an entry of a channel takes.
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
        """Names the text by its content."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def module(self) -> ModuleType:
        """The file on disk, imported (once a process)."""
        name = f"dsf_generated_{self.digest}"
        if name not in sys.modules:
            path = write(self)
            found = importlib.util.spec_from_file_location(name, path)
            assert found is not None and found.loader is not None
            module = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
            sys.modules[name] = module
        return sys.modules[name]


def file_of(about: Sequence[str], functions: Iterable[Sequence[str]]) -> str:
    """A printed file: the lines of what it says of itself, what it imports, and its functions."""
    head = ['"""' + about[0], *about[1:], '"""', "", "import triton", "import triton.language as tl", ""]
    head += ["from dsf.kernels.triton import functions as fn", "from dsf.kernels.triton import lanes", ""]
    return "\n".join(head) + "".join("\n\n@triton.jit\n" + "\n".join(x) + "\n" for x in functions)


def cache_directory() -> Path:
    """Where generated source lives: DSF_CACHE_DIR, else dsf/ in the user's cache directory."""
    chosen = os.environ.get("DSF_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsf"


def write(source: Source) -> Path:
    """The path of the source's file, written whole or not at all (several processes may race)."""
    path = cache_directory() / f"{source.name}_{source.digest}.py"
    if path.exists() and path.read_text() == source.text:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(source.text)
    os.replace(file.name, path)
    return path
