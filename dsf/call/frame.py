"""Calls of declarations with `turn`, `prev` and Pair inputs: computes the plain system's inputs and its state.

Packed sequences stay in place; only the positions of their first and last tokens are used, so every form and kernel can
run the plain system. A state has the plain system's columns, with turns undone, and after them the columns of the
leaves (dsf.language.frame): every leaf's last values, newest first, filled into columns of N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsf.call.bind import Bound, named_axes
from dsf.call.cost import CONVOLUTION
from dsf.call.packing import sequence_of
from dsf.call.plan import Plan
from dsf.kernels.turns import SumsApart, turn_pairs, turned_back, whole_turns_left_out
from dsf.language.annotations import Input
from dsf.language.expr import KEY, VALUE, Expr, const, inputs_of
from dsf.language.frame import Early, Frame, Late, Leaf
from dsf.language.spec import Spec
from dsf.torch.columns import columns, leaf_columns, leaf_size
from dsf.torch.evaluate import Evaluator
from dsf.triton.choose import frame_in_chunks


@dataclass(frozen=True)
class Places:
    """The positions of S packed sequences in a row of T tokens.

    first: [T] bool, first tokens; which: [T], the sequence of a token; starts, ends: [S], first and last tokens;
    filled: [S] bool, sequences with tokens.
    """

    first: Tensor
    which: Tensor
    starts: Tensor
    ends: Tensor
    filled: Tensor

    @classmethod
    def of(cls, bounds: list[int] | Tensor, tokens: int, device: torch.device) -> Places:
        """The positions from boundaries [S + 1], a tensor on the device or numbers."""
        at = bounds.long() if isinstance(bounds, Tensor) else torch.tensor(bounds, device=device)
        numbers = torch.arange(tokens, device=device)
        which = sequence_of(at, numbers)
        starts = at[:-1]
        return cls(numbers == starts[which], which, starts, (at[1:] - 1).clamp(min=0), at[1:] > starts)


def _moved(x: Tensor, by: int) -> Tensor:
    """x [B, T, ...] moved by so many tokens, with zeros where none come from."""
    return torch.nn.functional.pad(x, (*(0, 0) * (x.dim() - 2), by, -by)) if x.shape[1] else x


def shifted(x: Tensor, first: Tensor | None, places: Places | None) -> Tensor:
    """x [B, T, ...] of the token before. first: [B or sequences, ...], the value before first tokens; None for 0."""
    if places is None and first is not None:
        return torch.cat([first.unsqueeze(1).to(x.dtype), x[:, :-1]], dim=1)
    moved = _moved(x, 1)
    if places is None:
        return moved
    mark = places.first.view(1, -1, *(1,) * (x.dim() - 2))
    if first is None:
        return torch.where(mark, 0.0, moved)
    return torch.where(mark, first.to(x.dtype).index_select(0, places.which).unsqueeze(0), moved)


def ahead(x: Tensor, places: Places | None) -> Tensor:
    """x [B, T, ...] of the token after, 0 at last tokens."""
    moved = _moved(x, -1)
    if places is None:
        return moved
    ends = places.first.roll(-1).view(1, -1, *(1,) * (x.dim() - 2))
    return torch.where(ends, 0.0, moved)


def first_of(x: Tensor, places: Places | None) -> Tensor:
    """x at the first token of every sequence: [B, T, ...] -> [B or sequences, ...]."""
    return x[:, 0] if places is None else x[0].index_select(0, places.starts.clamp(max=x.shape[1] - 1))


def last_of(x: Tensor, places: Places | None) -> Tensor:
    """x at the last token of every sequence: [B, T, ...] -> [B or sequences, ...]."""
    return x[:, -1] if places is None else x[0].index_select(0, places.ends)


class Framed:
    """One call: computes the values of a frame's inputs."""

    def __init__(
        self, spec: Spec, frame: Frame, bound: Bound, places: Places | None, state: Tensor | None,
        bounds: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.frame, self.bound, self.places, self.bounds = spec, frame, bound, places, bounds
        self.kinds = {i.name: i.kind for i in spec.inputs}
        self.values: dict[Expr, Tensor] = {}  # computed inputs, [B|1, T|1, heads, n, p]
        self.plain = columns(spec.inner, bound.sizes.p).total
        self.rest = None if state is None else state[..., self.plain :]
        self.remembered: list[Tensor] = []
        self.written: list[Tensor] = []
        self.torch, self.unread = frame.torch, frame.unread
        self.entered: list[Tensor] = []
        self.final: Tensor | None = None

    def make(self, wanted: bool = True) -> None:
        """Compute every input of the frame and, if wanted, the leaves' columns of the final state."""
        for source, node in self.frame.pairs:
            self.values[node] = self._input(source).repeat_interleave(2, dim=-2)
        place, last = 0, []
        for leaf in self.frame.leaves:
            if self.unread.issuperset(leaf.nodes):
                if wanted:
                    last.append(self._stored(leaf, self.last(leaf.source), place))
                place += self._width(leaf)
                continue
            x = self.evaluate(leaf.source)
            if self.rest is not None:
                x = self._all_heads(x)
            for node in leaf.nodes:
                start = None if self.rest is None else self._recalled(leaf, place)
                moved, ended = self.delayed(x, start)
                if wanted:
                    last.append(self._stored(leaf, ended, place))
                x = self.values[node] = moved
                place += self._width(leaf)
        self.remembered = last
        for own in self.frame.late:
            self.values[own.node], _ = self.delayed(self.evaluate(own.source), None)
            if wanted:
                self.written.append(self._late(own))
        for write in self.frame.early:
            self._write_ahead(write)
        for node, source, first in self.frame.whole:
            x = self._all_heads(self.evaluate(source))
            start = None if self.rest is None else self._first(first)
            self.values[node] = shifted(x, start, self.places)
        if self.frame.angles is not None:
            self._turn()
        timed = {i.name for i in self.frame.spec.inputs if i.kind.time}
        for source, node in self.torch:
            self.values[node] = self.evaluate(source, node.attrs[0] in timed)

    def _late(self, x: Late) -> Tensor:
        """What the last state takes of the last token, [B or sequences, H, N, P]."""
        parts = [spread_heads(self.last(part), self.bound.sizes.heads, 1) for part in (x.source, x.key, x.value)]
        found = math.prod(parts[1:], start=parts[0].to(self.bound.compute))
        return found if self.places is None else torch.where(self.places.filled.view(-1, 1, 1, 1), found, 0.0)

    def _write_ahead(self, x: Early) -> None:
        """Compute what a token writes for the one after, and what of it the first state takes."""
        source = self.evaluate(x.source)
        self.values[x.node] = ahead(source, self.places)
        if self.rest is None:
            return
        found = self._first(x.before) * self._all_heads(first_of(source, self.places).unsqueeze(1)).squeeze(1)
        kept = None if self.places is None else self.places.filled.view(-1, 1, 1, 1)
        self.entered.append(found if kept is None else torch.where(kept, found, 0.0))

    def start(self, state: Tensor | None) -> Tensor | None:
        """The plain system's first state, from the declaration's."""
        if state is None:
            return None
        return sum(self.entered, start=state[..., : self.plain])

    def delayed(self, x: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
        """x of the token before, and x of every sequence's last token. start: value before first tokens, None for 0."""
        return shifted(x, start, self.places), last_of(x, self.places)

    def summed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The running sum of x within each sequence, and its value at the end of every sequence (0 for empty ones)."""
        if self.places is None:
            whole = x if x.shape[1] == 1 else x.cumsum(1)
            return whole, last_of(whole, None)
        whole = SumsApart.apply(x, self.places.which, self.places.starts, self.places.ends)
        return whole, torch.where(self.places.filled.view(-1, 1, 1, 1), last_of(whole, self.places), 0.0)

    def _width(self, leaf: Leaf) -> int:
        sizes = self.bound.sizes
        return leaf_columns(leaf, sizes.n, sizes.keys, sizes.p)

    def _recalled(self, leaf: Leaf, place: int) -> Tensor:
        """A leaf's value [S, H, n, p] from the columns of the initial state."""
        assert self.rest is not None
        sizes, source = self.bound.sizes, leaf.source
        flat = self.rest[..., place : place + self._width(leaf)].transpose(-1, -2).flatten(-2)
        flat = flat[..., : leaf_size(leaf, sizes.keys, sizes.p)]
        return flat.unflatten(-1, (sizes.keys if KEY in source.axes else 1, sizes.p if VALUE in source.axes else 1))

    def _stored(self, leaf: Leaf, x: Tensor, place: int) -> Tensor:
        """The state's columns [S, H, N, width] for a value [S, heads, n, p]; empty sequences keep theirs."""
        sizes, width = self.bound.sizes, self._width(leaf)
        shape = (sizes.keys if KEY in leaf.source.axes else 1, sizes.p if VALUE in leaf.source.axes else 1)
        x = spread_heads(x, sizes.heads, 1).expand(-1, -1, *shape).flatten(-2)
        x = torch.nn.functional.pad(x, (0, width * sizes.n - x.shape[-1]))
        found = x.unflatten(-1, (width, sizes.n)).transpose(-1, -2).to(self.bound.compute)
        if self.places is None:
            return found
        before = torch.zeros_like(found) if self.rest is None else self.rest[..., place : place + width]
        return torch.where(self.places.filled.view(-1, 1, 1, 1), found, before)

    def _first(self, x: Expr) -> Tensor:
        """An expression of leaves and Params [S, H, n, p] at the last token before the call."""
        place, env = 0, dict[Expr, Tensor]()
        for leaf in self.frame.leaves:
            for node in leaf.nodes:
                env[node] = self._recalled(leaf, place).unsqueeze(1)
                place += self._width(leaf)
        for node in inputs_of(x):
            if node not in env:
                env[node] = self._all_heads(self._value(node))
        sizes = self.bound.sizes
        return Evaluator(env, sizes.keys, sizes.p)(x).squeeze(1)

    def _input(self, node: Expr) -> Tensor:
        """An input of the declaration, [B|1, T|1, heads, n, p], with its own number of heads."""
        name, step = node.attrs
        kind, x = self.kinds[name], self.bound.tensors[name]
        if step is not None:
            x = x.select(2, step)
        return named_axes(kind, x, x.shape[2] if kind.time else x.shape[0])

    def _value(self, node: Expr) -> Tensor:
        return self.values[node] if node in self.values else self._input(node)

    def _all_heads(self, x: Tensor) -> Tensor:
        return spread_heads(x, self.bound.sizes.heads, 2)

    def evaluate(self, x: Expr, timed: bool = True) -> Tensor:
        """An expression [B, T, heads, n, p] with as many heads as differ; a bare input in its own dtype. timed: False
        for one of Params alone, which has a value where a rank has no tokens, too: [B, 1, heads, n, p]."""
        sizes = self.bound.sizes
        if x.op == "input":
            found = self._value(x)
        else:
            values = {node: self._value(node).to(self.bound.compute) for node in inputs_of(x)}
            found = Evaluator(with_heads(values or {const(0): self.bound.zero()}), sizes.keys, sizes.p)(x)
        return found.expand(sizes.batch, sizes.tokens if timed else 1, -1, sizes.keys if KEY in x.axes else 1, -1)

    def last(self, x: Expr) -> Tensor:
        """An expression at every sequence's last token, [B or sequences, heads that differ, n, p]."""
        tokens, sizes = self.bound.sizes.tokens, self.bound.sizes
        values = {node: self._value(node) for node in inputs_of(x)}
        env = {
            node: (last_of(v, self.places) if v.shape[1] == tokens else v[:, 0]).unsqueeze(1).to(self.bound.compute)
            for node, v in values.items()
        }
        found = Evaluator(with_heads(env or {const(0): self.bound.zero()}), sizes.keys, sizes.p)(x).squeeze(1)
        rows = sizes.batch if self.places is None else len(self.places.ends)
        return found.expand(rows, -1, sizes.keys if KEY in x.axes else 1, -1)

    def _turn(self) -> None:
        """Compute the turned inputs, and the angle of the final state."""
        assert self.frame.angles is not None
        parts = [self._angle(x) for x in self.frame.angles]
        shared = math.lcm(*(x.shape[2] for x in parts))
        parts = [spread_heads(x, shared, 2) for x in parts]
        inside = [parts[0]]  # sums over the rows of one token
        for part in parts[1:]:
            inside.append(inside[-1] + part)
        whole, last = self.summed(inside[-1])
        earlier = whole - inside[-1]
        dtype = self.bound.compute
        found = {
            row: whole_turns_left_out(earlier if row < 0 else earlier + inside[row], dtype)
            for row in {t.row for t in self.frame.turned}
        }
        self.final = spread_heads(whole_turns_left_out(last, dtype), self.bound.sizes.heads, 1)
        ways = {row: (angle.cos(), angle.sin()) for row, angle in found.items()}
        for t in self.frame.turned:
            x = self.evaluate(t.source).to(dtype)
            heads = math.lcm(x.shape[2], found[t.row].shape[2])
            x = spread_heads(x.expand(-1, -1, -1, self.bound.sizes.n, -1), heads, 2)
            self.values[t.node] = turned_back(x, *(spread_heads(part, heads, 2) for part in ways[t.row]))

    def _angle(self, x: Expr) -> Tensor:
        """An angle of all tokens in float64, one a pair: [B, T, heads, 1 or N/2, 1]."""
        found = self.evaluate(x)
        return (found[..., ::2, :] if KEY in x.axes else found).double()

    def _made(self, entry: Input) -> Tensor:
        """A computed input, [B|1, T|1, (n), heads, n, p]."""
        whole, *each = (
            Expr("input", (), (entry.name, step), entry.kind.axes) for step in (None, *range(entry.kind.steps or 0))
        )
        if whole in self.values or not each:
            return self.values[whole]
        return torch.stack([self.values[x] for x in each], dim=2)

    def inner(self, rounded: bool = False) -> Bound:
        """The call of the plain system, with computed inputs in the computing dtype.

        rounded: computed vectors are in the inputs' dtype, as kernels take them.
        """
        tensors, counts = dict[str, Tensor](), dict[str, int]()
        sizes = self.bound.sizes
        for entry in self.frame.spec.inputs:
            if entry.name in self.bound.tensors:
                tensors[entry.name] = self.bound.tensors[entry.name]
                if entry.name in sizes.groups:
                    counts[entry.name] = sizes.groups[entry.name]
                continue
            x = self._made(entry)
            x = x if entry.kind.time else self._all_heads(x)[0, 0]
            at = 0 if not entry.kind.time else 2 if entry.kind.steps is None else 3
            if entry.kind.time and x.shape[at] != sizes.heads:
                counts[entry.name] = x.shape[at]
            x = x if VALUE in entry.kind.axes else x.squeeze(-1)
            x = x if KEY in entry.kind.axes else x.squeeze(at + 1)
            rounds = rounded and entry.kind.axes and entry.kind.time
            tensors[entry.name] = x.to(self.bound.dtype) if rounds else x
        return replace(self.bound, tensors=tensors, sizes=replace(sizes, groups=counts))

    def finish(self, final: Tensor) -> Tensor:
        """The declaration's final state from the plain system's: turns undone, leaves' columns added."""
        if self.final is not None:
            layout = columns(self.frame.spec, self.bound.sizes.p)
            own, gain = final.split([layout.p + layout.den, layout.gain], dim=-1)
            final = torch.cat([turn_pairs(own, self.final), gain], dim=-1)
        final = sum(self.written, start=final)
        return torch.cat([final, *self.remembered], dim=-1) if self.remembered else final


def with_heads(values: dict[Expr, Tensor]) -> dict[Expr, Tensor]:
    """Values [B|1, T|1, heads, n, p] with as many heads as all of them together differ in, or one."""
    heads = math.lcm(*(x.shape[2] for x in values.values()))
    return {node: x if x.shape[2] == 1 else spread_heads(x, heads, 2) for node, x in values.items()}


def spread_heads(x: Tensor, heads: int, axis: int) -> Tensor:
    """x with each head repeated along `axis`, so that there are `heads`."""
    count = x.shape[axis]
    if count == heads:
        return x
    if count == 1:
        return x.expand(*x.shape[:axis], heads, *x.shape[axis + 1 :])
    return x.repeat_interleave(heads // count, dim=axis)


def frame_for(spec: Spec, plan: Plan) -> Frame:
    """The frame that a call with this plan runs."""
    found = {"naive": spec.oracle, CONVOLUTION: spec.turning, "recurrent": spec.frame}.get(plan.form)
    found = spec.turning if plan.turning else found
    found = found or frame_in_chunks(spec, plan.backend) or spec.frame
    assert found is not None
    return found


def materialised(
    spec: Spec, frame: Frame, bound: Bound, state: Tensor | None, bounds: list[int] | Tensor | None = None
) -> Bound:
    """The call of a frame's plain system. bounds: [S + 1] of packed sequences, or None."""
    places = None if bounds is None else Places.of(bounds, bound.sizes.tokens, bound.device)
    framed = Framed(spec, frame, bound, places, state)
    framed.make()
    return framed.inner()
