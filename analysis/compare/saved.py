"""Saved comparisons: compare.json read back and checked, to be drawn again, or repeated."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dsf.analysis.compare import CONTEXTS, Comparison
from dsf.analysis.compare.fair import Protocol
from dsf.analysis.records import first_error, read
from dsf.analysis.training import Setup
from dsf.language.errors import InputError

KINDS: tuple[Any, Any] = (Setup, Protocol)


def load(path: Path) -> Comparison:
    """The Comparison in a compare.json. Raises InputError for another file or schema."""
    saved = Comparison.load(path)
    if saved.contexts != list(CONTEXTS):
        raise InputError(f"{path}: contexts are {saved.contexts}; expected {list(CONTEXTS)}")
    return saved


def settings(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of Setup and Protocol that a settings file names, or those of a compare.json, to repeat its run.

    The file is JSON: {"setup": {"steps": 400, ...}, "protocol": {"seeds": 5, ...}}. Raises InputError for unknown
    fields and for values of another type.
    """
    data = read(path)
    kept = {"setup": data.get("setup", {}), "protocol": data.get("protocol", {})}
    unknown = data.keys() - kept.keys()
    if unknown and "schema" not in data:
        raise InputError(f"{path}: {', '.join(sorted(unknown))} is not known; expected setup and protocol")
    found = []
    for (name, given), kind in zip(kept.items(), KINDS, strict=True):
        if not isinstance(given, dict):
            raise InputError(f"{path}: {name} is {given!r}; expected fields by name")
        fields = [f.name for f in dataclasses.fields(kind)]
        for field in given:
            if field not in fields:
                raise InputError(f"{path}: {name} has no field {field!r}; expected {', '.join(fields)}")
        try:
            whole: Any = TypeAdapter(kind).validate_python(given)
        except ValidationError as error:
            raise InputError(f"{path}: {name}.{first_error(error)}") from error
        found.append({field: getattr(whole, field) for field in given})
    return found[0], found[1]
