"""Random inputs for any recurrence of the zoo, in the ranges that its gates have in a trained model."""

import torch
import torch.nn.functional as F
from torch import Tensor

import dsf

SIZE = {"key": 3, "value": 4}
RANGES = {
    "alpha": torch.sigmoid,
    "beta": torch.sigmoid,
    "eta": lambda x: F.softplus(x) + 0.3,
    "g": lambda x: -F.softplus(x),
    "slope": F.softplus,
    "k": lambda x: F.normalize(x, dim=-1),
    "kappa": lambda x: F.normalize(x, dim=-1),
    "reset": lambda x: (x > 0.8).to(x.dtype),
}


def sample(
    recurrence: dsf.Recurrence, batch: int = 2, tokens: int = 7, heads: int = 2, seed: int = 0
) -> dict[str, Tensor]:
    """float64 inputs by name; sizes N = 3 (4 where the Key axis is taken in pairs), P = 4."""
    torch.manual_seed(seed)
    inputs = {}
    for i in recurrence.spec.inputs:
        lead = [batch, tokens, *([i.kind.steps] if i.kind.steps else []), heads] if i.kind.time else [heads]
        keys = recurrence.spec.keys_of(SIZE["key"])
        size = {"key": keys // 2 if i.kind.pair else keys, "value": SIZE["value"]}
        shape = [*lead, *(size[axis] for axis in ("key", "value") if axis in i.kind.axes)]
        inputs[i.name] = RANGES.get(i.name, lambda x: x)(torch.randn(shape, dtype=torch.float64))
    return inputs
