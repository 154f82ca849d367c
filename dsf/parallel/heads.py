"""Layers whose heads are shared by ranks: parameters as DTensors, calls on local tensors, canonical state dicts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dsf.language.errors import InputError
from dsf.parallel.cuts import SHARES, Cut, Cuts
from dsf.parallel.modules import canonical_parameters, mixers_of
from dsf.parallel.shares import Shares

CUTS = "_cuts"
AT_LEAST_2_11 = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 11)


def shard_heads(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Share the heads of every layer in a model among the ranks of a mesh (`HeadShard`)."""
    if mesh.ndim != 1:
        raise InputError(f"HeadShard takes a mesh of one dimension, got {mesh.mesh_dim_names or mesh.ndim}")
    ranks = mesh.mesh.tolist()
    if ranks != sorted(ranks):  # torch's process groups sort them, and its DTensors go by either order
        raise InputError(
            f"HeadShard takes a mesh whose ranks rise, got {ranks}: torch stores and gathers a parameter's parts in "
            "the order of the ranks, but places them in that of the mesh, so state dicts would mix up heads"
        )
    for plan in check_heads(model, mesh.size()):  # errors are raised before anything is changed
        _share(plan, mesh)
    return model


def check_heads(model: nn.Module, ranks: int) -> list[Cuts]:
    """How the layers of a model are cut. Raises InputError where this number of ranks cannot share them."""
    layers = list(layers_of(model))
    if not layers:
        raise InputError(f"{type(model).__name__} has no dsf mixer whose heads could be shared")
    return [_planned(layer, ranks) for layer in layers]


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of a model that say how they are cut, none of them inside another. Raises InputError for mixers that
    do not say it, and for layers that are shared already."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and hasattr(module, "cut"):
            found.append(module)
            inside.update(module.modules())
    for mixer in mixers_of(model):
        if mixer not in inside:
            raise InputError(
                f"HeadShard: {type(mixer).__name__} does not say how its heads are cut; give it a method "
                "cut(self, to: dsf.parallel.Cuts), as the layers of dsf.mixers have it"
            )
    for layer in found:
        if isinstance(layer, Shared):
            raise InputError(f"HeadShard: the heads of {type(layer).__name__} are shared already")
    yield from found


def _planned(layer: Any, ranks: int) -> Cuts:
    cuts = Cuts(layer, ranks)
    layer.cut(cuts)
    for module in layer.modules():
        for name in [*module._parameters, *module._buffers]:
            tensor = getattr(module, name)
            if isinstance(tensor, DTensor):
                raise InputError(
                    f"HeadShard: {type(layer).__name__}.{name} is sharded already; share heads before FSDP shards the "
                    "model"
                )
    return cuts


def _share(cuts: Cuts, mesh: DeviceMesh) -> None:
    """Change a layer as its cuts say: parameters, attributes, hooks and class."""
    layer, shares = cuts.layer, Shares(mesh)
    for module in layer.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                cut = cuts.params.get((module, name))
                module._parameters[name] = _distributed(param, cut, mesh)
                starts = getattr(module, "starts", {})
                if cut is not None and name in starts:
                    starts[name] = partial(_arranged, start=starts[name], cut=cut, ranks=mesh.size())
    for owner, name, value in cuts.sets:
        setattr(owner, name, shares if value is SHARES else value)
    for module, how, sections in cuts.hooks:
        if how == "gather":
            module.register_forward_pre_hook(partial(_gather, shares=shares))
        else:
            module.register_forward_hook(partial(_after, how=how, sections=sections, shares=shares))
    paths = {module: f"{path}." if path else "" for path, module in layer.named_modules()}

    def places(keys: Any) -> set[str]:
        return {paths[module] + name for module, name in keys}

    layer.__dict__[CUTS] = {paths[module] + name: cut for (module, name), cut in cuts.params.items()}
    layer.__dict__["_apart"], layer.__dict__["_once"] = places(cuts.apart), places(cuts.once)
    layer.__dict__["_same"] = cuts.same
    layer.shares = shares
    layer.__class__ = type(type(layer).__name__, (Shared, type(layer)), {})
    layer.register_state_dict_post_hook(_save)
    layer.register_load_state_dict_pre_hook(_load)


def _distributed(param: nn.Parameter, cut: Cut | None, mesh: DeviceMesh) -> nn.Parameter:
    whole = param.data if cut is None else cut.arranged(param.data, mesh.size())
    place = Replicate() if cut is None else Shard(cut.axis)
    found = nn.Parameter(distribute_tensor(whole, mesh, [place]), requires_grad=param.requires_grad)
    vars(found).update(vars(param))
    return found


def _arranged(*shape: int, start: Any, cut: Cut, ranks: int) -> Tensor:
    return cut.arranged(start(*shape), ranks)


def _gather(_: nn.Module, args: tuple[Tensor, ...], shares: Shares) -> tuple[Tensor, ...]:
    return shares.gather(*args)


