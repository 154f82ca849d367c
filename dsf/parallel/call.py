"""One call of a recurrence whose tokens are spread over ranks: summary, exchange, main pass, and the same backward.

Forward: every rank computes its shard's map (F, M), the exchange returns the shard's initial state, and the usual call
runs from that state. Backward: `generic.Leave`, an autograd function applied to the outputs, computes C, the gradient
of the shard's initial state through the shard's own outputs (one pass of the adjoint recurrence), exchanges C, folds it
to G, the gradient of the shard's final state, and passes G to the backward of the usual call, which runs once. Autograd
differentiates no map, fold or collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsf.call import packing
from dsf.call.backwards import flipped, flipped_bounds, flipped_rows
from dsf.call.bind import Bound, Sizes, bind, cached_heads, check_cache, check_state
from dsf.call.calls import is_transformed
from dsf.call.digits import of_enough_digits
from dsf.call.plan import Plan
from dsf.call.recurrence import Recurrence
from dsf.kernels.reversal import reversed_tokens
from dsf.language.errors import InputError
from dsf.language.spec import Spec
from dsf.parallel import fused, generic, softmax
from dsf.parallel.agree import Said, agree, check_tokens, described, is_open, length_of, options_of
from dsf.parallel.derive import frame_of
from dsf.parallel.exchange import exchange_of
from dsf.parallel.generic import Job
from dsf.parallel.layout import host_bounds
from dsf.parallel.rank import Rank, differentiable, no_autocast
from dsf.parallel.summary import Summary
from dsf.parallel.world import Simulated, World, world_of

Route = fused.Route | generic.Route | softmax.Route


def call(
    recurrence: Recurrence, world: World, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: Any,
    return_state: bool, form: str, backend: str, cu_seqlens: Tensor | packing.Packing | None, reverse: bool = False,
) -> Any:  # fmt: skip
    """y of this rank's tokens, or (y, the final states of the global sequences); arguments as of `Recurrence.__call__`.

    A `Simulated` world takes and returns whole sequences. Raises InputError and FormError before any collective.
    """
    spec = recurrence.spec
    if not isinstance(world, World):
        raise InputError(f"{spec.name}: parallel must be a dsf.parallel.Sequence, got {type(world).__name__}")
    if is_transformed((*args, *kwargs.values(), state)):  # exchanges take no tangents: those of other ranks' tokens
        raise InputError(
            f"{spec.name}: torch.func (vmap, grad, jvp, ...) and forward-mode derivatives do not pass through "
            "parallel=; the call on one rank has them"
        )
    kept = cu_seqlens.bounds if isinstance(cu_seqlens, packing.Packing) else None
    options, kind = (return_state, form, backend), None
    if (cu_seqlens is None or kept is not None) and not reverse:
        kind, tensors, route = _known(recurrence, world, args, kwargs, state, (*options, kept))
        if route is not None:
            y, final = _along(route, recurrence, world, tensors, state, return_state)
            return (y, final) if return_state else y
    told = [("return_state", return_state), ("reverse", reverse), ("form", form)]
    given: dict[str, Tensor] = {}

    def say() -> Said:
        given.update(_named(spec, args, kwargs))
        return _said(spec, world, given, state, cu_seqlens, told)

    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    agree(world, spec.name, say, lambda: _look(recurrence, world, given, state, cu_seqlens, form, backend), first)
    bounds = host_bounds(spec.name, cu_seqlens)
    given = given or _named(spec, args, kwargs)
    packed = bounds is not None
    if reverse:
        _bind(recurrence, given, form, backend)  # errors name the tensors as the user gave them
        given, world, state = flipped(spec, given), world.backwards(), flipped_rows(state, packed)
        bounds = None if bounds is None else flipped_bounds(bounds)
    tensors, route = (), None
    if kind is None:  # reversed, or boundaries in a tensor
        kind, tensors, route = _known(
            recurrence, world, (), given, state, (*options, None if bounds is None else tuple(bounds))
        )
    if route is not None:
        y, final = _along(route, recurrence, world, tensors, state, return_state)
    elif spec.is_framed:
        y, final = _run_framed(recurrence, world, given, state, bounds, return_state, form, backend)
    else:
        y, final = _first(recurrence, world, given, state, bounds, return_state, form, backend, kind)
    y = reversed_tokens(y) if reverse else y
    if not return_state:
        return y
    return y, flipped_rows(final, packed) if reverse else final


def _known(
    recurrence: Recurrence, world: World, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: Any,
    options: tuple[Any, ...],
) -> tuple[Any, tuple[Tensor, ...], Route | None]:  # fmt: skip
    """(a call's kind, its inputs in order, its route if the kind is known); the kind is None where none is kept."""
    if world.check:
        return None, (), None
    kind, tensors = fused.kind_of(recurrence, args, kwargs, state, options)
    return kind, tensors, None if kind is None else world.routes.get(kind)


def _first(
    recurrence: Recurrence, world: World, given: Mapping[str, Tensor], state: Any, bounds: list[int] | None,
    return_state: bool, form: str, backend: str, kind: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """(y, the final state or None) of a call of a kind that is not known, which it is from now on."""
    spec = recurrence.spec
    shards = _split(spec, world, given) if isinstance(world, Simulated) else [given]
    first = next(given[i.name] for i in spec.inputs if i.kind.time)
    kind = None if is_open(first) else kind  # captured calls have not been compared
    with no_autocast(first):
        if spec.is_attention:
            bound_of = [_bind(recurrence, s, form, backend)[0] for s in shards]
            way = softmax.route_of(recurrence, world, bound_of, state, bounds, form, backend, return_state)
            found = way.attend(world, bound_of, state)
            if kind is not None:
                world.routes.put(kind, way)
        else:
            found = _run(recurrence, world, shards, state, bounds, return_state, form, backend, kind)
            found = [(y.to(first.dtype), final) for y, final in found]
    return _joined(world, found, return_state)


def _joined(world: World, found: Several[tuple[Tensor, Any]], return_state: bool) -> tuple[Tensor, Any]:
    """(y, final state or None) of the call, from those of the ranks of this process."""
    if not isinstance(world, Simulated):
        return found[0]
    y = world.whole_of([y for y, _ in found])
    return y, _alike([final for _, final in found]) if return_state else None


def _along(
    route: Route, recurrence: Recurrence, world: World, tensors: tuple[Tensor, ...], state: Tensor | None,
    return_state: bool,
) -> tuple[Tensor, Any]:  # fmt: skip
    """(y, the final state or None) of a call of a kind that ran before, whose checks, plan and exchange are known.

    tensors: its inputs.
    """
    timed, shards = recurrence._calls.timed, [tensors]
    if isinstance(world, Simulated):
        each = [[world.shard_of(r, x)[0] if t else x for x, t in zip(tensors, timed, strict=True)] for r in world.here]
        shards = [tuple(shard) for shard in each]
    first = tensors[timed.index(True)]
    with no_autocast(first):
        found = route.run(world, shards, state, return_state)
    y, final = _joined(world, found, return_state)
    return y.to(first.dtype), final


def _run_framed(
    recurrence: Recurrence, world: World, given: Mapping[str, Tensor], state: Any, bounds: list[int] | None,
    return_state: bool, form: str, backend: str,
) -> tuple[Tensor, Any]:  # fmt: skip
    """The call of a declaration with turns or previous values."""
    from dsf.parallel import framed

    bound, _ = _bind(recurrence, given, form, backend)
    if not isinstance(world, Simulated):
        check_tokens(recurrence.name, world, world.here[0], bound.sizes.batch, bound.sizes.tokens, bounds)
    with no_autocast(next(iter(given.values()))):
        return framed.call(recurrence, world, bound, state, bounds, return_state, form, backend)


def _run(
    recurrence: Recurrence, world: World, shards: Several[Mapping[str, Any]], state: Any, bounds: list[int] | None,
    return_state: bool, form: str, backend: str, kind: Any,
) -> list[tuple[Tensor, Any]]:  # fmt: skip
    """(y, the global final state or None) of every rank of this process. kind: of a call to be remembered, or None."""
    spec = recurrence.spec
    packed = None if bounds is None else world.packing(bounds)
    bound_of = [_bind(recurrence, tensors, form, backend) for tensors in shards]
    for number, (bound, _) in zip(world.here, bound_of, strict=True):
        check_tokens(spec.name, world, number, bound.sizes.batch, bound.sizes.tokens, bounds)
    given, bound_of = bound_of, [(of_enough_digits(spec, b, plan, spread=True), plan) for b, plan in bound_of]
    summaries = [Summary(recurrence, bound, form, backend) for bound, _ in bound_of]
    first = summaries[0]
    if state is not None:
        for summary in summaries:
            rows = summary.sizes.batch if packed is None else packed.sequences
            check_state(spec, state, (rows, summary.sizes.heads, first.frame.n, first.frame.total), summary.bound)
    width = first.bound.compute.itemsize
    choice = world.choice(first.frame, first.sizes.batch * first.sizes.heads, width)
    job = Job(world, exchange_of(choice.name, world.nodes), [], return_state)
    initial = None if state is None else state.detach()
    remembered = kind is not None and all(one[0] is other[0] for one, other in zip(given, bound_of, strict=True))
    if choice.name != "walk" and packed is None and all(fused.fits(spec, bound, plan) for bound, plan in bound_of):
        passing = [fused.rank_of(n, world.layout, s, initial) for n, s in zip(world.here, summaries, strict=True)]
        job.ranks, hollows = passing, [rank.hollow() for rank in passing]
        if remembered:
            world.routes.put(kind, fused.Route(job.exchange, hollows))
        return fused.run(job, hollows, state)
    ranks = [Rank(n, world.layout, s, packed, initial) for n, s in zip(world.here, summaries, strict=True)]
    if remembered:
        world.routes.put(kind, generic.Route(job.exchange, [rank.hollow() for rank in ranks]))
    return generic.run(job.again(ranks), state)


def _alike(finals: Several[Any]) -> Any:
    """The mean of the simulated ranks' equal final states, so that each rank gets its share of the gradient."""
    if isinstance(finals[0], Tensor):
        return torch.stack(list(finals)).mean(0)
    some = [[f[place] for f in finals] for place in (0, 1, 3, 4)]
    k, v, bias, angle = (None if x[0] is None else torch.stack(x).mean(0) for x in some)
    return type(finals[0])(k, v, finals[0].lengths, bias, angle)


def planned(spec: Spec, plan: Plan, sizes: Sizes, dtype: torch.dtype, world: World) -> Plan:
    """The plan of one rank's call with its exchange: bytes into a rank, rounds, and the reason. Raises InputError."""
    if not isinstance(world, World):
        raise InputError(f"{spec.name}: parallel must be a dsf.parallel.Sequence, got {type(world).__name__}")
    held = f"{world.ranks} ranks, {world.layout.name}, "
    if spec.is_attention:
        k_heads, v_heads = cached_heads(spec, sizes)[0]
        numbers = sizes.batch * sizes.tokens * (k_heads * sizes.keys + v_heads * sizes.p)
        size = (world.ranks - 1) * numbers * dtype.itemsize
        return replace(
            plan,
            exchange=f"{held}gather: {size:,} bytes into a rank in 1 round, as many backward; the state of softmax "
            "attention is the keys and values of earlier tokens",
        )
    frame = frame_of(spec.inner, sizes.n, sizes.p)
    width = 8 if dtype == torch.float64 else 4
    return replace(plan, exchange=held + str(world.choice(frame, sizes.batch * sizes.heads, width)))


# -- checks


def _said(
    spec: Spec, world: World, given: dict[str, Tensor], state: Any, cu_seqlens: Any, options: list[tuple[str, Any]]
) -> Said:
    """A call as the other ranks are told of it."""
    timed = {i.name for i in spec.inputs if i.kind.time}
    first = next(given[i.name] for i in spec.inputs if i.kind.time)
    length = length_of(world, spec.is_attention, first.shape[1] if first.dim() > 1 else 0, cu_seqlens)
    start = ("initial_state", "not given" if state is None else "given")
    leaves = [x for x in (*given.values(), state) if isinstance(x, Tensor)]
    wanted = ("gradients", "wanted" if differentiable(leaves) else "not wanted")
    kind = (*options_of(world), *described(given, timed), start, *length, *options, wanted)
    return Said(kind, first, cu_seqlens)


def _look(
    recurrence: Recurrence, world: World, given: Mapping[str, Tensor], state: Any, cu_seqlens: Any, form: str,
    backend: str,
) -> None:  # fmt: skip
    """The checks of a call that this rank alone can make. Raises InputError and FormError."""
    bounds = host_bounds(recurrence.name, cu_seqlens)
    bound, _ = _bind(recurrence, given, form, backend)
    check_tokens(recurrence.name, world, world.here[0], bound.sizes.batch, bound.sizes.tokens, bounds)
    if state is None:
        return
    rows = bound.sizes.batch if bounds is None else len(bounds) - 1
    if recurrence.spec.is_attention:
        check_cache(recurrence.spec, state, rows, bound)
    else:
        recurrence._check_state(state, rows, bound)


def _named(spec: Spec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The inputs by name, each a tensor. Raises the InputError of a usual call."""
    names = [i.name for i in spec.inputs]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    whole = len(args) <= len(names) and len(given) == len(args) + len(kwargs) == len(names)
    if not whole or set(given) != set(names) or any(not isinstance(x, Tensor) for x in given.values()):
        bind(spec, args, kwargs)  # raises the error
    return {n: given[n] for n in names}


def _split(spec: Spec, world: Simulated, given: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Every rank's shard of whole inputs."""
    bind(spec, (), given)
    timed = {i.name for i in spec.inputs if i.kind.time}
    return [{n: world.shard_of(r, x)[0] if n in timed else x for n, x in given.items()} for r in world.here]


def _bind(recurrence: Recurrence, given: Mapping[str, Tensor], form: str, backend: str) -> tuple[Bound, Plan]:
    """The checked inputs of a shard, which may have no tokens, and its plan. Raises InputError and FormError."""
    spec = recurrence.spec
    timed = {i.name for i in spec.inputs if i.kind.time}
    if any(x.dim() < 2 or x.shape[1] for n, x in given.items() if n in timed):
        return recurrence._calls.prepare(spec, (), given, None, form, backend)
    padded = {n: x.new_zeros(x.shape[0], 1, *x.shape[2:]) if n in timed else x for n, x in given.items()}
    bound, plan = recurrence._calls.prepare(spec, (), padded, None, form, backend)
    return Bound(dict(given), replace(bound.sizes, tokens=0), bound.dtype, bound.compute, bound.device), plan


__all__ = ["call", "planned", "world_of"]
