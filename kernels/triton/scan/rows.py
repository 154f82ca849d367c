"""The storage of the adjoint that handles one state entry after the other (entries.py): rows, and the walk that fills
them.

An entry has a row. It holds the cotangent, the Params' KEYED sums, KEYED numbers that are computed from Params, and S
states, those before runs of K tokens. Rows are either SHARED, in shared memory, with K tokens of all KEYS inputs that
have only a Key axis on a shelf behind them; or in scratch, with U more rows of zeros, which loads ahead of the last
turn read and nobody uses (bounds on the addresses would cost instructions in every turn). The states before all other
runs of a group of M tokens lie in scratch: one walk through the group computes them, and they are loaded S at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton import lanes
from dsf.kernels.triton.scan.forward import token
from dsf.kernels.triton.scan.tiles import At, Shape, entered, place_of
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
        """The position of the first state in a row."""
        return 1 + 2 * self.KEYED

    @property
    def ROW(self) -> int:
        """How many numbers a channel a row has."""
        return self.STATES + self.S

    @property
    def LEFT(self) -> int:
        """How many states of an entry are in scratch memory."""
        return ((self.M // self.K + self.S - 1) // self.S - 1) * self.S


class Kept(NamedTuple):
    """Addresses of the rows and of the shelf, by channel."""

    rows: Any
    shelf: Any


@triton.jit
def all_at(at, t0, end, K: tl.constexpr):
    """`at` of the holes for K tokens; end: None where all exist."""
    t = tl.arange(0, K)[:, None, None]
    zero = tl.zeros((1, 1, 1), tl.int32)
    t_ok = t >= 0 if end is None else t0 + t < end
    return At(
        at.batch, at.head, t0, t.to(tl.int64), zero, at.p, t_ok, zero == 0, at.p_ok, at.place, at.edge, at.T, at.H,
        at.P, at.N,
    )  # fmt: skip


@triton.jit
def apart(tiles, L: tl.constexpr):
    """A tuple of tiles of L tokens as a tuple of the tokens' tuples."""
    columns = ()
    for j in tl.static_range(len(tiles)):
        columns = columns + (tokens_of(tiles[j]),)  # type: ignore[assignment]  # noqa: RUF005
    found = ()
    for i in tl.static_range(L):
        found = found + (in_turn(columns, i, len(tiles)),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def together(tokens):
    """A tuple of the tokens' tuples as a tuple of tiles: the inverse of `apart`."""
    found = ()
    for j in tl.static_range(len(tokens[0])):
        found = found + (tile_of(in_turn(tokens, j, len(tokens))),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def plus(sums, terms):
    """The sum of two tuples, element by element."""
    found = ()
    for i in tl.static_range(len(terms)):
        found = found + (sums[i] + terms[i],)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def existing(values, ok, MASKED: tl.constexpr):
    """A tuple of tiles, with zeros for tokens past the end (MASKED and not ok).

    Values there are computed from zeros and may be infinite or NaN, and 0 · NaN is not 0. So everything that is added
    to other tokens' values (Params' sums, and sums by tensor cores, which multiply all tokens of a run by 0 or 1) must
    be masked.
    """
    found = ()
    for i in tl.static_range(len(values)):
        found = found + (tl.where(ok, values[i], 0.0) if MASKED else values[i],)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def in_turn(terms, j: tl.constexpr, COUNT: tl.constexpr):
    """Element j of each of COUNT tuples. COUNT is passed, since Triton confuses tuples of as many tensors."""
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (terms[i][j],)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def shelve(x, at, t0, kept, holes: tl.constexpr, shape: tl.constexpr):
    """Store the Key inputs of K tokens and all entries on the shelf, in the order input, entry, token."""
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
    """The shelf's address, in a form that ptxas cannot see to be uniform (lanes.apart)."""
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
    """Of entry n: held values, the state, K tokens of Key inputs and, if BACK, the cotangent and the Params' sums."""
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
    """entry_of for U entries from n on."""
    found = ()
    for u in tl.static_range(shape.U):
        m = tl.minimum(n + u, shape.N - 1)
        here = lanes.behind(row, u * shape.ROW * shape.BP, shape.SHARED)
        one = entry_of(x, at, t0, here, shelf, place, m, holes, shape, False)
        found = found + (one,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def begin(first, step, p_ok, rows, place, shape: tl.constexpr):
    """Copy every entry's state into its row; in memory entries are `step` apart."""
    for n in range(0, shape.N, shape.U):
        states = ()
        for u in tl.static_range(shape.U):
            states = states + (tl.load(in_order(first + (n + u) * step), mask=p_ok, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        for u in tl.static_range(shape.U):
            row = lanes.behind(rows, (n + u) * (shape.ROW * shape.BP), shape.SHARED)
            lanes.put(row, place, states[u], shape.BP, shape.SHARED)


@triton.jit
def advance(x, at, t0, kept, place, then, left, stored, holes: tl.constexpr, shape: tl.constexpr):
    """Walk K tokens for every entry, from the state at position `place` of its row to one at position `then`.

    If `stored`, the states are also stored to `left` [N, BP]. U entries at a time, without dependencies between them.
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
                state = holes.moved(one, held, a, b, entered(state, one, here, holes), here)
            here_row = lanes.behind(first, u * shape.ROW * shape.BP, shape.SHARED)
            lanes.put(here_row, then, state, shape.BP, shape.SHARED)
            if left is not None:
                place_left = in_order(left + (n + u) * shape.BP)
                tl.store(place_left, tl.broadcast_to(state, (1, 1, shape.BP)), mask=stored)
    tl.debug_barrier()
