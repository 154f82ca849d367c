"""Launches of the gradients of chunks whose states and adjoint states are known, where decays are numbers a head.

The gradients of queries and keys that heads share are computed for one segment of T at a time, and summed over the
heads at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dsf.kernels.triton.chunk.gradient import chunk_gradient
from dsf.kernels.triton.chunk.gradient_parts import Gradient, Gradients, Known, NormalGradients
from dsf.kernels.triton.chunk.normaliser import kind_of
from dsf.kernels.triton.chunk.shared_gradient import Shared, shared_gradient, sum_heads
from dsf.kernels.triton.chunk.table import SHARED_STRETCHES
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.sizes import bases, padded
from dsf.kernels.triton.structs import Numbers

if TYPE_CHECKING:
    from dsf.kernels.triton.chunk.matrix import _Call
    from dsf.kernels.triton.chunk.walks import Adjoints

SUMMED = 8  # rows for each program that sums heads


@dataclass
class Skip:
    """The backward pass of the terms that y has in addition to the readout: the printed functions that load and that
    differentiate them, and their pointers.

    sums is filled by the call: for an input without a time axis, gradients [·, H] that are still to be summed over the
    rows.
    """

    loads: Any
    adjoint: Any
    extra: tuple[Any, ...]
    sums: Tensor | None = None


class Stretch(NamedTuple):
    """Chunks from `first` on, whose gradients go to dq and dk [slices, B, rows, H, N] of tokens from `shift` on."""

    first: int
    chunks: int
    shift: int
    rows: int
    dq: Tensor
    dk: Tensor


def stretches_of(
    first: int, count: int, span: int, chunk: int, tokens: int, parts: tuple[int, ...], sums: tuple[Tensor, Tensor],
) -> Iterator[Stretch]:  # fmt: skip
    """`count` chunks in ranges of `span`. Gradients written to a Stretch are summed into sums [B, T, heads, N].

    parts: slices, B, H, N of the gradients that the kernel writes; float32, so that only the sums are rounded.
    """
    slices, batch, heads, n = parts
    for begin in bases(first, first + count, span):
        here = min(span, first + count - begin)
        shift = begin * chunk
        rows = min(here * chunk, tokens - shift)
        apart = [x.new_empty(slices, batch, rows, heads, n, dtype=torch.float32) for x in sums]
        yield Stretch(begin, here, shift, rows, *apart)
        for x, total in zip(apart, sums, strict=True):
            out = total[:, shift : shift + rows]
            launch(
                sum_heads, (-(-rows // SUMMED), out.shape[2], batch),
                x, out, batch, rows, *out.stride()[:3],
                N=n, BN=padded(n), ROWS=SUMMED, EACH=heads // out.shape[2], SLICES=slices, num_warps=4,
            )  # fmt: skip


def in_turn(call: _Call) -> int:
    """How many consecutive heads one program may process in turn: those that share q and k; 1 but for decays alone."""
    apart = call.together > 1 or call.fresh is not None  # what that kernel does not know
    if call.delta or call.keywise or call.normal is not None or apart:
        return 1
    return math.gcd(call.heads // call.q.shape[2], call.heads // call.k.shape[2])


def row_gradients(
    call: _Call, dy: Tensor, found: Adjoints,
    rows: Sequence[Tensor], scalars: Sequence[Tensor], decay: Tensor | None, together: int, summed: bool,
    normal: NormalGradients, source_wanted: bool, read_wanted: bool, skip: Skip | None,
) -> None:  # fmt: skip
    """Fill the gradients of rows (dq, dk, dv) and scalars (dg, ds, db, dc) for the chunks in `found`.

    together: heads in one program. summed: dq and dk over the heads that share q and k.
    """
    t, (dq, dk, dv), g, (states, since, held) = call.tiles, rows, call.q if decay is None else decay, found.known
    pieces = -(-call.p // t.gradient_piece)
    outs: Iterable[Stretch] = [Stretch(found.base, found.chunks, 0, call.tokens, dq, dk)]
    if summed:
        outs = stretches_of(
            found.base, found.chunks, call.stretch(SHARED_STRETCHES), t.chunk, call.tokens,
            (pieces, call.batch, call.heads // together, call.n), (dq, dk),
        )  # fmt: skip
    dg, ds, db, dc = scalars
    q, k, v = (call.struct(x) for x in (call.q, call.k, call.v))
    given = q, k, v, dy, Numbers(g, *g.stride()[:3])
    known = Known(call.scalars, found.written, found.entries, states, found.states)
    loads, adjoint, extra = (None, None, None) if skip is None else (skip.loads, skip.adjoint, skip.extra)
    common = {**call.common, "BP": t.gradient_piece, "LOADS": loads, "SKIP": adjoint, "PAIR_TERMS": call.terms.scores}
    if together == 1 and not call.delta and common["PRECISION"] == "tf32x3":
        common["PRECISION"] = "ieee"  # with tf32x3 this kernel runs out of registers (docs/kernels/chunks.md)
    for out in outs:
        to = Gradients(
            out.dq, out.dk, dv, dg, ds if source_wanted else None, db, dc if read_wanted else None,
            None if skip is None else skip.sums,
        )  # fmt: skip
        where = (
            call.measures, call.batch, found.base, found.chunks, out.first, out.shift, out.rows, since, held,
        )  # fmt: skip
        if together > 1:
            launch(
                shared_gradient, (3 * out.chunks, call.lanes // together, pieces), *given, known, to, extra, *where,
                C=Shared(**common, HEADS=together, STAGES=t.gradient_stages),
                num_warps=t.gradient_warps, num_stages=2,
            )  # fmt: skip
        else:
            gradient = Gradient(
                **common, ROLES=t.gradient_roles, NORMAL=kind_of(call.normal), TERMS=call.terms.kept,
                STATE_TERMS=call.terms.states, ADJOINT_TERMS=call.terms.kept_adjoints,
            )  # fmt: skip
            launch(
                chunk_gradient, (out.chunks * t.gradient_roles, call.lanes, pieces),
                *given, known, to, normal, extra, call.chunk_table, *where,
                C=gradient, num_warps=t.gradient_warps, num_stages=2,
            )  # fmt: skip


def sum_pieces(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gradients [slices, ...] that were computed slice by slice, in `dtype`."""
    if x.shape[0] == 2:  # one pass over memory; sum and cast take two
        return torch.add(x[0], x[1], out=torch.empty_like(x[0], dtype=dtype))
    return (x[0] if x.shape[0] == 1 else x.sum(0)).to(dtype)
