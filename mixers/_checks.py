"""What layers check of a call before any work."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsf import KVCache, Packing
from dsf.call.asked import check_switches
from dsf.call.packing import check_row
from dsf.language.errors import InputError
from dsf.mixers._sizes import check_input

CALL = ("state", "cu_seqlens", "attention_mask", "use_cache", "parallel", "reverse")  # of every layer


def check_call(
    layer: nn.Module, x: Tensor, state: Any, cu_seqlens: Tensor | Packing | None, mask: Tensor | None,
    world: Any, use_cache: bool, reverse: bool = False, tokens: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """What a layer checks of a call, together with the ranks that share the tokens. Raises InputError."""
    if tokens:
        check_tokens(layer, x, tokens)
    if type(use_cache) is not bool or type(reverse) is not bool:
        check_switches(type(layer).__name__, use_cache=use_cache, reverse=reverse)  # type: ignore[unreachable]

    def look() -> None:
        check_input(layer, x, spread=world is not None)
        if mask is not None:
            check_mask(type(layer).__name__, mask, cu_seqlens, x)
        if cu_seqlens is not None:  # of all ranks' tokens where there are ranks
            check_row(type(layer).__name__, cu_seqlens, x.shape[0], x.shape[1] if world is None else None)

    if world is not None:
        from dsf.parallel.agree import agree_layer
        from dsf.parallel.world import World

        if not isinstance(world, World):
            name, given = type(layer).__name__, type(world).__name__
            raise InputError(f"{name}: parallel must be a dsf.parallel.Sequence, got {given}")
        agree_layer(world, layer, x, state, cu_seqlens, look, ("use_cache", use_cache))
    look()  # also of calls of a kind that ranks have compared already


def named_tokens(arguments: Callable[..., Any]) -> tuple[str, ...] | None:
    """The per-token tensors that a layer's `arguments(self, u, side, span, ...)` names, None where it takes any."""
    found = list(inspect.signature(arguments).parameters.values())[4:]
    return None if any(p.kind is p.VAR_KEYWORD for p in found) else tuple(p.name for p in found)


def check_tokens(layer: Any, x: Any, tokens: Mapping[str, Any], call: Sequence[str] = CALL) -> None:
    """Refuse arguments that the layer does not have, and per-token ones that are no tensors [B, T, ...] beside
    x [B, T, d_model], or [B, ...] beside one token [B, d_model]. call: the other arguments. Raises InputError."""
    known, name = layer.beside_x, type(layer).__name__
    for given, value in tokens.items():
        if known is not None and given not in known:
            near = difflib.get_close_matches(given, (*call, *known), n=1, cutoff=0.7)
            hint = f"did you mean {near[0]}?" if near else f"beside x it takes {', '.join((*call, *known))}"
            raise InputError(f"{name}: there is no argument {given}; {hint}")
        if not isinstance(value, Tensor):
            raise InputError(f"{name}: {given} must be a tensor with a number for every token, got {value!r}")
        sizes = list(x.shape[:-1]) if isinstance(x, Tensor) else []
        if list(value.shape[: len(sizes)]) not in (sizes, [1, *sizes[1:]]):  # of all rows alike (rotary positions)
            raise InputError(
                f"{name}: {given} has shape {list(value.shape)}, expected {sizes} and what belongs to a token"
            )


def check_in_place(name: str, state: Any) -> None:
    """Raise InputError, naming the layer, where a step must not write to the state, before any of it is written to."""
    if torch.is_grad_enabled():
        raise InputError(f"{name}.step: in_place overwrites what a gradient would need; use torch.no_grad()")
    for part in state if isinstance(state, tuple) else ():
        fixed = isinstance(part, KVCache) and part.filled is not None  # another cache is copied first
        for x in part if fixed else (part,):
            if not isinstance(x, Tensor) or 0 not in x.stride():
                continue
            if any(n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True)):
                raise InputError(
                    f"{name}.step: in_place needs a place for every number of the state, and sequences share theirs "
                    "(expand); copy it (contiguous)"
                )


def check_mask(name: str, mask: Tensor, cu_seqlens: Tensor | Packing | None, x: Tensor) -> None:
    """Raise InputError, naming the layer, unless the mask is all ones (no padding), for as many tokens as x has or,
    with those of earlier calls, more."""
    if cu_seqlens is not None:
        raise InputError(f"{name}: attention_mask and cu_seqlens are both given; cu_seqlens alone says it all")
    if not isinstance(mask, Tensor):
        raise InputError(f"{name}: attention_mask must be a tensor [B, T] of ones, got {type(mask).__name__}")
    if mask.dim() != 2:
        raise InputError(f"{name}: attention_mask has shape {list(mask.shape)}, expected [B, T] of ones")
    if torch.compiler.is_compiling():
        torch._assert_async(mask.all(), f"{name}: attention_mask has padding; pack the tokens, give cu_seqlens")
    elif mask.shape[0] not in (1, x.shape[0]) or mask.shape[1] < x.shape[1]:
        raise InputError(f"{name}: attention_mask has shape {list(mask.shape)}, and x has {list(x.shape[:2])} tokens")
    elif not bool(mask.all()):
        padded = int((mask == 0).sum())
        raise InputError(
            f"{name}: attention_mask has {padded} padded tokens, and a recurrence would take them into its state. "
            "Leave them out: x[mask.bool()].unsqueeze(0) packs the rest of all sequences into one row, and "
            "cu_seqlens=[0, and the running sum of mask.sum(1)] says where each begins and ends"
        )
