"""The values that an input may take, and random numbers in them."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dsf.language.annotations import Kind
from dsf.language.errors import InputError
from dsf.language.expr import KEY, VALUE
from dsf.language.spec import Spec

INF = math.inf
TINY = sys.float_info.min  # the least legal distance: "> 0"
PROBE_TOKENS, PROBE_HEADS, PROBE_KEYS, PROBE_CHANNELS = 16, 16, 3, 2


@dataclass(frozen=True)
class Range:
    """The values that an input may take: low ≤ x ≤ high in every entry; unit: vectors of length one (Key or Value)."""

    low: float = -INF
    high: float = INF
    unit: bool = False

    @property
    def is_real(self) -> bool:
        """True when every real number is allowed."""
        return not self.unit and self.low == -INF and self.high == INF

    def __str__(self) -> str:
        if self.unit:
            return "of unit length"
        if self.is_real:
            return "real"
        if self.low == -INF:
            return "< 0" if self.high == -TINY else f"≤ {self.high:g}"
        if self.low == TINY:
            return "> 0" if self.high == INF else f"in (0, {self.high:g}]"
        return f"≥ {self.low:g}" if self.high == INF else f"in [{self.low:g}, {self.high:g}]"


REAL = Range()
UNIT = Range(unit=True)


def as_range(owner: str, name: str, value: Range | tuple[float, float]) -> Range:
    """A user's range of an input as a Range. Raises InputError, which names the owner, for what is no range."""
    try:
        low, high = (value.low, value.high) if isinstance(value, Range) else value
        found = value if isinstance(value, Range) else Range(float(low), float(high))
    except (TypeError, ValueError) as error:
        raise InputError(f"{owner}: the range of `{name}` must be (low, high), got {value!r}") from error
    if not found.low <= found.high:
        raise InputError(f"{owner}: the range of `{name}` is empty: low {found.low:g}, high {found.high:g}")
    return found


def key_axis(kind: Kind) -> int:
    """The axis of vectors that have a length, counted from the end: the Key axis, or the channels of a Value."""
    return -2 if kind.axes == {KEY, VALUE} else -1


def plain(allowed: Range, normal: Tensor, key_dim: int) -> Tensor:
    """Standard normal numbers mapped into a range. Without bounds they stay; with two they are squashed, with one they
    become distances from it; unit vectors are normalised."""
    if allowed.unit:
        return normal / normal.norm(dim=key_dim, keepdim=True).clamp(min=1e-12)
    if allowed.is_real:
        return normal
    if allowed.low == -INF:
        return allowed.high - normal.abs()
    if allowed.high == INF:
        return allowed.low + normal.abs()
    share = 0.5 * (1 + torch.erf(normal / math.sqrt(2)))
    return allowed.low + (allowed.high - allowed.low) * share


def probe_inputs(spec: Spec, ranges: Mapping[str, Range]) -> dict[str, Tensor]:
    """Random values of every input, with which the demands on ranges are tested."""
    generator = torch.Generator().manual_seed(0)
    keys = spec.keys_of(PROBE_KEYS)
    inputs = {}
    for name, kind in ((i.name, i.kind) for i in spec.inputs):
        lead = [1, PROBE_TOKENS, *([kind.steps] if kind.steps is not None else [])] if kind.time else []
        sizes = {KEY: keys // 2 if kind.pair else keys, VALUE: PROBE_CHANNELS}
        shape = [*lead, PROBE_HEADS, *(sizes[a] for a in (KEY, VALUE) if a in kind.axes)]
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        inputs[name] = plain(ranges[name], normal, key_axis(kind))
    return inputs
