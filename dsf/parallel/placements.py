"""Calls on DTensors: from each input's placement to a call on local tensors.

The sequences of a batch and the heads are independent, so a call on shards of these is a call on local tensors. Tokens
are not: a shard of them without `parallel=` would start from a zero state on every rank, and raises InputError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dsf.language.annotations import Kind
from dsf.language.errors import InputError
from dsf.language.spec import Spec
from dsf.parallel.world import Sequence, World

BATCH, TOKENS, HEADS = "batch", "tokens", "heads"
OF_OUTPUT = {BATCH: Shard(0), TOKENS: Shard(1), HEADS: Shard(2)}
OF_STATE = {BATCH: Shard(0), TOKENS: Replicate(), HEADS: Shard(1)}
LOCALLY = "give each rank's own tensors, x.to_local()"


class _Divided(torch.autograd.Function):
    """Identity; divides the gradient among ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.ranks, None


@dataclass(frozen=True)
class Dealt:
    """What every dimension of a mesh holds shards of: batch, tokens, heads, or None. whole: sizes of whole tensors."""

    mesh: Any
    ways: tuple[str | None, ...]
    whole: Mapping[str, int]

    def shared(self, state: Tensor) -> Tensor:
        """A final state, of which every rank of a sequence holds the same: so it does of its gradient as a DTensor, and
        the call sums what they hold."""
        ranks = math.prod(self.mesh.size(d) for d, way in enumerate(self.ways) if way == TOKENS)
        return state if ranks == 1 else _Divided.apply(state, ranks)

    def out(self, x: Tensor, of: Mapping[str, Placement]) -> DTensor:
        """A local result as a DTensor, whose shards need not be of one size."""
        places = [Replicate() if way is None else of[way] for way in self.ways]
        sizes = list(x.shape)
        for way, place in of.items():
            if isinstance(place, Shard) and way in self.ways:
                sizes[place.dim] = self.whole[way]
        shape = torch.Size(sizes)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x.contiguous(), self.mesh, places, run_check=False, shape=shape, stride=stride)


def call(spec: Spec, run: Callable[..., Any], given: Mapping[str, Any], state: Any, world: World | None) -> Any:
    """run(**local inputs, initial_state=local state), its results as DTensors.

    world: the call's parallel=, whose ranks must be those that tokens are sharded over. Raises InputError for
    placements that a recurrence cannot be computed from locally, and for inputs that are no DTensors beside ones that
    are.
    """
    kinds = {i.name: i.kind for i in spec.inputs}
    plain = [name for name, x in given.items() if not isinstance(x, DTensor)]
    if plain:
        raise InputError(
            f"{spec.name}: `{plain[0]}` is no DTensor and others are; distribute it, as Replicate() for instance"
        )
    first = next(iter(given.values()))
    for name, x in given.items():
        if x.device_mesh != first.device_mesh:
            raise InputError(f"{spec.name}: `{name}` is on another mesh than `{next(iter(given))}`")
    ways = tuple(_way(spec, dim, kinds, given, world is not None) for dim in range(first.device_mesh.ndim))
    dealt = Dealt(first.device_mesh, ways, _whole(kinds, given))
    if world is not None:
        _check_world(spec.name, world, dealt)
    local = {name: _local(x, dealt) for name, x in given.items()}
    start = None if state is None else _local_state(spec, state, dealt)
    found = run(**local, initial_state=start)
    if isinstance(found, tuple):
        if not isinstance(found[1], Tensor):
            raise InputError(f"{spec.name}: a cache of keys and values is not returned of DTensors: {LOCALLY}")
        return dealt.out(found[0], OF_OUTPUT), dealt.out(dealt.shared(found[1]), OF_STATE)
    return dealt.out(found, OF_OUTPUT)


def _whole(kinds: Mapping[str, Kind], given: Mapping[str, DTensor]) -> dict[str, int]:
    """Sizes of batch, tokens and heads; heads that groups share count as often as they are shared."""
    found: dict[str, int] = {}
    for name, x in given.items():
        for axis, size in zip(_axes(kinds[name]), x.shape, strict=False):
            if axis is not None:
                found[axis] = max(size, found.get(axis, 0))
    return found


