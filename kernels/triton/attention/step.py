"""One token of attention over a cache in fixed memory: its key and value are written there, and all are read.

The operator dsf::attention_step_ has two launches. A row's used places are cut into parts, a program each; `join_parts`
joins what they found and counts the token.
a: [B, H, N], fresh k [B, HK, N] and v [B, HK, P]; the cache's k [B, HK, S, N], v [B, HK, S, P], bias [B, HB, S], which
is added to scores, and lengths [B] in int64. log [B, HB]: what is added to the biases of all earlier tokens, the
logarithm of a decay, or None; gain [B, HB]: the token's own bias, None for 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels.triton.early import begin, early
from dsf.kernels.triton.functions import LOG2E
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.sizes import padded, power
from dsf.kernels.triton.structs import Config


class Token(NamedTuple):
    """Queries, the token's key and value, with strides of sequences and heads; log, gain; the scale of scores."""

    a: Any
    a_batch: Any
    a_head: Any
    k: Any
    k_batch: Any
    k_head: Any
    v: Any
    v_batch: Any
    v_head: Any
    log: Any
    gain: Any
    scale: Any


class Kept(NamedTuple):
    """The cache's memory, contiguous."""

    k: Any
    v: Any
    bias: Any
    lengths: Any


@dataclass(frozen=True, repr=False)
class Parts(Config):
    """HK: heads of keys, HB: of biases, which are 1, HK or all; G: queries that share a key, R: as rows of a tile. C:
    places of a tile. N, P: widths, D, E: filled up to a power of two. COUNT: parts of a row. RING: a full memory begins
    again at its first place."""

    HK: int
    HB: int
    G: int
    R: int
    C: int
    N: int
    P: int
    D: int
    E: int
    COUNT: int
    RING: bool


@triton.jit(debug=True)  # for its assertion; the launch leaves out those of overflows
def attend_parts(x, kept, sums, tops, S, part: tl.constexpr, EARLY: tl.constexpr):
    """tops [B, H, COUNT]: the largest score of each part, as an exponent of 2; sums [B, H, COUNT, P + 1]: its weights
    times values, and its weights, over 2 to that power. Grid (COUNT, B · HK). Asserts that the token has a place."""
    begin(EARLY)
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // part.HK, bg % part.HK
    length = tl.load(kept.lengths + b).to(tl.int32)
    place = length % S if part.RING else length
    tl.device_assert(place < S, "the memory of attention's keys and values has no room for this token")
    used = tl.minimum(length + 1, S)
    whole = tl.cdiv(tl.cdiv(used, part.C), part.COUNT) * part.C
    low = tl.program_id(0) * whole
    high = tl.minimum(low + whole, used)
    c, d, e = tl.arange(0, part.C), tl.arange(0, part.D), tl.arange(0, part.E)
    keys, values = kept.k + bg * S * part.N, kept.v + bg * S * part.P
    if (place >= low) & (place < high):
        own = tl.load(x.k + b * x.k_batch + g * x.k_head + d, mask=d < part.N, other=0.0)
        tl.store(keys + place * part.N + d, own.to(kept.k.dtype.element_ty), mask=d < part.N)
        own = tl.load(x.v + b * x.v_batch + g * x.v_head + e, mask=e < part.P, other=0.0)
        tl.store(values + place * part.P + e, own.to(kept.v.dtype.element_ty), mask=e < part.P)
    tl.debug_barrier()  # other threads read the token's key and value
    r = tl.arange(0, part.R)
    head = g * part.G + r
    if part.HB > part.HK:  # a row of biases for every query
        of_bias, known = b * part.HB + head[:, None], (r < part.G)[:, None]
        owned = known
    else:
        row = tl.arange(0, 1)[:, None]
        of_bias, known = b * part.HB + row + (g if part.HB > 1 else 0), row < 1
        owned = known & ((part.HB > 1) | (g < 1))  # one program writes what all heads share
    fresh = of_bias.to(tl.float32) * 0.0
    if x.gain is not None:
        fresh = tl.load(x.gain + of_bias, mask=known, other=0.0).to(tl.float32)
    if x.log is None:  # else all biases are written below
        here = kept.bias + of_bias * S + place
        tl.store(here, fresh.to(kept.bias.dtype.element_ty), mask=owned & (place >= low) & (place < high))
    at = x.a + b * x.a_batch + head[:, None] * x.a_head + d[None]
    a = tl.load(at, mask=(r < part.G)[:, None] & (d < part.N)[None], other=0.0).to(kept.k.dtype.element_ty)
    top = tl.full([part.R], -1e30, tl.float32)
    total = tl.zeros([part.R], tl.float32)
    found = tl.zeros([part.R, part.E], tl.float32)
    for first in range(low, high, part.C):
        j = first + c
        there = j < high
        k = tl.load(keys + j[:, None] * part.N + d[None], mask=there[:, None] & (d < part.N)[None], other=0.0)
        v = tl.load(values + j[:, None] * part.P + e[None], mask=there[:, None] & (e < part.P)[None], other=0.0)
        to = kept.bias + of_bias * S + j[None]
        bias = tl.load(to, mask=known & there[None], other=0.0).to(tl.float32)
        if x.log is not None:
            bias += tl.load(x.log + of_bias, mask=known, other=0.0).to(tl.float32)
        bias = tl.where((j == place)[None], fresh, bias)  # which another program may not have written yet
        if x.log is not None:
            tl.debug_barrier()  # other threads may have loaded the same biases
            tl.store(to, bias.to(kept.bias.dtype.element_ty), mask=owned & there[None])
        s = tl.dot(a, tl.trans(k), input_precision="ieee") * (x.scale * LOG2E) + bias * LOG2E
        s = tl.where(there[None], s, -float("inf"))
        now = tl.maximum(top, tl.max(s, axis=1))
        w, moved = tl.exp2(s - now[:, None]), tl.exp2(top - now)
        total = total * moved + tl.sum(w, axis=1)
        found = tl.dot(w.to(v.dtype), v, found * moved[:, None], input_precision="ieee")
        top = now
    row = (bg * part.G + r) * part.COUNT + tl.program_id(0)
    tl.store(tops + row, top, mask=r < part.G)
    tl.store(sums + row * (part.P + 1) + part.P, total, mask=r < part.G)
    tl.store(
        sums + row[:, None] * (part.P + 1) + e[None], found, mask=(r < part.G)[:, None] & (e < part.P)[None]
    )  # fmt: skip