def _after(_: nn.Module, args: Any, y: Tensor, how: str, sections: tuple[int, ...], shares: Shares) -> Tensor:
    if how == "leave":
        return shares.leave(y)
    y = shares.sum(y) if how == "sum" else y
    return shares.own(y, *sections) if sections else y


class Shared(nn.Module):
    """Mixed into the class of a layer of which this rank has some heads.

    During a call its parameters are local tensors and its inputs are equal on all ranks; states are those of this
    rank's heads.
    """

    shares: Shares
    entered = False  # while it is called

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """The layer's `forward` on this rank's heads; x and the output are whole, on every rank."""
        return self._within("forward", x, args, options)

    def step(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """The layer's `step` on this rank's heads."""
        return self._within("step", x, args, options)

    def inputs(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """The layer's `inputs`: the recurrence's inputs for this rank's heads."""
        return self._within("inputs", x, args, options)

    def _within(self, name: str, x: Tensor, args: Any, options: Any) -> Any:
        method = getattr(super(), name)
        if self.entered:  # a call within a call: the layer runs itself backwards
            return method(x, *args, **options)
        if x.requires_grad and torch.is_grad_enabled() and not self.__dict__["_same"]:
            (x,) = self.shares.enter(x)
        local = self._local()
        kept = {}
        self.entered = True
        try:
            for (module, key), tensor in local.items():
                holder: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
                kept[module, key] = holder[key]
                holder[key] = tensor
            return method(x, *args, **options)
        finally:
            self.entered = False
            for (module, key), tensor in kept.items():
                holder = module._parameters if key in module._parameters else module._buffers
                holder[key] = tensor

    def _local(self) -> dict[tuple[nn.Module, str], Tensor]:
        """This rank's tensors, by the module and name under which the layer reads them."""
        params: dict[tuple[nn.Module, str], Any] = {}
        found: dict[tuple[nn.Module, str], Tensor] = {}
        apart, once = set(), set()
        for path, module in self._gathered():
            for name, param in module._parameters.items():
                if param is None:
                    continue
                params[module, name] = param
                place = f"{path}.{name}" if path else name
                if place in self.__dict__["_apart"]:
                    apart.add((module, name))
                if place in self.__dict__["_once"]:
                    once.add((module, name))
            for name, buffer in module._buffers.items():
                cut = self.__dict__[CUTS].get(f"{path}.{name}" if path else name)
                if cut is not None and buffer is not None:
                    whole = cut.arranged(buffer, self.shares.ranks)
                    found[module, name] = whole.chunk(self.shares.ranks, cut.axis)[self.shares.rank]
        return {**found, **self.shares.local(params, apart, once)}

    def _gathered(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules whose parameters FSDP has gathered during this call: not those that it shards separately."""
        from torch.distributed.fsdp import FSDPModule

        alone = {inner for m in self.modules() if m is not self and isinstance(m, FSDPModule) for inner in m.modules()}
        yield from ((path, module) for path, module in self.named_modules() if module not in alone)


if not AT_LEAST_2_11:  # graphs of earlier releases were not tried
    Shared._within = torch.compiler.disable(Shared._within)  # type: ignore[method-assign]


def canonical(layer: Shared, path: str, tensor: Any) -> Any:
    """A DTensor placed like the parameter at `path`, with its entries in the unsharded layer's order."""
    cut = layer.__dict__[CUTS].get(path)
    if cut is None or len(cut.sections) == 1 or not isinstance(tensor, DTensor):
        return tensor
    whole = cut.canonical(tensor.full_tensor(), layer.shares.ranks)
    axis = cut.axis  # FSDP shards the sharded axis again, strided, on its own mesh dimension
    places = [
        Replicate() if place.is_replicate() else Shard(getattr(place, "dim", axis)) for place in tensor.placements
    ]
    return distribute_tensor(whole, tensor.device_mesh, places, src_data_rank=None)


def arranged(layer: Shared, path: str, value: Any, like: DTensor) -> Any:
    """The reverse: from the unsharded order, a DTensor or a whole tensor, to the placements of `like`."""
    cut = layer.__dict__[CUTS].get(path)
    if isinstance(value, DTensor) and (cut is None or len(cut.sections) == 1):
        return value
    whole = value.full_tensor() if isinstance(value, DTensor) else value.to(like.device)
    whole = whole if cut is None else cut.arranged(whole, layer.shares.ranks)
    replicated = DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements)


def _save(layer: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    for path, param in canonical_parameters(layer):
        key = prefix + path
        if key in state and isinstance(param, DTensor):
            state[key] = canonical(layer, path, state[key])


def _load(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for path, param in canonical_parameters(layer):
        key = prefix + path
        if key in state and isinstance(param, DTensor) and state[key].shape == param.shape:
            state[key] = arranged(layer, path, state[key], param)
