"""Conjugate gradients for all tokens of a chunk, in one program: (H_t + Λ_t) x_t = q_t, H_t = a_t H_{t-1} + Σ w k kᵀ.

H_t never exists but at a chunk's start, as S_0. With X the rows x_t of a chunk, K its keys, and M the decays between
its rows times the keys' weights, all products H_t x_t of the chunk are

    prefix ⊙ X S_0 + ((X Kᵀ) ⊙ M) K,

so that a step of conjugate gradients is three matrix products, whose operands other than X stay in shared memory. Each
token has lengths and residuals of its own, stops when it has converged, and a program stops with its last token
(`solve_rows`). `read_rows` reads y_t = G_tᵀ x_t, of G_t = a_t G_{t-1} + Σ w k vᵀ, in the same way; for gradients
`right_sides` makes G_t dy_t. `walk_states` makes G or H at all chunks' starts, and the last one.

bfloat16 keys and values are taken as they are, states and scores in two bfloat16 terms (`tiles.split`), with which a
product errs by about 2^-16, and so are solutions as they read. The first guess and all directions are rounded to
bfloat16, which costs no accuracy, since what is added to x and taken from the residual is the rounded direction, but
some more steps where H + Λ is ill-conditioned (a quarter more at a condition number of 300). Keys and values of other
calls are multiplied as float32 (PRECISION), and nothing is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsf.kernels.triton.chunk.tiles import (
    LOG_TINY,
    TINY,
    load_rows,
    load_terms,
    product,
    running_sums,
    split,
    store_rows,
    turn,
)
from dsf.kernels.triton.packed import chunks_of, place_of_chunk
from dsf.kernels.triton.structs import Config, of_head


class Factors(NamedTuple):
    """What G and H multiply rows by: weights [B, rows, H] and decays [B, T, H] (or their logarithms), each with its
    address and the strides of batch, row or token, and head; the decays' address is None where nothing decays."""

    weight: Any
    weight_batch: Any
    weight_row: Any
    weight_head: Any
    decay: Any
    decay_batch: Any
    decay_token: Any
    decay_head: Any


class Places(NamedTuple):
    """T; H, a constant; B · H; tables of packed sequences' chunks and of the sequences, or None."""

    tokens: Any
    heads: Any
    lanes: Any
    chunks: Any
    sequences: Any


class Here(NamedTuple):
    """A program's chunk: the index of its states, its batch and head, the first of its tokens, all of them and their
    end, and its rows of keys and theirs."""

    index: Any
    batch: Any
    head: Any
    begin: Any
    tokens: Any
    end: Any
    rows: Any
    stop: Any


@dataclass(frozen=True, repr=False)
class Solve(Config):
    """N keys, padded to BN; P channels, BP of which are read at a time; L tokens a chunk, with EACH rows of keys and
    values a token; BW columns of a state that a program walks.

    LOG: decays are logarithms. BEFORE: x_t is of H_{t-1}. KIND and PRECISION: of matrix products; TERMS: of states and
    of scores, KEY_TERMS and VALUE_TERMS: of keys and values. ENOUGH: the squared ratio of residual and right side at
    which a token has converged.
    """

    N: int
    BN: int
    P: int
    BP: int
    BW: int
    L: int
    EACH: int
    LOG: bool
    BEFORE: bool
    KIND: Any
    PRECISION: str
    TERMS: int
    KEY_TERMS: int
    VALUE_TERMS: int
    ENOUGH: float


