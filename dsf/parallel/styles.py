"""Context parallelism in the terms of torch.distributed.tensor.parallel."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from dsf.parallel.modules import attach
from dsf.parallel.world import Sequence


class SequenceShard(ParallelStyle):
    """One of parallelize_module's styles: every mixer in the module shares its sequence with the mesh's ranks.

        parallelize_module(model, mesh["cp"], {"layers.*": dsf.parallel.SequenceShard()})

    options: of `dsf.parallel.Sequence`. Inputs and outputs are local tensors, this rank's tokens.
    Raises InputError for a module without mixers.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return attach(module, Sequence(device_mesh, **self.options))
