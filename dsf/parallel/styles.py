"""Context and tensor parallelism as styles of torch.distributed.tensor.parallel, and the plan of a language model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from dsf.language.errors import InputError
from dsf.parallel.heads import shard_heads
from dsf.parallel.modules import attach
from dsf.parallel.world import Sequence


class SequenceShard(ParallelStyle):
    """A style for parallelize_module: the ranks of the mesh share the sequence of every mixer in the module.

        parallelize_module(model, mesh["cp"], {"layers.*": dsf.parallel.SequenceShard()})

    options: those of `dsf.parallel.Sequence`. Inputs and outputs are plain tensors of this rank's tokens.
    Raises InputError for a module without mixers or with a layer that needs all tokens, and as `Sequence` does.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return attach(module, Sequence(device_mesh, **self.options))


class HeadShard(ParallelStyle):
    """A style for parallelize_module: the ranks of the mesh share the heads of every layer in the module.

        parallelize_module(model, mesh["tp"], {"layers.*": dsf.parallel.HeadShard()})

    A rank projects to its own heads, runs their recurrence and keeps their states. One collective sums the outputs, and
    in the backward pass one sums the gradients of the input. A fused projection is cut section by section. In layers
    without heads the ranks share channels; where a product mixes channels, one more collective sums or gathers it.
    Inputs and outputs are plain tensors, whole on every rank. All parameters become DTensors, also the uncut ones.

    State dicts have the unsharded layer's names and order for any number of ranks. Apply this style before FSDP, which
    may shard further (`dsf.parallel.prepare`). Raises InputError, before any collective, for a module without layers,
    for a layer without the method `cut`, for heads, groups or channels that the ranks cannot share evenly, and for a
    mesh whose ranks are not in rising order.
    Source: Shoeybi et al. (arXiv 1909.08053), Section 3, for the two sums.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return shard_heads(module, device_mesh)


def plan_of(model: nn.Module) -> dict[str, ParallelStyle]:
    """The tensor parallel plan of a language model: `parallelize_module(model, mesh["tp"], plan_of(model))`.

    For `dsf.models` and models made of the same parts. Returns a style for each path of a module. Layers, MLPs and
    norms get `HeadShard`. The embedding gets torch's RowwiseParallel. The head, a linear map with as many outputs as
    the embedding has rows, gets ColwiseParallel, and its logits are gathered. A tied head stays tied. All parameters
    become DTensors, as optimizers and gradient clipping need. Raises InputError for a module of another kind that has
    parameters; share such a model by a plan of your own.
    """
    plan: dict[str, ParallelStyle] = {}
    sizes = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    for path, module in _parts(model, ""):
        if hasattr(module, "cut"):
            plan[path] = HeadShard()
        elif isinstance(module, nn.Embedding):
            plan[path] = RowwiseParallel(input_layouts=Replicate())
        elif isinstance(module, nn.Linear) and module.out_features in sizes:
            plan[path] = ColwiseParallel(output_layouts=Replicate())
        else:
            raise InputError(
                f"plan_of: {path or 'the model'} is a {type(module).__name__} with parameters of its own, which is no "
                "layer, norm, embedding or head; share it by a plan of your own"
            )
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    tied = [several for several in names.values() if len(several) > 1]
    return {**plan, "": _Tied(tied)} if tied else plan


def _parts(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of the modules that one style shards as a whole, and of the others that have parameters."""
    if hasattr(module, "cut") or module._parameters:
        yield path, module
        return
    for name, child in module.named_children():
        yield from _parts(child, f"{path}.{name}" if path else name)


class _Tied(ParallelStyle):
    """Tie the head's weight to the embedding's again."""

    def __init__(self, names: list[list[str]]) -> None:
        super().__init__()
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for first, *others in self.names:
            for name in others:
                owner, _, own = name.rpartition(".")
                setattr(module.get_submodule(owner), own, module.get_parameter(first))
        return module
