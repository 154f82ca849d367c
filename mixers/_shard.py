"""Rates under FSDP2: in groups of their own, so that a block's policy does not cast them."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from dsf.mixers._own import Owner

CHILD, GATHERED = "rates", "_gathered_rates"


class Rates(Owner):
    """The rates of one module, in a child module of their own; their names in state dicts stay the same."""

    taken_out = True

    def __init__(self, owner: Owner, names: list[str]):
        super().__init__()
        for name in names:
            self.starts[name], self.kinds[name] = owner.starts.pop(name), owner.kinds.pop(name)
            self.register_parameter(name, owner._parameters.pop(name))

    def forward(self, _: None) -> dict[str, Tensor]:
        """Copies of the rates by name, as FSDP frees the gathered ones after this call.

        Its argument is unused: on a GPU, FSDP cannot call a module without one where activations are computed again,
        since it then takes this module for the outermost one, whose arguments it moves to the device.
        """
        return {name: getattr(self, name).clone() for name in self.starts}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix.removesuffix(f"{CHILD}."), keep_vars)

    def _load_from_state_dict(self, *_: Any) -> None:
        """Nothing: the owner loads the rates, by the saved names."""


class _Apart(Owner):
    """Mixed into the class of a `Mixer` whose rates are in a child module.

    During the preparation of a call it reads the gathered rates, elsewhere the child's parameters.
    """

    shares: Any  # the layer's

    def _prepare(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = super()
        rates = self._modules[CHILD](None)  # type: ignore[misc]
        self.__dict__[GATHERED] = rates if self.shares is None else self.shares.local(rates)
        try:
            return layer._prepare(*args, **kwargs)
        finally:
            del self.__dict__[GATHERED]

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        child = self._modules[CHILD]
        assert child is not None
        found: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, found, errors)
        unexpected.extend(key for key in found if key.removeprefix(prefix) not in child._parameters)
        nn.Module._load_from_state_dict(child, state_dict, prefix, metadata, strict, missing, [], errors)


def _read(layer: Owner, name: str) -> Tensor:
    gathered = layer.__dict__.get(GATHERED)
    child = layer._modules[CHILD]
    assert child is not None
    return getattr(child, name) if gathered is None else gathered[name]


def shard_own(module: Owner, **options: Any) -> nn.Module | None:
    """The implementation of `Mixer.shard_rates`. Raises TypeError for a policy."""
    from torch.distributed.fsdp import fully_shard

    if "mp_policy" in options:
        raise TypeError("shard_rates keeps rates in float32: give the policy to fully_shard for the blocks, not here")
    names = [name for name, kind in module.kinds.items() if kind == "rate"]
    if not names:
        return None
    child = Rates(module, names)
    module.add_module(CHILD, child)
    reads = {name: property(partial(_read, name=name)) for name in names}
    module.__class__ = type(type(module).__name__, (_Apart, type(module)), reads)
    fully_shard(child, **options)
    return child
