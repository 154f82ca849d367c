"""What `torch.distributed.checkpoint` saves of a model that ranks share: the unsharded model's names and order."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from dsf.parallel.heads import Shared, arranged, canonical
from dsf.parallel.modules import canonical_parameters


class Checkpoint(Stateful):
    """A model and its optimizer, to be saved by some number of ranks and loaded by any other, or by one process.

        dcp.save({"training": Checkpoint(model, optimizer)}, checkpoint_id=folder)
        dcp.load({"training": Checkpoint(model, optimizer)}, checkpoint_id=folder)

    Saved parameters and optimizer states have the unsharded model's names and order of entries, also after `prepare`
    and `HeadShard`. Every rank takes part. optimizer: None for the model alone.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """{"model": ..., "optimizer": ...} by the unsharded names. Sharded tensors are DTensors."""
        found: dict[str, Any] = {"model": self.model.state_dict()}
        if self.optimizer is not None:
            found["optimizer"] = self._turned(get_optimizer_state_dict(self.model, self.optimizer), out=True)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned into the model and the optimizer. Raises what `load_state_dict` does."""
        self.model.load_state_dict(state_dict["model"])
        if self.optimizer is not None:
            set_optimizer_state_dict(self.model, self.optimizer, self._turned(state_dict["optimizer"], out=False))

    def _turned(self, state: dict[str, Any], out: bool) -> dict[str, Any]:
        """An optimizer's state, translated to the unsharded names and order (out), or back to the model's own."""
        layers = [(path, m) for path, m in self.model.named_modules() if isinstance(m, Shared)]
        names, values = {}, {}
        for (own, param), (name, _) in zip(
            self.model.named_parameters(), canonical_parameters(self.model), strict=True
        ):
            source, target = (own, name) if out else (name, own)
            names[source] = target
            if source in state["state"]:
                found = next(
                    (
                        (m, name[len(path) :].lstrip("."))
                        for path, m in layers
                        if f"{name}.".startswith(f"{path}." if path else "")
                    ),
                    None,
                )
                values[target] = {
                    key: _ordered(*found, x, param, out) if found and param.shape == x.shape else x
                    for key, x in state["state"][source].items()
                }
        groups = [{**group, "params": [names[name] for name in group["params"]]} for group in state["param_groups"]]
        return {"state": values, "param_groups": groups}


def _ordered(layer: Shared, path: str, x: Any, param: Any, out: bool) -> Any:
    return canonical(layer, path, x) if out else arranged(layer, path, x, param)
