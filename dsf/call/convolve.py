"""The convolution form of one call: an impulse response computed from Params in float64, convolved with the tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dsf.call.bind import Bound, environment, named_axes
from dsf.kernels.affine import exact_product
from dsf.kernels.invariant import Diagonal, Invariant, Step, convolution, final_state, in_time
from dsf.kernels.powers import Dense
from dsf.kernels.turns import turn_pairs, turned_decay
from dsf.language.expr import KEY, Expr, const, symbol_of
from dsf.language.invariant import Still, invariant
from dsf.language.operator import Normal
from dsf.language.primitives import log_of
from dsf.language.spec import Spec
from dsf.torch.evaluate import Evaluator
from dsf.triton import convolve as kernels
from dsf.triton import given, long


def convolve(
    spec: Spec,
    bound: Bound,
    timed: Mapping[str, Tensor],
    state: Tensor | None,
    valid: Tensor | None,
    final: bool = True,
    torch_alone: bool = False,
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, P] in the computing dtype, or in the inputs', and the final state [B, H, N, P].

    timed: the inputs with a token axis. valid: [B, T] bool, False for padding after a sequence's tokens. final: whether
    the final state is wanted; if not, it is an empty tensor. torch_alone: whether no kernel of dsf's may run.
    """
    still = invariant(spec)
    assert isinstance(still, Still)
    sizes, first = bound.sizes, next(iter(timed.values()))
    written, params = dict[tuple[Expr, int | None], Tensor](), _Params(still, bound)
    for moving, place, write in params.writes():
        known = written.get((moving, place))
        written[moving, place] = write if known is None else known + write
    system = Invariant(
        params.step, params.vector(still.read), tuple(written.values()), still.of.system.read == "before", torch_alone
    )
    lengths = None if valid is None else valid.sum(1)
    on_gpu = not torch_alone and kernels.on_kernels(first) and bound.compute == torch.float32
    y = None
    if on_gpu and state is None and given.takes(spec, sizes):
        (h,) = system.impulses(first.shape[1], bound.compute)
        y = given.run(spec, still, bound, timed, h)  # padding changes no y before it
    if y is not None and not final:
        return y, y.new_empty(0, dtype=bound.compute)
    values = Evaluator(environment(still.of, bound, timed), sizes.keys, sizes.p)
    drives = [_drive(values, *key, (*first.shape[:2], sizes.heads)) for key in written]
    if y is None:
        y = convolution(system, drives, state, lengths, long.alone if on_gpu else in_time)
        y = given.read(still, values, y.expand(-1, -1, -1, sizes.p))
    if not final:
        return y, y.new_empty(0)
    last = final_state(system, drives, state, lengths)
    return y, last.expand(-1, -1, sizes.n, sizes.p).contiguous()


def _drive(values: Evaluator, moving: Expr, entry: int | None, sizes: tuple[int, ...]) -> Tensor:
    """What moves, or an entry of it: [B, T, H, 1 or P]."""
    x = values(moving).expand(*sizes, -1, -1)
    return x.squeeze(-2) if entry is None else x.select(-2, entry)


