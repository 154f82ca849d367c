"""The storage of the adjoint that handles one state entry after the other (entries.py): rows, and the walk that fills
them.

An entry has a row. It holds the cotangent, the Params' KEYED sums, KEYED numbers that are computed from Params, and S
states, those before runs of K tokens. Rows are either SHARED, in shared memory, with K tokens of all KEYS inputs that
have only a Key axis on a shelf behind them; or in scratch, with U more rows, so that loads ahead stay inside it. The
states before all other runs of a group of M tokens lie in scratch: one walk through the group computes them, and they
are loaded S at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton import lanes
from dsf.kernels.triton.scan.forward import token
from dsf.kernels.triton.scan.tiles import At, Shape, place_of
from dsf.kernels.triton.tile import in_order, tile_of, tokens_of


@dataclass(frozen=True, repr=False)
class Rows(Shape):
    """KEYED, KEYS, S and SHARED as above; U: entries that the walk takes at a time; LOOSE: the number of Params'
    sums without a Key axis; MASKED: T is no multiple of K."""

    KEYED: int = 0
    KEYS: int = 0
    LOOSE: int = 0
    S: int = 1
    SHARED: bool = False
    MASKED: bool = False

    @property
    def STATES(self) -> int:
        """Where the states of a row begin."""
        return 1 + 2 * self.KEYED

    @property
    def ROW(self) -> int:
        """Numbers a channel of a row."""
        return self.STATES + self.S

    @property
    def LEFT(self) -> int:
        """States of an entry in scratch."""
        return ((self.M // self.K + self.S - 1) // self.S - 1) * self.S


class Kept(NamedTuple):
    """Where rows begin, and the shelf; a number a channel."""

    rows: Any
    shelf: Any


@triton.jit
def all_at(at, t0, end, K: tl.constexpr):
    """What the holes know of K tokens; end: None where all exist."""
    t = tl.arange(0, K)[:, None, None]
    zero = tl.zeros((1, 1, 1), tl.int32)
    t_ok = t >= 0 if end is None else t0 + t < end
    return At(
        at.batch, at.head, t0, t.to(tl.int64), zero, at.p, t_ok, zero == 0, at.p_ok, at.place, at.edge, at.T, at.H,
        at.P, at.N,
    )  # fmt: skip


@triton.jit
def apart(tiles, L: tl.constexpr):
    """A tuple of tiles, as a tuple of every token's."""
    columns = ()
    for j in tl.static_range(len(tiles)):
        columns = columns + (tokens_of(tiles[j]),)  # type: ignore[assignment]  # noqa: RUF005
    found = ()
    for i in tl.static_range(L):
        found = found + (in_turn(columns, i, len(tiles)),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def together(tokens):
    """A tuple of every token's, as a tuple of tiles."""
    found = ()
    for j in tl.static_range(len(tokens[0])):
        found = found + (tile_of(in_turn(tokens, j, len(tokens))),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def plus(sums, terms):
    """Two tuples, added."""
    found = ()
    for i in tl.static_range(len(terms)):
        found = found + (sums[i] + terms[i],)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def existing(values, ok, MASKED: tl.constexpr):
    """A tuple of tiles, zeros where MASKED says that the token may lie past the end and ok that it does.

    What lies there is computed from zeros, so it may be infinite or NaN, and 0 · NaN is not 0: all that is added to
    other tokens' (Params' sums, and sums by tensor cores, which multiply all tokens of a run by 0 or 1) goes through
    here.
    """
    found = ()
    for i in tl.static_range(len(values)):
        found = found + (tl.where(ok, values[i], 0.0) if MASKED else values[i],)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def in_turn(terms, j: tl.constexpr, COUNT: tl.constexpr):
    """Number j of each of COUNT tuples (given, because Triton takes tuples of as many tensors for one type)."""
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (terms[i][j],)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def shelve(x, at, t0, kept, holes: tl.constexpr, shape: tl.constexpr):
    """Put the Key inputs of K tokens and all entries on the shelf, in order: input, entry, token."""
    K: tl.constexpr = shape.K
    BP: tl.constexpr = shape.BP
    lane = tl.arange(0, BP)[None, None, :]
    for i in tl.static_range(shape.N * K // BP):
        found = holes.runs_back(x.args, place_of(at, t0, i * (BP // K) + lane // K), K)
        for j in tl.static_range(len(found)):
            lanes.put(lanes.behind(kept.shelf, lane, True), j * (shape.N * K // BP) + i, found[j], BP, True)
    tl.debug_barrier()


@triton.jit
def shelf_of(kept, shape: tl.constexpr):
    """The shelf's address, which ptxas does not know to be the same in all lanes."""
    return lanes.apart(kept.rows) + shape.N * shape.ROW * shape.BP * 4


@triton.jit
def numbers_of(row, FIRST: tl.constexpr, shape: tl.constexpr):
    """KEYED numbers a channel of an entry's row."""
    found = ()
    for j in tl.static_range(shape.KEYED):
        found = found + (lanes.get(row, FIRST + j, shape.BP, shape.SHARED),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def entry_of(x, at, t0, row, shelf, place, n, holes: tl.constexpr, shape: tl.constexpr, BACK: tl.constexpr):
    """Of entry n: what Params make, the state, K tokens of Key inputs, BACK: the cotangent and the Params' sums."""
    run = ()
    if shape.SHARED:
        for i in tl.static_range(shape.KEYS):
            run = run + (lanes.from_shelf(shelf, (i * shape.N + n) * shape.K, shape.K),)  # type: ignore[assignment]  # noqa: RUF005
    else:
        run = holes.runs_back(x.args, place_of(at, t0, n), shape.K)
    found = (numbers_of(row, 1 + shape.KEYED, shape), lanes.get(row, place, shape.BP, shape.SHARED), run)
    if BACK:
        found = found + (lanes.get(row, 0, shape.BP, shape.SHARED), numbers_of(row, 1, shape))  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def entries_of(x, at, t0, row, shelf, place, n, holes: tl.constexpr, shape: tl.constexpr):
    """U of entry_of, from n on."""
    found = ()
    for u in tl.static_range(shape.U):
        m = tl.minimum(n + u, shape.N - 1)
        here = lanes.behind(row, u * shape.ROW * shape.BP, shape.SHARED)
        one = entry_of(x, at, t0, here, shelf, place, m, holes, shape, False)
        found = found + (one,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def begin(first, step, p_ok, rows, place, shape: tl.constexpr):
    """Bring every entry's state into its row; in memory they lie `step` apart."""
    for n in range(0, shape.N, shape.U):
        states = ()
        for u in tl.static_range(shape.U):
            states = states + (tl.load(in_order(first + (n + u) * step), mask=p_ok, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        for u in tl.static_range(shape.U):
            row = lanes.behind(rows, (n + u) * (shape.ROW * shape.BP), shape.SHARED)
            lanes.put(row, place, states[u], shape.BP, shape.SHARED)


@triton.jit
def advance(x, at, t0, kept, place, then, left, stored, holes: tl.constexpr, shape: tl.constexpr):
    """From the states before K tokens, `place` of every entry's row, to those after them, `then` of it.

    Where `stored` says so, they go to `left` [N, BP], too. U entries at a time, none of which waits.
    """
    U: tl.constexpr = shape.U
    tokens = apart(holes.plain_back(x.args, all_at(at, t0, None, shape.K)), shape.K)
    row = kept.rows
    shelf = kept.shelf
    if shape.SHARED:
        shelve(x, at, t0, kept, holes, shape)
        shelf = shelf_of(kept, shape)
    else:
        ahead = entries_of(x, at, t0, row, shelf, place, 0, holes, shape)
    for n in tl.range(0, shape.N, U):
        first = row
        row = lanes.behind(row, U * shape.ROW * shape.BP, shape.SHARED)
        if shape.SHARED:
            now = entries_of(x, at, t0, first, shelf, place, n, holes, shape)
        else:
            now = ahead
            ahead = entries_of(x, at, t0, row, shelf, place, n + U, holes, shape)
        for u in tl.static_range(U):
            keyed, state, run = now[u]
            held = holes.merge(keyed, x.held)
            if not shape.SHARED:
                run = holes.spread(run, shape.K)
            for i in tl.static_range(shape.K):
                here = place_of(at, t0, n + u, i)
                one = token(x.args, tokens, run, here, i, holes)
                a, b, c, e, d = holes.step(one, held, here)
                state = holes.moved(one, held, a, b, state, here)
            here_row = lanes.behind(first, u * shape.ROW * shape.BP, shape.SHARED)
            lanes.put(here_row, then, state, shape.BP, shape.SHARED)
            if left is not None:
                place_left = in_order(left + (n + u) * shape.BP)
                tl.store(place_left, tl.broadcast_to(state, (1, 1, shape.BP)), mask=stored)
    tl.debug_barrier()