def _check_world(name: str, world: Any, dealt: Dealt) -> None:
    """Raise InputError unless tokens are sharded over the very ranks that share the sequence, in its layout."""
    dims = [d for d, way in enumerate(dealt.ways) if way == TOKENS]
    if not isinstance(world, Sequence):
        raise InputError(f"{name}: a call on DTensors takes a dsf.parallel.Sequence, got {type(world).__name__}")
    if not dims:
        raise InputError(
            f"{name}: parallel= is given, but no dimension of the mesh holds shards of tokens, so every rank has all "
            f"of them: expected Shard(1) on the dimension that {world} is made of"
        )
    if world.layout.slots > 1:
        raise InputError(
            f"{name}: Shard(1) is one run of tokens a rank, but the layout of {world} is 'headtail': give local "
            "tensors, cp.shard(x)"
        )
    here = [slice(None) if d in dims else place for d, place in enumerate(dealt.mesh.get_coordinate())]
    ranks = dealt.mesh.mesh[tuple(here)].flatten().tolist()
    if not world.is_of(ranks):
        raise InputError(f"{name}: tokens are sharded over the ranks {ranks}, which are not those of {world}")


def _axes(kind: Kind) -> tuple[str | None, ...]:
    """The name of each axis of an input: batch, tokens, heads, or None where it cannot be sharded."""
    names = {"B": BATCH, "T": TOKENS, "H": HEADS}
    return tuple(names.get(axis) for axis in kind.layout(False))


def _way(spec: Spec, dim: int, kinds: Mapping[str, Kind], given: Mapping[str, DTensor], shared: bool) -> str | None:
    """The axis that is sharded over one dimension of the mesh, or None. Raises InputError."""
    found: dict[str, str | None] = {}
    for name, x in given.items():
        place, axes = x.placements[dim], _axes(kinds[name])
        if isinstance(place, Replicate):
            found[name] = None
            continue
        axis = axes[place.dim] if isinstance(place, Shard) else None
        if axis is None:
            raise InputError(
                f"{spec.name}: `{name}` is {place} on dimension {dim} of the mesh; a recurrence takes shards of the "
                f"batch or the heads, and whole tensors: expected Replicate() or a Shard of one of {_shown(axes)}"
            )
        if axis == TOKENS and not shared:
            raise InputError(
                f"{spec.name}: `{name}` is sharded over tokens; give parallel=dsf.parallel.Sequence(mesh), or the "
                "recurrence would begin with nothing on every rank"
            )
        found[name] = axis
    ways = {way for way in found.values() if way is not None}
    if len(ways) > 1:
        raise InputError(
            f"{spec.name}: dimension {dim} of the mesh holds shards of {' and '.join(sorted(ways))}: {found}"
        )
    if not ways:
        return None
    (way,) = ways
    for name, own in found.items():
        axes = _axes(kinds[name])
        if own is None and way in axes and not (way == HEADS and given[name].shape[axes.index(way)] == 1):
            raise InputError(
                f"{spec.name}: `{name}` is whole on dimension {dim} of the mesh, where others are sharded over {way}: "
                f"expected Shard({axes.index(way)})"
            )
        if own is not None and given[name].shape[axes.index(way)] % given[name].device_mesh.size(dim) and way == HEADS:
            raise InputError(
                f"{spec.name}: the {given[name].shape[axes.index(way)]} heads of `{name}` do not divide among "
                f"{given[name].device_mesh.size(dim)} ranks"
            )
    return way


def _shown(axes: Several[str | None]) -> str:
    return ", ".join(f"{name} (dim {i})" for i, name in enumerate(axes) if name is not None and name != TOKENS)


def _local(x: DTensor, dealt: Dealt) -> Tensor:
    """This rank's part. A replicated input beside sharded ones gets a Partial gradient, a part of a sum."""
    grads = [
        Partial() if isinstance(place, Replicate) and way is not None else place
        for place, way in zip(x.placements, dealt.ways, strict=True)
    ]
    return x.to_local(grad_placements=grads)


def _local_state(spec: Spec, state: Any, dealt: Dealt) -> Tensor:
    expected = [Replicate() if way is None else OF_STATE[way] for way in dealt.ways]
    if spec.is_attention:
        raise InputError(f"{spec.name}: a cache of keys and values is not taken beside DTensors: {LOCALLY}")
    if not isinstance(state, DTensor) or list(state.placements) != expected:
        given = list(state.placements) if isinstance(state, DTensor) else type(state).__name__
        raise InputError(f"{spec.name}: initial_state must be a DTensor placed {expected}, got {given}")
    return _local(state, dealt)
