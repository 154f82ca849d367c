"""`Example`: one set of inputs for any recurrence, as a few numbers and words that can be printed and read back.

The tensors depend only on the example (shapes, a regime for every input, a seed), so an example reproduces a failure,
and Hypothesis shrinks failures by simplifying examples.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dsf.call.recurrence import Recurrence, State
from dsf.checking.values import INF, Range, key_axis, plain
from dsf.language.annotations import Kind, shape_of
from dsf.language.expr import inputs_of
from dsf.language.spec import Spec

FAR = {"low": 10.0, "high": 70.0}  # the farthest half-bounded inputs; e^-70 = 4e-31 is the smallest decay
SATURATED = 12.0  # pre-activations of decays: sigmoid(12) = 1 - 6e-6, exp(-exp(12)) = 0
PREFIX = 3  # tokens whose final state is the initial state

REAL_REGIMES = ("normal", "wide", "zero", "repeated")
BOUNDED_REGIMES = ("uniform", "corners", "low", "high", "mixed", "repeated")
UNIT_REGIMES = ("random", "repeated", "alternating", "one-hot")


def regimes_of(spec: Spec, name: str, allowed: Range) -> tuple[str, ...]:
    """The distributions (regimes) of an input's random numbers, the plainest first.

    Real inputs: normal (standard), wide (three times that), zero, repeated (one token's numbers at every token), and
    for pre-activations of a decay saturated (±12). Bounded inputs: uniform, corners (exactly the bounds and the middle:
    a gate of 0 and 1, a β of 0, 1 and 2; where there is no bound, a large number), low and high (next to a bound, down
    to 1e-30 from it), mixed (all of these, entry by entry), repeated. Unit vectors: random, repeated (the same key at
    every token), alternating (two keys in turn), one-hot.
    """
    kind = next(i.kind for i in spec.inputs if i.name == name)
    names = tensor_regimes(allowed)
    if allowed.is_real and any(i.attrs[0] == name for i in inputs_of(*(r.normal.decay for r in spec.rows))):
        names = (*names, "saturated")
    return names if kind.time else tuple(n for n in names if n not in ("repeated", "alternating"))


def tensor_regimes(allowed: Range) -> tuple[str, ...]:
    """The regimes of a range, without those that depend on the input's use."""
    if allowed.unit:
        return UNIT_REGIMES
    return REAL_REGIMES if allowed.is_real else BOUNDED_REGIMES


def generator_of(seed: int) -> torch.Generator:
    """A generator of this seed, of which torch takes 64 bits."""
    return torch.Generator().manual_seed(seed & 0xFFFF_FFFF_FFFF_FFFF)


def draw_tensor(allowed: Range, regime: str, shape: list[int], kind: Kind, seed: int) -> Tensor:
    """Random float64 numbers of a range in one regime."""
    return _draw(allowed, regime, shape, kind, generator_of(seed))


@dataclass(frozen=True)
class Drawn:
    """Base of randomly drawn objects. All fields have defaults, which are those of the smallest object."""

    def __repr__(self) -> str:
        """Source text with only the fields that differ from the smallest."""
        smallest = type(self)()
        parts = [(f.name, getattr(self, f.name)) for f in fields(self)]
        shown = ", ".join(f"{k}={v!r}" for k, v in parts if v != getattr(smallest, k))
        return f"{type(self).__name__}({shown})"

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            k: dict(v) if isinstance(v, Mapping) else list(v) if isinstance(v, tuple) else v for k, v in found.items()
        }


