"""`ModelConfig`: the configuration of a causal language model; validated, to and from JSON."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, field_validator, model_validator
from pydantic_core import PydanticSerializationError

from dsf.language.errors import InputError
from dsf.mixers._sizes import heads_to_try
from dsf.mixers._whole import whole_file
from dsf.mixers.models.names import meant
from dsf.mixers.models.naming import Named, check_causal, mixer_name

ATTENTION = "softmax_attention"
MULTIPLE = 64  # the hidden width of an MLP is rounded up to a multiple of it: tiles of matrix products


class ModelConfig(BaseModel):
    """Sizes and mixers of a `CausalLM`. Raises InputError, which names the field, for values that do not fit.

    vocab_size: entries of the vocabulary. d_model: channels of a token. n_layers: blocks.
    mixers: one or several, repeated over the layers: `["gated_deltanet"] * 3 + ["softmax_attention"]` makes every
        fourth layer softmax attention. A mixer is a name of the zoo, `file.py:function`, a Recurrence or a class of
        layers. All are kept as text, so that the configuration can be written as JSON.
    mixer_options: constructor arguments of mixers, {text in `mixers`: {argument: value}}.
    n_heads: heads of every mixer that has heads; None: one for each 128 channels, in softmax attention for each 64, or
        the next larger number that divides d_model.
    mlp_hidden: channels of a SwiGLU; None: 2/3 · mlp_ratio · d_model, rounded up to a multiple of 64.
    norm_eps: added to mean squares in RMS norms. tie_embeddings: whether the head's weight is the embedding's.
    rope_base: base of the rotary positions of softmax attention (no other mixer has them); None: no positions.
    context_length: the intended number of tokens, not enforced; None: any number.
    init_std: standard deviation of initial embeddings and MLPs; mixers are initialised as in their papers.
    fused_loss: in training with labels, compute the loss piece by piece, so that the logits of all tokens are never
        in memory (and are None in the output).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, ser_json_inf_nan="constants")

    vocab_size: int = Field(gt=0)
    d_model: int = Field(gt=0)
    n_layers: int = Field(gt=0)
    mixers: tuple[str, ...]
    mixer_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    n_heads: int | None = Field(default=None, gt=0)
    mlp_ratio: float = Field(default=4.0, gt=0)
    mlp_hidden: int | None = Field(default=None, gt=0)
    norm_eps: float = Field(default=1e-6, gt=0)
    tie_embeddings: bool = True
    rope_base: float | None = Field(default=10000.0, gt=0)
    context_length: int | None = Field(default=None, gt=0)
    init_std: float = Field(default=0.02, ge=0)
    fused_loss: bool = False

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InputError(_in_words(error)) from None

    @field_validator("mixers", mode="before")
    @classmethod
    def _as_names(cls, given: Any) -> tuple[str, ...]:
        several = [given] if isinstance(given, Named) else list(given) if isinstance(given, Iterable) else [given]
        if not several:
            raise ValueError("names no mixer")
        return tuple(mixer_name(mixer) for mixer in several)

    @field_validator("mixer_options", mode="before")
    @classmethod
    def _options_by_name(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        found: dict[str, Any] = {}
        for mixer, options in given.items():
            name = mixer_name(mixer)
            if name in found:
                raise ValueError(f"mixer_options has {name} twice, by two of its names; give one, with all options")
            found[name] = _as_read(options)
        return found

    @field_serializer("mixers")
    def _as_list(self, mixers: tuple[str, ...]) -> list[str]:
        return list(mixers)

    @model_validator(mode="after")
    def _fit_together(self) -> ModelConfig:
        for mixer in dict.fromkeys(self.mixers):
            check_causal(mixer)
        if self.n_layers % len(self.mixers):
            raise ValueError(
                f"mixers has {len(self.mixers)} entries, which do not divide n_layers = {self.n_layers}; "
                "give one for each layer, or a pattern that repeats"
            )
        unused = [name for name in self.mixer_options if name not in self.mixers]
        if unused:
            raise ValueError(f"mixer_options has {unused[0]!r}, which mixers does not have: {', '.join(self.mixers)}")
        for name, options in self.mixer_options.items():
            if "d_model" in options:
                raise ValueError(f"mixer_options: {name} gets d_model = {self.d_model} of the model, and no other")
            given = options.get("n_heads")
            if given is not None and (not hasattr(given, "__index__") or given < 1):
                raise ValueError(
                    f"mixer_options: n_heads of {name} is {given!r}, expected a whole number of at least 1"
                )
        heads = self.heads(ATTENTION)
        if ATTENTION in self.mixers and "headdim" not in self.mixer_options.get(ATTENTION, {}):
            if self.d_model % heads:
                raise ValueError(f"{ATTENTION}: {heads} heads do not divide d_model = {self.d_model}")
            if self.rope_base is not None and self.d_model // heads % 2:
                raise ValueError(f"rotary positions need an even width of a head, got {self.d_model} / {heads}")
        return self

    @property
    def layer_mixers(self) -> tuple[str, ...]:
        """The mixer of every layer, as text."""
        return self.mixers * (self.n_layers // len(self.mixers))

    @property
    def hidden(self) -> int:
        """Channels of the MLP between its projections."""
        if self.mlp_hidden is not None:
            return self.mlp_hidden
        wanted = int(2 / 3 * self.mlp_ratio * self.d_model)
        return -(-wanted // MULTIPLE) * MULTIPLE

    def heads(self, mixer: str) -> int:
        """Heads of a mixer: its option n_heads, else the model's n_heads, else one for each 128 channels (softmax
        attention: 64), or the next larger number that divides d_model."""
        own: int | None = self.mixer_options.get(mixer, {}).get("n_heads", self.n_heads)
        if own:
            return own
        widest = 64 if mixer == ATTENTION else 128
        whole = 2 if mixer == ATTENTION and self.rope_base is not None else 1  # pairs of channels are turned
        first = max(1, self.d_model // widest)
        found = (n for n in (first, *heads_to_try(self.d_model, 1, widest)) if self.d_model % (whole * n) == 0)
        return next(found, first)

    def changed(self, **fields: Any) -> ModelConfig:
        """A copy with other values of some fields. Raises InputError for values that do not fit."""
        return ModelConfig(**{**self.model_dump(), **fields})

    def to_json(self, path: str | Path | None = None) -> str:
        """The configuration as JSON text, which is also written to `path` if one is given. Raises InputError for
        options that JSON does not have, such as tensors."""
        try:
            text = self.model_dump_json(indent=2)
        except PydanticSerializationError as error:
            raise InputError(f"the model's configuration cannot be JSON: {error}") from error
        if path is not None:
            whole_file(Path(path), lambda other: other.write_text(text + "\n", encoding="utf-8"))
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> ModelConfig:
        """The configuration from JSON text, or from a file. Raises InputError for what is no configuration."""
        text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"the model's configuration is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise InputError(f"the model's configuration is a {type(fields).__name__}, expected an object of fields")
        return cls(**fields)


# Width, layers and context of the named sizes; parameters with a vocabulary of 32,000 and tied embeddings.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 128, "n_layers": 4, "n_heads": 2, "context_length": 512},
    "20m": {"d_model": 384, "n_layers": 6, "n_heads": 6, "context_length": 2048},
    "100m": {"d_model": 768, "n_layers": 12, "context_length": 4096},
    "340m": {"d_model": 1024, "n_layers": 24, "context_length": 4096},
}


def sized(size: str, mixers: Any, vocab_size: int = 32000, **fields: Any) -> ModelConfig:
    """The `ModelConfig` of a named size ("tiny", "20m", "100m", "340m") with these mixers.

    fields: other fields of `ModelConfig`; they override those of the size. Raises InputError for an unknown size, with
    the names of the sizes, and as `ModelConfig` does.
    """
    if size not in SIZES:
        near = difflib.get_close_matches(size.lower(), SIZES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"there is no model size {size!r}; sizes are {', '.join(SIZES)}{hint}")
    return ModelConfig(**{**SIZES[size], "vocab_size": vocab_size, "mixers": mixers, **fields})


def _as_read(options: Any) -> Any:
    """Options as JSON gives them back: tuples become lists, so a configuration equals the one read from its text."""
    if isinstance(options, dict):
        return {name: _as_read(value) for name, value in options.items()}
    return [_as_read(value) for value in options] if isinstance(options, list | tuple) else options


def _in_words(error: ValidationError) -> str:
    """The first error as a message with the user's field names."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    kind, value = first["type"], first.get("input")
    if kind == "extra_forbidden":
        near = meant(name, ModelConfig.model_fields)
        return f"ModelConfig has no field {name!r}" + (f"; did you mean {near!r}?" if near else "")
    if kind == "missing":
        return f"ModelConfig needs {name}="
    if kind in ("value_error", "assertion_error"):
        message = str(first.get("ctx", {}).get("error", first["msg"]))
        return f"{name}: {message}" if name and name not in message else message
    return f"{name} = {value!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
