"""Tiles [1, 1, channels] with one channel a lane: numbers distributed to all lanes, and sums over lanes.

For kernels by entry (dsf.kernels.triton.scan.entries), in programs of one warp.
"""

import triton
import triton.language as tl

from dsf.kernels.triton.functions import INTERPRETED
from dsf.kernels.triton.tile import in_order, swap, tokens_of

# Truncation to 11 bits makes a value smaller by 0.00035 of itself on average; sums of such values are scaled by this.
CUT = tl.constexpr(1.00035)


@triton.jit
def swap_lanes(x, lane, bit: tl.constexpr):
    """`swap` of a tile [1, 1, channels] with a channel a lane, whose partner needs no register."""
    if INTERPRETED or x.shape[2] < 32:
        found = swap(x, lane, bit)
    else:
        found = tl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r", [x, lane * 0 + bit], dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    return found


@triton.jit
def load_lanes(pointer, p, L: tl.constexpr):
    """L consecutive numbers, one a lane, so that they take one register until run_of distributes them."""
    lane = tl.arange(0, p.shape[2])[None, None, :]
    return tl.load(in_order(pointer + lane % L))


@triton.jit
def run_of(x, L: tl.constexpr, SHORT: tl.constexpr):
    """The numbers from load_lanes as L tiles [1, 1, channels], each with one number in all lanes.

    SHORT: numbers of at most 11 bits, which tensor cores distribute exactly and without shuffles, four a product: the
    lanes' numbers are a matrix [4, 8] whose even columns hold the first four tokens, the odd ones the others.
    """
    lane = tl.arange(0, x.shape[2])[None, None, :]
    if SHORT and not INTERPRETED and L == 8 and x.shape[2] == 32:
        zero = tl.zeros(x.shape, tl.float32)
        t0, t4, t1, t5 = _four_of(x, lane, zero, 0)
        t2, t6, t3, t7 = _four_of(x, lane, zero, 2)
        found = (t0, t1, t2, t3, t4, t5, t6, t7)
    else:
        found = ()  # type: ignore[assignment]
        for i in tl.static_range(L):
            found = found + (tl.gather(x, lane * 0 + i, 2),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _four_of(x, lane, zero, i: tl.constexpr):
    """Tokens i, i + 4, i + 1, i + 5 of run_of, by rows of a matrix that select one (first eight) or the next one."""
    return tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $7, $7, $7};",
        "=r,=r,=r,=r,r,r,r,r", [tl.where(lane % 4 == i, 1.0, 0.0), tl.where(lane % 4 == i + 1, 1.0, 0.0), x, zero],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def sum_lanes(values, lane, steps: tl.constexpr = 5):
    """n sums over the lanes in n shuffles. Afterwards 32 / n neighbouring lanes share a sum, or a lane has n / 32.

    Every step halves the values: lanes with the bit keep the second half, the others the first.
    """
    for i in tl.static_range(steps):
        if (16 >> i) < lane.shape[2]:
            upper = (lane & (16 >> i)) != 0
            kept = ()
            if len(values) > 1:
                for j in tl.static_range(len(values) // 2):
                    low = values[j]
                    high = values[len(values) // 2 + j]
                    given = swap_lanes(tl.where(upper, low, high), lane, 16 >> i)
                    kept = kept + (tl.where(upper, high, low) + given,)  # type: ignore[assignment]  # noqa: RUF005
            else:
                kept = (values[0] + swap_lanes(values[0], lane, 16 >> i),)  # type: ignore[assignment]
            values = kept
    return values


@triton.jit
def sum_quads(values, lane):
    """Sums of up to 16 values over eight groups of lanes; lane i gets those of values 4 (i % 4) to 4 (i % 4) + 3.

    By tensor cores, which round the values to 11 bits: four values are a matrix [16, 8], multiplied by one that brings
    each value to a separate column.
    """
    zero = tl.zeros(lane.shape, tl.float32)
    sums = (zero, zero, zero, zero)
    for j in tl.static_range(len(values) // 4):
        if INTERPRETED:
            added = ()
            for i in tl.static_range(4):
                x = (values[4 * j + i].to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
                x += swap(x, lane, 1)
                # The product multiplies two of the four values of a row by zeros, which gives NaN if one is not finite.
                nothing = 0.0 * (values[4 * j + i // 2 * 2] + values[4 * j + i // 2 * 2 + 1])
                nothing += swap(nothing, lane, 1)
                nothing += swap(nothing, lane, 2)
                added = added + (tl.where(lane % 4 == j, x + swap(x, lane, 2), sums[i]) + nothing,)  # type: ignore[assignment]  # noqa: RUF005
            sums = added  # type: ignore[assignment]
        else:
            sums = tl.inline_asm_elementwise(
                "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                "{$0, $1, $2, $3}, {$4, $6, $5, $7}, {$8, $9}, {$10, $11, $12, $13};",
                "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
                [values[4 * j], values[4 * j + 1], values[4 * j + 2], values[4 * j + 3],
                 tl.where(lane // 4 == 2 * j, 1.0, 0.0), tl.where(lane // 4 == 2 * j + 1, 1.0, 0.0),
                 sums[0], sums[1], sums[2], sums[3]],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
    return sums


@triton.jit
def _addends(values, p, p_ok, edge):
    """Tiles [1, 1, channels] to be summed, added up to tiles with one channel a lane."""
    BP: tl.constexpr = p.shape[2]
    LANES: tl.constexpr = BP if BP < 32 else 32
    found = ()
    for i in tl.static_range(len(values)):
        ok = p_ok if values[i].shape[2] > 1 else p == edge
        x = tl.where(ok, values[i], 0.0)
        if BP > LANES:
            x = tl.sum(tl.reshape(x, (1, 1, LANES, BP // LANES)), 3)
        found = found + (x,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def waiting(COUNT: tl.constexpr, BP: tl.constexpr, ROUGH: tl.constexpr):
    """Zeros in the form of the result of begin_run for COUNT tiles."""
    LANES: tl.constexpr = BP if BP < 32 else 32
    QUADS: tl.constexpr = ROUGH and LANES == 32 and COUNT % 4 == 0 and COUNT <= 16
    found = ()
    for _ in tl.static_range(4 if QUADS else COUNT // LANES if COUNT > LANES else 1):
        found = found + (tl.zeros((1, 1, LANES), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def begin_run(values, p, p_ok, edge, ROUGH: tl.constexpr):
    """First part of the sums over the channels p of a tuple of tiles [1, 1, channels], which end_run completes.

    ROUGH: values are rounded to 11 bits.
    """
    LANES: tl.constexpr = p.shape[2] if p.shape[2] < 32 else 32
    found = _addends(values, p, p_ok, edge)
    lane = tl.arange(0, LANES)[None, None, :]
    if ROUGH and LANES == 32 and len(values) % 4 == 0 and len(values) <= 16:
        found = sum_quads(found, lane)
    else:
        found = sum_lanes(found, lane)
    return found


@triton.jit
def _index(COUNT: tl.constexpr, BP: tl.constexpr, ROUGH: tl.constexpr):
    """Which of COUNT sums each lane has after begin_run, and whether it is the lane that stores it."""
    LANES: tl.constexpr = BP if BP < 32 else 32
    QUADS: tl.constexpr = ROUGH and LANES == 32 and COUNT % 4 == 0 and COUNT <= 16
    EACH: tl.constexpr = COUNT // LANES if COUNT > LANES else 1
    SAME: tl.constexpr = LANES * EACH // COUNT
    lane = tl.arange(0, LANES)[None, None, :]
    if QUADS:
        found = (lane % 4 * 4 + lane // 8,)
        chosen = (lane % 4 * 4 < COUNT) & (lane & 4 == 0)
    else:
        found = ()  # type: ignore[assignment]
        for i in tl.static_range(EACH):
            found = found + (lane // SAME * EACH + i,)  # type: ignore[assignment]  # noqa: RUF005
        chosen = lane % SAME == 0
    return found, chosen


@triton.jit
def places(pointer, COUNT: tl.constexpr, BP: tl.constexpr, ROUGH: tl.constexpr, stride=1, other=None):
    """The addresses of COUNT sums for end_run, `stride` apart; with `other` the second half is stored from there."""
    index, _ = _index(COUNT, BP, ROUGH)
    found = ()
    for i in tl.static_range(len(index)):
        place = pointer + index[i] * stride
        if other is not None:
            place = tl.where(index[i] < COUNT // 2, place, other + (index[i] - COUNT // 2) * stride)
        found = found + (in_order(place),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def further(pointers, step):
    """The pointers plus `step`."""
    found = ()
    for i in tl.static_range(len(pointers)):
        found = found + (pointers[i] + step,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def end_run(pointers, sums, ok, COUNT: tl.constexpr, BP: tl.constexpr, ROUGH: tl.constexpr):
    """Complete and store the sums of begin_run of COUNT tiles at these `places`."""
    _, chosen = _index(COUNT, BP, ROUGH)
    found = sums
    if len(sums) != len(pointers):
        one = sum_lanes(sums, tl.arange(0, 32)[None, None, :], 3)
        found = (one[0] * CUT,)
    for i in tl.static_range(len(found)):
        tl.store(pointers[i], found[i].to(pointers[i].dtype.element_ty), mask=chosen & ok)


@triton.jit
def store_run(pointer, values, p, p_ok, edge, ROUGH: tl.constexpr, stride=1):
    """Store the sums over the channels p of a tuple of tiles [1, 1, channels] at addresses `stride` apart.

    ROUGH: values are rounded to 11 bits.
    """
    sums = begin_run(values, p, p_ok, edge, ROUGH)
    there = places(pointer, len(values), p.shape[2], ROUGH, stride)
    end_run(there, sums, True, len(values), p.shape[2], ROUGH)


@triton.jit
def store_tokens(pointer, stride, tile, p, p_ok, edge, ROUGH: tl.constexpr):
    """store_run for a tile [L, 1, channels], at addresses `stride` apart."""
    store_run(pointer, tokens_of(tile), p, p_ok, edge, ROUGH, stride)


@triton.jit
def claim(zero, NUMBERS: tl.constexpr):
    """The address of shared memory for NUMBERS float32, private to a program. zero: a scalar 0.

    Triton has no shared memory that a loop can index, so a variable is declared in PTX. With a tile instead of a scalar
    it would be declared once for every layout of the tile.
    """
    return tl.inline_asm_elementwise(
        f"{{ .shared .align 128 .b8 dsf_rows[{4 * NUMBERS}]; mov.u32 $0, dsf_rows; }}", "=r,r", [zero], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def apart(row):
    """The claimed address, from that of a lane's number in its first 128 bytes.

    ptxas cannot see that it is the same in all lanes. Otherwise it would keep it in a uniform register and copy it to
    an ordinary one at every use.
    """
    return row & -128


@triton.jit
def behind(row, numbers, SHARED: tl.constexpr):
    """A pointer, or an address in shared memory (in bytes), plus `numbers` float32."""
    return row + (numbers * 4 if SHARED else numbers)


@triton.jit
def get(row, k, BP: tl.constexpr, SHARED: tl.constexpr):
    """Number k of every channel from a row [k, BP], [1, 1, BP]; SHARED: the row is in shared memory."""
    if SHARED:
        found = tl.inline_asm_elementwise(
            "ld.shared.f32 $0, [$1];", "=r,r", [row + k * (4 * BP)], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        found = tl.load(in_order(row + k * BP))
    return found


@triton.jit
def put(row, k, x, BP: tl.constexpr, SHARED: tl.constexpr):
    """Store number k of every channel in a row (see `get`)."""
    x = tl.broadcast_to(x, (1, 1, BP))
    if SHARED:
        tl.inline_asm_elementwise(
            "st.shared.f32 [$1], $2; mov.u32 $0, 0;", "=r,r,r", [row + k * (4 * BP), x], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        tl.store(in_order(row + k * BP), x)


@triton.jit
def from_shelf(shelf, first, L: tl.constexpr):
    """L numbers from `first` on in shared memory, each in all lanes, as tiles [1, 1, channels]."""
    found = ()
    for i in tl.static_range(L // 4):
        found = found + tl.inline_asm_elementwise(
            "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [shelf + (first + 4 * i) * 4],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
    return found
