"""Inputs in their legal ranges: the map of real numbers into a range, its inverse, and random inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dsf import Recurrence
from dsf.call.bind import bind
from dsf.call.record import decays
from dsf.checking.ranges import ranges_of
from dsf.checking.values import Range, key_axis
from dsf.language.annotations import shape_of
from dsf.language.errors import InputError
from dsf.language.expr import Expr, inputs_of
from dsf.language.spec import Spec
from dsf.mixers._own import inverse_softplus

# Operations that turn an input into a gate or a rate; an input below one of them is not used directly.
GATES = frozenset({"sigmoid", "softplus", "exp", "expm1", "tanh", "log", "sqrt", "rsqrt"})


def squash(x: Tensor, allowed: Range, key_dim: int = -1) -> Tensor:
    """Map real numbers smoothly into a range: by a norm to unit vectors, by a sigmoid, or by softplus for one bound."""
    if allowed.unit:
        return F.normalize(x, dim=key_dim)
    if allowed.is_real:
        return x
    if math.isinf(allowed.high):
        return allowed.low + F.softplus(x)
    if math.isinf(allowed.low):
        return allowed.high - F.softplus(x)
    return allowed.low + (allowed.high - allowed.low) * torch.sigmoid(x)


def random_inputs(
    recurrence: Recurrence,
    *,
    tokens: int,
    heads: int,
    N: int,
    P: int,
    scale: float = 1.0,
    shift: Mapping[str, float] | None = None,
) -> dict[str, Tensor]:
    """Random inputs by name, float64 with B = 1: normal numbers of standard deviation `scale`, mapped into each range.

    An odd N becomes N + 1 where the Key axis holds pairs. shift: by input name, what is added to the normal numbers
    before `squash` maps them. Every call returns the same numbers.
    """
    generator = torch.Generator().manual_seed(0)
    allowed = ranges_of(recurrence.spec)
    n = recurrence.spec.keys_of(N) if recurrence.spec.has_key else 1
    inputs = {}
    for i in recurrence.spec.inputs:
        shape = shape_of(i, (1, tokens), heads, n, P)
        raw = scale * torch.randn(shape, generator=generator, dtype=torch.float64) + (shift or {}).get(i.name, 0.0)
        inputs[i.name] = squash(raw, allowed[i.name], key_axis(i.kind))
    return inputs


def unsquash(value: Tensor, allowed: Range) -> Tensor:
    """The inverse of `squash`. Raises InputError where value lies outside the range."""
    if allowed.unit or allowed.is_real:
        return value
    if not bool(((value > allowed.low) & (value < allowed.high)).all()):
        raise InputError(f"it must lie inside its range ({allowed}), got {value.min():g} to {value.max():g}")
    if math.isinf(allowed.high):
        return inverse_softplus(value - allowed.low)
    if math.isinf(allowed.low):
        return inverse_softplus(allowed.high - value)
    return torch.logit((value - allowed.low) / (allowed.high - allowed.low))


@dataclass(frozen=True)
class Known:
    """Properties of a declaration's inputs, by name.

    ranges: the legal ones. memory: for inputs of the decay, the direction (-1 or 1) that lengthens the memory. decay,
    transition: the inputs of the decay, and of all of A. plain: inputs with a Key or Value axis that are used directly,
    not through a gate, and may be any vector or any unit vector; a layer convolves these.
    """

    ranges: Mapping[str, Range]
    memory: Mapping[str, float]
    decay: frozenset[str]
    transition: frozenset[str]
    plain: frozenset[str]


@lru_cache(maxsize=256)
def known(recurrence: Recurrence) -> Known:
    """`Known` of a recurrence, cached."""
    spec = recurrence.spec
    with torch.device("cpu"):  # a layer may be made on the meta device
        ranges, memory = ranges_of(spec), _memory(recurrence)
    direct = _direct(*(e for step in spec.system.micro_steps for e in (step.B, *step.A.exprs)), spec.readout)
    direct |= _direct(spec.system.D, *(e for r in spec.rows for c in r.normal.corrections for e in (c.left, c.right)))
    plain = {
        i.name
        for i in spec.inputs
        if i.kind.time
        and i.kind.axes
        and i.name in direct - memory.keys()
        and (ranges[i.name].is_real or ranges[i.name].unit)
    }
    return Known(ranges, memory, frozenset(_in_decay(spec)), frozenset(_in_transition(spec)), frozenset(plain))


def _direct(*roots: Expr) -> set[str]:
    """Names of the inputs that some path from a root reaches without a gate."""
    found, seen, left = set(), set(), list(roots)
    while left:
        node = left.pop()
        if node.op == "input":
            found.add(node.attrs[0])
        if node not in seen and node.op not in GATES:
            seen.add(node)
            left.extend(node.args)
    return found


def _memory(recurrence: Recurrence) -> dict[str, float]:
    """For inputs of the decay the direction (-1 or 1) of a longer memory, measured; inputs without one are missing."""
    spec, found = recurrence.spec, {}
    names = _in_decay(spec)
    for name in (i.name for i in spec.inputs if i.name in names):
        kept = {}
        for shift in (-2.0, 0.0, 2.0):
            inputs = random_inputs(recurrence, tokens=32, heads=2, N=4, P=4, shift={name: shift})
            kept[shift / 2] = sum(float(x.abs().mean()) for x in decays(spec, bind(spec, (), inputs))) / len(spec.rows)
        best = max(kept, key=lambda direction: kept[direction])
        if best and kept[best] < 1:  # a decay of 1 everywhere has no gradient: a closed relu
            found[name] = best
    return found


def _in_decay(spec: Spec) -> set[str]:
    return {i.attrs[0] for row in spec.rows for i in inputs_of(row.normal.decay)}


def _in_transition(spec: Spec) -> set[str]:
    """Names of the inputs of A."""
    exprs = [x for r in spec.rows for x in (r.normal.decay, r.normal.angle)]
    exprs += [e for r in spec.rows for c in r.normal.corrections for e in (c.scale, c.left, c.right)]
    return {i.attrs[0] for i in inputs_of(*exprs)}
