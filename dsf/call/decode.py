"""Decode steps of attention that write into their cache's memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsf.call.attention import finish, scores_options, summed
from dsf.call.bind import Bound, check_cache, decays
from dsf.call.operands import fused_operands, operands, rates, rates_alone
from dsf.call.packing import is_captured
from dsf.call.run import timed_inputs
from dsf.kernels import fixed_cache
from dsf.kernels.attention import LEAST_ROOM, KVCache
from dsf.kernels.operators import is_cast
from dsf.kernels.turns import whole_turns_left_out
from dsf.language.errors import InputError
from dsf.language.spec import Spec
from dsf.language.system import DEN, NUM


def in_order(spec: Spec, state: Any) -> Any:
    """A state as calls take it; a cache in fixed memory is read on the host and put in order."""
    if isinstance(state, KVCache) and state.filled is not None:
        return fixed_cache.in_order(state, decays(spec))
    return state


def reserved(spec: Spec, cache: KVCache, tokens: int) -> KVCache:
    """The cache in fixed memory for `tokens` in all, or itself where it has that."""
    window = spec.system.window
    places = fixed_cache.places_for(tokens, window)
    if fixed_cache.has_room(cache, window, 0) and cache.k.shape[2] >= places:
        return cache
    return fixed_cache.fixed(cache, max(places, cache.k.shape[2]), window)


def with_room(spec: Spec, cache: KVCache) -> KVCache:
    """The cache with room for a token, in memory of twice the size where it has none.

    Raises InputError where that would be needed while a CUDA graph is captured, which could not follow it.
    """
    window = spec.system.window
    if fixed_cache.has_room(cache, window):
        return cache
    if is_captured(cache.k.device):
        raise InputError(
            f"{spec.name}: the KV cache has no room for a token, and a CUDA graph that is captured would not find the "
            "memory it moves to: reserve room before (CausalLM.reserve)"
        )
    return reserved(spec, cache, 2 * max(cache.k.shape[2], LEAST_ROOM // 2))


def overwrite(spec: Spec, bound: Bound, cache: Any) -> tuple[Tensor, KVCache]:
    """One token: y [B, 1, H, P] and the cache, in the memory of the one given unless that had no room.

    Raises InputError for a cache that does not fit, and where a gradient is wanted.
    """
    check_cache(spec, cache, bound.sizes.batch, bound)
    tensors = (*bound.tensors.values(), cache.k, cache.v, cache.bias, cache.angle)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise InputError(f"{spec.name}: in_place overwrites what a gradient would need; use torch.no_grad()")
    device = bound.device.type
    if is_cast(device):
        with torch.autocast(device, enabled=False):
            return _overwrite(spec, bound, with_room(spec, cache))
    return _overwrite(spec, bound, with_room(spec, cache))


def _overwrite(spec: Spec, bound: Bound, cache: KVCache) -> tuple[Tensor, KVCache]:
    window, places = spec.system.window, cache.k.shape[2]
    assert cache.filled is not None
    if not (places == window or is_captured(bound.device)):  # a graph's replays fill the memory further
        places = min(places, fixed_cache.places_for(cache.filled.most + 1, window))
    timed, quotient = timed_inputs(spec, bound), spec.is_softmax and spec.rule is NUM / DEN
    if quotient and not spec.turns and (cache.k.is_cuda or not decays(spec)):
        a, k, v, scale = fused_operands(spec, bound, timed)
        log = gain = None
        if decays(spec):
            log, gain, _ = rates(spec, bound, rates_alone(spec, bound, timed), len(a), 1, bound.compute)
        return fixed_cache.step(cache, a, k, v, log, gain, scale, window, places).transpose(1, 2), cache
    x = operands(spec, bound, timed)
    s = summed(replace(x, log=None), cache)  # biases are the cache's: no sums of decays
    log = None if x.log is None else x.log.to(bound.compute)
    k, v, bias = fixed_cache.write(cache, s.k, x.v, log, x.gain, window, places)
    if cache.angle is not None and s.angle is not None:
        cache.angle.copy_(whole_turns_left_out(s.angle.squeeze(2), s.a.dtype))
    if quotient:
        return fixed_cache.attend(s.a.to(bias.dtype), k.to(bias.dtype), v.to(bias.dtype), bias).transpose(1, 2), cache
    k, v, bias = (y.to(bound.compute) for y in (k, v, bias))
    return finish(spec, x, fixed_cache.read(s.a, k, v, bias, *scores_options(spec))), cache
