"""What Hugging Face's and other libraries' configurations call the fields of a `ModelConfig`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from dsf.language.errors import InputError

# The same thing by another name.
USUAL = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "context_length",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tie_embeddings",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_base",
}
# The same, but with a number where ours may be None, to be worked out.
WORKED_OUT = {"num_attention_heads": "n_heads", "intermediate_size": "mlp_hidden"}
# What a model here has no field for, or by a name of another family: what to give in its place.
_ATTENTION = 'mixer_options={"softmax_attention": {"%s": ...}}'
INSTEAD = {
    "num_key_value_heads": _ATTENTION % "n_kv_heads",
    "head_dim": _ATTENTION % "headdim",
    "attention_bias": _ATTENTION % "bias",
    "sliding_window": 'mixers=["sliding_window_attention"], or ' + _ATTENTION % "window",
    "n_embd": "d_model", "hidden_dim": "d_model", "dim": "d_model", "n_inner": "mlp_hidden", "ffn_dim": "mlp_hidden",
    "n_positions": "context_length", "n_ctx": "context_length", "hidden_ratio": "mlp_ratio",
    "layer_norm_eps": "norm_eps", "layer_norm_epsilon": "norm_eps",
    "state_size": 'mixer_options={"s6": {"d_state": ...}}', "conv_kernel": 'mixer_options={"s6": {"d_conv": ...}}',
}  # fmt: skip
NOT_HERE = (
    "hidden_act", "mlp_bias", "attention_dropout", "hidden_dropout", "dropout", "rope_scaling", "rope_parameters",
    "partial_rotary_factor", "attn",
)  # fmt: skip
NEAR = 0.8  # of two names that differ by a letter or a word's end


def meant(name: str, fields: Iterable[str]) -> str | None:
    """The field that another library's name stands for, or whose spelling it nearly has; None without one."""
    known = {**USUAL, **WORKED_OUT, **{k: v for k, v in INSTEAD.items() if "=" not in v}}
    return known.get(name) or next(iter(difflib.get_close_matches(name, fields, n=1)), None)


def ours(fields: dict[str, Any], names: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields of a ModelConfig, the other fields), of the fields of a Hugging Face configuration.

    names: the fields of a ModelConfig. Fields that follow from these (WORKED_OUT) stay among the others if ours is
    given as well, as in files; `agree` compares them. Raises InputError for two names of one field with different
    values, for names of features that a model here lacks, and for names that are nearly ours.
    """
    names, rest = list(names), dict(fields)
    own = {name: rest.pop(name) for name in names if name in rest}
    for usual, name in [*USUAL.items(), *((u, n) for u, n in WORKED_OUT.items() if n not in own)]:
        if usual in rest:
            value = rest.pop(usual)
            if own.setdefault(name, value) != value:
                raise InputError(f"DsfConfig: {usual} ({value}) is another name for {name} ({own[name]}); give one")
    for name, value in rest.items():
        if name in INSTEAD:
            raise InputError(f"DsfConfig has no {name} (given: {value!r}); give {INSTEAD[name]}")
        if name in NOT_HERE and value not in (None, False, 0) and (name, value) != ("hidden_act", "silu"):
            raise InputError(f"DsfConfig has no {name} (given: {value!r}), and models here have nothing of the kind")
        near = difflib.get_close_matches(name, names, n=1, cutoff=NEAR)
        if near and name not in WORKED_OUT:
            raise InputError(f"DsfConfig has no {name} (given: {value!r}); did you mean {near[0]}?")
    return own, {name: value for name, value in rest.items() if name not in NOT_HERE}


def agree(name: str, given: Any, found: Any, why: str) -> None:
    """Raise InputError where a file or a call gives another value than what follows from the model's fields."""
    if given is not None and given != found:
        raise InputError(f"DsfConfig: {name} is {given!r}, but {found!r} follows from {why}; change that")
