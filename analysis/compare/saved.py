"""A compare.json read back: checked, and drawn again or repeated without its models."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from dsf.analysis.compare import CONTEXTS, SCHEMA, Comparison
from dsf.analysis.compare.fair import Protocol
from dsf.analysis.compare.records import MixerRecord
from dsf.analysis.training import Setup
from dsf.language.errors import InputError

# Where null stands for itself: everywhere else it is a number that JSON does not have.
OPTIONAL = {"paper", "recall", "hidden", "keep"}
KINDS: tuple[Any, Any] = (Setup, Protocol)


class SavedText(BaseModel):
    """What a comparison keeps of its text: all that its page says of it."""

    model_config = ConfigDict(extra="forbid")

    name: str
    train_bytes: int
    held_out_bytes: int
    sentence: str
    yardsticks_bits_per_byte: dict[str, float]

    @property
    def train(self) -> range:
        """As many places as the part that was trained on has bytes."""
        return range(self.train_bytes)

    @property
    def held_out(self) -> range:
        """As many places as the held-out part has bytes."""
        return range(self.held_out_bytes)

    def yardsticks(self) -> dict[str, float]:
        """Bits per byte of coders that everybody knows."""
        return self.yardsticks_bits_per_byte


class Saved(BaseModel):
    """The content of compare.json. Its JSON schema: `Saved.model_json_schema()`."""

    model_config = ConfigDict(extra="forbid")

    dsf: str
    machine: dict[str, str]
    setup: Setup
    protocol: Protocol
    parameters_apart: float
    recall: dict[str, Any]
    text: SavedText
    contexts: list[int]
    seconds: float
    worst_disagreement: float
    failed: dict[str, str]
    mixers: list[MixerRecord]

    def comparison(self) -> Comparison:
        """The comparison, to be drawn."""
        return Comparison(
            self.setup, self.protocol, self.text, self.text.sentence, self.mixers, self.failed, self.seconds,
            self.machine, self.dsf,
        )  # fmt: skip


def load(path: Path) -> Comparison:
    """A comparison from its compare.json. Raises InputError for a file that is none, or of another schema."""
    data = _read(path)
    schema = data.pop("schema", None)
    if schema != SCHEMA:
        said = f"of the schema {schema!r}" if schema else "no compare.json: it names no schema"
        raise InputError(f"{path} is {said}; this release of dsf draws {SCHEMA}, so run the comparison again")
    try:
        saved = Saved.model_validate(_numbers(data))
    except ValidationError as error:
        raise InputError(f"{path}: {_first(error)}") from error
    if saved.contexts != list(CONTEXTS):
        raise InputError(f"{path}: contexts are {saved.contexts}; expected {list(CONTEXTS)}")
    return saved.comparison()


def settings(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of Setup and of Protocol that a settings file names, or a compare.json, whose run is then repeated.

    The file is JSON: {"setup": {"steps": 400, ...}, "protocol": {"seeds": 5, ...}}. Raises InputError for fields that
    are not there, and for values of another type.
    """
    data = _read(path)
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
            raise InputError(f"{path}: {name}.{_first(error)}") from error
        found.append({field: getattr(whole, field) for field in given})
    return found[0], found[1]


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object")
    return data


def _numbers(data: Any, name: str = "", lives: bool = False) -> Any:
    """Put back the numbers that JSON does not have: half-lives that are null never end, others are unknown."""
    if isinstance(data, dict):
        return {key: _numbers(value, key, lives or key == "half_life") for key, value in data.items()}
    if isinstance(data, list):
        return [_numbers(value, name, lives) for value in data]
    if data is None and name not in OPTIONAL:
        return math.inf if lives else math.nan
    return data


def _first(error: ValidationError) -> str:
    found = error.errors()[0]
    if found["type"] == "value_error":  # of the classes' own
        return str(found["ctx"]["error"])
    return f"{'.'.join(map(str, found['loc']))}: {found['msg'].lower()}"
