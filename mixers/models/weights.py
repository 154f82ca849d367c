"""Weights of a model: which decay, which were loaded, copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from dsf.mixers import parameter_groups


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


def copy_weights(to: nn.Module, source: nn.Module) -> None:
    """The parameters of `source`, in their types and on their devices, in a model of the same names."""
    theirs = dict(source.named_parameters())
    for name, p in to.named_parameters():
        p.data = theirs[name].detach().clone()
