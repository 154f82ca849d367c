"""Context and tensor parallelism in the terms of torch.distributed.tensor.parallel."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from dsf.parallel.heads import shard_heads
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


class HeadShard(ParallelStyle):
    """One of parallelize_module's styles: every layer in the module shares its heads with the mesh's ranks.

        parallelize_module(model, mesh["tp"], {"layers.*": dsf.parallel.HeadShard()})

    A rank projects to its own heads, runs their recurrence and keeps their states; what comes out is summed by one
    collective, and one more sums the gradient of what went in. Of fused projections a rank has its part of every
    section. Layers without heads share their channels; where a product mixes these, one more collective sums or
    gathers it. Inputs and outputs are plain tensors, whole on every rank; parameters are DTensors, whole ones too.

    State dicts hold the unsharded layer's names and order, whichever number of ranks wrote them. Before FSDP: that may
    shard what is left (`dsf.parallel.prepare`). Raises InputError, before any collective, for a module without layers,
    one that does not say how it is cut, and heads, groups or channels that the ranks cannot share evenly.
    Source: Shoeybi et al. (arXiv 1909.08053), Section 3, for the two sums.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return shard_heads(module, device_mesh)
