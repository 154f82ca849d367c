"""Launches of the kernels for decays that differ along the Key axis: preparation of the rows, and their gradients.

prepare_keys computes from a chunk's rows the operands of the walks, the products between the rows and, for the delta
rule, their inverse. These are kept with the chunks' first states, which spares the backward pass this kernel and one
walk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsf.kernels.triton.chunk.key_gradient import Gradients, KeyGradient, key_gradient, key_pairs
from dsf.kernels.triton.chunk.keywise import GROUP, Keyed, KeyRows, prepare_far_keys, prepare_keys
from dsf.kernels.triton.launch import launch

if TYPE_CHECKING:
    from dsf.kernels.triton.chunk.matrix import _Call
    from dsf.kernels.triton.chunk.walks import Adjoints


def room(call: _Call, keep: bool) -> KeyRows:
    """Uninitialised memory; keep: also for what the backward pass uses."""
    chunks, chunk, n, terms = call.chunks, call.tiles.chunk, call.n, call.terms.keys
    delta, lead = call.delta, (call.batch, call.tokens, call.heads)

    def empty(*shape: int, dtype: torch.dtype | None = None, wanted: bool = True) -> Tensor:
        return call.empty(*(shape if wanted else (0,)), dtype=dtype)

    def rows(wanted: bool = True) -> Tensor:
        return empty(call.batch, call.heads, chunks * chunk, n, wanted=wanted)

    return KeyRows(
        empty((2 if call.fine else 1) * call.lanes, chunks * chunk, n, dtype=torch.float32),
        empty(call.lanes, chunks, dtype=torch.int32),
        empty(*lead, chunk),
        rows(), rows(), rows(delta),
        empty(*lead, chunk, wanted=terms == 2) if delta else rows(terms == 2 and keep),
        empty(*lead, call.p * terms, wanted=keep and delta),
        empty(call.batch, call.heads, chunks, n, call.p, dtype=call.terms.state_dtype, wanted=keep),
        empty(0, dtype=torch.float32),
    )  # fmt: skip


def prepared(call: _Call, g: Tensor, keep: bool) -> tuple[KeyRows, Tensor]:
    """Prepare the chunks of log decays g [B, T, Hg, N]; keep: also for the backward pass.

    Returns the KeyRows, and the matrices that the transform inverts [B, T, H, L] (delta rules) or the rounding errors
    of the written keys.
    """
    made, terms = room(call, keep), call.terms.keys
    left = torch.empty_like(made.scores, dtype=torch.float32) if call.delta else made.writes
    if terms == 2 and not call.delta:
        left = torch.empty_like(made.writes)
    keyed = Keyed(**call.common | {"P": 0}, BK=call.key_block, LEVELS=call.levels, TERMS=terms, KEEP=keep)
    for kernel, programs in ((prepare_keys, call.chunks), (prepare_far_keys, -(-call.chunks // GROUP.value))):
        launch(
            kernel, (programs, call.lanes),
            call.struct(call.q), call.struct(call.k), call.struct(call.right), call.struct(g), made, left,
            call.chunk_table, call.measures, C=keyed, num_warps=call.tiles.prepare_warps,
        )  # fmt: skip
    return made, left


def key_scalars(
    call: _Call, pieces: int, source: Tensor | None, erase: Tensor | None, read: Tensor | None
) -> list[Tensor]:
    """Uninitialised memory for partial sums of the gradients of s, b and c."""
    lead = (call.batch, call.tokens, call.heads)
    blocks = pieces * -(-call.n // call.key_block)
    parts = (pieces if call.delta else blocks, blocks, blocks)
    shapes = ((1, 0) if x is None else (n, *lead) for n, x in zip(parts, (source, erase, read), strict=True))
    return [call.empty(*shape, dtype=torch.float32) for shape in shapes]


def key_gradients(
    call: _Call, dy: Tensor, found: Adjoints, entries: Tensor, states: Tensor, rows: Sequence[Tensor | None],
    scalars: Sequence[Tensor], source_wanted: bool, read_wanted: bool,
) -> None:  # fmt: skip
    """Fill the gradients of rows (dq, dk, dv, dr) and scalars (dg, ds, db, dc) for the chunks in `found`."""
    t, (dq, dk, dv, dr), (dg, ds, db, dc) = call.tiles, rows, scalars
    assert dq is not None
    pieces, blocks = dq.shape[0], -(-call.n // call.key_block)
    lead = (pieces, call.batch, call.tokens, call.heads)
    width = t.chunk * (2 if call.delta else 1)
    pairs = call.empty(*lead, width, dtype=torch.float32 if call.terms.keys == 2 else None)
    alone = call.empty(*lead, dtype=torch.float32)
    assert call.made is not None
    given = call.made._replace(entries=entries, states=states), found.entries, found.states
    to = Gradients(pairs, alone, dq, dk, dv, dr, dg, ds, db, dc)
    rest = to, call.chunk_table, call.measures, found.base, found.chunks
    keyed = KeyGradient(
        **call.common, BK=call.key_block, LEVELS=call.levels, TERMS=call.terms.keys, X_TERMS=call.terms.kept,
        BP=t.gradient_piece, SOURCE_WANTED=source_wanted, READ_WANTED=read_wanted, APART=call.right is not None,
    )  # fmt: skip
    q, k, r, v = (call.struct(x) for x in (call.q, call.k, call.right, call.v))
    launch(
        key_pairs, (found.chunks, call.lanes, pieces), v, dy, call.scalars, *given, *rest,
        C=keyed, num_warps=t.pair_warps, num_stages=2,
    )  # fmt: skip
    for once in (True, False):
        programs = found.chunks if once else -(-found.chunks // GROUP.value)
        launch(
            key_gradient, (programs * blocks, call.lanes, pieces), q, k, r, v, dy, call.scalars, *given, *rest,
            C=replace(keyed, ONCE=once), num_warps=t.gradient_warps, num_stages=2,
        )  # fmt: skip
