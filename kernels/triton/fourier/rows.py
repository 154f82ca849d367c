"""Between tokens and rows in time: kernels that run printed expressions on tiles of tokens and of all heads' columns.

Inputs and outputs are [B, T, H, P] (or [B, T, H, N]), what FFTs take and make are rows of one column each, [B, H, P,
points]. A column is an entry of a head, so that tiles are read along columns and written along time, or the other way,
without gaps in memory. Printed functions (dsf.triton.print_convolution) take the position of a tile as those of
dsf.kernels.triton.pointwise do, with a head of its own for every lane.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_of(
    batch, t0, first, T,
    H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, C: tl.constexpr, KEYED: tl.constexpr,
):  # fmt: skip
    """The position of a tile of K tokens from t0 and C columns from `first`. KEYED: W is N, else P."""
    t, column = tl.arange(0, K)[:, None, None], first + tl.arange(0, C)[None, None, :]
    # quotients hide from Triton that neighbouring columns are neighbours in memory
    if W == 1:
        head, entry = column.to(tl.int64), column * 0
    elif H == 1:
        head, entry = (column * 0).to(tl.int64), column
    else:
        head, entry = (column // W).to(tl.int64), column % W
    inside, none = column < H * W, column * 0
    if KEYED:
        return batch, head, t0, t, entry, none, t0 + t < T, inside, inside, 0, 0, T, H, 1, W
    else:
        return batch, head, t0, t, none, entry, t0 + t < T, inside, inside, 0, 0, T, H, W, 1


@triton.jit
def _place(across, parts, C: tl.constexpr):
    """(batch, first column, tile or segment of time) of a program; `across` programs of one tile follow each other.

    All stand on the grid's first axis: the others end at 65,535, which a million tokens have more tiles than.
    """
    program = tl.program_id(0)
    beside = program % across
    return (beside // parts).to(tl.int64), beside % parts * C, program // across


@triton.jit(do_not_specialize=["T", "points", "parts", "across"])
def into_rows(
    args, out, T, points, parts, across,
    body: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, C: tl.constexpr, KEYED: tl.constexpr,
):  # fmt: skip
    """out [B, H, W, points]: what `body` returns for every token, then zeros. Grid (tiles · B · parts)."""
    batch, first, tile = _place(across, parts, C)
    t0 = tile.to(tl.int64) * K
    at = place_of(batch, t0, first, T, H, W, K, C, KEYED)
    inside = at[6] & at[7]
    value = tl.where(inside, body(args, at), 0.0)
    column, t = first + tl.arange(0, C)[None, None, :], t0 + tl.arange(0, K)[:, None, None]
    row = (batch * (H * W) + column) * points
    tl.store(out + row + t, value, mask=(t < points) & (column < H * W))


@triton.jit(do_not_specialize=["T", "span", "segments", "parts", "across"])
def over_rows(
    args, T, span, segments, parts, across,
    body: tl.constexpr, zeros: tl.constexpr, finish: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, C: tl.constexpr, KEYED: tl.constexpr,
):  # fmt: skip
    """Runs `body` over all tokens, with sums over `span` tokens. Grid (segments · B · parts)."""
    batch, first, segment = _place(across, parts, C)
    begin = segment.to(tl.int64) * span
    sums = zeros(1, C)
    for t0 in range(begin, tl.minimum(begin + span, T), K):
        sums = body(args, sums, place_of(batch, t0, first, T, H, W, K, C, KEYED))
    finish(args, sums, place_of(batch, begin, first, T, H, W, K, C, KEYED), batch * segments + segment)
