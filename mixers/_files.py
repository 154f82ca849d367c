"""Recurrences in users' own files: file.py:function."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from dsf import Recurrence
from dsf.language.errors import DsfError, InputError


def is_file(given: str) -> bool:
    """True when `given` has the form file.py:function (or only names a file)."""
    path, colon, _ = given.rpartition(":")
    return bool(colon and path) or given.endswith(".py")


def recurrence_in(given: str) -> Recurrence:
    """The recurrence of file.py:function; the file is imported once a process.

    Raises InputError, which says in one line what was looked for and what exists.
    """
    name, colon, function = given.rpartition(":")
    if not (colon and name):
        raise InputError(f"{given}: which function? Write {given}:function")
    path = Path(name)
    if not path.is_file():
        raise InputError(f"{path}:{function}: there is no file {path}")
    module = _import(path)
    there = [name for name, value in vars(module).items() if isinstance(value, Recurrence)]
    if not hasattr(module, function):
        near = difflib.get_close_matches(function, there, n=3) or there
        hint = f"its recurrences are {', '.join(near)}" if near else "it has no @dsf.recurrence"
        raise InputError(f"{path} has no {function!r}; {hint}")
    found = getattr(module, function)
    if not isinstance(found, Recurrence):
        raise InputError(
            f"{path}:{function} is of type {type(found).__name__}, expected a recurrence: a function decorated with "
            "@dsf.recurrence"
        )
    return found


def _import(path: Path) -> ModuleType:
    """The file imported as a module, with its folder importable, once a process."""
    path = path.resolve()
    name = f"_dsf_user_{hashlib.sha1(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except DsfError as error:
        del sys.modules[name]
        raise InputError(f"{path.name} does not import: {error}") from error
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"{path.name} does not import: {type(error).__name__}: {error}{_line(path, error)}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _line(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return ""  # says it itself
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f" (line {lines[-1]})" if lines else ""
