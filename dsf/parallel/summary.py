"""A shard's summary for the other ranks: its map (F, M), and the gradient of its initial state.

They are computed by public calls of the recurrence and of the recurrences derived from it (dsf.parallel.derive). Where
Triton kernels run the call, dsf.parallel.fused uses the kernels' own passes instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsf.call.backwards import flipped
from dsf.call.bind import Bound, Sizes, environment
from dsf.call.recurrence import Recurrence
from dsf.kernels.affine import Frame
from dsf.kernels.reversal import reversed_tokens
from dsf.language.expr import KEY, VALUE, Expr, inputs_of
from dsf.parallel.derive import adjoint, frame_of, homogeneous, reads_values
from dsf.torch.evaluate import Evaluator
from dsf.torch.lower import decay_factors

SEGMENT = 1 << 24  # the most numbers that a sum of decays holds at once
NOTHING = torch.empty(0)


@dataclass(frozen=True)
class Summary:
    """The summary of one shard by public calls. bound: its checked inputs; form, backend: as in the call."""

    recurrence: Recurrence
    bound: Bound
    form: str
    backend: str

    @property
    def sizes(self) -> Sizes:
        """The call's sizes."""
        return self.bound.sizes

    @functools.cached_property
    def frame(self) -> Frame:
        """Shapes of states and maps."""
        return frame_of(self.recurrence.spec, self.sizes.n, self.sizes.p)

    def part(self, begin: int, end: int) -> dict[str, Tensor]:
        """The inputs of tokens begin ... end; Params unchanged."""
        timed = {i.name for i in self.recurrence.spec.inputs if i.kind.time}
        return {n: x[:, begin:end] if n in timed else x for n, x in self.bound.tensors.items()}

    def like(self) -> Tensor:
        """A tensor of the states' dtype and device."""
        return torch.empty((), dtype=self.bound.compute, device=self.bound.device)

    def empty(self, rows: int) -> Tensor:
        """States before any token: [rows, H, N, columns]."""
        return self.frame.empty(self.like(), rows, self.sizes.heads)

    def written(self, begin: int, end: int, state: Tensor | None) -> Tensor:
        """The state after tokens begin ... end: F, or M S + F with an initial state S."""
        if begin == end:
            return self.empty(self.sizes.batch) if state is None else state
        call: dict[str, Any] = {**self.part(begin, end), "initial_state": state, "return_state": True}
        return self.recurrence(**call, form=self.form, backend=self.backend)[1]

    def move(self, begin: int, end: int) -> Tensor | None:
        """M as `Frame` stores it: [B, H, *move_shape], or None where it is not stored."""
        frame, sizes = self.frame, self.sizes
        if begin == end or frame.kind in ("identity", "channel"):
            return frame.neutral(self.like(), sizes.batch, sizes.heads)
        if frame.kind == "dense":
            return self._dense(begin, end)
        found = self._product(begin, end)
        return found.expand(sizes.batch, sizes.heads, *found.shape[2:])

    def adjoint(self, begin: int, end: int, state: Tensor | None, dy: Tensor, last: Tensor | None) -> Tensor:
        """The gradient of these tokens' initial state `state`, without gain columns [B, H, N, plain].

        dy: the gradient of their outputs. last: the gradient of their final state, None for zero.
        """
        plain = self.frame.plain
        if begin == end:
            return self.empty(self.sizes.batch)[..., :plain] if last is None else last
        part = self.part(begin, end)
        derived = adjoint(self.recurrence.spec)
        if derived is None:
            return self._differentiated(part, state, dy, last)[..., :plain]
        *_, driver = derived.spec.inputs
        part = flipped(self.recurrence.spec, part) | {driver.name: reversed_tokens(dy)}
        call: dict[str, Any] = {**part, "initial_state": last, "return_state": True}
        return derived(**call, form=self.form, backend=self._torch_or_auto)[1]

    @property
    def _torch_or_auto(self) -> str:
        """The backend of derived recurrences: auto for a Triton call, as kernels may lack the derived ones."""
        return "torch" if self.backend == "torch" else "auto"

    def _differentiated(
        self, part: Mapping[str, Tensor], state: Tensor | None, dy: Tensor, last: Tensor | None
    ) -> Tensor:
        """The gradient that `adjoint` returns, by autograd of one more run in the initial state alone."""
        start = (self.empty(self.sizes.batch) if state is None else state).detach()
        with torch.enable_grad():
            start.requires_grad_()
            call: dict[str, Any] = {**{n: x.detach() for n, x in part.items()}, "return_state": True}
            y, final = self.recurrence(**call, initial_state=start, form=self.form, backend=self.backend)
            outputs, grads = [y], [dy]
            if last is not None:
                outputs.append(self.frame.split(final)[0])
                grads.append(last)
            (found,) = torch.autograd.grad(outputs, start, grads)
        return found

    # -- M

    def _dense(self, begin: int, end: int) -> Tensor:
        """M [B, H, N, N]: the homogeneous recurrence's final state from the initial state I; channels are columns."""
        spec, sizes, part = self.recurrence.spec, self.sizes, self.part(begin, end)
        eye = torch.eye(sizes.n, dtype=self.bound.compute, device=self.bound.device)
        eye = eye.expand(sizes.batch, sizes.heads, -1, -1)
        wide = [i.name for i in spec.inputs if VALUE in i.kind.axes]
        if wide and not reads_values(spec):  # values are only written, never multiplied with a state
            part |= {n: part[n].new_zeros(1).expand(*part[n].shape[:-1], sizes.n) for n in wide}
            return self._free(part, eye)
        blocks = []
        for j in range(0, sizes.n, sizes.p):
            block = eye[..., j : j + sizes.p]
            block = torch.nn.functional.pad(block, (0, sizes.p - block.shape[-1]))
            blocks.append(self._free(part, block))
        return torch.cat(blocks, dim=-1)[..., : sizes.n]

    def _free(self, part: Mapping[str, Tensor], state: Tensor) -> Tensor:
        call: dict[str, Any] = {**part, "initial_state": state.contiguous(), "return_state": True}
        return homogeneous(self.recurrence.spec)(**call, form=self.form, backend=self._torch_or_auto)[1]

    def _product(self, begin: int, end: int) -> Tensor:
        """M of a diagonal A [B|1, H|1, *move_shape]: a product over tokens, or a sum where A is given by logarithms."""
        spec, frame, factors = self.recurrence.spec, self.frame, decay_factors(self.recurrence.spec)
        if factors is not None and not frame.gain:
            fixed, moving = factors
            return (self._values(fixed, begin, end)[:, 0] * self._over_tokens(moving, begin, end, torch.sum)).exp()
        if frame.rows > 1 and frame.columns > 1 and not frame.gain:  # no tensor of [B, T, H, N, P]
            ones = self.like().new_ones(self.sizes.batch, self.sizes.heads, frame.n, frame.columns)
            return self._free(self.part(begin, end), ones)
        if spec.log_decays is not None:
            logs = [self._over_tokens(x, begin, end, torch.sum) for x in spec.log_decays]
            total = torch.stack(torch.broadcast_tensors(*logs)).sum(0)
            return self._whole(total if frame.gain else total.exp())
        decays = [r.normal.decay for r in spec.rows]
        if not frame.gain:
            each = [self._over_tokens(x, begin, end, torch.prod) for x in decays]
            return self._whole(torch.stack(torch.broadcast_tensors(*each)).prod(0))
        logs = [self._over_tokens(x, begin, end, torch.sum, lambda d: d.abs().log()) for x in decays]
        signs = [self._over_tokens(x, begin, end, torch.prod, torch.sign) for x in decays]
        log, sign = torch.stack(torch.broadcast_tensors(*logs)), torch.stack(torch.broadcast_tensors(*signs))
        return torch.stack([self._whole(log.sum(0)), self._whole(sign.prod(0))], dim=2)

    def _whole(self, x: Tensor) -> Tensor:
        """x [B|1, H|1, 1 or n, 1 or p], expanded to the rows and columns of M."""
        return x.expand(*x.shape[:2], self.frame.rows, self.frame.columns)

    def _over_tokens(
        self, x: Expr, begin: int, end: int, over: Callable[..., Tensor], of: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """`over` (a sum or product) over tokens of `of`(x) [B|1, H|1, n, p], a segment of tokens at a time."""
        sizes = self.sizes
        each = sizes.batch * sizes.heads
        for axis, size in ((KEY, sizes.n), (VALUE, sizes.p)):
            each *= size if axis in x.axes else 1
        step = max(1, SEGMENT // each)
        parts = []
        for low in range(begin, end, step):
            high = min(low + step, end)
            values = self._values(x, low, high)
            values = values if of is None else of(values)
            parts.append(over(values.expand(-1, high - low, -1, -1, -1), 1))
        return parts[0] if len(parts) == 1 else over(torch.stack(parts), 0)

    def _values(self, x: Expr, begin: int, end: int) -> Tensor:
        """The values of an expression on tokens begin ... end [B|1, T|1, H|1, n, p]."""
        used = {i.attrs[0] for i in inputs_of(x)}
        values = environment(self.recurrence.spec, self.bound, self.part(begin, end), only=used)
        return Evaluator(values, self.sizes.keys, self.sizes.p)(x)


def hollow(summary: Summary) -> Summary:
    """The summary with the tensors' names, sizes and dtypes but no tensors, which autograd's graph saves itself."""
    bound = summary.bound
    return replace(summary, bound=replace(bound, tensors=dict.fromkeys(bound.tensors, NOTHING)))
