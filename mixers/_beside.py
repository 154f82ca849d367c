"""Linear maps of one input whose weights lie behind each other in memory, so that one product takes a token of all.

Each keeps its own parameter, gradient, name and storage; only decode steps read the memory of several as one matrix.
Weights that were given other memory since (copies of a model, loaded with assign=True) are multiplied one by one.

Of views of one storage, what saves models keeps the first alone (accelerate) or refuses all (safetensors' save_model).
So every weight has a storage of its own, in memory that all of them keep alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dsf.kernels.convolution import KINDS
from dsf.kernels.product import linear, multiplies, takes

ALIGNED = 16  # bytes that a row is a multiple of, so that every weight begins where fast products read
_views: dict[int, Any] = {}  # by address, the first weight's or bias's view of memory of several; not kept alive


def hooked(module: nn.Module) -> bool:
    """Whether somebody looks at what goes into a module or comes out of it, or replaced its forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in module.__dict__


def loaded(*modules: nn.Module) -> AbstractContextManager[Any]:
    """Where these modules' weights are read by another module, which does not call them: those that accelerate keeps
    elsewhere are in place inside."""
    kept = [m for m in modules if hasattr(m, "_hf_hook")]
    return _loaded(kept) if kept else nullcontext()


@contextmanager
def _loaded(modules: Sequence[Any]) -> Iterator[None]:
    for m in modules:
        m._hf_hook.pre_forward(m)
    try:
        yield
    finally:
        for m in modules:
            m._hf_hook.post_forward(m, None)


def multiplies_alone(module: Any) -> bool:
    """Whether a module is a linear map that does nothing else, so that another may read its weight and bias in place of
    calling it: no adapter around it, no forward of its own, no hooks (of pruning, weight norm, offloading)."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and not hooked(module)


def plain_map(module: Any) -> tuple[Tensor, Tensor | None] | None:
    """(weight, bias) of a linear map that does nothing else and holds them as they are, else None."""
    if not multiplies_alone(module):
        return None
    own = (module.weight, module.bias)
    return own if all(x is None or type(x) is nn.Parameter for x in own) else None


def plain_weight(module: Any) -> Tensor | None:
    """The weight of a map that only multiplies with it, else None."""
    found = plain_map(module)
    return None if found is None or found[1] is not None else found[0]


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
    """Move the weights of plain maps into one memory, in this order, unless they lie there already or must stay, and
    their biases into another."""
    weights, biases = _own(maps)
    if len(weights) < 2 or torch.is_inference_mode_enabled():
        return
    first, every = weights[0], [*weights, *biases]
    stay = any(type(w.data) is not Tensor or w.is_inference() or (w.is_cpu and w.is_shared()) for w in every)
    fits = first.device.type in ("cpu", "cuda") and first.dtype in (*KINDS, torch.float64)
    if stay or not fits or first.shape[1] * first.element_size() % ALIGNED:
        return
    for own in (weights, biases):
        if own and _joined(own) is None:
            views = torch.cat([x.data for x in own]).split([x.shape[0] for x in own])
            for x, view in zip(own, views, strict=True):
                x.data = torch.from_dlpack(view)  # the same memory; alive with it, the view keeps all of it
            own[0].untyped_storage().view = views[0]  # type: ignore[attr-defined]  # torch 2.8 keeps only its memory
            place = views[0].data_ptr()  # of a parameter itself nothing is kept: torch swaps none with weak references
            _views[place] = weakref.ref(views[0], partial(_forget, place))


def _forget(place: int, view: Any) -> None:
    if _views.get(place) is view:  # and not what was laid there since
        del _views[place]


def lay_all(model: nn.Module) -> None:
    """`lay` for every module of a model that has such maps."""
    for module in model.modules():
        maps = getattr(module, "maps_beside", None)
        if maps is not None:
            lay(maps())


def outputs(
    x: Tensor, maps: Sequence[Any], ahead: bool = False, sigmoid: Any = None
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """The outputs of all maps of one token x [B, 1, D], by one product; None for other calls, and for weights that do
    not lie behind each other. ahead: the launch before does not write the weights. sigmoid: the map whose output
    passes one, or None."""
    found = all_of(x, maps) if len(maps) > 1 else None
    if found is None:
        return None
    rows = rows_of(maps, sigmoid)
    if multiplies(x, *found):
        return parts_of(linear(x, found[0], ahead=ahead, bias=found[1], sigmoid=rows), maps)
    parts = parts_of(linear(x, found[0], ahead=ahead, bias=found[1]), maps)
    return tuple(y.sigmoid() if m is sigmoid else y for m, y in zip(maps, parts, strict=True))


def rows_of(maps: Sequence[Any], module: Any) -> tuple[int, int]:
    """The first output of a module among the maps' and the one after its last, (0, 0) for none of them."""
    place = next((i for i, m in enumerate(maps) if m is module), None)
    if place is None:
        return 0, 0
    low = sum(m.weight.shape[0] for m in maps[:place])
    return low, low + maps[place].weight.shape[0]


