"""Readouts by a solve on the kernels of dsf.kernels.triton.solve: which calls these take, and their operands."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsf.call.bind import Bound, Sizes, environment, named_axes
from dsf.language.derived import derived
from dsf.language.expr import KEY, Expr, const, inputs_of
from dsf.language.operator import quotient, summands, times
from dsf.language.solve import Decay, Solve, weighted
from dsf.language.spec import Spec
from dsf.torch.evaluate import Evaluator
from dsf.triton.chunk import FEWEST, GRID, check_packed, program_of

LARGEST = 128  # keys
SQUARES = 4  # of a token


@dataclass(frozen=True, eq=False)
class Matched:
    """The squares of a solve as (key, weight), and the values that G's writes have at these keys and weights."""

    squares: tuple[tuple[Expr, Expr], ...]
    values: tuple[Expr, ...]


@derived
def matched(spec: Spec) -> Matched | None:
    """The writes of G beside those of H; None where they have other keys or weights."""
    solve, values = spec.system.solve, list[Expr]()
    assert solve is not None
    left = summands(spec.system.B)
    for key, weight in solve.squares:
        written = times(key, weight)
        found = next(((sign, b, v) for sign, b in left if (v := quotient(b, written, sign)) is not None), None)
        if found is None:  # a square whose value is 0
            values.append(const(0))
            continue
        if KEY in found[2].axes:
            return None
        left.remove(found[:2])
        values.append(found[2])
    return None if left else Matched(solve.squares, tuple(values))


def decay_of(spec: Spec) -> tuple[Decay, Expr]:
    """The decay of G and H, or its logarithm."""
    normal = spec.rows[0].normal.decay
    if normal is const(1) or spec.log_decays is None:
        return "one" if normal is const(1) else "plain", normal
    (log,) = spec.log_decays
    return "log", log


def takes(spec: Spec, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels take a call on a GPU, with at most 128 keys and four squares a token."""
    solve, rows = spec.system.solve, sizes.batch * sizes.heads
    assert solve is not None
    fits = sizes.n <= LARGEST and len(solve.squares) <= SQUARES and rows <= GRID
    if not fits or rows * sizes.tokens == 0 or matched(spec) is None:
        return False
    from dsf.kernels.triton.solve.operator import has_room

    return has_room(sizes.n, _is_narrow(dtype, sizes), device)


def _is_narrow(dtype: torch.dtype, sizes: Sizes) -> bool:
    """Whether keys and values are multiplied as bfloat16 numbers."""
    return dtype == torch.bfloat16 and sizes.n >= FEWEST


class _Operands:
    """The tensors of a call's expressions; inputs that need no computing are taken as they are."""

    def __init__(self, spec: Spec, bound: Bound, wanted: list[Expr]) -> None:
        self.bound, self.kinds = bound, {i.name: i.kind for i in spec.inputs}
        names = {x.attrs[0] for root in wanted if not self._is_bare(root) for x in inputs_of(root)}
        self.values = Evaluator(environment(spec, bound, only=names), bound.sizes.keys, bound.sizes.p)

    def _is_bare(self, x: Expr) -> bool:
        return x.op == "input" and self.kinds[x.attrs[0]].steps is None and not self.kinds[x.attrs[0]].pair

    def of(self, x: Expr, width: int = 0, whole: bool = True) -> Tensor:
        """x [B, T, H, width], or [B, T, H] for width 0; not `whole`: of size 1 along B and T where x has neither."""
        sizes = self.bound.sizes
        if self._is_bare(x):
            name = x.attrs[0]
            found = named_axes(self.kinds[name], self.bound.tensors[name], sizes.heads)
        else:
            found = self.values(x)
        lead = (sizes.batch, sizes.tokens) if whole else found.shape[:2]
        if width == 0:
            return found[..., 0, 0].expand(*lead, sizes.heads)
        return found.squeeze(-1 if KEY in x.axes or found.shape[-1] == 1 else -2).expand(*lead, sizes.heads, width)


def run(
    spec: Spec, bound: Bound, bounds: list[int] | Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, T, H, P], and the last G and H [B or sequences, H, N, ·], of a call that `takes` allows."""
    from dsf.kernels.triton.solve.operator import How, Solved

    solve, found = spec.system.solve, matched(spec)
    assert isinstance(solve, Solve) and found is not None
    if isinstance(bounds, list):
        bounds = torch.tensor(bounds, device=bound.device)
    check_packed(spec, bounds)
    n, p = bound.sizes.n, bound.sizes.p
    kind, decay = decay_of(spec)
    keys, weights = zip(*found.squares, strict=True)
    skip = [] if spec.system.D is const(0) else [spec.system.D]
    operands = _Operands(spec, bound, [spec.readout, solve.ridge, decay, *keys, *weights, *found.values, *skip])
    scalars = [operands.of(x).to(bound.compute) for x in (*weights, *([] if kind == "one" else [decay]))]
    rows = [operands.of(x, n) for x in keys], [operands.of(x, p) for x in found.values]
    query = operands.of(spec.readout, n)
    query = query.to(bound.compute) if skip else query  # y has its dtype, and is rounded once
    g = h = None
    if state is not None:
        g, last = state[..., :p], state[..., p:]
        h = 0.5 * (last + last.mT)
    how = How(_is_narrow(bound.dtype, bound.sizes), kind == "log", spec.system.read == "before", solve.steps)
    _, program = program_of(weighted(spec, kind), True)
    y, last_g, last_h = Solved.apply(
        how, program, bounds, query, operands.of(solve.ridge, n, whole=False),
        None if kind == "one" else scalars[-1], g, h, *rows[0], *rows[1], *scalars[: len(keys)],
    )  # fmt: skip
    for d in skip:
        y = y + operands.of(d, p)
    return y, last_g, last_h
