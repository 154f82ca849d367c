"""The adjoint of the fused scan: states again from checkpoints, cotangents backwards in time, gradients by the holes.

G_t = C_t E_t dy_t + A_{t+1} G_{t+1};  dA_t = G_t S_{t-1},  dB_t = G_t,  dC_t = S_t E_t dy_t,  dE_t = dy_t Σ C_t S_t,
dD_t = dy_t. Nothing is divided by A, so zero and negative decays are as good as any.
"""

import triton
import triton.language as tl

from dsf.kernels.triton.functions import sum_key, take
from dsf.kernels.triton.scan import _program, blend, channels, fetch, last_state, state_offset, walk


@triton.jit
def fetch_dy(dy, i_b, i_h, t0, end, t, p, p_ok, T, H, P):
    """The outputs' gradients of the tile at t0, float32."""
    base = dy + ((i_b * T + t0) * H + i_h) * P
    return tl.load(base + t * (H * P) + p, mask=(t0 + t < end) & p_ok, other=0.0).to(tl.float32)


@triton.jit
def pull_tile(
    tokens, dd, grads, held, sums, state, cotangent, i_b, i_h, t0, end, t, n, p, n_ok, p_ok, place, T, H, P,
    step: tl.constexpr, pull: tl.constexpr, N: tl.constexpr, K: tl.constexpr, NB: tl.constexpr,
    BP: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """One tile backwards: `state` enters it from the left, `cotangent` from the right; the holes store gradients."""
    t_ok = t0 + t < end
    at = (i_b, i_h, t0, t, n, p, t_ok, n_ok, p_ok, place, place * BP, T, H, P, N)
    a, b, c, e, d = step(tokens, held, at)
    a, b = blend(a, b, t, t_ok, K, NB, BP, K > 1)
    before, after, _ = walk(a, b, state, t, K)
    seen = before if BEFORE else after
    scaled = e * dd
    written = tl.broadcast_to(c * scaled, (K, NB, BP))
    g = a
    for j in tl.static_range(K):
        if not BEFORE:
            cotangent += take(written, t, K - 1 - j)
        g = tl.where(t == K - 1 - j, cotangent, g)
        cotangent = take(a, t, K - 1 - j) * cotangent
        if BEFORE:
            cotangent += take(written, t, K - 1 - j)
    if K > 1:
        g = tl.where(t_ok, g, 0.0)
    de = dd * sum_key(c * seen, n_ok)
    sums = pull(tokens, held, sums, grads, g * before, g, seen * scaled, de, dd, at)
    return cotangent, sums


@triton.jit(do_not_specialize=["T", "span"])
def gradients(
    args, grads, dy, saved, entering, initial, scratch, T, H, P, segments, span,
    setup: tl.constexpr, load: tl.constexpr, step: tl.constexpr, pull: tl.constexpr, zeros: tl.constexpr,
    finish: tl.constexpr, N: tl.constexpr, K: tl.constexpr, NB: tl.constexpr, BP: tl.constexpr, V: tl.constexpr,
    EVEN: tl.constexpr, BEFORE: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Gradients of one segment's tokens and of the Params' part in it.

    saved: the state before every M-th token. entering: [B, H, segments, N, P], the cotangent that reaches each
    segment's end, or None (zeros). initial: gradient of the first state, written by the first segment. scratch: room
    for M / K states a program.
    """
    place, segment, i_h, i_b = _program(P, segments, H, BP)
    n, p, n_ok, p_ok = channels(place, P, N, NB, BP, V, EVEN)
    ok = n_ok & p_ok
    t = tl.arange(0, K)[:, None, None]
    begin = segment * span
    end = tl.minimum(begin + span, T)
    row = i_b * H + i_h
    long = row * 0  # makes offsets 64-bit
    cotangent = tl.zeros((1, NB, BP), tl.float32)
    if entering is not None:
        cotangent += tl.load(entering + state_offset(row * segments + segment, n, p, P, N), mask=ok, other=0.0)
    held = setup(args, (i_b, i_h, 0, t, n, p, True, n_ok, p_ok, place, place * BP, T, H, P, N))
    sums = zeros(NB, BP)
    lane = tl.multiple_of(tl.arange(0, BP)[None, None, :], [1, 1, V])
    mine = scratch + tl.program_id(0).to(tl.int64) * (M // K * NB * BP) + n * BP + lane
    chunks = tl.cdiv(end - begin, M)
    for back in range(chunks):
        c0 = begin + (chunks - 1 - back) * M
        c1 = tl.minimum(c0 + M, end)
        state = tl.load(saved + state_offset(row * tl.cdiv(T, M) + c0 // M, n, p, P, N), mask=ok, other=0.0)
        tiles = tl.cdiv(c1 - c0, K)
        tokens = fetch(args, i_b, i_h, long + c0, end, t, n, p, n_ok, p_ok, place, T, H, P, load, N, BP)
        for j in range(tiles - 1):
            tl.store(mine + j * (NB * BP), state)
            t0 = long + c0 + j * K
            ahead = fetch(args, i_b, i_h, t0 + K, end, t, n, p, n_ok, p_ok, place, T, H, P, load, N, BP)
            at = (i_b, i_h, t0, t, n, p, t < K, n_ok, p_ok, place, place * BP, T, H, P, N)
            a, b, c, e, d = step(tokens, held, at)
            tokens = ahead
            a, b = blend(a, b, t, t < K, K, NB, BP, False)
            state = last_state(a, b, state, t, K)
        tl.store(mine + (tiles - 1) * (NB * BP), state)
        tl.debug_barrier()
        dd = fetch_dy(dy, i_b, i_h, long + c0 + (tiles - 1) * K, end, t, p, p_ok, T, H, P)
        for j in range(tiles):
            t0 = long + c0 + (tiles - 1 - j) * K
            state = tl.load(mine + (tiles - 1 - j) * (NB * BP))
            back_to = tl.maximum(t0 - K, long + c0)
            ahead = fetch(args, i_b, i_h, back_to, end, t, n, p, n_ok, p_ok, place, T, H, P, load, N, BP)
            dd_ahead = fetch_dy(dy, i_b, i_h, back_to, end, t, p, p_ok, T, H, P)
            cotangent, sums = pull_tile(
                tokens, dd, grads, held, sums, state, cotangent, i_b, i_h, t0, end, t, n, p,
                n_ok, p_ok, place, T, H, P, step, pull, N, K, NB, BP, BEFORE,
            )  # fmt: skip
            tokens = ahead
            dd = dd_ahead
        tl.debug_barrier()
    finish(
        args, grads, sums, segment, segments, (i_b, i_h, 0, t, n, p, True, n_ok, p_ok, place, place * BP, T, H, P, N)
    )
    if segment == 0:
        tl.store(initial + state_offset(row, n, p, P, N), cotangent, mask=ok)