class _Params:
    """Evaluates expressions of Params in float64, and the transition of one token."""

    def __init__(self, still: Still, bound: Bound) -> None:
        self.still, self.sizes = still, bound.sizes
        env: dict[Expr, Tensor] = {}
        for entry in still.of.inputs:
            if not entry.kind.time:
                node = symbol_of(entry.name, None, entry.kind.axes)
                env[node] = named_axes(entry.kind, bound.tensors[entry.name].double(), bound.sizes.heads)
        blank = torch.zeros((1,) * 5, dtype=torch.float64, device=bound.device)
        self.values = Evaluator(env or {const(0): blank}, bound.sizes.keys, bound.sizes.p)
        self.dtype = bound.compute
        self.parts = [self._step(factors) for factors, _ in still.steps]
        self.step = functools.reduce(_then, self.parts)

    def __call__(self, x: Expr) -> Tensor:
        """The value of x: [H, 1 or N, 1 or P]."""
        flat = self.values(x).flatten(0, 2)  # the gradient of [0, 0] would be zeros that are filled, twice
        return flat.expand(self.sizes.heads, -1, -1)

    def vector(self, x: Expr) -> Tensor:
        """The value of x along the Key axis, [H, N, 1 or P], in the dtype of what A multiplies."""
        found = self(x).expand(-1, self.sizes.n, -1)
        return found if self.still.diagonal else found.to(self.dtype)

    def writes(self) -> Iterator[tuple[Expr, int | None, Tensor]]:
        """(what moves, which entry of it, how that is written [H, N, p]) of every injection; one at least."""
        for place, (_, written) in enumerate(self.still.steps):
            for drive in written:
                fixed = self.vector(drive.fixed)
                if KEY not in drive.moving.axes:
                    yield drive.moving, None, self.after(place, fixed)
                    continue
                each = torch.eye(self.sizes.n, dtype=fixed.dtype, device=fixed.device)[:, None, :, None] * fixed
                for entry, one in enumerate(each):  # one input for every entry of the state
                    yield drive.moving, entry, self.after(place, one)
        if not any(written for _, written in self.still.steps):  # B = 0
            yield const(0), None, self.vector(const(0))

    def after(self, place: int, write: Tensor) -> Tensor:
        """The write of micro-step `place`, multiplied by the transitions of the later micro-steps of its token."""
        for part in self.parts[place + 1 :]:
            write = part.power(write, 1)
        return write

    def _step(self, factors: tuple[Normal, ...]) -> Step:
        found: list[Step] = [self._diagonal(n) if self.still.diagonal else self._dense(n) for n in factors]
        return functools.reduce(_then, found)

    def _diagonal(self, n: Normal) -> Diagonal:
        log = log_of(n.decay)
        angle = None
        if n.angle is not const(0):
            angle = self(n.angle)
            angle = angle[:, ::2] if KEY in n.angle.axes else angle
        return Diagonal(self(n.decay if log is None else log), log is not None, angle)

    def _dense(self, n: Normal) -> Dense:
        keys, decay, cross, turn = self.sizes.n, self(n.decay), None, None
        if n.angle is not const(0):
            angle = self(n.angle)
            decay, cross = turned_decay(decay, angle, keys)
            turn = angle[:, ::2] if KEY in n.angle.axes else angle
        vectors = list[tuple[Tensor, Tensor]]()
        for c in n.corrections:
            right = self(c.right).expand(-1, keys, -1)  # (l rᵀ) R = l (Rᵀ r)ᵀ
            vectors.append((self(c.scale) * self(c.left), right if turn is None else turn_pairs(right, -turn)))
        p = max([decay.shape[-1], *(x.shape[-1] for pair in vectors for x in pair)])
        dense = _diagonal(decay.expand(-1, keys, p).mT, None if cross is None else cross.expand(-1, -1, p).mT)
        for left, right in vectors:
            left, right = (x.expand(-1, keys, p).mT.flatten(0, 1) for x in (left, right))
            dense = torch.baddbmm(dense.flatten(0, 1), left.unsqueeze(-1), right.unsqueeze(-2)).view_as(dense)
        return Dense(dense.to(self.dtype))


def _diagonal(decay: Tensor, cross: Tensor | None) -> Tensor:
    """The matrices [..., N, N] of decays [..., N], beside which each entry of a pair takes `cross` of the other one."""
    if cross is None:
        return torch.diag_embed(decay)
    own, other = (torch.diag_embed(x.unflatten(-1, (-1, 2))) for x in (decay, cross))
    blocks = own + other.flip(-1)  # [..., N / 2, 2, 2]
    found = torch.diag_embed(blocks.movedim(-3, -1))  # [..., 2, 2, N / 2, N / 2]
    return found.movedim((-4, -3), (-3, -1)).flatten(-2).flatten(-3, -2)


def _then(first: Step, later: Step) -> Step:
    """The transition `first`, then `later`."""
    if isinstance(first, Dense) and isinstance(later, Dense):
        return Dense(exact_product(later.matrix, first.matrix))
    assert isinstance(first, Diagonal) and isinstance(later, Diagonal)
    angles = [x.angle for x in (first, later) if x.angle is not None]
    angle = sum(angles[1:], angles[0]) if angles else None
    if first.log and later.log:
        return Diagonal(first.decay + later.decay, True, angle)
    return Diagonal(first.factor * later.factor, False, angle)
