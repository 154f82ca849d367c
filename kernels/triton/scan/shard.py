"""The effect of a shard of a sequence on states, from the fused scan's summaries: dsf::scan_shard.

The summaries of segments are computed once; the scan or adjoint that follows reuses them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.scan.launches import HOLES, _arguments, _timed, between, combined, launch, sizes_of, summed
from dsf.kernels.triton.scan.tiles import Cotangents

__all__ = ["between", "scan_shard"]


def _run(
    operands: Sequence[Tensor], dy: Tensor | None, state: Tensor | None, hole: str, moves: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(the state after T tokens [B, H, N, P], or with dy the gradient of the state before them; M; held).

    state: the one before the tokens (with dy the gradient of the one after them), or None for zeros. M: if `moves`, the
    product of the tokens' decays [B, H, N, P]. held: for the scan (or its adjoint) of the same operands.
    """
    spec = HOLES[hole]
    sizes = sizes_of(spec, operands)
    like = _timed(spec, operands)
    go = launch(spec, sizes, dy is not None, like.device)
    args = _arguments(spec, operands, sizes, spec.by_entry(sizes))
    given = Cotangents(None if dy is None else dy.contiguous(), None, None)
    sums, local, product = summed(go, spec, args, given, like, whole=True)
    first = None if state is None else state.contiguous()
    every = combined(sums, local, product, first, dy is not None, keep=True)
    end = every[:, :, 0 if dy is not None else -1].contiguous()
    move = product[:, :, :-1].prod(2) if moves else end.new_empty(0)
    return end, move, [local, product]


scan_shard = operator(
    "scan_shard(Tensor[] operands, Tensor? dy, Tensor? state, str hole, bool moves) -> (Tensor, Tensor, Tensor[])", _run
)
