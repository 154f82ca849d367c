"""Tiles [tokens, N, channels] of printed kernels: sums over their axes, loads, stores, and splitting into tokens.

Every function runs compiled and in Triton's interpreter.
"""

import triton
import triton.language as tl

from dsf.kernels.triton.functions import INTERPRETED


@triton.jit
def sum_key(x, n_ok):
    """Sum over the Key axis of a tile without padding: [K, N, P] -> [K, 1, P]. For a vector state: x itself."""
    return x if n_ok.shape[1] == 1 else tl.sum(tl.where(n_ok, x, 0.0), 1, keep_dims=True)


@triton.jit
def max_key(x, n_ok):
    """Largest entry over the Key axis of a tile without padding: [K, N, P] -> [K, 1, P]."""
    return tl.max(tl.where(n_ok, x, -1e30), 1, keep_dims=True)


@triton.jit
def sum_value(x, p_ok):
    """Sum over the program's channels without padding: [K, N, P] -> [K, N, 1]."""
    return tl.sum(tl.where(p_ok, x, 0.0), 2, keep_dims=True)


@triton.jit
def sum_time(x, n):
    """Sum over the tokens of a thread: [K, N, P] -> [1, N, P]; for a vector state one sum for every run."""
    return tl.sum(x, 1 if x.shape[1] > n.shape[1] else 0, keep_dims=True)


@triton.jit
def of_tokens(x, t_ok, t):
    """x, 0 for tokens past the end, which are computed from zeros and may be NaN."""
    return x if t.shape[0] == 1 else tl.where(t_ok, x, 0.0)


@triton.jit
def halves(x):
    """The first and the second half of the rows: [K, N, P] -> two [K, N / 2, P]."""
    pair = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2, x.shape[2]))
    return tl.split(tl.permute(pair, (0, 2, 3, 1)))


@triton.jit
def swap(x, lane, bit: tl.constexpr):
    """Every lane's value from the lane whose number differs in `bit`."""
    return tl.gather(x, tl.broadcast_to(lane ^ bit, x.shape), 2)


@triton.jit
def fold(x, lane, bit: tl.constexpr):
    """One step of sums over lanes: lanes with `bit` keep the second half of the rows, the others the first half.

    So n sums over 32 lanes take n shuffles, not 5 n.
    """
    if x.shape[1] > 1:
        low, high = halves(x)
        upper = (lane & bit) != 0
        kept = tl.where(upper, high, low)
        given = tl.where(upper, low, high)
    else:
        kept = x
        given = x
    return kept + swap(given, lane, bit)


