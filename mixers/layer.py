"""`Layer`: a layer around any recurrence, derived from its declaration."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dsf import Recurrence
from dsf.call.bind import state_keys
from dsf.checking.values import Range, key_axis
from dsf.language.annotations import Input
from dsf.language.errors import InputError
from dsf.language.expr import KEY, VALUE, Expr, const, inputs_of
from dsf.mixers._beside import product_of
from dsf.mixers._conv import ShortConv
from dsf.mixers._module import Mixer, Side, Span
from dsf.mixers._norm import GatedRMSNorm, gated, normed
from dsf.mixers._own import Start, fill
from dsf.mixers.ranges import known, random_inputs, shape_of, squash, unsquash

if TYPE_CHECKING:
    from dsf.parallel import Cuts

__all__ = ["Layer", "random_inputs", "shape_of", "squash"]

LONGEST = 4.0  # sigmoid(4) = 0.982, a half-life of 38 tokens
Init = Mapping[str, "float | Tensor | Callable[..., Tensor]"]


class Layer(Mixer):
    """A layer around any recurrence. The kinds of the recurrence's inputs decide what the layer has.

    A linear map of x computes every input of tokens: H·N numbers for a Key, H·P for a Value, H for a Scalar, n times as
    many for Steps. Keys and Values that the recurrence uses directly (queries, keys, values) then go through the short
    convolution and SiLU. The other inputs of tokens (gates, rates, Scalars) have a bias instead. Params are parameters.
    Each input is mapped into the range that keeps states bounded (`dsf.checking.ranges.ranges_of`): a decay without
    its own function into [0, 1], an erased key to length one. After the recurrence come an RMSNorm of each head, a
    gate silu(g_proj(x)) and o_proj.

    n_heads: H; None: the fewest from 4 on that divide d_model and have at most 128 of its channels each.
    N, P: widths of a head on the Key and the Value axis; None: d_model / n_heads. 1 where no input has the axis.
    conv: taps of the convolution; 0: neither convolution nor SiLU. gate, norm: whether the layer has them.
    n_key_heads: heads of the convolved Key inputs, a divisor of n_heads; groups of heads share them. None: n_heads.
    bare: neither convolution nor gate.
    d_state, headdim, d_conv: N, P and conv by the names that other layers use.
    init: other initial values by input name, for Params and inputs with a bias: a number, a tensor [(n,) H, ·], or a
      function that is called with these sizes (`torch.zeros`). An input with a bias has this value where x is 0.

    Without init, biases of the decay's inputs are uniform between 0 and LONGEST, with the sign that lengthens the
    memory; other biases are 0. Params of the decay that have such a sign are normal with the same shift, Params
    elsewhere in A normal, all other Params 1. These are the values before they are mapped into the ranges.

    Raises InputError for sizes that do not divide, an odd N where the Key axis holds pairs, an N or P that differs from
    d_state or headdim, and an init of another input or outside the input's range.
    """

    beside = ("in_proj", "g_proj")

    def __init__(
        self,
        recurrence: Recurrence,
        d_model: int,
        n_heads: int | None = None,
        N: int | None = None,
        P: int | None = None,
        conv: int = 4,
        gate: bool = True,
        norm: bool = True,
        init: Init | None = None,
        n_key_heads: int | None = None,
        bare: bool = False,
        d_state: int | None = None,
        headdim: int | None = None,
        d_conv: int | None = None,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        spec = recurrence.spec
        self.recurrence, self.known = recurrence, known(recurrence)
        wide = any(VALUE in i.kind.axes for i in spec.inputs)
        N, P = _one("N", N, "d_state", d_state), _one("P", P, "headdim", headdim)
        widths = {"N": (d_model, N if spec.has_key else 1), "P": (d_model, P if wide else 1)}
        n_heads, n, p = self.heads(d_model, n_heads, ("n_key_heads", n_key_heads), **widths)
        self.dims = (n_heads, self._keys(n, N), p)
        self.key_heads = self._check_groups(n_key_heads)
        starts = self._starts(init or {})
        timed = [i for i in spec.inputs if i.kind.time]
        self.convolved = tuple(i for i in timed if i.name in self.known.plain)
        self.direct = tuple(i for i in timed if i.name not in self.known.plain)
        taps = 0 if bare else conv if d_conv is None else d_conv
        channels = [self.shape(i).numel() for i in self.convolved]
        self.in_proj = nn.Linear(d_model, sum(channels), bias=False) if channels else None
        self.conv1d = ShortConv(sum(channels), taps, bias=False) if taps and channels else None
        biases = tuple((self.shape(i), starts[i.name]) for i in self.direct)
        self.gates_proj = Biased(d_model, biases) if biases else None
        self.g_proj = nn.Linear(d_model, n_heads * p, bias=False) if gate and not bare else None
        self.o_norm = GatedRMSNorm(p) if norm and wide else None  # a norm of one number would only leave the sign
        self.o_proj = nn.Linear(n_heads * p, d_model, bias=False)
        self.params: dict[str, str] = {}
        for entry in spec.inputs:
            if not entry.kind.time:
                name = f"{entry.name}_param" if hasattr(self, entry.name) else entry.name
                self.params[entry.name] = name
                self.own(name, starts[entry.name], *self.shape(entry), kind="rate")
        self.place(device, dtype)

    def _keys(self, n: int, given: int | None) -> int:
        """N, or n made even where key entries form pairs. Raises InputError for a given N that is odd there."""
        if not self.recurrence.spec.has_key:
            return 1
        even = self.recurrence.spec.keys_of(n)
        if given is not None and even != n:
            raise InputError(f"Layer: {self.recurrence.name} takes the Key axis in pairs, so N must be even, got {n}")
        return even

    def _check_groups(self, n_key_heads: int | None) -> int:
        """The number of heads of the convolved Key inputs. Raises InputError."""
        heads, names = self.dims[0], self.recurrence.spec.inputs
        if n_key_heads is None:
            return heads
        if n_key_heads < 1 or heads % n_key_heads:
            raise InputError(f"Layer: n_key_heads ({n_key_heads}) must divide n_heads ({heads})")
        if all(i.kind.axes == {KEY} for i in names if i.kind.time):
            raise InputError(f"Layer: {self.recurrence.name} has Key inputs only, which cannot all be shared by heads")
        return n_key_heads

    def _starts(self, init: Init) -> dict[str, Start]:
        """The initial values of Params and of the biases of inputs without convolution, by name."""
        spec, found = self.recurrence.spec, {}
        if not isinstance(init, Mapping):
            raise InputError(f"Layer: init is {init!r}, expected initial values by names of inputs, {{'beta': 0.5}}")
        names = [i.name for i in spec.inputs if i.name not in self.known.plain]
        for name in init:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it sets {', '.join(names) or 'nothing here'}"
                convolved = " (read as it is, it has no bias)" if name in self.known.plain else ""
                raise InputError(f"Layer: init sets `{name}`{convolved}, which {spec.name} does not let it; {hint}")
        for entry in spec.inputs:
            name, shape = entry.name, self.shape(entry)
            if name in init:
                found[name] = self._given_start(entry, shape, init[name])
            elif entry.kind.time:
                found[name] = partial(_spread, plain=0.0, memory=self.known.memory.get(name, 0.0))
            else:
                memory = self.known.memory.get(name, 0.0)
                settled = name not in self.known.transition or (name in self.known.decay and not memory)
                found[name] = partial(_spread if settled else _drawn, plain=1.0, memory=memory)
        return found

    def _given_start(self, entry: Input, shape: torch.Size, given: Any) -> Start:
        """The user's initial value: checked, and mapped out of the input's range by `unsquash`. Raises InputError."""
        allowed = self.known.ranges[entry.name]
        start: Any = given if callable(given) else partial(_fixed, value=given)
        try:
            with torch.device("cpu"):
                value = start(*shape)
                if not isinstance(value, Tensor) or value.shape != shape:
                    raise InputError(f"it must give a tensor of shape {list(shape)}")
                unsquash(value, allowed)
        except (InputError, RuntimeError, TypeError) as error:
            raise InputError(f"Layer: init of `{entry.name}` in {self.recurrence.name}: {error}") from error
        return partial(_unsquashed, start=start, allowed=allowed)

    def shape(self, entry: Input) -> torch.Size:
        """The shape of one token of an input, or of a Param: [(n,) H, ·], with n_key_heads in place of H if shared."""
        heads, n, p = self.dims
        grouped = entry.name in self.known.plain and entry.kind.axes == {KEY}
        return torch.Size(shape_of(entry, (), self.key_heads if grouped else heads, n, p))

    def cut(self, to: Cuts) -> None:
        """Declare a rank's part of this layer where ranks share its heads (`dsf.parallel.HeadShard`)."""
        to.over_heads(n_key_heads=self.key_heads)
        to.set(key_heads=to.share(self.key_heads))
        convolved = [size for entry in self.convolved for size in self._sections(entry)]
        to.rows(self.in_proj, *convolved)
        to.conv(self.conv1d, *convolved)
        to.rows(self.gates_proj, *(size for entry in self.direct for size in self._sections(entry)))
        to.rows(self.g_proj)
        to.own(self, *self.params.values())
        to.summed(self.o_proj)

    def _sections(self, entry: Input) -> list[int]:
        """How many numbers an input of one token has, for each of its micro-steps."""
        shape = self.shape(entry)
        steps = shape[0] if entry.kind.steps else 1
        return [shape.numel() // steps] * steps

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        return (x, (x,)) if self.in_proj is None else self.made_first(x)

    def arguments(self, u: Tensor, side: Side, span: Span, **given: Tensor) -> dict[str, Tensor]:
        """given: inputs of tokens [B, T, H, ·] by name, in place of what the layer computes. Raises InputError for
        other names."""
        inputs = {name: getattr(self, own) for name, own in self.params.items()}
        if self.in_proj is not None:
            inputs |= self._parts(self.convolved, u)
        if self.gates_proj is not None:
            inputs |= self._parts(self.direct, self.gates_proj(side[0]))
        for entry in self.recurrence.spec.inputs:
            inputs[entry.name] = squash(inputs[entry.name], self.known.ranges[entry.name], key_axis(entry.kind))
        if unknown := given.keys() - {i.name for i in (*self.convolved, *self.direct)}:
            raise InputError(f"Layer: {self.recurrence.name} has no token input called {', '.join(sorted(unknown))}")
        return inputs | given

    def _parts(self, entries: tuple[Input, ...], together: Tensor) -> dict[str, Tensor]:
        shapes = [self.shape(i) for i in entries]
        parts = together.split([s.numel() for s in shapes], dim=-1)
        return {i.name: x.unflatten(-1, tuple(s)) for i, x, s in zip(entries, parts, shapes, strict=True)}

    def readout(self, y: Tensor, side: Side) -> Tensor:
        gate = None if self.g_proj is None else self.made(side, "g_proj").view_as(y)
        if self.o_norm is not None:
            return normed(self.o_norm, y, gate, self.o_proj)
        if gate is not None:
            y = gated(y, gate)
        return product_of(y.flatten(2), self.o_proj)

    def state_size(self, context: int = 0, conv: bool = True) -> int:
        """As `Mixer.state_size`; for attention and windows the numbers in the KVCache."""
        spec = self.recurrence.spec
        if not spec.is_attention:
            return super().state_size(context, conv)
        (_, n, p), (row,) = self.dims, spec.rows
        (term,), angle = row.terms, row.normal.angle
        kept = context if spec.system.window is None else min(context, spec.system.window)
        keys, bias = self._heads_of(term.key, angle), [row.normal.decay, *([] if term.gain is None else [term.gain])]
        width = n if spec.is_softmax else state_keys(spec, n)
        cache = keys * width + self._heads_of(term.value) * p + (0 if bias == [const(1)] else self._heads_of(*bias))
        turned = 0 if angle is const(0) else self._heads_of(angle) * (n // 2 if KEY in angle.axes else 1)
        return kept * cache + turned + (self.conv1d.state_size if conv and self.conv1d is not None else 0)

    def _heads_of(self, *exprs: Expr) -> int:
        names = {i.attrs[0] for i in inputs_of(*exprs)}
        return math.lcm(*(self.shape(i)[0] for i in self.recurrence.spec.inputs if i.name in names))

    def extra_repr(self) -> str:
        """The recurrence's name and sizes."""
        heads, n, p = self.dims
        return f"{self.recurrence.name}, n_heads={heads}, N={n}, P={p}"


class Biased(nn.Linear):
    """A linear map with a bias in parts, each of which begins as start(*shape)."""

    def __init__(self, in_features: int, parts: tuple[tuple[torch.Size, Start], ...]):
        self.starts: dict[str, Start] = {"bias": partial(_together, parts=parts)}
        super().__init__(in_features, sum(shape.numel() for shape, _ in parts))

    def reset_parameters(self) -> None:
        """Initialise the weight as torch does, and the bias by its parts' starts."""
        super().reset_parameters()
        fill(self.bias, self.starts["bias"])


def _together(*shape: int, parts: tuple[tuple[torch.Size, Start], ...]) -> Tensor:
    return torch.cat([start(*one).flatten() for one, start in parts])


def _spread(*shape: int, plain: float, memory: float) -> Tensor:
    """plain + memory · LONGEST · U(0, 1). memory: the sign that lengthens the memory, or 0."""
    return plain + memory * LONGEST * torch.rand(shape)


def _drawn(*shape: int, plain: float, memory: float) -> Tensor:
    """Normal numbers with the shift of `_spread`; plain is not used."""
    return torch.randn(shape) + memory * LONGEST * torch.rand(shape)


def _fixed(*shape: int, value: float | Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32).expand(shape)


def _unsquashed(*shape: int, start: Start, allowed: Range) -> Tensor:
    return unsquash(start(*shape), allowed)


def _one(name: str, value: int | None, other: str, same: int | None) -> int | None:
    if value is not None and same is not None and value != same:
        raise InputError(f"Layer: {name} is {value} but {other}, another name for it, {same}; give one")
    return value if value is not None else same
