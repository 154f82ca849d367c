"""What crosses a border: records with a schema, written as JSON and read back checked. Shared by all reports."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from torch import Tensor

from dsf.analysis.measures import percentiles
from dsf.language.errors import InputError

NUMBER_OR_NULL = WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}]})
# JSON has no inf and no nan, so both are written as null. Read back, what may be endless is so; others are unknown.
Number = Annotated[float, BeforeValidator(lambda x: math.nan if x is None else x), NUMBER_OR_NULL]
Endless = Annotated[float, BeforeValidator(lambda x: math.inf if x is None else x), NUMBER_OR_NULL]
Found = TypeVar("Found", bound="File")
Three = TypeVar("Three", bound="Percentiles")


class Record(BaseModel):
    """Base of the records: unknown fields are errors. What a mixer does not have is None, and not written."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the fields that were set, by their names in JSON."""
        return self.model_dump(mode="json", exclude_unset=True, by_alias=True)


def schema_field(name: str) -> Any:
    """The field of a File's schema, `schema` in JSON."""
    return Field(default=name, validation_alias="schema", serialization_alias="schema")


class File(Record):
    """A record that is a whole JSON file and names its schema. The JSON schema: `model_json_schema()`."""

    schema_: str = schema_field("")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the schema's name first."""
        return {"schema": self.schema_, **super().to_dict()}

    @classmethod
    def load(cls: type[Found], path: Path) -> Found:
        """The record in a file. Raises InputError for a file that is none, or of another schema."""
        data, known = read(path), cls.model_fields["schema_"].default
        if (schema := data.get("schema")) != known:
            said = f"of the schema {schema!r}" if schema else f"no file of {known}: it names no schema"
            raise InputError(f"{path} is {said}; this release of dsf draws {known}, so make the file again")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise InputError(f"{path}: {first_error(error)}") from error


class Machine(Record):
    """What numbers were computed on."""

    cpu: str
    cores: str
    threads: str
    system: str
    python: str
    torch: str


class Percentiles(Record):
    """The 10th, 50th and 90th percentile."""

    low: Number = Field(validation_alias="10", serialization_alias="10")
    median: Number = Field(validation_alias="50", serialization_alias="50")
    high: Number = Field(validation_alias="90", serialization_alias="90")

    @classmethod
    def of(cls: type[Three], x: Tensor) -> Three:
        """Those of all numbers of x."""
        low, median, high = percentiles(x).tolist()
        return cls(low=low, median=median, high=high)


class Lifetimes(Percentiles):
    """The same of tokens until something is forgotten, which may be never."""

    low: Endless = Field(validation_alias="10", serialization_alias="10")
    median: Endless = Field(validation_alias="50", serialization_alias="50")
    high: Endless = Field(validation_alias="90", serialization_alias="90")


class HalfLives(Record):
    """Half-lives in tokens. share_never: of those that live on for ever."""

    percentiles: Lifetimes
    share_never: Number

    @classmethod
    def of(cls, lives: Tensor) -> HalfLives:
        """The record of these half-lives."""
        return cls(percentiles=Lifetimes.of(lives), share_never=float(lives.isinf().double().mean()))


class Histogram(Record):
    """Shares of bins of equal width from low to high; what lies outside is counted in the end bins."""

    low: float
    high: float
    shares: list[Number]


class Plane(Record):
    """Shares of squares of the complex plane: a row from the real part -side to side, rows from -i side to i side."""

    side: float
    shares: list[list[Number]]


class Eigenvalues(Record):
    """Eigenvalues of A_t, their real parts; plane: of complex ones alone."""

    min: Number
    max: Number
    percentiles: Percentiles
    share_negative: Number
    share_above_one: Number
    share_one: Number
    histogram: Histogram
    plane: Plane | None = None


class Errors(Record):
    """How far a form is from naive, relatively, in float64."""

    output: Number
    gradient: Number

    @property
    def worst(self) -> float:
        """The larger of both."""
        return max(self.output, self.gradient)


def read(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises InputError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object")
    return data


def first_error(error: ValidationError) -> str:
    """What is wrong, and where, in one line."""
    found = error.errors()[0]
    if found["type"] == "value_error" and "ctx" in found:  # of the classes' own
        return str(found["ctx"]["error"])
    return f"{'.'.join(map(str, found['loc']))}: {found['msg'].lower()}"
