"""Modules' own parameters: initial values, rates that stay float32, and which have no weight decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dsf.mixers._beside import all_of, handed, hooked, in_turn, lay, outputs, product_of, rows_of
from dsf.mixers._sizes import Sized

Start = Callable[..., Tensor]  # the values of a parameter of a given shape: start(*shape)
Kind = Literal["matrix", "vector", "rate", "constant"]


class Owner(Sized):
    """A module that initialises its own parameters, and not those of its children, so that the order does not matter.

    `reset_parameters` draws them again as the constructor did. FSDP calls it for one module after another, after
    `to_empty` of a model made on the meta device. Constructors of subclasses first check their arguments
    (`_sizes.checked`).
    """

    behind = False  # True: what the layer is given comes from a launch of its model, which writes no weights
    beside: tuple[str, ...] = ()  # the maps of the input, whose weights are kept behind each other (`_beside`)
    sigmoid: str | None = None  # that of them whose output passes a sigmoid

    def __init__(self) -> None:
        super().__init__()
        self.starts: dict[str, Start] = {}
        self.kinds: dict[str, Kind] = {}

    def own(self, name: str, start: Start, *shape: int, kind: Kind = "matrix") -> None:
        """Register a parameter of this shape with the initial values start(*shape).

        kind: "matrix"; "vector", which has no weight decay; "rate", a vector that stays float32 when the module is cast
          to half precision, as decays near 1 are computed from it; "constant", a float32 buffer that is not saved.
        """
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        tensor = torch.empty(shape, dtype=wide if kind in ("rate", "constant") else None)
        self.starts[name], self.kinds[name] = start, kind
        if kind == "constant":
            self.register_buffer(name, tensor, persistent=False)
        else:
            self.register_parameter(name, nn.Parameter(tensor))
        self._fill(name)

    def reset_parameters(self) -> None:
        """Initialise this module's own parameters as its constructor did, but not its children's."""
        for name in self.starts:
            self._fill(name)

    def fill_constants(self) -> None:
        """Compute this module's constants, which no checkpoint contains."""
        for name, kind in self.kinds.items():
            if kind == "constant":
                self._fill(name)

    def no_weight_decay(self) -> set[str]:
        """The names of this module's own parameters without weight decay, as timm's convention has it."""
        return {name for name, kind in self.kinds.items() if kind in ("vector", "rate")}

    def _fill(self, name: str) -> None:
        self._mark(name)
        fill(getattr(self, name), self.starts[name])

    def _mark(self, name: str) -> None:
        """Set the flags that training code for Mamba reads: no weight decay, no second initialisation."""
        tensor = getattr(self, name)
        if self.kinds[name] in ("vector", "rate"):
            tensor._no_weight_decay = True
            tensor._no_reinit = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """torch's `_apply`, but rates stay at least float32, new parameters keep their flags, and constants have their
        values in new memory, too (`to_empty`)."""
        constants = {name: getattr(self, name) for name, kind in self.kinds.items() if kind == "constant"}
        kept = [x for name, kind in self.kinds.items() if kind in ("rate", "constant") for x in held(self, name)]
        ids = {id(tensor) for rate in kept for tensor in (rate, rate.grad) if tensor is not None}

        def wide(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            if id(tensor) in ids and found.is_floating_point() and found.dtype.itemsize < 4:
                return tensor.to(found.device, torch.float32)
            return found

        super()._apply(wide if ids else fn, recurse)
        for name, before in constants.items():
            if before.is_meta:
                self._fill(name)
            elif (now := getattr(self, name)) is not before and not now.is_meta:
                now.copy_(before)
        for name in self.starts:
            self._mark(name)
        lay(self.maps_beside())
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *args: Any) -> None:
        """torch's, but constants of the meta device, which no state dict has, get values together with weights
        (`assign=True`)."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        given = next((x.device for name, x in state_dict.items() if name.startswith(prefix)), None)
        if given is not None and local_metadata.get("assign_to_params_buffers"):
            for name, kind in self.kinds.items():
                if kind == "constant" and getattr(self, name).is_meta:
                    setattr(self, name, torch.empty_like(getattr(self, name), device=given))
                    self._fill(name)

    def maps_beside(self) -> list[Any]:
        """The maps named in `beside` that this module has."""
        return [x for x in map(self._named, self.beside) if x is not None]

    def _named(self, path: str) -> Any:
        """The module of a name, or of a path such as "f_proj.0"; None where there is none."""
        found: Any = self
        for name in path.split("."):
            found = getattr(found, name, None)
        return found

    def _passing(self) -> Any:
        """The map whose output passes a sigmoid, or None."""
        return None if self.sigmoid is None else self._named(self.sigmoid)

    def made_first(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(the output of the first map named in `beside`, what `made` takes for the others): x alone, or behind it the
        others' outputs where one product made them all."""
        maps = self.maps_beside()
        found = handed(x, maps) or outputs(x, maps, self._reads_ahead(), self._passing())
        return (self.first_map(x, maps[0]), (x,)) if found is None else (found[0], (x, *found[1:]))

    def first_map(self, x: Tensor, module: Any) -> Tensor:
        """module(x), for x as the layer was given it."""
        found = handed(x, [module])
        return product_of(x, module, ahead=self._reads_ahead()) if found is None else found[0]

    def first_ahead(self, x: Tensor) -> tuple[list[Any], Tensor, Tensor | None, tuple[int, int]] | None:
        """The maps in `beside`, their matrix, their biases and which outputs pass a sigmoid (the first, the one after
        the last), where a launch before the layer may make them of a token x [B, 1, D] (`handing`); else None."""
        maps = self.maps_beside()
        found = all_of(x, maps) if maps and self._reads_ahead() else None
        return None if found is None else (maps, *found, rows_of(maps, self._passing()))

    def _reads_ahead(self) -> bool:
        """Whether the launch before the layer writes none of its weights; hooks (FSDP's) may gather them just then."""
        return self.behind and not hooked(self)

    def made(self, side: Sequence[Tensor], name: str) -> Tensor:
        """The output of a map, or of maps in turn, after the sigmoid of the one named so. side: from `made_first`."""
        module, first = self._named(name), f"{name}.0"
        if len(side) > 1 and first in self.beside and in_turn(module):
            return product_of(self.made(side, first), module[1:])
        if len(side) == 1 or name not in self.beside:
            y = product_of(side[0], module)
            return y.sigmoid() if name == self.sigmoid else y
        return side[[id(x) for x in self.maps_beside()].index(id(module))]


