"""Weights of a model: which decay, which were loaded, copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dsf.call.calls import is_transformed
from dsf.mixers import parameter_groups
from dsf.mixers._beside import multiplies_alone
from dsf.mixers.models.config import ModelConfig


def undecayed_names(model: nn.Module) -> set[str]:
    """Names of learnt parameters without weight decay, by the rule of `dsf.mixers.parameter_groups`: vectors (norms,
    biases) and parameters that a mixer marks (A_log, dt_bias, D, Lambda: decaying a rate changes the memory)."""
    spared = {id(p) for p in parameter_groups(model, 0.0)[1]["params"]}
    return {name for name, p in model.named_parameters() if id(p) in spared}


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups of parameters for an optimizer: with weight decay and without."""
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
    """Make a language model's head its embedding, transposed. As torch's `register_parameter` would, which accelerate's
    init_empty_weights replaces by one that makes another parameter."""
    model.lm_head._parameters["weight"] = model.model.embed_tokens.weight


def is_tied(model: Any) -> bool:
    """Whether a language model's head is its embedding, whatever its configuration says by now. A head that holds no
    weight itself (an adapter around one) is not."""
    head = model.lm_head._parameters.get("weight")
    return head is not None and head is model.model.embed_tokens._parameters.get("weight")


def reads_weight(head: Any, hidden: Tensor) -> bool:
    """Whether a loss in pieces may read the head's weight in place of calling it: of a map that does nothing else,
    which no ranks share (a rank's logits are only a part), outside of torch.func, whose derivatives pieces lack."""
    alone = multiplies_alone(head) and head.bias is None and not hasattr(head.weight, "device_mesh")
    return alone and not is_transformed((hidden,))


def as_built(config: ModelConfig, model: Any) -> ModelConfig:
    """The configuration, where tie_embeddings says whether the model's head is its embedding."""
    return config.model_copy(update={"tie_embeddings": is_tied(model)})


def head_apart(model: Any, weights: dict[str, Any] | None) -> dict[str, Any] | None:
    """Weights to be saved (None: the model's own), beside a configuration that has a head of its own. Where the model's
    still is its embedding they hold a copy of it, as what reads them would draw one."""
    if model.config.tie_embeddings or not hasattr(model, "lm_head") or not is_tied(model):
        return weights
    whole = dict(model.state_dict() if weights is None else weights)
    return {**whole, "lm_head.weight": whole["model.embed_tokens.weight"].clone()}


def copy_weights(to: nn.Module, source: nn.Module) -> None:
    """The parameters and buffers of `source`, in their types and on their devices, in a model of the same names, with a
    head of its own where that of `source` is one."""
    theirs = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    for name, x in (*to.named_parameters(), *to.named_buffers()):
        x.data = theirs[name].detach().clone()
