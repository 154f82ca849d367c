"""Saved comparisons: compare.json read back and checked, to be drawn again, or repeated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dsf.analysis.compare import CONTEXTS, Comparison
from dsf.analysis.compare.fair import Protocol
from dsf.analysis.compare.recall import GAPS
from dsf.analysis.compare.records import MixerRecord
from dsf.analysis.records import first_error, read
from dsf.analysis.training import Setup
from dsf.language.errors import InputError

KINDS: tuple[Any, Any] = (Setup, Protocol)


def load(path: Path) -> Comparison:
    """The Comparison in a compare.json. Raises InputError for another file or schema, and for lists that do not fit."""
    saved = Comparison.load(path)
    if saved.contexts != list(CONTEXTS):
        raise InputError(f"{path}: contexts are {saved.contexts}; expected {list(CONTEXTS)}")
    windows = any(r.equal.by_length for r in saved.mixers)
    for r in saved.mixers:
        if why := _misfit(r, windows):
            raise InputError(f"{path}: {r.name}: {why}")
    return saved


def _misfit(r: MixerRecord, windows: bool) -> str:
    """Why lists that are drawn against each other do not fit, "" where they do. windows: whether any has by_length."""
    contexts, lists = len(CONTEXTS), list[tuple[str, Sequence[Any], int]]()
    if {r.kernel is None, r.eigenvalues is None, r.half_life is None} != {bool(r.unseen)}:
        return "kernel, eigenvalues and half_life are null together, with the reason in unseen"
    if r.kernel is not None:
        size = len(r.kernel.sentence.encode())
        lists += [("kernel.shares", r.kernel.shares, size)]
        lists += [("a row of kernel.shares", row, size) for row in r.kernel.shares]
    lists += [("state.here", r.state.here, contexts), ("state.at_paper_width", r.state.at_paper_width, contexts)]
    for name, x, expected in lists:
        if len(x) != expected:
            return f"{name} has {len(x)} numbers, expected {expected}"
    whole: list[tuple[str, Sized]] = [("tokens_per_second", r.tokens_per_second)]
    for own in r.columns:
        whole += [("curve", own.curve)] + [("by_length", own.by_length)] * windows
        if own.recall is not None and list(own.recall) != [str(gap) for gap in GAPS]:
            return f"recall is of {', '.join(own.recall) or 'no'} bytes of noise, expected {', '.join(map(str, GAPS))}"
    return next((f"{name} is empty" for name, x in whole if not x), "")


def settings(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of Setup and Protocol that a settings file names, or those of a compare.json, to repeat its run.

    A compare.json's folder of weights is left out: those are its own models. The file is JSON: {"setup": {"steps": 400,
    ...}, "protocol": {"seeds": 5, ...}}. The setup's lr is the one rate where the protocol names none. Raises
    InputError for unknown fields and for values of another type.
    """
    data = read(path)
    kept = {"setup": data.get("setup", {}), "protocol": data.get("protocol", {})}
    unknown = data.keys() - kept.keys()
    if unknown and "schema" not in data:
        raise InputError(f"{path}: {', '.join(sorted(unknown))} is not known; expected setup and protocol")
    if "schema" in data and isinstance(kept["protocol"], dict):
        kept["protocol"] = {k: v for k, v in kept["protocol"].items() if k != "keep"}
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
    if "lr" in found[0]:
        found[1].setdefault("rates", (found[0]["lr"],))
    return found[0], found[1]
