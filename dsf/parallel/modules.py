"""Modules over ranks: layers that share a sequence."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from dsf.call.recurrence import Recurrence
from dsf.language.errors import InputError
from dsf.parallel.world import World

METHODS = ("step", "inputs")  # methods of a sharded module that gather its parameters, beside forward


def attach(model: nn.Module, world: World | None) -> nn.Module:
    """Let every mixer of a model run with parallel=world from now on, and return the model. None: without ranks.

    Everything outside the mixers, positions and losses too, stays as it is. `world.shard` gives a rank's part of the
    model's inputs, `world.positions` the positions of its tokens.

    Raises InputError for a model without mixers, a world that is no `Sequence` or `Simulated`, and a layer that needs
    all tokens (Hyena), whose result on a rank's own tokens would be wrong.
    """
    found = list(mixers_of(model))
    if not found:
        raise InputError(f"{type(model).__name__} has no dsf mixer that a sequence could be shared by")
    if world is not None and not isinstance(world, World):
        raise InputError(f"attach takes a dsf.parallel.Sequence, got {type(world).__name__}")
    for module in model.modules() if world is not None else ():
        if reason := getattr(module, "needs_all_tokens", None):
            raise InputError(f"{type(module).__name__}: {reason}, so ranks cannot share a sequence")
    for mixer in found:
        mixer.parallel = world  # type: ignore[assignment]
    return model


def mixers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that run a recurrence over tokens."""
    for module in model.modules():
        if isinstance(getattr(module, "recurrence", None), Recurrence) and hasattr(module, "parallel"):
            yield module


def canonical_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) with the names in state dicts, which leave out the module that `shard_rates` put rates in."""
    apart = {path for path, module in model.named_modules() if getattr(module, "taken_out", False)}
    for path, param in model.named_parameters():
        owner, _, name = path.rpartition(".")
        yield (".".join(filter(None, (owner.rpartition(".")[0], name))) if owner in apart else path), param


def prepare(model: nn.Module, blocks: Sequence[nn.Module] | None = None, **options: Any) -> nn.Module:
    """Shard a model with mixers over ranks by FSDP2 so that its results do not change. Returns the model.

    First the rates of every mixer (parameters of decays, for which bfloat16 is too coarse) become groups of their own,
    which stay float32 (`dsf.mixers.shard_rates`). Then torch.distributed.fsdp.fully_shard shards every block and the
    model. FSDP does not cast the mixers' states. `step` and `inputs` of a sharded module gather its parameters as its
    forward does. A model that is sharded already only gets the hooks for states and for these methods.

    blocks: modules to shard one by one; None: the entries of the model's nn.ModuleLists that hold mixers.
    options: those of fully_shard: mesh, mp_policy, reshard_after_forward, ...

    FSDP takes the mean of gradients over its mesh. Where the mesh includes ranks that share a sequence, multiply the
    loss by their number. Raises InputError for a model without mixers, and for one whose rates a policy casts.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not any(True for _ in mixers_of(model)):
        raise InputError(f"{type(model).__name__} has no dsf mixer; shard it by fully_shard alone")
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        for mixer in list(mixers_of(model)):
            shard: Any = getattr(mixer, "shard_rates", None)  # mixers that are no dsf layers have no rates
            if shard is not None:
                shard(**{name: x for name, x in options.items() if name != "mp_policy"})
        for block in _blocks(model) if blocks is None else blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
    _check_rates(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for name in METHODS:
                if hasattr(module, name):
                    _gather_for(module, name)
            module.register_forward_pre_hook(_hide, prepend=True, with_kwargs=True)
            module.register_forward_pre_hook(_show, with_kwargs=True)
    return model


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    for several in model.modules():
        if isinstance(several, nn.ModuleList):
            yield from (block for block in several if any(True for _ in mixers_of(block)))


def _check_rates(model: nn.Module) -> None:
    """Raise InputError for rates in a group whose policy casts them."""
    from torch.distributed.fsdp import FSDPModule

    for path, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group
        policy = module._get_fsdp_state()._mp_policy
        if group is None or policy.param_dtype is None:
            continue
        for param in group.fsdp_params:
            owner, name = param._module_info.module, param._module_info.param_name
            if getattr(owner, "kinds", {}).get(name) == "rate":
                raise InputError(
                    f"{path or type(model).__name__}: the policy of this group casts the rate `{name}` to "
                    f"{policy.param_dtype}; call dsf.parallel.prepare(model, mp_policy=...) instead of fully_shard, or "
                    "dsf.mixers.shard_rates(model) before it"
                )


def _gather_for(module: nn.Module, name: str) -> None:
    """Let a method gather the module's parameters like forward; FSDP's casts do not see the states."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    own = getattr(module, name)

    def inside(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _show(module, args, kwargs)
        return own(*args, **kwargs)

    setattr(module, name, inside)
    register_fsdp_forward_method(module, name)
    gathering = getattr(module, name)

    @functools.wraps(own)
    def outside(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _hide(module, args, kwargs)
        return gathering(*args, **kwargs)

    setattr(module, name, outside)


class _Hidden:
    """A mixer's state, wrapped so that FSDP does not map over (and cast) its tensors."""

    def __init__(self, state: Any) -> None:
        self.state = state


def _is_state(x: Any) -> bool:
    return isinstance(x, tuple) and hasattr(x, "recurrent")


def _hide(_: nn.Module, args: Any, kwargs: Any) -> Any:
    def hidden(x: Any) -> Any:
        return _Hidden(x) if _is_state(x) else x

    return pytree.tree_map(hidden, (args, kwargs), is_leaf=_is_state)


def _show(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return pytree.tree_map(lambda x: x.state if isinstance(x, _Hidden) else x, (args, kwargs))
