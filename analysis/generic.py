"""`GenericMixer`: a layer around any recurrence, for those that come without the module of their paper."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsf import Recurrence
from dsf.checking.ranges import Range, key_axis, ranges_of
from dsf.language.expr import KEY, VALUE, inputs_of
from dsf.language.spec import Input, Spec
from dsf.mixers import Mixer

LONGEST = 4.0  # sigmoid(4) = 0.982, a half-life of 38 tokens


def squash(x: Tensor, allowed: Range, key_dim: int = -1) -> Tensor:
    """Real numbers brought into a range smoothly: unit vectors, sigmoid between bounds, softplus beside one."""
    if allowed.unit:
        return F.normalize(x, dim=key_dim)
    if allowed.is_real:
        return x
    if math.isinf(allowed.high):
        return allowed.low + F.softplus(x)
    if math.isinf(allowed.low):
        return allowed.high - F.softplus(x)
    return allowed.low + (allowed.high - allowed.low) * torch.sigmoid(x)


def shape_of(entry: Input, lead: tuple[int, ...], heads: int, n: int, p: int) -> tuple[int, ...]:
    """Shape of an input: [*lead, (steps,) H, ·], or [H, ·] of a Param."""
    sides = [size for axis, size in ((KEY, n // 2 if entry.kind.pair else n), (VALUE, p)) if axis in entry.kind.axes]
    if not entry.kind.time:
        return (heads, *sides)
    return (*lead, *((entry.kind.steps,) if entry.kind.steps else ()), heads, *sides)


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
    """Normal numbers of standard deviation `scale`, brought into each input's range: float64, B = 1, by input name.

    shift: added to an input's numbers before they are squashed. The same numbers on every call.
    """
    generator = torch.Generator().manual_seed(0)
    allowed = ranges_of(recurrence.spec)
    inputs = {}
    for i in recurrence.spec.inputs:
        shape = shape_of(i, (1, tokens), heads, recurrence.spec.keys_of(N) if recurrence.spec.has_key else 1, P)
        raw = scale * torch.randn(shape, generator=generator, dtype=torch.float64) + (shift or {}).get(i.name, 0.0)
        inputs[i.name] = squash(raw, allowed[i.name], key_axis(i.kind))
    return inputs


class GenericMixer(Mixer):
    """A layer around any recurrence: every token input is a linear map of x, squashed into the range it needs.

    The ranges are those that the traced expressions demand for states to stay bounded
    (`dsf.checking.ranges.ranges_of`): a bare decay lies in [0, 1], an erased key has length one, a
    denominator is positive.
    Biases start such that memories are spread, as the papers' are: up to LONGEST in the direction that keeps more.
    n_heads heads; N = d_state, P = headdim (both d_model / n_heads unless given, 1 where no input has the axis). Params
    are learnt: normal where the transition reads them (and shifted likewise), else ones. After the recurrence: RMSNorm
    of each head, then o_proj.
    It has no convolution and no gate, so `bare` changes nothing.
    """

    def __init__(
        self,
        recurrence: Recurrence,
        d_model: int,
        n_heads: int = 4,
        d_state: int | None = None,
        headdim: int | None = None,
        bare: bool = False,
    ):
        super().__init__()
        spec = recurrence.spec
        self.recurrence = recurrence
        self.ranges = ranges_of(spec)
        n = spec.keys_of(d_state or d_model // n_heads) if spec.has_key else 1
        wide = any(VALUE in i.kind.axes for i in spec.inputs)
        self.dims = (n_heads, n, (headdim or d_model // n_heads) if wide else 1)
        self.proj = nn.ModuleDict()  # the suffixes keep inputs called `values` or `type` off these dicts' own names
        self.param = nn.ParameterDict()
        reads, memory = _in_transition(spec), _memory(recurrence)
        for entry in spec.inputs:
            shape = shape_of(entry, (), *self.dims)
            if entry.kind.time:
                linear = self.proj[f"{entry.name}_proj"] = nn.Linear(d_model, torch.Size(shape).numel())
                if entry.name in memory:
                    nn.init.uniform_(linear.bias, 0.0, LONGEST)
                    linear.bias.data *= memory[entry.name]
            else:
                start = torch.randn(shape) if entry.name in reads else torch.ones(shape)
                start += memory.get(entry.name, 0.0) * LONGEST * torch.rand(shape)
                self.param[f"{entry.name}_param"] = nn.Parameter(start)
        self.o_norm = nn.RMSNorm(self.dims[2]) if wide else nn.Identity()  # of one number it would leave the sign
        self.o_proj = nn.Linear(n_heads * self.dims[2], d_model, bias=False)

    def arguments(self, u: Tensor, side: tuple[Tensor, ...], span: object, **_: Tensor) -> dict[str, Tensor]:
        inputs = {}
        for entry in self.recurrence.spec.inputs:
            name = entry.name
            if entry.kind.time:
                raw = self.proj[f"{name}_proj"](u).unflatten(-1, shape_of(entry, (), *self.dims))
            else:
                raw = self.param[f"{name}_param"]
            inputs[name] = squash(raw, self.ranges[name], key_axis(entry.kind))
        return inputs

    def readout(self, y: Tensor, side: tuple[Tensor, ...]) -> Tensor:
        return self.o_proj(self.o_norm(y).flatten(2))

    def state_size(self, context: int = 0, conv: bool = True) -> int:
        """Numbers one sequence keeps after `context` tokens; a KV cache if the features are infinite."""
        heads, n, p = self.dims
        return context * heads * (n + p) if self.recurrence.spec.is_softmax else super().state_size(context, conv)


def _memory(recurrence: Recurrence) -> dict[str, float]:
    """For each input of the decay the direction, -1 or 1, in which the state keeps more; none if it is even."""
    spec, found = recurrence.spec, {}
    names = {i.attrs[0] for row in spec.rows for i in inputs_of(row.normal.decay)}
    for name in (i.name for i in spec.inputs if i.name in names):
        kept = {}
        for shift in (-2.0, 0.0, 2.0):
            inputs = random_inputs(recurrence, tokens=32, heads=2, N=4, P=4, shift={name: shift})
            kept[shift / 2] = float(recurrence.trajectory(**inputs).transition.decay.abs().mean())
        best = max(kept, key=lambda direction: kept[direction])
        if best:
            found[name] = best
    return found


def _in_transition(spec: Spec) -> set[str]:
    """Names of the inputs that A reads."""
    exprs = [x for r in spec.rows for x in (r.normal.decay, r.normal.angle)]
    exprs += [e for r in spec.rows for c in r.normal.corrections for e in (c.scale, c.left, c.right)]
    return {i.attrs[0] for i in inputs_of(*exprs)}