@dataclass(frozen=True, repr=False)
class Example(Drawn):
    """Inputs of one check.

    batch, tokens, heads, n, p: B, T, H, N (one more where it must be even) and P.
    dtype: of inputs of tokens, such as "float64"; beside a half precision Params are float32.
    groups: the number of heads of each input that has fewer than H.
    regimes: of each input (`regimes_of`); by default the plainest.
    initial: whether there is an initial state.
    cuts: increasing places between 0 and T at which a law cuts the sequence, lets the future begin or separates packed
      sequences.
    empties: the boundaries at which a packed sequence without tokens lies, by their numbers among 0, the cuts and T
      (modulo their count).
    seed: of the random numbers.
    """

    batch: int = 1
    tokens: int = 1
    heads: int = 1
    n: int = 1
    p: int = 1
    dtype: str = "float64"
    groups: Mapping[str, int] = field(default_factory=dict)
    regimes: Mapping[str, str] = field(default_factory=dict)
    initial: bool = False
    cuts: tuple[int, ...] = ()
    seed: int = 0
    empties: tuple[int, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype."""
        return getattr(torch, self.dtype)

    @property
    def bounds(self) -> list[int]:
        """0, the cuts, T."""
        return [0, *self.cuts, self.tokens]

    @property
    def packed_bounds(self) -> list[int]:
        """The bounds with the empty sequences, as cu_seqlens."""
        return sorted([*self.bounds, *(self.bounds[place % len(self.bounds)] for place in self.empties)])

    def inputs(
        self, recurrence: Recurrence, ranges: Mapping[str, Range], device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """The tensors, by name."""
        out = {}
        for entry in recurrence.spec.inputs:
            name, kind = entry.name, entry.kind
            allowed = ranges[name]
            regime = self.regimes.get(name) or regimes_of(recurrence.spec, name, allowed)[0]
            heads = self.groups.get(name, self.heads) if kind.time else self.heads
            shape = shape_of(entry, (self.batch, self.tokens), heads, recurrence.spec.keys_of(self.n), self.p)
            x = _draw(allowed, regime, list(shape), kind, self._generator(name))
            half = self.torch_dtype in (torch.float16, torch.bfloat16)
            dtype = torch.float32 if half and not kind.time else self.torch_dtype
            out[name] = x.to(dtype).to(device)
        return out

    def state(
        self, recurrence: Recurrence, ranges: Mapping[str, Range], device: torch.device | str = "cpu", rows: int = 0
    ) -> State | None:
        """The initial state, the final state of a few other tokens; None unless `initial`. rows: in place of B."""
        if not self.initial:
            return None
        before = replace(self, batch=rows or self.batch, tokens=PREFIX, regimes={}, seed=self.seed + 1)
        inputs: dict[str, Any] = before.inputs(recurrence, ranges, device)
        with torch.no_grad():
            state: State = recurrence(**inputs, return_state=True)[1]
        return state

    def _generator(self, name: str) -> torch.Generator:
        """An input's generator, seeded by its name and the seed only, not by other inputs."""
        return generator_of(zlib.crc32(name.encode()) + 7919 * self.seed)


def lengths(bounds: list[int]) -> list[int]:
    """The numbers of tokens between boundaries."""
    return [b - a for a, b in pairwise(bounds)]


def _draw(allowed: Range, regime: str, shape: list[int], kind: Kind, generator: torch.Generator) -> Tensor:
    """Random float64 numbers of one input."""
    if regime == "repeated":
        once = _draw(allowed, "normal", [shape[0], 1, *shape[2:]], kind, generator)
        return once.expand(shape).clone()
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    key_dim = key_axis(kind)
    if allowed.unit:
        return _unit(allowed, regime, normal, key_dim)
    if not allowed.is_real:
        return _bounded(allowed, regime, normal, generator)
    if regime == "saturated":
        return torch.where(normal > 0, SATURATED, -SATURATED) + 0.1 * normal
    return normal * {"wide": 3.0, "zero": 0.0}.get(regime, 1.0)


def _unit(allowed: Range, regime: str, normal: Tensor, key_dim: int) -> Tensor:
    if regime == "one-hot":
        best = normal.argmax(dim=key_dim, keepdim=True)
        return torch.zeros_like(normal).scatter(key_dim, best, 1.0)
    directions = plain(allowed, normal, key_dim)
    if regime == "alternating":
        turn = torch.arange(normal.shape[1]) % min(2, normal.shape[1])
        return directions[:, turn]
    return directions


def _bounded(allowed: Range, regime: str, normal: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers of a bounded range (gates, rates), at distances 10^-u from a bound: u up to 30 at 0, else up to 16."""
    low, high = allowed.low, allowed.high
    if low == -INF:
        low = high - FAR["high"]
    if high == INF:
        high = low + FAR["low"]
    share = torch.rand(normal.shape, generator=generator, dtype=torch.float64)
    ways = {
        "uniform": plain(allowed, normal, -1),
        "corners": torch.tensor([low, high, (low + high) / 2], dtype=torch.float64)[(share * 3).long()],
        "low": low + (high - low) * 10 ** -(share * (30 if low == 0 else 16)),
        "high": high - (high - low) * 10 ** -(share * (30 if high == 0 else 16)),
    }
    if regime == "mixed":
        pick = torch.randint(len(ways), normal.shape, generator=generator)
        mixed = torch.stack(list(ways.values())).gather(0, pick.unsqueeze(0)).squeeze(0)
        return mixed.clamp(allowed.low, allowed.high)
    return ways.get(regime, ways["uniform"]).clamp(allowed.low, allowed.high)
