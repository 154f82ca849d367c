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
    """A style for parallelize_module: the ranks of the mesh share the sequence of every mixer in the module.

        parallelize_module(model, mesh["cp"], {"layers.*": dsf.parallel.SequenceShard()})

    options: those of `dsf.parallel.Sequence`. Inputs and outputs are local tensors, this rank's tokens.
    Raises InputError for a module without mixers.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return attach(module, Sequence(device_mesh, **self.options))


class HeadShard(ParallelStyle):
    """A style for parallelize_module: the ranks of the mesh share the heads of every layer in the module.

        parallelize_module(model, mesh["tp"], {"layers.*": dsf.parallel.HeadShard()})

    A rank projects to its own heads, runs their recurrence and keeps their states; one collective sums the outputs, and
    in the backward pass one sums the gradients of the input. A fused projection is cut section by section. Layers
    without heads share their channels; where a product mixes these, one more collective sums or gathers it. Inputs and
    outputs are plain tensors, whole on every rank; all parameters are DTensors, replicated ones too.

    State dicts have the unsharded layer's names and order for any number of ranks. Apply it before FSDP, which may then
    shard further (`dsf.parallel.prepare`). Raises InputError, before any collective, for a module without layers, for a
    layer without the method `cut`, and for heads, groups or channels that the ranks cannot share evenly.
    Source: Shoeybi et al. (arXiv 1909.08053), Section 3, for the two sums.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return shard_heads(module, device_mesh)
