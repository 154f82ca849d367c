"""The operator `dsf::attention_step_`: one token of attention over a cache in fixed memory, in two launches."""

from __future__ import annotations

import torch
from torch import Tensor

from dsf.kernels.triton.attention.step import Kept, Parts, Token, attend_parts, join_parts
from dsf.kernels.triton.early import early
from dsf.kernels.triton.launch import launch
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.sizes import padded, power

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
