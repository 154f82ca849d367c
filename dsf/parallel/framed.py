"""Calls over ranks of declarations with turns and previous values.

The inputs of their plain system (dsf.language.frame) are computed over ranks first: a previous value crosses a cut like
a window of one token (`halo.convolve`), and the sum of angles is a recurrence, S_t = S_{t-1} + angle_t, in float64.
Then the plain system runs over ranks like any other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsf.call.bind import Bound
from dsf.call.digits import of_enough_digits
from dsf.call.frame import Framed, Places, last_of, shifted
from dsf.call.packing import Packing
from dsf.call.plan import CONVOLUTION, LONG, Plan, make_plan
from dsf.call.recurrence import Recurrence, recurrence
from dsf.language.annotations import Value
from dsf.language.expr import Expr
from dsf.language.late import late
from dsf.language.operator import I
from dsf.language.spec import Spec
from dsf.language.system import System
from dsf.parallel.halo import convolve
from dsf.parallel.layout import boundaries
from dsf.parallel.world import World


def call(
    of: Recurrence, world: World, given: Bound, state: Tensor | None, bounds: list[int] | None,
    return_state: bool, form: str, backend: str,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """y of this rank's tokens, and the final states of the global sequences if return_state.

    given: this rank's inputs; for a `Simulated` world the whole inputs.
    """
    spec = of.spec
    frame = spec.turning if form == CONVOLUTION else late(spec) or spec.frame
    assert frame is not None
    sizes = given.sizes
    if state is not None:
        of._check_state(state, sizes.batch if bounds is None else len(bounds) - 1, given)
    bound = given if form == CONVOLUTION else of_enough_digits(spec, given, _plan(spec, given, form, backend), True)
    state = None if state is None else state.to(bound.compute)
    cuts = None if bounds is None else boundaries(tuple(bounds))
    framed = _Spread(world, cuts, return_state, spec, frame, bound, None, state)
    framed.make(return_state)
    tensors = _of_one_dtype(framed.inner(), {i.name for i in frame.spec.inputs if i.kind.time}, sizes.heads)
    how: dict[str, Any] = {**tensors, "cu_seqlens": cuts, "return_state": return_state}
    how |= {"initial_state": None if state is None else state[..., : framed.plain]}
    found = Recurrence(frame.spec)(**how, form=form, backend=backend, parallel=world)
    if not return_state:
        return found.to(given.dtype), None
    y, final = found
    return y.to(given.dtype), framed.finish(final).to(given.compute)


def _plan(spec: Spec, given: Bound, form: str, backend: str) -> Plan:
    """The plain system's plan, equal on every rank, however many tokens it has."""
    sizes, grad = replace(given.sizes, tokens=LONG), any(x.requires_grad for x in given.tensors.values())
    return make_plan(spec.inner, sizes, given.compute, form, backend, given.device, grad and torch.is_grad_enabled())


def _of_one_dtype(inner: Bound, timed: set[str], heads: int) -> dict[str, Tensor]:
    """The plain system's inputs for a call: all in the computing dtype if some are, and at least one with all heads."""
    tensors = dict(inner.tensors)
    if len({tensors[name].dtype for name in timed}) > 1:
        tensors = {name: x.to(inner.compute) for name, x in tensors.items()}
    if all(x.shape[2 if name in timed else 0] < heads for name, x in tensors.items()):
        name = next(iter(timed))
        tensors[name] = tensors[name].repeat_interleave(heads // tensors[name].shape[2], dim=2)
    return tensors


class _Spread(Framed):
    """One framed call whose tokens are spread over ranks. wanted: what the final state takes of them, else zeros."""

    def __init__(self, world: World, cu_seqlens: Packing | None, wanted: bool, *args: Any) -> None:
        super().__init__(*args)
        self.world, self.cu_seqlens, self.wanted = world, cu_seqlens, wanted

    def delayed(self, x: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
        """x of the token before, which may be another rank's, and x of every sequence's last token."""
        state = None if start is None else start.flatten(1).unsqueeze(-1)
        moved, last = convolve(_previous, 1, x.flatten(2), state, self.cu_seqlens, self.world, self.wanted)
        moved = moved.unflatten(2, x.shape[2:])
        return moved, _nothing(x) if last is None else last.squeeze(-1).unflatten(1, x.shape[2:])

    def last(self, x: Expr) -> Tensor:
        """An expression at every global sequence's last token, [B or sequences, heads, n, p]."""
        return self.delayed(self.evaluate(x), None)[1]

    def summed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The sums up to each token, and every sequence's total."""
        how: dict[str, Any] = {"cu_seqlens": self.cu_seqlens, "return_state": self.wanted, "parallel": self.world}
        found = running_sum(x.flatten(2).unsqueeze(2), **how)
        whole, last = found if self.wanted else (found, None)
        whole = whole.squeeze(2).unflatten(2, x.shape[2:])
        return whole, _nothing(x) if last is None else last.flatten(1).unflatten(1, x.shape[2:])


def _nothing(x: Tensor) -> Tensor:
    """A row of zeros like x [B, T, ...] without its tokens."""
    return x.new_zeros(x.shape[0], *x.shape[2:])


@recurrence
def running_sum(x: Value) -> System:
    """S_t = S_{t-1} + x_t: the sum of x up to each token."""
    return System(A=I, B=x, C=1)


def _previous(x: Tensor, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [B, T, C] of the token before, and of the last token [B or sequences, C, 1]: a convolution for `convolve`."""
    places = None if bounds is None else Places.of(bounds, x.shape[1], x.device)
    first = None if state is None else state.squeeze(-1)
    return shifted(x, first, places), last_of(x, places).unsqueeze(-1)