def held(module: nn.Module, name: str) -> list[Tensor]:
    """What a module keeps for a name: its parameter or buffer, or what parametrizations or pruning make it of."""
    made: Any = getattr(module, "parametrizations", {})
    if name in made:
        return list(made[name].parameters(recurse=False))
    pruned = module._parameters.get(f"{name}_orig")
    return [getattr(module, name) if pruned is None else pruned]


def fill(tensor: Tensor, start: Start) -> None:
    """Set a tensor, or this rank's shard of one, to start(*shape); meta tensors stay as they are."""
    # transformers sets this flag on tensors from a checkpoint.
    if tensor.is_meta or getattr(tensor, "_is_hf_initialized", False):
        return
    with torch.no_grad(), torch.device(tensor.device):
        value = start(*tensor.shape)
        if hasattr(tensor, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value.to(tensor.dtype), tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
        tensor.copy_(value)


class StartLinear(nn.Linear):
    """A linear map with the initial weight start(out_features, in_features) and a zero bias."""

    def __init__(self, in_features: int, out_features: int, start: Start, bias: bool = False):
        self.start = start
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Initialise the weight again; set the bias to zero."""
        fill(self.weight, self.start)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """A model's parameters as two optimizer groups, [with weight decay, without], each in the model's order.

    The group without has the rates, skips and mixing coefficients of this package's layers, parameters with the flag
    `_no_weight_decay`, and all with fewer than two axes (biases, norms). Usage:
    `torch.optim.AdamW(parameter_groups(model, 0.1), lr=3e-4)`. transformers' Trainer only looks for "bias" and "norm"
    in names, so give it such an optimizer: `Trainer(..., optimizers=(optimizer, None))`.
    """
    spared = {
        id(module._parameters.get(name))
        for module in model.modules()
        if isinstance(module, Owner)
        for name in module.no_weight_decay()
    }
    decayed: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            alone = id(parameter) in spared or getattr(parameter, "_no_weight_decay", False) or parameter.dim() < 2
            (rest if alone else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


# Initial values


def log_uniform(*shape: int, low: float, high: float) -> Tensor:
    """log x, x uniform in [low, high]."""
    return torch.empty(shape).uniform_(low, high).log()


def normal(*shape: int, std: float) -> Tensor:
    """Normal numbers with mean 0."""
    return torch.randn(shape) * std


def uniform(*shape: int, bound: float) -> Tensor:
    """Numbers uniform in [-bound, bound]."""
    return torch.empty(shape).uniform_(-bound, bound)


def full(*shape: int, value: float) -> Tensor:
    """A constant."""
    return torch.full(shape, value)


def orthogonal(*shape: int, gain: float = 1.0) -> Tensor:
    """An orthogonal matrix times gain; drawn in float32 at least, as decompositions take no shorter type."""
    wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
    return nn.init.orthogonal_(torch.empty(shape, dtype=wide), gain=gain)


def time_step(*shape: int, dt_min: float = 1e-3, dt_max: float = 0.1, floor: float = 1e-4) -> Tensor:
    """A bias b with softplus(b) log-uniform in [dt_min, dt_max] (the time-step init of Mamba)."""
    dt = torch.exp(torch.rand(shape) * math.log(dt_max / dt_min) + math.log(dt_min)).clamp(min=floor)
    return inverse_softplus(dt)


def inverse_softplus(y: Tensor) -> Tensor:
    """x with softplus(x) = y, for y > 0; stable for small y."""
    return y + torch.log(-torch.expm1(-y))
