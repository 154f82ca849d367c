"""Weight decay for matrices only: what an optimizer is given."""

from __future__ import annotations

from torch import nn


def undecayed_names(model: nn.Module) -> set[str]:
    """Names of parameters that weight decay must leave alone: vectors (norms, biases) and what a mixer marks
    `_no_weight_decay` (A_log, dt_bias, D, Lambda: a smaller rate is another memory, not a smaller weight)."""
    return {
        name
        for name, p in model.named_parameters()
        if p.dim() < 2 or getattr(p, "_no_weight_decay", False)
    }  # fmt: skip


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups of parameters for an optimizer: with weight decay and without."""
    apart = undecayed_names(model)
    learnt = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in learnt if name not in apart], "weight_decay": weight_decay},
        {"params": [p for name, p in learnt if name in apart], "weight_decay": 0.0},
    ]
