"""Recurrences in users' own files: file.py:function."""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from dsf import Recurrence
from dsf.language.errors import DsfError, InputError

ELSEWHERE = ("dsf", "torch", *sys.stdlib_module_names)  # never taken for modules of a user's folder


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


def files_of(path: Path) -> dict[str, Path]:
    """A user's file and what it imports from its folder, also by way of others: place in the folder -> file."""
    folder = path.resolve().parent
    return {path.name: path, **{str(file.relative_to(folder)): file for file in _helpers(path.resolve()).values()}}


def _helpers(path: Path) -> dict[str, Path]:
    """The modules in the file's folder that it imports, and those that these import: name -> file."""
    found: dict[str, Path] = {}
    left = [(path, "")]  # files to read, and the packages that they are in
    for file, package in left:
        for name in _imported(file, package):
            place = path.parent.joinpath(*name.split("."))
            own = next((f for f in (place / "__init__.py", place.with_suffix(".py")) if f.is_file()), None)
            if own is not None and name not in found and name.partition(".")[0] not in ELSEWHERE:
                found[name] = own
                left.append((own, name if own.parent == place else name.rpartition(".")[0]))
    return found


def _imported(file: Path, package: str) -> Iterator[str]:
    """Names that may be modules which a file of this package ("" for none) imports, each after its packages."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):  # the import says so, if it gets there
        return
    for node in nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            names = [".".join([*above, *filter(None, [node.module]), name]) for name in names]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:n]) for n in range(1, len(parts) + 1) if parts[0])


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
    others = {}  # modules of another folder, by names that mean modules of this one here
    try:
        for helper, file in _helpers(path).items():
            if helper in sys.modules and getattr(sys.modules[helper], "__file__", None) != str(file):
                others[helper] = sys.modules.pop(helper)
        with contextlib.redirect_stdout(sys.stderr):  # what it prints is no part of a command's JSON
            spec.loader.exec_module(module)
    except DsfError as error:
        del sys.modules[name]
        raise InputError(f"{path.name} does not import: {error}") from error
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"{path.name} does not import: {type(error).__name__}: {error}{_line(path, error)}") from error
    finally:
        sys.path.remove(str(path.parent))
        sys.modules.update(others)
    return module


def _line(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return ""  # says it itself
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f" (line {lines[-1]})" if lines else ""
