"""A compare.json read back: checked, and drawn again or repeated without its models."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from dsf.analysis.compare import CONTEXTS, Comparison
from dsf.analysis.compare.fair import Protocol
from dsf.analysis.compare.records import MixerRecord
from dsf.analysis.records import File, Machine, Number, Record, first, read
from dsf.analysis.training import Setup
from dsf.language.errors import InputError

KINDS: tuple[Any, Any] = (Setup, Protocol)


class SavedText(Record):
    """What a comparison keeps of its text: all that its page says of it."""

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


class SavedRecall(Record):
    """What the recall task was: pairs told, bytes of noise between, share of right answers by chance."""

    pairs: int
    gaps: list[int]
    chance: float


class Saved(File):
    """The content of compare.json."""

    schema_: Literal["dsf.compare/2"] = Field(
        default="dsf.compare/2", validation_alias="schema", serialization_alias="schema"
    )
    dsf: str
    machine: Machine
    setup: Setup
    protocol: Protocol
    parameters_apart: float
    recall: SavedRecall
    text: SavedText
    contexts: list[int]
    seconds: float
    worst_disagreement: Number
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
    saved = Saved.load(path)
    if saved.contexts != list(CONTEXTS):
        raise InputError(f"{path}: contexts are {saved.contexts}; expected {list(CONTEXTS)}")
    return saved.comparison()


def settings(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of Setup and of Protocol that a settings file names, or a compare.json, whose run is then repeated.

    The file is JSON: {"setup": {"steps": 400, ...}, "protocol": {"seeds": 5, ...}}. Raises InputError for fields that
    are not there, and for values of another type.
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
            raise InputError(f"{path}: {name}.{first(error)}") from error
        found.append({field: getattr(whole, field) for field in given})
    return found[0], found[1]
