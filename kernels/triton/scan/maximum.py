"""The running maximum of exponential gains, m_t = max(m_{t-1} + log a_t, gain_t), for every head and channel.

Time is cut into segments where sequences alone do not fill the GPU. What a segment does to m is max(m + total, top):
`maximum_summaries` finds both numbers of every segment, and a program of `maximum_tokens` applies those of all earlier
segments before it walks its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsf.kernels.triton.launch import constant, launch
from dsf.kernels.triton.operators import operator
from dsf.kernels.triton.pointwise.programs import EMPTY
from dsf.kernels.triton.scan.table import Tile, segments

TOKENS, LANES = 8, 64  # of a program of one warp, whose loads are under way at once
SPAN, BUSY = 128, 16  # fewest tokens of a segment; warps a processor below which time is cut
FLOOR = tl.constexpr(-1e3)  # of log decays: as on torch (dsf.torch.stabilise)
LOWEST = tl.constexpr(EMPTY)


class Steps(NamedTuple):
    """What moves the maximum, [B, T, H, C] each, by address and strides: (logarithms of) decays, gains, and the gains
    of what is added to y beside the state, or None."""

    log: Any
    gain: Any
    own: Any


class Levels(NamedTuple):
    """m [B, T + 1, H, C], which begins with m_0; `top` [B, T, H, C]: the larger of the m that y is read at and of own.

    first: m_0 [B, H, C], or None. parts: [B, segments - 1, H C, 2], or None for a single segment.
    """

    m: Any
    top: Any
    first: Any
    parts: Any


@triton.jit
def _at(x, batch, lane, C):
    """The address of lanes (head, channel) at the first token, and the stride of a token."""
    return x[0] + batch * x[1] + lane // C * x[3] + lane % C * x[4], x[2]


@triton.jit
def _step(total, m, log, gain, LOGS: tl.constexpr):
    """(sum of logarithms, maximum) after a token."""
    log = log.to(tl.float32)
    if not LOGS:
        log = tl.log(tl.abs(log))
    log = tl.maximum(log, FLOOR)
    return total + log, tl.maximum(m + log, gain.to(tl.float32))


@triton.jit
def _tokens(x, t0, end, lane_ok, other, K: tl.constexpr):
    """K tokens of (address, stride of a token), `other` behind the end."""
    found = ()
    for k in tl.static_range(K):
        value = tl.load(x[0] + (t0 + k) * x[1], mask=lane_ok & (t0 + k < end), other=other)
        found = found + (value,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit(do_not_specialize=["T", "span"])
def maximum_summaries(steps, levels, T, C, L, segments, span, K: tl.constexpr, LOGS: tl.constexpr, BP: tl.constexpr):
    """Of every segment but the last the sum of log decays, and the maximum at its end if it began at LOWEST."""
    number, blocks = tl.program_id(0), tl.cdiv(L, BP)
    batch = (number // (blocks * (segments - 1))).to(tl.int64)
    segment = number // blocks % (segments - 1)
    lane = number % blocks * BP + tl.arange(0, BP)
    ok = lane < L
    log, gain = _at(steps.log, batch, lane, C), _at(steps.gain, batch, lane, C)
    total, m = tl.zeros([BP], tl.float32), tl.full([BP], LOWEST, tl.float32)
    begin = segment.to(tl.int64) * span
    for t0 in range(begin, begin + span, K):
        logs = _tokens(log, t0, begin + span, ok, 0.0 if LOGS else 1.0, K)
        gains = _tokens(gain, t0, begin + span, ok, LOWEST, K)
        for k in tl.static_range(K):
            total, m = _step(total, m, logs[k], gains[k], LOGS)
    to = levels.parts + ((batch * (segments - 1) + segment) * L + lane) * 2
    tl.store(to, total, mask=ok)
    tl.store(to + 1, m, mask=ok)


@triton.jit(do_not_specialize=["T", "span"])
def maximum_tokens(
    steps, levels, T, C, L, segments, span, K: tl.constexpr, LOGS: tl.constexpr, BEFORE: tl.constexpr, BP: tl.constexpr
):
    """m of every token, and the level that its outputs are divided by."""
    number, blocks = tl.program_id(0), tl.cdiv(L, BP)
    batch = (number // (blocks * segments)).to(tl.int64)
    segment = number // blocks % segments
    lane = number % blocks * BP + tl.arange(0, BP)
    ok = lane < L
    log, gain = _at(steps.log, batch, lane, C), _at(steps.gain, batch, lane, C)
    m = tl.full([BP], LOWEST, tl.float32)
    if levels.first is not None:
        m = tl.load(levels.first + batch * L + lane, mask=ok, other=0.0)
    out = levels.m + batch * (T + 1) * L + lane
    tl.store(out, m, mask=ok & (segment == 0))
    if levels.parts is not None:
        for s in range(0, segment):
            part = levels.parts + ((batch * (segments - 1) + s) * L + lane) * 2
            m = tl.maximum(m + tl.load(part, mask=ok), tl.load(part + 1, mask=ok))
    begin = segment.to(tl.int64) * span
    end = tl.minimum(begin + span, T)
    for t0 in range(begin, end, K):
        logs = _tokens(log, t0, end, ok, 0.0 if LOGS else 1.0, K)
        gains = _tokens(gain, t0, end, ok, LOWEST, K)
        if levels.top is not None:
            own = _tokens(_at(steps.own, batch, lane, C), t0, end, ok, LOWEST, K)
        for k in tl.static_range(K):
            before = m
            _, m = _step(m, m, logs[k], gains[k], LOGS)
            there = ok & (t0 + k < end)
            tl.store(out + (t0 + k + 1) * L, m, mask=there)
            if levels.top is not None:
                top = tl.maximum(before if BEFORE else m, own[k].to(tl.float32))
                tl.store(levels.top + (batch * T + t0 + k) * L + lane, top, mask=there)


def _strided(x: Tensor | None) -> Any:
    return None if x is None else (x, *x.stride())


def _running(
    log: Tensor, gain: Tensor, own: Tensor | None, first: Tensor | None, logs: bool, before: bool
) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, channels = gain.shape
    lanes = heads * channels
    m = gain.new_empty(batch, tokens + 1, heads, channels, dtype=torch.float32)
    top = gain.new_empty(batch, 0 if own is None else tokens, heads, channels, dtype=torch.float32)
    blocks = -(-lanes // LANES)
    tile = Tile(TOKENS, 1, LANES, 2, 1, TOKENS, 1, SPAN, BUSY, 0)
    count, span = segments(tokens, batch * blocks, tile, m.device)
    parts = None if count == 1 else m.new_empty(batch, count - 1, lanes, 2)
    steps = Steps(_strided(log), _strided(gain), _strided(own))
    levels = Levels(m, None if own is None else top, first, parts)
    how = {"K": TOKENS, "LOGS": constant(logs), "BP": LANES, "num_warps": 1}
    sizes = tokens, channels, lanes, count, span
    if parts is not None:
        launch(maximum_summaries, (batch * blocks * (count - 1),), steps, levels, *sizes, **how)
    launch(maximum_tokens, (batch * blocks * count,), steps, levels, *sizes, BEFORE=before, **how)
    return m, top


running = operator(
    "running_maximum(Tensor log, Tensor gain, Tensor? own, Tensor? first, bool logs, bool before) -> (Tensor, Tensor)",
    _running,
)
