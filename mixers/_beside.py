"""Linear maps of one input whose weights lie behind each other in memory, so that one product takes a token of all.

Each keeps its own parameter, gradient and name; only decode steps read the memory of several as one matrix. Weights
that were given other memory since (copies of a model, loaded with assign=True) are multiplied one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsf.kernels.product import linear, takes

ALIGNED = 16  # bytes that a row is a multiple of, so that every weight begins where fast products read


def hooked(module: nn.Module) -> bool:
    """Whether somebody looks at what goes into a module or comes out of it, or replaced its forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in module.__dict__


def plain_weight(module: Any) -> Tensor | None:
    """The weight of a map that only multiplies with it, else None."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return None
    alone = not hooked(module) and module.bias is None
    return module.weight if alone and type(module.weight) is nn.Parameter else None


def weight_for(module: Any, x: Tensor) -> Tensor | None:
    """The weight of a plain map for x, in the type in which it is multiplied, where a kernel's launch may take the map
    along (`then` of dsf.kernels.norm): on a GPU, with gradients or for few tokens, and not under torch.compile. None
    elsewhere."""
    if not x.is_cuda or torch.compiler.is_compiling() or hasattr(x, "device_mesh"):
        return None
    weight = plain_weight(module)
    if weight is None or not weight.is_cuda or not (torch.is_grad_enabled() or takes(x, weight)):
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    return weight.to(dtype) if dtype == x.dtype else None


def lay(maps: Sequence[Any]) -> None:
    """Move the weights of plain maps into one memory, in this order, unless they lie there already or must stay."""
    weights = _weights(maps)
    if len(weights) < 2 or _joined(weights) is not None or torch.is_inference_mode_enabled():
        return
    first = weights[0]
    stay = any(type(w.data) is not Tensor or w.is_inference() or (w.is_cpu and w.is_shared()) for w in weights)
    if stay or first.is_meta or not first.is_floating_point() or first.shape[1] * first.element_size() % ALIGNED:
        return
    whole = torch.empty(sum(w.shape[0] for w in weights), first.shape[1], dtype=first.dtype, device=first.device)
    for weight, part in zip(weights, whole.split([w.shape[0] for w in weights]), strict=True):
        weight.data = part.copy_(weight.data)


def lay_all(model: nn.Module) -> None:
    """`lay` for every module of a model that has such maps."""
    for module in model.modules():
        maps = getattr(module, "maps_beside", None)
        if maps is not None:
            lay(maps())


def outputs(x: Tensor, maps: Sequence[Any], ahead: bool = False) -> tuple[Tensor, ...] | None:
    """The outputs of all maps of one token x [B, 1, D], by one product; None for other calls, and for weights that do
    not lie behind each other. ahead: the launch before does not write the weights."""
    whole = whole_of(x, maps)
    return None if whole is None else parts_of(linear(x, whole, ahead=ahead), maps)


def whole_of(x: Tensor, maps: Sequence[Any]) -> Tensor | None:
    """The matrix of all maps of one token x [B, 1, D], or None as for `outputs`."""
    if torch.is_grad_enabled() or x.shape[-2] != 1 or torch.compiler.is_compiling():
        return None
    if torch.is_autocast_enabled(x.device.type):  # which keeps casts of parameters, not of this view of several
        return None
    weights = _weights(maps)
    whole = _joined(weights) if len(weights) > 1 else None
    # of modules, as its parts are, and with their requires_grad, by which torch chooses how to multiply
    return None if whole is None else nn.Parameter(whole, whole.requires_grad)


def parts_of(made: Tensor, maps: Sequence[Any]) -> tuple[Tensor, ...]:
    """The outputs of the maps in what their matrix made."""
    return made.split([m.weight.shape[0] for m in maps], dim=-1)


def product_of(x: Tensor, module: Any, ahead: bool = True) -> Tensor:
    """module(x); for few tokens on a GPU by the kernel for these. ahead: the launch before writes no weights."""
    weight = plain_weight(module) if x.is_cuda and not torch.is_grad_enabled() else None
    found: Tensor = module(x) if weight is None else linear(x, weight, ahead=ahead)
    return found


def _weights(maps: Sequence[Any]) -> list[Tensor]:
    """The maps' weights, none if they are not all plain and alike."""
    found = [w for w in map(plain_weight, maps) if w is not None]
    alike = len({(w.shape[1], w.dtype, w.device) for w in found}) == 1
    return found if alike and len(found) == len(maps) else []


def _joined(weights: list[Tensor]) -> Tensor | None:
    """The memory of weights that lie behind each other as one matrix."""
    first, rows = weights[0], 0
    if first.is_meta:
        return None
    storage, width = first.untyped_storage().data_ptr(), first.shape[1]
    for w in weights:
        place = first.data_ptr() + rows * width * first.element_size()
        if w.data_ptr() != place or w.untyped_storage().data_ptr() != storage or not w.is_contiguous():
            return None
        rows += w.shape[0]
    return first.as_strided((rows, width), (width, 1))
