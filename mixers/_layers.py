"""Linear maps that several mixers share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dsf.mixers._own import Start, fill


class StartLinear(nn.Linear):
    """A linear map with the initial weight start(out_features, in_features) and a zero bias."""

    def __init__(self, in_features: int, out_features: int, start: Start, bias: bool = False):
        self.start = start
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Initialise the weight again; set the bias to zero."""
        fill(self.weight, self.start)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def side_by_side(x: Tensor, *maps: nn.Module) -> tuple[Tensor, ...]:
    """The outputs of small linear maps of the same x, by one matrix product where they are plain, so that x and its
    gradient are read once. Wrapped, quantised, sharded or hooked maps are called one by one."""
    weights = [_plain_weight(m) for m in maps]
    plain = [w for w in weights if w is not None]
    if len(plain) < len(maps):
        return tuple(m(x) for m in maps)
    return nn.functional.linear(x, torch.cat(plain)).split([w.shape[0] for w in plain], dim=-1)


def _plain_weight(module: Any) -> Tensor | None:
    """The weight of a map that only multiplies with it, else None."""
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return None
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    alone = not any(hooks) and module.bias is None
    return module.weight if alone and type(module.weight) is nn.Parameter else None