@triton.jit
def join_parts(sums, tops, y, lengths, heads, part: tl.constexpr, COUNTS: tl.constexpr, EARLY: tl.constexpr):
    """y [B, H, P] of the parts, and one token more of every row. Grid (B · H). COUNTS: COUNT as a power of two."""
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    i, e = tl.arange(0, COUNTS), tl.arange(0, part.E)
    there = i < part.COUNT
    top = tl.load(tops + row * part.COUNT + i, mask=there, other=-1e30)
    share = tl.where(there, tl.exp2(top - tl.max(top, axis=0)), 0.0)
    at = sums + (row * part.COUNT + i) * (part.P + 1)
    total = tl.sum(tl.load(at + part.P, mask=there, other=0.0) * share, axis=0)
    found = tl.load(at[:, None] + e[None], mask=there[:, None] & (e < part.P)[None], other=0.0)
    found = tl.sum(found * share[:, None], axis=0) / total
    tl.store(y + row * part.P + e, found.to(y.dtype.element_ty), mask=e < part.P)
    count = lengths + row // heads + i
    tl.store(count, tl.load(count, mask=i < 1, other=0) + 1, mask=(i < 1) & (row % heads == 0))


PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
MOST = 32  # parts of a row
LEAST = 64  # places of a part


def _count(rows: int, places: int) -> int:
    """Parts of each of so many rows, up to where every multiprocessor has some."""
    count = 1
    while count < MOST and rows * count < PROGRAMS and places > LEAST * count:
        count *= 2
    return count


def _step(
    a: Tensor, k: Tensor, v: Tensor, log: Tensor | None, gain: Tensor | None, cache_k: Tensor, cache_v: Tensor,
    bias: Tensor, lengths: Tensor, scale: float, ring: bool,
) -> Tensor:  # fmt: skip
    """y [B, H, 1, P]. a: [B, H, 1, N], k: [B, HK, 1, N], v: [B, HK, 1, P], any strides of sequences and heads; log,
    gain: [B, HB, 1], log only with a head of biases for every key or query."""
    (batch, heads), (groups, places, n), p = a.shape[:2], cache_k.shape[1:], v.shape[3]
    a, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (a, k, v))
    count, shared, columns = _count(batch * groups, places), heads // groups, 32 if max(n, p) > 128 else 64
    if cache_k.dtype == torch.float32:
        columns = 16
    widths = n, p, padded(n), padded(p)
    part = Parts(groups, bias.shape[1], shared, padded(shared), columns, *widths, count, ring)
    sums = a.new_empty(batch, heads, count, p + 1, dtype=torch.float32)
    tops = a.new_empty(batch, heads, count, dtype=torch.float32)
    y = v.new_empty(batch, heads, 1, p)
    (a_batch, a_head), (k_batch, k_head), (v_batch, v_head) = (x.stride()[:2] for x in (a, k, v))
    log, gain = (None if x is None else x.contiguous() for x in (log, gain))
    token = Token(a, a_batch, a_head, k, k_batch, k_head, v, v_batch, v_head, log, gain, scale)
    launch(
        attend_parts, (count, batch * groups), token, Kept(cache_k, cache_v, bias, lengths), sums, tops, places,
        part=part, num_warps=4, num_stages=2, sanitize_overflow=False, **early(a.device),
    )  # fmt: skip
    launch(
        join_parts, (batch * heads,), sums, tops, y, lengths, heads, part=part, COUNTS=power(count), num_warps=1,
        **early(a.device),
    )  # fmt: skip
    return y


attention_step = operator(
    "attention_step_(Tensor a, Tensor k, Tensor v, Tensor? log, Tensor? gain, Tensor(a!) cache_k, Tensor(b!) cache_v, "
    "Tensor(c!) bias, Tensor(d!) lengths, float scale, bool ring) -> Tensor",
    _step,
)
