"""Records with a schema for data that leaves the program: written as JSON, and validated when read back."""

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
# JSON has neither inf nor nan; both are written as null. null is read as inf for an Endless, as nan for a Number.
Number = Annotated[float, BeforeValidator(lambda x: math.nan if x is None else x), NUMBER_OR_NULL]
Endless = Annotated[float, BeforeValidator(lambda x: math.inf if x is None else x), NUMBER_OR_NULL]
Found = TypeVar("Found", bound="File")
Three = TypeVar("Three", bound="Percentiles")


class Record(BaseModel):
    """Base of the records. Unknown fields are errors; fields that were not set are not written."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the fields that were set, under their JSON names."""
        return self.model_dump(mode="json", exclude_unset=True, by_alias=True)


def schema_field(name: str) -> Any:
    """The field that names a File's schema, `schema` in JSON."""
    return Field(default=name, validation_alias="schema", serialization_alias="schema")


class File(Record):
    """A record that is a whole JSON file and names its schema. `model_json_schema()` is the JSON schema."""

    schema_: str = schema_field("")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, beginning with the schema's name."""
        return {"schema": self.schema_, **super().to_dict()}

    @classmethod
    def load(cls: type[Found], path: Path) -> Found:
        """The record in a file. Raises InputError for an unreadable file, another schema, and invalid fields."""
        data, known = read(path), cls.model_fields["schema_"].default
        if (schema := data.get("schema")) != known:
            said = f"of the schema {schema!r}" if schema else f"no file of {known}: it names no schema"
            raise InputError(f"{path} is {said}; this release of dsf reads {known}; make the file again")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise InputError(f"{path}: {first_error(error)}") from error


class Machine(Record):
    """The machine and the software that computed the numbers."""

    cpu: str
    cores: str
    threads: str
    system: str
    python: str
    torch: str


class Percentiles(Record):
    """The 10th, 50th and 90th percentiles."""

    low: Number = Field(validation_alias="10", serialization_alias="10")
    median: Number = Field(validation_alias="50", serialization_alias="50")
    high: Number = Field(validation_alias="90", serialization_alias="90")

    @classmethod
    def of(cls: type[Three], x: Tensor) -> Three:
        """The percentiles of all numbers of x."""
        low, median, high = percentiles(x).tolist()
        return cls(low=low, median=median, high=high)


class Lifetimes(Percentiles):
    """Percentiles of numbers of tokens until something is forgotten; infinite where it never is."""

    low: Endless = Field(validation_alias="10", serialization_alias="10")
    median: Endless = Field(validation_alias="50", serialization_alias="50")
    high: Endless = Field(validation_alias="90", serialization_alias="90")


class HalfLives(Record):
    """Half-lives in tokens. share_never: the share of infinite ones."""

    percentiles: Lifetimes
    share_never: Number

    @classmethod
    def of(cls, lives: Tensor) -> HalfLives:
        """The record of these half-lives."""
        return cls(percentiles=Lifetimes.of(lives), share_never=float(lives.isinf().double().mean()))


class Histogram(Record):
    """Shares of values in bins of equal width from low to high; values outside are counted in the end bins."""

    low: float
    high: float
    shares: list[Number] = Field(min_length=3)


class Plane(Record):
    """Shares of values in squares of the complex plane. Each row runs from real part -side to side; the rows run
    from imaginary part -side to side.
    """

    side: float
    shares: list[Annotated[list[Number], Field(min_length=1)]] = Field(min_length=1)


class Eigenvalues(Record):
    """Statistics of the real parts of A_t's eigenvalues. plane: of the complex eigenvalues, where there are any."""

    min: Number
    max: Number
    percentiles: Percentiles
    share_negative: Number
    share_above_one: Number
    share_one: Number
    histogram: Histogram
    plane: Plane | None = None


class Errors(Record):
    """Relative errors of a form against naive, in float64."""

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
    """The first error of a validation, with its field, in one line."""
    found = error.errors()[0]
    if found["type"] == "value_error" and "ctx" in found:  # raised by a validator of these classes
        return str(found["ctx"]["error"])
    return f"{'.'.join(map(str, found['loc']))}: {found['msg'].lower()}"
