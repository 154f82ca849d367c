"""Binding the tensors of one call to the declaration's inputs. All errors about inputs are raised here."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsf.kernels.attention import KVCache, is_appended, is_batched
from dsf.kernels.operators import listed
from dsf.language.annotations import Kind
from dsf.language.errors import InputError
from dsf.language.expr import KEY, VALUE, Expr, const, inputs_of, symbol_of
from dsf.language.places import line_of_pairs
from dsf.language.spec import Spec

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Sizes:
    """batch B, tokens T, heads H; keys: entries of Key inputs; n: entries of the state's Key axis (the number of
    features, where there are any); p: channels. groups: {input: heads} of every input with fewer heads than H.
    """

    batch: int
    tokens: int
    heads: int
    keys: int
    n: int
    p: int
    groups: Mapping[str, int] = field(default_factory=dict)

    def heads_of(self, *exprs: Expr) -> int:
        """The number of heads that differ in expressions; each is shared by H / that number of consecutive heads."""
        return math.lcm(*(self.groups.get(i.attrs[0], self.heads) for i in inputs_of(*exprs)))


class Turns(NamedTuple):
    """Zeros that stand for what has a gradient in float32: turning the states between the kernels' chunks
    [B, H, chunks, N / 2], and turned inputs [B, T, H, N], by name."""

    border: Tensor
    marks: Mapping[str, Tensor]


@dataclass(frozen=True)
class Bound:
    """One call's checked inputs: tensors by name in the declaration's order, sizes, the inputs' dtype, the computing
    dtype, the device.

    turns: of calls whose keys and queries kernels have turned.
    """

    tensors: Mapping[str, Tensor]
    sizes: Sizes
    dtype: torch.dtype
    compute: torch.dtype
    device: torch.device
    turns: Turns | None = None

    def zero(self) -> Tensor:
        """0 in the computing dtype, [1, 1, 1, 1, 1], for expressions without inputs."""
        return torch.zeros((1,) * 5, dtype=self.compute, device=self.device)


def unrounded(bound: Bound) -> Bound:
    """The call with half-precision inputs in float32, since kernels round matrix operands to the inputs' dtype."""
    if bound.dtype.itemsize != 2:
        return bound
    return replace(bound, tensors={n: x.float() for n, x in bound.tensors.items()}, dtype=torch.float32)


def params_unrounded(spec: Spec, bound: Bound) -> Bound:
    """The call with half-precision Params in float32. Segments and batches of packed sequences each have a gradient of
    them: these are then added up in float32, and their sum is rounded once."""
    if bound.dtype.itemsize != 2:
        return bound
    params = {i.name: bound.tensors[i.name].float() for i in spec.inputs if not i.kind.time}
    return replace(bound, tensors={**bound.tensors, **params}) if params else bound


def bind(spec: Spec, args: tuple[Any, ...], kwargs: Mapping[str, Any], one_token: bool = False) -> Bound:
    """Check one call's inputs. Raises InputError with recurrence, argument, expected and given value.

    one_token: the inputs have no token axis (Recurrence.step); one of size 1 is inserted.
    """
    given = _match(spec, args, kwargs)
    for entry in spec.inputs:
        _check_tensor(spec, entry.name, entry.kind, given[entry.name], one_token)
    shapes = {name: list(x.shape) for name, x in given.items()}
    timed = {i.name: i.kind for i in spec.inputs if i.kind.time}
    if one_token:
        given |= {name: given[name].unsqueeze(1) for name in timed}
    sizes = _sizes(spec, given, shapes)
    dtype = _dtype(spec, given, timed)
    device = _device(spec, given)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    return Bound(given, sizes, dtype, compute, device)