@triton.jit
def store_sums(pointers, x, n, p, p_ok, ok, N: tl.constexpr):
    """Store Σ_p x[k, n, p] at pointers[k] + n, each sum by one lane."""
    K: tl.constexpr = x.shape[0]
    NB: tl.constexpr = n.shape[1]
    BP: tl.constexpr = p.shape[2]
    L: tl.constexpr = BP if BP < 32 else 32
    if x.shape[1] > NB:  # runs of a vector state
        tl.store(pointers, sum_value(x, p_ok).to(pointers.dtype.element_ty), mask=ok)
    else:
        x = tl.where(p_ok, tl.broadcast_to(x, (K, NB, BP)), 0.0)
        if BP > L:
            x = tl.sum(tl.reshape(x, (K, NB, BP // L, L)), 2)
        lane = tl.arange(0, L)[None, None, :]
        for i in tl.static_range(5):
            if (16 >> i) < L:
                x = fold(x, lane, 16 >> i)
        R: tl.constexpr = x.shape[1]
        same: tl.constexpr = L * R // NB  # neighbouring lanes that hold the same sum
        row = lane // same * R + tl.arange(0, R)[None, :, None]
        tl.store(pointers + row, x.to(pointers.dtype.element_ty), mask=ok & (row < N) & (lane % same == 0))


@triton.jit
def widened(x):
    """x [1, 1, channels] as float32. Two neighbouring bfloat16 channels take two instructions instead of three."""
    if INTERPRETED or x.dtype != tl.bfloat16 or x.shape[2] < 64:
        found = x.to(tl.float32)
    else:
        found = tl.inline_asm_elementwise(
            "{ .reg .b32 x; mov.b32 x, $2; shl.b32 $0, x, 16; and.b32 $1, x, 0xffff0000; }", "=r,=r,r", [x],
            dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return found


@triton.jit
def load_run(pointer, L: tl.constexpr):
    """L consecutive float32 from an address [1, 1, 1], each in all lanes; loaded as groups of 16 aligned bytes."""
    found = ()
    if INTERPRETED or L % 4 > 0:
        for i in tl.static_range(L):
            x = tl.load(pointer + i)
            if L % 4 == 0:  # a GPU would refuse an address that is not aligned
                x = tl.where(pointer.to(tl.int64) % 16 == 0, x, float("nan"))
            found = found + (x,)  # type: ignore[assignment]  # noqa: RUF005
    else:
        place = pointer.to(tl.int64)
        for i in tl.static_range(L // 4):
            found = found + tl.inline_asm_elementwise(
                "ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [place + i * 16],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
    return found


@triton.jit
def prefetch(pointers):
    """Prefetch these addresses into the L1."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@triton.jit
def prefetch_run(pointer, stride, N, L: tl.constexpr):
    """Prefetch L consecutive numbers of each of N entries, which are `stride` apart."""
    EACH: tl.constexpr = (L + 7) // 8
    for i in range((N * EACH + 31) // 32):
        j = i * 32 + tl.arange(0, 32)[None, None, :]
        prefetch(pointer + tl.minimum(j // EACH, N - 1) * stride + j % EACH * 8)


@triton.jit
def prefetch_rows(pointer, stride, near, edge, P, room, L: tl.constexpr, BP: tl.constexpr):
    """Prefetch up to L rows of a program's channels, `room` of which exist."""
    WIDE: tl.constexpr = 256 // pointer.dtype.element_ty.primitive_bitwidth
    EACH: tl.constexpr = (BP + WIDE - 1) // WIDE
    for i in tl.static_range((L * EACH + 31) // 32):
        j = i * 32 + tl.arange(0, 32)[None, None, :]
        channel = tl.minimum(j % EACH * WIDE, P - 1 - edge)
        prefetch(pointer + tl.minimum(j // EACH, room - 1) * stride + channel * near)


@triton.jit
def to_lanes(pointers, p):
    """The same pointers for every channel p, so that all lanes access one address.

    The hints only set the layout: lanes along the channels, one element wide (divisibility 1).
    """
    tile = tl.broadcast_to(pointers, (pointers.shape[0], pointers.shape[1], p.shape[2]))
    return tl.max_contiguous(tl.multiple_of(tile, [1, 1, 1]), [1, 1, 2])


@triton.jit
def take(x, t, k: tl.constexpr, AXIS: tl.constexpr = 0):
    """Token k of a tile, whose tokens are along AXIS.

    A masked sum with -0, the exact neutral element of addition, compiles to a selection of registers.
    """
    zero = tl.zeros(x.shape, tl.float32) * -1.0  # a constant -0.0 would become +0.0
    return tl.sum(tl.where(t == k, x, zero), AXIS, keep_dims=True)


@triton.jit
def store(pointers, value, mask):
    """Store a value, broadcast to the pointers and in their dtype."""
    if INTERPRETED:  # its store refuses broadcast arrays
        pointers = pointers + tl.zeros(pointers.shape, tl.int32)
        value = value + tl.zeros(pointers.shape, tl.float32)
    tl.store(pointers, tl.broadcast_to(value, pointers.shape).to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def tokens_of(x):
    """The tokens of a tile [L, N, P] as L tiles [1, N, P]; only a selection of registers."""
    found = (x,)
    for _ in tl.static_range(5):
        if found[0].shape[0] > 1:
            pieces = ()
            for j in tl.static_range(len(found)):
                y = found[j]
                pair = tl.reshape(y, (2, y.shape[0] // 2, y.shape[1], y.shape[2]))
                low, high = tl.split(tl.permute(pair, (1, 2, 3, 0)))
                pieces = pieces + (low, high)  # type: ignore[assignment]  # noqa: RUF005
            found = pieces  # type: ignore[assignment]
    return found


@triton.jit
def tile_of(found):
    """L tokens [1, N, P] as one tile [L, N, P]."""
    for _ in tl.static_range(5):
        if len(found) > 1:
            pieces = ()
            for j in tl.static_range(len(found) // 2):
                y = found[2 * j]
                pair = tl.permute(tl.join(y, found[2 * j + 1]), (3, 0, 1, 2))
                pieces = pieces + (tl.reshape(pair, (2 * y.shape[0], y.shape[1], y.shape[2])),)  # type: ignore[assignment]  # noqa: RUF005
            found = pieces
    return found[0]


@triton.jit
def row_of(batch, t0, T, batch_stride, stride):
    """The offset of token t0; batch_stride None: sequences are contiguous.

    Inputs of equal strides then have equal offsets, which the compiler computes once.
    """
    if batch_stride is None:
        found = (batch * T + t0) * stride
    else:
        found = batch * batch_stride + t0 * stride
    return found


@triton.jit
def fixed(pointers, offsets):
    """pointers + offsets, hidden from the compiler, for tokens in registers.

    Otherwise it would keep a precomputed offset for each token, which takes too many registers. Lanes are along the
    channels, as in to_lanes.
    """
    if not INTERPRETED:
        places = tl.inline_asm_elementwise(
            "mov.b64 $0, $1;", "=l,l", [pointers.to(tl.int64)], dtype=tl.int64, is_pure=True, pack=1
        )
        pointers = places.to(pointers.dtype)
    return tl.max_contiguous(tl.multiple_of(pointers + offsets, [1, 1, 1]), [1, 1, 2])


@triton.jit
def in_order(pointers):
    """The same pointers, with hints that give their accesses the layout of all other tiles, so that none is converted.

    The layout: lanes along the channels, then entries, then tokens.
    """
    return tl.max_contiguous(tl.multiple_of(pointers, [1, 1, 1]), [1, 2, 4])
