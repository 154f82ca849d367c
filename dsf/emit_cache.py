"""Where printed source lies on disk: in files named by their content, which Triton reads and people may."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsf.emit import Source


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