def _match(spec: Spec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    names = [i.name for i in spec.inputs]
    if len(args) > len(names):
        raise InputError(f"{spec.name}: expected {len(names)} inputs ({', '.join(names)}), got {len(args)}")
    given = dict(zip(names, args, strict=False))
    for name, x in kwargs.items():
        if name not in names:
            raise InputError(f"{spec.name}: no input is called `{name}`; inputs are {', '.join(names)}")
        if name in given:
            raise InputError(f"{spec.name}: input `{name}` is given twice")
        given[name] = x
    missing = [n for n in names if n not in given]
    if missing:
        raise InputError(f"{spec.name}: missing input{'s' * (len(missing) > 1)} {', '.join(f'`{m}`' for m in missing)}")
    return {name: given[name] for name in names}


def _check_tensor(spec: Spec, name: str, kind: Kind, x: Any, one_token: bool) -> None:
    layout = kind.layout(one_token)
    shown = f"[{', '.join(layout)}]"
    if not isinstance(x, Tensor):
        raise InputError(f"{spec.name}: `{name}` must be a tensor {shown}, got {type(x).__name__}")
    if x.dim() != len(layout):
        raise InputError(
            f"{spec.name}: `{name}` is {kind}, expected {len(layout)} axes {shown}, got shape {list(x.shape)}"
        )
    if x.dtype not in FLOATS:
        raise InputError(f"{spec.name}: `{name}` must be floating point, got {x.dtype}")
    _check_dense(f"{spec.name}: `{name}`", x)
    if kind.steps is not None and x.shape[layout.index("n")] != kind.steps:
        raise InputError(
            f"{spec.name}: `{name}` is {kind}, expected n = {kind.steps} micro-steps {shown}, got shape {list(x.shape)}"
        )


def _check_dense(name: str, x: Tensor) -> None:
    if x.layout != torch.strided:
        raise InputError(f"{name} must be a dense tensor, got one of {x.layout}; give its to_dense()")


def _sizes(spec: Spec, given: Mapping[str, Tensor], shapes: Mapping[str, list[int]]) -> Sizes:
    """All sizes. The first input with an axis fixes its size, the others must agree. shapes: as the user gave them."""
    found: dict[str, tuple[int, str]] = {}

    def agree(axis: str, size: int, name: str) -> None:
        known, owner = found.setdefault(axis, (size, name))
        if known != size:
            raise InputError(
                f"{spec.name}: `{name}` has {axis} = {size}, but `{owner}` has {axis} = {known}; "
                f"`{name}` has shape {shapes[name]}"
            )
        if size < 1:
            raise InputError(f"{spec.name}: `{name}` has {axis} = 0, at least 1 is needed; shape {shapes[name]}")

    counts = {i.name: given[i.name].shape[i.kind.layout().index("H")] for i in spec.inputs}
    heads, widest = max((counts[i.name], i.name) for i in spec.inputs if i.kind.time)
    for entry in spec.inputs:
        name, axes = entry.name, dict(zip(entry.kind.layout(), given[entry.name].shape, strict=True))
        mine = axes.pop("H")
        for axis in axes.keys() - {"n"}:
            agree(axis, axes[axis], name)
        if mine < 1 or (heads % mine if entry.kind.time else mine != heads):
            need = f"a divisor of {heads}" if entry.kind.time and heads else str(max(heads, 1))
            raise InputError(
                f"{spec.name}: `{name}` has {mine} heads, expected {need} (`{widest}` has {heads} heads); "
                f"`{name}` has shape {shapes[name]}"
            )
    sizes = {axis: size for axis, (size, _) in found.items()}
    keys = sizes.get("N", 2 * sizes.get("N/2", 0) or 1)
    _check_pairs(spec, keys, found)
    groups = {name: count for name, count in counts.items() if count != heads}
    return Sizes(sizes["B"], sizes["T"], heads, keys, state_keys(spec, keys), sizes.get("P", 1), groups)


def _check_pairs(spec: Spec, keys: int, found: Mapping[str, tuple[int, str]]) -> None:
    if "N/2" in found and 2 * found["N/2"][0] != keys:
        (half, name), (_, owner) = found["N/2"], found["N"]
        raise InputError(
            f"{spec.name}: `{name}` has an entry for each pair of places, N/2 = {half}, but `{owner}` has N = {keys}; "
            f"N must be {'even, ' * (keys % 2)}twice N/2{line_of_pairs(spec)}"
        )
    check_even(spec, keys, found["N"][1] if "N" in found else None)


def check_even(spec: Spec, keys: int, owner: str | None = None) -> None:
    """Raise InputError for an odd number of key entries where they are taken in pairs. owner: the input that has it."""
    if spec.keys_of(keys) == keys:
        return
    told = f"places of the Key axis are taken in pairs, so N must be even, got N = {keys}"
    if owner is not None:
        taker = "turn" if spec.turns else "pair"
        told = f"{taker} takes places of the Key axis in pairs, so N must be even, but `{owner}` has N = {keys}"
    raise InputError(f"{spec.name}: {told}{line_of_pairs(spec)}")


def state_keys(spec: Spec, keys: int) -> int:
    """Entries of the state's Key axis for Key inputs of `keys` entries."""
    if not spec.has_key:
        return 1
    if spec.features is not None and spec.features.startswith("taylor"):
        order = int(spec.features.removeprefix("taylor"))
        return math.comb(keys + order, order)
    return keys


def _dtype(spec: Spec, given: Mapping[str, Tensor], timed: Mapping[str, Kind]) -> torch.dtype:
    owner = next(iter(timed))
    dtype = given[owner].dtype
    for entry in spec.inputs:
        x = given[entry.name]
        if x.dtype == dtype or (not entry.kind.time and x.dtype == torch.float32 and dtype != torch.float64):
            continue
        allowed = f"{dtype} or torch.float32" if not entry.kind.time and dtype.itemsize < 4 else str(dtype)
        raise InputError(f"{spec.name}: `{entry.name}` has dtype {x.dtype}, expected {allowed} (`{owner}` has {dtype})")
    return dtype


def _device(spec: Spec, given: Mapping[str, Tensor]) -> torch.device:
    owner = spec.inputs[0].name
    device = given[owner].device
    for name, x in given.items():
        if x.device != device:
            raise InputError(f"{spec.name}: `{name}` is on {x.device}, but `{owner}` is on {device}")
    return device


def check_state(spec: Spec, state: Any, expected: tuple[int, ...], bound: Bound) -> None:
    """Raise InputError unless state is a tensor of the expected shape, of dtype compute, on the inputs' device."""
    if not isinstance(state, Tensor):
        raise InputError(f"{spec.name}: initial_state must be a tensor {list(expected)}, got {type(state).__name__}")
    if tuple(state.shape) != expected:
        raise InputError(
            f"{spec.name}: initial_state has shape {list(state.shape)}, expected {list(expected)} "
            "([B or sequences, H, N, columns], see state_shape())"
        )
    if state.dtype != bound.compute:
        raise InputError(
            f"{spec.name}: initial_state has dtype {state.dtype}, expected {bound.compute} (states are float32, "
            "or float64 for float64 inputs)"
        )
    _check_dense(f"{spec.name}: initial_state", state)
    if state.device != bound.device:
        raise InputError(f"{spec.name}: initial_state is on {state.device}, but the inputs are on {bound.device}")


def check_cache(spec: Spec, cache: Any, rows: int, bound: Bound) -> None:
    """Raise InputError unless cache is a KVCache of `rows` rows that fits this recurrence and its inputs."""
    if not isinstance(cache, KVCache):
        raise InputError(
            f"{spec.name}: initial_state must be a KVCache (keys and values so far), got {type(cache).__name__}"
        )
    places = cache.k.shape[2] if cache.k.dim() == 4 else 0
    layout = cache_layout(spec, bound, rows, places)
    if cache.filled is not None and layout["bias"][0] is None:
        layout["bias"] = (rows, 1, places), bound.dtype
    for name, (shape, dtype) in layout.items():
        x = getattr(cache, name)
        if (shape is None) is not (x is None):
            wanted = "none is expected" if shape is None else f"expected {list(shape)}"
            raise InputError(
                f"{spec.name}: the KV cache has {'no ' * (x is None)}{name}, {wanted}; it is another recurrence's"
            )
        if shape is not None and (tuple(x.shape), x.dtype, x.device) != (shape, dtype, bound.device):
            raise InputError(
                f"{spec.name}: {name} of the KV cache is {list(x.shape)}, {x.dtype}, on {x.device}; expected "
                f"{list(shape)}, {dtype}, on {bound.device}"
            )
    window = spec.system.window
    if window is not None and places > window:
        raise InputError(f"{spec.name}: the KV cache has {places} places, expected at most the window's {window}")
    most = math.inf if places == window else places
    known = bound.device.type == "meta" or cache.filled is not None or is_appended(cache) or is_batched(cache.lengths)
    if not known and not all(0 <= n <= most for n in listed(cache.lengths)):
        raise InputError(
            f"{spec.name}: lengths of the KV cache are {listed(cache.lengths)}, expected from 0 to {places}, "
            "the places of its k and v"
        )


def cache_layout(
    spec: Spec, bound: Bound, rows: int, places: int
) -> dict[str, tuple[tuple[int, ...] | None, torch.dtype]]:
    """Shapes (None for no tensor) and dtypes of a cache's tensors."""
    sizes = bound.sizes
    (k_heads, v_heads), (b_heads, a_heads) = cached_heads(spec, sizes)
    return {
        "k": ((rows, k_heads, places, key_width(spec, sizes)), bound.dtype),
        "v": ((rows, v_heads, places, sizes.p), bound.dtype),
        "lengths": ((rows,), torch.int64),
        "bias": ((rows, b_heads, places) if b_heads else None, bound.compute),
        "angle": ((rows, a_heads, angle_width(spec, sizes)) if a_heads else None, bound.compute),
    }


def key_width(spec: Spec, sizes: Sizes) -> int:
    """Width of a key in attention's cache."""
    return sizes.keys if spec.is_softmax else sizes.n


def angle_width(spec: Spec, sizes: Sizes) -> int:
    """Angles a head in attention's cache: one for all pairs of key entries, or one a pair."""
    return sizes.keys // 2 if KEY in spec.rows[0].normal.angle.axes else 1


def decays(spec: Spec) -> bool:
    """Whether attention's cache has biases."""
    (row,) = spec.rows
    (term,) = row.terms
    return row.normal.decay is not const(1) or term.gain is not None


def cached_heads(spec: Spec, sizes: Sizes) -> tuple[tuple[int, int], tuple[int, int]]:
    """((heads of keys, of values), (of biases, of angles)) in attention's cache: as many as differ, 0 for no tensor."""
    (row,) = spec.rows
    (term,) = row.terms
    angle, decay = row.normal.angle, row.normal.decay
    bias = [decay] if term.gain is None else [decay, term.gain]
    keys = sizes.heads_of(term.key, angle), sizes.heads_of(term.value)
    return keys, (sizes.heads_of(*bias) if decays(spec) else 0, sizes.heads_of(angle) if angle is not const(0) else 0)


def environment(
    spec: Spec, bound: Bound, timed: Mapping[str, Tensor] | None = None, compact: bool = False,
    only: Container[str] | None = None,
) -> dict[Expr, Tensor]:  # fmt: skip
    """Input nodes -> tensors [B, T, H, n, p] in the computing dtype (size one where an axis is absent).

    timed: replaces the per-token tensors (a slice or a repacking of them), and so B and T. compact: an input with one
    head keeps one. only: the names of the inputs that are wanted; 0 stands for them where there are none.
    """
    env: dict[Expr, Tensor] = {}
    for entry in spec.inputs if only is None else [i for i in spec.inputs if i.name in only]:
        x = bound.tensors[entry.name] if timed is None else timed.get(entry.name, bound.tensors[entry.name])
        x = x.to(bound.compute)
        pieces = x.unbind(2) if entry.kind.steps is not None else (x,)
        for step, piece in enumerate(pieces):
            place = step if entry.kind.steps is not None else None
            node = symbol_of(entry.name, place, entry.kind.axes, entry.kind.pair)
            node = node.args[0] if entry.kind.pair else node
            alike = compact and piece.shape[-1 - len(entry.kind.axes)] == 1
            env[node] = named_axes(entry.kind, piece, 1 if alike else bound.sizes.heads)
    return env or {const(0): bound.zero()}


def named_axes(kind: Kind, x: Tensor, heads: int) -> Tensor:
    """An input as [B|1, T|1, H, n, p], of size one along axes that it lacks, with shared heads repeated."""
    x = with_own_gradient(x)
    if not kind.time:
        x = x[None, None]
    if KEY not in kind.axes:
        x = x.unsqueeze(3)
    if VALUE not in kind.axes:
        x = x.unsqueeze(4)
    if x.shape[2] == heads:
        return x
    if x.shape[2] == 1:
        return x.expand(-1, -1, heads, -1, -1)
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def with_own_gradient(x: Tensor) -> Tensor:
    """x, or a copy of a leaf: torch gives two leaves whose views are added one gradient in the same memory."""
    return x * 1 if x.is_leaf and x.requires_grad and torch.is_grad_enabled() else x
