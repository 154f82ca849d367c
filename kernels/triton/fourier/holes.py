"""What the impulse response's kernels read and store where printed expressions made its numbers (numbers.py)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _made(args, lane, channel, k):
    """The addresses of the first number, and how far the next one lies. args: address, numbers, H, K, P."""
    made, _, heads, K, P = args
    return made + (lane * K + k) * P + channel, heads * K * P


@triton.jit
def read_made_pairs(args, lane, channel, k, inside):
    """The numbers of pairs from [6 or 8, H, K, P]. args: as those of _made."""
    at, plane = _made(args, lane, channel, k)
    rate, turn = tl.load(at, mask=inside, other=0.0), tl.load(at + plane, mask=inside, other=0.0)
    c0, c1 = tl.load(at + 2 * plane, mask=inside, other=0.0), tl.load(at + 3 * plane, mask=inside, other=0.0)
    b0, b1 = tl.load(at + 4 * plane, mask=inside, other=0.0), tl.load(at + 5 * plane, mask=inside, other=0.0)
    more = inside & (args[1] > 6)
    b2, b3 = tl.load(at + 6 * plane, mask=more, other=0.0), tl.load(at + 7 * plane, mask=more, other=0.0)
    return rate, turn, c0, c1, b0, b1, b2, b3


@triton.jit
def read_made_entries(args, lane, channel, k, inside):
    """The numbers of entries from [3, H, K, P]. args: as those of _made."""
    at, plane = _made(args, lane, channel, k)
    rate, c0 = tl.load(at, mask=inside, other=0.0), tl.load(at + plane, mask=inside, other=0.0)
    b0 = tl.load(at + 2 * plane, mask=inside, other=0.0)
    return rate, rate, c0, c0, b0, b0, b0, b0


@triton.jit
def read_state_pairs(args, lane, channel, k, inside):
    """As read_made_pairs, with states [B, H, 2 K, P] in place of B. args: those, and the address; lane: of B · H."""
    made, count, heads, K, P, state = args
    found = read_made_pairs((made, count, heads, K, P), lane % heads, channel, k, inside)
    at = state + (lane * 2 * K + 2 * k) * P + channel
    s0, s1 = tl.load(at, mask=inside, other=0.0), tl.load(at + P, mask=inside, other=0.0)
    return found[0], found[1], found[2], found[3], s0, s1, s0, s1


@triton.jit
def read_state_entries(args, lane, channel, k, inside):
    """As read_made_entries, with states [B, H, K, P] in place of B. args, lane: as those of read_state_pairs."""
    made, count, heads, K, P, state = args
    found = read_made_entries((made, count, heads, K, P), lane % heads, channel, k, inside)
    s0 = tl.load(state + (lane * K + k) * P + channel, mask=inside, other=0.0)
    return found[0], found[1], found[2], found[3], s0, s0, s0, s0


@triton.jit
def pull_made_pairs(grads, at, slopes):
    """The gradients [1 or 2, 6 or 8, H, K, P] of what read_made_pairs reads; a row for each input of a pair."""
    lane, channel, k, inside, half, heads, P, K = at
    made, count = grads
    plane = heads * K * P
    to = made + half * count * plane + (lane * K + k) * P + channel
    for i in tl.static_range(6):
        tl.store(to + i * plane, slopes[i], mask=inside)
    for i in tl.static_range(6, 8):
        tl.store(to + i * plane, slopes[i], mask=inside & (count > 6))


@triton.jit
def pull_made_entries(grads, at, slopes):
    """The gradients [1, 3, H, K, P] of what read_made_entries reads."""
    lane, channel, k, inside, _, heads, P, K = at
    made, _ = grads
    plane = heads * K * P
    to = made + (lane * K + k) * P + channel
    for i in tl.static_range(3):
        tl.store(to + i * plane, slopes[2 * i], mask=inside)
