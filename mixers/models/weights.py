"""Weights of a model: weight decay, tied heads, copies, and which weights were loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dsf.call.calls import is_transformed
from dsf.mixers import parameter_groups
from dsf.mixers._beside import multiplies_alone
from dsf.mixers.models.config import ModelConfig


def undecayed_names(model: nn.Module) -> set[str]:
    """The names of parameters without weight decay, by the rule of `dsf.mixers.parameter_groups`: vectors (norms,
    biases), and parameters that a mixer marks (A_log, dt_bias, D, Lambda), as decaying a rate changes the memory."""
    spared = {id(p) for p in parameter_groups(model, 0.0)[1]["params"]}
    return {name for name, p in model.named_parameters() if id(p) in spared}


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups of parameters for an optimizer, [with weight decay, without]: dicts with params and weight_decay."""
    return parameter_groups(model, weight_decay)


def but_loaded(module: Any, reset: Callable[[Any], object]) -> None:
    """Reset a module, except parameters that transformers has loaded (and marked)."""
    parameters = list(module.parameters())
    loaded = [(p, p.detach().clone()) for p in parameters if getattr(p, "_is_hf_initialized", False)]
    if len(loaded) == len(parameters) and parameters:
        return
    reset(module)
    for parameter, value in loaded:
        parameter.data.copy_(value)


def tie(model: Any) -> None:
    """Make the embedding's weight a language model's head. Without torch's `register_parameter`, in whose place
    accelerate's init_empty_weights puts one that makes another parameter."""
    model.lm_head._parameters["weight"] = model.model.embed_tokens.weight


def is_tied(model: Any) -> bool:
    """Whether a language model's head has its embedding's weight, whatever its configuration says. A head without a
    weight of its own (an adapter around a map) does not count."""
    head = model.lm_head._parameters.get("weight")
    return head is not None and head is model.model.embed_tokens._parameters.get("weight")


def reads_weight(head: Any, hidden: Tensor) -> bool:
    """Whether a loss in pieces may read the head's weight instead of calling the head. The head must be a plain linear
    map that ranks do not share, and the call not inside torch.func, for which pieces have no derivatives."""
    alone = multiplies_alone(head) and head.bias is None and not hasattr(head.weight, "device_mesh")
    return alone and not is_transformed((hidden,))


def as_built(config: ModelConfig, model: Any) -> ModelConfig:
    """The configuration with tie_embeddings set to whether the model's head has its embedding's weight."""
    return config.model_copy(update={"tie_embeddings": is_tied(model)})


def head_apart(model: Any, weights: dict[str, Any] | None) -> dict[str, Any] | None:
    """Weights to be saved. weights: None for the model's own. If the configuration has a head of its own, but the
    model's head still is its embedding, they get a copy of it: whoever reads them would else draw a new head."""
    if model.config.tie_embeddings or not hasattr(model, "lm_head") or not is_tied(model):
        return weights
    whole = dict(model.state_dict() if weights is None else weights)
    return {**whole, "lm_head.weight": whole["model.embed_tokens.weight"].clone()}


def copy_weights(to: nn.Module, source: nn.Module) -> None:
    """Give a model copies of the parameters and buffers of `source`, which has the same names, in their dtypes and on
    their devices. Both have a head of their own, or neither (`as_built`)."""
    theirs = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    for name, x in (*to.named_parameters(), *to.named_buffers()):
        x.data = theirs[name].detach().clone()