@triton.jit
def _running(of, rows, end, batch, head, EACH: tl.constexpr, LATE: tl.constexpr, C: tl.constexpr):
    """Running sums of log2 decays over rows of which EACH are a token's, their rounding errors (`running_sums`), and
    the signs of the products.

    LATE: a row's own decay is not in its sum, and the first row's not in any.
    """
    first = tl.min(rows, axis=0)
    at = rows - LATE
    inside = (rows < end) & (at >= first)
    log, odd = rows * 0.0, rows * 0
    if of.decay is not None:
        place = of.decay + batch * of.decay_batch + head * of.decay_head + (at // EACH).to(tl.int64) * of.decay_token
        found = tl.load(place, mask=inside & (at % EACH == 0), other=0.0 if C.LOG else 1.0).to(tl.float32)
        if C.LOG:
            log = tl.maximum(found, LOG_TINY)
        else:
            log = tl.log(tl.maximum(tl.abs(found), TINY))
            odd = tl.cumsum((found < 0).to(tl.int32), axis=0) & 1
    running, rest = running_sums(log, 0, True)
    return running, rest, 1.0 - 2.0 * odd.to(tl.float32)


@triton.jit
def _weights(of, rows, end, batch, head):
    """The weights of rows of keys, 0 behind the end."""
    at = of.weight + batch * of.weight_batch + head * of.weight_head + rows.to(tl.int64) * of.weight_row
    return tl.load(at, mask=rows < end, other=0.0).to(tl.float32)


@triton.jit
def _rows(x, rows, end, columns, W: tl.constexpr, BLOCK: tl.constexpr, TERMS: tl.constexpr, C: tl.constexpr):
    """A block of columns of rows with W of them, in TERMS terms."""
    return split(load_rows(x.at, x.token, rows, end, columns, W, BLOCK, tl.float32), TERMS, C.KIND)


@triton.jit
def walk_states(keys, values, of, start, states, final, places, chunks, W: tl.constexpr, C: tl.constexpr):
    """states [chunks, B · H, N, TERMS W]: Σ w k vᵀ, decayed, before each chunk; final [B or sequences, H, N, W]: behind
    the last. W: columns of values; start: like final, or None for 0. A program has BW columns of a sequence and head.
    """
    piece, lane, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, head = lane // places.heads, lane % places.heads
    x, v = of_head(keys, batch, head), of_head(values, batch, head)
    first, stop = chunks_of(places.sequences, sequence, chunks)
    names, columns = tl.arange(0, C.BN), piece * C.BW + tl.arange(0, C.BW)
    inside = (names[:, None] < C.N) & (columns[None, :] < W)
    own = (sequence * places.lanes + lane) * C.N * W + names[:, None] * W + columns[None, :]
    if start is None:
        state = tl.zeros([C.BN, C.BW], tl.float32)
    else:
        state = tl.load(start + own, mask=inside, other=0.0)
    local = tl.arange(0, C.L * C.EACH)
    for chunk in range(first, stop):
        begin, end = place_of_chunk(places.chunks, chunk, places.tokens, C.L)
        kept = split(state, C.TERMS, C.KIND)
        to = states + (chunk * places.lanes + lane) * C.TERMS * C.N * W
        to += names[:, None] * (C.TERMS * W) + columns[None, :]
        tl.store(to, kept[0].to(states.dtype.element_ty), mask=inside)
        if C.TERMS == 2:
            tl.store(to + W, kept[1].to(states.dtype.element_ty), mask=inside)
        rows, end = begin * C.EACH + local, end * C.EACH
        running, rest, sign = _running(of, rows, end, batch, head, C.EACH, 0, C)
        is_last = local == C.L * C.EACH - 1
        last, turned = tl.sum(tl.where(is_last, running, 0.0), axis=0), tl.sum(tl.where(is_last, sign, 0.0), axis=0)
        left = (last - running) + (tl.sum(tl.where(is_last, rest, 0.0), axis=0) - rest)
        scale = _weights(of, rows, end, batch, head) * tl.exp2(left) * sign * turned
        written = load_rows(v.at, v.token, rows, end, columns, W, C.BW, tl.float32) * scale[:, None]
        known = _rows(x, rows, end, names, C.N, C.BN, C.KEY_TERMS, C)
        state *= tl.exp2(last) * turned
        state = product(turn(known), split(written, C.TERMS, C.KIND), C.KEY_TERMS, C.TERMS, C.PRECISION, state)
    tl.store(final + own, state, mask=inside)


@triton.jit
def _times(x, known, state, pairs, prefix, ridge, C: tl.constexpr):
    """(H_t + Λ_t) x_t for the rows of a chunk, which are in KIND."""
    scores = product((x, x), turn(known), 1, C.KEY_TERMS, C.PRECISION) * pairs
    out = product((x, x), state, 1, C.TERMS, C.PRECISION) * prefix
    out = product(split(scores, C.TERMS, C.KIND), known, C.TERMS, C.KEY_TERMS, C.PRECISION, out)
    return out + ridge * x.to(tl.float32)


@triton.jit
def _squared(x):
    """The squared norm of rows."""
    return tl.sum(x * x, axis=1)


@triton.jit
def _state_of(states, index, columns, W: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr):
    """A block of columns of a stored state [BN, BLOCK], in TERMS terms."""
    at, names = states + index * C.TERMS * C.N * W, tl.arange(0, C.BN)
    return load_terms(at, C.TERMS * W, names, C.N, columns, W, BLOCK, C.KIND, C.TERMS)


@triton.jit
def _here(places, C: tl.constexpr):
    """The chunk of a program."""
    chunk, lane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin, end = place_of_chunk(places.chunks, chunk, places.tokens, C.L)
    tokens, rows = begin + tl.arange(0, C.L), begin * C.EACH + tl.arange(0, C.L * C.EACH)
    index = chunk * places.lanes + lane
    return Here(index, lane // places.heads, lane % places.heads, begin, tokens, end, rows, end * C.EACH)


@triton.jit
def _decays(of, here, C: tl.constexpr):
    """M [L, rows] and prefix [L, 1] of a chunk."""
    weight = _weights(of, here.rows, here.stop, here.batch, here.head)
    source, source_rest, of_source = _running(of, here.rows, here.stop, here.batch, here.head, C.EACH, 0, C)
    running, rest, sign = _running(of, here.tokens, here.end, here.batch, here.head, 1, C.BEFORE, C)
    weight *= of_source
    written = here.rows // C.EACH + C.BEFORE  # the first token that reads a row
    gap = (running[:, None] - source[None, :]) + (rest[:, None] - source_rest[None, :])
    pairs = tl.where(here.tokens[:, None] >= written[None, :], tl.exp2(gap) * sign[:, None] * weight[None, :], 0.0)
    return pairs, (tl.exp2(running) * sign)[:, None]


@triton.jit
def _of_head(x, here):
    """Rows of a program's sequence and head."""
    return of_head(x, here.batch, here.head)


@triton.jit
def read_rows(x, keys, values, of, states, y, places, C: tl.constexpr):
    """y_t = G_tᵀ x_t of a chunk's tokens and BP channels. x: rows in float32; states: G before each chunk."""
    here = _here(places, C)
    if here.begin >= here.end:
        return
    names, columns = tl.arange(0, C.BN), tl.program_id(2) * C.BP + tl.arange(0, C.BP)
    pairs, prefix = _decays(of, here, C)
    q, v, to = _of_head(x, here), _of_head(values, here), _of_head(y, here)
    terms = _rows(q, here.tokens, here.end, names, C.N, C.BN, C.TERMS, C)
    known = _rows(_of_head(keys, here), here.rows, here.stop, names, C.N, C.BN, C.KEY_TERMS, C)
    scores = product(terms, turn(known), C.TERMS, C.KEY_TERMS, C.PRECISION) * pairs
    state = _state_of(states, here.index, columns, C.P, C.BP, C)
    out = product(terms, state, C.TERMS, C.TERMS, C.PRECISION) * prefix
    written = _rows(v, here.rows, here.stop, columns, C.P, C.BP, C.VALUE_TERMS, C)
    out = product(split(scores, C.TERMS, C.KIND), written, C.TERMS, C.VALUE_TERMS, C.PRECISION, out)
    store_rows(to.at, to.token, here.tokens, here.end, columns, C.P, C.BP, out)


@triton.jit
def right_sides(dy, keys, values, of, states, out, places, C: tl.constexpr):
    """out [B, T, H, N] = G_t dy_t of a chunk's tokens, in float32. states: G before each chunk."""
    here = _here(places, C)
    if here.begin >= here.end:
        return
    names = tl.arange(0, C.BN)
    pairs, prefix = _decays(of, here, C)
    given, v, to = _of_head(dy, here), _of_head(values, here), _of_head(out, here)
    found = tl.zeros([C.L, C.BN], tl.float32)
    scores = tl.zeros([C.L, C.L * C.EACH], tl.float32)
    for first in tl.range(0, C.P, C.BP, num_stages=1):
        columns = first + tl.arange(0, C.BP)
        slope = load_rows(given.at, given.token, here.tokens, here.end, columns, C.P, C.BP, C.KIND)
        state = _state_of(states, here.index, columns, C.P, C.BP, C)
        found = product((slope, slope), turn(state), 1, C.TERMS, C.PRECISION, found)
        written = _rows(v, here.rows, here.stop, columns, C.P, C.BP, C.VALUE_TERMS, C)
        scores = product((slope, slope), turn(written), 1, C.VALUE_TERMS, C.PRECISION, scores)
    known = _rows(_of_head(keys, here), here.rows, here.stop, names, C.N, C.BN, C.KEY_TERMS, C)
    scores = split(scores * pairs, C.TERMS, C.KIND)
    found = product(scores, known, C.TERMS, C.KEY_TERMS, C.PRECISION, found * prefix)
    store_rows(to.at, to.token, here.tokens, here.end, names, C.N, C.BN, found)


@triton.jit(do_not_specialize=["steps"])
def solve_rows(right, ridge, keys, of, states, out, places, steps, C: tl.constexpr):
    """out [B, T, H, N]: the solutions of a chunk's tokens, from right side / diagonal on, in at most so many steps.

    ridge: by token, or with None as its stride of tokens one for all of them. states: H before each chunk.
    """
    here = _here(places, C)
    if here.begin >= here.end:
        return
    names = tl.arange(0, C.BN)
    pairs, prefix = _decays(of, here, C)
    known = _rows(_of_head(keys, here), here.rows, here.stop, names, C.N, C.BN, C.KEY_TERMS, C)
    q, to = _of_head(right, here), _of_head(out, here)
    right = load_rows(q.at, q.token, here.tokens, here.end, names, C.N, C.BN, tl.float32)
    state = _state_of(states, here.index, names, C.N, C.BN, C)
    at = states + here.index * C.TERMS * C.N * C.N + names * (C.TERMS * C.N + 1)
    across = tl.load(at, mask=names < C.N, other=0.0).to(tl.float32)
    on = ridge.at + here.batch * ridge.batch + here.head * ridge.head
    if ridge.token is None:
        diagonal = tl.load(on + names, mask=names < C.N, other=1.0).to(tl.float32)[None, :]
    else:
        diagonal = load_rows(on, ridge.token, here.tokens, here.end, names, C.N, C.BN, tl.float32)
    squared = known[0].to(tl.float32)
    squares = tl.dot(pairs.to(C.KIND), (squared * squared).to(C.KIND), input_precision=C.PRECISION)
    whole = diagonal + across[None, :] * prefix + squares
    direction = (right / tl.where(whole == 0, 1.0, whole)).to(C.KIND)
    found = direction.to(tl.float32)
    left = right - _times(direction, known, state, pairs, prefix, diagonal, C)
    direction = left.to(C.KIND)
    size = _squared(left)
    enough = C.ENOUGH * _squared(right)
    going, step = tl.max((size > enough).to(tl.int32), axis=0), 0
    while (step < steps) & (going > 0):
        moved = _times(direction, known, state, pairs, prefix, diagonal, C)
        along = direction.to(tl.float32)
        curve = tl.sum(along * moved, axis=1)
        onward = (size > enough) & (curve > 0)
        length = tl.where(onward, tl.sum(along * left, axis=1) / tl.where(onward, curve, 1.0), 0.0)
        found += length[:, None] * along
        left -= length[:, None] * moved
        last = size
        size = _squared(left)
        direction = (left + (size / tl.where(last > 0, last, 1.0))[:, None] * along).to(C.KIND)
        going, step = tl.max((size > enough).to(tl.int32), axis=0), step + 1
    store_rows(to.at, to.token, here.tokens, here.end, names, C.N, C.BN, found)