class Made(NamedTuple):
    """Maps of one input and their outputs."""

    maps: Sequence[Any]
    outputs: tuple[Tensor, ...]


class _Handed(threading.local):
    """What `handing` has for this thread."""

    now: tuple[Tensor, Made] | None = None


_handed = _Handed()


@contextmanager
def handing(x: Tensor, made: Made) -> Iterator[None]:
    """Within it `handed` has what a launch before made of x."""
    _handed.now = x, made
    try:
        yield
    finally:
        _handed.now = None


def handed(x: Tensor, maps: Sequence[Any]) -> tuple[Tensor, ...] | None:
    """The outputs of these maps of x, or of another view of its numbers, if they were handed on, else None."""
    if torch.compiler.is_compiling() or _handed.now is None:
        return None
    given, made = _handed.now
    same = len(made.maps) == len(maps) and all(a is b for a, b in zip(made.maps, maps, strict=True))
    there = same and x.numel() == given.numel() and x.dtype == given.dtype and x.data_ptr() == given.data_ptr()
    return made.outputs if there else None


def whole_of(x: Tensor, maps: Sequence[Any]) -> Tensor | None:
    """The matrix of all maps of one token x [B, 1, D], or None as for `outputs` and for maps with biases."""
    found = all_of(x, maps)
    return None if found is None or found[1] is not None else found[0]


def all_of(x: Tensor, maps: Sequence[Any]) -> tuple[Tensor, Tensor | None] | None:
    """The matrix and the biases of all maps of one token x [B, 1, D], or of the only one; None as for `outputs`."""
    if torch.is_grad_enabled() or x.shape[-2] != 1 or torch.compiler.is_compiling():
        return None
    if torch.is_autocast_enabled(x.device.type):  # which keeps casts of parameters, not of this view of several
        return None
    if torch._C._are_functorch_transforms_active():  # where no tensor is told that it wants gradients
        return None
    weights, biases = _own(maps)
    if len(weights) == 1:
        return weights[0], biases[0] if biases else None
    whole = _joined(weights) if weights else None
    bias = _joined(biases) if biases and whole is not None else None
    if whole is None or (biases and bias is None):
        return None
    # of modules, as their parts are, and with their requires_grad, by which torch chooses how to multiply
    return _parameter(whole), None if bias is None else _parameter(bias)


def _parameter(x: Tensor) -> nn.Parameter:
    return nn.Parameter(x, x.requires_grad)


def parts_of(made: Tensor, maps: Sequence[Any]) -> tuple[Tensor, ...]:
    """The outputs of the maps in what their matrix made."""
    return made.split([m.weight.shape[0] for m in maps], dim=-1)


def product_of(x: Tensor, module: Any, ahead: bool = True) -> Tensor:
    """module(x); for few tokens on a GPU by the kernel for these, one map of a sequence after the other. ahead: the
    launch before writes no weights."""
    if x.is_cuda and not torch.is_grad_enabled():
        if in_turn(module):
            for place, part in enumerate(module):
                x = product_of(x, part, ahead or place > 0)
            return x
        own = plain_map(module)
        if own is not None:
            return linear(x, own[0], ahead=ahead, bias=own[1])
    return module(x)


def in_turn(module: Any) -> bool:
    """Whether a module only calls its parts one after the other."""
    return type(module) is nn.Sequential and not hooked(module)


def side_by_side(x: Tensor, *maps: nn.Module) -> tuple[Tensor, ...]:
    """The outputs of small linear maps of the same x, by one matrix product where they are plain, so that x and its
    gradient are read once. Wrapped, quantised, sharded or hooked maps are called one by one."""
    weights = [plain_weight(m) for m in maps]
    plain = [w for w in weights if w is not None]
    if len(plain) < len(maps):
        return tuple(m(x) for m in maps)
    return nn.functional.linear(x, torch.cat(plain)).split([w.shape[0] for w in plain], dim=-1)


def _own(maps: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The maps' weights and biases; none if the maps are not all plain and alike."""
    found = [own for own in map(plain_map, maps) if own is not None]
    kinds = {(w.shape[1], w.dtype, w.device, None if b is None else b.dtype) for w, b in found}
    if len(kinds) != 1 or len(found) < len(maps):
        return [], []
    return [w for w, _ in found], [b for _, b in found if b is not None]


def _joined(parts: list[Tensor]) -> Tensor | None:
    """The memory of weights or biases that lie behind each other, as one."""
    first, rows = parts[0], 0
    kept = None if first.is_meta else _views.get(first.data_ptr())
    view = None if kept is None else kept()
    if view is None or view.dtype != first.dtype:
        return None
    size = first.shape[1:].numel() * first.element_size()
    for x in parts:
        if x.data_ptr() != view.data_ptr() + rows * size or not x.is_contiguous():
            return None
        rows += x.shape[0]
    if rows * size > view.untyped_storage().nbytes():
        return None
    return view.as_strided((rows, *first.shape[1:]), first.stride()).requires_grad_(first.requires_grad)
