"""What a planned call on the Triton backend allocates and launches, without a GPU and without running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

if TYPE_CHECKING:
    from dsf.kernels.triton.schedule import Schedule


@dataclass(frozen=True)
class Planned:
    """A call of a recurrence. inputs: (name, sizes, strides, dtype) each; form: the one that was asked for."""

    recurrence: Callable[..., Tensor]
    inputs: tuple[tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    device: torch.device
    form: str

    @classmethod
    def of(
        cls, recurrence: Callable[..., Tensor], tensors: Mapping[str, Tensor], form: str, device: torch.device
    ) -> Planned:
        """The call with these inputs."""
        inputs = tuple((name, tuple(x.shape), x.stride(), x.dtype) for name, x in tensors.items())
        return cls(recurrence, inputs, device, form)

    def schedules(self, gradients: bool) -> tuple[Schedule, ...]:
        """The schedules of all operators of the call, in order; gradients: of the forward and the backward pass."""
        from dsf.kernels.triton.operators import noted
        from dsf.triton.choose import elsewhere

        device = self.device
        mode: Any = FakeTensorMode()
        if device.type == "cuda" and not torch.cuda.is_available():  # torch has no fake tensors on an absent GPU
            device, mode = torch.device("meta"), nullcontext()
        with mode, noted() as found, elsewhere(), torch.set_grad_enabled(gradients):
            given: dict[str, Any] = {
                name: torch.empty_strided(shape, stride, dtype=dtype, device=device, requires_grad=gradients)
                for name, shape, stride, dtype in self.inputs
            }
            y = self.recurrence(**given, form=self.form, backend="triton")
            if gradients:
                torch.autograd.grad(y, list(given.values()), torch.empty_like(y), allow_unused=True)
        return tuple(found)
