"""The collectives of ranks that share the heads of one layer, forward and backward.

Inside such a layer, between `enter` and `leave`, a tensor is a rank's own part or common (equal on all ranks). A rank
computes a part of a common tensor's gradient; `enter`, `sum` and `gather` sum the parts over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsf.kernels.operators import refuse_second_order
from dsf.parallel.collectives import Gather, Group, Sum

WAY_OUT = "the collectives of a layer whose heads are shared; the whole layer on one rank has them"


class Shares:
    """The ranks that share a layer's heads."""

    def __init__(self, mesh: Any) -> None:
        group = mesh.get_group()
        self.group = Group(group.group_name, mesh.size(), mesh.get_local_rank())
        self.ranks, self.rank = self.group.size, self.group.rank

    def __deepcopy__(self, memo: dict[int, Any]) -> Shares:
        """This object: a copied layer has the same ranks."""
        return self

    def enter(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Common tensors, unchanged; backward sums their gradients over the ranks, by one collective a dtype."""
        return _Enter.apply(self.group, *tensors)

    def leave(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, as an output of the layer: its gradient is already whole on every rank."""
        return _Leave.apply(self.group, x)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, as a common tensor inside the layer."""
        (x,) = self.enter(self.leave(x))
        return x

    def gather(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Parts [..., D] of one shape as common tensors [..., ranks · D], by one collective."""
        whole = _Gather.apply(self.group, torch.stack(tensors))
        return tuple(whole.unbind())

    def own(self, x: Tensor, *sections: int) -> Tensor:
        """A rank's part of every section of the last axis of a common tensor [..., D]."""
        parts = x.split(list(sections or x.shape[-1:]), dim=-1)
        return torch.cat([part.chunk(self.ranks, dim=-1)[self.rank] for part in parts], dim=-1)

    def once(self, x: Tensor) -> Tensor:
        """x on rank 0, zeros elsewhere, to be added to a tensor before its sum over ranks. All ranks have one graph."""
        return x * float(self.rank == 0)

    def local(self, params: Mapping[Any, Any], apart: Any = (), once: Any = ()) -> dict[Any, Tensor]:
        """Parameters as this rank's tensors, by their keys: whole ones are entered, but for those of apart."""
        found: dict[Any, Tensor] = {key: p.to_local() if isinstance(p, DTensor) else p for key, p in params.items()}
        common = [
            key for key, p in params.items()
            if key not in apart and p.requires_grad and all(x.is_replicate() for x in getattr(p, "placements", ()))
        ]  # fmt: skip
        if common and torch.is_grad_enabled():
            found.update(zip(common, self.enter(*(found[key] for key in common)), strict=True))
        found.update({key: self.once(found[key]) for key in once if key in found})
        return found


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order(WAY_OUT)
        found: list[Tensor | None] = [None] * len(grads)
        needed = [i for i in range(len(grads)) if ctx.needs_input_grad[i + 1]]
        for dtype in dict.fromkeys(grads[i].dtype for i in needed):
            some = [i for i in needed if grads[i].dtype == dtype]
            total = ctx.group.answer(Sum(torch.cat([grads[i].reshape(-1) for i in some])))
            for i, part in zip(some, total.split([grads[i].numel() for i in some]), strict=True):
                found[i] = part.view(grads[i].shape)
        return None, *found


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor) -> Tensor:
        return group.answer(Sum(x.clone()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        refuse_second_order(WAY_OUT)
        return None, grad


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor) -> Tensor:
        ctx.group = group
        return group.answer(Gather(x)).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        refuse_second_order(WAY_OUT)
        return None, ctx.group.answer(Sum(grad)).chunk(ctx.group.size, dim=-1)[ctx.group.rank]
